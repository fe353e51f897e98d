"""Element types under their three names.

The package uses ``"bfloat16"``, a safetensors header contains ``"BF16"``, and numpy needs a dtype object (for types
that numpy lacks, from ``ml_dtypes``). One table contains all three, so that other modules use one name.

Copies between arrays of different element types, exactly as numpy casts, and faster where numpy is slow.

Numbers of 8 bits are cast by a table of their 256 values, which the replaced cast itself computes. That is seven times
as fast as the cast of ``ml_dtypes`` for float8. Every other cast is numpy's own. float16 ends at 65504, below float32
and bfloat16; a number that would become infinite is refused.

Matrices of 8-bit numbers with one scale per block are read as matrices of another dtype. A catalog lists such a matrix
as a tensor of a :class:`ScaledFile`, which has no bytes on disk: the row-major concatenation of products of one dtype.
Its reads become operations on the files of numbers and scales (:class:`.operations.Scales`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from paddleformers_fc.errors import FormatError, MismatchError
from paddleformers_fc.storage.paths import AnyPath

_T = TypeVar("_T")

_TABLE: tuple[tuple[str, str, np.dtype[Any]], ...] = (
    ("float64", "F64", np.dtype(np.float64)),
    ("float32", "F32", np.dtype(np.float32)),
    ("float16", "F16", np.dtype(np.float16)),
    ("bfloat16", "BF16", np.dtype(ml_dtypes.bfloat16)),
    ("int64", "I64", np.dtype(np.int64)),
    ("int32", "I32", np.dtype(np.int32)),
    ("int16", "I16", np.dtype(np.int16)),
    ("int8", "I8", np.dtype(np.int8)),
    ("uint64", "U64", np.dtype(np.uint64)),
    ("uint32", "U32", np.dtype(np.uint32)),
    ("uint16", "U16", np.dtype(np.uint16)),
    ("uint8", "U8", np.dtype(np.uint8)),
    ("bool", "BOOL", np.dtype(np.bool_)),
    ("float8_e4m3fn", "F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn)),
    ("float8_e5m2", "F8_E5M2", np.dtype(ml_dtypes.float8_e5m2)),
)
_CODE_OF = {name: code for name, code, _ in _TABLE}
_NAME_OF = {code: name for name, code, _ in _TABLE}
_NUMPY_OF = {code: dtype for _, code, dtype in _TABLE}

CODES: frozenset[str] = frozenset(_NUMPY_OF)
"""Every dtype code that a safetensors header may use here."""


def to_safetensors(name: str) -> str:
    """Return the safetensors code of a dtype name: ``"bfloat16"`` -> ``"BF16"``.

    Raises:
        FormatError: safetensors has no such type, or it is unknown here.
    """
    return _look_up(_CODE_OF, name)


def from_safetensors(code: str) -> str:
    """Return the dtype name of a safetensors code: ``"BF16"`` -> ``"bfloat16"``.

    Raises:
        FormatError: the code is unknown.
    """
    return _look_up(_NAME_OF, code)


def to_numpy(code: str) -> np.dtype[Any]:
    """Return the numpy dtype of a safetensors code: ``"BF16"`` -> ``ml_dtypes.bfloat16``.

    Raises:
        FormatError: the code is unknown.
    """
    return _look_up(_NUMPY_OF, code)


def item_size(code: str) -> int:
    """Return the bytes per element of a safetensors code: ``"BF16"`` -> 2.

    Raises:
        FormatError: the code is unknown.
    """
    return to_numpy(code).itemsize


@lru_cache
def dtype_size(name: str) -> int:
    """Return the bytes per element of a dtype: ``"bfloat16"`` -> 2.

    Raises:
        FormatError: the dtype is unknown.
    """
    return item_size(to_safetensors(name))


def model_dtype(dtypes: Collection[str]) -> str:
    """Return the dtype of a model by those of its weights, of which some, such as routers, are float32 in any model."""
    return min(dtypes, key=lambda name: (name == "float32", name))


def _look_up(table: dict[str, _T], key: str) -> _T:
    value = table.get(key)
    if value is None:
        raise FormatError(
            f"{key!r} is an unknown tensor dtype.",
            evidence=[f"known: {', '.join(sorted(table))}"],
            next_step="Store the tensor in one of these dtypes.",
        )
    return value


def copy_cast(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any], where: AnyPath) -> None:
    """Copy ``source`` into ``target``, of the same shape, with any strides; numbers are cast as numpy casts them.

    Memory: where numbers of 8 bits are cast, a copy of the source in the target's type.

    Args:
        target: where the numbers go.
        source: the numbers.
        where: the file that they are from, for errors.
    Raises:
        MismatchError: a finite number would be infinite as float16.
    """
    if source.itemsize == 1 and source.dtype != target.dtype:
        bits = _table(source.dtype, target.dtype).take(source.view(np.uint8), mode="clip")
        np.copyto(target.view(bits.dtype), bits)
        return
    with np.errstate(over="ignore"):
        np.copyto(target, source, casting="unsafe")
    if target.dtype == np.float16 and source.dtype != target.dtype:
        _refuse_overflow(target, source, where)


def _refuse_overflow(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any], where: AnyPath) -> None:
    lost = np.isinf(target) & np.isfinite(source)
    if lost.any():
        number = float(source[tuple(np.argwhere(lost)[0])])
        raise MismatchError(
            f"A number that is stored as {source.dtype} is too large for float16, where it would be infinite.",
            where=str(where),
            evidence=[f"{number:g}; float16 ends at 65504"],
            next_step="Load these weights into bfloat16 or float32.",
        )


@lru_cache(maxsize=64)
def _table(source: np.dtype[Any], target: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the bits of every 8-bit number after the cast."""
    every = np.arange(256, dtype=np.uint8).view(source)
    return every.astype(target).view(f"u{target.itemsize}")


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A stored matrix and its scales.

    Args:
        file: contains the numbers.
        begin: byte offset of the first number.
        dtype: of the numbers, 8 bits each.
        shape: rows and columns.
        scales_file: contains the scales, float32, one row of them per row of blocks.
        scales_begin: byte offset of the first scale.
        block: rows and columns that share one scale; the last blocks may be smaller.
    """

    file: AnyPath
    begin: int
    dtype: str
    shape: tuple[int, int]
    scales_file: AnyPath
    scales_begin: int
    block: tuple[int, int]


@dataclass(frozen=True)
class ScaledFile:
    """Products of one dtype, one matrix behind the other.

    Args:
        dtype: of the products.
        matrices: in their order.
    """

    dtype: str
    matrices: tuple[ScaledMatrix, ...]

    @cached_property
    def _begins(self) -> list[int]:
        sizes = (rows * columns * dtype_size(self.dtype) for rows, columns in (one.shape for one in self.matrices))
        return [0, *accumulate(sizes)]

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._begins[-1]

    @property
    def sources(self) -> frozenset[AnyPath]:
        """The files that it is produced from."""
        return frozenset(path for one in self.matrices for path in (one.file, one.scales_file))

    def matrix_at(self, offset: int) -> ScaledMatrix:
        """Return the matrix of a byte."""
        return self.matrices[bisect_right(self._begins, offset) - 1]
