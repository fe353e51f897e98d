"""Read operations: the one description of a read, for loads, exports, verification, diff and digests.

An :class:`Operation` reads a box of a stored, row-major box into a box of memory, transposed and cast where both sides
differ. Box and memory are reduced to the axes that matter: neighbours that are one run of bytes on both sides are one
axis. An operation without axes is one run on both sides, such as a tensor of the same layout.

An operation can be cut at any byte of the file (:meth:`Operation.cut`). :mod:`.executor` walks files in windows, cuts
the operations of a window, reads its bytes once and places them. Three kinds of bytes result:

- long runs that are the same in memory are read into it, without a copy;
- runs that are cast, transposed or short are read into an image of the window, and copied from there;
- gaps between short runs are read along, up to :data:`MAX_OVER_READ` times the needed bytes (data sieving).

Memory: the operations. They contain addresses and no arrays: for a hundred thousand small tensors, creating arrays
would cost more than reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.storage.dtypes import (
    ScaledTensor,
    as_float32,
    copy_cast,
    dtype_size,
    to_numpy,
    to_safetensors,
)
from paddleformers_fc.storage.files import memory_at
from paddleformers_fc.storage.paths import AnyPath

MAX_OVER_READ = 2.0
"""Maximum ratio of bytes read to bytes needed, if short runs are read with the gaps between them."""
SHORT_RUN = 1024
"""Shorter runs are read with the gaps between them, and are copied faster from an image than read one by one."""
DENSE_RUN = 8 << 10
"""Shorter runs without gaps in the file, and with gaps in memory, are copied faster from an image as well."""
STRIPE = 128
"""Rows of a transpose that are copied at a time: a cache line of each stays in the innermost cache."""
COLUMN_BYTES = 4096
"""Bytes of these rows that are copied at a time: they fit into a cache of half a MiB."""
_CAST_NUMBERS = 128 << 10
"""Numbers of eight bits that are cast at a time: in memory they have about twenty bytes each."""
_HOSTILE = 1024
"""Rows at multiples of this distance evict one another from a cache."""
_LINE = 64

Sizes = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]


class Memory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The memory of one wanted shard, in one piece.

    Args:
        owner: the object that owns the memory; this reference keeps it alive.
        address: of the first element.
        size: number of elements.
        dtype: of the elements.
    """

    owner: object
    address: int
    size: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: Array) -> Memory:
        """Return the memory of a flat array."""
        return cls(array, array.__array_interface__["data"][0], array.size, array.dtype)

    def array(self) -> Array:
        """Return all of it as a flat array, which is valid as long as the owner."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        if self.size == 0:
            return np.empty(0, self.dtype)
        return np.ndarray(self.size, self.dtype, memory_at(self.address, self.size * self.dtype.itemsize))

    def at(self, start: int, length: int) -> int:
        """Return the address of a range of bytes.

        Args:
            start: offset of the first byte.
            length: number of bytes.
        Raises:
            MismatchError: the range is not inside the memory.
        """
        if start < 0 or start + length > self.size * self.dtype.itemsize:
            raise MismatchError(
                "A read exceeds the memory of its tensor.",
                evidence=[f"bytes {start} to {start + length} of {self.size} elements of {self.dtype}"],
                next_step="Report this fault of the package.",
            )
        return self.address + start


class Scales(msgspec.Struct, frozen=True):
    """The scales of a matrix; products are computed in float32 and cast once.

    Args:
        tensor: that the matrix is one of.
        begin: offset of the first scale.
        matrix: offset of the first number.
        columns: the first wanted column, and the one behind the last: a byte can contain a number beside them.
        dtype: of the products.
    """

    tensor: ScaledTensor
    begin: int
    matrix: int
    columns: tuple[int, int]
    dtype: np.dtype[Any]

    def rows(self, operation: Operation) -> tuple[int, int]:
        """Return the offset and the length of the scales of an operation's rows of blocks, in bytes."""
        row, _ = self._position(operation)
        last, high = row + (operation.sizes[0] if len(operation.sizes) == 2 else 1) - 1, self.tensor.scheme.block[0]
        row_bytes = self.tensor.scales_per_row * dtype_size(self.tensor.scheme.scales)
        return self.begin + row // high * row_bytes, (last // high - row // high + 1) * row_bytes

    def of_part(self, operation: Operation, part: Operation, scales: Array) -> Array:
        """Return the scales that apply to a part of an operation."""
        begin, length = self.rows(part)
        begin -= self.rows(operation)[0]
        return scales[begin : begin + length]

    def multiplied(self, operation: Operation, data: Array, scales: Array) -> tuple[Array, int]:
        """Return the products of an operation as memory has them, and the number of unwanted columns before them.

        Args:
            operation: reads the numbers.
            data: the bytes of the numbers.
            scales: the bytes of :meth:`rows`.
        """
        scheme, (row, first) = self.tensor.scheme, self._position(operation)
        # A block can be wider than the matrix.
        high, wide = scheme.block[0], min(scheme.block[1], self.tensor.stored[-1])
        numbers = as_float32(data, scheme.numbers)
        low, end = max(first, self.columns[0]), min(first + numbers.shape[-1], self.columns[1])
        values = numbers[..., low - first : end - first]
        per_block = as_float32(scales, scheme.scales).reshape(-1, self.tensor.scales_per_row)
        factors = per_block[:, low // wide : -(-end // wide)].repeat(wide, axis=1)[:, low % wide :][:, : end - low]
        if high > 1:
            factors = factors[(row + np.arange(math.prod(values.shape[:-1]))) // high - row // high]
        with np.errstate(over="ignore", invalid="ignore"):
            values *= factors.reshape(values.shape)
        for dtype in (self.dtype, operation.to):
            if dtype != values.dtype:
                products = np.empty(values.shape, dtype)
                copy_cast(products, values, operation.path)
                values = products
        return values, low - first

    def _position(self, operation: Operation) -> tuple[int, int]:
        """Return the row and the column of an operation's first number."""
        row, byte = divmod(operation.begin - self.matrix, self.tensor.row_bytes)
        return row, byte * self.tensor.scheme.per_byte


class Operation(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A box of a file that fills a box of memory.

    Args:
        path: the file.
        begin: offset of the first byte.
        size: bytes from the first to the last one.
        address: of the first element in memory.
        owner: of the memory; this reference keeps it alive.
        sizes: lengths of the axes, in the order of the file; none for a run of bytes.
        sources: byte strides in the file.
        targets: byte strides in memory.
        dtype: of the elements in the file; bytes, if the numbers have scales.
        to: of the elements in memory.
        scales: of the numbers, if they have some.
    """

    path: AnyPath
    begin: int
    size: int
    address: int
    owner: object
    sizes: Sizes = ()
    sources: Sizes = ()
    targets: Sizes = ()
    dtype: np.dtype[Any] = np.dtype(np.uint8)
    to: np.dtype[Any] = np.dtype(np.uint8)
    scales: Scales | None = None

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.begin + self.size

    @property
    def reach(self) -> int:
        """Bytes from the first to the last element in memory."""
        if not self.sizes:
            return self.size
        steps = zip(self.sizes, self.targets, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.to.itemsize

    @property
    def needed(self) -> int:
        """Bytes of the elements in the file."""
        return math.prod(self.sizes) * self.dtype.itemsize if self.sizes else self.size

    @property
    def run(self) -> int:
        """The bytes of the runs that are the same in file and memory; 0 if elements are cast or transposed."""
        if not self.sizes:
            return self.size
        is_run = self.dtype == self.to and self.scales is None and self.targets[-1] == self.to.itemsize
        return self.sizes[-1] * self.dtype.itemsize if is_run else 0

    def cut(self, low: int, high: int) -> list[Operation]:
        """Return the part whose elements begin in a range of the file, as operations; an element may end behind it."""
        begin, end = self.begin, self.end
        if low <= begin and end <= high:
            return [self]
        if end <= low or high <= begin:
            return []
        if not self.sizes:
            first, last = max(low, begin), min(high, end)
            return [Operation(self.path, first, last - first, self.address + first - begin, self.owner)]
        count, stride = self.sizes[0], self.sources[0]
        row = self.size - (count - 1) * stride
        # Rows whose elements all begin in the range; at most one on either side has only some there.
        first = min(count, max(0, -(-(low - begin) // stride)))
        last = min(count, max(0, (high - 1 - begin - row + self.dtype.itemsize) // stride + 1))
        if len(self.sizes) == 1:
            return [self._rows(first, last)] if first < last else []
        found = []
        if first > 0 and (first - 1 < last or first > last):
            found += self._row(first - 1).cut(low, high)
        if first < last:
            found.append(self._rows(first, last))
        if first <= last < count:
            found += self._row(last).cut(low, high)
        return found

    def _rows(self, first: int, last: int) -> Operation:
        count, sizes = last - first, (last - first, *self.sizes[1:])
        size = self.size - (self.sizes[0] - count) * self.sources[0]
        return self._part(first, size, sizes, self.sources, self.targets)

    def _row(self, number: int) -> Operation:
        size = self.size - (self.sizes[0] - 1) * self.sources[0]
        return self._part(number, size, self.sizes[1:], self.sources[1:], self.targets[1:])

    def _part(self, number: int, size: int, sizes: Sizes, sources: Sizes, targets: Sizes) -> Operation:
        begin, address = self.begin + number * self.sources[0], self.address + number * self.targets[0]
        return Operation(
            self.path, begin, size, address, self.owner, sizes, sources, targets, self.dtype, self.to, self.scales
        )

    def runs(self) -> tuple[Array, Array]:
        """Return the offsets in the file and the addresses of all runs of :attr:`run` bytes."""
        if not self.sizes:
            return np.array([self.begin]), np.array([self.address])
        outer = self.sizes[:-1]
        return self.begin + _positions(outer, self.sources[:-1]), self.address + _positions(outer, self.targets[:-1])

    def spans(self) -> tuple[Array, int]:
        """Return the offsets of the runs in the file and their length, with gaps that are read along."""
        if not self.sizes:
            return np.array([self.begin]), self.size
        axes, length = _file_span(self.sizes, self.sources, self.dtype.itemsize)
        outer = len(self.sizes) - axes
        return self.begin + _positions(self.sizes[:outer], self.sources[:outer]), length

    def place(self, image: int, scratch: Array, scales: Array | None) -> None:
        """Copy the elements from an image of the file.

        Args:
            image: address of the first element.
            scratch: memory for rows of a transpose.
            scales: of the rows, for an operation that has some.
        Raises:
            MismatchError: a number is too large for its new type.
        """
        if not self.sizes:
            memory_at(self.address, self.size)[:] = memory_at(image, self.size)
            return
        if self.scales is not None or (self.dtype.itemsize == 1 and self.dtype != self.to):
            # Such a cast has copies of its numbers in other types.
            for part in self._stripes():
                own = None if self.scales is None or scales is None else self.scales.of_part(self, part, scales)
                part._place(image + part.begin - self.begin, scratch, own)
        else:
            self._place(image, scratch, scales)

    def _stripes(self) -> Iterator[Operation]:
        """Yield parts of at most :data:`_CAST_NUMBERS` numbers, or of one element of the first axis."""
        # With scales, temporary arrays of twice the size would be returned to the operating system at every part.
        most = _CAST_NUMBERS // (2 * self.scales.tensor.scheme.per_byte) if self.scales else _CAST_NUMBERS
        rows = max(1, most // math.prod(self.sizes[1:]))
        rest = self.size - (self.sizes[0] - 1) * self.sources[0]
        for low in range(0, self.sizes[0], rows):
            count = min(rows, self.sizes[0] - low)
            sizes = count, *self.sizes[1:]
            yield self._part(low, (count - 1) * self.sources[0] + rest, sizes, self.sources, self.targets)

    def _place(self, image: int, scratch: Array, scales: Array | None) -> None:
        dtype, to = self.dtype, self.to
        if dtype == to or self.scales is not None:
            to = np.dtype(f"u{to.itemsize}")  # As plain bits, which numpy copies fast.
            dtype = to if self.scales is None else dtype
        source: Array = np.ndarray(self.sizes, dtype, memory_at(image, self.size), strides=self.sources)
        targets, address = self.targets, self.address
        if self.scales is not None and scales is not None:
            products, skipped = self.scales.multiplied(self, source, scales)
            source = products.view(to)
            targets = (*targets[:-1], targets[-1] // self.scales.tensor.scheme.per_byte)
            address += skipped * targets[-1]
        reach = sum((n - 1) * stride for n, stride in zip(source.shape, targets, strict=True)) + to.itemsize
        target: Array = np.ndarray(source.shape, to, memory_at(address, reach), strides=targets)
        fast = min(range(source.ndim), key=targets.__getitem__)
        if fast == source.ndim - 1:
            copy_cast(target, source, self.path)
            return
        before, between = (slice(None),) * fast, (slice(None),) * (source.ndim - 2 - fast)
        width = max(1, COLUMN_BYTES // source.itemsize)
        for low in range(0, source.shape[fast], STRIPE):
            for left in range(0, source.shape[-1], width):
                part = (*before, slice(low, low + STRIPE), *between, slice(left, left + width))
                copy_cast(target[part], _spread(source[part], fast, scratch), self.path)


def _spread(rows: Array, fast: int, scratch: Array) -> Array:
    """Return rows that do not evict one another from a cache: copied to an odd number of cache lines apart."""
    length = rows.shape[-1] * rows.itemsize
    pitch = (-(-length // _LINE) | 1) * _LINE
    shape = rows.shape
    if rows.strides[fast] % _HOSTILE or shape[fast] < 8 or math.prod(shape[:-1]) * pitch > scratch.size:
        return rows
    spread: Array = np.ndarray(shape, rows.dtype, scratch, strides=(*row_major(shape[:-1], pitch), rows.itemsize))
    np.copyto(spread, rows)
    return spread


def strided(
    path: AnyPath,
    begin: int,
    size: Sizes,
    strides: tuple[Sizes, Sizes],
    dtypes: tuple[np.dtype[Any], np.dtype[Any]],
    address: int,
    owner: object,
) -> Operation | None:
    """Return the operation of a box; None if it has no element.

    Args:
        path: the file.
        begin: offset of the first element.
        size: lengths of the box, in elements.
        strides: byte strides in the file, and in memory.
        dtypes: of the elements in the file, and in memory.
        address: of the first element.
        owner: of the memory.
    """
    if 0 in size:
        return None
    axes = strided_axes(size, *strides, (dtypes[0].itemsize, dtypes[1].itemsize))
    reach = sum((n - 1) * stride for n, stride in zip(axes[0], axes[1], strict=True)) + dtypes[0].itemsize
    if dtypes[0] == dtypes[1] and len(axes[0]) == 1 and axes[2][0] == dtypes[1].itemsize:
        return Operation(path, begin, reach, address, owner)
    return Operation(path, begin, reach, address, owner, *axes, *dtypes)


def scaled(
    tensor: ScaledTensor, dtype: str, box: tuple[Sizes, Sizes], strides: Sizes, memory: Memory, address: int
) -> Iterator[Operation]:
    """Yield the operations of a box of products, one for each matrix.

    Args:
        tensor: numbers and scales.
        dtype: of the products.
        box: its first indices, and those behind the last; not empty.
        strides: byte strides in memory.
        memory: that is filled.
        address: of the first element.
    """
    pack, row_bytes = tensor.scheme.per_byte, tensor.row_bytes
    (first, low, left), (last, high, right) = tensor.by_matrix(box[0], 0), tensor.by_matrix(box[1], 1)
    apart, down, along = tensor.by_matrix(strides, 0)
    start, stop, blocks = left // pack, -(-right // pack), -(-tensor.stored[-2] // tensor.scheme.block[0])
    scale_bytes = blocks * tensor.scales_per_row * dtype_size(tensor.scheme.scales)
    for number in range(first, last):
        matrix = tensor.begin + number * tensor.stored[-2] * row_bytes
        yield Operation(
            tensor.file,
            matrix + low * row_bytes + start,
            (high - low - 1) * row_bytes + stop - start,
            # Of the first number of the first byte, which may be before the box.
            address + (number - first) * apart - left % pack * along,
            memory.owner,
            (high - low, stop - start),
            (row_bytes, 1),
            (down, along * pack),
            to=memory.dtype,
            scales=Scales(
                tensor, tensor.scales_begin + number * scale_bytes, matrix, (left, right), numpy_dtype(dtype)
            ),
        )


@lru_cache(maxsize=4096)
def strided_axes(size: Sizes, sources: Sizes, targets: Sizes, widths: tuple[int, int]) -> tuple[Sizes, Sizes, Sizes]:
    """Remove axes of length one, and merge neighbours that are contiguous on both sides.

    Args:
        size: lengths of the box, in elements, none of them zero.
        sources: byte strides in the file.
        targets: byte strides in memory.
        widths: bytes of an element in the file and in memory.
    Returns:
        lengths, and byte strides in the file and in memory, of the axes that are left.
    """
    axes: list[tuple[int, int, int]] = []
    for length, source, target in zip(size, sources, targets, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (length * source, length * target):
            axes[-1] = (axes[-1][0] * length, source, target)
        else:
            axes.append((length, source, target))
    # The last axis is always there for runs to be counted on, if only with one element.
    if not axes or axes[-1][1] != widths[0]:
        axes.append((1, *widths))
    lengths, first, second = zip(*axes, strict=True)
    return lengths, first, second


def row_major(shape: Sizes, width: int) -> Sizes:
    """Byte strides of a row-major box with elements of ``width`` bytes."""
    strides: list[int] = []
    step = width
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def bytes_read(sizes: Sizes, sources: Sizes, width: int) -> int:
    """Return the bytes that reading a box takes from storage; a little less if it is cut.

    Args:
        sizes: lengths of its axes.
        sources: byte strides in the file.
        width: bytes of a stored element.
    """
    axes, length = _file_span(sizes, sources, width)
    return math.prod(sizes[: len(sizes) - axes]) * length


def _file_span(sizes: Sizes, sources: Sizes, width: int) -> tuple[int, int]:
    """Return the number of last axes that are read in one run of the file, and its length in bytes."""
    axes, length = 0, width
    for count, stride in zip(reversed(sizes), reversed(sources), strict=True):
        if count > 1 and stride != length:
            if length < SHORT_RUN and stride <= length * MAX_OVER_READ:
                return axes + 1, (count - 1) * stride + length
            break
        axes, length = axes + 1, length * count
    return axes, length


def _positions(sizes: Sizes, strides: Sizes) -> Array:
    """Return the byte positions of all rows of a box, in order."""
    places = np.zeros(1, np.int64)
    for length, stride in zip(sizes, strides, strict=True):
        places = (places[:, None] + np.arange(length, dtype=np.int64) * stride).ravel()
    return places


@lru_cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a dtype name."""
    return to_numpy(to_safetensors(name))
