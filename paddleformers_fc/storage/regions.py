"""Read a box of a stored, row-major box directly into any strided array.

A region and its target are reduced to the axes that matter: one run of bytes on both sides is one axis. Then the region
is cut into *tiles*. There are three strategies to read one:

- **Direct**: runs of bytes that are contiguous in the target too. They are read from the file into the target without a
  copy, one or many in a system call (:mod:`.rows`): same layouts, rows, column slices, and parts of a file
  that are interleaved in runs of a KiB or more.
- **Buffered**: transposes, casts, and finer interleavings. The runs of a tile are gathered in scratch memory and
  written to the target in one strided copy. The scratch memory is reused, and small enough for the processor's cache:
  new memory of many MiB costs more in page faults than the copy. A tile of a transpose is as long as the target's runs
  need (``STRIPE`` elements) and as wide as the file's runs need (``RUN_BYTES``). Its rows lie an odd number of cache
  lines apart, because rows at a power of two would evict one another.
- **Sieved** (data sieving): runs shorter than ``SHORT_RUN`` that lie close together. They are read with the gaps
  between them, up to ``max_over_read`` times the needed bytes, and picked out.

A checkpoint has very many regions of few kinds: the strategy of a kind is computed once.

Tiles are independent, so that many threads can read one large region. Memory is one scratch memory per thread, of the
size that the caller chose. The bytes that are read do not depend on that size or on the assignment of tiles to
threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import Any, Protocol

import numpy as np

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.dtypes import copy_cast
from paddleformers_fc.storage.files import MOST_BUFFERS
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.prefetch import ExpectedRange, joins
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.rows import Rows, ScatterList

DEFAULT_STAGING_MEMORY_BYTES = 64 << 20
"""Bound of the scratch memory of all threads together."""
HOT_BYTES = 128 * (8192 + 64)
"""Scratch memory of one thread at most; more would leave the processor's cache."""
TILE_BYTES = 8 << 20
"""Maximum bytes of a direct tile: enough to make a system call cheap, few enough to share a tensor among threads."""
MAX_OVER_READ = 2.0
SHORT_RUN = 1024
RUN_BYTES = 8192
STRIPE = 128
INTERLEAVED_RUN = 1024
# Shorter runs are copied faster as numbers than as bytes.
_SHORTEST_ROW = 16
_MOST_ROWS = 4096
_MOST_LINES = 512
_LINE = 64

_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a stored, row-major box.

    Args:
        path: the file.
        begin: byte offset of the stored box's first element.
        shape: shape of the stored box, in elements.
        lo: first coordinate of the region in the stored box.
        size: lengths of the region.
        dtype: element type of the stored numbers.
    """

    path: AnyPath
    begin: int
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    size: tuple[int, ...]
    dtype: np.dtype[Any]


class Workspace:
    """Scratch memory of one thread.

    Args:
        scratch_bytes: size of the scratch memory; at least one element.
    """

    def __init__(self, scratch_bytes: int = HOT_BYTES) -> None:
        self.scratch_bytes = scratch_bytes
        self._memory: np.ndarray[Any, Any] | None = None
        self._address = 0
        self._lines: tuple[tuple[int, int, int], list[memoryview]] = ((0, 0, 0), [])

    @property
    def memory(self) -> np.ndarray[Any, Any]:
        """The scratch memory, made when it is first needed."""
        if self._memory is None:
            self._memory = np.empty(self.scratch_bytes, np.uint8)
        return self._memory

    @property
    def address(self) -> int:
        """The address of the scratch memory."""
        if not self._address:
            self._address = self.memory.ctypes.data
        return self._address

    def holds(self, address: int) -> bool:
        """Return whether an address is in the scratch memory."""
        return self._address <= address < self._address + self.scratch_bytes

    def lines(self, count: int, pitch: int, length: int) -> list[memoryview]:
        """Return ``count`` lines of the scratch memory, ``pitch`` bytes apart; cached, because tiles are alike."""
        if self._lines[0] != (count, pitch, length):
            memory = self.memory.data
            self._lines = (
                (count, pitch, length),
                [memory[low : low + length] for low in range(0, count * pitch, pitch)],
            )
        return self._lines[1]


@dataclass(frozen=True, slots=True)
class StridedAxes:
    """The axes of a region that matter, in the order of the file, with byte strides in the file and in the target."""

    sizes: Sizes
    sources: Sizes
    targets: Sizes

    @property
    def run(self) -> tuple[int, int]:
        """The number of last axes that are one run of bytes in the file, and the length of that run in bytes."""
        return _run(self.sizes, self.sources)


def strided_axes(size: Sizes, sources: Sizes, targets: Sizes, widths: tuple[int, int]) -> StridedAxes:
    """Remove axes of length one, and merge neighbours that are contiguous on both sides.

    Args:
        size: lengths of the region, in elements, none of them zero.
        sources: byte strides in the file.
        targets: byte strides in the target.
        widths: bytes of an element in the file and in the target.
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
    return StridedAxes(*zip(*axes, strict=True))


