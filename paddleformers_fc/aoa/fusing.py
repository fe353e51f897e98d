"""The fused layouts and plain joins and splits, as parts interleaved in groups.

A layout that does not divide the tensors of its statement is refused. Numbers of heads and groups come from the text
and the tensors; they are checked against the lengths before any allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.values import Value, interleaved
from paddleformers_fc.mapping.boxes import Shape


def joined(values: Sequence[Value], axis: int) -> Value:
    """Concatenate values along an axis.

    Raises:
        Fault: where they differ on another axis.
    """
    fused = _alike(values, axis)
    return interleaved(values, tuple(value.shape[axis] for value in values), axis, (1, 1), 1, fused)[0]


def split(value: Value, axis: int, count: int) -> list[Value]:
    """Split a value into ``count`` equal lengths along an axis.

    Raises:
        Fault: where its length is not divisible.
    """
    length = _length(value, axis)
    if length % count:
        raise Fault(
            f"Length {length} on axis {axis} is not {count} equal lengths.",
            "equal lengths; for uneven ones, split into more names and join them again, `a -> a[0:7], axis=0` and then "
            "`a[0:2] -> b, axis=0`",
        )
    return interleaved([value], (length // count,) * count, axis, (1, 1), count, value.shape)


def fused_ffn(values: Sequence[Value], axis: int, rounds: tuple[int, int], into: int) -> list[Value]:
    """Convert gate and up between values that hold them; a value that holds both interleaves them in groups.

    Args:
        values: gate and up, or the one value that holds both.
        axis: the axis along which they lie.
        rounds: rounds of what is read and of what is written.
        into: 2 for gate and up as results, or 1.
    """
    parts = _parts(values, axis, (1, 1))
    if len(set(parts)) != 1:
        raise Fault(f"Gate and up have lengths {list(parts)} on axis {axis}; they are not equal.")
    return _dealt(values, parts, axis, rounds, into)


def fused_qkv(values: Sequence[Value], axis: int, heads: int, groups: int, into: int) -> list[Value]:
    """Query, key and value between values that hold them: one round per kv head.

    Args:
        values: query, key and value, or the one value that holds all.
        axis: the axis along which they lie.
        heads: number of query heads.
        groups: number of kv heads.
        into: 3 for query, key and value as results, or 1.
    """
    parts = _parts(values, axis, (heads, groups, groups))
    for part, count in zip(parts, (heads, groups, groups), strict=True):
        if part % count:
            raise Fault(f"Length {part} on axis {axis} is not {count} heads.")
    return _dealt(values, parts, axis, (groups, 1) if into > 1 else (1, groups), into)


def fused_qkv_old(
    values: Sequence[Value], axis: int, heads: int, groups: int, rounds: tuple[int, int], into: int
) -> list[Value]:
    """Query, key and value between values that hold them: one round per tensor-parallel rank.

    Args:
        values: query, key and value, or the one value that holds all.
        axis: the axis along which they lie.
        heads: number of query heads.
        groups: number of kv heads.
        rounds: rounds of what is read and of what is written.
        into: 3 for query, key and value as results, or 1.
    """
    parts = _parts(values, axis, (heads, groups, groups))
    head = parts[0] // heads
    if parts != (heads * head, groups * head, groups * head):
        raise Fault(f"Lengths {list(parts)} on axis {axis} are not {heads}, {groups} and {groups} equal heads.")
    for count in rounds:
        if groups % count or heads % count:
            raise Fault(f"{heads} query and {groups} kv heads are not shared evenly by {count} ranks.")
    return _dealt(values, parts, axis, rounds, into)


def _dealt(values: Sequence[Value], parts: Shape, axis: int, rounds: tuple[int, int], into: int) -> list[Value]:
    for part in parts:
        for count in rounds:
            if part % count:
                raise Fault(f"Length {part} on axis {axis} is not {count} equal lengths, one per rank.")
    return interleaved(values, parts, axis, rounds, into, _alike(values, axis))


def _parts(values: Sequence[Value], axis: int, counts: Shape) -> Shape:
    """Return the lengths of the parts: of every value, or shares of the one value that holds all."""
    if len(values) > 1:
        return tuple(_length(value, axis) for value in values)
    length, total = _length(values[0], axis), sum(counts)
    if length % total:
        raise Fault(f"Length {length} on axis {axis} is not {total} equal lengths.")
    return tuple(length // total * count for count in counts)


def _length(value: Value, axis: int) -> int:
    if axis >= len(value.shape):
        raise Fault(
            f"There is no axis {axis} in shape {list(value.shape)}.",
            f"axis={len(value.shape) - 1}" if value.shape else "a tensor with axes",
        )
    return value.shape[axis]


def _alike(values: Sequence[Value], axis: int) -> Shape:
    """Return the shape that all values share apart from their length along ``axis``."""
    shapes = []
    for value in values:
        _length(value, axis)
        shapes.append((*value.shape[:axis], 0, *value.shape[axis + 1 :]))
    if len(set(shapes)) > 1:
        shown = " and ".join(str(list(value.shape)) for value in values[:4])
        raise Fault(f"Shapes {shown} differ on another axis than {axis}.")
    return shapes[0]
