"""Matrices of 8-bit numbers with one scale per block, read as matrices of another dtype.

A catalog lists such a matrix as a tensor of a :class:`ScaledFile`, which has no bytes on disk: the row-major
concatenation of products of one dtype. Its reads become operations on the files of numbers and scales
(:class:`paddleformers_fc.storage.operations.Scales`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.paths import AnyPath


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
    _begins: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        total, begins = 0, []
        for matrix in self.matrices:
            begins.append(total)
            total += matrix.shape[0] * matrix.shape[1] * dtype_size(self.dtype)
        object.__setattr__(self, "_begins", [*begins, total])

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
