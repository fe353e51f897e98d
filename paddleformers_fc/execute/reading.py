"""Execute the reads of a plan into memory that slots provide.

A :class:`Slot` is the memory of one wanted shard. On a CPU it is the tensor's own memory. On an accelerator it is a
host array that is copied to the device when it is full, while the next arrays are read.

The items of a plan become jobs (:mod:`.read_jobs`), which the threads of a pool take (:mod:`.read_pool`). Memory beyond
the targets: at most ``staging_memory_bytes`` for all threads together, or one host copy of a shard if that is larger.
Large shards of a device are filled in pieces where possible (:mod:`.large_shards`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paddleformers_fc.errors import Diverged, MismatchError
from paddleformers_fc.execute.large_shards import cut_large_shards
from paddleformers_fc.execute.read_jobs import Key, Memory, batch_jobs, dtype_of, read_jobs, region_of
from paddleformers_fc.execute.read_pool import DEFAULT_OPTIONS, ReadJob, ReadOptions, ReadPool
from paddleformers_fc.execute.verified_reads import UNVERIFIED, BlockVerifier
from paddleformers_fc.layout import Shard
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem
from paddleformers_fc.storage.identity import Identities
from paddleformers_fc.storage.manifest import CHOOSE_COPY
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.progress import advance, expect, is_measured
from paddleformers_fc.storage.ranges import NO_IDENTITIES, RangeReader
from paddleformers_fc.storage.regions import Region, Workspace, read_region, split_region
from paddleformers_fc.text import count_text

_PORTION_BYTES = 32 << 20
_LEAST_PIECE_BYTES = 1 << 20
"""Large shards of a device are not cut into smaller pieces than this."""


class Slot(Protocol):
    """The memory of one wanted shard."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host array that is filled instead of the shard; 0 if the shard is filled in place."""

    def open(self) -> Memory:
        """Return memory of the shard's dtype and size, to be filled."""

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
    verifier: BlockVerifier = UNVERIFIED,
) -> int:
    """Fill every slot.

    Args:
        plan: the plan; its report must be empty.
        root: the directory that the plan's files are relative to.
        slots: memory by role and full name.
        options: threads and staging memory.
        identities: identities of the checked files; a replaced file is refused.
        verifier: compares its blocks that contain the items, and keeps the faults.
    Returns:
        bytes read from storage.
    Raises:
        Corrupt, StorageError: a read failed; reading stops, threads are joined, targets hold an undefined mixture.
    """
    room = options.staging_memory_bytes - options.threads * options.scratch_bytes
    items, slots = cut_large_shards(plan.items, slots, max(room // 2, _LEAST_PIECE_BYTES))
    count, size_before = 0, 0
    before = targets = _Targets(slots)
    try:
        with ReadPool(options, identities) as pool:
            for group, size in _groups(items, slots, room // 2):
                # While a group is read, the host arrays of the previous one are copied to the device, if both fit.
                if size_before + size > room:
                    before.finish_copy()
                targets = _Targets(slots)
                count += _fill(pool, root, targets, group, verifier)
                before.finish_copy()
                before, size_before = targets, size
    finally:
        # No copy may be under way from memory that is released.
        before.finish_copy()
        targets.finish_copy()
    return count


def _fill(pool: ReadPool, root: AnyPath, targets: _Targets, items: list[ReadItem], verifier: BlockVerifier) -> int:
    pool.expect((region_of(root, item.stored) for item in items), verifier.expected)
    if is_measured():
        expect(sum(item.stored.part.volume * dtype_of(item.stored.dtype).itemsize for item in items))
    count = pool.run(batch_jobs(verifier.jobs(read_jobs(items, root, targets, pool.options))), advance)
    targets.close()
    return count


def _groups(items: tuple[ReadItem, ...], slots: Mapping[Key, Slot], room: int) -> Iterator[tuple[list[ReadItem], int]]:
    """Yield groups of items that are read together, and the bytes of their host arrays.

    All items that are filled in place are one group; the others are grouped by the memory that is available.
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
        """Close all open slots: their host arrays are full."""
        for key in self._open:
            self._slots[key].close()

    def finish_copy(self) -> None:
        """Settle the open slots, once each."""
        for key in self._open:
            self._slots[key].finish_copy()
        self._open.clear()


def verify_equal(
    checks: tuple[EqualCheck, ...],
    root: AnyPath,
    options: ReadOptions = DEFAULT_OPTIONS,
    identities: Identities = NO_IDENTITIES,
) -> None:
    """Read both sides of every check in pieces, and compare their bits.

    Args:
        checks: pairs of ranges that must be equal.
        root: the directory that files are relative to.
        options: threads and staging memory.
        identities: identities of the checked files; a replaced file is refused.
    Raises:
        MismatchError: naming every pair that differs.
    """
    if not checks:
        return
    differing: set[int] = set()
    with ReadPool(options, identities) as pool:
        pool.expect(region_of(root, side) for check in checks for side in (check.left, check.right))
        pool.run(batch_jobs(_comparisons(checks, root, pool.options.scratch_bytes, differing)))
    refuse_unequal([checks[number] for number in sorted(differing)], root)


def refuse_unequal(unequal: Sequence[EqualCheck], root: AnyPath) -> None:
    """Refuse checks that failed; no error if there is none.

    Raises:
        Diverged: lists every pair that differs; copies of a tied tensor are among them.
        MismatchError: the same, for numbers that are stored several times.
    """
    if unequal:
        kind = Diverged if any(check.tied for check in unequal) else MismatchError
        raise kind(
            f"Tensors that must be equal differ: {count_text(len(unequal), 'pair')}. No weight was changed.",
            where=str(root),
            evidence=[f"{check.name}: {check.left.file} and {check.right.file} differ" for check in unequal],
            next_step=f"Copies of a tied tensor, or of one number, were saved with different values. {CHOOSE_COPY} "
            "Of open weights, correct tie_word_embeddings in config.json, or fetch the files again.",
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compare two regions of one shape bit by bit, and record the number of a pair that differs."""

    number: int
    left: Region
    right: Region
    differing: set[int]

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """See :class:`ReadJob`."""
        total, sides = 0, []
        for region in (self.left, self.right):
            sides.append(np.empty(region.size, region.dtype))
            total += read_region(reader, region, sides[-1], workspace)
        if sides[0].tobytes() != sides[1].tobytes():
            self.differing.add(self.number)
        return total


def _comparisons(
    checks: tuple[EqualCheck, ...], root: AnyPath, piece_bytes: int, differing: set[int]
) -> Iterator[tuple[int, ReadJob]]:
    for number, check in enumerate(checks):
        left, right = region_of(root, check.left), region_of(root, check.right)
        pieces = zip(split_region(left, piece_bytes), split_region(right, piece_bytes), strict=True)
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

    def open(self) -> Memory:
        """Return the array."""
        return Memory.of(self.array)

    def close(self) -> None:
        """Do nothing: there is no host array."""

    def finish_copy(self) -> None:
        """Do nothing: there is no copy."""


def read_tensors(
    pool: ReadPool, root: AnyPath, wanted: Iterable[tuple[Shard, Sequence[ReadItem]]]
) -> Iterator[tuple[Shard, np.ndarray[Any, Any]]]:
    """Yield wanted tensors one at a time, each as a flat array of its own; for digests.

    Args:
        pool: the threads; all of them read a large tensor.
        root: the catalog's directory.
        wanted: every tensor with its items, in order.
    """
    for portion in _portions(wanted):
        pool.expect(region_of(root, item.stored) for _, items in portion for item in items)
        for shard, items in portion:
            yield shard, _read_tensor(pool, root, shard, items)


def _portions(
    wanted: Iterable[tuple[Shard, Sequence[ReadItem]]],
) -> Iterator[list[tuple[Shard, Sequence[ReadItem]]]]:
    """Group successive tensors that are small enough to be fetched together if they are remote."""
    portion: list[tuple[Shard, Sequence[ReadItem]]] = []
    size = 0
    for shard, items in wanted:
        length = shard.size * dtype_of(shard.dtype).itemsize
        if portion and size + length > _PORTION_BYTES:
            yield portion
            portion, size = [], 0
        portion.append((shard, items))
        size += length
    if portion:
        yield portion


def _read_tensor(pool: ReadPool, root: AnyPath, shard: Shard, items: Sequence[ReadItem]) -> np.ndarray[Any, Any]:
    array = np.empty(shard.size, dtype_of(shard.dtype))
    if items:
        _fill_arrays(pool, root, items, {(items[0].role, items[0].name): array})
    return array


def fill_arrays(
    pool: ReadPool, root: AnyPath, items: Sequence[ReadItem], arrays: Mapping[Key, np.ndarray[Any, Any]]
) -> int:
    """Read whole tensors into memory of the caller, and return the bytes read from storage.

    Args:
        pool: the threads.
        root: the catalog's directory.
        items: the items of these tensors.
        arrays: a flat array of its dtype and size for every tensor, by role and name.
    """
    pool.expect(region_of(root, item.stored) for item in items)
    return _fill_arrays(pool, root, items, arrays)


def _fill_arrays(
    pool: ReadPool, root: AnyPath, items: Sequence[ReadItem], arrays: Mapping[Key, np.ndarray[Any, Any]]
) -> int:
    targets = _Targets({key: ArraySlot(array) for key, array in arrays.items()})
    return pool.run(batch_jobs(read_jobs(items, root, targets, pool.options)))
