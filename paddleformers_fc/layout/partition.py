"""Paddle's assignment of layers to pipeline stages, and of optimizer states to the ranks of a sharding group.

Four rules of Paddle 3.3.1 on plain integers:

- pipeline (``SegmentLayers``): equal numbers of layers per part if they are divisible, otherwise of items; part ``i``
  belongs to stage ``i % stages``, which interleaves virtual stages.
- stage 1, version 1 (``DygraphShardingOptimizer``): whole parameters, largest first, to the rank with the fewest
  elements. Stage 2 does the same in the order of the parameters.
- stage 1, version 2 (``FusedCommBuffer``): parameters are in fused buffers, each padded. Every rank has an equal range
  of every buffer, and so a range of some parameters.
- stage 3: every parameter above a size is padded and cut into equal slices.

A partition is computed once for a group. The share of one rank costs a bisection per buffer and its parameters.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]


def layer_bounds(is_layer: Sequence[bool], parts: int) -> list[int]:
    """Return the bounds of a pipeline with equal numbers of layers per part.

    Args:
        is_layer: for every item, in order, whether it is counted: decoder layers and empty layers are; embedding, norm
            and head are not, and go with their neighbours.
        parts: stages times virtual stages; divides the number of layers.
    Returns:
        first item of every part, and one past the last item; part ``i`` belongs to stage ``i % stages``.
    """
    share, bounds, seen = sum(is_layer) // parts, [0], 0
    for index, counted in enumerate(is_layer):
        seen += counted
        if counted and seen % share == 0 and len(bounds) < parts:
            bounds.append(index + 1)
    return [*bounds, len(is_layer)]


def uniform_bounds(items: int, parts: int) -> list[int]:
    """Return the bounds of a pipeline with equal numbers of items; if not divisible, the last parts have one more."""
    share, extra = divmod(items, parts)
    bounds = [0]
    for part in range(1, parts):
        bounds.append(bounds[-1] + share + (1 if part > parts - extra else 0))
    return [*bounds, items]


def whole_owners(sizes: Sequence[int], ranks: int, largest_first: bool) -> list[int]:
    """Return the rank that has the states of each parameter, if parameters are assigned whole.

    Args:
        sizes: elements per parameter, in the model's order.
        ranks: of the sharding group.
        largest_first: sharding stage 1; stage 2 keeps the order.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index]) if largest_first else range(len(sizes))
    load = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for index in order:
        assigned, rank = load[0]
        owners[index] = rank
        heapq.heapreplace(load, (assigned + sizes[index], rank))
    return owners


@dataclass(frozen=True)
class FusedBuffer:
    """A buffer of consecutive parameters, each padded.

    Args:
        members: index of every parameter.
        starts: first element of each, and the length of the buffer.
        sizes: elements of each, without padding.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def share(self, rank: int, ranks: int) -> list[tuple[int, Range]]:
        """Return index and range, in its own elements, of every parameter in the share of one rank."""
        length = self.starts[-1] // ranks
        low, high = rank * length, (rank + 1) * length
        found: list[tuple[int, Range]] = []
        for place in range(bisect_right(self.starts, low) - 1, len(self.members)):
            start = self.starts[place]
            if start >= high:
                break
            begin, end = max(low - start, 0), min(high - start, self.sizes[place])
            if begin < end:
                found.append((self.members[place], (begin, end)))
        return found


def fused_buffers(
    sizes: Sequence[int], widths: Sequence[int], ranks: int, limit: int, alignment: int = 256
) -> list[FusedBuffer]:
    """Return the fused buffers of a sharding group.

    Args:
        sizes: elements per parameter, in the model's order.
        widths: bytes per element of each. Parameters of one width are of one dtype.
        ranks: of the sharding group.
        limit: bytes at which a buffer is closed.
        alignment: bytes to which every rank's part of a parameter is padded.
    """
    return [_fused(group, sizes, widths, ranks, alignment) for group in _groups(sizes, widths, limit)]


def _groups(sizes: Sequence[int], widths: Sequence[int], limit: int) -> list[list[int]]:
    """Return the indices of each buffer. A buffer has one dtype and includes the parameter that reaches the limit."""
    groups: list[list[int]] = []
    # Paddle sorts by the dtype's name, and paddle.bfloat16 and paddle.float16 come before paddle.float32.
    for width in sorted(set(widths)):
        size, members = 0, list[int]()
        for index in (index for index, one in enumerate(widths) if one == width):
            members.append(index)
            size += sizes[index] * width
            if size >= limit:
                groups.append(members)
                size, members = 0, []
        if members:
            groups.append(members)
    return groups


def _fused(group: list[int], sizes: Sequence[int], widths: Sequence[int], ranks: int, alignment: int) -> FusedBuffer:
    unit = max(alignment // widths[group[0]], 1) * ranks
    starts = [0]
    for index in group:
        starts.append(starts[-1] + -(-sizes[index] // unit) * unit)
    return FusedBuffer(tuple(group), tuple(starts), tuple(sizes[index] for index in group))


def slice_range(size: int, width: int, rank: int, ranks: int, alignment: int = 256) -> Range | None:
    """Return one rank's range of a parameter under stage 3; None if its slice is all padding.

    Args:
        size: elements of the parameter.
        width: bytes per element.
        rank: rank in the sharding group.
        ranks: of the sharding group.
        alignment: bytes to which the parameter is padded.
    """
    padded = size + -(size * width) % alignment // width
    length = -(-padded // ranks)
    begin, end = min(rank * length, size), min((rank + 1) * length, size)
    return (begin, end) if begin < end else None
