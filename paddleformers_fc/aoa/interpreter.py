"""Execute expanded statements one after the other, on boxes in place of numbers.

A name refers to its last assignment, or to the left tensor of that name. A right tensor without an assignment is the
left tensor of its name. Faults do not spread: the target of a faulty statement is unknown, and statements that read it
are skipped. Linear in the steps and in the boxes that they make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paddleformers_fc.aoa import fusing
from paddleformers_fc.aoa.expand import Budget, Name, Step
from paddleformers_fc.aoa.faults import Fault, Faults, Span
from paddleformers_fc.aoa.names import NameIndex, name_skeletons, skeleton
from paddleformers_fc.aoa.operations import Drop, Fresh, Fused, FusedOrder, Join, Move
from paddleformers_fc.aoa.shards import Readers, groups_read
from paddleformers_fc.aoa.tensors import Tensors
from paddleformers_fc.aoa.values import Value, converted, permuted, transposed, value_of


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
        return value if value is None or not left.transposed else transposed(value)

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
                self._budget.spend(0 if value is None else len(value.pieces))
            except Fault as fault:
                step.report(fault, faults)
                faults.raise_any()

    def _results(self, at: int, step: Step, operation: Move | Fused | Join, values: list[Value]) -> list[Value]:
        if isinstance(operation, Move):
            return [self._moved(operation, values[0])]
        if isinstance(operation, Fused):
            return self._fused(at, step, operation, values)
        if len(step.right) == 1:
            return [fusing.joined(values, operation.axis)]
        self._budget.spend(len(step.right))
        return fusing.split(values[0], operation.axis, len(step.right))

    def _moved(self, move: Move, value: Value) -> Value:
        if move.permute is not None:
            return permuted(value, move.permute) if move.permute else transposed(value)
        if move.read_as is not None:
            stored = {piece.cast or self._left[piece.source].dtype for piece in value.pieces}
            if stored != {move.read_as}:
                raise Fault(
                    f"src_dtype is {move.read_as}, the dtype of the source is {', '.join(sorted(stored))}.",
                    f"src_dtype='{min(stored, default='')}'",
                )
        return value if move.cast is None else converted(value, move.cast)

    def _fused(self, at: int, step: Step, layout: Fused, values: list[Value]) -> list[Value]:
        axis, into = layout.axis, len(step.right)
        if layout.kind is FusedOrder.QKV:
            longest = max((length for value in values for length in value.shape), default=0)
            self._budget.spend(3 * min(layout.groups, longest))
            return fusing.fused(values, layout, (1, 1), into)
        groups = (
            1 if len(values) > 1 else groups_read(values[0], axis, self._left_cuts),
            1 if into > 1 else self._readers.groups_written(step.right[0], axis, len(values[0].shape), at),
        )
        self._budget.spend(3 * sum(groups))
        return fusing.fused(values, layout, groups, into)


class _UnknownName(Fault):
    """An unknown name that a statement reads."""

    def __init__(self, name: str, near: str, span: Span) -> None:
        self.name = name
        super().__init__(f"`{name}` is not a tensor of the left side, and no earlier statement assigns it.", near, span)
