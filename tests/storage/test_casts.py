"""Casts are numpy's, and no number becomes infinite unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.storage.dtypes import copy_cast

FILE = Path("weights.safetensors")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("number", [65536.0, -1e6])
def test_a_finite_number_that_float16_cannot_hold_is_refused_with_its_file(dtype: Any, number: float) -> None:
    source = np.array([[1, np.inf], [number, np.nan]]).astype(dtype)
    with pytest.raises(MismatchError, match="too large for float16") as caught:
        copy_cast(np.empty((2, 2), np.float16).T, source.T, FILE)
    assert caught.value.where == str(FILE)
    assert f"{float(source[1, 0]):g};" in caught.value.evidence[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_what_float16_can_hold_and_what_was_infinite_before_is_cast_as_numpy_casts(dtype: Any) -> None:
    source = np.array([np.inf, -np.inf, np.nan, 65504, -1.5, 6e-8]).astype(dtype)
    if dtype is ml_dtypes.bfloat16:
        source[3] = 65280  # The largest below 65504.
    target = np.empty(6, np.float16)
    copy_cast(target, source, FILE)
    assert target.tobytes() == source.astype(np.float16).tobytes()
