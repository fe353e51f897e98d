"""Evaluate AOA statements between the tensors of two sides, and return their mapping.

Expanded statements run in order. Each becomes a rule, applied to the values that it reads. A name refers to its last
assignment, or else to the left tensor of that name. Right tensors without an assignment load from the same name.

One error reports the faults of all statements. The target of a faulty statement is unknown, and statements that read it
are skipped. The caller still has to prove the mapping (:func:`paddleformers_fc.mapping.prove`). Wrong shapes and
dtypes, unused names and sources that are read twice are already reported here, because here the statement is known.
Time is linear in the text, the tensors, and the boxes of expanded statements, whose number is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from paddleformers_fc.aoa import rules
from paddleformers_fc.aoa.expand import Budget, Expander, Name, NameIndex, Step, name_skeletons, skeleton
from paddleformers_fc.aoa.faults import Fault, Faults, Span
from paddleformers_fc.aoa.rules import Composition, Shards, Tensors, Value, value_of
from paddleformers_fc.aoa.syntax import NOTHING, QKV, Fused, Join, Move, OneSided, Program, read_statements
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.correspondences import TensorMapping, TensorSpec, spelled
from paddleformers_fc.mapping.rules import Tie

_SPARE = 200_000
_PER_TENSOR = 64


def evaluate(program: Program, stored: Tensors, targets: Tensors | None, ties: Iterable[Tie] = ()) -> TensorMapping:
    """Return the mapping of a program, from stored tensors to target tensors.

    A program for the opposite direction is evaluated in its own direction, and the mapping is reversed.

    Args:
        program: the parsed statements.
        stored: every stored tensor.
        targets: every target tensor; None if they follow from the statements.
        ties: right tensors that are another name of an owner. A statement may copy the owner's source to the alias; the
            mapping omits the alias.
    Returns:
        the mapping, not proved.
    Raises:
        MappingError: with the faults of all statements; or the left side of a reversed program is unknown.
    """
    if not program.reverse:
        return _evaluated(program, stored, targets, ties)
    if targets is None:
        raise MappingError(
            "aoa_config_reverse requires the tensors of both sides.",
            where="aoa_config",
            evidence=["aoa_config_reverse is true, and the tensors on the left side are not given"],
            next_step="Give the names, shapes and dtypes of the tensors on the left of the arrows.",
        )
    return _evaluated(program, targets, stored, ties).reversed()


def parse(statements: Sequence[str], left: Tensors, right: Tensors | None, ties: Iterable[Tie] = ()) -> TensorMapping:
    """Parse and evaluate statements, as :func:`evaluate` does."""
    return evaluate(read_statements(statements), left, right, ties)


def assigned_names(program: Program, stored: Tensors, targets: Tensors) -> frozenset[str]:
    """Return the target tensors that a program assigns. Other targets load from the same name.

    Raises:
        MappingError: with the faults of single statements.
    """
    left, right = (targets, stored) if program.reverse else (stored, targets)
    faults = Faults()
    steps = _steps(program, Expander(NameIndex(left), NameIndex(right), _budget(left, right)), faults)
    faults.raise_any()
    return frozenset(
        name for step in steps for name in ([one.text for one in step.left] if program.reverse else step.right)
    )


def _evaluated(program: Program, left: Tensors, right: Tensors | None, ties: Iterable[Tie]) -> TensorMapping:
    faults, index, budget = Faults(), NameIndex(left), _budget(left, right)
    steps = _steps(program, Expander(index, None if right is None else NameIndex(right), budget), faults)
    evaluation = _Evaluation(left, right, index, budget, faults)
    evaluation.run(steps)
    mapping = evaluation.mapping({tie.alias: tie.owner for tie in ties})
    faults.raise_any()
    return mapping


def _budget(left: Tensors, right: Tensors | None) -> Budget:
    return Budget(_SPARE + _PER_TENSOR * (len(left) + len(right or ())))


def _steps(program: Program, expander: Expander, faults: Faults) -> list[Step]:
    """Expand all statements, and add the faults of invalid ones."""
    for line, fault in program.invalid:
        faults.add(line, fault, Span(0, len(line.text)))
    steps: list[Step] = []
    for statement in program.statements:
        try:
            steps += expander.steps(statement)
        except Fault as fault:
            faults.add(statement.line, fault, statement.arrow)
    return steps


_Output = tuple[Value, Step | None]
"""The value of a right tensor, and the step that assigned it; None if it loads from the same name."""


class _UnknownName(Fault):
    """A statement reads an unknown name."""

    def __init__(self, name: str, near: str, span: Span) -> None:
        self.name = name
        super().__init__(f"`{name}` is not a tensor of the left side, and no earlier statement assigns it.", near, span)


class _Evaluation:
    """Evaluates all steps.

    Args:
        left: the tensors on the left side.
        right: the tensors on the right side; None if they follow from the statements.
        index: the names of the left side.
        budget: limits the number of boxes.
        faults: receives the faults.
    """

    def __init__(self, left: Tensors, right: Tensors | None, index: NameIndex, budget: Budget, faults: Faults) -> None:
        self._left, self._right = left, right
        self._index, self._budget, self._faults = index, budget, faults
        self._rules = Composition()
        # The value of every assigned name; None if a faulty statement assigns it.
        self._values: dict[str, Value | None] = {}
        self._assigned: dict[str, Step] = {}
        self._unread: set[str] = set()
        self._readers: dict[str, Step] = {}
        self._dropped: dict[str, Step] = {}
        self._fresh: dict[str, Step] = {}

    def run(self, steps: Sequence[Step]) -> None:
        """Execute every step.

        Unknown names that a faulty statement mentions are not reported: it may have been meant to assign them.
        """
        excused = {name for line in self._faults.lines for name in name_skeletons(line.text)}
        for step, shards in zip(steps, rules.shards_written(steps, self._right or {}), strict=True):
            if isinstance(step.operation, OneSided):
                if step.right[0] == NOTHING:
                    self._dropped[step.left[0].text] = step
                else:
                    self._fresh[step.right[0]] = step
                continue
            results: Sequence[Value | None] = [None] * len(step.right)
            try:
                known = [self._read(left, position, step) for position, left in enumerate(step.left)]
                values = [value for value in known if value is not None]
                if len(values) == len(known):
                    results = self._results(step, values, shards)
            except Fault as fault:
                if not (isinstance(fault, _UnknownName) and skeleton(fault.name) in excused):
                    self._report(fault, step)
            for name, value in zip(step.right, results, strict=True):
                self._assign(name, value, step)

    def _read(self, left: Name, position: int, step: Step) -> Value | None:
        name = left.text
        if name in self._values:
            self._unread.discard(name)
            value = self._values[name]
        elif name in self._left:
            self._readers.setdefault(name, step)
            value = value_of(name, self._left[name].shape)
        else:
            items = step.statement.left
            span = items[position].span if len(items) == len(step.left) else step.statement.arrow
            raise _UnknownName(name, self._index.nearest(name), span)
        return value if value is None or not left.transposed else self._permuted(value, ())

    def _assign(self, name: str, value: Value | None, step: Step) -> None:
        if name in self._unread and self._values[name] is not None:
            before = self._assigned[name].statement.line.title
            self._report(Fault(f"`{name}` was assigned by {before} and no statement has read it since."), step)
        self._values[name], self._assigned[name] = value, step
        self._unread.add(name)
        try:
            self._budget.spend(0 if value is None else len(value.links))
        except Fault as fault:
            self._report(fault, step)
            self._faults.raise_any()

    def _results(self, step: Step, values: list[Value], shards: Shards) -> list[Value]:
        operation, shapes, into = step.operation, [value.shape for value in values], len(step.right)
        if isinstance(operation, Join):
            self._budget.spend(into if into > 1 else 0)
            return self._rules.applied(rules.joining(shapes, into, operation), values)
        if isinstance(operation, Fused):
            groups = self._groups(operation, values, into, shards)
            return self._rules.applied(rules.fusing(shapes, into, operation, groups), values)
        assert isinstance(operation, Move)
        return [self._moved(operation, values[0], step.right[0])]

    def _groups(self, fused: Fused, values: list[Value], into: int, shards: Shards) -> tuple[int, int]:
        """Return the number of groups of a single source, and of a single result."""
        if fused.kind == QKV:
            heads = fused.counts[1]
            self._budget.spend(3 * min(heads, max((length for one in values for length in one.shape), default=0)))
            return (heads, 1) if into > 1 else (1, heads)
        read = 1 if len(values) > 1 else rules.groups_read(values[0], fused.axis, self._left)
        written = 1 if into > 1 else rules.groups_of(shards, fused.axis)
        self._budget.spend(3 * (read + written))
        return read, written

    def _moved(self, move: Move, value: Value, name: str) -> Value:
        if move.permute is not None:
            return self._permuted(value, move.permute)
        if move.reshape:
            # An intermediate name has the shape in the statement.
            shape = self._right[name].shape if self._right and name in self._right else move.reshape
            self._budget.spend(min(prod(move.reshape[:1] + move.reshape[2:-1]), prod(value.shape)))
            return self._rules.reshaped(value, move.reshape, shape)
        if move.read_as is not None:
            stored = value.dtypes(self._left)
            if stored != {move.read_as}:
                cause = f"src_dtype is {move.read_as}, the dtype of the source is {', '.join(sorted(stored))}."
                raise Fault(cause, f"src_dtype='{min(stored, default='')}'")
        return value if move.cast is None else self._rules.converted(value, move.cast)

    def _permuted(self, value: Value, axes: Shape) -> Value:
        rule = rules.permuting(value.shape, axes)
        return value if rule is None else self._rules.applied(rule, [value])[0]

    def _report(self, fault: Fault, step: Step | None) -> None:
        if step is None:
            self._faults.add_plain(fault)
        else:
            self._faults.add(step.statement.line, fault, step.statement.arrow)

    def mapping(self, aliases: Mapping[str, str]) -> TensorMapping:
        """Return the mapping of all assignments, and report faults that only show after the last statement.

        Args:
            aliases: tied right names and their owners.
        """
        left, outputs = self._left, dict(self._derived() if self._right is None else self._assigned_to(self._right))
        if self._right is not None:
            self._check_targets(outputs, self._right)
        self._check_one_sided()
        self._check_aliases(outputs, aliases)
        kept = {name: output for name, output in outputs.items() if name not in aliases}
        self._check_reread(kept)
        values = {name: value for name, (value, _) in kept.items()}
        targets = (
            {name: TensorSpec(one.shape, min(one.dtypes(left), default="float32")) for name, one in values.items()}
            if self._right is None
            else {name: tensor.spec for name, tensor in self._right.items() if name not in aliases}
        )
        return TensorMapping(
            sources={name: tensor.spec for name, tensor in left.items()},
            targets=targets,
            made={name: self._rules.without_own_casts(one, left) for name, one in values.items() if one.links},
            fresh=frozenset(self._fresh.keys() & targets),
            dropped=frozenset(self._dropped.keys() & left),
        )

    def _assigned_to(self, right: Tensors) -> Iterator[tuple[str, _Output]]:
        """Yield right tensors with an assignment, and those that load from the same name."""
        for name in right:
            if name in self._values:
                value = self._values[name]
                if value is not None:
                    yield name, (value, self._assigned[name])
            elif name in self._left and name not in self._fresh and name not in self._dropped:
                yield name, (value_of(name, self._left[name].shape), None)

    def _derived(self) -> Iterator[tuple[str, _Output]]:
        """Yield the right side if it is not given: left tensors and assigned names that no statement reads."""
        for name, tensor in self._left.items():
            if name not in self._readers and name not in self._dropped and name not in self._unread:
                yield name, (value_of(name, tensor.shape), None)
        for name, step in self._assigned.items():
            value = self._values[name]
            if name in self._unread and value is not None:
                yield name, (value, step)

    def _check_targets(self, outputs: Mapping[str, _Output], right: Tensors) -> None:
        """Report assigned names that nothing uses, and right tensors whose value has a different shape or dtype."""
        unused = [name for name in sorted(self._unread - right.keys()) if self._values[name] is not None]
        index = NameIndex(right if unused else ())
        for name in unused:
            step, accepted = self._assigned[name], index.nearest(name) or "`a -> _` to drop a tensor"
            cause = f"`{name}` is not a tensor of the right side, and no later statement reads it."
            self._report(Fault(cause, accepted, step.statement.right[0].span), step)
        for name, (value, step_of_value) in outputs.items():
            shape, dtype = right[name].shape, right[name].dtype
            dtypes = sorted(value.dtypes(self._left) - {dtype})
            if value.shape != shape:
                cause = f"`{name}` has shape {list(shape)}, its value has shape {list(value.shape)}."
                self._report(Fault(cause), step_of_value)
            elif dtypes:
                accepted = f"a statement with src_dtype='{dtypes[0]}', dst_dtype='{dtype}'"
                self._report(Fault(f"`{name}` is {dtype}, its value is {dtypes[0]}.", accepted), step_of_value)

    def _check_one_sided(self) -> None:
        """Report statements with ``_`` whose name is unknown or used by another statement."""
        for name, step in self._dropped.items():
            if name not in self._left:
                self._report(Fault(f"`{name}` is not a tensor of the left side."), step)
            if name in self._readers:
                reader = self._readers[name].statement.line.title
                self._report(Fault(f"`{name}` is removed here and read by {reader}."), step)
        for name, step in self._fresh.items():
            if name not in (self._right or ()):
                self._report(Fault(f"`{name}` is not a tensor of the right side."), step)
            if name in self._values:
                other = self._assigned[name].statement.line.title
                self._report(Fault(f"`{name}` keeps its initial values here and is assigned by {other}."), step)

    def _check_aliases(self, outputs: Mapping[str, _Output], aliases: Mapping[str, str]) -> None:
        """Report aliases that are assigned another value than their owner."""
        for alias, owner in aliases.items():
            (value, step), owners = outputs.get(alias, (None, None)), outputs.get(owner)
            if value is None or step is None or owners is None:
                continue
            if set(spelled("", value.sources)) != set(spelled("", owners[0].sources)):
                cause = f"`{alias}` is tied to `{owner}`, and its value differs from the owner's."
                self._report(Fault(cause, "the same value for both"), step)

    def _check_reread(self, outputs: Mapping[str, _Output]) -> None:
        """Report left tensors that several targets read: more elements are read than the tensor has."""
        volumes: dict[str, int] = {}
        readers: dict[str, dict[str, Step | None]] = {}
        for target, (value, step) in outputs.items():
            for link in value.links:
                name = value.sources.names[link.source]
                volumes[name] = volumes.get(name, 0) + link.source_box.volume
                readers.setdefault(name, {})[target] = step
        accepted = "one target per source; for tied weights only the owner, and `_ -> alias`"
        for name, volume in volumes.items():
            if volume > prod(self._left[name].shape):
                found = readers[name]
                by = [
                    f"`{one}` ({step.statement.line.title if step else 'equal names'})" for one, step in found.items()
                ]
                cause = f"`{name}` is read more than once: it becomes {', '.join(by[:4])}."
                last = next((step for step in reversed(found.values()) if step is not None), None)
                self._report(Fault(cause, accepted), last)
