"""Compare the stored bytes of whole tensors of two checkpoints, side by side.

Every byte of both sides is read and compared; no recorded checksum takes the place of a read. Boxes that both sides
store (:mod:`paddleformers_fc.plan.items`) are read in pieces into two buffers. A box that is contiguous on both sides
is compared as stored, and neighbours are read together: a few system calls for thousands of small tensors. Read items
are needed only for boxes that one side stores strided or transposed, or in another dtype. Stored tensors of two
checkpoints with equal boxes are compared without a plan (:func:`differing_stored`).

Memory: two buffers of ``COMPARE_BYTES`` and scratch memory for each thread, independent of the size of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from paddleformers_fc.execute.read_jobs import Key, Memory, batch_jobs, dtype_of, flat_start, read_jobs, region_of
from paddleformers_fc.execute.read_pool import ReadJob, ReadOptions, ReadPool
from paddleformers_fc.formats.catalog import Catalog, StoredForm
from paddleformers_fc.plan.items import PairedBox, ReadItem, paired_boxes, read_item
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.storage.ranges import RangeReader
from paddleformers_fc.storage.regions import Region, Workspace
from paddleformers_fc.storage.rows import ScatterList

COMPARE_BYTES = 2 << 20
"""Bytes of a piece on each side: few enough to be in the processor's cache when they are compared."""
_MOST_RANGES = 4096
"""Ranges of one job at most; their number is Python work, where their bytes are not."""


@dataclass(frozen=True)
class ComparedSide:
    """One checkpoint.

    Args:
        root: the catalog's directory.
        items: for every tensor that is compared its read items, by role and name.
    """

    root: AnyPath
    items: Mapping[Key, Sequence[ReadItem]]


def differing_tensors(
    pool: ReadPool, left: ComparedSide, right: ComparedSide, dtypes: Mapping[Key, str], piece_bytes: int = COMPARE_BYTES
) -> set[Key]:
    """Return the tensors whose bytes differ.

    Args:
        pool: the threads, with the identities of both checkpoints.
        left: one checkpoint.
        right: the other.
        dtypes: the tensors to compare, each with the dtype that both sides have; their shapes are equal too.
        piece_bytes: bytes that are compared at a time.
    Raises:
        Corrupt, StorageError: a file cannot be read.
    """
    keys = list(dtypes)
    ranges, boxes = _paired(keys, left, right, dtypes)
    groups, alone = _grouped(boxes, len(keys))
    ranges += [group.whole for group in groups]
    work = _Work(left.root, right.root, _Buffers(piece_bytes))
    pool.expect(_regions(left, right, keys))
    ranges.sort()
    alone.sort(key=_in_file)
    expect(2 * (sum(one.size for one in ranges) + sum(map(_bytes_of, alone))))
    pool.run(batch_jobs(chain(_range_jobs(work, ranges), _box_jobs(work, alone, pool.options))))
    unclear = [box for group in groups if group.whole.number in work.differing for box in group.boxes]
    expect(2 * sum(map(_bytes_of, unclear)))
    pool.run(batch_jobs(_box_jobs(work, unclear, pool.options)))
    return {keys[number] for number in work.differing if number < len(keys)}


def differing_stored(pool: ReadPool, left: Catalog, right: Catalog, names: Mapping[str, Collection[str]]) -> set[Key]:
    """Return the stored tensors whose bytes differ, by role and name.

    Args:
        pool: the threads, with the identities of both checkpoints.
        left: the stored tensors of one checkpoint.
        right: those of the other, in equal boxes.
        names: the tensors to compare, by role.
    Raises:
        Corrupt, StorageError: a file cannot be read.
    """
    keys = [(role, name) for role, found in names.items() for name in found]
    sizes: dict[StoredForm, list[int]] = {}
    ranges: list[_RangePair] = []
    for number, (role, name) in enumerate(keys):
        tensor = left.roles[role][name]
        lengths = sizes.get(tensor.form)
        if lengths is None:
            width = dtype_of(tensor.form.held_dtype).itemsize
            lengths = sizes[tensor.form] = [box.volume * width for box in tensor.form.boxes]
        offsets = zip(tensor.offsets, right.roles[role][name].offsets, lengths, strict=True)
        ranges += [_RangePair(*one, *other, size, number) for one, other, size in offsets if size]
    ranges.sort()
    pool.expect(_range_regions(left, right, ranges))
    work = _Work(left.root, right.root, _Buffers(COMPARE_BYTES))
    expect(2 * sum(one.size for one in ranges))
    pool.run(batch_jobs(_range_jobs(work, ranges)))
    return {keys[number] for number in work.differing}


