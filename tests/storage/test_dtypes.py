"""The three names of an element type agree with each other and with the safetensors library; casts are numpy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.storage.dtypes import (
    CODES,
    copy_cast,
    from_safetensors,
    item_size,
    model_dtype,
    to_numpy,
    to_safetensors,
)

FILE = Path("weights.safetensors")


@pytest.mark.parametrize("code", sorted(CODES))
def test_names_codes_sizes_and_numpy_types_agree_with_each_other_and_the_library(code: str) -> None:
    name, numbers = from_safetensors(code), np.zeros(3, to_numpy(code))
    assert to_safetensors(name) == code
    assert numbers.dtype.name == name
    assert item_size(code) == numbers.itemsize
    spec = safetensors.TensorSpec(dtype=name, shape=[3], data_ptr=numbers.ctypes.data, data_len=numbers.nbytes)
    ((_, stored),) = safetensors.deserialize(safetensors.serialize({"x": spec}))
    assert stored["dtype"] == code


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_cast_to_float16_is_numpys_and_no_number_becomes_infinite_unseen(dtype: Any) -> None:
    largest = 65280 if dtype is ml_dtypes.bfloat16 else 65504
    source = np.array([np.inf, -np.inf, np.nan, largest, -1.5, 6e-8]).astype(dtype)
    target = np.empty(6, np.float16)
    copy_cast(target, source, FILE)
    assert target.tobytes() == source.astype(np.float16).tobytes()
    for number in (65536.0, -1e6):
        source = np.array([[1, np.inf], [number, np.nan]]).astype(dtype)
        with pytest.raises(MismatchError, match="too large for float16") as caught:
            copy_cast(np.empty((2, 2), np.float16).T, source.T, FILE)
        assert caught.value.where == str(FILE)
        assert f"{float(source[1, 0]):g};" in caught.value.evidence[0]


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_the_dtype_of_a_model_is_that_of_its_weights_not_of_float32_routers_or_integer_tables(weights: str) -> None:
    assert model_dtype({weights, "float32", "int64", "bool"}) == weights
