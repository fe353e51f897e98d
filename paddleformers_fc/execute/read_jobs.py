"""Split the read items of a plan into jobs that threads can execute in any order.

A large tensor becomes many jobs of a few MiB. Up to a thousand small tensors that are adjacent in a file become one job
and one system call. So neither one large tensor nor very many small ones leave threads idle. An item that is one run of
bytes in the file and in its shard, and is not cast, is read directly into the shard. Every other item is a region whose
tiles :mod:`paddleformers_fc.storage.regions` reads.

Time: a few look-ups per item, because items of equal boxes share the result of the analysis. Memory: one job at a time;
the stream is lazy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import numpy as np

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.read_pool import ReadJob, ReadOptions, ReadTask
from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.plan.items import ReadItem, StoredPart
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import MOST_BUFFERS, memory_at
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.regions import TILE_BYTES, Region, Tiles, Workspace, tiles_of
from paddleformers_fc.storage.rows import Rows

Key = tuple[str, str]
"""Role and full name of a wanted shard."""

_JOBS_PER_TASK = 64
_MOST_ROWS = 1024
"""Rows that are listed at a time."""


class Memory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The memory of one wanted shard, in one piece.

    It contains an address and no array: for a hundred thousand small tensors that are read directly, creating arrays
    would cost more than reading.

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
    def of(cls, array: np.ndarray[Any, Any]) -> Memory:
        """Return the memory of a flat array."""
        return cls(array, array.__array_interface__["data"][0], array.size, array.dtype)

    def array(self) -> np.ndarray[Any, Any]:
        """Return all of it as a flat array, which is valid as long as the owner."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        if self.size == 0:
            return np.empty(0, self.dtype)
        array: np.ndarray[Any, Any] = np.ndarray(
            self.size, self.dtype, memory_at(self.address, self.size * self.dtype.itemsize)
        )
        return array

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


class Targets(Protocol):
    """The memory of wanted shards."""

    def __getitem__(self, key: Key) -> Memory:
        """Return the memory of one."""


@dataclass(slots=True)
class ContiguousRead:
    """Read successive bytes of a file, unchanged, into one or more pieces of memory.

    Args:
        path: the file.
        begin: offset of the first byte.
        end: offset behind the last byte.
        filled: the memory of the shards, kept alive.
        addresses: of the pieces.
        lengths: of the pieces, in bytes.
    """

    path: AnyPath
    begin: int
    end: int
    filled: list[Memory] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, memory: Memory, address: int, length: int) -> None:
        """Append the bytes that follow in the file."""
        self.filled.append(memory)
        self.addresses.append(address)
        self.lengths.append(length)
        self.end += length

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        reader.read_several(self.path, self.begin, list(map(memory_at, self.addresses, self.lengths)))
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class StridedRead:
    """Read some tiles of a region."""

    tiles: Tiles
    first: int
    last: int

    @property
    def path(self) -> AnyPath:
        """The file."""
        return self.tiles.path

    @property
    def span(self) -> tuple[int, int]:
        """The offsets of the first byte and behind the last one that are read of the file."""
        return self.tiles.span(self.first, self.last)

    @property
    def rows(self) -> Rows | None:
        """The tiles as rows of the file and of the target; None if they are not."""
        return self.tiles.rows(self.first, self.last)

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        return self.tiles.read(self.first, self.last, reader, workspace)


@dataclass(frozen=True, slots=True)
class RowsRead:
    """Read the parts of rows that lie in a range of a file."""

    path: AnyPath
    rows: Rows
    begin: int
    end: int

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        total, step = 0, _MOST_ROWS * self.rows.stride
        for low in range(self.begin, self.end, step):
            parts = self.rows.between(low, min(low + step, self.end))
            reader.read_rows(self.path, parts)
            total += int(parts.lengths.sum())
        return total


def read_jobs(
    items: Sequence[ReadItem], root: AnyPath, targets: Targets, options: ReadOptions
) -> Iterator[tuple[int, ContiguousRead | StridedRead]]:
    """Yield jobs and their bytes in the order of files, so that disks read fast and neighbours are joined."""
    paths: dict[str, AnyPath] = {}
    run: ContiguousRead | None = None
    # Items of equal boxes are analysed once.
    alike: dict[tuple[object, ...], _ContiguousItem | None] = {}
    for item in items:
        stored = item.stored
        path = paths.get(stored.file)
        if path is None:
            path = paths[stored.file] = root / stored.file
        memory = targets[item.role, item.name]
        kind = (stored.dtype, stored.shape, stored.part, item.shape, item.part, item.axes)
        if kind not in alike:
            alike[kind] = _contiguous_item(item)
        straight = alike[kind]
        if straight is None or straight.dtype != memory.dtype:
            if run is not None:
                yield run.end - run.begin, run
                run = None
            yield from _strided_reads(path, item, memory.array(), options)
            continue
        begin, size = stored.begin + straight.source, straight.size
        start = memory.at(item.start * straight.dtype.itemsize + straight.target, size)
        for low in range(start, start + size, TILE_BYTES):
            length = min(TILE_BYTES, start + size - low)
            if run is None or not _continues(run, path, begin, length):
                if run is not None:
                    yield run.end - run.begin, run
                run = ContiguousRead(path, begin, begin)
            run.add(memory, low, length)
            begin = run.end
    if run is not None:
        yield run.end - run.begin, run


