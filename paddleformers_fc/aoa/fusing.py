"""Joins, splits and fused layouts of values, as parts interleaved in groups.

A layout that does not divide the tensors of its statement is refused. Numbers of heads come from the text, lengths from
the tensors; both are checked against each other before any allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.operations import Fused, FusedOrder
from paddleformers_fc.aoa.values import Value, interleaved
from paddleformers_fc.mapping.boxes import Shape


def joined(values: Sequence[Value], axis: int) -> Value:
    """Concatenate values along an axis.

    Raises:
        Fault: the values differ on another axis.
    """
    fused_shape = _common_shape(values, axis)
    return interleaved(values, tuple(value.shape[axis] for value in values), axis, (1, 1), 1, fused_shape)[0]


def split(value: Value, axis: int, count: int) -> list[Value]:
    """Split a value into ``count`` equal lengths along an axis.

    Raises:
        Fault: the length is not divisible.
    """
    length = _length(value, axis)
    if length % count:
        raise Fault(
            f"Length {length} on axis {axis} is not divisible into {count} equal lengths.",
            "equal lengths; for unequal ones, split into more names and join them: `a -> a[0:7], axis=0` and then "
            "`a[0:2] -> b, axis=0`",
        )
    return interleaved([value], (length // count,) * count, axis, (1, 1), count, value.shape)


def fused(values: Sequence[Value], layout: Fused, groups: tuple[int, int], into: int) -> list[Value]:
    """Convert parts between values that contain them.

    Args:
        values: one per part, or one that contains all parts.
        layout: the operation; ``fused_qkv`` interleaves its parts per kv head.
        groups: the number of groups of a single value that is read, and of a single result.
        into: the number of results: one per part, or 1.
    Raises:
        Fault: the lengths of the values do not fit the layout.
    """
    axis, counts = layout.axis, layout.counts
    parts = _parts(values, axis, counts)
    if layout.kind is FusedOrder.FFN and parts[0] != parts[1]:
        raise Fault(f"Gate and up have different lengths {list(parts)} on axis {axis}.")
    if layout.kind is FusedOrder.QKV:
        groups = (layout.groups, 1) if into > 1 else (1, layout.groups)
        for part, count in zip(parts, counts, strict=True):
            if part % count:
                raise Fault(f"Length {part} on axis {axis} is not divisible into {count} heads.")
    if layout.kind is FusedOrder.QKV_PER_RANK:
        head = parts[0] // layout.heads
        if parts != tuple(count * head for count in counts):
            raise Fault(f"Lengths {list(parts)} on axis {axis} are not {_listed(counts)} heads of one size.")
        for count in groups:
            if layout.groups % count or layout.heads % count:
                raise Fault(f"{layout.heads} query and {layout.groups} kv heads are not divisible among {count} ranks.")
    for part in parts:
        for count in groups:
            if part % count:
                raise Fault(f"Length {part} on axis {axis} is not divisible among {count} ranks.")
    return interleaved(values, parts, axis, groups, into, _common_shape(values, axis))


def _parts(values: Sequence[Value], axis: int, counts: Shape) -> Shape:
    """Return the lengths of the parts: of every value, or shares of the one value that contains all."""
    if len(values) > 1:
        return tuple(_length(value, axis) for value in values)
    length, total = _length(values[0], axis), sum(counts)
    if length % total:
        raise Fault(f"Length {length} on axis {axis} is not divisible into {total} equal lengths.")
    return tuple(length // total * count for count in counts)


def _length(value: Value, axis: int) -> int:
    if axis >= len(value.shape):
        raise Fault(
            f"Shape {list(value.shape)} has no axis {axis}.",
            f"axis={len(value.shape) - 1}" if value.shape else "a tensor with axes",
        )
    return value.shape[axis]


def _common_shape(values: Sequence[Value], axis: int) -> Shape:
    """Return the shape that all values share, with length 0 on ``axis``."""
    shapes = []
    for value in values:
        _length(value, axis)
        shapes.append((*value.shape[:axis], 0, *value.shape[axis + 1 :]))
    if len(set(shapes)) > 1:
        shown = " and ".join(str(list(value.shape)) for value in values[:4])
        raise Fault(f"Shapes {shown} differ on another axis than {axis}.")
    return shapes[0]


def _listed(counts: Shape) -> str:
    return f"{counts[0]}, {counts[1]} and {counts[2]}"
