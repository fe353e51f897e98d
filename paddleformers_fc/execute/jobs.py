"""A plan's read items as jobs that threads can do in any order.

A large tensor is many jobs of a few MiB. Of small ones that follow one another in a file, up to a thousand are one job
and one system call. So neither one large tensor nor very many small ones leave threads idle, and nobody waits for a
tensor. An item that is one run of bytes in the file and in its shard, and changes nothing, is read straight to where it
belongs; every other is a region whose blocks :mod:`paddleformers_fc.storage.regions` knows how to read.

Time: a few look-ups per item, because items that are alike share what follows from their boxes. Memory: one job at a
time; the stream is made as it is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from paddleformers_fc.execute.crew import Job, ReadOptions, Task
from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.plan.items import ReadItem, StoredPart
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import MOST_BUFFERS
from paddleformers_fc.storage.places import Place
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.regions import BLOCK_BYTES, Blocks, Region, Workspace, blocks_of

Key = tuple[str, str]
"""Role and full name of a wanted shard."""

_JOBS_PER_TASK = 64
_Straight = tuple[int, int, int]


class Memory(Protocol):
    """The memory of wanted shards."""

    def __getitem__(self, key: Key) -> tuple[np.ndarray[Any, Any], memoryview]:
        """A shard's flat array, and its bytes."""


@dataclass(slots=True)
class Run:
    """Successive bytes of a file that go, unchanged, into one or more pieces of memory."""

    path: Place
    begin: int
    end: int
    views: list[memoryview] = field(default_factory=list)

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`Job`."""
        if len(self.views) == 1:
            reader.read_into(self.path, self.begin, self.views[0])
        else:
            reader.read_several(self.path, self.begin, self.views)
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Part:
    """Some blocks of a region."""

    blocks: Blocks
    first: int
    last: int

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`Job`."""
        return self.blocks.read(self.first, self.last, reader, workspace)


def jobs_of(items: Sequence[ReadItem], root: Place, targets: Memory, options: ReadOptions) -> Iterator[tuple[int, Job]]:
    """Jobs and their bytes, in the order of files: what a disk reads fastest, and what lets neighbours be joined."""
    paths: dict[str, Place] = {}
    run: Run | None = None
    # Items that are alike share their boxes, and what follows from those is worked out once.
    alike: dict[tuple[int, ...], _Straight | None] = {}
    for item in items:
        stored = item.stored
        path = paths.get(stored.file)
        if path is None:
            path = paths[stored.file] = root / stored.file
        array, data = targets[item.role, item.name]
        dtype = array.dtype
        boxes = (id(stored.shape), id(stored.part), id(item.shape), id(item.part), id(item.axes))
        if boxes not in alike:
            alike[boxes] = _straight(item)
        straight = alike[boxes]
        if straight is None or dtype_of(stored.dtype) != dtype:
            yield from _parts(path, item, array, options)
            continue
        source, target, count = straight
        width = dtype.itemsize
        begin, start, size = stored.begin + source * width, (item.start + target) * width, count * width
        for low in range(start, start + size, BLOCK_BYTES):
            length = min(BLOCK_BYTES, start + size - low)
            if run is None or not _goes_on(run, path, begin, length):
                if run is not None:
                    yield run.end - run.begin, run
                run = Run(path, begin, begin)
            run.views.append(data[low : low + length])
            run.end = begin = begin + length
    if run is not None:
        yield run.end - run.begin, run


def _goes_on(run: Run, path: Place, begin: int, length: int) -> bool:
    return (
        run.end == begin
        and run.path is path
        and len(run.views) < MOST_BUFFERS
        and run.end - run.begin + length <= BLOCK_BYTES
    )


def _straight(item: ReadItem) -> _Straight | None:
    """Where an item that is one run on both sides begins in its stored box and in its fragment, and its length."""
    stored = item.stored
    if item.axes != tuple(range(len(stored.shape))):
        return None
    source, target = _flat_start(stored.shape, stored.part), _flat_start(item.shape, item.part)
    return None if source is None or target is None else (source, target, stored.part.volume)


def _flat_start(shape: Shape, part: Box) -> int | None:
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


def _parts(
    path: Place, item: ReadItem, array: np.ndarray[Any, Any], options: ReadOptions
) -> Iterator[tuple[int, Part]]:
    region = _region(path, item.stored)
    blocks = blocks_of(region, item_view(array, item), options.scratch_bytes, options.max_over_read)
    if blocks is None:
        return
    step = max(1, BLOCK_BYTES // blocks.block_bytes)
    for first in range(0, blocks.count, step):
        last = min(first + step, blocks.count)
        yield (last - first) * blocks.block_bytes, Part(blocks, first, last)


def tasks_of(jobs: Iterator[tuple[int, Job]]) -> Iterator[Task]:
    """Jobs in portions that are worth drawing."""
    task: Task = []
    size = 0
    for length, job in jobs:
        if task and (size + length > BLOCK_BYTES or len(task) == _JOBS_PER_TASK):
            yield task
            task, size = [], 0
        task.append(job)
        size += length
    if task:
        yield task


def region_of(root: Place, stored: StoredPart) -> Region:
    """A stored part as a region of its file."""
    return _region(root / stored.file, stored)


def _region(path: Place, stored: StoredPart) -> Region:
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
