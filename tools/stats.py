"""Print how large the project is: lines of code by package, of tests and of documents, and imports between packages.

A line of code has a token that is neither a comment nor part of a docstring. Run it as ``make stats``.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "paddleformers_fc"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Size:
    """The size of a directory.

    Args:
        files: Python files.
        code: lines with code.
        lines: all lines.
    """

    files: int = 0
    code: int = 0
    lines: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.files + other.files, self.code + other.code, self.lines + other.lines)


def size_of(text: str) -> Size:
    """Return the size of one Python file."""
    documented = {line for node in _docstrings(ast.parse(text)) for line in range(node.lineno, _end(node) + 1)}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return Size(1, len(code - documented), len(text.splitlines()))


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.value


def _end(node: ast.expr) -> int:
    return node.end_lineno or node.lineno


def sizes(directory: Path) -> dict[str, Size]:
    """Return the size of every sub-directory of a directory, and of its own files under ``.``."""
    found: dict[str, Size] = {}
    for path in sorted(directory.rglob("*.py")):
        parts = path.relative_to(directory).parts
        name = parts[0] if len(parts) > 1 else "."
        found[name] = found.get(name, Size()) + size_of(path.read_text(encoding="utf-8"))
    return found


def imports(package: Path) -> Counter[tuple[str, str]]:
    """Count the import statements between the packages of the project."""
    found: Counter[tuple[str, str]] = Counter()
    for path in package.rglob("*.py"):
        own = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{PACKAGE}."):
                other = node.module.split(".")[1]
                found[own, other] += own != other
    return +found


def _print_sizes(title: str, found: dict[str, Size]) -> None:
    print(f"{title:24}{'files':>7}{'code':>8}{'lines':>8}")
    for name, size in sorted(found.items(), key=lambda item: -item[1].code):
        print(f"  {name:22}{size.files:7}{size.code:8}{size.lines:8}")
    total = sum(found.values(), Size())
    print(f"  {'all':22}{total.files:7}{total.code:8}{total.lines:8}\n")


def main() -> None:
    """Print all tables."""
    for name in (PACKAGE, "verification", "tests", "benchmarks"):
        _print_sizes(name, sizes(ROOT / name))
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    words = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").split()) for path in documents}
    print(f"{'documents':31}{'words':>8}")
    for document, number in words.items():
        print(f"  {document!s:29}{number:8}")
    print(f"  {'all':29}{sum(words.values()):8}\n")
    print("imports between packages")
    for (own, other), number in sorted(imports(ROOT / PACKAGE).items()):
        print(f"  {own:16} -> {other:16}{number:5}")


if __name__ == "__main__":
    main()
