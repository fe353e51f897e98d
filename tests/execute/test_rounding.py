"""Verification compares weights of 16 bits with their master weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

import paddleformers_fc
from paddleformers_fc.errors import Corrupt
from paddleformers_fc.execute import digest
from tests.cli.support import flip, seal

NUMBERS = np.random.RandomState(0).randn(96, 8).astype(np.float32)
NUMBERS[0] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 1e30, 1 + 2**-8]
NUMBERS[90, 3] = 12345.0
"""Among them numbers that float16 cannot hold, and a tie."""


def saved(directory: Path, dtype: str) -> Path:
    masters = {"one.weight": NUMBERS, "two.weight": -NUMBERS[:8]}
    weights = {name: paddle.to_tensor(values).astype(dtype) for name, values in masters.items()}
    states = {f"{name}.w_0": paddle.to_tensor(values) for name, values in masters.items()}
    paddleformers_fc.save(directory, {**weights, **states, "three.weight": paddle.zeros([2])})
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_a_weight_that_is_not_its_rounded_master_weight_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", piece_bytes)
    checkpoint = saved(tmp_path / "checkpoint-1", dtype)
    detail = paddleformers_fc.open(checkpoint).verify().checks[-1].detail
    assert detail == "2 weights compared with master weights"
    (file,) = (checkpoint / "model_state").iterdir()
    raw, element = file.read_bytes(), paddle.to_tensor(NUMBERS[90, 3]).astype(dtype).numpy().tobytes()
    assert raw.count(element) == 1
    flip(file, raw.index(element))
    seal(checkpoint)
    with pytest.raises(Corrupt, match="is not the rounded master weight") as raised:
        paddleformers_fc.open(checkpoint).verify()
    assert raised.value.evidence == ("one.weight",)
    assert paddleformers_fc.open(checkpoint).verify("size").passed
