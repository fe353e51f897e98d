"""The orientation of a square weight, which its shape does not show: that of another tensor with the same numbers.

Such a tensor is the master weight, which is cast to the dtype of the weight, or the other name of a tied one. The first
rows of it are compared with the first rows and the first columns of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.formats.legacy.rank_files import FileArray
from paddleformers_fc.formats.legacy.sharding_group import arrange
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import open_local, read_range

_COMPARED = 64
"""The number of rows that are compared."""


def is_transposed(directory: Path, weight: FileArray, known: Sequence[FileArray]) -> bool | None:
    """Return whether a file contains a square weight transposed; None if that is not shown.

    Args:
        directory: of the files.
        weight: the weight.
        known: a tensor with the same numbers in the orientation of the model, whole or in ranges of elements.
    """
    length, dtype = weight.shape[0], to_numpy(to_safetensors(weight.dtype))
    count = min(length, _COMPARED)
    placed = arrange(weight.shape, known)
    if isinstance(placed, str):
        return None
    parts = [
        _elements(directory, piece, 0, min(last, count * length) - first)
        for piece, (first, last) in ((piece, flat or (0, length * length)) for piece, flat in placed)
        if first < count * length
    ]
    rows = np.concatenate(parts).astype(dtype).reshape(count, length)
    straight = _elements(directory, weight, 0, count * length).reshape(count, length)
    turned = np.stack([_elements(directory, weight, row * length, count) for row in range(length)], axis=1)
    fits = [rows.tobytes() == one.tobytes() for one in (straight, turned)]
    return fits[1] if fits[0] != fits[1] else None


def _elements(directory: Path, array: FileArray, begin: int, count: int) -> np.ndarray[Any, Any]:
    dtype = to_numpy(to_safetensors(array.dtype))
    with open_local(directory / array.file) as file:
        return np.frombuffer(read_range(file, array.begin + begin * dtype.itemsize, count * dtype.itemsize), dtype)
