"""Read AOA statements: from a list of texts, or an ``aoa_config``, to a program.

No tensor is looked up here. Lines that are not statements are kept with their faults, so that one report lists the
faults of all statements (:mod:`.evaluate`). Linear in the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from paddleformers_fc.aoa.faults import Fault, SourceLine
from paddleformers_fc.aoa.syntax import AoaStatement, parse_line
from paddleformers_fc.errors import MappingError

_CONFIG = {"aoa_statements": list, "aoa_config_reverse": bool, "enable_traceback": bool}


@dataclass(frozen=True)
class Program:
    """Parsed statements.

    Args:
        statements: in the order of the text.
        invalid: lines that are not statements, with their faults.
        reverse: whether the statements are written for the opposite direction.
    """

    statements: tuple[AoaStatement, ...]
    invalid: tuple[tuple[SourceLine, Fault], ...] = ()
    reverse: bool = False


def read_config(config: object) -> Program:
    """Return the program of an ``aoa_config``.

    Args:
        config: the value in a configuration, of any type.
    Raises:
        MappingError: the value is not a mapping, or has an unknown key or a value of another type. Invalid statements
            are reported when the program is evaluated.
    """
    if not isinstance(config, Mapping):
        raise _invalid("aoa_config is not a mapping.", f"it is {type(config).__name__}")
    for key, value in config.items():
        if key not in _CONFIG or not isinstance(value, _CONFIG[key]):
            wanted = f"expected {_CONFIG[key].__name__}" if key in _CONFIG else "unknown key"
            raise _invalid(f"aoa_config has an invalid entry {key!r}.", f"{key} is {type(value).__name__}, {wanted}")
    texts = config.get("aoa_statements", [])
    for entry in texts:
        # Nested lists, as YAML's references make them out of little text, would be endless as text.
        if not isinstance(entry, str):
            raise _invalid("aoa_statements has an entry that is not text.", f"an entry is {type(entry).__name__}")
    return replace(read_statements(texts), reverse=config.get("aoa_config_reverse", False))


def read_statements(statements: Sequence[str]) -> Program:
    """Return the program of a list of statements. Programs are immutable and the last ones are kept."""
    return _parsed(tuple(statements))


@lru_cache(maxsize=4)
def _parsed(texts: tuple[str, ...]) -> Program:
    found: list[AoaStatement] = []
    invalid: list[tuple[SourceLine, Fault]] = []
    for number, text in enumerate(texts, start=1):
        line = SourceLine(number, text.strip("\r\n"))
        try:
            statement = parse_line(line)
        except Fault as fault:
            invalid.append((line, fault))
        else:
            found += [] if statement is None else [statement]
    return Program(tuple(found), tuple(invalid))


def _invalid(problem: str, evidence: str) -> MappingError:
    return MappingError(
        problem,
        where="aoa_config",
        evidence=[evidence],
        next_step=f"Use the keys {', '.join(_CONFIG)}; write every statement as one text in quotes.",
    )
