"""Dtypes under their three names, casts between them, and quantized tensors with scales.

The package uses ``"bfloat16"``, a safetensors header contains ``"BF16"``, and numpy needs a dtype object (for some
types from ``ml_dtypes``). One table contains all three. Casts give the same numbers as numpy; numbers of 8 bits are
cast by a table of their 256 values, seven times as fast as ``ml_dtypes`` casts float8. If a number would become
infinite in float16, the cast raises an error.

Matrices of 8-bit or 4-bit numbers with one scale per block (:class:`Scheme`) are read as tensors of a wider dtype. A
catalog lists such a :class:`ScaledTensor` in a virtual :class:`ScaledFile`, the row-major concatenation of products of
one dtype. Its reads become operations on the files of numbers and scales (:func:`.operations.scaled`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from paddleformers_fc.errors import FormatError, MismatchError, OptionError
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import suggestion

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
    ("float8_e8m0fnu", "F8_E8M0", np.dtype(ml_dtypes.float8_e8m0fnu)),
)
_CODE_OF = {name: code for name, code, _ in _TABLE}
_NAME_OF = {code: name for name, code, _ in _TABLE}
_NUMPY_OF = {code: dtype for _, code, dtype in _TABLE}

_SPELLINGS = {
    **{code.lower(): name for name, code in _CODE_OF.items()},
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
}
"""Other usual names of dtypes in options, in small letters; torch and paddle may precede any name."""

CODES: frozenset[str] = frozenset(_NUMPY_OF)
"""The supported dtype codes of safetensors headers."""
FP4 = "float4_e2m1fn"
"""Two numbers per byte, the first in the low bits. Headers declare the bytes as integers."""


def parse_dtype(text: object, known: Sequence[str]) -> str:
    """Return the name of a dtype that a user wrote: ``"torch.bfloat16"`` or ``"BF16"`` -> ``"bfloat16"``.

    Args:
        text: the dtype in any usual spelling.
        known: names of the valid dtypes.
    Raises:
        OptionError: it is none of the valid dtypes.
    """
    spelled = text.lower().removeprefix("torch.").removeprefix("paddle.") if isinstance(text, str) else ""
    name = _SPELLINGS.get(spelled, spelled)
    if name not in known:
        raise OptionError(
            f"Unknown dtype {text!r}.",
            where="--dtype",
            evidence=[f"known: {', '.join(known)}", *suggestion(text, known)],
            next_step="Choose one of these, or leave out --dtype (dtype=).",
        )
    return name


def to_safetensors(name: str) -> str:
    """Return the safetensors code of a dtype name: ``"bfloat16"`` -> ``"BF16"``.

    Raises:
        FormatError: the dtype is unknown, or safetensors has no such type.
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
    """Return the dtype of a model from the dtypes of its tensors.

    Some weights, such as routers, are float32 in any model, and tables are integers.
    """
    return min(dtypes, key=lambda name: ("float" not in name, name == "float32", name))


def _look_up(table: dict[str, _T], key: str) -> _T:
    value = table.get(key)
    if value is None:
        raise FormatError(
            f"Unknown tensor dtype {key!r}.",
            evidence=[f"known: {', '.join(sorted(table))}"],
            next_step="Store the tensor in one of these dtypes.",
        )
    return value


def copy_cast(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any], where: AnyPath) -> None:
    """Copy ``source`` into ``target``, of the same shape and with any strides, and cast as numpy does.

    Memory: a cast of 8-bit numbers makes a copy of the source in the target's dtype.

    Args:
        target: the array to fill.
        source: the array to copy.
        where: the file of the numbers, for errors.
    Raises:
        MismatchError: a finite number would become infinite in float16.
    """
    if source.itemsize == 1 and source.dtype != target.dtype:
        bits = _table(source.dtype, target.dtype).take(source.view(np.uint8), mode="clip")
        np.copyto(target.view(bits.dtype), bits)
        return
    with np.errstate(over="ignore"):
        np.copyto(target, source, casting="unsafe")
    if target.dtype == np.float16 and source.dtype != target.dtype:
        _check_range(target, source, where)


