"""Read operations, the common description of reads for loads, exports, verification, diff and digests.

An :class:`Operation` reads a box of a stored, row-major box into a box of memory, and transposes and casts if needed.
Axes that are contiguous on both sides are merged; an operation without axes is one run of bytes on both sides.
Operations can be cut at any byte of the file (:meth:`Operation.cut`), so that :mod:`.executor` can read files in
windows. Long runs that are equal in memory are read directly into it; runs that are cast, transposed or short are read
into an image of the window and copied from there. Gaps between short runs are read as well, up to
:data:`MAX_OVER_READ` times the needed bytes (data sieving).

Memory: the operations. They contain addresses and no arrays, because for a hundred thousand small tensors creating
arrays would cost more than reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.storage.dtypes import ScaledTensor, as_float32, copy_cast, dtype_size, to_numpy, to_safetensors
from paddleformers_fc.storage.files import memory_at
from paddleformers_fc.storage.paths import AnyPath

MAX_OVER_READ = 8.0
"""Maximum ratio of bytes read to bytes needed, if short runs are read with the gaps between them."""
_SHORT_RUN = 16 << 10
"""Shorter runs are read with the gaps between them. From a page cache this takes as long as separate reads. A disk or
a network file system sends the gaps in less time than it takes for more requests, up to a millisecond each."""
_DENSE_RUN = 8 << 10
"""Shorter runs without gaps in the file but with gaps in memory are copied from an image."""
_DIRECT_RUN = 1 << 10
"""Shorter runs are copied from an image, which is faster than one read for each."""
STRIPE = 128
"""Rows of a transpose that are copied at a time, so that a cache line of each stays in the L1 cache."""
COLUMN_BYTES = 4096
"""Bytes of these rows that are copied at a time, so that they fit into a cache of half a MiB."""
_CAST_NUMBERS = 128 << 10
"""8-bit numbers that are cast at a time; each takes about twenty bytes of memory."""
_CONFLICT_STRIDE = 1024
"""Rows at multiples of this distance evict one another from a cache."""
_LINE = 64
SCRATCH_BYTES = STRIPE * (COLUMN_BYTES + 2 * _LINE)
"""Memory for the rows of a tile of a matrix."""

Sizes = tuple[int, ...]
Array = np.ndarray[Any, np.dtype[Any]]


class Memory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The contiguous memory of one target shard.

    Args:
        owner: the object that owns the memory; this reference keeps it alive.
        address: address of the first element.
        size: number of elements.
        dtype: dtype of the elements.
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
        """Return the memory as a flat array, which is valid as long as the owner lives."""
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
                next_step="Report this as a bug of the package.",
            )
        return self.address + start


class Scales(msgspec.Struct, frozen=True):
    """The scales of a matrix. Products are computed in float32 and cast once.

    Args:
        tensor: the tensor that contains the matrix.
        begin: byte offset of the first scale.
        matrix: byte offset of the first number.
        columns: first and end column of the box; its bytes may contain one more number on either side.
        dtype: dtype of the products.
    """

    tensor: ScaledTensor
    begin: int
    matrix: int
    columns: tuple[int, int]
    dtype: np.dtype[Any]

    def rows(self, operation: Operation) -> tuple[int, int]:
        """Return byte offset and length of the scales for the rows of an operation."""
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
        """Return the products of an operation in the target's dtype, and the number of columns skipped before them.

        Args:
            operation: the operation that reads the numbers.
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
        """Return row and column of an operation's first number."""
        row, byte = divmod(operation.begin - self.matrix, self.tensor.row_bytes)
        return row, byte * self.tensor.scheme.per_byte


