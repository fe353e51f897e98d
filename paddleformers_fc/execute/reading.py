"""Carrying out a plan's reads, in parallel threads, into memory that a slot provides.

A :class:`Slot` is the memory of one wanted shard. On a CPU it is the tensor's own memory; on an accelerator it is a
host array that is handed over when it is full.

Idea: the plan becomes a stream of *jobs*, each a few MiB and independent of all others, and threads draw from it. A
large tensor is many jobs. Of small ones that follow one another in a file, up to a thousand are one job and one system
call. So neither one large tensor nor very many small ones leave threads idle, and nobody waits for a tensor.

Memory beyond the targets: at most ``staging_bytes`` for all threads together, or one host copy of a shard where that
is larger. The stream is made as it is drawn.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.layout import Shard
from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.storage.ahead import Wanted
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import MOST_BUFFERS
from paddleformers_fc.storage.identity import Identities
from paddleformers_fc.storage.places import Place, RemotePath
from paddleformers_fc.storage.ranges import NO_IDENTITIES, RangeReader
from paddleformers_fc.storage.regions import (
    BLOCK_BYTES,
    DEFAULT_STAGING_BYTES,
    HOT_BYTES,
    MAX_OVER_READ,
    Blocks,
    Region,
    Workspace,
    blocks_of,
    pieces_of,
    ranges_of,
    read_region,
)

Key = tuple[str, str]
_SMALLEST_SCRATCH = 8
_JOBS_PER_TASK = 64
_PORTION_BYTES = 32 << 20


class Slot(Protocol):
    """The memory of one wanted shard."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that stand in for the shard while it is open; 0 where it is filled in place."""

    def open(self) -> np.ndarray[Any, Any]:
        """A one-dimensional array of the shard's dtype and size, to be filled."""

    def close(self) -> None:
        """The array that stands in for the shard is full, and may begin to travel to the shard's own memory."""

    def settle(self) -> None:
        """Wait until the shard has its numbers, and give the array back; after ``close``."""


@dataclass(frozen=True)
class ReadOptions:
    """How reads are carried out.

    Args:
        threads: how many read at a time.
        staging_bytes: bound of the memory that transposes, casts and host copies pass through, of all threads together.
        max_over_read: bound on bytes read over bytes needed, where short runs are read with the gaps between them.
        once: whether what several ranks want is read by one of them, which hands it to the others.
    Raises:
        OptionError: a bound that nothing can be read within.
    """

    threads: int = 4
    staging_bytes: int = DEFAULT_STAGING_BYTES
    max_over_read: float = MAX_OVER_READ
    once: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1 or self.staging_bytes < 1 or self.max_over_read < 1:
            raise OptionError(
                "Nothing can be read with these options.",
                evidence=[
                    f"threads: {self.threads}",
                    f"staging_bytes: {self.staging_bytes}",
                    f"max_over_read: {self.max_over_read}",
                ],
                next_step="Each of them is 1 or more.",
            )

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of one thread."""
        return max(_SMALLEST_SCRATCH, min(HOT_BYTES, self.staging_bytes // self.threads))


DEFAULT_OPTIONS = ReadOptions()


class Job(Protocol):
    """A piece of work that any thread can do at any time."""

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """Do it; bytes read from storage."""


Task = list[Job]
_Target = tuple[np.ndarray[Any, Any], memoryview]
_Straight = tuple[int, int, int]


class _Gate:
    """Lets threads in until it is shut; who closes it waits until the last has left.

    Attributes:
        shut: whether no more may come in, and who is in is to leave.
    """

    def __init__(self) -> None:
        self.shut = False
        self._inside = 0
        self._change = threading.Condition()

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Inside, with the right to work, or not if the gate was shut before."""
        with self._change:
            may = not self.shut
            self._inside += may
        try:
            yield may
        finally:
            with self._change:
                self._inside -= may
                self._change.notify_all()

    def close(self) -> None:
        """Shut the gate, and wait until nobody is inside."""
        with self._change:
            self.shut = True
            self._change.wait_for(lambda: self._inside == 0)


