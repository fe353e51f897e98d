"""Shards: one rank's part of one tensor, as boxes.

A shard is a row-major box of a global tensor. A *flattened* shard (sharding stage 1 v2) is a range of the elements of
such a box in row-major order. Both are lists of :class:`Fragment`: boxes that are contiguous and row-major in the
shard's buffer. A range of an n-dimensional box has at most 2n-1 fragments, so planning handles boxes only.

Boxes of ranks from a mesh and placements, as semi-automatic parallelism states the layout of a tensor.

A mesh is a row-major array of ranks. A placement states for one axis of the mesh how the ranks along it divide a
tensor. Paddle divides an axis of n elements into parts of ceil(n / k) elements for k ranks: the last parts are shorter
or empty. Several axes of the mesh may divide one axis of a tensor, one after the other.

``paddle.distributed.save_state_dict`` computes with other lengths, which differ by at most one: of 6 elements on 4
ranks it stores wrong boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from paddleformers_fc.mapping.boxes import Box, Shape, whole
from paddleformers_fc.storage.dtypes import dtype_size


class Fragment(msgspec.Struct, frozen=True, gc=False):
    """A box that is contiguous and row-major in a buffer.

    Args:
        box: global coordinates.
        start: index, in elements, of the box's first element in the buffer.
    """

    box: Box
    start: int


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of one tensor.

    Args:
        name: the tensor's name in its space.
        dtype: element type by its numpy name.
        global_shape: the whole tensor's shape.
        box: the box this rank holds, in global coordinates.
        flat: for a flattened shard the half-open range, in elements of ``box`` in row-major order; else None.
    """

    name: str
    dtype: str
    global_shape: Shape
    box: Box
    flat: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of elements in the buffer."""
        return self.box.volume if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The boxes of this shard in the order of its buffer."""
        if self.flat is None:
            return (Fragment(self.box, 0),) if self.box.volume else ()
        shape = self.box.shape
        return tuple(
            Fragment(_moved(box, self.box.lo), start) for box, start in _range_boxes(shape, self.flat[0], self.flat[1])
        )

    @property
    def cuts(self) -> Shape:
        """Number of equal shards on each axis: the tensor-parallel degree on that axis."""
        own = self.box.shape
        if own == self.global_shape:
            return (1,) * len(own)
        return tuple(
            [
                total // length if length and total % length == 0 else 1
                for total, length in zip(self.global_shape, own, strict=True)
            ]
        )

    def faults(self) -> Iterator[str]:
        """Yield the faults of an impossible shard."""
        if len(self.box.lo) != len(self.global_shape) or not whole(self.global_shape).contains(self.box):
            yield f"{self.name}: box {self.box} is outside shape {list(self.global_shape)}"
        elif self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= self.box.volume:
            yield f"{self.name}: range {self.flat[0]}:{self.flat[1]} is outside its {self.box.volume} elements"


def _moved(box: Box, offset: Shape) -> Box:
    if not any(offset):
        return box
    return Box(
        tuple(a + o for a, o in zip(box.lo, offset, strict=True)),
        tuple(a + o for a, o in zip(box.hi, offset, strict=True)),
    )


def _range_boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of the row-major range ``begin:end`` of a tensor, each with its offset from ``begin``."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ()), 0
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if first == last:
        yield from _within(first, shape, begin - first * row, end - first * row, 0)
        return
    at = 0
    if begin % row:
        yield from _within(first, shape, begin % row, row, at)
        at = (first + 1) * row - begin
        first += 1
    full_end = end // row
    if full_end > first:
        yield Box((first,) + (0,) * (len(shape) - 1), (full_end, *shape[1:])), at
        at += (full_end - first) * row
    if end % row:
        yield from _within(full_end, shape, 0, end % row, at)


def _within(index: int, shape: Shape, begin: int, end: int, at: int) -> Iterator[tuple[Box, int]]:
    for box, start in _range_boxes(shape[1:], begin, end):
        yield Box((index, *box.lo), (index + 1, *box.hi)), at + start


def shard_bytes(shard: Shard) -> int:
    """Return the length of a shard in bytes."""
    return shard.size * dtype_size(shard.dtype)


ShardsByRole: TypeAlias = Mapping[str, Mapping[str, Shard]]
"""Role -> name -> shard."""


@dataclass(frozen=True)
class AxisShard:
    """The ranks along an axis of a mesh have parts of an axis of a tensor.

    Args:
        axis: the tensor's axis.
        order: if several axes of the mesh divide the same axis: the smaller order first, then the axes' own order.
    """

    axis: int
    order: int = 0


Placements = Sequence[AxisShard | None]
"""By axis of the mesh; the ranks along an axis without a shard have replicas."""


def coordinate_of(rank: int, mesh: Shape, ranks: Sequence[int]) -> Shape | None:
    """Return the coordinate of a rank.

    Args:
        rank: the rank.
        mesh: the lengths of the mesh.
        ranks: its ranks, in row-major order.
    Returns:
        None if the mesh does not contain the rank.
    """
    if rank not in ranks:
        return None
    index = list(ranks).index(rank)
    found: list[int] = []
    for length in reversed(mesh):
        index, place = divmod(index, length)
        found.append(place)
    return tuple(reversed(found))


def placed_box(shape: Shape, mesh: Shape, placements: Placements, coordinate: Shape) -> Box:
    """Return the box of a tensor that one rank has.

    Args:
        shape: of the whole tensor.
        mesh: the lengths of the mesh.
        placements: how its axes divide the tensor.
        coordinate: of the rank in the mesh.
    Returns:
        a box, which is empty if there are fewer elements than parts.
    """
    lo, hi = [0] * len(shape), list(shape)
    cuts = [(one.order, axis, one.axis) for axis, one in enumerate(placements) if one is not None]
    for _, along, axis in sorted(cuts):
        share = -(-(hi[axis] - lo[axis]) // mesh[along])
        lo[axis] = min(lo[axis] + coordinate[along] * share, hi[axis])
        hi[axis] = min(lo[axis] + share, hi[axis])
    return Box(tuple(lo), tuple(hi))