def _check_range(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any], where: AnyPath) -> None:
    lost = np.isinf(target) & np.isfinite(source)
    if lost.any():
        number = float(source[tuple(np.argwhere(lost)[0])])
        raise MismatchError(
            f"A {source.dtype} number is too large for float16 and would become infinite.",
            where=str(where),
            evidence=[f"{number:g}; float16 ends at 65504"],
            next_step="Use bfloat16 or float32 for these weights.",
        )


@lru_cache(maxsize=64)
def _table(source: np.dtype[Any], target: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the bits of every 8-bit number after the cast."""
    every = np.arange(256, dtype=np.uint8).view(source)
    return every.astype(target).view(f"u{target.itemsize}")


def as_float32(data: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """Return the numbers of an array of bytes as float32, along the last axis.

    Args:
        data: the bytes.
        name: dtype of the numbers: ``float32``, a dtype of eight bits, or :data:`FP4` with two numbers per byte.
    """
    if name == "float32":
        return data.view(np.float32)
    bits: np.ndarray[Any, Any] = _float32_table(name).take(data, mode="clip")
    return bits.view(np.float32)


@lru_cache
def _float32_table(name: str) -> np.ndarray[Any, Any]:
    """Return for every byte the bits of its number as float32, or of its two numbers as two float32."""
    every = np.arange(256, dtype=np.uint8)
    pairs = np.stack([every & 15, every >> 4], axis=1).ravel().view(ml_dtypes.float4_e2m1fn)
    numbers = pairs if name == FP4 else every.view(to_numpy(to_safetensors(name)))
    return numbers.astype(np.float32).view(np.uint64 if name == FP4 else np.uint32)


class Scheme(msgspec.Struct, frozen=True):
    """How the numbers of a matrix and their scales are stored.

    Args:
        numbers: dtype of the numbers, see :func:`as_float32`.
        scales: dtype of the scales; they have one row per row of blocks.
        block: numbers of rows and columns that share one scale; the last blocks may be smaller.
    """

    numbers: str
    scales: str
    block: tuple[int, int]

    @property
    def per_byte(self) -> int:
        """Numbers in a byte."""
        return 2 if self.numbers == FP4 else 1


class ScaledTensor(msgspec.Struct, frozen=True):
    """A tensor that is stored as numbers and scales.

    Args:
        name: name of the tensor of products.
        stored: shape of the numbers: rows and columns, after the number of matrices for a stack.
        scheme: how numbers and scales are stored.
        file: the file with the numbers.
        begin: byte offset of the first number.
        scales_file: the file with the scales.
        scales_begin: byte offset of the first scale.
        transposed: whether the tensor of products has columns before rows.
    """

    name: str
    stored: tuple[int, ...]
    scheme: Scheme
    file: AnyPath
    begin: int
    scales_file: AnyPath
    scales_begin: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the products."""
        *stack, rows, columns = self.stored
        return (*stack, columns, rows) if self.transposed else self.stored

    @property
    def row_bytes(self) -> int:
        """Bytes in a row of numbers."""
        return self.stored[-1] // self.scheme.per_byte

    @property
    def scales_per_row(self) -> int:
        """Number of scales in a row of blocks."""
        return -(-self.stored[-1] // self.scheme.block[1])

    def by_matrix(self, values: Sequence[int], single: int) -> tuple[int, int, int]:
        """Reorder one value per axis of the products to: matrices, rows, columns.

        Args:
            values: one for each axis.
            single: the value for matrices if this is not a stack.
        """
        *stack, first, second = values
        rows, columns = (second, first) if self.transposed else (first, second)
        return stack[0] if stack else single, rows, columns


class ScaledFile(msgspec.Struct, frozen=True, dict=True):
    """A virtual file of products of one dtype, one tensor after the other.

    Args:
        dtype: dtype of the products.
        tensors: the tensors in order.
    """

    dtype: str
    tensors: tuple[ScaledTensor, ...]

    @cached_property
    def begins(self) -> list[int]:
        """Byte offset of every tensor, and the total length."""
        return [0, *accumulate(math.prod(one.stored) * dtype_size(self.dtype) for one in self.tensors)]

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.begins[-1]

    @property
    def sources(self) -> frozenset[AnyPath]:
        """The files that it is computed from."""
        return frozenset(path for one in self.tensors for path in (one.file, one.scales_file))

    def tensor_at(self, offset: int) -> ScaledTensor:
        """Return the tensor that contains a byte offset."""
        return self.tensors[bisect_right(self.begins, offset) - 1]