class Crew:
    """Threads with their open files and scratch memory; a context manager that joins them and closes everything.

    Args:
        options: threads and staging.
        identities: which files were checked; another one under a path is refused.
    """

    def __init__(self, options: ReadOptions = DEFAULT_OPTIONS, identities: Identities = NO_IDENTITIES) -> None:
        self.options = options
        self._reader = RangeReader(identities=identities, threads=options.threads)
        self._pool = ThreadPoolExecutor(options.threads, "flex-read")
        self._idle: list[Workspace] = []

    def run(self, tasks: Iterator[Task]) -> int:
        """Do all tasks, in any order; bytes read from storage. One task is done here, for it is not worth a thread.

        Raises:
            Corrupt, StorageError: of the first thread that failed. No other has begun a task after that.
        """
        first = list(islice(tasks, 2))
        tasks = chain(first, tasks)
        if self.options.threads == 1 or len(first) < 2:
            return self._work(lambda: next(tasks, None))
        lock, gate = threading.Lock(), _Gate()

        def draw() -> Task | None:
            with lock:
                return None if gate.shut else next(tasks, None)

        def work() -> int:
            with gate.entered() as may:
                try:
                    return self._work(draw) if may else 0
                except BaseException:
                    # An interrupt too must stop the other threads; it is raised again where results are collected.
                    gate.shut = True
                    raise

        futures: list[Future[int]] = []
        try:
            for _ in range(self.options.threads - 1):
                futures.append(self._pool.submit(work))
            # This thread is one of them, and waits for none to be started. It passes no gate: its end is seen here.
            total = self._work(draw)
        finally:
            # An interrupt, even one between the start of a thread and our knowing of it, ends the work after the tasks
            # that are under way: nothing is written after this returns.
            gate.close()
        return total + sum(future.result() for future in futures if not future.cancel())

    def expect(self, root: Place, parts: Iterable[StoredPart]) -> None:
        """Announce what will be read, so that the small reads of a remote directory come in few requests.

        Args:
            root: the directory that files are relative to.
            parts: all that will be read, about in this order.
        """
        if not isinstance(root, RemotePath):
            return
        wanted: dict[str, list[Wanted]] = {}
        for part in parts:
            wanted.setdefault(part.file, []).extend(ranges_of(region_of(root, part)))
        for file, found in wanted.items():
            self._reader.expect(root / file, found)

    def begin(self, region: Region, out: np.ndarray[Any, Any]) -> Future[int]:
        """Start to read a region into an array of its shape, in one thread; bytes read from storage."""
        return self._pool.submit(self._read, region, out)

    def _read(self, region: Region, out: np.ndarray[Any, Any]) -> int:
        with self._workspace() as workspace:
            return read_region(self._reader, region, out, workspace, self.options.max_over_read)

    @contextmanager
    def _workspace(self) -> Iterator[Workspace]:
        """A workspace that no other thread has."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace(self.options.scratch_bytes)
        try:
            yield workspace
        finally:
            self._idle.append(workspace)

    def _work(self, draw: Callable[[], Task | None]) -> int:
        total = 0
        with self._workspace() as workspace:
            while (task := draw()) is not None:
                for job in task:
                    total += job.read(self._reader, workspace)
        return total

    def close(self) -> None:
        """Join the threads and give everything back."""
        self._pool.shutdown()
        for workspace in self._idle:
            workspace.close()
        self._reader.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            self._reader.refuse_replaced()


def carry_out(
    plan: LoadPlan,
    root: Place,
    slots: Mapping[Key, Slot],
    options: ReadOptions = DEFAULT_OPTIONS,
    identities: Identities = NO_IDENTITIES,
) -> int:
    """Fill every slot.

    Args:
        plan: what to read; its report must be empty.
        root: the directory that the plan's files are relative to.
        slots: memory by role and full name.
        options: threads and staging.
        identities: which files were checked; another one under a path is refused.
    Returns:
        bytes read from storage.
    Raises:
        Corrupt, StorageError: a read failed; reading stops, threads are joined, targets hold an undefined mixture.
    """
    room = options.staging_bytes - options.threads * options.scratch_bytes
    count, size_before = 0, 0
    before = targets = _Targets(slots)
    try:
        with Crew(options, identities) as crew:
            for group, size in _groups(plan.items, slots, room // 2):
                # While a group is read, the host arrays of the one before travel to their device, if both have room.
                if size_before + size > room:
                    before.settle()
                targets = _Targets(slots)
                count += _fill(crew, root, targets, group)
                before.settle()
                before, size_before = targets, size
    finally:
        # Nothing may be on its way out of memory that is given back.
        before.settle()
        targets.settle()
    return count


def _fill(crew: Crew, root: Place, targets: _Targets, items: list[ReadItem]) -> int:
    crew.expect(root, (item.stored for item in items))
    count = crew.run(_tasks(_jobs(items, root, targets, crew.options)))
    targets.close()
    return count


def _groups(items: tuple[ReadItem, ...], slots: Mapping[Key, Slot], room: int) -> Iterator[tuple[list[ReadItem], int]]:
    """Items that are read together, and the bytes of their host arrays.

    All that are filled in place are one group; of the others as many as there is room for.
    """
    if not any(slot.host_bytes for slot in slots.values()):
        yield list(items), 0
        return
    in_place: list[ReadItem] = []
    staged: dict[Key, list[ReadItem]] = {}
    sizes: dict[Key, int] = {}
    for item in items:
        key = (item.role, item.name)
        size = sizes.get(key)
        if size is None:
            size = sizes[key] = slots[key].host_bytes
        (staged.setdefault(key, []) if size else in_place).append(item)
    yield in_place, 0
    group: list[ReadItem] = []
    used = 0
    for key, found in staged.items():
        if group and used + sizes[key] > room:
            yield group, used
            group, used = [], 0
        group.extend(found)
        used += sizes[key]
    if group:
        yield group, used


class _Targets:
    """The memory of slots, opened when it is asked for.

    What is filled in place is handed over to nobody. It is forgotten when the next shard's turn comes: views of all of
    a hundred thousand tensors would be looked through by every collection of garbage.
    """

    def __init__(self, slots: Mapping[Key, Slot]) -> None:
        self._slots = slots
        self._open: dict[Key, _Target] = {}
        self._last: tuple[Key, _Target] | None = None

    def __getitem__(self, key: Key) -> _Target:
        """A shard's array, and its bytes."""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        found = self._open.get(key)
        if found is not None:
            return found
        slot = self._slots[key]
        array = slot.open()
        found = array, array.view(np.uint8).data
        if slot.host_bytes:
            self._open[key] = found
        else:
            self._last = key, found
        return found

    def close(self) -> None:
        """All that stand in for a shard are full."""
        for key in self._open:
            self._slots[key].close()

    def settle(self) -> None:
        """Wait until all have their numbers; not again for those that are known to."""
        for key in self._open:
            self._slots[key].settle()
        self._open.clear()


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


