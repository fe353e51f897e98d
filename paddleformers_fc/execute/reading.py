"""Execute the reads of a plan into the memory of slots.

A :class:`Slot` is the memory of one target shard: on a CPU the tensor's own memory, on an accelerator a host array that
is copied to the device while the next arrays are read. The items of a plan become operations
(:mod:`paddleformers_fc.storage.operations`), which threads execute (:mod:`paddleformers_fc.storage.executor`).

Memory beyond the targets: ``staging_memory_bytes`` for all threads together, or one host copy of a shard if that is
larger. A device shard that exceeds the staging memory is filled in pieces of complete rows, unless it is transposed.
Time: a few look-ups per item, because items with equal boxes are analysed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from paddleformers_fc.errors import Diverged, MismatchError
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, Shape, whole
from paddleformers_fc.mapping.templates import NEW_AXIS, BoxLink, pulled
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart, row_axis
from paddleformers_fc.plan.transfer_plan import boxes_within
from paddleformers_fc.storage.dtypes import ScaledFile
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, NO_BLOCKS, Blocks, ReadOptions, ReadPool
from paddleformers_fc.storage.files import byte_view
from paddleformers_fc.storage.identities import NO_IDENTITIES, Identities
from paddleformers_fc.storage.manifest import CHOOSE_COPY
from paddleformers_fc.storage.operations import Memory, Operation, Sizes, numpy_dtype, row_major, scaled, strided
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.progress import expect, is_measured
from paddleformers_fc.text import count_text

_T = TypeVar("_T")

Key = tuple[str, str]
"""Role and full name of a target shard."""


class Targets(Protocol):
    """The memory of target shards."""

    def __getitem__(self, key: Key) -> Memory:
        """Return the memory of a shard."""


def operations_of(
    items: Iterable[ReadItem], root: AnyPath, targets: Targets, identities: Identities = NO_IDENTITIES
) -> Iterator[Operation]:
    """Yield the operations of read items.

    Args:
        items: the items, grouped by file.
        root: the directory that files are relative to.
        targets: the memory of shards.
        identities: identities of the files, including virtual files.
    """
    paths: dict[str, tuple[AnyPath, object]] = {}
    forms: dict[tuple[object, ...], tuple[Operation, int] | None] = {}
    for item in items:
        stored = item.stored
        found = paths.get(stored.file)
        if found is None:
            path = root / stored.file
            found = paths[stored.file] = path, identities.get(path)
        path, identity = found
        memory = targets[item.role, item.name]
        kind = (stored.dtype, stored.shape, stored.part, item.shape, item.part, item.axes, memory.dtype)
        form = forms.get(kind)
        if form is None:
            if kind in forms:
                continue
            form = forms[kind] = _form(item, memory.dtype)
            if form is None:
                continue
        like, reach = form
        address = memory.at(item.start * memory.dtype.itemsize + like.address, reach)
        if isinstance(identity, ScaledFile):
            tensor, box = identity.tensor_at(stored.begin), (stored.part.lo, stored.part.hi)
            yield from scaled(tensor, identity.dtype, box, item.target_strides(memory.dtype.itemsize), memory, address)
        elif not like.sizes:
            yield Operation(path, stored.begin + like.begin, like.size, address, memory.owner)
        else:
            axes = like.sizes, like.sources, like.targets, like.dtype, like.to
            yield Operation(path, stored.begin + like.begin, like.size, address, memory.owner, *axes)


def box_in_rows(rows: np.ndarray[Any, Any], shape: Shape, box: Box) -> np.ndarray[Any, Any]:
    """Return a box as a view of the rows that contain it, see :func:`.rows_around`."""
    if not shape:
        return rows.reshape(())
    axis = row_axis(shape)
    inside = (slice(low, high) for low, high in zip(box.lo[axis + 1 :], box.hi[axis + 1 :], strict=True))
    return rows.reshape((*shape[:axis], -1, *shape[axis + 1 :]))[(slice(None),) * (axis + 1) + tuple(inside)]


def _form(item: ReadItem, to: np.dtype[Any]) -> tuple[Operation, int] | None:
    """Return the common result for items with equal boxes; None if the boxes are empty.

    Returns:
        the operation for a stored box at the start of a file and a fragment at the start of memory, and the number of
        bytes from the first to the last element in memory.
    """
    stored, dtype = item.stored, numpy_dtype(item.stored.dtype)
    sources, source = _placed(stored.shape, stored.part, dtype.itemsize)
    _, target = _placed(item.shape, item.part, to.itemsize)
    strides = sources, item.target_strides(to.itemsize)
    like = strided(Path(), source, stored.part.shape, strides, (dtype, to), target, None)
    return None if like is None else (like, like.reach)


def _placed(shape: Shape, part: Box, width: int) -> tuple[Sizes, int]:
    """Return the byte strides of a row-major box, and the offset of a part of it."""
    strides = row_major(shape, width)
    return strides, sum(low * stride for low, stride in zip(part.lo, strides, strict=True))


def cut_large_shards(
    items: tuple[ReadItem, ...], slots: Mapping[Key, Slot], most: int
) -> tuple[tuple[ReadItem, ...], Mapping[Key, Slot]]:
    """Replace large shards by pieces, in the items and slots of a load.

    Args:
        items: the reads.
        slots: memory by role and full name.
        most: maximum bytes of a piece; at least one row.
    """
    large = {key: slot for key, slot in slots.items() if slot.host_bytes > most and slot.elements}
    if not large:
        return items, slots
    found: dict[Key, list[ReadItem]] = {}
    for item in items:
        if (item.role, item.name) in large:
            found.setdefault((item.role, item.name), []).append(item)
    kept, pieces = dict(slots), dict[Key, list[ReadItem]]()
    for key, own in found.items():
        slot = large[key]
        if all(_follows_the_file(item) for item in own):
            pieces[key] = []
            row = max(math.prod(item.shape[row_axis(item.shape) + 1 :]) for item in own)
            step = max(1, most * slot.elements // slot.host_bytes // row) * row
            for low in range(0, slot.elements, step):
                high = min(low + step, slot.elements)
                name = f"{key[1]}[{low}:{high}]"
                kept[key[0], name] = slot.part(low, high)
                pieces[key].extend(replace(part, name=name) for item in own for part in _within(item, low, high))
    others = (item for item in items if (item.role, item.name) not in pieces)
    return (*others, *chain.from_iterable(pieces.values())), kept


def _follows_the_file(item: ReadItem) -> bool:
    """Return whether successive rows of the fragment are successive in the file."""
    if not item.shape:
        return True
    stored = item.axes[row_axis(item.shape)]
    return stored == NEW_AXIS or all(length == 1 for length in item.stored.part.shape[:stored])


def _within(item: ReadItem, low: int, high: int) -> Iterator[ReadItem]:
    """Yield the parts of an item that fill a piece of the shard, in the piece's coordinates.

    Args:
        item: an item of the shard.
        low: index of the piece's first element.
        high: index after its last element.
    """
    begin, end = max(low - item.start, 0), min(high - item.start, math.prod(item.shape))
    if begin >= end:
        return
    link, stored = BoxLink(0, item.stored.part, item.part, item.axes), item.stored
    for fragment in Shard("", "", item.shape, whole(item.shape), (begin, end)).fragments:
        part = item.part.intersect(fragment.box)
        if part is not None:
            yield replace(
                item,
                stored=replace(stored, part=pulled(link, part)),
                start=item.start - low + begin + fragment.start,
                shape=fragment.box.shape,
                part=part.relative_to(fragment.box.lo),
            )


_HASHED_BYTES = 16 << 20
"""Bytes of a range that are read and hashed at a time."""
_MIN_PIECE_BYTES = 1 << 20
"""Minimum size of the pieces of large device shards."""


class Slot(Protocol):
    """The memory of one target shard."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host array that is filled instead of the shard; 0 if the shard is filled in place."""

    @property
    def elements(self) -> int:
        """Number of elements of a shard that can be filled in pieces; 0 if it is filled at once."""

    def part(self, start: int, stop: int) -> Slot:
        """Return the slot of a range of elements of a shard that can be filled in pieces."""

    def open(self) -> Memory:
        """Return memory of the shard's dtype and size to fill."""

    def close(self) -> None:
        """Start to copy the full host array to the shard."""

    def finish_copy(self) -> None:
        """Wait for the copy, and release the host array; after ``close``."""


