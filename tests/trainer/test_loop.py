"""A training loop without PaddleFormers' Trainer: saved under one layout, loaded under another, bit for bit."""

from __future__ import annotations

from pathlib import Path

import paddleformers_fc
from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.execute.digest import canonical_digests
from tests.harness.tiny import SINGLE, TP2, MatrixLayout


def hop(ranks: ForkServer, layout: MatrixLayout, place: Path, source: Path | None = None) -> Path:
    target = place / "checkpoint-3"
    job = {"layout": layout.to_json(), "output_dir": str(place / "run"), "target": str(target)}
    given = {**job, "source": None if source is None else str(source)}
    assert not any(ranks.run("tests.trainer.loop_jobs:run", layout.nproc, given).values)
    return target


def test_a_hand_written_loop_resumes_bitwise_on_one_and_two_ranks(ranks: ForkServer, tmp_path: Path) -> None:
    single = hop(ranks, SINGLE, tmp_path / "single")
    split = hop(ranks, TP2, tmp_path / "split", single)
    again = hop(ranks, SINGLE, tmp_path / "again", split)
    expected = list(canonical_digests(single))
    assert {one.role for one in expected} == {"model_state", "optimizer_state"}
    assert list(canonical_digests(split)) == list(canonical_digests(again)) == expected
    job = paddleformers_fc.open(again).metadata.job
    assert job is not None
    assert (job.step, job.consumed_samples) == (3, 6)


def test_a_model_without_a_family_is_refused(ranks: ForkServer, tmp_path: Path) -> None:
    refused = ranks.run("tests.trainer.loop_jobs:refuse", 1, {"output_dir": str(tmp_path / "checkpoint-1")})
    assert list(refused.values) == ["Linear has no configuration that names its family."]
    assert not (tmp_path / "checkpoint-1").exists()
