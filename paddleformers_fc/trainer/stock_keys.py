"""The keys that PaddleFormers' command line accepts, parsed from its source.

An unknown key fails in every rank, after half a minute of imports. The argument classes are therefore parsed without
being imported: annotated names of their bodies and bases, and the names that ``LlmMetaConfig`` adds. If the classes are
not written as expected, no key is refused.

Time: two tenths of a second, to parse 700 kB of source. Memory: one syntax tree at a time.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
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
    except (OSError, SyntaxError, ValueError, KeyError):
        return None
    return _TAKEN_BEFORE | {name for one in filled for name in _annotated(one)} | set(_strings(meta))


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


def _annotated(one: ast.ClassDef) -> Iterator[str]:
    for node in one.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _strings(one: ast.ClassDef) -> Iterator[str]:
    """Yield every identifier among the texts of the class; extra ones do no harm."""
    for node in ast.walk(one):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
