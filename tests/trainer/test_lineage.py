"""Which run a checkpoint belongs to, and warnings about several runs in one output directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from paddleformers_fc.distributed.channel import LocalChannel
from paddleformers_fc.storage.manifest import Branch, Manifest, RunRecord, read_manifest, write_manifest
from paddleformers_fc.trainer.resume import Saved, continue_or_branch, new_run, new_run_warning, saved_in
from tests.execute.simulated import succeed
from tests.trainer.test_rotation import make_checkpoint

A, UNKNOWN = RunRecord("A", []), RunRecord("", [])
B = RunRecord("B", [Branch("A", 3)])


def manifest(step: int, run: RunRecord) -> Manifest:
    fields = {"consumed_samples": 0, "world_size": 1, "parallel": {}, "family": "", "files": []}
    return Manifest(written_by="test", step=step, saved_by=run, **fields)


def saved(*steps: int, run: RunRecord = A) -> list[Saved]:
    return [Saved(step, run) for step in steps]


def test_two_runs_have_two_ids() -> None:
    assert new_run().id != new_run().id


def test_a_restart_from_the_last_checkpoint_continues_the_run() -> None:
    assert continue_or_branch(manifest(6, A), saved(3, 6), here=True, named=False) == (A, "")
    assert continue_or_branch(manifest(6, A), saved(3, 6), here=True, named=True) == (A, "")
    assert continue_or_branch(manifest(5, B), [*saved(1, 3), *saved(4, 5, run=B)], here=True, named=False) == (B, "")


@pytest.mark.parametrize("own", [A, UNKNOWN])
def test_a_branch_names_both_runs(own: RunRecord) -> None:
    run, warning = continue_or_branch(manifest(3, own), saved(3, 6, run=own), here=True, named=True)
    assert run.branches == [Branch(own.id, 3)]
    assert run.id not in (own.id, "")
    assert f"run {run.id} " in warning
    assert "step 3" in warning
    assert "checkpoint-6" in warning
    assert (f"run {own.id}" if own.id else "a run without an id") in warning


def test_a_branch_of_a_branch_keeps_the_runs_before_it() -> None:
    run, _ = continue_or_branch(manifest(4, B), [*saved(3), *saved(4, 5, run=B)], here=True, named=True)
    assert run.branches == [Branch("A", 3), Branch("B", 4)]


def test_the_next_automatic_resume_names_both_runs_whichever_is_newest() -> None:
    both = [*saved(3, 6), *saved(4, 5, run=B)]
    run, warning = continue_or_branch(manifest(6, A), sorted(both, key=lambda one: one.step), here=True, named=False)
    assert run == A
    assert "checkpoint-4, checkpoint-5 of run B (from step 3 of A) next to checkpoint-6 of run A" in warning
    run, warning = continue_or_branch(manifest(7, B), [*both, Saved(7, B)], here=True, named=False)
    assert run == B
    assert "checkpoint-6 of run A next to checkpoint-7 of run B" in warning


def test_another_output_directory_is_another_run_without_a_warning() -> None:
    run, warning = continue_or_branch(manifest(3, A), [], here=False, named=True)
    assert run.branches == [Branch("A", 3)]
    assert warning == ""


def test_newer_ones_that_an_automatic_resume_skips_are_another_run() -> None:
    run, warning = continue_or_branch(manifest(3, A), saved(3, 6), here=True, named=False)
    assert run.branches == [Branch("A", 3)]
    assert warning == ""


def test_a_run_from_the_beginning_warns_of_other_runs_in_its_directory(tmp_path: Path) -> None:
    assert new_run_warning(A, [], tmp_path) == ""
    assert "checkpoint-6 of run B" in new_run_warning(A, saved(4, 6, run=B), tmp_path)


def test_the_checkpoints_of_all_disks_are_known_to_every_rank(tmp_path: Path) -> None:
    disks = [tmp_path / "first", tmp_path / "second"]
    for disk, step in zip(disks, (3, 6), strict=True):
        disk.mkdir()
        path = make_checkpoint(disk, step)
        write_manifest(path, replace(read_manifest(path), saved_by=A))
    found = succeed(2, lambda channel: saved_in({"": disks[channel.rank]}, channel))
    assert found == [saved(3, 6)] * 2


def test_what_is_no_checkpoint_of_its_step_belongs_to_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    make_checkpoint(tmp_path, 3).rename(tmp_path / "checkpoint-8")
    make_checkpoint(tmp_path, 4)
    assert saved_in({"": tmp_path}, LocalChannel()) == saved(4, run=UNKNOWN)
    assert saved_in({"": tmp_path / "absent"}, LocalChannel()) == []
