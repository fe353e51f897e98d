"""List the checksum blocks that hold the bytes of stored regions.

A region of a stored box consists of runs of bytes with a constant stride per axis. Runs with gaps shorter than a block
are joined, so the number of steps is that of the blocks and not that of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.dtypes import dtype_size


def blocks_read(parts: Iterable[StoredPart], block_bytes: Mapping[str, int]) -> dict[str, set[int]]:
    """Return the indices of all blocks that hold a byte of some regions.

    Args:
        parts: the regions.
        block_bytes: length of a block by path.
    Returns:
        indices by path.
    """
    found: dict[str, set[int]] = {}
    for part in parts:
        length = block_bytes[part.file]
        numbers = found.setdefault(part.file, set())
        for first, last in byte_runs(part, length):
            numbers.update(range(first // length, last // length + 1))
    return found


def byte_runs(part: StoredPart, gap: int) -> Iterator[tuple[int, int]]:
    """Yield first and last byte of every run of a region; runs less than ``gap`` bytes apart are joined.

    Args:
        part: the region.
        gap: in bytes.
    """
    size = part.part.shape
    if 0 in size:
        return
    width = dtype_size(part.dtype)
    strides: list[int] = []
    step = width
    for length in reversed(part.shape):
        strides.insert(0, step)
        step *= length
    begin = part.begin + sum(low * stride for low, stride in zip(part.part.lo, strides, strict=True))
    yield from _runs(begin, list(zip(size, strides, strict=True)), width, gap)


def _runs(begin: int, axes: list[tuple[int, int]], width: int, gap: int) -> Iterator[tuple[int, int]]:
    while axes and axes[0][0] == 1:
        axes = axes[1:]
    span = sum((length - 1) * stride for length, stride in axes) + width
    # The holes of an outer axis are never shorter than those of an inner one.
    if not axes or axes[0][1] - (span - (axes[0][0] - 1) * axes[0][1]) < gap:
        yield begin, begin + span - 1
        return
    length, stride = axes[0]
    for number in range(length):
        yield from _runs(begin + number * stride, axes[1:], width, gap)