class _RangePair(NamedTuple):
    """A range of bytes of a file on either side; sorted by the left side's files.

    Args:
        left_file: the file on the left.
        left_begin: the offset in it.
        right_file: the file on the right.
        right_begin: the offset in it.
        size: length in bytes.
        number: of its tensor, or, from the number of tensors on, of a group of boxes.
    """

    left_file: str
    left_begin: int
    right_file: str
    right_begin: int
    size: int
    number: int


@dataclass(frozen=True, slots=True)
class _BoxRead:
    """A box of a tensor that is not contiguous on both sides.

    Args:
        number: of the tensor.
        dtype: of the tensor.
        box: the box.
        left: the item that stores it on the left.
        right: the same on the right.
    """

    number: int
    dtype: str
    box: PairedBox
    left: ReadItem
    right: ReadItem


def _bytes_of(box: _BoxRead) -> int:
    return box.box.left.part.volume * dtype_of(box.dtype).itemsize


def _in_file(box: _BoxRead) -> tuple[str, str, int]:
    return box.dtype, box.left.stored.file, box.left.stored.begin


def _paired(
    keys: Sequence[Key], left: ComparedSide, right: ComparedSide, dtypes: Mapping[Key, str]
) -> tuple[list[_RangePair], list[_BoxRead]]:
    """Return the boxes of all tensors: those that are contiguous on both sides, and the others."""
    alike: dict[tuple[object, ...], list[PairedBox | _ContiguousBox]] = {}
    ranges: list[_RangePair] = []
    boxes: list[_BoxRead] = []
    for number, key in enumerate(keys):
        dtype, ours, theirs = dtypes[key], left.items[key], right.items[key]
        kind = (dtype, *map(_kind, ours), "", *map(_kind, theirs))
        pairs = alike.get(kind)
        if pairs is None:
            pairs = alike[kind] = [_contiguous(pair, ours, theirs, dtype) for pair in paired_boxes(ours, theirs)]
        for pair in pairs:
            if isinstance(pair, PairedBox):
                boxes.append(_BoxRead(number, dtype, pair, ours[pair.left.item], theirs[pair.right.item]))
            else:
                one, other = ours[pair.left].stored, theirs[pair.right].stored
                begins = one.begin + pair.left_offset, other.begin + pair.right_offset
                ranges.append(_RangePair(one.file, begins[0], other.file, begins[1], pair.size, number))
    return ranges, boxes


@dataclass(frozen=True, slots=True)
class _Group:
    """Boxes of one stored box that lie alike on both sides, such as parts of a fused tensor.

    The whole stored box is compared first, as one range. Its boxes are read only if that differs, to name the tensors.

    Args:
        whole: the whole stored box.
        boxes: the boxes.
    """

    whole: _RangePair
    boxes: list[_BoxRead]


def _grouped(boxes: Sequence[_BoxRead], first: int) -> tuple[list[_Group], list[_BoxRead]]:
    """Return groups of boxes that are most of a stored box, and the other boxes.

    Args:
        boxes: of all tensors.
        first: number of the first group.
    """
    found: dict[tuple[str, int, str, int], list[_BoxRead]] = {}
    for box in boxes:
        one, other = box.left.stored, box.right.stored
        found.setdefault((one.file, one.begin, other.file, other.begin), []).append(box)
    groups: list[_Group] = []
    alone: list[_BoxRead] = []
    for (file, begin, other_file, other_begin), members in found.items():
        elements = math.prod(members[0].left.stored.shape)
        covered = sum(box.box.left.part.volume for box in members)
        if 2 * covered < elements or not all(map(_lies_alike, members)):
            alone += members
            continue
        size = elements * dtype_of(members[0].dtype).itemsize
        number = first + len(groups)
        groups.append(_Group(_RangePair(file, begin, other_file, other_begin, size, number), members))
    return groups, alone


def _lies_alike(box: _BoxRead) -> bool:
    """Return whether both sides store a box at one place of one shape, so that equal stored boxes prove it equal."""
    one, other = box.left.stored, box.right.stored
    alike = (one.shape, one.dtype, box.box.left.part) == (other.shape, other.dtype, box.box.right.part)
    return alike and one.dtype == box.dtype and not box.box.is_transposed


def _kind(item: ReadItem) -> tuple[object, ...]:
    """Return the properties of an item that, with file and offset, determine how it is read."""
    stored = item.stored
    return stored.dtype, stored.shape, stored.part, item.part, item.axes


def _regions(left: ComparedSide, right: ComparedSide, keys: Sequence[Key]) -> Iterator[Region]:
    for side in (left, right):
        for key in keys:
            for item in side.items[key]:
                yield region_of(side.root, item.stored)


