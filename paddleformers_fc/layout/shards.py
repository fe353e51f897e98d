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
from typing import TypeAlias

import msgspec
import numpy as np

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
        volume = self.box.volume
        if self.flat in (None, (0, volume)):
            return (Fragment(self.box, 0),) if volume else ()
        return tuple(_fragments(self.box, *self.flat))

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


def _fragments(box: Box, begin: int, end: int) -> Iterator[Fragment]:
    """Yield the boxes of the elements ``begin:end`` of a box in row-major order."""
    shape = box.shape
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    at = begin
    while at < end:
        # The outermost axis with a row that begins here and fits; the fragment ends at the last such row.
        axis = next(axis for axis, row in enumerate(rows) if at % row == 0 and at + row <= end)
        lo = tuple([low + at // row % length for low, row, length in zip(box.lo, rows, shape, strict=True)])
        count = min((end - at) // rows[axis], box.hi[axis] - lo[axis])
        hi = (*[one + 1 for one in lo[:axis]], lo[axis] + count, *box.hi[axis + 1 :])
        yield Fragment(Box(lo, hi), at - begin)
        at += count * rows[axis]


def shard_bytes(shard: Shard) -> int:
    """Return the length of a shard in bytes."""
    return shard.size * dtype_size(shard.dtype)


ShardsByRole: TypeAlias = Mapping[str, Mapping[str, Shard]]
"""Role -> name -> shard."""


class AxisShard(msgspec.Struct, frozen=True):
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
    found = np.argwhere(np.reshape(ranks, mesh) == rank)
    return tuple(found[0].tolist()) if len(found) else None


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
