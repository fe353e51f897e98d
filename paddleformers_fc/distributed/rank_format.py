"""Format ranks for reports: a thousand of them in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

MOST_VALUES = 8
"""Most values in one line."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ``rank 3`` or ``ranks 0-2, 5``.

    Args:
        ranks: at least one, in any order.
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def group_by_value(values: Sequence[str] | Mapping[int, str]) -> str:
    """Return values with their ranks: ``8 on ranks 0-2; 9 on rank 3``. The value of the fewest ranks is last.

    Args:
        values: the value of each rank, by rank.
    """
    holders: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        holders.setdefault(value, []).append(rank)
    lines = [f"{value} on {format_ranks(ranks)}" for value, ranks in sorted(holders.items(), key=_largest_group_first)]
    if len(lines) > MOST_VALUES:
        lines[MOST_VALUES - 1 :] = [f"{len(lines) - MOST_VALUES + 1} more values on other ranks"]
    return "; ".join(lines)


def _largest_group_first(entry: tuple[str, list[int]]) -> tuple[int, int]:
    return -len(entry[1]), entry[1][0]


def escape_text(text: str) -> str:
    """Return a text that UTF-8 can encode: surrogates, as in file names of arbitrary bytes, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
