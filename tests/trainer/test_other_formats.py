"""Runs that resume checkpoints of other formats: the losses of the run that wrote them, under any layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.cli import training
from paddleformers_fc.cli.start_checks import checkpoint_to_resume
from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.execute.output_directory import output_facts
from paddleformers_fc.trainer.resume import newest_of_other_formats
from tests.formats import jobs
from tests.harness.on_ranks import job_on_ranks, run_on_ranks
from tests.harness.tiny import DP2, PP2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, TP2PP2, MatrixLayout
from tests.trainer.test_trainer import bf16 as half, settings
from verification.forkserver import ForkServer

SIX: dict[str, Any] = {"max_steps": 6, "save_steps": 3}


def train(
    ranks: ForkServer,
    layout: MatrixLayout,
    output_dir: Path,
    ours: bool,
    resume: Path | bool | None = None,
    tied: bool = False,
    **more: Any,
) -> tuple[list[float], str]:
    """Train with our Trainer or with PaddleFormers' own; the losses and the log of the first rank."""
    given = {**settings(layout, output_dir, resume, **SIX | more), "model": {"tie_word_embeddings": tied}}
    result = job_on_ranks(ranks.run, layout.nproc, jobs.train, **given, ours=ours)
    found: dict[str, Any] = result.values[0]
    assert "error" not in found, found
    return found["losses"], result.logs[0].read_text(errors="replace")


def third_of(losses: list[float], source: MatrixLayout, target: MatrixLayout) -> Any:
    """What a run under a layout trains on from the third step of one under another, bit by bit if it is the same."""
    return losses[3:] if source == target else pytest.approx(losses[3:], abs=5e-3 if source.bf16 else 2e-6)


UNIFIED = dict.fromkeys(("save_checkpoint_format", "load_checkpoint_format"), "unified_checkpoint")
OF_RANKS: dict[str, Any] = {"save_checkpoint_format": "", "load_checkpoint_format": "", "save_to_hf": False}
WAYS: dict[str, dict[str, Any]] = {
    "paddle": {},
    "replicated": {"replicate_saved_into_local": True},
    "unified": UNIFIED,
    "ranks": OF_RANKS,
    "sharding_io": {**OF_RANKS, "save_sharded_model": True},
    "canonical": {**OF_RANKS, "save_to_hf": True},
}


# Paddle stores a tied weight under both names. Its states have the name that sorts first, which is not the owner's, and
# in a pipeline each stage has states of its own.
@pytest.mark.parametrize(
    ("way", "source", "target", "tied"),
    [
        pytest.param("paddle", half(TP2), half(TP2), False, marks=pytest.mark.chosen),
        ("paddle", half(SD2V2), half(SD2V2), False),
        ("replicated", SD2V2, PP2, False),
        ("paddle", TP2, SINGLE, False),
        pytest.param("paddle", DP2, PP2, True, marks=pytest.mark.chosen),
        *(("paddle", layout, layout, True) for layout in (SD2V1, half(SD2S3))),
        *(("ranks", layout, layout, True) for layout in (SD2V2, half(SD2S3))),
        *((way, layout, layout, True) for way, layout in (("unified", PP2), ("canonical", TP2))),
        ("sharding_io", half(SD2V2), half(SD2V2), True),
        ("paddle", PP2, TP2, True),
        ("ranks", half(TP2), half(TP2PP2), True),
    ],
    ids=lambda one: one.name if isinstance(one, MatrixLayout) else str(one),
)
def test_a_run_resumes_every_stock_checkpoint_with_its_losses(
    ranks: ForkServer, tmp_path: Path, way: str, source: MatrixLayout, target: MatrixLayout, tied: bool
) -> None:
    # The norm of gradients counts both copies of a pipeline.
    given = {"tied": tied, "max_grad_norm": 0.0 if tied else 1.0}
    stock, _ = train(ranks, source, tmp_path / "stock", False, **given, **WAYS[way])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "stock").rglob("*")}
    found, log = train(ranks, target, tmp_path / "ours", True, tmp_path / "stock/checkpoint-3", **given)
    assert found == third_of(stock, source, target)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "stock").rglob("*")} == before
    if way in ("paddle", "replicated"):
        assert "It does not contain: the order of the data" in log
        assert ("Random generators are not restored" in log) is (source.nproc != target.nproc)
        # The next save continues the run.
        job = paddleformers_fc.open(tmp_path / "ours/checkpoint-6").metadata.job
        assert job is not None
        assert (job.step, job.consumed_samples, job.branches[-1].step) == (6, 48, 3)


