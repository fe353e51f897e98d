"""Boxes of ranks from a mesh and placements, as semi-automatic parallelism states the layout of a tensor.

A mesh is a row-major array of ranks. A placement states for one axis of the mesh how the ranks along it divide a
tensor. Paddle divides an axis of n elements into parts of ceil(n / k) elements for k ranks: the last parts are shorter
or empty. Several axes of the mesh may divide one axis of a tensor, one after the other.

``paddle.distributed.save_state_dict`` computes with other lengths, which differ by at most one: of 6 elements on 4
ranks it stores wrong boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddleformers_fc.mapping.boxes import Box, Shape


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
