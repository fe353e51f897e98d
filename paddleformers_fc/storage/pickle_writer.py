"""Pickles of plain data for other programs, of a fixed set of instructions; they are written and never executed here.

A file of arrays is one run of bytes and a dict of arrays that refer to it, so that the bytes of arrays are written in
any order by offset. Names of classes are those that the reader of the file has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddleformers_fc.errors import FormatError

_PROTOCOL = b"\x80\x04"
_STOP = b"."
_RUN = 0
"""The number under which the run of bytes of a file is remembered."""


@dataclass(frozen=True, eq=False)
class PickledObject:
    """An object whose class makes an instance without arguments and takes its state.

    Args:
        module: of the class.
        name: of the class.
        state: a dict of attributes, or another state of the class.
    """

    module: str
    name: str
    state: Any


def encode_pickle(value: Any) -> bytes:
    """Return the pickle of plain data, arrays and :class:`PickledObject`.

    Raises:
        FormatError: it contains something else.
    """
    return b"".join((_PROTOCOL, *_encoded(value), _STOP))


def encode_array_dict(arrays: Sequence[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, bytes]:
    """Return the bytes before and after those of arrays in the pickle of a dict of them.

    Args:
        arrays: name, numpy code of the element type (``f4``), shape and length in bytes; at least one. Their bytes
            follow one another. Those of larger elements come first, so that all are aligned.
    """
    total = sum(length for *_, length in arrays)
    before, after = [_PROTOCOL, b"}("], [b"q", bytes([_RUN])]
    offset = 0
    for number, (name, code, shape, length) in enumerate(arrays):
        part = before if number == 0 else after
        part += [*_encoded(name), *_global("numpy", "ndarray"), b"(", *_encoded(tuple(shape)), *_dtype(code)]
        if number == 0:
            before += [b"\x8e", struct.pack("<Q", total)]
        else:
            after += [b"h", bytes([_RUN])]
        after += [*_encoded(offset), b"tR"]
        offset += length
    return b"".join(before), b"".join((*after, b"u", _STOP))


def _encoded(value: Any) -> Iterable[bytes]:
    if value is None:
        return (b"N",)
    if type(value) is bool:
        return (b"\x88" if value else b"\x89",)
    if type(value) is int:
        return _integer(value)
    if type(value) is float:
        return (b"G", struct.pack(">d", value))
    if type(value) is str:
        raw = value.encode("utf-8", "surrogatepass")
        return (b"X", struct.pack("<I", len(raw)), raw)
    if isinstance(value, np.ndarray):
        return _array(value)
    if type(value) is tuple:
        return (b"(", *_all(value), b"t") if value else (b")",)
    if type(value) is list:
        return (b"](", *_all(value), b"e")
    if isinstance(value, Mapping):
        return (b"}(", *_all(one for item in value.items() for one in item), b"u")
    if isinstance(value, PickledObject):
        return (*_global(value.module, value.name), b")\x81", *_encoded(value.state), b"b")
    raise FormatError(f"A {type(value).__name__} cannot be written as plain data.", evidence=[repr(value)[:100]])


def _all(values: Iterable[Any]) -> Iterable[bytes]:
    for value in values:
        yield from _encoded(value)


def _integer(value: int) -> Iterable[bytes]:
    if -(1 << 31) <= value < 1 << 31:
        return (b"J", struct.pack("<i", value))
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a", bytes([len(raw)]), raw)


def _array(value: np.ndarray[Any, Any]) -> Iterable[bytes]:
    raw = np.ascontiguousarray(value).tobytes()
    run = (b"\x8e", struct.pack("<Q", len(raw)), raw)
    shape = tuple(map(int, value.shape))
    code = value.dtype.str[1:]
    return (*_global("numpy", "ndarray"), b"(", *_encoded(shape), *_dtype(code), *run, *_encoded(0), b"tR")


def _global(module: str, name: str) -> Iterable[bytes]:
    return (b"c", module.encode(), b"\n", name.encode(), b"\n")


def _dtype(code: str) -> Iterable[bytes]:
    """Return a little-endian element type."""
    made = (*_global("numpy", "dtype"), *_encoded((code, False, True)), b"R")
    return (*made, *_encoded((3, "|" if code[1:] == "1" else "<", None, None, None, -1, -1, 0)), b"b")
