"""Ranks that hold copies, slices or disks of their own, and Trainers that go around what they share."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import EnvironmentMismatch, StorageError
from paddleformers_fc.formats.paddle_distcp import PADDLE_DISTCP
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.storage.manifest import read_manifest
from tests.corruption.guarantees import Seen, fault
from tests.corruption.jobs import trained
from tests.crash.net import refusing
from tests.harness import tiny
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.patching import without
from tests.harness.tiny import DP2, GLOBAL_BATCH, PP2, SD2S3, SINGLE, MatrixLayout
from tests.trainer import jobs
from tests.trainer.test_ema import evaluated
from tests.trainer.test_tiers import disks, run_on_disks
from tests.trainer.test_ties import EMBEDDING, HEAD, NEVER, run_and_part_copies
from tests.trainer.test_trainer import settings
from tests.trainer.test_upstream import goes_around
from verification.digests import canonical_digests
from verification.forkserver import ForkServer, JobResult

THREE = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1, "max_grad_norm": 0.0}
FIVE = {"max_steps": 5}
UNCHECKED: dict[bool, dict[str, Any]] = {False: {}, True: {"arguments": {**THREE, "flex_check_replicas": "off"}}}


def train(
    ranks: ForkServer, layout: MatrixLayout, output_dir: Path, resume: Path | bool | None = None, **given: Any
) -> list[Any]:
    """Train a tied Llama to step 3 with a checkpoint at every step, of which one stays; the outcome by rank."""
    job = {**settings(layout, output_dir, resume, **THREE), "after": NEVER, **given}
    return list(run_on_ranks(ranks, 2, run_and_part_copies, **job))


@pytest.mark.slow
@fault("G40")
def test_g40_diverged_copies_of_a_tied_weight_do_not_delete_the_last_good_checkpoint(
    ranks: ForkServer, tmp_path: Path
) -> Seen:
    left = {}
    for ours in (False, True):
        output_dir = tmp_path / f"ours-{ours}"
        train(ranks, PP2, output_dir, after=2, ours=ours, **UNCHECKED[ours])
        left[ours] = sorted(path.name for path in output_dir.glob("checkpoint-*"))
    assert left == {False: ["checkpoint-3"], True: ["checkpoint-1", "checkpoint-3"]}
    one, other = train(ranks, PP2, tmp_path / "ours-False", tmp_path / "ours-False/checkpoint-3", ours=False)
    assert {*one["copies"].values()} != {*other["copies"].values()}
    (line, *_) = (line for tie in read_manifest(output_dir / "checkpoint-3").ties for line in tie.differences)
    refused = train(ranks, PP2, output_dir, output_dir / "checkpoint-3", **UNCHECKED[True])
    assert [outcome["error"] for outcome in refused] == ["Diverged"] * 2
    resumed = train(ranks, PP2, output_dir, True, **UNCHECKED[True])
    assert [len(outcome["losses"]) for outcome in resumed] == [2, 2]
    assert len({bits for outcome in resumed for bits in outcome["copies"].values()}) == 1
    return {"line": line}


@pytest.mark.slow
@fault("G117")
def test_g117_every_stored_name_of_a_tied_weight_is_compared(ranks: ForkServer, tmp_path: Path) -> Seen:
    stored = tmp_path / "stock" / "checkpoint-3"
    train(ranks, DP2, stored.parent, ours=False)
    roles = PADDLE_DISTCP.open(stored).catalog.roles
    assert {EMBEDDING, HEAD} <= roles[MODEL_STATE].keys()
    assert f"{HEAD}.moment1_0" in roles[OPTIMIZER_STATE]
    assert f"{EMBEDDING}.moment1_0" not in roles[OPTIMIZER_STATE]

    def resumed(name: str) -> list[list[Any]]:
        """With stock and with this package."""
        runs = {ours: tmp_path / f"{name}-{ours}" for ours in (False, True)}
        return [train(ranks, DP2, place, stored, ours=ours, arguments=FIVE) for ours, place in runs.items()]

    whole, own = (outcome[0]["losses"] for outcome in resumed("whole"))
    assert own == whole
    ((file, begin),) = roles[MODEL_STATE][HEAD].offsets
    with (stored / file).open("r+b") as data:
        data.seek(begin)
        data.write(bytes(4 * 64))
    altered, refused = resumed("altered")
    assert altered[0]["losses"] != whole
    assert [one["error"] for one in refused] == ["Diverged"] * 2
    (line,) = (one for one in refused[0]["text"].splitlines() if HEAD in one)
    return {"line": line.strip().removeprefix("- ")}


def resume_by_itself(**settings: Any) -> dict[str, Any]:
    """Train as the command line does: each rank names the newest directory that it sees, and a fresh disk has none."""
    from paddleformers.trainer import get_last_checkpoint

    trainer = jobs.flex_trainer(**settings)
    trainer.args.looks_for_last_checkpoint = True
    trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
    return jobs.outcome(trainer)


@pytest.mark.slow
@fault("G100")
def test_g100_a_rank_with_an_empty_disk_resumes_with_the_others(ranks: ForkServer, tmp_path: Path) -> None:
    first, second = disks(tmp_path, 0, 1)
    run_on_disks(ranks, jobs.run, DP2, [first, second], max_steps=2, save_steps=2)
    shutil.copytree(second / "out", first / "out", dirs_exist_ok=True)
    shutil.rmtree(second / "out")
    found = run_on_disks(ranks, resume_by_itself, DP2, [first, second], max_steps=3).values
    assert [(one["step"], len(one["losses"])) for one in found] == [(3, 1)] * 2


def fail_a_sync(**settings: Any) -> None:
    """Train, on the second rank with a broken device."""
    is_broken = os.environ["PADDLE_TRAINER_ID"] == "1"
    with refusing("sync", ".checkpoint-3.unf", errno.EIO) if is_broken else contextlib.nullcontext():
        with pytest.raises(StorageError) as caught:
            jobs.trained(**settings)
    assert "EIO" in caught.value.render()
    assert [name for name in os.listdir("out") if "checkpoint" in name] == ["checkpoint-2"]


@fault("G101")
def test_g101_a_failed_sync_on_one_disk_keeps_the_older_checkpoint_on_both(ranks: ForkServer, tmp_path: Path) -> None:
    run_on_disks(ranks, fail_a_sync, DP2, disks(tmp_path, 0, 1), max_steps=3, save_steps=1, save_total_limit=1)


TWO = MatrixLayout("two", nproc=2)
STEP = {"max_steps": 1, "per_device_train_batch_size": GLOBAL_BATCH, "gradient_accumulation_steps": 1}


def stock(ranks: ForkServer, layout: MatrixLayout, output_dir: Path, **arguments: object) -> JobResult:
    """One step of PaddleFormers' own Trainer; every rank is given the whole batch."""
    given = settings(layout, output_dir, **STEP, **arguments)
    return job_on_ranks(ranks.attempt, layout.nproc, tiny.train, model_type="llama", **given)


