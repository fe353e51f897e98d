"""Ranks that Paddle lets go apart: clipping by norm under expert parallelism inside tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddleformers_fc.cpu_runtime.forkserver import ForkServer, JobResult
from paddleformers_fc.storage.manifest import read_manifest
from tests.harness.tiny import MatrixLayout
from tests.trainer.test_trainer import JOBS, settings

APART = MatrixLayout("tp2ep2", nproc=2, tp=2, ep=2)
TOLD = "training has gone apart on them"


def train(ranks: ForkServer, output_dir: Path, **arguments: Any) -> JobResult:
    """Two steps, each saved."""
    given = settings(APART, output_dir, max_steps=2, save_steps=1, **arguments)
    return ranks.attempt(f"{JOBS}:run", 2, {**given, "model_type": "ernie4_5_moe"})


def test_replicas_that_clipping_lets_go_apart_stand_in_every_checkpoint_and_once_in_the_log(
    ranks: ForkServer, tmp_path: Path
) -> None:
    result = train(ranks, tmp_path, max_grad_norm=0.01)
    assert result.ok
    for step in (1, 2):
        lines = read_manifest(tmp_path / f"checkpoint-{step}").differing_replicas
        assert isinstance(lines, list)
        assert "model_state model.norm.weight [0:64]: version 1 on rank 0; version 2 on rank 1" in lines
    assert [log.read_text().count(TOLD) for log in result.logs] == [1, 0]


def test_a_run_that_is_to_refuse_them_saves_nothing(patient_ranks: ForkServer, tmp_path: Path) -> None:
    result = train(patient_ranks, tmp_path, max_grad_norm=0.01, flex_check_replicas="refuse")
    assert result.returncodes == (1, 1)
    assert all("MismatchError" in log.read_text() and "model.norm.weight" in log.read_text() for log in result.logs)
    assert not list(tmp_path.glob("*checkpoint*"))


def test_without_clipping_the_same_replicas_are_equal(ranks: ForkServer, tmp_path: Path) -> None:
    result = train(ranks, tmp_path, max_grad_norm=0.0, flex_check_replicas="refuse")
    assert result.ok
    assert TOLD not in result.logs[0].read_text()
