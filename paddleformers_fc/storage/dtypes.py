"""Element types under their three names.

The package uses ``"bfloat16"``, a safetensors header contains ``"BF16"``, and numpy needs a dtype object (for types
that numpy lacks, from ``ml_dtypes``). One table contains all three, so that other modules use one name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from paddleformers_fc.errors import FormatError

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
_SIZE_OF = {code: dtype.itemsize for _, code, dtype in _TABLE}

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
    return _look_up(_SIZE_OF, code)


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
