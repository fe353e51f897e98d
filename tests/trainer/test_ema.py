"""The moving average of a run's weights: kept on every layout, saved, resumed and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.execute.averaging import update_weight
from paddleformers_fc.execute.digest import canonical_digests
from tests.harness.tiny import DP2, PP2, SD2S2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout

JOBS = "tests.trainer.jobs"
DECAY = 0.9
EVERY_STEP = {"max_steps": 6, "save_steps": 1, "logging_steps": 1}
AVERAGE = {"flex_ema_decay": DECAY}


def half(layout: MatrixLayout) -> MatrixLayout:
    """The same layout with bfloat16 weights and float32 master weights."""
    return replace(layout, name=f"{layout.name}-bf16", bf16=True)


def run(ranks: ForkServer, layout: MatrixLayout, output_dir: Path, job: str = "run", **given: Any) -> Any:
    """Run a job on the ranks of a layout; what its ranks return, and the log of the first."""
    arguments = {**EVERY_STEP, **AVERAGE, **given.pop("arguments", {})}
    settings = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": arguments, **given}
    result = ranks.run(f"{JOBS}:{job}", layout.nproc, settings)
    return result.values, result.logs[0].read_text(errors="replace")


def digests(checkpoint: Path, role: str = "ema_state") -> list[Any]:
    """The digests of the canonical tensors of one role."""
    return [one for one in canonical_digests(checkpoint) if one.role == role]


def weights(checkpoint: Path) -> dict[str, Any]:
    """The weights in full precision by canonical name: master weights, or float32 weights without one."""
    opened = paddleformers_fc.open(checkpoint)
    names = {one.name: one.role for one in opened.tensors() if one.role in ("model_state", "master_weight")}
    masters = {name.removesuffix(".w_0"): name for name, role in names.items() if role == "master_weight"}
    return {
        name: opened.read(masters.get(name, name), role="master_weight" if name in masters else "model_state")
        for name, role in names.items()
        if role == "model_state"
    }


def averages(checkpoint: Path) -> dict[str, Any]:
    """The averages by canonical name."""
    opened = paddleformers_fc.open(checkpoint)
    return {one.name: opened.read(one.name, role="ema_state") for one in opened.tensors() if one.role == "ema_state"}


def reference(output_dir: Path, steps: list[int], corrected: bool = False) -> dict[str, Any]:
    """The average in float64 of the weights that were saved after some steps."""
    found: dict[str, Any] = {}
    for number, step in enumerate(steps, 1):
        weight = update_weight(DECAY, number, corrected)
        for name, values in weights(output_dir / f"checkpoint-{step}").items():
            before = found.get(name, 0.0)
            found[name] = before + weight * (values.astype(np.float64) - before)
    return found


def assert_averages(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        assert values.dtype == np.float32
        error = np.linalg.norm(values - wanted[name]) / np.linalg.norm(wanted[name])
        assert error <= 1e-6, name


OTHERS = [
    *(SINGLE, SD2S3, DP2, half(DP2), TP2, half(TP2), PP2, half(PP2), SD2V1, half(SD2V1), SD2V2),
    *(SD2S2, half(SD2S2), half(SD2S3)),
]


@pytest.mark.parametrize(
    "layout",
    [half(SD2V2), *(pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS)],
    ids=lambda layout: layout.name,
)
def test_an_average_is_that_of_the_weights_and_goes_on_bitwise(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    values, _ = run(ranks, layout, whole)
    assert_averages(averages(whole / "checkpoint-6"), reference(whole, [1, 2, 3, 4, 5, 6]))
    again, log = run(ranks, layout, resumed, resume=str(whole / "checkpoint-3"))
    assert "moving average" not in log
    assert [rank["losses"] for rank in again] == [rank["losses"][3:] for rank in values]
    assert list(canonical_digests(resumed / "checkpoint-6")) == list(canonical_digests(whole / "checkpoint-6"))


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_an_average_is_loaded_under_every_layout(ranks: ForkServer, tmp_path: Path, bf16: bool) -> None:
    def chosen(layout: MatrixLayout) -> MatrixLayout:
        return half(layout) if bf16 else layout

    source = chosen(DP2)
    run(ranks, source, tmp_path / "dp2", arguments={"max_steps": 3, "save_steps": 3})
    expected = list(canonical_digests(tmp_path / "dp2" / "checkpoint-3"))
    assert {"ema_state", "model_state", "optimizer_state"} <= {one.role for one in expected}
    before = tmp_path / "dp2"
    for layout in (SD2S3, PP2, SD2V2, TP2, SD2S2, SD2V1, SINGLE):
        there = tmp_path / layout.name
        given = {"resume": str(before / "checkpoint-3"), "arguments": {"max_steps": 3}}
        run(ranks, chosen(layout), there, "resume_and_save_again", **given)
        assert list(canonical_digests(there / "checkpoint-3")) == expected, layout.name
        before = there


def test_losses_are_those_without_an_average(ranks: ForkServer, tmp_path: Path) -> None:
    found = [
        run(ranks, half(SD2V2), tmp_path / str(decay), arguments={"flex_ema_decay": decay}) for decay in (0.0, 0.9)
    ]
    assert [rank["losses"] for rank in found[0][0]] == [rank["losses"] for rank in found[1][0]]
    assert not (tmp_path / "0.0" / "checkpoint-6" / "ema_state").exists()