def row_major(shape: Sizes, width: int) -> Sizes:
    """Byte strides of a row-major box with elements of ``width`` bytes."""
    strides: list[int] = []
    step = width
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def runs_per_sieve(strided: StridedAxes, scratch_bytes: int, max_over_read: float) -> int:
    """Return how many short runs are read in one read with the gaps between them; 1 if every run is read alone."""
    axes, run = strided.run
    if axes == len(strided.sizes) or run >= SHORT_RUN:
        return 1
    stride = strided.sources[-axes - 1]
    if stride > run * max_over_read:
        return 1
    return min(strided.sizes[-axes - 1], max(1, (scratch_bytes - run) // stride + 1))


def bytes_read(
    strided: StridedAxes, width: int, scratch_bytes: int = HOT_BYTES, max_over_read: float = MAX_OVER_READ
) -> int:
    """Return the bytes that reading a region takes from storage.

    Args:
        strided: the region's axes.
        width: bytes of a stored element.
        scratch_bytes: scratch memory of one thread.
        max_over_read: bound on bytes read over bytes needed.
    """
    count = runs_per_sieve(strided, scratch_bytes, max_over_read)
    if count == 1:
        return math.prod(strided.sizes) * width
    axes, run = strided.run
    stride, size = strided.sources[-axes - 1], strided.sizes[-axes - 1]
    gaps = size - -(-size // count)
    return math.prod(strided.sizes[: -axes - 1]) * (size * run + gaps * (stride - run))


def is_direct(strided: StridedAxes, width: int) -> bool:
    """Return whether a region that is not cast goes from the file into the target, run by run.

    Successive runs of the file for very short runs of the target do not: one read and a copy are faster than a list of
    that many targets.

    Args:
        strided: the region's axes.
        width: bytes of an element.
    """
    return strided.targets[-1] == width and (strided.run[0] == 1 or strided.sizes[-1] * width >= INTERLEAVED_RUN)


def ranges_of(region: Region) -> Iterator[ExpectedRange]:
    """Yield the byte ranges of a region for :meth:`RangeReader.expect`: its runs, joined as requests are.

    Runs that are not joined lie so far apart that there are few of them, or are so short that there are few bytes.
    """
    if 0 in region.size:
        return
    width = region.dtype.itemsize
    strides = row_major(region.shape, width)
    begin = region.begin + sum(low * stride for low, stride in zip(region.lo, strides, strict=True))
    axes, length, size = len(strides), width, width
    for count, stride in zip(reversed(region.size), reversed(strides), strict=True):
        longer = (count - 1) * stride + length
        if count > 1 and not joins(stride - length, longer, size * count):
            break
        axes, length, size = axes - 1, longer, size * count
    for place in _row_positions(begin, region.size[:axes], strides[:axes]).tolist():
        yield ExpectedRange(place, place + length, size)


class Tiles(Protocol):
    """A region cut into tiles that can be read in any order, by any thread."""

    @property
    def count(self) -> int:
        """The number of tiles."""

    @property
    def tile_bytes(self) -> int:
        """Bytes that the largest of them brings into the target, in the file's elements."""

    @property
    def path(self) -> AnyPath:
        """The file."""

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return the offsets of the first byte and behind the last byte of the tiles ``first <= number < last``."""

    def rows(self, first: int, last: int) -> Rows | None:
        """Return the tiles ``first <= number < last`` as rows; None for transposes, casts and very short runs."""

    def read(self, first: int, last: int, reader: RangeReader, workspace: Workspace) -> int:
        """Read the tiles ``first <= number < last``; bytes read from storage.

        Raises:
            Corrupt, StorageError: a read failed.
        """


def tiles_of(
    region: Region,
    out: np.ndarray[Any, Any],
    scratch_bytes: int = HOT_BYTES,
    max_over_read: float = MAX_OVER_READ,
) -> Tiles | None:
    """Cut a region and its target into tiles; None where it has no element.

    Args:
        region: the region to read.
        out: writable array of shape ``region.size``, with any strides; another dtype is cast to as numpy casts.
        scratch_bytes: scratch memory of the threads that will read.
        max_over_read: bound on bytes read over bytes needed, where short runs are read with the gaps between them.

    Raises:
        FormatError: the target has another shape, or is read-only.
    """
    if out.shape != region.size or not out.flags.writeable:
        raise FormatError(
            f"An array of shape {out.shape} cannot take a region of shape {region.size}.", where=str(region.path)
        )
    if 0 in region.size:
        return None
    width = region.dtype.itemsize
    strides = row_major(region.shape, width)
    begin = region.begin + sum(low * stride for low, stride in zip(region.lo, strides, strict=True))
    cast = out.dtype != region.dtype
    strategy = _read_strategy(
        region.size, strides, out.strides, (width, out.dtype.itemsize), cast, scratch_bytes, max_over_read
    )
    # As plain bits: numpy copies them fast and has their type everywhere. Setting a shape copies nothing, or fails.
    target = out.view(_BITS[out.itemsize])
    target.shape = strategy.strided.sizes
    dtype = region.dtype if cast else target.dtype
    if cast:
        target = target.view(out.dtype)
    if strategy.kind == "sieved":
        return SievedTiles(region.path, begin, strategy.strided, strategy.tile, target, dtype)
    if strategy.kind == "direct":
        return DirectTiles(region.path, begin, strategy.strided, strategy.tile, target, dtype)
    return BufferedTiles(region.path, begin, strategy.strided, strategy.tile, target, dtype, strategy.room)


@dataclass(frozen=True, slots=True)
class _ReadStrategy:
    """The strategy for regions of one kind.

    Args:
        strided: their axes.
        kind: ``sieved``, ``direct`` or ``gathered``.
        tile: lengths of a tile.
        room: bytes of the scratch memory that may be used.
    """

    strided: StridedAxes
    kind: str
    tile: Sizes
    room: int = 0


@lru_cache(maxsize=1024)
def _read_strategy(
    size: Sizes,
    sources: Sizes,
    targets: Sizes,
    widths: tuple[int, int],
    cast: bool,
    scratch_bytes: int,
    max_over_read: float,
) -> _ReadStrategy:
    """See :func:`strided_axes` for the first four, and :func:`tiles_of` for the others."""
    strided, width = strided_axes(size, sources, targets, widths), widths[0]
    spans = runs_per_sieve(strided, scratch_bytes, max_over_read)
    if spans > 1:
        axes, _ = strided.run
        outer = (1,) * (len(strided.sizes) - axes - 1)
        return _ReadStrategy(strided, "sieved", (*outer, spans, *strided.sizes[-axes:]))
    if not cast and is_direct(strided, width):
        return _ReadStrategy(strided, "direct", _grown(strided.sizes, (1,) * len(strided.sizes), TILE_BYTES // width))
    # Numbers of 8 bits are cast through an index of 8 bytes each.
    room = scratch_bytes // 16 if cast and width == 1 else scratch_bytes
    return _ReadStrategy(strided, "buffered", _buffered_tile(strided, width, room), room)


def read_region(
    reader: RangeReader,
    region: Region,
    out: np.ndarray[Any, Any],
    workspace: Workspace,
    max_over_read: float = MAX_OVER_READ,
) -> int:
    """Read a whole region in the calling thread; see :func:`tiles_of` for the arguments.

    Returns:
        bytes read from storage.
    Raises:
        Corrupt: the file ends before the region does.
        StorageError: the operating system refused the read.
    """
    tiles = tiles_of(region, out, workspace.scratch_bytes, max_over_read)
    return 0 if tiles is None else tiles.read(0, tiles.count, reader, workspace)


def split_region(region: Region, piece_bytes: int) -> Iterator[Region]:
    """Yield parts of a region of at most so many bytes, or of one element, in row-major order.

    Two regions of equal size and element type are split equally.
    """
    if 0 in region.size:
        return
    piece = _grown(region.size, (1,) * len(region.size), max(1, piece_bytes // region.dtype.itemsize))
    for lows in itertools.product(*(range(0, n, step) for n, step in zip(region.size, piece, strict=True))):
        size = tuple(min(step, n - low) for low, step, n in zip(lows, piece, region.size, strict=True))
        yield replace(region, lo=tuple(map(add, region.lo, lows)), size=size)


@dataclass(frozen=True, slots=True)
class _StridedTiles:
    """A region cut along its axes.

    Args:
        path: the file.
        begin: byte offset of the region's first element.
        strided: its axes.
        tile: lengths of a tile; the last one along an axis may be shorter.
        target: the target array, with these axes.
        dtype: element type in the file.
    """

    path: AnyPath
    begin: int
    strided: StridedAxes
    tile: Sizes
    target: np.ndarray[Any, Any]
    dtype: np.dtype[Any]

    @property
    def count(self) -> int:
        """The number of tiles."""
        return math.prod(-(-size // length) for size, length in zip(self.strided.sizes, self.tile, strict=True))

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return math.prod(self.tile) * self.dtype.itemsize

    def span(self, first: int, last: int) -> tuple[int, int]:
        """See :class:`Tiles`."""
        ((begin, _, _),), ((offset, size, _),) = self._tiles(first, first + 1), self._tiles(last - 1, last)
        rows = sum((length - 1) * stride for length, stride in zip(size, self.strided.sources, strict=True))
        return begin, offset + rows + self.dtype.itemsize

    def rows(self, first: int, last: int) -> Rows | None:
        """See :class:`Tiles`."""
        strided, width = self.strided, self.dtype.itemsize
        if len(strided.sizes) != 2 or self.tile[1] != strided.sizes[1] or self.target.dtype != self.dtype:
            return None
        (stride, _), (pitch, step), length = strided.sources, strided.targets, strided.sizes[1] * width
        if step != width or pitch < length or length < _SHORTEST_ROW:
            return None
        low, high = first * self.tile[0], min(last * self.tile[0], strided.sizes[0])
        address = self.target.__array_interface__["data"][0] + low * pitch
        return Rows(self.target, self.begin + low * stride, stride, address, pitch, length, high - low)

    def _tiles(self, first: int, last: int) -> Iterator[tuple[int, Sizes, np.ndarray[Any, Any]]]:
        """Yield the offset in the file, the lengths and the target of each tile."""
        counts = [-(-size // length) for size, length in zip(self.strided.sizes, self.tile, strict=True)]
        for number in range(first, last):
            lows = []
            for count, length in zip(reversed(counts), reversed(self.tile), strict=True):
                number, index = divmod(number, count)
                lows.append(index * length)
            lows.reverse()
            offset = self.begin + sum(low * stride for low, stride in zip(lows, self.strided.sources, strict=True))
            target = self.target[tuple(slice(low, low + n) for low, n in zip(lows, self.tile, strict=True))]
            yield offset, target.shape, target


@dataclass(frozen=True, slots=True)
class DirectTiles(_StridedTiles):
    """Runs that are the same in the target."""

    def read(self, first: int, last: int, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`Tiles`."""
        total = 0
        for offset, size, target in self._tiles(first, last):
            total += target.nbytes
            if target.size == size[-1]:
                reader.read_into(self.path, offset, target)
                continue
            outer = slice(0, len(size) - 1)
            rows = ScatterList.alike(
                _row_positions(offset, size[outer], self.strided.sources[outer]),
                _row_positions(target.__array_interface__["data"][0], size[outer], self.strided.targets[outer]),
                size[-1] * self.dtype.itemsize,
            )
            reader.read_rows(self.path, rows)
        return total


@dataclass(frozen=True, slots=True)
class BufferedTiles(_StridedTiles):
    """Runs that are gathered in scratch memory, and from there transposed, cast or interleaved.

    Args:
        room: bytes of the scratch memory that may be used.
    """

    room: int

    def read(self, first: int, last: int, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`Tiles`."""
        total = 0
        for offset, size, target in self._tiles(first, last):
            source = self._fetched(offset, size, reader, workspace)
            self._copy(target, source)
            total += source.size * source.itemsize
        return total

    def _copy(self, target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        """Copy in stripes: the rows of one fit into the innermost cache."""
        fast = min(range(source.ndim), key=self.strided.targets.__getitem__)
        if not _is_transposing(self.strided) or source.shape[fast] <= STRIPE:
            copy_cast(target, source, self.path)
            return
        before = (slice(None),) * fast
        for low in range(0, source.shape[fast], STRIPE):
            stripe = (*before, slice(low, low + STRIPE))
            copy_cast(target[stripe], source[stripe], self.path)

    def _fetched(self, offset: int, size: Sizes, reader: RangeReader, workspace: Workspace) -> np.ndarray[Any, Any]:
        """Return the tile in scratch memory."""
        width, memory = self.dtype.itemsize, workspace.memory
        axes, run = _run(size, self.strided.sources)
        row = size[-1] * width
        pitch = _pitch(self.strided, row, self.room)
        rows = math.prod(size[:-1])
        if pitch != row and rows > 1:
            if run == rows * row:
                lines = workspace.lines(rows, pitch, row)
                for low in range(0, rows, MOST_BUFFERS):
                    reader.read_several(self.path, offset + low * row, lines[low : low + MOST_BUFFERS])
            else:
                self._read_rows(offset, size[:-1], memory.ctypes.data, pitch, row, reader)
            return np.ndarray(size, self.dtype, memory, strides=(*row_major(size[:-1], pitch), width))
        if run == rows * row:
            reader.read_into(self.path, offset, memory[:run])
        else:
            self._read_rows(offset, size[: len(size) - axes], memory.ctypes.data, run, run, reader)
        return np.ndarray(size, self.dtype, memory)

    def _read_rows(self, offset: int, size: Sizes, address: int, pitch: int, length: int, reader: RangeReader) -> None:
        offsets = _row_positions(offset, size, self.strided.sources[: len(size)])
        rows = ScatterList.alike(offsets, address + pitch * np.arange(len(offsets)), length)
        reader.read_rows(self.path, rows)


@dataclass(frozen=True, slots=True)
class SievedTiles(_StridedTiles):
    """Short runs that are read with the gaps between them."""

    def read(self, first: int, last: int, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`Tiles`."""
        total = 0
        for offset, size, target in self._tiles(first, last):
            strides = self.strided.sources
            span = sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + self.dtype.itemsize
            reader.read_into(self.path, offset, workspace.memory[:span])
            copy_cast(target, np.ndarray(size, self.dtype, workspace.memory, strides=strides), self.path)
            total += span
        return total


def _run(size: Sizes, strides: Sizes) -> tuple[int, int]:
    """Return the number of last axes that are one run of bytes, and its length; axes of length one are part of it."""
    length, axes = strides[-1], 0
    for count, stride in zip(reversed(size), reversed(strides), strict=True):
        if count > 1 and stride != length:
            break
        length, axes = length * count, axes + 1
    return axes, length


def _row_positions(first: int, size: Sizes, strides: Sizes) -> np.ndarray[Any, Any]:
    """Return the byte positions of all rows of a tile, in order."""
    kept = math.prod(size) <= _MOST_ROWS
    return (_kept_positions if kept else _positions)(size, strides) + first


def _positions(size: Sizes, strides: Sizes) -> np.ndarray[Any, Any]:
    places = np.zeros(1, np.int64)
    for length, stride in zip(size, strides, strict=True):
        places = (places[:, None] + np.arange(length, dtype=np.int64) * stride).ravel()
    return places


# Tiles are alike; the cache has 4 MiB at most.
_kept_positions = lru_cache(maxsize=128)(_positions)


def _is_transposing(strided: StridedAxes) -> bool:
    return min(strided.targets) < strided.targets[-1]


def _pitch(strided: StridedAxes, row: int, scratch_bytes: int) -> int:
    """Return the bytes from one row of a tile to the next: an odd number of cache lines where columns are read."""
    padded = (-(-row // _LINE) | 1) * _LINE
    return padded if _is_transposing(strided) and padded * _LINE <= scratch_bytes else row


def _buffered_tile(strided: StridedAxes, width: int, scratch_bytes: int) -> Sizes:
    ones, last = (1,) * len(strided.sizes), len(strided.sizes) - 1
    if not _is_transposing(strided):
        return _grown(strided.sizes, ones, scratch_bytes // width)
    fast = min(range(last), key=strided.targets.__getitem__)
    row = _even(strided.sizes[-1], max(1, min(RUN_BYTES, scratch_bytes) // width))
    rows = min(_MOST_LINES, max(1, scratch_bytes // _pitch(strided, row * width, scratch_bytes)))
    stripe = _even(strided.sizes[fast], min(STRIPE, rows))
    tile = tuple(row if axis == last else stripe if axis == fast else 1 for axis in range(len(ones)))
    return (*_grown(strided.sizes[:-1], tile[:-1], rows), row)


def _grown(sizes: Sizes, tile: Sizes, room: int) -> Sizes:
    """Return a tile grown to at most ``room`` elements, the last axis first, with a bounded number of rows."""
    grown = list(tile)
    for axis in reversed(range(len(sizes))):
        others = max(1, math.prod(grown) // grown[axis])
        rows = max(1, others // grown[-1]) if axis < len(sizes) - 1 else 1
        most = min(room // others, _MOST_ROWS // rows if axis < len(sizes) - 1 else room)
        grown[axis] = max(grown[axis], _even(sizes[axis], most))
    return tuple(grown)


def _even(size: int, most: int) -> int:
    """Return the length of equal parts of an axis, at most ``most``, without a small remainder."""
    return -(-size // -(-size // max(1, most)))