def _jobs(items: list[ReadItem], root: Place, targets: _Targets, options: ReadOptions) -> Iterator[tuple[int, Job]]:
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
        if straight is None or _dtype(stored.dtype) != dtype:
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
def _dtype(name: str) -> np.dtype[Any]:
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


def _tasks(jobs: Iterator[tuple[int, Job]]) -> Iterator[Task]:
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
    return Region(path, stored.begin, stored.shape, stored.part.lo, stored.part.shape, _dtype(stored.dtype))


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


def verify_equal(
    checks: tuple[EqualCheck, ...],
    root: Place,
    options: ReadOptions = DEFAULT_OPTIONS,
    identities: Identities = NO_IDENTITIES,
) -> None:
    """Read both sides of every check, piece by piece, and compare their bits.

    Args:
        checks: what must be equal.
        root: the directory that files are relative to.
        options: threads and staging.
        identities: which files were checked; another one under a path is refused.
    Raises:
        MismatchError: naming every pair that differs.
    """
    if not checks:
        return
    differing: set[int] = set()
    with Crew(options, identities) as crew:
        crew.expect(root, (side for check in checks for side in (check.left, check.right)))
        crew.run(_tasks(_comparisons(checks, root, crew.options.scratch_bytes, differing)))
    refuse_unequal([checks[number] for number in sorted(differing)], root)


