"""Execute expanded statements one after the other, on boxes in place of numbers.

A name refers to its last assignment, or to the left tensor of that name. A right tensor without an assignment is the
left tensor of its name. Faults do not spread: the target of a faulty statement is unknown, and statements that read it
are skipped. Linear in the steps and in the boxes that they make.

Joins, splits and fused layouts of values, as parts interleaved in groups.

A layout that does not divide the tensors of its statement is refused. Numbers of heads come from the text, lengths from
the tensors; both are checked against each other before any allocation.

The number of tensor-parallel shards of a tensor that a statement names, directly or through intermediate names.

``fused_ffn`` and ``fused_qkv_old`` interleave their parts in one group per shard. A value that is read has the shards
of its left tensor. A name that is written has the shards of the right tensor that later statements build from it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paddleformers_fc.aoa.expand import Budget, Name, Step
from paddleformers_fc.aoa.faults import Fault, Faults, Span
from paddleformers_fc.aoa.names import NameIndex, name_skeletons, skeleton
from paddleformers_fc.aoa.operations import Drop, Fresh, Fused, FusedOrder, Join, Move
from paddleformers_fc.aoa.values import Operations, Tensors, Value, value_of
from paddleformers_fc.mapping.boxes import Shape


def joined(values: Sequence[Value], axis: int, operations: Operations) -> Value:
    """Concatenate values along an axis.

    Raises:
        Fault: the values differ on another axis.
    """
    fused_shape = _common_shape(values, axis)
    return operations.interleaved(values, tuple(one.shape[axis] for one in values), axis, (1, 1), 1, fused_shape)[0]


def split(value: Value, axis: int, count: int, operations: Operations) -> list[Value]:
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
    return operations.interleaved([value], (length // count,) * count, axis, (1, 1), count, value.shape)


def fused(
    values: Sequence[Value], layout: Fused, groups: tuple[int, int], into: int, operations: Operations
) -> list[Value]:
    """Convert parts between values that contain them.

    Args:
        values: one value per part, or a single value that contains all parts.
        layout: the operation; ``fused_qkv`` interleaves its parts per kv head.
        groups: the number of groups of a single value that is read, and of a single result.
        into: the number of results: one per part, or 1.
        operations: move the boxes.
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
    return operations.interleaved(values, parts, axis, groups, into, _common_shape(values, axis))


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


def groups_read(value: Value, axis: int, cuts: Mapping[str, Shape]) -> int:
    """Return the number of shards of the left tensor that a value comes from, along an axis of the value.

    Raises:
        Fault: the value comes from several tensors, or the tensor is cut on another axis.
    """
    origins = {(value.sources.names[link.source], link.axes) for link in value.links}
    if len(origins) != 1:
        names = sorted(set(value.sources.names))
        raise Fault(
            f"The source consists of {', '.join(names[:3])}: the shards are ambiguous.",
            "a name that comes from one tensor",
        )
    ((source, axes),) = origins
    return _groups(source, cuts[source], axes[axis]) if axis < len(axes) else 1


def _groups(name: str, cuts: Shape, axis: int) -> int:
    """Return the shards along an axis, where no other axis is cut."""
    others = [other for other, count in enumerate(cuts) if count > 1 and other != axis]
    if others:
        raise Fault(
            f"The parts of {name} are on axis {axis}, and tensor parallelism cuts {name} on axis {others[0]}.",
            "statements that join and split by `axis=`, which do not depend on shards",
        )
    return cuts[axis] if axis < len(cuts) else 1


class Readers:
    """Finds the later step that reads a name.

    Args:
        steps: all steps, in order.
        cuts: the number of shards of every right tensor on each axis.
        budget: limit of all steps that are followed. A long chain of fused layouts would take quadratic time.
    """

    def __init__(self, steps: Sequence[Step], cuts: Mapping[str, Shape], budget: Budget) -> None:
        self._steps = steps
        self._cuts = cuts
        self._budget = budget
        self._readers: dict[str, list[int]] | None = None

    def groups_written(self, name: str, axis: int, rank: int, after: int) -> int:
        """Return the number of shards of the right tensor that a name becomes, along an axis of the name.

        Args:
            name: the name that a step writes.
            axis: an axis of it.
            rank: its number of axes.
            after: index of the step that writes it.
        Raises:
            Fault: the name is split, or becomes a tensor that is cut on another axis.
        """
        while name not in self._cuts:
            self._budget.spend(1)
            index = self._next(name, after)
            if index is None:
                return 1
            step = self._steps[index]
            if len(step.right) > 1:
                raise Fault(f"{name} is split later: the shards are ambiguous.", "a name that is not split")
            transposed = any(left.text == name and left.transposed for left in step.left)
            axis = rank - 1 - axis if transposed else axis
            if isinstance(step.operation, Move) and step.operation.permute is not None:
                order = step.operation.permute or tuple(reversed(range(rank)))
                axis = order.index(axis) if axis in order else axis
            name, after = step.right[0], index
        return _groups(name, self._cuts[name], axis)

    def _next(self, name: str, after: int) -> int | None:
        if self._readers is None:
            self._readers = {}
            for index, step in enumerate(self._steps):
                for left in step.left:
                    self._readers.setdefault(left.text, []).append(index)
        indices = self._readers.get(name, [])
        following = bisect.bisect_right(indices, after)
        return indices[following] if following < len(indices) else None