def _continues(run: ContiguousRead, path: AnyPath, begin: int, length: int) -> bool:
    return (
        run.end == begin
        and run.path is path
        and len(run.addresses) < MOST_BUFFERS
        and run.end - run.begin + length <= TILE_BYTES
    )


class _ContiguousItem(msgspec.Struct, frozen=True, gc=False):
    """An item that is one run of bytes in the file and in its shard.

    Args:
        dtype: stored dtype.
        source: offset in the stored box, in bytes.
        target: offset in the fragment, in bytes.
        size: length in bytes.
    """

    dtype: np.dtype[Any]
    source: int
    target: int
    size: int


def _contiguous_item(item: ReadItem) -> _ContiguousItem | None:
    """Return the runs of an item that is one run on both sides; None for any other item."""
    stored = item.stored
    if item.axes != tuple(range(len(stored.shape))):
        return None
    source, target = flat_start(stored.shape, stored.part), flat_start(item.shape, item.part)
    if source is None or target is None:
        return None
    dtype = dtype_of(stored.dtype)
    return _ContiguousItem(dtype, source * dtype.itemsize, target * dtype.itemsize, stored.part.volume * dtype.itemsize)


def flat_start(shape: Shape, part: Box) -> int | None:
    """Return the index of a box's first element in a row-major tensor; None if the box is not one run."""
    if part.hi == shape and not any(part.lo):
        return 0
    start, inside = 0, False
    for length, low, high in zip(shape, part.lo, part.hi, strict=True):
        if inside and high - low != length:
            return None
        inside = inside or high - low > 1
        start = start * length + low
    return start


@lru_cache
def dtype_of(name: str) -> np.dtype[Any]:
    return to_numpy(to_safetensors(name))


def _strided_reads(
    path: AnyPath, item: ReadItem, array: np.ndarray[Any, Any], options: ReadOptions
) -> Iterator[tuple[int, StridedRead]]:
    region = _region(path, item.stored)
    tiles = tiles_of(region, item_view(array, item), options.scratch_bytes, options.max_over_read)
    if tiles is None:
        return
    step = max(1, TILE_BYTES // tiles.tile_bytes)
    for first in range(0, tiles.count, step):
        last = min(first + step, tiles.count)
        yield (last - first) * tiles.tile_bytes, StridedRead(tiles, first, last)


def batch_jobs(jobs: Iterator[tuple[int, ReadJob]]) -> Iterator[ReadTask]:
    """Group jobs into tasks."""
    task: ReadTask = []
    size = 0
    for length, job in jobs:
        if task and (size + length > TILE_BYTES or len(task) == _JOBS_PER_TASK):
            yield task
            task, size = [], 0
        task.append(job)
        size += length
    if task:
        yield task


def region_of(root: AnyPath, stored: StoredPart) -> Region:
    """Return a stored part as a region of its file."""
    return _region(root / stored.file, stored)


def _region(path: AnyPath, stored: StoredPart) -> Region:
    return Region(path, stored.begin, stored.shape, stored.part.lo, stored.part.shape, dtype_of(stored.dtype))


def item_view(buffer: np.ndarray[Any, Any], item: ReadItem) -> np.ndarray[Any, Any]:
    """Return the item's part of its shard's buffer, with axes in the order of the stored region."""
    volume = math.prod(item.shape)
    part = buffer[item.start : item.start + volume].reshape(item.shape)
    part = part[tuple(slice(low, high) for low, high in zip(item.part.lo, item.part.hi, strict=True))]
    added = tuple(axis for axis, source in enumerate(item.axes) if source == NEW_AXIS)
    kept = [source for source in item.axes if source != NEW_AXIS]
    ordered = (part.squeeze(added) if added else part).transpose(sorted(range(len(kept)), key=kept.__getitem__))
    missing = [axis for axis in range(len(item.stored.shape)) if axis not in kept]
    for axis in missing:
        ordered = np.expand_dims(ordered, axis)
    return ordered