def option_error(ranks: ForkServer, output_dir: Path, **arguments: object) -> str:
    """The line of the error by which our arguments refuse these."""
    (found,) = trained(ranks, SINGLE, output_dir, arguments=arguments, ours=True)
    assert found["error"].startswith("OptionError")
    return next(line.strip("- ") for line in found["error"].splitlines() if "flex_checkpoint: true and" in line)


@pytest.mark.slow
@fault("G110")
def test_g110_segment_parallelism_is_rejected(ranks: ForkServer, tmp_path: Path) -> Seen:
    # If this fails because the losses agree, PaddleFormers trains segments, and this package can support them.
    (whole,) = stock(ranks, SINGLE, tmp_path / "whole").values[0]
    (cut,) = stock(ranks, TWO, tmp_path / "cut", sep_parallel_size=2).values[0]
    assert abs(whole - cut) > 0.01
    return {"cut": cut, "whole": whole, "raised": option_error(ranks, tmp_path, sep_parallel_size=2)}


@pytest.mark.slow
@fault("G111")
def test_g111_context_parallelism_is_rejected(ranks: ForkServer, tmp_path: Path) -> Seen:
    # If this fails because a step is trained, context parallelism can be tested and supported.
    sharded = MatrixLayout("sharded", nproc=2, sharding=2)
    found = stock(ranks, sharded, tmp_path / "stock", context_parallel_size=2)
    assert not found.ok
    line = "context_parallel_size > 1 requires 'get_context_parallel_world_size' in hcg"
    assert line in found.logs[0].read_text()
    return {"raised": option_error(ranks, tmp_path, context_parallel_size=2)}


LOGGED = {"max_steps": 3, "save_steps": 1, "logging_steps": 1}
EVALUATED = {"flex_ema_decay": 0.9, "flex_ema_evaluate": True}


@pytest.mark.slow
@fault("G112")
def test_g112_stage_three_gets_its_weights_back_after_every_evaluation(ranks: ForkServer, tmp_path: Path) -> Seen:
    runs: list[tuple[tuple[Any, ...], list[Any]]] = []
    for name, arguments in (("plain", {}), ("averaged", EVALUATED)):
        given = settings(SD2S3, tmp_path / name, **LOGGED, **arguments)
        values = run_on_ranks(ranks, 2, evaluated, **given, fail=bool(arguments))
        stored = [one for one in canonical_digests(tmp_path / name / "checkpoint-3") if one.role != "ema_state"]
        runs.append((values, stored))
    (plain, expected), (averaged, found) = runs
    assert [rank["restored"] for rank in averaged] == [[True, True]] * 2
    assert [rank["losses"] for rank in averaged] == [rank["losses"] for rank in plain]
    assert averaged[0]["evaluated"] != plain[0]["evaluated"]
    assert found == expected
    return {"roles": " and ".join(sorted({f"`{one.role}`" for one in found}))}


@fault("G30")
@on_ranks(1)
def test_g30_a_renamed_hook_is_rejected_before_training(tmp_path: Path) -> None:
    from paddleformers.trainer import Trainer

    from paddleformers_fc import FlexTrainingArguments

    with without(Trainer, "_save_checkpoint"), pytest.raises(EnvironmentMismatch) as refused:
        tiny.training_arguments(SINGLE, tmp_path, cls=FlexTrainingArguments, flex_checkpoint=True)
    assert "paddleformers.trainer.trainer:Trainer._save_checkpoint is missing" in refused.value.evidence


@fault("G31")
def test_g31_a_save_that_bypasses_this_package_stops_every_rank(ranks: ForkServer, tmp_path: Path) -> Seen:
    given = {"layout": DP2, "output_dir": tmp_path, "method": "_save_checkpoint", "way": "installed"}
    found = run_on_ranks(ranks, 2, goes_around, **given)
    assert [one["error"] for one in found] == ["EnvironmentMismatch"] * 2
    assert [one["step"] for one in found] == [2, 2]
    assert "_save_checkpoint of paddleformers_fc did not run" in found[0]["text"]
    written = sorted(path.name for path in (tmp_path / "checkpoint-2" / "model_state").glob("*.metadata"))
    return {"written": written[0]}