def refuse_unequal(unequal: Sequence[EqualCheck], root: Place) -> None:
    """Say which checks failed.

    Raises:
        MismatchError: naming every pair that differs; none if there is none.
    """
    if unequal:
        raise MismatchError(
            f"{len(unequal)} pairs of tensors that must be equal differ. No weight was changed.",
            where=str(root),
            evidence=[f"{check.name}: {check.left.file} and {check.right.file} differ" for check in unequal],
            next_step="Tied tensors were saved with different values; resume from another checkpoint.",
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two regions of one shape that must hold the same bits; the number of a pair that does not is noted."""

    number: int
    left: Region
    right: Region
    differing: set[int]

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`Job`."""
        total, sides = 0, []
        for region in (self.left, self.right):
            sides.append(np.empty(region.size, region.dtype))
            total += read_region(reader, region, sides[-1], workspace)
        if sides[0].tobytes() != sides[1].tobytes():
            self.differing.add(self.number)
        return total


def _comparisons(
    checks: tuple[EqualCheck, ...], root: Place, piece_bytes: int, differing: set[int]
) -> Iterator[tuple[int, Job]]:
    for number, check in enumerate(checks):
        left, right = region_of(root, check.left), region_of(root, check.right)
        pieces = zip(pieces_of(left, piece_bytes), pieces_of(right, piece_bytes), strict=True)
        for one, other in pieces:
            yield 2 * piece_bytes, Comparison(number, one, other, differing)


@dataclass
class ArraySlot:
    """A slot that is a numpy array of its own.

    Args:
        array: one-dimensional, of the shard's dtype and size.
    """

    array: np.ndarray[Any, Any]
    host_bytes: int = 0

    def open(self) -> np.ndarray[Any, Any]:
        """The array."""
        return self.array

    def close(self) -> None:
        """Nothing to hand over."""

    def settle(self) -> None:
        """Nothing to wait for."""


def read_tensors(
    crew: Crew, root: Place, wanted: Iterable[tuple[Shard, Sequence[ReadItem]]]
) -> Iterator[tuple[Shard, np.ndarray[Any, Any]]]:
    """Wanted tensors, one at a time, each as a flat array of its own; for export and digests.

    Args:
        crew: who reads; all its threads do if a tensor is large.
        root: the catalog's directory.
        wanted: every tensor with its items, in order.
    """
    for portion in _portions(wanted):
        crew.expect(root, (item.stored for _, items in portion for item in items))
        for shard, items in portion:
            yield shard, _read_tensor(crew, root, shard, items)


def _portions(
    wanted: Iterable[tuple[Shard, Sequence[ReadItem]]],
) -> Iterator[list[tuple[Shard, Sequence[ReadItem]]]]:
    """Successive tensors that together are small enough to be fetched at once, should they be remote."""
    portion: list[tuple[Shard, Sequence[ReadItem]]] = []
    size = 0
    for shard, items in wanted:
        length = shard.size * _dtype(shard.dtype).itemsize
        if portion and size + length > _PORTION_BYTES:
            yield portion
            portion, size = [], 0
        portion.append((shard, items))
        size += length
    if portion:
        yield portion


def _read_tensor(crew: Crew, root: Place, shard: Shard, items: Sequence[ReadItem]) -> np.ndarray[Any, Any]:
    array = np.empty(shard.size, _dtype(shard.dtype))
    if items:
        _fill_arrays(crew, root, items, {(items[0].role, items[0].name): array})
    return array


def fill_arrays(crew: Crew, root: Place, items: Sequence[ReadItem], arrays: Mapping[Key, np.ndarray[Any, Any]]) -> int:
    """Read whole tensors into memory of the caller's; bytes read from storage.

    Args:
        crew: who reads; all its threads do if there is much.
        root: the catalog's directory.
        items: the items of these tensors.
        arrays: a flat array of its dtype and size for every tensor, by role and name.
    """
    crew.expect(root, (item.stored for item in items))
    return _fill_arrays(crew, root, items, arrays)


def _fill_arrays(crew: Crew, root: Place, items: Sequence[ReadItem], arrays: Mapping[Key, np.ndarray[Any, Any]]) -> int:
    targets = _Targets({key: ArraySlot(array) for key, array in arrays.items()})
    return crew.run(_tasks(_jobs(list(items), root, targets, crew.options)))
