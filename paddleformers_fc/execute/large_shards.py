"""Cut large shards of a device into pieces that fit into staging buffers.

A shard of a device is filled through a host array. A shard beyond the staging memory would need a host array of its own
size, and its copy would not overlap with reads. Its rows are successive in the file unless it is transposed, so that
pieces of whole rows are read as if each were a shard. A transposed shard stays whole: its rows are columns of the file.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec.structs import replace

from paddleformers_fc.execute.read_jobs import Key
from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.plan.items import ReadItem

_Fragment = tuple[int, Shape]
"""The index of the first element of a fragment in its shard, and its shape."""


@runtime_checkable
class DivisibleSlot(Protocol):
    """A slot that can be filled in pieces."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the host array."""

    @property
    def elements(self) -> int:
        """Number of elements that can be cut anywhere; 0 if the slot must be filled as a whole."""

    def part(self, start: int, stop: int) -> Any:
        """Return the slot of a range of elements."""


def cut_large_shards(
    items: tuple[ReadItem, ...], slots: Mapping[Key, Any], most: int
) -> tuple[tuple[ReadItem, ...], Mapping[Key, Any]]:
    """Return the items and slots of a load in which large shards are replaced by their pieces.

    Args:
        items: the reads.
        slots: memory by role and full name.
        most: maximum bytes of a piece; a larger row is one piece.
    """
    large = {
        key: slot
        for key, slot in slots.items()
        if slot.host_bytes > most and isinstance(slot, DivisibleSlot) and slot.elements
    }
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
            most_elements = max(1, most * slot.elements // slot.host_bytes)
            points = _cut_points(sorted({(item.start, item.shape) for item in own}), slot.elements, most_elements)
            for low, high in zip(points, points[1:], strict=False):
                name = f"{key[1]}[{low}:{high}]"
                kept[key[0], name] = slot.part(low, high)
                parts = (_within(item, low, high) for item in own)
                pieces[key].extend(replace(part, name=name) for part in parts if part is not None)
    cut = tuple(one for item in items for one in _once(pieces, item))
    return cut, kept


def _once(pieces: dict[Key, list[ReadItem]], item: ReadItem) -> Sequence[ReadItem]:
    """Return the pieces of a shard at its first item, and nothing at the others; the item itself if it is not cut."""
    key = (item.role, item.name)
    if key not in pieces:
        return (item,)
    found, pieces[key] = pieces[key], []
    return found


def _row_axis(shape: Shape) -> int:
    """Return the first axis that is longer than one, or the last axis."""
    return next((axis for axis, length in enumerate(shape) if length > 1), len(shape) - 1)


def _follows_the_file(item: ReadItem) -> bool:
    """Return whether successive rows of the fragment are successive in the file."""
    if not item.shape:
        return True
    stored = item.axes[_row_axis(item.shape)]
    return stored == NEW_AXIS or all(length == 1 for length in item.stored.part.shape[:stored])


def _cut_points(fragments: list[_Fragment], size: int, most: int) -> list[int]:
    """Return the ends of pieces of at most ``most`` elements, or of one row; no fragment is cut inside a row."""
    points = [0]
    while size - points[-1] > most:
        points.append(_between_rows(fragments, points[-1], points[-1] + most))
    return points if points[-1] == size else [*points, size]


def _between_rows(fragments: list[_Fragment], low: int, point: int) -> int:
    """Return the last end of a row that is behind ``low`` and not behind ``point``; else the first one behind it."""
    index = bisect_right(fragments, point, key=lambda fragment: fragment[0]) - 1
    if index < 0:
        return point
    start, shape = fragments[index]
    if point >= start + math.prod(shape):
        return point
    row = math.prod(shape[_row_axis(shape) + 1 :])
    down = point - (point - start) % row
    return down if down > low else down + row


def _within(item: ReadItem, low: int, high: int) -> ReadItem | None:
    """Return what an item fills of a piece, in the piece's coordinates; None if that is nothing.

    Args:
        item: fills a part of the shard.
        low: index of the first element of the piece, between rows of the item's fragment.
        high: index behind its last.
    """
    volume = math.prod(item.shape)
    if item.start + volume <= low or high <= item.start:
        return None
    if low <= item.start and item.start + volume <= high:
        return replace(item, start=item.start - low)
    axis = _row_axis(item.shape)
    row = math.prod(item.shape[axis + 1 :])
    first, last = max(low - item.start, 0) // row, min(high - item.start, volume) // row
    begin, end = max(item.part.lo[axis], first), min(item.part.hi[axis], last)
    if begin >= end:
        return None
    stored, source = item.stored, item.axes[axis]
    if source != NEW_AXIS:
        offset = stored.part.lo[source] - item.part.lo[axis]
        stored = replace(stored, part=_with_range(stored.part, source, begin + offset, end + offset))
    return replace(
        item,
        stored=stored,
        start=item.start + first * row - low,
        shape=(*item.shape[:axis], last - first, *item.shape[axis + 1 :]),
        part=_with_range(item.part, axis, begin - first, end - first),
    )


def _with_range(box: Box, axis: int, low: int, high: int) -> Box:
    """Return a box with another range along an axis."""
    return Box((*box.lo[:axis], low, *box.lo[axis + 1 :]), (*box.hi[:axis], high, *box.hi[axis + 1 :]))
