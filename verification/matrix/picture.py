"""Draw a matrix: the colour is right or wrong, and the shade of a right cell is its rounding.

Every cell that is right is blue, from pale for bitwise equal losses to darker for larger differences. A wrong cell is
orange, so that no amount of rounding looks like a fault, also to colour-blind readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

EQUAL, WRONG, NOT_RUN = "equal", "wrong", "-"
"""The texts of cells that are no number."""

NOTE = "¹"
"""Behind a number: larger than rounding, and the same without a checkpoint."""

_BLUE, _ORANGE, _GREY = (0.13, 0.44, 0.71), (0.90, 0.38, 0.0), (0.90, 0.90, 0.90)
_PALEST, _DARKEST = 0.10, 0.75
_LEAST, _MOST = 1e-8, 1e-2
"""Differences of a loss between which shades differ."""


def draw(title: str, rows: Sequence[str], columns: Sequence[str], texts: Sequence[Sequence[str]], path: Path) -> None:
    """Write the picture of a matrix.

    Args:
        title: above it.
        rows: names of the layouts that saved.
        columns: names of the layouts that resumed.
        texts: of the cells, by row and column: :data:`EQUAL`, :data:`WRONG`, :data:`NOT_RUN` or a number.
        path: of the PNG file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(2.4 + 1.1 * len(columns), 2.1 + 0.55 * len(rows)))
    axes.imshow([[colour_of(text) for text in row] for row in texts], aspect="auto")
    for index, row in enumerate(texts):
        for position, text in enumerate(row):
            weight = "bold" if text == WRONG else "normal"
            axes.text(position, index, text, ha="center", va="center", fontsize=8, fontweight=weight)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title, fontsize=10)
    kinds = {
        "right, bitwise equal": EQUAL,
        "right, rounding (darker: more)": "5e-07",
        "wrong": WRONG,
        "not run": NOT_RUN,
    }
    patches = [Patch(facecolor=colour_of(text), edgecolor="0.7", label=label) for label, text in kinds.items()]
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), fontsize=8, frameon=False)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def colour_of(text: str) -> tuple[float, float, float]:
    """Return the colour of a cell as red, green and blue from 0 to 1."""
    if text in (WRONG, NOT_RUN):
        return _ORANGE if text == WRONG else _GREY
    difference = 0.0 if text.startswith(EQUAL) else float(text.rstrip(f" {NOTE}"))
    part = math.log(max(difference, _LEAST) / _LEAST) / math.log(_MOST / _LEAST)
    share = _PALEST + (_DARKEST - _PALEST) * min(1.0, part)
    red, green, blue = (1 - share * (1 - one) for one in _BLUE)  # Over white.
    return red, green, blue
