"""Moving averages of weights on the device: read in the passes, with the numbers of a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.device.running import FAKE, Ranks, device
from tests.harness.tiny import SD2V1, SINGLE, TP2, MatrixLayout
from verification.digests import canonical_digests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        (replace(SINGLE, bf16=True), {}),
        pytest.param(TP2, {}, marks=pytest.mark.slow),
        pytest.param(replace(SINGLE, bf16=True), {"tensorwise_offload_optimizer": True}, marks=pytest.mark.slow),
        pytest.param(replace(SD2V1, bf16=True), {"flex_async_save": True}, marks=pytest.mark.slow),
    ],
    ids=["single-bf16", "tp2", "offloaded", "sd2v1-async"],
)
def test_an_average_on_a_device_is_that_on_a_cpu(
    device_ranks: Ranks, tmp_path: Path, layout: MatrixLayout, arguments: dict[str, Any]
) -> None:
    def train(name: str, on: str, resume: Path | None = None) -> list[dict[str, Any]]:
        job = {"layout": layout.to_json(), "output_dir": str(tmp_path / name), "on": on, "arguments": arguments}
        given = {**job, "resume": None if resume is None else str(resume)}
        return list(device_ranks.run("tests.device.training_jobs:train_with_average", layout.nproc, given).values)

    found = train("device", device())
    resumed = train("resumed", device(), tmp_path / "device" / "checkpoint-3")
    for rank in (*found, *resumed):
        assert rank["places"] == ["Place(cpu)"]
        before, inside, after = rank["digests"]
        assert before == after != inside
    assert [rank["digests"] for rank in resumed] == [rank["digests"] for rank in found]
    names = ["device", "resumed"]
    if device() == FAKE:  # Other kernels round differently.
        train("cpu", "cpu")
        names.append("cpu")
    last = [list(canonical_digests(tmp_path / name / "checkpoint-6")) for name in names]
    assert all(one == last[0] for one in last)
    assert "ema_state" in {one.role for one in last[0]}
