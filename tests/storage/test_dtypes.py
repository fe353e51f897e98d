"""The three names of an element type agree with each other and with the safetensors library."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.dtypes import CODES, from_safetensors, item_size, to_numpy, to_safetensors


@pytest.mark.parametrize("code", sorted(CODES))
def test_names_sizes_and_numpy_types_agree(code: str) -> None:
    assert to_safetensors(from_safetensors(code)) == code
    assert to_numpy(code).name == from_safetensors(code)
    assert item_size(code) == to_numpy(code).itemsize


@pytest.mark.parametrize("code", sorted(CODES))
def test_the_library_gives_every_name_the_same_code_and_size(code: str) -> None:
    data = np.zeros(3, to_numpy(code)).tobytes()
    buffer = np.frombuffer(data, np.uint8)
    spec = safetensors.TensorSpec(
        dtype=from_safetensors(code), shape=[3], data_ptr=buffer.ctypes.data, data_len=len(data)
    )
    ((_, stored),) = safetensors.deserialize(safetensors.serialize({"x": spec}))
    assert stored["dtype"] == code


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"'complex64'.*(?s:.*)bfloat16"):
        to_safetensors("complex64")
    for function in (from_safetensors, to_numpy, item_size):
        with pytest.raises(FormatError, match="'F4'"):
            function("F4")
