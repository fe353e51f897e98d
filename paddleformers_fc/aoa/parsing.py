"""AOA text and two sides of tensors, to the mapping that the text means.

All statements are read before anything is refused, so that one report names the faults of all of them. The mapping is
a claim like any other: :func:`paddleformers_fc.mapping.prove` decides whether it is total and single-writer. What a
proof could only say of boxes (a shape or dtype that does not fit, a source that two statements read) is said here, with
the statement. Time is linear in the text, in the tensors and in what the statements stand for, which is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping as MappingABC, Sequence

from paddleformers_fc.aoa.evaluate import Evaluation
from paddleformers_fc.aoa.expand import Budget, Expander, Step
from paddleformers_fc.aoa.faults import Fault, Faults, SourceLine, Span
from paddleformers_fc.aoa.names import NameIndex
from paddleformers_fc.aoa.outcome import mapping_of
from paddleformers_fc.aoa.syntax import Statement, parse_line
from paddleformers_fc.aoa.tensors import AoaTensor
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.correspondences import Mapping
from paddleformers_fc.mapping.rules import Tie

Tensors = MappingABC[str, AoaTensor]

_CONFIG = {"aoa_statements": list, "aoa_config_reverse": bool, "enable_traceback": bool}
_SPARE = 200_000
_PER_TENSOR = 64


def parse(statements: Sequence[str], left: Tensors, right: Tensors | None, ties: Iterable[Tie] = ()) -> Mapping:
    """Return the mapping that AOA statements mean, from the left side of their arrows to the right side.

    The reverse is ``parse(...).reversed()``; no statement is ever read backwards.

    Args:
        statements: the text, one statement per entry.
        left: every tensor that may be read.
        right: every tensor that is wanted, or None where they are whatever the statements make.
        ties: right tensors that are another name of an owner; a statement that copies the owner's source to the alias
            says no more than the tie, and the alias is not in the mapping.
    Returns:
        the mapping, not proved.
    Raises:
        MappingError: with the faults of all statements.
    """
    faults = Faults()
    index = NameIndex(left)
    budget = Budget(_SPARE + _PER_TENSOR * (len(left) + len(right or ())))
    written = _read_lines(statements, faults)
    steps = _expand(written, Expander(index, None if right is None else NameIndex(right), budget), faults)
    outcome = Evaluation(steps, left, right or {}, index, budget).run(faults)
    mapping = mapping_of(outcome, left, right, {tie.alias: tie.owner for tie in ties}, faults)
    faults.raise_any()
    return mapping


def parse_config(
    config: MappingABC[str, object], stored: Tensors, wanted: Tensors | None, ties: Iterable[Tie] = ()
) -> Mapping:
    """Return the mapping that an ``aoa_config`` means, from what is stored to what is wanted.

    Args:
        config: ``aoa_statements``, and ``aoa_config_reverse`` where they are written for the opposite direction.
        stored: every stored tensor.
        wanted: every wanted tensor; may be None only where the configuration is not reversed.
        ties: tied names of the arrows' right side.
    Raises:
        MappingError: for a key that is not known, a value of another type, and for the faults of all statements.
    """
    statements = statements_of(config)
    if not config.get("aoa_config_reverse", False):
        return parse(statements, stored, wanted, ties)
    if wanted is None:
        raise MappingError(
            "Statements are reversed only where both sides are known.",
            where="aoa_config",
            evidence=["aoa_config_reverse is true, and the tensors on the left side are not given"],
            next_step="Give the names, shapes and dtypes of the tensors on the left of the arrows.",
        )
    return parse(statements, wanted, stored, ties).reversed()


def statements_of(config: object) -> list[str]:
    """Return the text of an ``aoa_config``; what it means can be said only beside the tensors.

    Args:
        config: the value in a configuration, of any type.
    Raises:
        MappingError: it is no mapping, has a key that is not known, or a value of another type.
    """
    if not isinstance(config, MappingABC):
        raise MappingError(
            "aoa_config is no mapping of keys to values.",
            where="aoa_config",
            evidence=[f"it is {type(config).__name__}"],
            next_step=f"The keys are {', '.join(_CONFIG)}.",
        )
    for key, value in config.items():
        if key not in _CONFIG or not isinstance(value, _CONFIG[key]):
            wanted_type = _CONFIG[key].__name__ if key in _CONFIG else "no key of it"
            raise MappingError(
                f"aoa_config has an entry {key!r} that cannot be used.",
                where="aoa_config",
                evidence=[f"{key} is {type(value).__name__}, wanted {wanted_type}"],
                next_step=f"The keys are {', '.join(_CONFIG)}.",
            )
    return [_statement(entry) for entry in config.get("aoa_statements", [])]


def _statement(entry: object) -> str:
    # A list in a list in a list, as YAML's references make it out of little text, would be endless as text.
    if not isinstance(entry, str):
        raise MappingError(
            "aoa_statements holds something that is no text.",
            where="aoa_config",
            evidence=[f"an entry is {type(entry).__name__}"],
            next_step="Write every statement as a text of its own, in quotes.",
        )
    return entry


def _read_lines(statements: Sequence[str], faults: Faults) -> list[Statement]:
    found: list[Statement] = []
    for number, text in enumerate(statements, start=1):
        line = SourceLine(number, text.strip("\r\n"))
        try:
            statement = parse_line(line)
        except Fault as fault:
            faults.add(line, fault, Span(0, len(line.text)))
            continue
        if statement is not None:
            found.append(statement)
    return found


def _expand(statements: Sequence[Statement], expander: Expander, faults: Faults) -> list[Step]:
    steps: list[Step] = []
    for statement in statements:
        try:
            steps.extend(expander.steps(statement))
        except Fault as fault:
            faults.add(statement.line, fault, statement.arrow)
    return steps
