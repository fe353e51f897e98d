"""Evaluate a program between two sides of tensors: the mapping of its statements.

All statements are evaluated before a fault is raised, so that one report lists the faults of all of them. The mapping
still has to be proved (:func:`paddleformers_fc.mapping.prove`). Faults that a proof would find in boxes (a shape or
dtype that does not fit, a source that two statements read) are reported here with the statement. Time is linear in the
text, the tensors and the expanded statements, whose number is bounded.

The mapping of all assignments, and the faults that are visible only after the last statement.

The boxes of every right tensor are collected. These faults are reported with their statement: a shape or dtype that
does not fit, an assigned name that no tensor and no statement uses, and a source that is read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from paddleformers_fc.aoa.expand import Budget, Expander, Step
from paddleformers_fc.aoa.faults import Fault, Faults, Span
from paddleformers_fc.aoa.interpreter import Assignments, Interpreter
from paddleformers_fc.aoa.names import NameIndex
from paddleformers_fc.aoa.syntax import Program, read_config, read_statements
from paddleformers_fc.aoa.values import Tensors, Value, value_of
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.correspondences import TensorMapping, TensorSources, TensorSpec, spelled
from paddleformers_fc.mapping.rules import Tie
from paddleformers_fc.mapping.templates import Template


@dataclass(frozen=True)
class _Output:
    """A right tensor, its value, and the step that assigned it; None for equal names."""

    name: str
    value: Value
    step: Step | None

    def report(self, fault: Fault, faults: Faults) -> None:
        if self.step is not None:
            self.step.report(fault, faults)
        else:
            faults.add_plain(f"equal names: {fault.cause}" + (f" Accepted: {fault.accepted}" if fault.accepted else ""))


def mapping_of(
    assignments: Assignments, left: Tensors, right: Tensors | None, aliases: Mapping[str, str], faults: Faults
) -> TensorMapping:
    """Return the mapping of all assignments.

    Args:
        assignments: the assignments.
        left: the tensors on the left side.
        right: the tensors on the right side, or None if they follow from the statements.
        aliases: tied right names and their owners.
        faults: receives the faults.
    """
    outputs = list(_derived(assignments, left) if right is None else _wanted(assignments, left, right))
    if right is not None:
        _refuse_unwanted(assignments, right, faults)
        _refuse_unfit(outputs, left, right, faults)
    _refuse_contradictions(assignments, left, right, faults)
    kept = _without_aliases(outputs, aliases, faults)
    _refuse_reread(kept, left, faults)
    targets = (
        {one.name: TensorSpec(one.value.shape, min(one.value.dtypes(left), default="float32")) for one in kept}
        if right is None
        else {name: tensor.spec for name, tensor in right.items() if name not in aliases}
    )
    return TensorMapping(
        sources={name: tensor.spec for name, tensor in left.items()},
        targets=targets,
        made={one.name: _without_own_casts(one.value.sources, left) for one in kept if one.value.links},
        fresh=frozenset(name for name in assignments.fresh if name in targets),
        dropped=frozenset(name for name in assignments.dropped if name in left),
    )


def _wanted(assignments: Assignments, left: Tensors, right: Tensors) -> Iterator[_Output]:
    """Yield right tensors by assignment, and by equal names."""
    for name in right:
        if name in assignments.values:
            value = assignments.values[name]
            if value is not None:
                yield _Output(name, value, assignments.assigned[name])
        elif name in left and name not in assignments.fresh and name not in assignments.dropped:
            yield _Output(name, value_of(name, left[name].shape), None)


def _derived(assignments: Assignments, left: Tensors) -> Iterator[_Output]:
    """Yield left tensors and assigned names that no statement reads, if the right side is unknown."""
    for name, tensor in left.items():
        if name not in assignments.readers and name not in assignments.dropped and name not in assignments.unread:
            yield _Output(name, value_of(name, tensor.shape), None)
    for name, step in assignments.assigned.items():
        value = assignments.values[name]
        if name in assignments.unread and value is not None:
            yield _Output(name, value, step)


def _without_own_casts(made: TensorSources, left: Tensors) -> TensorSources:
    """Return sources without casts to the dtype that a source has."""
    casts = [None if one.cast == left[made.names[one.source]].dtype else one.cast for one in made.template.links]
    if all(one.cast == cast for one, cast in zip(made.template.links, casts, strict=True)):
        return made
    links = (replace(one, cast=cast) for one, cast in zip(made.template.links, casts, strict=True))
    return TensorSources(Template(tuple(links)), made.names)


def _refuse_unwanted(assignments: Assignments, right: Tensors, faults: Faults) -> None:
    index: NameIndex | None = None
    for name in sorted(assignments.unread - right.keys()):
        if assignments.values[name] is None:
            continue
        index = index or NameIndex(right)
        step = assignments.assigned[name]
        accepted = index.nearest(name) or "`a -> _` for a tensor that is not wanted"
        cause = f"`{name}` is not a tensor of the right side, and no later statement reads it."
        step.report(Fault(cause, accepted, step.statement.right[0].span), faults)


def _refuse_unfit(outputs: list[_Output], left: Tensors, right: Tensors, faults: Faults) -> None:
    for output in outputs:
        wanted, shape = right[output.name], output.value.shape
        dtypes = sorted(output.value.dtypes(left) - {wanted.dtype})
        if shape != wanted.shape:
            cause = f"`{output.name}` has shape {list(wanted.shape)}, its value has shape {list(shape)}."
            output.report(Fault(cause), faults)
        elif dtypes:
            cause = f"`{output.name}` is {wanted.dtype}, its value is {dtypes[0]}."
            accepted = f"a statement with src_dtype='{dtypes[0]}', dst_dtype='{wanted.dtype}'"
            output.report(Fault(cause, accepted), faults)


def _refuse_contradictions(assignments: Assignments, left: Tensors, right: Tensors | None, faults: Faults) -> None:
    """Reject ``_`` next to an unknown name, or a name that another statement uses."""
    for name, step in assignments.dropped.items():
        if name not in left:
            step.report(Fault(f"`{name}` is not a tensor of the left side."), faults)
        for reader in assignments.readers.get(name, [])[:1]:
            step.report(Fault(f"`{name}` is removed here and read by {reader.statement.line.title}."), faults)
    for name, step in assignments.fresh.items():
        if right is None or name not in right:
            step.report(Fault(f"`{name}` is not a tensor of the right side."), faults)
        if name in assignments.values:
            other = assignments.assigned[name].statement.line.title
            step.report(Fault(f"`{name}` keeps its initial values here and is assigned by {other}."), faults)


def _without_aliases(outputs: list[_Output], aliases: Mapping[str, str], faults: Faults) -> list[_Output]:
    """Return the outputs without tied names, each of which must be equal to its owner."""
    by_name = {output.name: output for output in outputs}
    for alias, owner in aliases.items():
        if alias not in by_name or by_name[alias].step is None or owner not in by_name:
            continue
        if set(spelled("", by_name[alias].value.sources)) != set(spelled("", by_name[owner].value.sources)):
            cause = f"`{alias}` is tied to `{owner}`, and its value differs from the owner's."
            by_name[alias].report(Fault(cause, "the same value for both"), faults)
    return [output for output in outputs if output.name not in aliases]


def _refuse_reread(outputs: list[_Output], left: Tensors, faults: Faults) -> None:
    """Refuse left tensors with more elements read than they have: one source of two targets."""
    volumes: dict[str, int] = {}
    readers: dict[str, dict[str, _Output]] = {}
    for output in outputs:
        for link in output.value.links:
            name = output.value.sources.names[link.source]
            volumes[name] = volumes.get(name, 0) + link.source_box.volume
            readers.setdefault(name, {})[output.name] = output
    for name, volume in volumes.items():
        if volume <= prod(left[name].shape):
            continue
        found = list(readers[name].values())
        by = [f"`{one.name}` ({one.step.statement.line.title if one.step else 'equal names'})" for one in found[:4]]
        accepted = "one target per source; for tied weights the owner alone, and `_ -> alias`"
        last = next((one for one in reversed(found) if one.step is not None), found[-1])
        fault = Fault(f"`{name}` is read more than once: it becomes {', '.join(by)}.", accepted)
        last.report(fault, faults)


_SPARE = 200_000
_PER_TENSOR = 64


def evaluate(program: Program, stored: Tensors, wanted: Tensors | None, ties: Iterable[Tie] = ()) -> TensorMapping:
    """Return the mapping of a program, from the stored tensors to the wanted ones.

    A program for the opposite direction is evaluated in its own direction, and the mapping is reversed.

    Args:
        program: the parsed statements.
        stored: every tensor that may be read.
        wanted: every wanted tensor; None if they follow from the statements.
        ties: right tensors that are another name of an owner. A statement that copies the owner's source to the alias
            is equal to the tie, and the alias is not in the mapping.
    Returns:
        the mapping, not proved.
    Raises:
        MappingError: the faults of all statements, or the left side of a reversed program is not known.
    """
    if not program.reverse:
        return _evaluated(program, stored, wanted, ties)
    if wanted is None:
        raise MappingError(
            "aoa_config_reverse requires the tensors of both sides.",
            where="aoa_config",
            evidence=["aoa_config_reverse is true, and the tensors on the left side are not given"],
            next_step="Give the names, shapes and dtypes of the tensors on the left of the arrows.",
        )
    return _evaluated(program, wanted, stored, ties).reversed()


def parse(statements: Sequence[str], left: Tensors, right: Tensors | None, ties: Iterable[Tie] = ()) -> TensorMapping:
    """Read and evaluate statements. Arguments, result and errors as of :func:`evaluate`."""
    return evaluate(read_statements(statements), left, right, ties)


def parse_config(
    config: Mapping[str, object], stored: Tensors, wanted: Tensors | None, ties: Iterable[Tie] = ()
) -> TensorMapping:
    """Read and evaluate an ``aoa_config``. Arguments, result and errors as of :func:`evaluate`."""
    return evaluate(read_config(config), stored, wanted, ties)


def assigned_names(program: Program, stored: Tensors, wanted: Tensors) -> frozenset[str]:
    """Return the wanted tensors that a program assigns. The others keep the stored tensor of their name.

    Raises:
        MappingError: the faults of single statements.
    """
    left, right = (wanted, stored) if program.reverse else (stored, wanted)
    faults = Faults()
    steps = _steps(program, Expander(NameIndex(left), NameIndex(right), _budget(left, right)), faults)
    faults.raise_any()
    return frozenset(
        name for step in steps for name in ([one.text for one in step.left] if program.reverse else step.right)
    )


def _evaluated(program: Program, left: Tensors, right: Tensors | None, ties: Iterable[Tie]) -> TensorMapping:
    faults, index, budget = Faults(), NameIndex(left), _budget(left, right)
    steps = _steps(program, Expander(index, None if right is None else NameIndex(right), budget), faults)
    assignments = Interpreter(steps, left, right or {}, index, budget).run(faults)
    mapping = mapping_of(assignments, left, right, {tie.alias: tie.owner for tie in ties}, faults)
    faults.raise_any()
    return mapping


def _budget(left: Tensors, right: Tensors | None) -> Budget:
    return Budget(_SPARE + _PER_TENSOR * (len(left) + len(right or ())))


def _steps(program: Program, expander: Expander, faults: Faults) -> list[Step]:
    """Return the expanded statements, and add the faults of those that are invalid."""
    for line, fault in program.invalid:
        faults.add(line, fault, Span(0, len(line.text)))
    steps: list[Step] = []
    for statement in program.statements:
        try:
            steps += expander.steps(statement)
        except Fault as fault:
            faults.add(statement.line, fault, statement.arrow)
    return steps
