"""Carrying out a plan's reads, in parallel threads, into memory that a slot provides.

A :class:`Slot` is the memory of one wanted shard. On a CPU it is the tensor's own memory and nothing is copied; on an
accelerator it is a host array that is handed over when it is full. Shards are filled independently, several at a time;
beyond the targets, memory is bounded by ``threads`` staging buffers, and on accelerators ``threads`` host copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.identity import Identities
from paddleformers_fc.storage.ranges import NO_IDENTITIES, RangeReader
from paddleformers_fc.storage.regions import DEFAULT_STAGING_BYTES, Region, read_region

Key = tuple[str, str]


class Slot(Protocol):
    """The memory of one wanted shard."""

    def open(self) -> np.ndarray[Any, Any]:
        """A one-dimensional array of the shard's dtype and size, to be filled."""

    def close(self) -> None:
        """The array is full."""


@dataclass(frozen=True)
class ReadOptions:
    """How reads are carried out.

    Args:
        threads: how many shards are filled at a time.
        staging_bytes: bound of the buffer that transposes, casts and column slices pass through, per thread.
        once: whether what several ranks want is read by one of them, which hands it to the others.
    """

    threads: int = 4
    staging_bytes: int = DEFAULT_STAGING_BYTES
    once: bool = False


DEFAULT_OPTIONS = ReadOptions()


def carry_out(
    plan: LoadPlan,
    root: Path,
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
    grouped: dict[Key, list[ReadItem]] = {}
    for item in plan.items:
        grouped.setdefault((item.role, item.name), []).append(item)
    with RangeReader(identities=identities) as reader, ThreadPoolExecutor(options.threads, "flex-read") as pool:
        futures = [
            pool.submit(_fill, reader, root, slots[key], items, options.staging_bytes) for key, items in grouped.items()
        ]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        return sum(future.result() for future in done)


def _fill(reader: RangeReader, root: Path, slot: Slot, items: list[ReadItem], staging_bytes: int) -> int:
    buffer = slot.open()
    count = sum(
        read_region(reader, region_of(root, item.stored), item_view(buffer, item), staging_bytes) for item in items
    )
    slot.close()
    return count


def region_of(root: Path, stored: StoredPart) -> Region:
    """A stored part as a region of its file."""
    dtype = to_numpy(to_safetensors(stored.dtype))
    return Region(root / stored.file, stored.begin, stored.shape, stored.part.lo, stored.part.shape, dtype)


def item_view(buffer: np.ndarray[Any, Any], item: ReadItem) -> np.ndarray[Any, Any]:
    """The item's part of the buffer of its shard, its axes in the order of the stored region."""
    volume = int(np.prod(item.shape, dtype=np.int64))
    part = buffer[item.start : item.start + volume].reshape(item.shape)
    part = part[tuple(slice(low, high) for low, high in zip(item.part.lo, item.part.hi, strict=True))]
    added = tuple(axis for axis, source in enumerate(item.axes) if source == NEW_AXIS)
    kept = [source for source in item.axes if source != NEW_AXIS]
    ordered = np.transpose(part.squeeze(added) if added else part, np.argsort(kept, kind="stable"))
    missing = [axis for axis in range(len(item.stored.shape)) if axis not in kept]
    for axis in missing:
        ordered = np.expand_dims(ordered, axis)
    return ordered


def verify_equal(
    checks: tuple[EqualCheck, ...],
    root: Path,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    identities: Identities = NO_IDENTITIES,
) -> None:
    """Read both sides of every check and compare their bits.

    Raises:
        MismatchError: naming every pair that differs.
    """
    unequal: list[EqualCheck] = []
    with RangeReader(identities=identities) as reader:
        for check in checks:
            left, right = (_read_whole(reader, root, side, staging_bytes) for side in (check.left, check.right))
            if left != right:
                unequal.append(check)
    refuse_unequal(unequal, root)


def refuse_unequal(unequal: Sequence[EqualCheck], root: Path) -> None:
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


def _read_whole(reader: RangeReader, root: Path, part: StoredPart, staging_bytes: int) -> bytes:
    region = region_of(root, part)
    array = np.empty(region.size, region.dtype)
    read_region(reader, region, array, staging_bytes)
    return array.tobytes()


@dataclass
class ArraySlot:
    """A slot that is a numpy array of its own.

    Args:
        array: one-dimensional, of the shard's dtype and size.
    """

    array: np.ndarray[Any, Any]

    def open(self) -> np.ndarray[Any, Any]:
        """The array."""
        return self.array

    def close(self) -> None:
        """Nothing to hand over."""


def read_whole_tensor(
    plan_items: tuple[ReadItem, ...], reader: RangeReader, root: Path, dtype: str, size: int
) -> np.ndarray[Any, Any]:
    """One wanted tensor as a flat array of its own, for export and digests.

    Args:
        plan_items: the items of this tensor.
        reader: where bytes come from.
        root: the catalog's directory.
        dtype: element type by its numpy name.
        size: number of elements.
    """
    array = np.empty(size, to_numpy(to_safetensors(dtype)))
    _fill(reader, root, ArraySlot(array), list(plan_items), DEFAULT_STAGING_BYTES)
    return array
