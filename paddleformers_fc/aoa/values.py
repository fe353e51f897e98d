"""The value of a name during evaluation: a shape, and the boxes of left tensors that fill it.

Operations make values from values by moving boxes. The cost of an operation is linear in the boxes of its values and in
its parts, up to a sort.

The tensors of a side, as far as the language depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape, whole
from paddleformers_fc.mapping.correspondences import Correspondence, TensorSpec, coalesced
from paddleformers_fc.mapping.rules import interleave, parts_by_tensor
from paddleformers_fc.mapping.templates import pulled


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that consists of boxes of left tensors.

    Args:
        shape: its shape, in elements.
        pieces: the boxes that fill it, each element once. Their target, this value, has no name.
    """

    shape: Shape
    pieces: tuple[Correspondence, ...]


def value_of(name: str, shape: Shape) -> Value:
    """Return the value of a left tensor."""
    box = whole(shape)
    return Value(shape, (Correspondence(name, box, "", box, tuple(range(len(shape)))),))


def permuted(value: Value, axes: Shape) -> Value:
    """Return the value with its axes in another order.

    Args:
        value: the source.
        axes: for every axis of the result the axis that it reads.
    Raises:
        Fault: the value has another number of axes.
    """
    if len(axes) != len(value.shape):
        raise Fault(
            f"permute={list(axes)} has {len(axes)} axes, the tensor has shape {list(value.shape)}.",
            f"an order of {list(range(len(value.shape)))}",
        )

    def turned(shape: Shape) -> Shape:
        return tuple(map(shape.__getitem__, axes))

    return Value(
        turned(value.shape),
        tuple(
            Correspondence(
                piece.source,
                piece.source_box,
                piece.target,
                Box(turned(piece.target_box.lo), turned(piece.target_box.hi)),
                turned(piece.axes),
                piece.cast,
            )
            for piece in value.pieces
        ),
    )


def transposed(value: Value) -> Value:
    """Return the value with all axes reversed."""
    return permuted(value, tuple(reversed(range(len(value.shape)))))


def converted(value: Value, cast: str) -> Value:
    """Return the value converted to a dtype.

    Raises:
        Fault: the value was converted to another dtype before. A second conversion would hide the loss of the first.
    """
    before = {piece.cast for piece in value.pieces} - {None, cast}
    if before:
        raise Fault(f"The value is already converted to {', '.join(sorted(map(str, before)))}.", "one conversion")
    return Value(value.shape, tuple(replace(piece, cast=cast) for piece in value.pieces))


def interleaved(
    values: Sequence[Value], parts: Shape, axis: int, groups: tuple[int, int], into: int, fused: Shape
) -> list[Value]:
    """Rearrange values that contain ``parts`` along an axis: the operation of joins, splits and fused layouts.

    Args:
        values: one per part, or a single one that contains all parts.
        parts: length of every part.
        axis: the axis of the parts.
        groups: the number of groups in which a single value interleaves its parts, and a single result.
        into: number of results: one per part, or 1.
        fused: the shape of a result, apart from its length along ``axis``.
    """
    slabs = [_Slabs(value, axis) for value in values]
    results: list[list[Correspondence]] = [[] for _ in range(into)]
    for run in interleave(parts_by_tensor(len(values), parts), parts_by_tensor(into, parts), *groups):
        results[run.target] += slabs[run.source].moved(run.in_source, run.length, run.in_target)
    lengths = parts if into > 1 else (sum(parts),)
    return [
        Value((*fused[:axis], length, *fused[axis + 1 :]), tuple(coalesced(pieces)))
        for length, pieces in zip(lengths, results, strict=True)
    ]


class _Slabs:
    """Cuts slabs out of a value along one axis."""

    def __init__(self, value: Value, axis: int) -> None:
        self._value = value
        self._axis = axis
        self._finder = BoxFinder([piece.target_box for piece in value.pieces])

    def moved(self, begin: int, length: int, to: int) -> list[Correspondence]:
        """Return the pieces of ``begin <= x < begin + length``, moved along the axis so that they begin at ``to``."""
        axis, box = self._axis, whole(self._value.shape)
        slab = Box(_put(box.lo, axis, begin), _put(box.hi, axis, begin + length))
        found = []
        for index in self._finder.near(slab):
            piece = self._value.pieces[index]
            part = piece.target_box.intersect(slab)
            if part is not None:
                shift = to - begin
                target = Box(_put(part.lo, axis, part.lo[axis] + shift), _put(part.hi, axis, part.hi[axis] + shift))
                found.append(Correspondence(piece.source, pulled(piece, part), "", target, piece.axes, piece.cast))
        return found


def _put(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class AoaTensor:
    """A tensor of one side.

    Args:
        shape: its global shape, in elements.
        dtype: its element type by its numpy name, such as ``bfloat16``.
        cuts: number of tensor-parallel shards along each axis.
    """

    shape: Shape
    dtype: str
    cuts: Shape

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype alone."""
        return TensorSpec(self.shape, self.dtype)


Tensors = Mapping[str, AoaTensor]
"""The tensors of a side by name."""


def uncut(shape: Shape, dtype: str) -> AoaTensor:
    """Return a tensor that is not divided between ranks, as in a file of open weights."""
    return AoaTensor(shape, dtype, (1,) * len(shape))
