"""What ``resume_from_checkpoint: true`` resumes where checkpoints are damaged, and where runs have branched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, MismatchError
from paddleformers_fc.storage.commit import staging_directory
from paddleformers_fc.storage.manifest import read_manifest
from tests.cli.support import flip
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.sealing import reseal
from tests.harness.tiny import DP2, SINGLE
from tests.trainer.jobs import callback, flex_trainer, logged, refused, trained
from tests.trainer.test_trainer import JOBS, settings
from verification.forkserver import ForkServer, JobResult

WEIGHTS = "model_state/rank-00000.safetensors"
STATES = "optimizer_state/rank-00001.safetensors"


def train(ranks: ForkServer, output_dir: Path, resume: Path | bool | None = None, **arguments: Any) -> JobResult:
    given = settings(DP2, output_dir, resume, **{"max_steps": 3, "save_steps": 1, **arguments})
    return ranks.attempt(f"{JOBS}:run", 2, given)


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of two ranks."""
    output_dir = tmp_path_factory.mktemp("saved")
    assert train(ranks, output_dir).ok
    return output_dir


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """The output directory of a test, with these checkpoints."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def refusals(ranks: ForkServer, output_dir: Path, model: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """What becomes of an automatic resume on both ranks."""
    given = {"layout": DP2, "output_dir": output_dir, "model": model, "arguments": {"max_steps": 3, **arguments}}
    return run_on_ranks(ranks, 2, refused, resume=True, **given)


def damage(checkpoint: Path, *names: str) -> None:
    """Change the last byte of tensors whose checksums are those of small blocks, so that no block holds a header."""
    reseal(checkpoint, 1000)
    for name in names:
        flip(checkpoint / name, -1)


DAMAGES: dict[str, tuple[str, dict[str, int]]] = {
    "a header": ("size", {WEIGHTS: 9}),
    "the state of the Trainer": ("size", {"trainer/state.json": 20}),
    "a weight and an optimizer state": ("full", {WEIGHTS: -1, STATES: -1}),
}
"""The level of verification, and the byte that changes in each file."""


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_and_refused_if_named(ranks: ForkServer, run: Path, what: str) -> None:
    level, changed = DAMAGES[what]
    for name, at in changed.items():
        flip(run / "checkpoint-3" / name, at)
    given: dict[str, Any] = {"flex_verify": level, "save_steps": 100}
    named = train(ranks, run, run / "checkpoint-3", **given)
    assert not named.ok
    text = named.logs[0].read_text()
    assert [name for name in changed if name not in text] == []
    resumed = train(ranks, run, True, **given)
    assert resumed.ok, resumed.logs[0].read_text()
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    lines = "".join(log.read_text() for log in resumed.logs)  # The second rank of the node does not repeat it.
    (line,) = [line for line in lines.splitlines() if "checkpoint-3" in line and "WARNING" in line]
    assert [name for name in changed if name not in line] == []


def test_damage_that_is_found_in_a_load_leads_to_the_one_before(
    ranks: ForkServer, saved: Path, run: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(saved / "checkpoint-2", whole / "checkpoint-2")
    damage(run / "checkpoint-3", WEIGHTS, STATES)
    resumed, expected = train(ranks, run, True), train(ranks, whole, True)
    assert resumed.ok, resumed.logs[0].read_text()
    assert resumed.values == expected.values
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    (line,) = [line for line in resumed.logs[0].read_text().splitlines() if "fails verification" in line]
    assert [name for name in (WEIGHTS, STATES) if name not in line] == []
    for name in (WEIGHTS, "optimizer_state/rank-00000.safetensors"):
        one, other = (directory / "checkpoint-3" / name for directory in (run, whole))
        assert one.read_bytes() == other.read_bytes()


def test_a_checkpoint_that_lacks_tensors_of_a_damaged_one_is_refused(
    ranks: ForkServer, saved: Path, tmp_path: Path
) -> None:
    assert train(ranks, tmp_path, max_steps=2, save_steps=2, ignore_save_lr_and_optim=True).ok
    shutil.copytree(saved / "checkpoint-3", tmp_path / "checkpoint-3")
    damage(tmp_path / "checkpoint-3", WEIGHTS)
    for found in refusals(ranks, tmp_path):
        assert found["error"] is not None
        assert "checkpoint-2" in found["text"]


@on_ranks(1)
def test_an_undefined_model_is_neither_trained_nor_saved(saved: Path, run: Path) -> None:
    damage(run / "checkpoint-2", WEIGHTS)
    trainer = flex_trainer(SINGLE, run / "out", {"max_steps": 3, "save_steps": 100})
    with pytest.raises(Corrupt, match="tensors that were being filled are undefined"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    for use in (
        trainer.train,
        lambda: paddleformers_fc.save(run / "out/saved", trainer.model),
        lambda: trainer._save_checkpoint(trainer.model),
    ):
        with pytest.raises(MismatchError) as caught:
            use()
        assert caught.value.what == "The model's tensors are undefined: a load began to fill them and failed."
    assert trainer.losses == []
    trainer.train(resume_from_checkpoint=str(saved / "checkpoint-2"))
    assert len(trainer.losses) == 1


def test_if_all_checkpoints_are_damaged_the_run_stops_with_every_reason(ranks: ForkServer, run: Path) -> None:
    for step in (1, 2, 3):
        flip(run / f"checkpoint-{step}" / WEIGHTS, 20)  # In the header.
    for found in refusals(ranks, run, flex_verify="full"):
        assert (found["error"], found["changed"]) == ("NotACheckpoint", False)
        assert all(f"checkpoint-{step}: " in found["text"] for step in (1, 2, 3))


def test_a_checkpoint_that_does_not_fit_the_model_is_not_skipped(ranks: ForkServer, run: Path) -> None:
    for found in refusals(ranks, run, {"intermediate_size": 96}):
        assert (found["error"], found["changed"]) == ("MismatchError", False)
        assert "or name another checkpoint. It is the newest checkpoint in output_dir: to start a new" in found["text"]


def test_a_branch_is_reported_at_once_and_at_the_next_automatic_resume(ranks: ForkServer, run: Path) -> None:
    first = read_manifest(run / "checkpoint-3").saved_by
    assert read_manifest(run / "checkpoint-1").saved_by == first
    branched = train(ranks, run, run / "checkpoint-1", max_steps=2, save_total_limit=1)
    record = read_manifest(run / "checkpoint-2").saved_by
    assert [(one.run, one.step) for one in record.branches] == [(first.id, 1)]
    again = train(ranks, run, True, max_steps=4)
    for log, branch in ((branched.logs[0], f"run {record.id} "), (again.logs[0], f"checkpoint-2 of run {record.id}")):
        assert branch in log.read_text()
        assert f"checkpoint-3 of run {first.id}" in log.read_text()
    assert [len(value["losses"]) for value in again.values] == [1, 1]
    assert read_manifest(run / "checkpoint-4").saved_by == first
    # The checkpoints of the branch stay, and so does the newest one of the other run.
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (2, 3, 4)]


def test_stale_directories_that_the_next_save_does_not_delete_are_logged(ranks: ForkServer, run: Path) -> None:
    dead = run / ".checkpoint-9.unfinished-0123456789ab"
    dead.mkdir()
    with staging_directory(run / "checkpoint-8") as running:
        (running.path / "weights").write_bytes(bytes(3000))
        result = train(ranks, run, True, max_steps=4, save_steps=100)
        assert result.ok
        assert running.path.is_dir()
    text = result.logs[0].read_text()
    assert f"{running.path}, 3 kB: A running save uses it." in text
    assert f"paddleformers-fc clean {run}" in text
    assert dead.name not in text


@on_ranks(layout=DP2)
def test_a_resume_reads_metadata_once_and_makes_four_exchanges(tmp_path: Path) -> None:
    from paddleformers_fc.distributed.communicator import Communicator

    doing: list[str] = []
    loaded: list[list[str]] = []
    precede(Communicator, "gather", lambda self, what, *_, **__: doing.append(what))
    noting = callback(on_checkpoint_loaded=lambda *_: loaded.append([*doing]))

    def exchanges(name: str, resume: str | bool, **arguments: Any) -> list[str]:
        """What the ranks exchange from the beginning of the training to the end of the load."""
        given = {"max_steps": 4, "save_steps": 100, **arguments}
        trainer = flex_trainer(DP2, tmp_path / name, given, callbacks=[noting])
        doing.clear()
        trainer.train(resume_from_checkpoint=resume)
        return loaded.pop()

    def expected(found: str) -> list[str]:
        return ["checking the training", found, "opening checkpoint-3", "planning", "reading checkpoint-3"]

    three = {"max_steps": 3, "save_steps": 3}
    trained(DP2, tmp_path / "plain", three)
    assert exchanges("plain", True) == expected("looking for checkpoints")
    new = exchanges("plain", str(tmp_path / "plain/checkpoint-3"), ignore_load_lr_and_optim=True)
    assert new == expected("reading the metadata of checkpoint-3")
    tier = {"flex_local_dir": str(tmp_path / "local"), "flex_local_steps": 1}
    forgotten = f"has a local tier, {tmp_path / 'local'}, and flex_local_dir is not set"
    with logged() as lines:
        trained(DP2, tmp_path / "run", {**three, **tier, "save_steps": 2})
        assert exchanges("run", True, **tier) == expected("looking for checkpoints")
    assert not any(forgotten in line for line in lines)
    with logged() as lines:
        without = trained(DP2, tmp_path / "run", {"max_steps": 4}, resume=True)
    assert any(forgotten in line for line in lines) or without.args.process_index > 0