@dataclass
class Assignments:
    """The state after all steps.

    Args:
        values: the value of every assigned name; None where a faulty statement would have assigned it.
        assigned: the step that assigned each of these names.
        unread: assigned names that no step has read since.
        readers: the steps that read each left tensor.
        dropped: left tensors without a target, with their step.
        fresh: right tensors that keep their initial values, with their step.
    """

    values: dict[str, Value | None] = field(default_factory=dict)
    assigned: dict[str, Step] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    readers: dict[str, list[Step]] = field(default_factory=dict)
    dropped: dict[str, Step] = field(default_factory=dict)
    fresh: dict[str, Step] = field(default_factory=dict)


class Interpreter:
    """One execution of all steps.

    Args:
        steps: the expanded statements, in order.
        left: the tensors on the left side.
        right: the tensors on the right side; empty where they follow from the statements.
        index: the names of the left side.
        budget: limit of all boxes.
    """

    def __init__(self, steps: Sequence[Step], left: Tensors, right: Tensors, index: NameIndex, budget: Budget) -> None:
        self._steps = steps
        self._left = left
        self._index = index
        self._budget = budget
        self._left_cuts = {name: tensor.cuts for name, tensor in left.items()}
        self._readers = Readers(steps, {name: tensor.cuts for name, tensor in right.items()}, budget)
        self._assignments = Assignments()
        self._operations = Operations()

    def run(self, faults: Faults) -> Assignments:
        """Execute every step.

        Args:
            faults: receives the faults. An unknown name is ignored if a faulty statement mentions it: that statement
                may have been meant to assign it.
        """
        excused = {name for line in faults.lines for name in name_skeletons(line.text)}
        for at, step in enumerate(self._steps):
            operation = step.operation
            if isinstance(operation, Drop):
                self._assignments.dropped[step.left[0].text] = step
                continue
            if isinstance(operation, Fresh):
                self._assignments.fresh[step.right[0]] = step
                continue
            results: Sequence[Value | None] = [None] * len(step.right)
            try:
                known = [self._read(left, position, step) for position, left in enumerate(step.left)]
                values = [value for value in known if value is not None]
                if len(values) == len(known):
                    results = self._results(at, step, operation, values)
            except Fault as fault:
                if not (isinstance(fault, _UnknownName) and skeleton(fault.name) in excused):
                    step.report(fault, faults)
            self._assign(step, results, faults)
        return self._assignments

    def _read(self, left: Name, position: int, step: Step) -> Value | None:
        assignments, name = self._assignments, left.text
        if name in assignments.values:
            assignments.unread.discard(name)
            value = assignments.values[name]
        elif name in self._left:
            assignments.readers.setdefault(name, []).append(step)
            value = value_of(name, self._left[name].shape)
        else:
            items = step.statement.left
            span = items[position].span if len(items) == len(step.left) else step.statement.arrow
            raise _UnknownName(name, self._index.nearest(name), span)
        return value if value is None or not left.transposed else self._operations.permuted(value, ())

    def _assign(self, step: Step, results: Sequence[Value | None], faults: Faults) -> None:
        assignments = self._assignments
        for name, value in zip(step.right, results, strict=True):
            if name in assignments.unread and assignments.values[name] is not None:
                before = assignments.assigned[name].statement.line.title
                step.report(Fault(f"`{name}` was assigned by {before} and no statement has read it since."), faults)
            assignments.values[name] = value
            assignments.assigned[name] = step
            assignments.unread.add(name)
            try:
                self._budget.spend(0 if value is None else len(value.links))
            except Fault as fault:
                step.report(fault, faults)
                faults.raise_any()

    def _results(self, at: int, step: Step, operation: Move | Fused | Join, values: list[Value]) -> list[Value]:
        if isinstance(operation, Move):
            return [self._moved(operation, values[0])]
        if isinstance(operation, Fused):
            return self._fused(at, step, operation, values)
        if len(step.right) == 1:
            return [joined(values, operation.axis, self._operations)]
        self._budget.spend(len(step.right))
        return split(values[0], operation.axis, len(step.right), self._operations)

    def _moved(self, move: Move, value: Value) -> Value:
        if move.permute is not None:
            return self._operations.permuted(value, move.permute)
        if move.read_as is not None:
            stored = value.dtypes(self._left)
            if stored != {move.read_as}:
                raise Fault(
                    f"src_dtype is {move.read_as}, the dtype of the source is {', '.join(sorted(stored))}.",
                    f"src_dtype='{min(stored, default='')}'",
                )
        return value if move.cast is None else self._operations.converted(value, move.cast)

    def _fused(self, at: int, step: Step, layout: Fused, values: list[Value]) -> list[Value]:
        axis, into = layout.axis, len(step.right)
        if layout.kind is FusedOrder.QKV:
            longest = max((length for value in values for length in value.shape), default=0)
            self._budget.spend(3 * min(layout.groups, longest))
            return fused(values, layout, (1, 1), into, self._operations)
        groups = (
            1 if len(values) > 1 else groups_read(values[0], axis, self._left_cuts),
            1 if into > 1 else self._readers.groups_written(step.right[0], axis, len(values[0].shape), at),
        )
        self._budget.spend(3 * sum(groups))
        return fused(values, layout, groups, into, self._operations)


class _UnknownName(Fault):
    """An unknown name that a statement reads."""

    def __init__(self, name: str, near: str, span: Span) -> None:
        self.name = name
        super().__init__(f"`{name}` is not a tensor of the left side, and no earlier statement assigns it.", near, span)
