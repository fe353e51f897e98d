"""What ``resume_from_checkpoint: true`` resumes where checkpoints are damaged, and where runs have branched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, MismatchError
from paddleformers_fc.storage.commit import staging_directory
from paddleformers_fc.storage.manifest import read_manifest
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.sealing import reseal
from tests.harness.tiny import DP2, SINGLE, MatrixLayout
from tests.trainer.jobs import flex_trainer, logged
from tests.trainer.test_trainer import JOBS, settings
from verification.forkserver import ForkServer, JobResult

Damage = Callable[[Path], None]
WEIGHTS = "model_state/rank-00000.safetensors"


def train(
    ranks: ForkServer,
    output_dir: Path,
    layout: MatrixLayout = SINGLE,
    resume: Path | bool | None = None,
    **arguments: Any,
) -> JobResult:
    given = settings(layout, output_dir, resume, **{"max_steps": 3, "save_steps": 1, **arguments})
    return ranks.attempt(f"{JOBS}:run", layout.nproc, given)


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of two ranks."""
    output_dir = tmp_path_factory.mktemp("saved")
    assert train(ranks, output_dir, DP2).ok
    return output_dir


def flip(name: str, at: int) -> Damage:
    """Change a byte of a file; its length stays."""

    def damage(checkpoint: Path) -> None:
        data = bytearray((checkpoint / name).read_bytes())
        data[at] ^= 1
        (checkpoint / name).write_bytes(data)

    return damage


DAMAGES: dict[str, tuple[str, dict[str, int]]] = {
    "a header": ("size", {WEIGHTS: 9}),
    "the state of the Trainer": ("size", {"trainer/state.json": 20}),
    "a weight and an optimizer state": ("full", {WEIGHTS: -1, "optimizer_state/rank-00001.safetensors": -1}),
}
"""The level of verification, and the byte that changes in each file."""


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_by_every_rank_and_refused_where_it_is_named(
    ranks: ForkServer, saved: Path, tmp_path: Path, what: str
) -> None:
    level, changed = DAMAGES[what]
    output_dir = tmp_path / "run"
    shutil.copytree(saved, output_dir)
    for name, at in changed.items():
        flip(name, at)(output_dir / "checkpoint-3")
    given: dict[str, Any] = {"layout": DP2, "flex_verify": level, "save_steps": 100}
    refused = train(ranks, output_dir, resume=output_dir / "checkpoint-3", **given)
    assert not refused.ok
    text = refused.logs[0].read_text()
    assert [name for name in changed if name not in text] == []
    resumed = train(ranks, output_dir, resume=True, **given)
    assert resumed.ok, resumed.logs[0].read_text()
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    (line,) = [
        line for line in resumed.logs[0].read_text().splitlines() if "checkpoint-3" in line and "WARNING" in line
    ]
    assert [name for name in changed if name not in line] == []


def cut_into_small_blocks(checkpoint: Path) -> None:
    """Record the checksums of small blocks, so that a block of numbers holds no header."""
    reseal(checkpoint, 1000)


