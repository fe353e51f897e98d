"""Saves beside training: what they write, what training sees of them, and what it waits for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from tests.harness.tiny import DP2, EP2, PP2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.test_trainer import bf16, settings

JOBS = "tests.trainer.jobs"
EVERY_STEP = {"max_steps": 5, "save_steps": 1}

ARGUMENTS = ("training_args", "arguments")
"""Parts of the names of files that contain the options of a run."""


def contents(checkpoint: Path) -> dict[str, str]:
    """The digest of every file of a checkpoint that does not contain times, options or an identity of the run."""
    return {
        str(path.relative_to(checkpoint)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME and not any(part in path.name for part in ARGUMENTS)
    }


@pytest.mark.parametrize("layout", [SINGLE, bf16(SD2V2)], ids=lambda layout: layout.name)
def test_a_save_beside_training_writes_what_a_save_in_the_step_writes(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    compare(ranks, tmp_path, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [DP2, TP2, PP2, EP2, SD2V1, SD2V2, SD2S2, SD2S3, bf16(TP2)], ids=lambda layout: layout.name
)
def test_a_save_beside_training_writes_the_same_under_every_layout(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    compare(ranks, tmp_path, layout)


def compare(ranks: ForkServer, tmp_path: Path, layout: MatrixLayout) -> None:
    found, losses = [], []
    for name, options in (("in", {}), ("beside", {"flex_async_save": True})):
        output_dir = tmp_path / name
        ran = ranks.run(f"{JOBS}:run", layout.nproc, settings(layout, output_dir, **EVERY_STEP, **options))
        losses.append([one["losses"] for one in ran.values])
        found.append({path.name: contents(path) for path in sorted(output_dir.glob("checkpoint-*"))})
    assert losses[0] == losses[1]
    assert len(found[0]) == EVERY_STEP["max_steps"]
    assert found[0] == found[1]
