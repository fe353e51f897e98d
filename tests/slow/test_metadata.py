"""Saves, resumes and rotation on a file server with slow, stale metadata."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2, MatrixLayout
from tests.trainer.jobs import flex_trainer, run
from verification.forkserver import ForkServer

STEPS = {"save_steps": 1, "save_total_limit": 2, "logging_steps": 1}
SLOW = {"FLEX_SLOW_MS": "1", "FLEX_SLOW_STALE_MS": "3000"}


def train(layout: MatrixLayout, output_dir: Path, steps: int, expected: list[float]) -> None:
    """Train on a rank with slow metadata, from the newest checkpoint, with a save at every step.

    Args:
        expected: the losses of these steps.
    """
    os.environ.update({"FLEX_SLOW_ROOT": str(output_dir), **SLOW})
    trainer = flex_trainer(layout, output_dir, {**STEPS, "max_steps": steps})
    trainer.train(resume_from_checkpoint=any(output_dir.glob("checkpoint-*")) or None)
    assert trainer.losses == expected


def names(directory: Path) -> list[str]:
    return sorted(
        path.name for path in directory.iterdir() if path.name.startswith("checkpoint") or "stag" in path.name
    )


@pytest.fixture
def expected(ranks: ForkServer, tmp_path: Path) -> list[float]:
    """The losses of six steps without the library."""
    job = {"layout": DP2, "output_dir": tmp_path / "plain", "arguments": {**STEPS, "max_steps": 6}}
    return list(run_on_ranks(ranks, DP2.nproc, run, **job)[0]["losses"])


@pytest.mark.slow
def test_a_run_on_slow_disks_rotates_and_resumes(expected: list[float], slow_ranks: ForkServer, tmp_path: Path) -> None:
    output_dir = tmp_path / "slow"
    given = {"layout": DP2, "output_dir": output_dir}
    run_on_ranks(slow_ranks, DP2.nproc, train, **given, steps=4, expected=expected[:4])
    assert names(output_dir) == ["checkpoint-3", "checkpoint-4"]
    run_on_ranks(slow_ranks, DP2.nproc, train, **given, steps=6, expected=expected[4:])
    assert names(output_dir) == ["checkpoint-5", "checkpoint-6"]
