"""Shards, one rank's part of one tensor, as boxes; and the boxes of a mesh with placements.

A shard is a row-major box of a global tensor. A *flattened* shard (sharding stage 1 v2) is a range of such a box in
row-major order. Both are lists of :class:`Fragment`: boxes that are contiguous and row-major in the shard's buffer. A
range of an n-dimensional box has at most 2n-1 fragments, so planning handles only boxes.

In semi-automatic parallelism, a mesh is a row-major array of ranks, and a placement per mesh axis defines how the ranks
along it divide a tensor. Paddle divides n elements over k ranks into parts of ceil(n / k) elements, of which the last
may be shorter or empty. ``paddle.distributed.save_state_dict`` computes different lengths, and so stores wrong boxes,
for example of 6 elements on 4 ranks.
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
        box: the box, in global coordinates.
        start: index of the box's first element in the buffer.
    """

    box: Box
    start: int


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of one tensor.

    Args:
        name: the tensor's name in its space.
        dtype: numpy name of the dtype.
        global_shape: shape of the global tensor.
        box: this rank's box, in global coordinates.
        flat: half-open range of a flattened shard, in row-major elements of ``box``; None for any other shard.
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
        """Number of equal shards on each axis, which is the tensor-parallel degree on that axis."""
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
        """Yield why the shard is invalid, if it is."""
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
        # Take the outermost axis whose row begins here and ends in the range, and as many of its rows as possible.
        axis = next(axis for axis, row in enumerate(rows) if at % row == 0 and at + row <= end)
        lo = tuple([low + at // row % length for low, row, length in zip(box.lo, rows, shape, strict=True)])
        count = min((end - at) // rows[axis], box.hi[axis] - lo[axis])
        hi = (*[one + 1 for one in lo[:axis]], lo[axis] + count, *box.hi[axis + 1 :])
        yield Fragment(Box(lo, hi), at - begin)
        at += count * rows[axis]


def shard_bytes(shard: Shard) -> int:
    return shard.size * dtype_size(shard.dtype)


ShardsByRole: TypeAlias = Mapping[str, Mapping[str, Shard]]
"""Role -> name -> shard."""


class AxisShard(msgspec.Struct, frozen=True):
    """The placement of a mesh axis whose ranks hold parts of one axis of a tensor.

    Args:
        axis: the tensor's axis.
        order: the sequence in which several mesh axes divide the same axis; mesh axes of equal order keep their order.
    """

    axis: int
    order: int = 0


Placements = Sequence[AxisShard | None]
"""One placement per mesh axis; None means that the ranks along it hold replicas."""


def coordinate_of(rank: int, mesh: Shape, ranks: Sequence[int]) -> Shape | None:
    """Return the coordinate of a rank in a mesh; None if the mesh does not contain the rank.

    Args:
        rank: the rank.
        mesh: the shape of the mesh.
        ranks: the ranks of the mesh, in row-major order.
    """
    found = np.argwhere(np.reshape(ranks, mesh) == rank)
    return tuple(found[0].tolist()) if len(found) else None


def placed_box(shape: Shape, mesh: Shape, placements: Placements, coordinate: Shape) -> Box:
    """Return the box of a tensor that one rank holds; it may be empty.

    Args:
        shape: global shape of the tensor.
        mesh: the shape of the mesh.
        placements: how the mesh axes divide the tensor.
        coordinate: the rank's coordinate in the mesh.
    """
    lo, hi = [0] * len(shape), list(shape)
    cuts = [(one.order, axis, one.axis) for axis, one in enumerate(placements) if one is not None]
    for _, along, axis in sorted(cuts):
        share = -(-(hi[axis] - lo[axis]) // mesh[along])
        lo[axis] = min(lo[axis] + coordinate[along] * share, hi[axis])
        hi[axis] = min(lo[axis] + share, hi[axis])
    return Box(tuple(lo), tuple(hi))
