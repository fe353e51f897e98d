"""Carrying statements out, one after the other, on boxes in place of numbers.

A name stands for what was assigned to it last, or for the left tensor of that name. A right tensor that no statement
assigns is the left tensor of its name. Errors do not spread: what a faulty statement would have assigned is unknown,
and statements that read the unknown are passed over in silence.

Linear in the steps and in the boxes that they make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paddleformers_fc.aoa import fusing
from paddleformers_fc.aoa.expand import Budget, Name, Step
from paddleformers_fc.aoa.faults import Fault, Faults, Span
from paddleformers_fc.aoa.names import NameIndex, mentioned, skeleton
from paddleformers_fc.aoa.operations import (
    Cut,
    Drop,
    Fresh,
    FusedFfn,
    FusedQkv,
    FusedQkvOld,
    Join,
    Move,
)
from paddleformers_fc.aoa.shards import Readers, rounds_read
from paddleformers_fc.aoa.tensors import AoaTensor
from paddleformers_fc.aoa.values import Value, converted, permuted, transposed, value_of


@dataclass
class EvaluationResult:
    """What the statements leave behind.

    Args:
        values: what every assigned name stands for at the end; None where a faulty statement would have assigned it.
        assigned: the step that assigned each of these names.
        unread: assigned names that nothing has read since.
        readers: for every left tensor the steps that read it.
        dropped: left tensors that are wanted nowhere, with their step.
        fresh: right tensors that keep their initial values, with their step.
    """

    values: dict[str, Value | None] = field(default_factory=dict)
    assigned: dict[str, Step] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    readers: dict[str, list[Step]] = field(default_factory=dict)
    dropped: dict[str, Step] = field(default_factory=dict)
    fresh: dict[str, Step] = field(default_factory=dict)


class Evaluation:
    """One run of all steps.

    Args:
        steps: the expanded statements, in order.
        left: the tensors on the left side.
        right: the tensors on the right side; empty where they follow from the statements.
        index: the names of the left side.
        budget: limit of all boxes.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        left: Mapping[str, AoaTensor],
        right: Mapping[str, AoaTensor],
        index: NameIndex,
        budget: Budget,
    ) -> None:
        self._steps = steps
        self._left = left
        self._index = index
        self._budget = budget
        self._left_cuts = {name: tensor.cuts for name, tensor in left.items()}
        self._readers = Readers(steps, {name: tensor.cuts for name, tensor in right.items()}, budget)
        self._outcome = EvaluationResult()

    def run(self, faults: Faults) -> EvaluationResult:
        """Carry out every step.

        Args:
            faults: where to note what is wrong. A name that is not known is passed over where a faulty statement
                mentions it, because that one may have been meant to assign it.
        """
        excused = {name for line in faults.lines for name in mentioned(line.text)}
        for at, step in enumerate(self._steps):
            try:
                values = [self._read(left, at_left, step) for at_left, left in enumerate(step.left)]
                results = self._results(at, step, values)
            except Fault as fault:
                if not (isinstance(fault, _UnknownName) and skeleton(fault.name) in excused):
                    faults.add(step.statement.line, fault, step.statement.arrow)
                results = [None] * len(step.right)
            if not isinstance(step.operation, (Drop, Fresh)):
                self._assign(step, results, faults)
        return self._outcome

    def _read(self, left: Name, position: int, step: Step) -> Value | None:
        outcome, name = self._outcome, left.text
        if isinstance(step.operation, (Drop, Fresh)):
            return None
        if name in outcome.values:
            outcome.unread.discard(name)
            value = outcome.values[name]
        elif name in self._left:
            outcome.readers.setdefault(name, []).append(step)
            value = value_of(name, self._left[name].shape)
        else:
            items = step.statement.left
            span = items[position].span if len(items) == len(step.left) else step.statement.arrow
            raise _UnknownName(name, self._index.nearest(name), span)
        return value if value is None or not left.transposed else transposed(value)

    def _assign(self, step: Step, results: Sequence[Value | None], faults: Faults) -> None:
        outcome = self._outcome
        for name, value in zip(step.right, results, strict=True):
            if name in outcome.unread and outcome.values[name] is not None:
                before = outcome.assigned[name].statement.line.title
                fault = Fault(f"`{name}` was assigned by {before} and would be lost: nothing has read it since.")
                faults.add(step.statement.line, fault, step.statement.arrow)
            outcome.values[name] = value
            outcome.assigned[name] = step
            outcome.unread.add(name)
            if value is not None:
                self._spend(step, value, faults)

    def _spend(self, step: Step, value: Value, faults: Faults) -> None:
        try:
            self._budget.spend(len(value.pieces))
        except Fault as fault:
            faults.add(step.statement.line, fault, step.statement.arrow)
            faults.raise_any()

    def _results(self, at: int, step: Step, known: Sequence[Value | None]) -> Sequence[Value | None]:
        operation = step.operation
        if isinstance(operation, Drop):
            self._outcome.dropped[step.left[0].text] = step
            return []
        if isinstance(operation, Fresh):
            self._outcome.fresh[step.right[0]] = step
            return []
        values = [value for value in known if value is not None]
        if len(values) != len(known):
            return [None] * len(step.right)
        if isinstance(operation, Move):
            return [self._moved(operation, values[0])]
        if isinstance(operation, Join):
            return [fusing.joined(values, operation.axis)]
        if isinstance(operation, Cut):
            self._budget.spend(len(step.right))
            return fusing.split(values[0], operation.axis, len(step.right))
        return self._fused(at, step, operation, values)

    def _moved(self, move: Move, value: Value) -> Value:
        if move.permute is not None:
            return permuted(value, move.permute) if move.permute else transposed(value)
        if move.read_as is not None:
            stored = {piece.cast or self._left[piece.source].dtype for piece in value.pieces}
            if stored != {move.read_as}:
                raise Fault(
                    f"src_dtype is {move.read_as}, and what is read is {', '.join(sorted(stored))}.",
                    f"src_dtype='{min(stored, default='')}'",
                )
        return value if move.cast is None else converted(value, move.cast)

    def _fused(
        self, at: int, step: Step, operation: FusedFfn | FusedQkv | FusedQkvOld, values: list[Value]
    ) -> list[Value]:
        axis, into = operation.axis, len(step.right)
        if isinstance(operation, FusedQkv):
            longest = max((length for value in values for length in value.shape), default=0)
            self._budget.spend(3 * min(operation.groups, longest))
            return fusing.fused_qkv(values, axis, operation.heads, operation.groups, into)
        rounds = (
            1 if len(values) > 1 else rounds_read(values[0], axis, self._left_cuts),
            1 if into > 1 else self._readers.rounds_written(step.right[0], axis, len(values[0].shape), at),
        )
        self._budget.spend(3 * sum(rounds))
        if isinstance(operation, FusedFfn):
            return fusing.fused_ffn(values, axis, rounds, into)
        return fusing.fused_qkv_old(values, axis, operation.heads, operation.groups, rounds, into)


class _UnknownName(Fault):
    """A name that is read and that nothing assigns."""

    def __init__(self, name: str, near: str, span: Span) -> None:
        self.name = name
        super().__init__(
            f"`{name}` is no tensor of the left side, and no statement before this one assigns it.", near, span
        )
