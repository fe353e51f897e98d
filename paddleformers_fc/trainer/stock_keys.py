"""The keys that PaddleFormers' command line accepts, their types and their words, parsed from its source.

An unknown key or a value of a wrong type fails in every rank, after half a minute of imports. The argument classes are
therefore parsed without being imported: annotated names of their bodies and bases, the names that ``LlmMetaConfig``
adds, and the enumerations to which their methods convert values. If the classes are not written as expected, no key is
refused.

Time: 0.1 s, to parse 800 kB of source; importing PaddleFormers' parser takes 3.5 s.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import OptionError

_FILLED = (
    "ModelArguments",
    "DataArguments",
    "End2EndProcessorArguments",
    "GeneratingArguments",
    "FinetuningArguments",
)
_META = "LlmMetaConfig"
_ENUMERATION = "ExplicitEnum"
_DECORATORS = {"dataclass", "llmmetaclass"}
_TAKEN_BEFORE = "custom_register_path"
_SOURCES = (
    "cli/hparams/*.py",
    "trainer/training_args.py",
    "trainer/trainer_utils.py",
    "transformers/configuration_utils.py",
)

_SWITCH = "true or false"
_KINDS = {"int": "a number", "float": "a number", "bool": _SWITCH}
"""Annotations of PaddleFormers' keys, also within ``Optional[]``, and the values that they mean."""

TEXT_ADVICE = (
    "Write numbers, true and false without quotes. In a YAML file a number with an exponent needs a dot and a sign, "
    "such as 1.0e-5; without them YAML reads text."
)


@dataclass(frozen=True)
class Words:
    """The values of a key.

    Args:
        known: the values.
        several: whether the value is a text of any number of them; true, false and [] are left to PaddleFormers, which
            fails on null.
        any_case: whether upper and lower case are equal.
    """

    known: tuple[str, ...]
    several: bool = False
    any_case: bool = False

    def admits(self, value: Any) -> bool:
        """Return whether this is a value of the key."""
        if not isinstance(value, str):
            return self.several and (value == [] or isinstance(value, bool))
        known = [word.lower() for word in self.known] if self.any_case else self.known
        given = value.lower() if self.any_case else value
        return all(word in known for word in (given.split() if self.several else [given]))


@dataclass(frozen=True)
class StockArguments:
    """The arguments of a training by PaddleFormers' command line; all empty if they are unknown.

    Args:
        keys: every key, and possibly others.
        kinds: what the values of numbers and switches must be.
        words: the values of each key that PaddleFormers converts to members of an enumeration.
    """

    keys: frozenset[str] = frozenset()
    kinds: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Words] = field(default_factory=dict)


@cache
def stock_arguments() -> StockArguments:
    """Return the arguments, parsed from the installed source."""
    spec = importlib.util.find_spec("paddleformers")
    if spec is None or spec.origin is None:
        return StockArguments()
    root = Path(spec.origin).parent
    try:
        trees = [ast.parse(path.read_bytes()) for pattern in _SOURCES for path in sorted(root.glob(pattern))]
        classes = {one.name: one for tree in trees for one in tree.body if isinstance(one, ast.ClassDef)}
        filled = [one for name in _FILLED for one in _with_bases(classes[name], classes)]
        meta = classes[_META]
    except (OSError, SyntaxError, ValueError, KeyError):
        return StockArguments()
    annotations: dict[str, set[str]] = {}
    for node in (node for one in filled for node in one.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation).removeprefix("Optional[").removesuffix("]")
            annotations.setdefault(node.target.id, set()).add(kind)
    # Every text of the class that is an identifier: extra ones do no harm.
    texts = {node.value for node in ast.walk(meta) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return StockArguments(
        frozenset({_TAKEN_BEFORE, *annotations, *filter(str.isidentifier, texts)}),
        {key: _KINDS[kind] for key, (kind, *others) in sorted(annotations.items()) if not others and kind in _KINDS},
        {key: words for one in filled for key, words in _converted(one, classes)},
    )


def text_faults(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each key with text where PaddleFormers expects a number or a switch. It checks no types.

    Text in place of a number fails in every rank after its imports or later, and the text ``false`` counts as true.
    """
    return {
        key: f"{key}: {value!r} is text, not {kind}"
        for key, kind in stock_arguments().kinds.items()
        if isinstance(value := settings.get(key), str) and (kind != _SWITCH or value.lower() != "true")
    }


def refuse_text(settings: Mapping[str, Any]) -> None:
    """Refuse text where PaddleFormers expects a number or a switch.

    Raises:
        OptionError: with all such keys.
    """
    faults = text_faults(settings)
    if faults:
        raise OptionError(
            "A value of the configuration has the wrong type.",
            where="training arguments",
            evidence=[*faults.values()],
            next_step=TEXT_ADVICE,
        )


def _with_bases(one: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield the class and its bases.

    Raises:
        KeyError: a base is defined elsewhere, or a decorator may add keys.
    """
    unknown = {ast.unparse(decorator) for decorator in one.decorator_list} - _DECORATORS
    if unknown:
        raise KeyError(*unknown)
    yield one
    for base in one.bases:
        yield from _with_bases(classes[ast.unparse(base)], classes)


def _converted(one: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[tuple[str, Words]]:
    """Yield the keys of assignments ``self.KEY = Enumeration(...)`` and ``self.KEY = [Enumeration(...) for ...]``."""
    for node in ast.walk(one):
        match node:
            case ast.Assign(
                [ast.Attribute(attr=key)], ast.Call(ast.Name(kind)) | ast.ListComp(ast.Call(ast.Name(kind)))
            ):
                base = [ast.unparse(base) for base in classes[kind].bases] if kind in classes else []
                if base == [_ENUMERATION]:
                    members = (member.value for member in classes[kind].body if isinstance(member, ast.Assign))
                    known = tuple(str(value.value) for value in members if isinstance(value, ast.Constant))
                    yield key, Words(known, several=isinstance(node.value, ast.ListComp))
