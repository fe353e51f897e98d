"""Matrices of 8-bit numbers with one scale per block, read as matrices of another dtype.

A :class:`ScaledFile` has no bytes on disk. It is the row-major concatenation of matrices of one dtype. Any byte range
of it can be read: the numbers of the range and the scales of its blocks are read, multiplied in float32, and cast once.
A catalog therefore lists such a matrix as any other tensor, and every reader of ranges can read it.

Memory: about ten bytes per number for ``_PORTION`` numbers, or for one row if that is longer, and the scales of its
rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.dtypes import copy_cast, to_numpy, to_safetensors
from paddleformers_fc.storage.files import memory_at
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.rows import ScatterList

_PORTION = 1 << 17
"""Numbers that are produced at a time."""

_Read = Callable[[AnyPath, int, Any], None]
"""Fills a buffer with the bytes of a file from an offset on."""


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

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.shape[0] * self.shape[1]

    def rectangle(self, read: _Read, rows: range, columns: range) -> np.ndarray[Any, Any]:
        """Return some columns of successive rows as float32."""
        width = self.shape[1]
        raw = np.empty((len(rows), len(columns)), to_numpy(to_safetensors(self.dtype)))
        if len(columns) == width:
            read(self.file, self.begin + rows.start * width, raw)
        else:
            for row, line in zip(rows, raw, strict=True):
                read(self.file, self.begin + row * width + columns.start, line)
        values = np.empty(raw.shape, np.float32)
        copy_cast(values, raw, self.file)
        high, wide = self.block
        per_row = -(-width // wide)
        first, last = rows.start // high, (rows.stop - 1) // high
        scales = np.empty((last - first + 1, per_row), np.float32)
        read(self.scales_file, self.scales_begin + first * per_row * scales.itemsize, scales)
        of_columns = np.arange(columns.start, columns.stop) // wide
        for number, line in enumerate(scales, first):
            low = max(rows.start, number * high) - rows.start
            values[low : min(rows.stop, (number + 1) * high) - rows.start] *= line[of_columns]
        return values


@dataclass(frozen=True)
class ScaledFile:
    """Matrices of one dtype, one behind the other.

    Args:
        dtype: of the numbers that are read.
        matrices: in their order.
    """

    dtype: str
    matrices: tuple[ScaledMatrix, ...]
    _ends: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        total, ends = 0, []
        for matrix in self.matrices:
            total += matrix.size
            ends.append(total)
        object.__setattr__(self, "_ends", ends)

    @property
    def size(self) -> int:
        """Length in bytes."""
        return (self._ends[-1] if self._ends else 0) * self._width

    @property
    def sources(self) -> frozenset[AnyPath]:
        """The files that it is produced from."""
        return frozenset(path for one in self.matrices for path in (one.file, one.scales_file))

    @property
    def _width(self) -> int:
        return to_numpy(to_safetensors(self.dtype)).itemsize

    def read_into(self, path: AnyPath, read: _Read, offset: int, view: memoryview) -> None:
        """Fill a buffer with the bytes from an offset on.

        Args:
            path: of this file, for errors.
            read: reads stored files.
            offset: of the first byte.
            view: flat and writable.
        Raises:
            FormatError: the range is outside the file or divides a number.
            Corrupt, StorageError: as ``read``.
        """
        width = self._width
        if offset < 0 or offset % width or view.nbytes % width or offset + view.nbytes > self.size:
            raise FormatError(
                f"Bytes {offset} to {offset + view.nbytes} of {path} cannot be produced from {self.dtype} numbers.",
                where=str(path),
            )
        out = np.frombuffer(view, to_numpy(to_safetensors(self.dtype)))
        first = offset // width
        while out.size:
            number = bisect_right(self._ends, first)
            matrix, end = self.matrices[number], self._ends[number]
            taken = min(out.size, end - first)
            _produce(matrix, read, first - (end - matrix.size), out[:taken])
            out, first = out[taken:], first + taken

    def read_rows(self, path: AnyPath, read: _Read, rows: ScatterList) -> None:
        """Fill memory with many ranges; equal columns of successive rows are produced together."""
        index = 0
        offsets, lengths = rows.offsets.tolist(), rows.lengths.tolist()
        addresses = rows.addresses.tolist()
        while index < len(offsets):
            count = self._rows_alike(offsets, lengths, index)
            if count > 1:
                self._read_rectangle(path, read, offsets[index], addresses[index : index + count], lengths[index])
            else:
                self.read_into(path, read, offsets[index], memory_at(addresses[index], lengths[index]))
            index += count

    def _rows_alike(self, offsets: list[int], lengths: list[int], index: int) -> int:
        """Return how many ranges from ``index`` on are equal columns of successive rows of a matrix, at least one."""
        matrix, column, _ = self._place(offsets[index])
        pitch, most = matrix.shape[1] * self._width, max(1, _PORTION * self._width // max(lengths[index], 1))
        if column * self._width + lengths[index] > pitch:
            return 1
        count = 1
        while (
            index + count < len(offsets)
            and count < most
            and lengths[index + count] == lengths[index]
            and offsets[index + count] == offsets[index] + count * pitch
            and self._place(offsets[index + count])[0] is matrix
        ):
            count += 1
        return count

    def _place(self, offset: int) -> tuple[ScaledMatrix, int, int]:
        """Return the matrix of a byte, and its column and row."""
        element = offset // self._width
        number = min(bisect_right(self._ends, element), len(self._ends) - 1)
        matrix = self.matrices[number]
        row, column = divmod(element - (self._ends[number] - matrix.size), matrix.shape[1])
        return matrix, column, row

    def _read_rectangle(self, path: AnyPath, read: _Read, offset: int, addresses: list[int], length: int) -> None:
        matrix, column, row = self._place(offset)
        columns = range(column, column + length // self._width)
        values = matrix.rectangle(read, range(row, row + len(addresses)), columns)
        out = np.empty(values.shape, to_numpy(to_safetensors(self.dtype)))
        copy_cast(out, values, path)
        for address, line in zip(addresses, out.view(np.uint8), strict=True):
            memory_at(address, length)[:] = line.data


def _produce(matrix: ScaledMatrix, read: _Read, first: int, out: np.ndarray[Any, Any]) -> None:
    """Fill an array with successive elements of a matrix: parts of rows, or whole rows."""
    width = matrix.shape[1]
    while out.size:
        row, column = divmod(first, width)
        if column or out.size < width:
            shape = (1, min(out.size, width - column))
        else:
            shape = (min(out.size // width, max(1, _PORTION // width)), width)
        taken = shape[0] * shape[1]
        values = matrix.rectangle(read, range(row, row + shape[0]), range(column, column + shape[1]))
        copy_cast(out[:taken].reshape(shape), values, matrix.file)
        out, first = out[taken:], first + taken
