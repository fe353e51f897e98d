"""A plan's read items as jobs that threads can do in any order.

A large tensor is many jobs of a few MiB. Of small ones that follow one another in a file, up to a thousand are one job
and one system call. So neither one large tensor nor very many small ones leave threads idle, and nobody waits for a
tensor. An item that is one run of bytes in the file and in its shard, and changes nothing, is read straight to where it
belongs; every other is a region whose tiles :mod:`paddleformers_fc.storage.regions` knows how to read.

Time: a few look-ups per item, because items that are alike share what follows from their boxes. Memory: one job at a
time; the stream is made as it is drawn.
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
from paddleformers_fc.storage.vectored_read import ScatterList

Key = tuple[str, str]
"""Role and full name of a wanted shard."""

_JOBS_PER_TASK = 64


class Memory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The memory of one wanted shard, in one piece.

    An address and no array: of a hundred thousand small tensors, whose bytes go straight from the file to where they
    belong, nobody needs one, and to make it costs more than to read them.

    Args:
        owner: whose memory it is; it lives as long as this does.
        address: of the first element.
        size: in elements.
        dtype: of the elements.
    """

    owner: object
    address: int
    size: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> Memory:
        """The memory of a flat array."""
        return cls(array, array.__array_interface__["data"][0], array.size, array.dtype)

    def array(self) -> np.ndarray[Any, Any]:
        """All of it as a flat array, which lasts no longer than the owner."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        if self.size == 0:
            return np.empty(0, self.dtype)
        array: np.ndarray[Any, Any] = np.ndarray(
            self.size, self.dtype, memory_at(self.address, self.size * self.dtype.itemsize)
        )
        return array

    def at(self, start: int, length: int) -> int:
        """The address of so many bytes of it.

        Args:
            start: the first of them, counted from that of the memory.
            length: how many.
        Raises:
            MismatchError: they are not all in it.
        """
        if start < 0 or start + length > self.size * self.dtype.itemsize:
            raise MismatchError(
                "A read would fill bytes that are not those of its tensor.",
                evidence=[f"bytes {start} to {start + length} of {self.size} elements of {self.dtype}"],
                next_step="The plan is not of this model; remove the directory of flex_plan_cache, and load again.",
            )
        return self.address + start


class Targets(Protocol):
    """The memory of wanted shards."""

    def __getitem__(self, key: Key) -> Memory:
        """The memory of one."""


@dataclass(slots=True)
class ContiguousRead:
    """Successive bytes of a file that go, unchanged, into one or more pieces of memory.

    Args:
        path: the file.
        begin: offset of the first byte.
        end: offset behind the last byte.
        filled: whose memory is filled.
        addresses: where the pieces are.
        lengths: of the pieces, in bytes.
    """

    path: AnyPath
    begin: int
    end: int
    filled: list[Memory] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        if len(self.addresses) == 1:
            reader.read_into(self.path, self.begin, memory_at(self.addresses[0], self.lengths[0]))
        else:
            lengths = np.array(self.lengths, np.int64)
            offsets = self.begin + np.cumsum(lengths) - lengths
            reader.read_rows(
                self.path, ScatterList(offsets, np.array(self.addresses, np.uint64), lengths), workspace.scatter
            )
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class StridedRead:
    """Some tiles of a region."""

    tiles: Tiles
    first: int
    last: int

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        return self.tiles.read(self.first, self.last, reader, workspace)


def read_jobs(
    items: Sequence[ReadItem], root: AnyPath, targets: Targets, options: ReadOptions
) -> Iterator[tuple[int, ReadJob]]:
    """Jobs and their bytes, in the order of files: what a disk reads fastest, and what lets neighbours be joined."""
    paths: dict[str, AnyPath] = {}
    run: ContiguousRead | None = None
    # What follows from the boxes of an item is worked out once for all that are alike.
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
            run.filled.append(memory)
            run.addresses.append(low)
            run.lengths.append(length)
            run.end = begin = begin + length
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
    """An item that is one run on both sides.

    Args:
        dtype: of what is stored.
        source: where it begins in its stored box, in bytes.
        target: where it begins in its fragment, in bytes.
        size: its length in bytes.
    """

    dtype: np.dtype[Any]
    source: int
    target: int
    size: int


def _contiguous_item(item: ReadItem) -> _ContiguousItem | None:
    """What is to be known of an item that is one run on both sides; None where it is not."""
    stored = item.stored
    if item.axes != tuple(range(len(stored.shape))):
        return None
    source, target = flat_start(stored.shape, stored.part), flat_start(item.shape, item.part)
    if source is None or target is None:
        return None
    dtype = dtype_of(stored.dtype)
    return _ContiguousItem(dtype, source * dtype.itemsize, target * dtype.itemsize, stored.part.volume * dtype.itemsize)


def flat_start(shape: Shape, part: Box) -> int | None:
    """The index of a box's first element in a row-major tensor, or None where the box is not one run."""
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
    """Jobs in portions that are worth drawing."""
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
    """A stored part as a region of its file."""
    return _region(root / stored.file, stored)


def _region(path: AnyPath, stored: StoredPart) -> Region:
    return Region(path, stored.begin, stored.shape, stored.part.lo, stored.part.shape, dtype_of(stored.dtype))


def item_view(buffer: np.ndarray[Any, Any], item: ReadItem) -> np.ndarray[Any, Any]:
    """The item's part of the buffer of its shard, its axes in the order of the stored region."""
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
