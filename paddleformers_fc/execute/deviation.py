"""The deviation of two tensors of equal shape and dtype: largest absolute and ULP difference, first differing index.

Tensors are read in pieces, of both sides alike, and md5 and figures come from the same pass. ULP counts the
representable numbers between two numbers: 1 for neighbours, so that it does not depend on their size. NaN deviates in
bits alone: it has no distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

_CHUNK = 1 << 18
"""Elements that are compared at a time, so that temporary arrays stay in the processor's cache."""

_Array = np.ndarray[Any, Any]


class Deviation(msgspec.Struct, frozen=True):
    """The figures of one tensor.

    Attributes:
        elements: how many differ in their bits.
        absolute: the largest absolute difference; None where it is not finite.
        ulp: the most representable numbers between two elements, plus one; None for types that are not floating point.
        first: index of the first element that differs.
    """

    elements: int
    absolute: float | None
    ulp: int | None
    first: tuple[int, ...]


@dataclass
class DeviationSum:
    """Adds up the deviation of a tensor from its pieces in order.

    Args:
        shape: of the tensor.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self._seen = self._elements = self._ulp = 0
        self._absolute = 0.0
        self._first: int | None = None
        self._is_float = False

    def add(self, one: _Array, other: _Array) -> None:
        """Add the next piece.

        Args:
            one: a flat array.
            other: the same elements of the other side, of the same dtype.
        """
        self._is_float = is_float(one.dtype)
        for begin, left, right in _chunks(one, other):
            different = np.flatnonzero(_bits(left) != _bits(right))
            if not different.size:
                continue
            if self._first is None:
                self._first = self._seen + begin + int(different[0])
            self._elements += different.size
            with np.errstate(invalid="ignore", over="ignore"):
                self._measure(left[different], right[different])
        self._seen += one.size

    def _measure(self, left: _Array, right: _Array) -> None:
        if self._is_float:
            numbers = ~(np.isnan(left.astype(np.float64)) | np.isnan(right.astype(np.float64)))
            if not numbers.all():
                self._absolute = math.inf
            left, right = left[numbers], right[numbers]
            a, b = _ordered(left), _ordered(right)
            self._ulp = max(self._ulp, int((np.maximum(a, b) - np.minimum(a, b)).max(initial=0)))
        distance = np.abs(left.astype(np.float64) - right.astype(np.float64))
        # Infinities of one sign are equal in bits, so that no difference here is inf - inf but of two signs.
        self._absolute = max(self._absolute, float(distance.max(initial=0.0)))

    def result(self) -> Deviation:
        """Return the figures of the added pieces."""
        absolute = self._absolute if math.isfinite(self._absolute) else None
        first = np.unravel_index(self._first or 0, self.shape) if self.shape else ()
        ulp = self._ulp if self._is_float else None
        return Deviation(self._elements, absolute, ulp, tuple(int(index) for index in first))


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is floating point, those of ``ml_dtypes`` included."""
    return dtype.kind == "f" or (dtype.type.__module__ == ml_dtypes.__name__ and "float" in dtype.name)


def _chunks(one: _Array, other: _Array) -> Iterator[tuple[int, _Array, _Array]]:
    for begin in range(0, one.size, _CHUNK):
        yield begin, one[begin : begin + _CHUNK], other[begin : begin + _CHUNK]


def _bits(values: _Array) -> _Array:
    return values.view(f"u{values.itemsize}") if values.itemsize in (1, 2, 4, 8) else values


def _ordered(values: _Array) -> _Array:
    """Return numbers as whole numbers in the same order, one apart where no number is between them."""
    sign = 1 << (8 * values.itemsize - 1)
    bits = _bits(values).astype(np.uint64)
    most = np.uint64((sign << 1) - 1)
    return np.where(bits >= sign, most - bits, bits + np.uint64(sign))
