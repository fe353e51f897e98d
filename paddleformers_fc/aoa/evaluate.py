"""Evaluate a program between two sides of tensors: the mapping of its statements.

All statements are evaluated before a fault is raised, so that one report lists the faults of all of them. The mapping
still has to be proved (:func:`paddleformers_fc.mapping.prove`). Faults that a proof would find in boxes (a shape or
dtype that does not fit, a source that two statements read) are reported here with the statement. Time is linear in the
text, the tensors and the expanded statements, whose number is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paddleformers_fc.aoa.expand import Budget, Expander, Step
from paddleformers_fc.aoa.faults import Fault, Faults, Span
from paddleformers_fc.aoa.interpreter import Interpreter
from paddleformers_fc.aoa.names import NameIndex
from paddleformers_fc.aoa.outcome import mapping_of
from paddleformers_fc.aoa.parsing import Program, read_config, read_statements
from paddleformers_fc.aoa.tensors import Tensors
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.correspondences import TensorMapping
from paddleformers_fc.mapping.rules import Tie

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
