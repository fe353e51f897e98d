"""Which run a checkpoint belongs to, warnings about several runs in one directory, and where the best checkpoint is."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from paddleformers_fc.distributed.channel import LocalChannel
from paddleformers_fc.storage.manifest import Branch, Manifest, RunRecord, read_manifest, write_manifest
from paddleformers_fc.trainer.resume import Saved, continue_or_branch, locate_best, new_run, new_run_warning, saved_in
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


AFTER_BRANCH = [*saved(3), *saved(4, 5, run=B), *saved(6)]


@pytest.mark.parametrize(
    ("step", "own", "others", "named", "branches", "warnings"),
    [
        pytest.param(6, A, saved(3, 6), False, None, [], id="a restart continues"),
        pytest.param(6, A, saved(3, 6), True, None, [], id="a restart from the named last one continues"),
        pytest.param(5, B, [*saved(1, 3), *saved(4, 5, run=B)], False, None, [], id="a restart of a branch continues"),
        pytest.param(3, A, saved(3, 6), True, [Branch("A", 3)], ["step 3", "checkpoint-6", "run A"], id="a branch"),
        pytest.param(
            *(3, UNKNOWN, saved(3, 6, run=UNKNOWN), True, [Branch("", 3)]),
            ["step 3", "checkpoint-6", "a run without an id"],
            id="a branch of an unknown run",
        ),
        pytest.param(
            *(4, B, AFTER_BRANCH[:3], True, [Branch("A", 3), Branch("B", 4)]),
            ["step 4", "checkpoint-5"],
            id="a branch of a branch keeps the runs before it",
        ),
        pytest.param(
            *(6, A, AFTER_BRANCH, False, None),
            ["checkpoint-4, checkpoint-5 of run B (from step 3 of A) next to checkpoint-6 of run A"],
            id="the run beside its branch",
        ),
        pytest.param(
            *(7, B, [*AFTER_BRANCH, Saved(7, B)], False, None),
            ["checkpoint-6 of run A next to checkpoint-7 of run B"],
            id="the branch beside its run",
        ),
        pytest.param(3, A, [], True, [Branch("A", 3)], [], id="another output directory"),
        pytest.param(3, A, saved(3, 6), False, [Branch("A", 3)], [], id="newer ones that are skipped"),
    ],
)
def test_a_resume_continues_a_run_or_branches_from_it(
    step: int, own: RunRecord, others: list[Saved], named: bool, branches: list[Branch] | None, warnings: list[str]
) -> None:
    run, warning = continue_or_branch(manifest(step, own), others, here=bool(others), named=named)
    if branches is None:
        assert run == own
    else:
        assert run.branches == branches
        assert run.id not in (own.id, "")
        assert not warning or f"run {run.id} " in warning
    assert bool(warning) == bool(warnings)
    assert [text for text in warnings if text not in warning] == []


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


def test_a_directory_that_is_no_checkpoint_of_its_step_belongs_to_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    make_checkpoint(tmp_path, 3).rename(tmp_path / "checkpoint-8")
    make_checkpoint(tmp_path, 4)
    assert saved_in({"": tmp_path}, LocalChannel()) == saved(4, run=UNKNOWN)
    assert saved_in({"": tmp_path / "absent"}, LocalChannel()) == []


# ---- The best checkpoint of a resumed run, on ranks that do not all see it.


@pytest.mark.parametrize("seers", [{0}, {2}, {0, 1, 2}])
def test_a_best_checkpoint_is_known_to_all_ranks_if_one_of_them_sees_it(tmp_path: Path, seers: set[int]) -> None:
    places = [tmp_path / f"disk-{rank}" for rank in range(3)]
    for rank in seers:
        places[rank].mkdir()
        make_checkpoint(places[rank], 3)
    best = [str(place / "checkpoint-3") for place in places]
    found = succeed(3, lambda one: locate_best(best[one.rank], places[one.rank] / "checkpoint-6", one))
    assert found == best


def test_the_best_checkpoint_is_found_next_to_the_resumed_one_and_at_its_recorded_path(tmp_path: Path) -> None:
    for name in ("moved", "before"):
        (tmp_path / name).mkdir()
    make_checkpoint(tmp_path / "moved", 3)
    resumed = tmp_path / "moved" / "checkpoint-6"
    for there, expected in ((False, "moved"), (True, "before")):
        if there:
            make_checkpoint(tmp_path / "before", 3)
        found = succeed(2, lambda one: locate_best(str(tmp_path / "before" / "checkpoint-3"), resumed, one))
        assert found == [str(tmp_path / expected / "checkpoint-3")] * 2


def test_a_best_checkpoint_that_no_rank_sees_is_missing(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    gone = str(tmp_path / "checkpoint-3")
    assert succeed(2, lambda one: locate_best(gone, tmp_path / "checkpoint-6", one)) == [None, None]
