"""Format numbers, names and commands for messages, logs and tables."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

from paddleformers_fc.errors import cut

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
# Longer numbers are not indices. The limit also keeps them within what Python converts to an int.
_INDEX = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,17})(?=\.)")
_HOLE = "\0"
LONGEST_SHOWN = 800
"""Maximum length of a line of text output, in characters."""


def size_text(count: int) -> str:
    """Format a number of bytes with three digits, in powers of 1000: ``1.5 GB``."""
    size, unit = float(count), 0
    while size >= 999.5 and unit + 1 < len(_UNITS):
        size, unit = size / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"


def rate_text(count: int, seconds: float) -> str:
    """Format bytes per second, as :func:`size_text` does: ``1.25 GB/s``."""
    return f"{size_text(int(count / max(seconds, 1e-9)))}/s"


def count_text(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 tensor``, ``1,024 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def numbers_text(numbers: Sequence[object]) -> str:
    """Format numbers such as a shape, at most eight of them: ``[1, 2, 3]``."""
    return f"[{', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}]"


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which ``layers.2`` comes before ``layers.10``."""
    return [(0, int(piece), "") if _is_number(piece) else (1, 0, piece) for piece in name.split(".")]


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package."""
    return f'pip install "paddleformers-fc[{extra}]"'


def _is_number(piece: str) -> bool:
    # isdigit accepts characters that int rejects, and int rejects very long numbers.
    return piece.isascii() and piece.isdigit() and len(piece) <= 18


def similar_word(given: str, known: Iterable[str]) -> str:
    """Return the known word that is most similar to a word, ignoring case; empty if none is similar.

    Words that differ only in dotted numbers, such as names of layers, are compared as one, since each comparison is
    slow; among these, the word with the same numbers is the most similar, or else the one with the nearest numbers.
    """
    by_lower = {word.lower(): word for word in sorted(known)}
    alike: dict[str, list[str]] = {}
    for word in by_lower:
        alike.setdefault(_INDEX.sub(_HOLE, word), []).append(word)
    given = given.lower()
    templates = difflib.get_close_matches(_INDEX.sub(_HOLE, given), alike, n=1)
    words = alike[templates[0]] if templates else []
    numbers = _INDEX.findall(given)
    same = [word for word in words if _INDEX.findall(word) == numbers]
    nearest = same[0] if same else min(words, key=lambda word: _distance(_INDEX.findall(word), numbers), default="")
    return by_lower.get(nearest, "")


def _distance(numbers: Sequence[str], others: Sequence[str]) -> list[int]:
    return [abs(int(one) - int(other)) for one, other in zip(numbers, others, strict=False)]


def likely_meant(given: str, known: Iterable[str]) -> str:
    """Return a question that suggests a similar known word; empty if there is none."""
    similar = similar_word(given, known)
    return f"did you mean {similar}?" if similar else ""


def suggestion(given: object, known: Iterable[str]) -> list[str]:
    """Return :func:`likely_meant` as evidence of an error: one line, or none, as for a value that is not a text."""
    meant = likely_meant(given, known) if isinstance(given, str) else ""
    return [meant] if meant else []


def fold(lines: Iterable[str], limit: int = 200) -> list[str]:
    """Fold lines that differ only in their indices: ``layers.0 … layers.31`` becomes ``layers.{0...31}``.

    Lines are grouped by their text without dotted numbers. A group with all combinations of its numbers becomes one
    line; other groups stay unfolded. Linear in the lines, which keep the order of first appearance.

    Args:
        lines: any text; only numbers between two dots and without leading zeros are folded. Longer results than
            :data:`LONGEST_SHOWN` keep their beginning and end.
        limit: the maximum number of lines; a last line counts the omitted ones.
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for line in lines:
        line = line.replace(_HOLE, "\\0")
        indices = tuple(int(found) for found in _INDEX.findall(line))
        groups.setdefault(_INDEX.sub(_HOLE, line), []).append(indices)
    folded: list[str] = []
    for template, rows in groups.items():
        folded.extend(cut(line, LONGEST_SHOWN) for line in _folded(template, sorted(set(rows))))
    if len(folded) > limit:
        return folded[:limit] + [f"and {len(folded) - limit} more"]
    return folded


def _folded(template: str, rows: Sequence[tuple[int, ...]]) -> list[str]:
    columns = [sorted({row[i] for row in rows}) for i in range(len(rows[0]))]
    if math.prod(map(len, columns)) != len(rows):
        return [_filled(template, [str(number) for number in row]) for row in rows]
    return [_filled(template, [_run(column) for column in columns])]


def _run(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}...{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"


def _filled(template: str, values: Sequence[str]) -> str:
    pieces = template.split(_HOLE)
    return "".join(piece + value for piece, value in zip(pieces, [*values, ""], strict=True))