def execute_reads(
    plan: LoadPlan,
    root: AnyPath,
    slots: Mapping[Key, Slot],
    options: ReadOptions = DEFAULT_OPTIONS,
    identities: Identities = NO_IDENTITIES,
    blocks: Blocks = NO_BLOCKS,
) -> int:
    """Fill every slot.

    Args:
        plan: the plan; its report must be empty.
        root: the directory that the plan's files are relative to.
        slots: memory by role and full name.
        options: threads and staging memory.
        identities: identities of the checked files; reading a replaced file raises an error.
        blocks: the blocks that are hashed while they are read.
    Returns:
        bytes read from storage.
    Raises:
        Corrupt, StorageError: a read failed. All threads have stopped, and targets are undefined.
    """
    room = options.host_copy_bytes
    items, slots = cut_large_shards(plan.items, slots, max(room // 2, _MIN_PIECE_BYTES))
    count, size_before = 0, 0
    before = targets = _Targets(slots)
    try:
        with ReadPool(options, identities) as pool:
            for group, size in _groups(items, slots, room // 2):
                # While a group is read, the previous one is copied to the device, unless both exceed the memory.
                if size_before + size > room:
                    before.finish_copy()
                targets = _Targets(slots)
                if is_measured():
                    expect(sum(item.stored.part.volume * numpy_dtype(item.stored.dtype).itemsize for item in group))
                count += pool.run(operations_of(group, root, targets, identities), blocks, is_counted=True)
                targets.close()
                before.finish_copy()
                before, size_before = targets, size
    finally:
        # Copies must be done before their memory is released.
        before.finish_copy()
        targets.finish_copy()
    return count


def _groups(items: tuple[ReadItem, ...], slots: Mapping[Key, Slot], room: int) -> Iterator[tuple[list[ReadItem], int]]:
    """Yield groups of items that are read together, and the bytes of their host arrays.

    All items that are filled in place form one group; the others are grouped by available memory.
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
    for keys in batches(staged, sizes.__getitem__, room):
        yield [item for key in keys for item in staged[key]], sum(sizes[key] for key in keys)


def batches(values: Iterable[_T], size_of: Callable[[_T], int], most: int) -> Iterator[list[_T]]:
    """Group successive values with a total size of at most ``most``; a larger value is a group of its own."""
    batch: list[_T] = []
    used = 0
    for value in values:
        size = size_of(value)
        if batch and used + size > most:
            yield batch
            batch, used = [], 0
        batch.append(value)
        used += size
    if batch:
        yield batch


class _Targets:
    """The memory of slots, opened on demand. Slots that are filled in place are neither closed nor waited for."""

    def __init__(self, slots: Mapping[Key, Slot]) -> None:
        self._slots = slots
        self._open: dict[Key, Memory] = {}

    def __getitem__(self, key: Key) -> Memory:
        """Return the memory of a shard."""
        slot = self._slots[key]
        if not slot.host_bytes:
            return slot.open()
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = slot.open()
        return found

    def close(self) -> None:
        """Close all open slots, whose host arrays are full."""
        for key in self._open:
            self._slots[key].close()

    def finish_copy(self) -> None:
        """Wait for the copies of all open slots."""
        for key in self._open:
            self._slots[key].finish_copy()
        self._open.clear()


def verify_equal(checks: tuple[EqualCheck, ...], root: AnyPath, identities: Identities = NO_IDENTITIES) -> None:
    """Read both sides of every check, and compare their digests.

    Args:
        checks: pairs of ranges that must be equal.
        root: the directory that files are relative to.
        identities: identities of the checked files; reading a replaced file raises an error.
    Raises:
        MismatchError: names every pair that differs.
    """
    sides = (side for check in checks for side in (check.left, check.right))
    check_equal(checks, digests_of(sides, root, DEFAULT_OPTIONS, identities), root)


def digests_of(
    parts: Iterable[StoredPart], root: AnyPath, options: ReadOptions, identities: Identities
) -> dict[StoredPart, bytes]:
    """Return the digest of every distinct range; see :func:`verify_equal` for the arguments."""
    found: dict[StoredPart, bytes] = {}
    with ReadPool(options, identities) as pool:
        for part in dict.fromkeys(parts):
            hasher = xxhash.xxh3_128()
            for array in read_in_order(pool, root, part, _HASHED_BYTES):
                hasher.update(byte_view(array))
            found[part] = hasher.digest()
    return found


def read_in_order(pool: ReadPool, root: AnyPath, part: StoredPart, most_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a range in arrays of at most ``most_bytes`` bytes, or of one element, in row-major order."""
    for box in boxes_within(part.part, max(1, most_bytes // numpy_dtype(part.dtype).itemsize)):
        (array,), _ = read_parts(pool, root, [replace(part, part=box)])
        yield array


def read_parts(
    pool: ReadPool, root: AnyPath, parts: Sequence[StoredPart], blocks: Blocks = NO_BLOCKS
) -> tuple[list[np.ndarray[Any, Any]], int]:
    """Read each range into a new array in its stored shape and dtype; also return the number of bytes read."""
    arrays = [np.empty(part.part.volume, numpy_dtype(part.dtype)) for part in parts]
    targets = {("", str(number)): Memory.of(array) for number, array in enumerate(arrays)}
    items = [_as_item(part, str(number)) for number, part in enumerate(parts)]
    items.sort(key=lambda item: item.stored.file)
    count = pool.run(operations_of(items, root, targets, pool.identities), blocks)
    return [array.reshape(part.part.shape) for array, part in zip(arrays, parts, strict=True)], count


def _as_item(part: StoredPart, name: str) -> ReadItem:
    shape = part.part.shape
    return ReadItem("", name, part, 0, shape, whole(shape), tuple(range(len(shape))))


def check_equal(checks: Iterable[EqualCheck], digests: Mapping[StoredPart, bytes], root: AnyPath) -> None:
    """Check that both sides of every check have equal digests.

    Raises:
        Diverged: lists every pair that differs, including copies of a tied tensor.
        MismatchError: lists every pair that differs, only numbers that are stored several times.
    """
    unequal = [check for check in checks if digests[check.left] != digests[check.right]]
    if unequal:
        kind = Diverged if any(check.tied for check in unequal) else MismatchError
        raise kind(
            f"Tensors that must be equal differ: {count_text(len(unequal), 'pair')}. No weight was changed.",
            where=str(root),
            evidence=[f"{check.name}: {check.left.file} and {check.right.file} differ" for check in unequal],
            next_step=f"Copies of a tied tensor, or of one number, were saved with different values. {CHOOSE_COPY} "
            "For open weights, correct tie_word_embeddings in config.json, or download the files again.",
        )


class ArraySlot(msgspec.Struct):
    """A slot that is a numpy array.

    Args:
        array: one-dimensional, of the shard's dtype and size.
        host_bytes: as for :class:`Slot`; by default the array itself is filled.
        elements: as for :class:`Slot`.
    """

    array: np.ndarray[Any, Any]
    host_bytes: int = 0
    elements: int = 0

    def part(self, start: int, stop: int) -> ArraySlot:
        """Return the slot of a range of elements."""
        part = self.array[start:stop]
        return ArraySlot(part, part.nbytes, part.size)

    def open(self) -> Memory:
        """Return the array."""
        return Memory.of(self.array)

    def close(self) -> None:
        """Do nothing, because there is no host array."""

    def finish_copy(self) -> None:
        """Do nothing, because there is no copy."""


def fill_arrays(
    pool: ReadPool, root: AnyPath, items: Sequence[ReadItem], arrays: Mapping[Key, np.ndarray[Any, Any]]
) -> int:
    """Read complete tensors into arrays of the caller, and return the bytes read from storage.

    Args:
        pool: the threads.
        root: the catalog's directory.
        items: the items of these tensors, grouped by file.
        arrays: for every tensor a flat array of its dtype and size, by role and name.
    """
    targets = {key: Memory.of(array) for key, array in arrays.items()}
    return pool.run(operations_of(items, root, targets, pool.identities))
