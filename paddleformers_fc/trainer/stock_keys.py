"""The keys that PaddleFormers' command line accepts, parsed from its source.

An unknown key fails in every rank, after half a minute of imports. The argument classes are therefore parsed without
being imported: annotated names of their bodies and bases, and the names that ``LlmMetaConfig`` adds. If the classes are
not written as expected, no key is refused.

Time: two tenths of a second, to parse 700 kB of source. Memory: one syntax tree at a time.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

_FILLED = (
    "ModelArguments",
    "DataArguments",
    "End2EndProcessorArguments",
    "GeneratingArguments",
    "FinetuningArguments",
)
_META = "LlmMetaConfig"
_DECORATORS = {"dataclass", "llmmetaclass"}
_TAKEN_BEFORE = frozenset({"custom_register_path"})


def stock_keys() -> frozenset[str] | None:
    """Return every key that the training of PaddleFormers' command line accepts, and possibly others; None if unknown.

    The installed source is parsed.
    """
    parsed = _parsed()
    if parsed is None:
        return None
    filled, meta = parsed
    return _TAKEN_BEFORE | {name for one in filled for name, _ in _annotated(one)} | set(_strings(meta))


def stock_annotations() -> Mapping[str, str]:
    """Return the annotation of each key as it is written, such as ``Optional[int]``; empty if unknown.

    Keys with several annotations are left out, and so are those that ``LlmMetaConfig`` adds.
    """
    parsed = _parsed()
    written: dict[str, set[str]] = {}
    for name, annotation in (pair for one in (parsed[0] if parsed else ()) for pair in _annotated(one)):
        written.setdefault(name, set()).add(annotation)
    return {name: found.pop() for name, found in written.items() if len(found) == 1}


@cache
def _parsed() -> tuple[list[ast.ClassDef], ast.ClassDef] | None:
    """Return the argument classes that are filled with their bases, and ``LlmMetaConfig``; None if unknown."""
    spec = importlib.util.find_spec("paddleformers")
    roots = spec.submodule_search_locations if spec is not None else None
    if not roots:
        return None
    root = Path(roots[0])
    sources = [*sorted((root / "cli/hparams").glob("*.py")), root / "trainer/training_args.py"]
    try:
        classes = {one.name: one for source in sources for one in _classes(source)}
        meta = {one.name: one for one in _classes(root / "transformers/configuration_utils.py")}[_META]
        return [one for name in _FILLED for one in _with_bases(classes[name], classes)], meta
    except (OSError, SyntaxError, ValueError, KeyError):
        return None


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


def _strings(one: ast.ClassDef) -> Iterator[str]:
    """Yield every identifier among the texts of the class; extra ones do no harm."""
    for node in ast.walk(one):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