def _range_regions(left: Catalog, right: Catalog, ranges: Sequence[_RangePair]) -> Iterator[Region]:
    def region(path: AnyPath, begin: int, size: int) -> Region:
        return Region(path, begin, (size,), (0,), (size,), np.dtype(np.uint8))

    yield from (region(left.root / one.left_file, one.left_begin, one.size) for one in ranges)
    yield from (region(right.root / one.right_file, one.right_begin, one.size) for one in ranges)


@dataclass(frozen=True, slots=True)
class _ContiguousBox:
    """A box that is contiguous on both sides.

    Args:
        left: the item on the left.
        right: the item on the right.
        left_offset: of the box in the stored box on the left, in bytes.
        right_offset: the same on the right.
        size: length in bytes.
    """

    left: int
    right: int
    left_offset: int
    right_offset: int
    size: int


def _contiguous(
    pair: PairedBox, left: Sequence[ReadItem], right: Sequence[ReadItem], dtype: str
) -> PairedBox | _ContiguousBox:
    """Return the box as contiguous if it is on both sides, otherwise unchanged."""
    starts = []
    for side, items in ((pair.left, left), (pair.right, right)):
        stored = items[side.item].stored
        start = flat_start(stored.shape, side.part)
        if start is None or pair.is_transposed or stored.dtype != dtype:
            return pair
        starts.append(start)
    width = dtype_of(dtype).itemsize
    size = pair.left.part.volume * width
    return _ContiguousBox(pair.left.item, pair.right.item, starts[0] * width, starts[1] * width, size)


class _Buffers:
    """Pairs of buffers, one pair for every thread that compares at the same time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle: list[np.ndarray[Any, Any]] = []

    def taken(self) -> np.ndarray[Any, Any]:
        """Return two buffers as the rows of one array."""
        try:
            return self._idle.pop()
        except IndexError:
            return np.empty((2, -(-self.size // 8) * 8), np.uint8)

    def returned(self, pair: np.ndarray[Any, Any]) -> None:
        """Take a pair back."""
        self._idle.append(pair)


@dataclass(frozen=True)
class _Work:
    """The context that all jobs share.

    Args:
        left: directory of the left side.
        right: directory of the right side.
        buffers: for the pieces.
        differing: numbers of the tensors and groups that were found to differ.
    """

    left: AnyPath
    right: AnyPath
    buffers: _Buffers
    differing: set[int] = field(default_factory=set)

    def compare(self, pair: np.ndarray[Any, Any], size: int, parts: Sequence[tuple[int, int]]) -> None:
        """Compare two full buffers; where they differ, tensor by tensor.

        Args:
            pair: the buffers.
            size: bytes in each.
            parts: numbers and lengths in bytes, in the order of the buffers.
        """
        if _is_equal(pair, 0, size):
            return
        begin = 0
        for number, length in parts:
            if number not in self.differing and not _is_equal(pair, begin, begin + length):
                self.differing.add(number)
            begin += length


def _is_equal(pair: np.ndarray[Any, Any], begin: int, end: int) -> bool:
    # As words: a comparison byte by byte writes eight times as many results.
    words = end - (end - begin) % 8
    first, second = pair[0], pair[1]
    if (first[begin:words].view(np.uint64) != second[begin:words].view(np.uint64)).any():
        return False
    return bytes(first[words:end]) == bytes(second[words:end])


def _range_jobs(work: _Work, ranges: Sequence[_RangePair]) -> Iterator[tuple[int, ReadJob]]:
    most = work.buffers.size
    part: list[_RangePair] = []
    size = 0
    for one in _bounded(ranges, most):
        if part and (size + one.size > most or len(part) == _MOST_RANGES):
            yield 2 * size, _RangeComparison(work, part)
            part, size = [], 0
        part.append(one)
        size += one.size
    if part:
        yield 2 * size, _RangeComparison(work, part)


def _bounded(ranges: Sequence[_RangePair], most: int) -> Iterator[_RangePair]:
    for pair in ranges:
        if pair.size <= most:
            yield pair
            continue
        one, begin, other, start, size, number = pair
        for low in range(0, size, most):
            yield _RangePair(one, begin + low, other, start + low, min(most, size - low), number)


@dataclass(frozen=True, slots=True)
class _RangeComparison:
    """Compare ranges of bytes, read in the order of the left side's files."""

    work: _Work
    ranges: list[_RangePair]

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        ranges = [one for one in self.ranges if one.number not in self.work.differing]
        advance(2 * sum(one.size for one in self.ranges))
        if not ranges:
            return 0
        lengths = np.array([one.size for one in ranges], np.int64)
        pair = self.work.buffers.taken()
        sides = (
            [(one.left_file, one.left_begin) for one in ranges],
            [(one.right_file, one.right_begin) for one in ranges],
        )
        for buffer, root, places in zip(pair, (self.work.left, self.work.right), sides, strict=True):
            for file, rows in _rows_by_file(places, lengths):
                _read_rows(reader, root / file, rows, buffer)
        size = int(lengths.sum())
        self.work.compare(pair, size, [(one.number, one.size) for one in ranges])
        self.work.buffers.returned(pair)
        return 2 * size


