"""Degrees along the sequence, which PaddleFormers takes and does not train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corruption.guarantees import Observed, fault
from tests.harness.tiny import GLOBAL_BATCH, SINGLE, MatrixLayout
from verification.forkserver import ForkServer, JobResult

TRAIN = "tests.harness.tiny:train"
TWO = MatrixLayout("two", nproc=2)
STEP = {"max_steps": 1, "per_device_train_batch_size": GLOBAL_BATCH, "gradient_accumulation_steps": 1}


def stock(ranks: ForkServer, layout: MatrixLayout, output_dir: Path, **arguments: object) -> JobResult:
    """One step of PaddleFormers' own Trainer; every rank is given the whole batch."""
    given = {"model_type": "llama", "layout": layout.to_json(), "output_dir": str(output_dir)}
    return ranks.attempt(TRAIN, layout.nproc, {**given, "arguments": {**STEP, **arguments}})


def refused(ranks: ForkServer, output_dir: Path, **arguments: object) -> str:
    """The line of the error by which our arguments refuse these."""
    given = {"output_dir": str(output_dir), "arguments": arguments}
    (text,) = ranks.run("tests.trainer.jobs:refused_arguments", 1, given).values
    return next(line.strip("- ") for line in text.splitlines() if "flex_checkpoint: true and" in line)


@pytest.mark.slow
@fault("G110", "`sep_parallel_size: 2`")
def test_g110_segment_parallelism_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    # Where this fails because the losses agree, PaddleFormers trains segments, and they can be supported.
    (whole,) = stock(ranks, SINGLE, tmp_path / "whole").values[0]
    (cut,) = stock(ranks, TWO, tmp_path / "cut", sep_parallel_size=2).values[0]
    assert abs(whole - cut) > 0.01
    return Observed(
        f"no attention between the segments: the first loss is {cut:.2f} in place of {whole:.2f}",
        f"refused: `OptionError`, “{refused(ranks, tmp_path, sep_parallel_size=2)}”",
    )


@pytest.mark.slow
@fault("G111", "`context_parallel_size: 2`")
def test_g111_context_parallelism_is_refused(ranks: ForkServer, tmp_path: Path) -> Observed:
    # Where this fails because a step is made, context parallelism can be tested and supported.
    sharded = MatrixLayout("sharded", nproc=2, sharding=2)
    found = stock(ranks, sharded, tmp_path / "stock", context_parallel_size=2)
    assert not found.ok
    line = "context_parallel_size > 1 requires 'get_context_parallel_world_size' in hcg"
    assert line in found.logs[0].read_text()
    return Observed(
        f"`AssertionError: {line}`",
        f"refused: `OptionError`, “{refused(ranks, tmp_path, context_parallel_size=2)}”",
    )