def test_damage_that_is_found_while_tensors_are_filled_leads_to_the_checkpoint_before(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    output_dir, whole = tmp_path / "run", tmp_path / "whole"
    shutil.copytree(saved, output_dir)
    shutil.copytree(saved / "checkpoint-2", whole / "checkpoint-2")
    cut_into_small_blocks(output_dir / "checkpoint-3")
    for name in (WEIGHTS, "optimizer_state/rank-00001.safetensors"):
        flip(name, -1)(output_dir / "checkpoint-3")
    refused = ranks.run(f"{JOBS}:refused", 2, settings(DP2, output_dir, output_dir / "checkpoint-3", max_steps=3))
    for found in refused.values:
        assert (found["error"], found["changed"]) == ("Corrupt", True)
        assert "tensors that were being filled are undefined" in found["text"]
    resumed = train(ranks, output_dir, DP2, True)
    expected = train(ranks, whole, DP2, True)
    assert resumed.ok, resumed.logs[0].read_text()
    assert resumed.values == expected.values
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    (line,) = [line for line in resumed.logs[0].read_text().splitlines() if "fails verification" in line]
    assert WEIGHTS in line
    assert "optimizer_state/rank-00001.safetensors" in line
    for name in (WEIGHTS, "optimizer_state/rank-00000.safetensors"):
        one, other = (directory / "checkpoint-3" / name for directory in (output_dir, whole))
        assert one.read_bytes() == other.read_bytes()


def test_a_checkpoint_that_lacks_tensors_of_a_damaged_one_is_refused_after_it(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    output_dir = tmp_path / "run"
    assert train(ranks, output_dir, DP2, max_steps=2, save_steps=2, ignore_save_lr_and_optim=True).ok
    shutil.copytree(saved / "checkpoint-3", output_dir / "checkpoint-3")
    cut_into_small_blocks(output_dir / "checkpoint-3")
    flip(WEIGHTS, -1)(output_dir / "checkpoint-3")
    for found in ranks.run(f"{JOBS}:refused", 2, settings(DP2, output_dir, True, max_steps=3)).values:
        assert found["error"] is not None
        assert "checkpoint-2" in found["text"]


def use_what_a_load_left_undefined(whole: Path, damaged: Path, output_dir: Path) -> None:
    arguments = {"max_steps": 3, "save_steps": 100}
    trainer = flex_trainer(SINGLE.to_json(), str(output_dir), arguments)
    with pytest.raises(Corrupt):
        trainer.train(resume_from_checkpoint=str(damaged))
    for use in (
        trainer.train,
        lambda: paddleformers_fc.save(output_dir / "saved", trainer.model),
        lambda: trainer._save_checkpoint(trainer.model),
    ):
        with pytest.raises(MismatchError) as caught:
            use()
        assert caught.value.what == "The model's tensors are undefined: a load began to fill them and failed."
    assert trainer.losses == []
    trainer.train(resume_from_checkpoint=str(whole))
    assert len(trainer.losses) == 1


def test_a_model_that_a_load_left_undefined_is_neither_trained_nor_saved_until_it_is_loaded(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    whole = saved / "checkpoint-2"
    damaged = Path(shutil.copytree(whole, tmp_path / "checkpoint-2"))
    cut_into_small_blocks(damaged)
    flip(WEIGHTS, -1)(damaged)
    given = {"whole": whole, "damaged": damaged, "output_dir": tmp_path / "out"}
    run_on_ranks(ranks, 1, use_what_a_load_left_undefined, **given)


def test_where_all_are_damaged_the_run_stops_with_every_reason(ranks: ForkServer, saved: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    shutil.copytree(saved, output_dir)
    for step in (1, 2, 3):
        flip(WEIGHTS, 20)(output_dir / f"checkpoint-{step}")  # In the header.
    given = settings(DP2, output_dir, True, max_steps=3, flex_verify="full")
    for found in ranks.run(f"{JOBS}:refused", 2, given).values:
        assert (found["error"], found["changed"]) == ("NotACheckpoint", False)
        assert all(f"checkpoint-{step}: " in found["text"] for step in (1, 2, 3))


def test_a_checkpoint_that_does_not_fit_the_model_is_not_skipped(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    given = {**settings(DP2, saved, True, max_steps=3), "model": {"intermediate_size": 96}}
    for found in ranks.run(f"{JOBS}:refused", 2, given).values:
        assert (found["error"], found["changed"]) == ("MismatchError", False)
        assert "or name another checkpoint. It is the newest checkpoint in output_dir: to start a new" in found["text"]


def test_a_branch_from_an_older_step_is_reported_at_once_and_at_the_next_automatic_resume(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    output_dir = tmp_path / "run"
    shutil.copytree(saved, output_dir)
    first = read_manifest(output_dir / "checkpoint-3").saved_by
    assert read_manifest(output_dir / "checkpoint-1").saved_by == first
    branched = train(ranks, output_dir, DP2, output_dir / "checkpoint-1", max_steps=2, save_total_limit=1)
    record = read_manifest(output_dir / "checkpoint-2").saved_by
    assert [(one.run, one.step) for one in record.branches] == [(first.id, 1)]
    text = branched.logs[0].read_text()
    assert f"run {record.id} " in text
    assert f"checkpoint-3 of run {first.id}" in text
    # What was just saved stays, and so does the newest one, of the other run.
    assert sorted(path.name for path in output_dir.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]

    again = train(ranks, output_dir, DP2, True, max_steps=4)
    text = again.logs[0].read_text()
    assert f"checkpoint-2 of run {record.id}" in text
    assert f"checkpoint-3 of run {first.id}" in text
    assert [len(value["losses"]) for value in again.values] == [1, 1]
    assert read_manifest(output_dir / "checkpoint-4").saved_by == first


def test_leftovers_that_the_next_save_does_not_delete_are_listed_in_the_log(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    output_dir = tmp_path / "run"
    shutil.copytree(saved, output_dir)
    dead = output_dir / ".checkpoint-9.unfinished-0123456789ab"
    dead.mkdir()
    with staging_directory(output_dir / "checkpoint-8") as running:
        (running.path / "weights").write_bytes(bytes(3000))
        result = train(ranks, output_dir, DP2, True, max_steps=4, save_steps=100)
        assert result.ok
        assert running.path.is_dir()
    text = result.logs[0].read_text()
    assert f"{running.path}, 3 kB: A running save uses it." in text
    assert f"paddleformers-fc clean {output_dir}" in text
    assert dead.name not in text


EXCHANGES = ["opening checkpoint-3", "planning", "reading checkpoint-3"]


def list_exchanges(output_dir: Path, resume: str | bool, arguments: dict[str, Any]) -> list[str]:
    """Resume, and return what the ranks exchange from the beginning of the training to the end of the load."""
    from paddleformers_fc import FlexCheckpointCallback
    from paddleformers_fc.distributed.communicator import Communicator

    doing: list[str] = []
    loaded: list[list[str]] = []
    gather = Communicator.gather

    def noting(self: Any, what: str, *args: Any, **kwargs: Any) -> Any:
        doing.append(what)
        return gather(self, what, *args, **kwargs)

    class NoteLoaded(FlexCheckpointCallback):
        def on_checkpoint_loaded(self, *_: Any) -> None:
            loaded.append([*doing])

    trainer = flex_trainer(DP2.to_json(), str(output_dir), arguments, callbacks=[NoteLoaded()])
    Communicator.gather = noting  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=resume)
    Communicator.gather = gather  # type: ignore[method-assign]
    return loaded[0]


@pytest.mark.parametrize(
    ("named", "new", "found"),
    [(False, False, "looking for checkpoints"), (True, True, "reading the metadata of checkpoint-3")],
)
def test_a_resume_reads_metadata_once_and_makes_four_exchanges(
    ranks: ForkServer, saved: Path, tmp_path: Path, named: bool, new: bool, found: str
) -> None:
    output_dir = tmp_path / "run"
    shutil.copytree(saved, output_dir)
    arguments = {"max_steps": 4, "save_steps": 100, "ignore_load_lr_and_optim": new}
    given = {"output_dir": output_dir, "resume": str(output_dir / "checkpoint-3") if named else True}
    for exchanges in run_on_ranks(ranks, 2, list_exchanges, **given, arguments=arguments):
        assert exchanges == ["checking the training", found, *EXCHANGES]


@on_ranks(layout=DP2)
def test_a_resume_with_a_local_tier_makes_four_exchanges_and_one_without_it_reports_it(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    tier = {"flex_local_dir": str(tmp_path / "local"), "flex_local_steps": 1, "max_steps": 3}
    run, forgotten = tmp_path / "run", f"has a local tier, {tmp_path / 'local'}, and flex_local_dir is not set"
    with logged() as lines:
        flex_trainer(layout.to_json(), str(run), {**tier, "save_steps": 2}).train()
        exchanges = list_exchanges(run, True, {**tier, "max_steps": 4, "save_steps": 100})
    assert exchanges == ["checking the training", "looking for checkpoints", *EXCHANGES]
    assert not any(forgotten in line for line in lines)
    without = flex_trainer(layout.to_json(), str(run), {"max_steps": 4})
    with logged() as lines:
        without.train(resume_from_checkpoint=True)
    assert any(forgotten in line for line in lines) or without.args.process_index > 0
