"""Fold lines that differ only in their indices: ``layers.0 … layers.31`` becomes ``layers.{0...31}``.

Lines are grouped by their text without dotted numbers. A group with all combinations of its numbers becomes one line;
other groups stay unfolded. Linear in the lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Longer numbers are not indices, and names may have more digits than Python converts to a number.
_INDEX = re.compile(r"(?<=\.)[0-9]{1,18}(?=\.)")
_HOLE = "\0"


def fold(lines: Iterable[str], limit: int = 200) -> list[str]:
    """Return the lines with folded indices, in order of first appearance.

    Args:
        lines: any text; only numbers between two dots are folded.
        limit: the maximum number of lines; a last line counts those that are omitted.
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for line in lines:
        line = line.replace(_HOLE, "\\0")
        indices = tuple(int(found) for found in _INDEX.findall(line))
        groups.setdefault(_INDEX.sub(_HOLE, line), []).append(indices)
    folded: list[str] = []
    for template, rows in groups.items():
        folded.extend(_folded(template, sorted(set(rows))))
    if len(folded) > limit:
        return folded[:limit] + [f"and {len(folded) - limit} more"]
    return folded


def _folded(template: str, rows: Sequence[tuple[int, ...]]) -> list[str]:
    columns = [sorted({row[i] for row in rows}) for i in range(len(rows[0]))]
    cells = 1
    for column in columns:
        cells *= len(column)
    if cells != len(rows):
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
