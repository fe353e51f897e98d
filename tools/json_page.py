"""Write the page of the site with the keys of every JSON document, from their types and docstrings.

Keys are not renamed or removed within a major version. New keys may be added, so readers must ignore unknown keys.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from paddleformers_fc.cli.explaining import FamilyTable
from paddleformers_fc.cli.exporting import Converted, Exported
from paddleformers_fc.cli.training import Ended, TrainingJob
from paddleformers_fc.execute.diff_checkpoints import Difference
from paddleformers_fc.execute.output_directory import Cleaned, Inspection, ListedFacts
from paddleformers_fc.execute.verify import Verification
from paddleformers_fc.formats.aoa_statements import StatementList
from paddleformers_fc.plan.explain import Explanation
from paddleformers_fc.plan.forecast import GridPlan
from paddleformers_fc.trainer.diagnosis import Diagnosis

DOCUMENTS: dict[str, type[Any]] = {
    "inspect": Inspection,
    "list": ListedFacts,
    "explain": Explanation,
    "doctor": Diagnosis,
    "verify": Verification,
    "diff": Difference,
    "plan": GridPlan,
    "export": Exported,
    "convert": Converted,
    "clean": Cleaned,
    "aoa": StatementList,
    "families": FamilyTable,
    "train": Ended,
    "train --dry-run": TrainingJob,
}
"""The type of the document that a command prints if it succeeds; ``verify`` and ``train`` add the keys of an error."""

FREE = {"register-path": "`custom_register_path`, the path of the file."}
"""Commands whose documents have no type, with a description."""

HEAD = """# JSON of commands

Every document of `--json`, from the code. [Commands](../docs/commands.md#json) has the rules and the keys of errors. A
box is `[[first, ...], [end, ...]]`, with exclusive ends.
"""
NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def page() -> str:
    """Return the whole page."""
    sections = [HEAD]
    for command, kind in DOCUMENTS.items():
        sections.append(f"## `{command}`\n\n{_first(kind)}\n\n{_table(kind)}")
    sections.append("## Other commands\n\n" + "\n".join(f"* `{name}`: {text}" for name, text in FREE.items()) + "\n")
    nested = dict.fromkeys(one for kind in DOCUMENTS.values() for one in _within(kind))
    sections.append("## Objects\n")
    for one in sorted(nested, key=lambda kind: kind.__name__):
        sections.append(f"### {one.__name__}\n\n{_first(one)}\n\n{_table(one)}")
    return "\n".join(sections)


def _is_object(kind: Any) -> bool:
    if not isinstance(kind, type) or isinstance(kind, types.GenericAlias):
        return False
    if dataclasses.is_dataclass(kind):
        return True
    return issubclass(kind, msgspec.Struct) and not kind.__struct_config__.array_like


def _first(kind: type[Any]) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")


def _table(kind: type[Any]) -> str:
    texts = _meanings(kind)
    rows = [
        f"| `{name}` | {_name(hint)} | {texts.get(name, '')} |" for name, hint in typing.get_type_hints(kind).items()
    ]
    return "\n".join(["| key | type | meaning |", "|---|---|---|", *rows]) + "\n"


def _meanings(kind: type[Any]) -> Mapping[str, str]:
    """Meaning of every field, from the docstring."""
    section = re.search(r"(?:Attributes|Args):\n((?: {4}.*(?:\n|$))*)", inspect.getdoc(kind) or "")
    found: dict[str, str] = {}
    for line in section.group(1).splitlines() if section else ():
        named = re.match(r" {4}(\w+): (.*)", line)
        if named:
            last = named.group(1)
            found[last] = named.group(2)
        else:
            found[last] += f" {line.strip()}"
    plain = {name: re.sub(r":[a-z]+:`[.~]?([^`]*)`", r"`\1`", text) for name, text in found.items()}
    return {name: text.replace("``", "`").replace("|", "\\|") for name, text in plain.items()}


def _name(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), [one for one in typing.get_args(hint) if one is not ...]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(one) for one in inner)
    if origin in (list, tuple):
        return f"array of {_name(inner[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"object of {_name(inner[1])} by name"
    if _is_object(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return NAMES.get(hint, "box" if getattr(hint, "__name__", "") == "Box" else "any")


def _within(kind: Any) -> Iterator[type[Any]]:
    """The objects inside of a document."""
    for hint in typing.get_type_hints(kind).values():
        yield from _objects(hint)


def _objects(hint: Any) -> Iterator[type[Any]]:
    if _is_object(hint):
        yield hint
        yield from _within(hint)
    for one in typing.get_args(hint):
        yield from _objects(one)