def test_files_of_ranks_without_a_configuration_are_read_under_that_of_the_live_model(
    ranks: ForkServer, tmp_path: Path
) -> None:
    stock, _ = train(ranks, TP2, tmp_path / "stock", False, **OF_RANKS)
    shutil.rmtree(tmp_path / "stock/checkpoint-6")
    checkpoint = tmp_path / "stock/checkpoint-3"
    (checkpoint / "config.json").unlink()
    # Before a model is built, the Trainer's files are read alone.
    listed = output_facts(tmp_path / "stock")
    assert listed is not None
    assert [(one.step, one.fault) for one in listed.checkpoints] == [(3, "")]
    assert checkpoint_to_resume({"resume_from_checkpoint": str(checkpoint)}, 1) == checkpoint
    assert newest_of_other_formats([checkpoint], ALONE) == (checkpoint, {})
    found, _ = train(ranks, PP2, tmp_path / "stock", True, True)
    assert found == third_of(stock, TP2, PP2)


def test_the_newest_stock_checkpoint_is_resumed_with_a_notice_and_a_converted_one_alike(
    ranks: ForkServer, tmp_path: Path
) -> None:
    stock, _ = train(ranks, TP2, tmp_path / "out", False)
    train(ranks, SINGLE, tmp_path / "other", True)
    opened = paddleformers_fc.open(tmp_path / "out/checkpoint-3")
    opened.convert(tmp_path / "flex/checkpoint-3", config=tmp_path / "other/checkpoint-3")
    flex = paddleformers_fc.open(tmp_path / "flex/checkpoint-3")
    assert flex.verify().passed
    assert flex.metadata.job is not None
    assert (flex.metadata.job.step, flex.metadata.job.parallel["tp"]) == (3, 2)
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    job = training.TrainingJob((), 1, {}, "", True, str(tmp_path / "out"))
    assert training._resume_advice(job) == "run the same command again; it resumes at step 3"
    for name, is_noticed in (("flex", False), ("out", True)):
        found, log = train(ranks, TP2, tmp_path / name, True, True)
        assert found == stock[3:]
        assert ("has no flex checkpoint" in log) is is_noticed


# Stage 2 is left out: stock goes on with other losses from checkpoints of its own.
@pytest.mark.parametrize(
    ("source", "target", "tied"),
    [
        pytest.param(TP2, TP2, False, marks=pytest.mark.chosen),
        *((layout, layout, True) for layout in (half(SD2V2), SD2S3)),
        (PP2, TP2, True),
    ],
    ids=lambda one: one.name if isinstance(one, MatrixLayout) else ("tied" if one else ""),
)
def test_the_stock_trainer_resumes_what_was_converted_for_it(
    ranks: ForkServer, tmp_path: Path, source: MatrixLayout, target: MatrixLayout, tied: bool
) -> None:
    given = {"tied": tied, "max_grad_norm": 0.0}
    ours, _ = train(ranks, source, tmp_path / "ours", True, **given)
    opened = paddleformers_fc.open(tmp_path / "ours/checkpoint-3")
    opened.convert(tmp_path / "distcp/checkpoint-3", format="distcp", max_shard_bytes=100_000)
    assert opened.diff(paddleformers_fc.open(tmp_path / "distcp/checkpoint-3")).equal
    stock, _ = train(ranks, target, tmp_path / "stock", False, tmp_path / "distcp/checkpoint-3", **given)
    assert stock == third_of(ours, source, target)


def test_a_checkpoint_without_its_optimizer_states_is_refused_and_a_converted_one_alike(
    ranks: ForkServer, tmp_path: Path
) -> None:
    train(ranks, SINGLE, tmp_path / "stock", False, **OF_RANKS, max_steps=3)
    stock, flex = tmp_path / "stock/checkpoint-3", tmp_path / "flex/checkpoint-3"
    (stock / "optimizer.pdopt").unlink()
    paddleformers_fc.open(stock).convert(flex)
    for checkpoint in (stock, flex):
        given = settings(SINGLE, tmp_path / "ours", checkpoint, **SIX)
        (refused,) = run_on_ranks(ranks, 1, jobs.train, **given, ours=True)
        assert refused["error"].startswith("MismatchError"), refused
        assert "missing: optimizer_state" in refused["error"]
        assert "ignore_load_lr_and_optim: true" in refused["error"]
    begun, _ = train(ranks, SINGLE, tmp_path / "new", True, stock, ignore_load_lr_and_optim=True, max_steps=1)
    assert len(begun) == 1
