"""The keys that PaddleFormers' command line accepts, their types and their words, parsed from its source.

An unknown key or a value of a wrong type fails in every rank, after half a minute of imports. The argument classes are
therefore parsed without being imported: annotated names of their bodies and bases, the names that ``LlmMetaConfig``
adds, and the enumerations to which their methods convert values. If the classes are not written as expected, no key is
refused.

Time: a quarter of a second, to parse 800 kB of source. Memory: one syntax tree at a time.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
_TAKEN_BEFORE = frozenset({"custom_register_path"})

_SWITCH = "true or false"
_KINDS = {
    f"{before}{name}{after}": kind
    for name, kind in (("int", "a number"), ("float", "a number"), ("bool", _SWITCH))
    for before, after in (("", ""), ("Optional[", "]"))
}
"""Annotations of PaddleFormers' keys, and the values that they mean."""


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


def stock_keys() -> frozenset[str] | None:
    """Return every key that the training of PaddleFormers' command line accepts, and possibly others; None if unknown.

    The installed source is parsed.
    """
    parsed = _parsed()
    if parsed is None:
        return None
    return _TAKEN_BEFORE | {name for one in parsed.filled for name, _ in _annotated(one)} | set(_strings(parsed.meta))


def stock_annotations() -> Mapping[str, str]:
    """Return the annotation of each key as it is written, such as ``Optional[int]``; empty if unknown.

    Keys with several annotations are left out, and so are those that ``LlmMetaConfig`` adds.
    """
    parsed = _parsed()
    written: dict[str, set[str]] = {}
    for name, annotation in (pair for one in (parsed.filled if parsed else ()) for pair in _annotated(one)):
        written.setdefault(name, set()).add(annotation)
    return {name: found.pop() for name, found in written.items() if len(found) == 1}


def stock_words() -> Mapping[str, Words]:
    """Return the values of each key that PaddleFormers converts to members of an enumeration; empty if unknown."""
    parsed = _parsed()
    if parsed is None:
        return {}
    return {key: words for one in parsed.filled for key, words in _converted(one, parsed.enumerations)}


def refuse_text(settings: Mapping[str, Any]) -> None:
    """Refuse text where PaddleFormers expects a number or a switch. It checks no types.

    Text in place of a number fails in every rank after its imports or later, and the text ``false`` counts as true.

    Args:
        settings: the configuration with its overrides.

    Raises:
        OptionError: with all such keys.
    """
    faults = []
    for key, annotation in sorted(stock_annotations().items()):
        value, kind = settings.get(key), _KINDS.get(annotation)
        if kind is not None and isinstance(value, str) and (kind != _SWITCH or value.lower() != "true"):
            faults.append(f"{key}: {value!r} is text, not {kind}")
    if faults:
        raise OptionError(
            "A value of the configuration has the wrong type.",
            where="training arguments",
            evidence=faults,
            next_step="Write numbers, true and false without quotes. In a YAML file a number with an exponent needs a "
            "dot and a sign, such as 1.0e-5; without them YAML reads text.",
        )


@dataclass(frozen=True)
class _Parsed:
    """The argument classes that are filled with their bases, ``LlmMetaConfig``, and the values of enumerations."""

    filled: list[ast.ClassDef]
    meta: ast.ClassDef
    enumerations: Mapping[str, tuple[str, ...]]


@cache
def _parsed() -> _Parsed | None:
    """Return what is parsed of the installed source; None if it is not written as expected."""
    spec = importlib.util.find_spec("paddleformers")
    roots = spec.submodule_search_locations if spec is not None else None
    if not roots:
        return None
    root = Path(roots[0])
    sources = [*sorted((root / "cli/hparams").glob("*.py")), root / "trainer/training_args.py"]
    try:
        classes = {one.name: one for source in sources for one in _classes(source)}
        meta = {one.name: one for one in _classes(root / "transformers/configuration_utils.py")}[_META]
        filled = [one for name in _FILLED for one in _with_bases(classes[name], classes)]
        found = _classes(root / "trainer/trainer_utils.py")
    except (OSError, SyntaxError, ValueError, KeyError):
        return None
    return _Parsed(filled, meta, {one.name: tuple(_values(one)) for one in found if _is_enumeration(one)})


def _classes(source: Path) -> list[ast.ClassDef]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.ClassDef)]


def _with_bases(one: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
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


def _annotated(one: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in one.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, ast.unparse(node.annotation)


def _is_enumeration(one: ast.ClassDef) -> bool:
    return [ast.unparse(base) for base in one.bases] == [_ENUMERATION]


def _values(one: ast.ClassDef) -> Iterator[str]:
    for node in one.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def _converted(one: ast.ClassDef, enumerations: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, Words]]:
    """Yield the keys of assignments ``self.KEY = Enumeration(...)`` and ``self.KEY = [Enumeration(...) for ...]``."""
    for node in ast.walk(one):
        match node:
            case ast.Assign([ast.Attribute(attr=key)], ast.Call(ast.Name(kind))) if kind in enumerations:
                yield key, Words(enumerations[kind])
            case ast.Assign([ast.Attribute(attr=key)], ast.ListComp(ast.Call(ast.Name(kind)))) if kind in enumerations:
                yield key, Words(enumerations[kind], several=True)


def _strings(one: ast.ClassDef) -> Iterator[str]:
    """Yield every identifier among the texts of the class; extra ones do no harm."""
    for node in ast.walk(one):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