class Operation(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A box of a file that fills a box of memory.

    Args:
        path: the file.
        begin: offset of the first byte.
        size: number of bytes from the first to the last byte.
        address: address of the first element in memory.
        owner: owner of the memory; this reference keeps it alive.
        sizes: lengths of the axes, in file order; empty for a run of bytes.
        sources: byte strides in the file.
        targets: byte strides in memory.
        dtype: dtype of the elements in the file; bytes if the numbers have scales.
        to: dtype of the elements in memory.
        scales: the scales of the numbers, if they have any.
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
        """Offset after the last byte."""
        return self.begin + self.size

    @property
    def reach(self) -> int:
        """Number of bytes from the first to the last element in memory."""
        if not self.sizes:
            return self.size
        steps = zip(self.sizes, self.targets, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.to.itemsize

    @property
    def needed(self) -> int:
        """Number of bytes of the elements in the file."""
        return math.prod(self.sizes) * self.dtype.itemsize if self.sizes else self.size

    @property
    def run(self) -> int:
        """Length of the runs of bytes that are equal in file and memory; 0 if elements are cast or transposed."""
        if not self.sizes:
            return self.size
        is_run = self.dtype == self.to and self.scales is None and self.targets[-1] == self.to.itemsize
        return self.sizes[-1] * self.dtype.itemsize if is_run else 0

    def cut(self, low: int, high: int) -> list[Operation]:
        """Return operations for the elements that begin in a range of the file; an element may end after the range."""
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
        # Rows whose elements all begin in the range. On either side, at most one row has only some of them there.
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
        """Return the offsets of the runs in the file and their length, including gaps that are read as well."""
        if not self.sizes:
            return np.array([self.begin]), self.size
        axes, length = _file_span(self.sizes, self.sources, self.dtype.itemsize)
        outer = len(self.sizes) - axes
        return self.begin + _positions(self.sizes[:outer], self.sources[:outer]), length

    def place(self, image: int, scratch: Array, scales: Array | None) -> None:
        """Copy the elements from an image of the file.

        Args:
            image: address of the first element in the image.
            scratch: memory for rows of a transpose.
            scales: the bytes of the scales, if the operation has any.
        Raises:
            MismatchError: a number is too large for the target's dtype.
        """
        if not self.sizes:
            memory_at(self.address, self.size)[:] = memory_at(image, self.size)
            return
        if self.scales is not None or (self.dtype.itemsize == 1 and self.dtype != self.to):
            # Casts of 8-bit numbers need temporary arrays, so they run in stripes.
            for part in self._stripes():
                own = None if self.scales is None or scales is None else self.scales.of_part(self, part, scales)
                part._place(image + part.begin - self.begin, scratch, own)
        else:
            self._place(image, scratch, scales)

    def _stripes(self) -> Iterator[Operation]:
        """Yield parts of at most :data:`_CAST_NUMBERS` numbers, or of one element of the first axis."""
        # With scales, larger temporary arrays would be returned to the operating system after every part.
        most = _CAST_NUMBERS // (2 * self.scales.tensor.scheme.per_byte) if self.scales else _CAST_NUMBERS
        rows = max(1, most // math.prod(self.sizes[1:]))
        rest = self.size - (self.sizes[0] - 1) * self.sources[0]
        for low in range(0, self.sizes[0], rows):
            count = min(rows, self.sizes[0] - low)
            sizes = count, *self.sizes[1:]
            yield self._part(low, (count - 1) * self.sources[0] + rest, sizes, self.sources, self.targets)

    def _place(self, image: int, scratch: Array, scales: Array | None) -> None:
        dtype, to = self.dtype, self.to
        if self.scales is not None:
            to = _bits(to)
        source: Array = np.ndarray(self.sizes, dtype, memory_at(image, self.size), strides=self.sources)
        targets, address = self.targets, self.address
        if self.scales is not None and scales is not None:
            products, skipped = self.scales.multiplied(self, source, scales)
            source = products.view(to)
            targets = (*targets[:-1], targets[-1] // self.scales.tensor.scheme.per_byte)
            address += skipped * targets[-1]
        reach = sum((n - 1) * stride for n, stride in zip(source.shape, targets, strict=True)) + to.itemsize
        copy_tiled(np.ndarray(source.shape, to, memory_at(address, reach), strides=targets), source, scratch, self.path)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def copy_tiled(target: Array, source: Array, scratch: Array, where: AnyPath) -> None:
    """Copy and cast elements, in tiles if they are transposed.

    Args:
        target: the array to fill, of any strides.
        source: an array of the same shape, whose last axis has the smallest stride.
        scratch: memory for rows of a transpose, :data:`SCRATCH_BYTES` for a matrix.
        where: the file of the numbers, for errors.
    Raises:
        MismatchError: a number is too large for the target's dtype.
    """
    if target.dtype == source.dtype:  # Numpy copies plain bits faster.
        target, source = target.view(_bits(target.dtype)), source.view(_bits(source.dtype))
    fast = min(range(source.ndim), key=target.strides.__getitem__, default=-1)
    if fast == source.ndim - 1:
        copy_cast(target, source, where)
        return
    before, between = (slice(None),) * fast, (slice(None),) * (source.ndim - 2 - fast)
    width = max(1, COLUMN_BYTES // source.itemsize)
    for low in range(0, source.shape[fast], STRIPE):
        for left in range(0, source.shape[-1], width):
            part = (*before, slice(low, low + STRIPE), *between, slice(left, left + width))
            copy_cast(target[part], _spread(source[part], fast, scratch), where)


def _spread(rows: Array, fast: int, scratch: Array) -> Array:
    """Copy rows that would evict one another from a cache, so that they are an odd number of cache lines apart."""
    length = rows.shape[-1] * rows.itemsize
    pitch = (-(-length // _LINE) | 1) * _LINE
    shape = rows.shape
    if rows.strides[fast] % _CONFLICT_STRIDE or shape[fast] < 8 or math.prod(shape[:-1]) * pitch > scratch.size:
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
    """Return the operation for a box; None if the box is empty.

    Args:
        path: the file.
        begin: offset of the first element.
        size: shape of the box.
        strides: byte strides in the file, and in memory.
        dtypes: dtypes in the file, and in memory.
        address: address of the first element in memory.
        owner: owner of the memory.
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
    """Yield the operations for a box of products, one per matrix.

    Args:
        tensor: the numbers and scales.
        dtype: dtype of the products.
        box: first and end indices of the box, which is not empty.
        strides: byte strides in memory.
        memory: the memory to fill.
        address: address of the first element in memory.
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
            # The address of the first number of the first byte, which may be before the box.
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
    """Remove axes of length one, and merge axes that are contiguous on both sides.

    Args:
        size: shape of the box, without zeros.
        sources: byte strides in the file.
        targets: byte strides in memory.
        widths: bytes of an element in the file and in memory.
    Returns:
        lengths, and byte strides in the file and in memory, of the remaining axes.
    """
    axes: list[tuple[int, int, int]] = []
    for length, source, target in zip(size, sources, targets, strict=True):
        if length == 1:
            continue
        if axes and axes[-1][1:] == (length * source, length * target):
            axes[-1] = (axes[-1][0] * length, source, target)
        else:
            axes.append((length, source, target))
    # The last axis must be contiguous in the file, because runs are counted along it; it may have only one element.
    if not axes or axes[-1][1] != widths[0]:
        axes.append((1, *widths))
    lengths, first, second = zip(*axes, strict=True)
    return lengths, first, second


def row_major(shape: Sizes, width: int) -> Sizes:
    """Return the byte strides of a row-major box with elements of ``width`` bytes."""
    strides: list[int] = []
    step = width
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def is_read_directly(sizes: Sizes, sources: Sizes, width: int) -> bool:
    """Return whether the runs of a box are read directly into memory; otherwise they are copied from an image.

    Args:
        sizes: lengths of the axes; the last one is a run on both sides.
        sources: byte strides in the file.
        width: bytes of an element.
    """
    run = sizes[-1] * width
    if run >= _SHORT_RUN or len(sizes) == 1:
        return run >= _DIRECT_RUN
    if sources[-2] == run:
        return run >= _DENSE_RUN
    return run >= _DIRECT_RUN and sources[-2] > run * MAX_OVER_READ


def bytes_read(sizes: Sizes, sources: Sizes, width: int) -> int:
    """Return the number of bytes that reading a box takes from storage; slightly fewer if it is cut.

    Args:
        sizes: lengths of the axes.
        sources: byte strides in the file.
        width: bytes of a stored element.
    """
    axes, length = _file_span(sizes, sources, width)
    return math.prod(sizes[: len(sizes) - axes]) * length


def _file_span(sizes: Sizes, sources: Sizes, width: int) -> tuple[int, int]:
    """Return the number of trailing axes that are read in one run of the file, and the run's length in bytes."""
    axes, length = 0, width
    for count, stride in zip(reversed(sizes), reversed(sources), strict=True):
        if count > 1 and stride != length:
            if length < _SHORT_RUN and stride <= length * MAX_OVER_READ:
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
