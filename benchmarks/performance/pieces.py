"""What a rank holds of a tensor, and the numbers in it, without this package, whose import a turn measures.

Numbers depend on the name of a tensor alone, so that every rank and every contender makes the same ones.
A canonical linear weight is the model's, transposed; so what a load must have filled its targets with is known without
asking the mapping that is measured.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
FILE = "model.safetensors"
"""The name of a file of open weights."""
_ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16}
"""Numpy types by dtype; of ``bfloat16`` the bits."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor.

    Args:
        role: its role.
        name: its full name.
        dtype: element type by its numpy name.
        shape: of the whole tensor.
        lo: first coordinates of the part.
        hi: exclusive last coordinates.
        flat: the range of the part's elements that is held; None for all.
    """

    role: str
    name: str
    dtype: str
    shape: Shape
    lo: Shape
    hi: Shape
    flat: tuple[int, int] | None = None

    @property
    def local_shape(self) -> Shape:
        """The shape of the part, whose range may be held alone."""
        return tuple(high - low for low, high in zip(self.lo, self.hi, strict=True))

    @property
    def held_shape(self) -> Shape:
        """The shape of what is held."""
        return self.local_shape if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def box(self) -> tuple[slice, ...]:
        """The part, to index the whole tensor with."""
        return tuple(slice(low, high) for low, high in zip(self.lo, self.hi, strict=True))

    @property
    def element(self) -> np.dtype[Any]:
        """The numpy type of its memory."""
        return np.dtype(_ELEMENTS[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of what is held."""
        return math.prod(self.held_shape) * self.element.itemsize


def write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write pieces for the ranks."""
    rows = [(one.role, one.name, one.dtype, one.shape, one.lo, one.hi, one.flat) for one in pieces]
    path.write_text(json.dumps(rows), encoding="utf-8")


def read_pieces(path: Path) -> list[Piece]:
    """Read what :func:`write_pieces` wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Piece(*map(_as_tuple, row)) for row in rows]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def is_transposed(name: str) -> bool:
    """Whether Paddle holds this weight the other way round than open weights do."""
    return name.endswith("_proj.weight")


def canonical(piece: Piece) -> Piece:
    """A whole tensor as open weights hold it."""
    shape = piece.shape[::-1] if is_transposed(piece.name) else piece.shape
    return replace(piece, shape=shape, lo=(0,) * len(shape), hi=shape)


def whole_tensor(piece: Piece) -> Array:
    """All numbers of the tensor of a piece: random bits that depend on its name, finite as floating numbers."""
    size, width = math.prod(piece.shape), piece.element.itemsize
    if size == 1:
        return np.full(piece.shape, 0.5, piece.element)  # A power of beta, which is one number for all parameters.
    bits = np.random.default_rng(zlib.crc32(piece.name.encode())).integers(0, 256, size * width, np.uint8)
    # The highest bit of the exponent stays clear: no infinities and no numbers that are none.
    bits[width - 1 :: width] &= 0xBF
    return bits.view(piece.element).reshape(piece.shape)


def part_of(piece: Piece) -> Array:
    """What a rank holds of a tensor, flat and contiguous."""
    return _held(piece, whole_tensor(piece))


def from_canonical(piece: Piece) -> Array:
    """What a rank must hold after a load from open weights, flat and contiguous."""
    tensor = whole_tensor(canonical(piece))
    return _held(piece, tensor.T if is_transposed(piece.name) else tensor)


def zeros(piece: Piece) -> Array:
    """Memory for what a rank wants, whose pages the process has."""
    array = np.empty(math.prod(piece.held_shape), piece.element)
    array.fill(0)
    return array


Values = Callable[[Piece], Array]


def _held(piece: Piece, tensor: Array) -> Array:
    flat = np.ascontiguousarray(tensor[piece.box]).reshape(-1)
    return flat if piece.flat is None else flat[piece.flat[0] : piece.flat[1]].copy()


def copy_of(saved: Path) -> Path:
    """Where the copy of a checkpoint is that ``diff`` reads."""
    return saved.with_name(f"{saved.name}-copy")