def _rows_by_file(
    places: Sequence[tuple[str, int]], lengths: np.ndarray[Any, Any]
) -> Iterator[tuple[str, ScatterList]]:
    """Yield the rows of each file for ranges that follow one another in a buffer.

    Args:
        places: file and offset of every range.
        lengths: of the ranges, in bytes.
    """
    numbers: dict[str, list[int]] = {}
    for number, (file, _) in enumerate(places):
        numbers.setdefault(file, []).append(number)
    offsets = np.array([offset for _, offset in places], np.int64)
    targets = np.cumsum(lengths) - lengths
    for file, found in numbers.items():
        chosen = np.array(found)
        yield file, _joined(offsets[chosen], targets[chosen], lengths[chosen])


def _joined(offsets: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> ScatterList:
    """Return the ranges in the order of the file; those that are adjacent in the file and in the buffer are one."""
    order = np.argsort(offsets, kind="stable")
    offsets, targets, lengths = offsets[order], targets[order], lengths[order]
    follows = (offsets[1:] == offsets[:-1] + lengths[:-1]) & (targets[1:] == targets[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return ScatterList(offsets[first], targets[first], np.add.reduceat(lengths, first))


def _read_rows(reader: RangeReader, path: AnyPath, rows: ScatterList, buffer: np.ndarray[Any, Any]) -> None:
    """Read rows whose addresses count from the beginning of a buffer."""
    addresses = (rows.addresses + buffer.__array_interface__["data"][0]).astype(np.uint64)
    reader.read_rows(path, ScatterList(rows.offsets, addresses, rows.lengths))


def _box_jobs(work: _Work, boxes: Sequence[_BoxRead], options: ReadOptions) -> Iterator[tuple[int, ReadJob]]:
    """Group pieces of boxes of one dtype, which lie in a buffer without gaps."""
    left: list[ReadItem] = []
    right: list[ReadItem] = []
    parts: list[tuple[int, int]] = []
    size, current = 0, ""
    for box in boxes:
        dtype, width = box.dtype, dtype_of(box.dtype).itemsize
        for piece in box.box.pieces(max(1, work.buffers.size // width)):
            nbytes = piece.left.part.volume * width
            if parts and (current != dtype or size + nbytes > work.buffers.size):
                yield 2 * size, _BoxComparison(work, current, left, right, parts, options)
                left, right, parts, size = [], [], [], 0
            current = dtype
            left.append(read_item(piece, piece.left, box.left, dtype, size // width))
            right.append(read_item(piece, piece.right, box.right, dtype, size // width))
            parts.append((box.number, nbytes))
            size += nbytes
    if parts:
        yield 2 * size, _BoxComparison(work, current, left, right, parts, options)


@dataclass(frozen=True, slots=True)
class _BoxComparison:
    """Compare boxes of tensors of one dtype, in the order in which the left side stores their elements.

    Args:
        work: the state that all jobs share.
        dtype: of the tensors.
        left: how the boxes are read on the left.
        right: how they are read on the right.
        parts: numbers of tensors and lengths in bytes, in the order of the boxes.
        options: of the reads.
    """

    work: _Work
    dtype: str
    left: list[ReadItem]
    right: list[ReadItem]
    parts: list[tuple[int, int]]
    options: ReadOptions

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        advance(2 * sum(length for _, length in self.parts))
        if all(number in self.work.differing for number, _ in self.parts):
            return 0
        pair = self.work.buffers.taken()
        total, size = 0, sum(length for _, length in self.parts)
        for buffer, root, items in zip(pair, (self.work.left, self.work.right), (self.left, self.right), strict=True):
            target = _OneBuffer(Memory.of(buffer[:size].view(dtype_of(self.dtype))))
            for _, job in read_jobs(sorted(items, key=_file_order), root, target, self.options):
                total += job.read(reader, workspace)
        self.work.compare(pair, size, self.parts)
        self.work.buffers.returned(pair)
        return total


def _file_order(item: ReadItem) -> tuple[str, int]:
    return item.stored.file, item.stored.begin


@dataclass(frozen=True, slots=True)
class _OneBuffer:
    """One memory for all items."""

    memory: Memory

    def __getitem__(self, key: Key) -> Memory:
        """Return the memory."""
        return self.memory
