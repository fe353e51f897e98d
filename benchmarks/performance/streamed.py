"""What every contender of a stream does with its tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from benchmarks.performance.held import Done
from benchmarks.performance.pieces import Piece, is_transposed, whole_tensor

FIRST_TENSOR = "first tensor"
"""The phase from the call to the first tensor."""


def taken(tensors: Iterable[tuple[str, Any]], is_checked: bool) -> Done:
    """Take all tensors of a stream; if it is checked, compare their bits with those of open weights."""
    begun, first, wrong = time.monotonic(), 0.0, []
    for name, tensor in tensors:
        first = first or time.monotonic() - begun
        if is_checked and tensor.numpy().tobytes() != _expected(name, tuple(tensor.shape)):
            wrong.append(name)
    if wrong or not first:
        raise RuntimeError(f"{len(wrong)} tensors have not the right bits, {wrong[:1]} first")
    return Done(phases={FIRST_TENSOR: first})


def _expected(name: str, shape: tuple[int, ...]) -> bytes:
    held = shape[::-1] if is_transposed(name) else shape
    values = whole_tensor(Piece("", name, "float32", held, (0,) * len(held), held))
    return (values.T if is_transposed(name) else values).tobytes()
