"""The document of a matrix.

This module only presents; :mod:`.running` decides what is equal. The document is a function of the outcomes, without
date or duration, so that equal results give equal documents.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from paddleformers_fc.text import count_text
from paddleformers_fc.upstream import VERSIONS
from verification.matrix.recipe import Recipe
from verification.matrix.running import CellDigests, CellOutcome

Known = Mapping[str, CellOutcome | None]
EQUAL, WRONG, NOT_RUN = "equal", "wrong", "-"
"""The texts of cells that are no number."""
_WRONG = f"**{WRONG}**"
_SOFTWARE = f"Paddle {VERSIONS['paddle']} and PaddleFormers {VERSIONS['paddleformers']}"
_LEGEND = f"""
    A cell is the largest difference of the loss over the first three steps after the resume, against the run
    that was not interrupted; *equal* is bitwise equal. Rows saved, columns resumed. `sd2v1` and `sd2v2` are
    sharding stage 1 of whole parameters and of flattened ranges (`sd2` alone is the latter), `sd2s2` and `sd2s3`
    stages 2 and 3, with slices of all parameters above 1000 elements; `pp4vpp2` has two virtual stages on each of
    four ranks; `(ep2)` spreads the experts over two ranks. Losses are around 4.8, where neighbouring float32
    numbers are 4.8e-07 apart. Measured with {_SOFTWARE} on CPUs;
    `make matrix` writes this page.
"""


def reason(outcome: CellOutcome) -> str:
    """Return the fault of a cell in a few words."""
    if outcome.error:
        return outcome.error
    if outcome.unequal:
        return f"{count_text(len(outcome.unequal), 'tensor')} with another md5, the first is {outcome.unequal[0]}"
    if not outcome.export_equal:
        return "the exports are not md5-equal"
    return f"a loss differs by {outcome.difference:.1e}"


def write(recipe: Recipe, known: Known, found: Sequence[CellDigests], stem: Path) -> None:
    """Write the document.

    Args:
        recipe: of the matrix.
        known: the outcome of every cell by name, row by row; None if unknown.
        found: the results of the experiments.
        stem: the path without its ending.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    columns = len(recipe.targets)
    texts = [_text(outcome, recipe.tolerance) for outcome in known.values()]
    rows = [texts[begin : begin + columns] for begin in range(0, len(texts), columns)]
    parts = [
        f"# {recipe.title}: any layout to any layout",
        textwrap.fill(" ".join(recipe.text.split()), 120),
        _summary(recipe, known),
        "\n".join(
            [
                "| from \\ to | " + " | ".join(recipe.targets) + " |",
                "|---" * (columns + 1) + "|",
                *(f"| **{name}** | " + " | ".join(row) + " |" for name, row in zip(recipe.sources, rows, strict=True)),
            ]
        ),
        textwrap.fill(" ".join(_LEGEND.split()), 120),
        *(_experiment(recipe, one) for one in found),
    ]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _summary(recipe: Recipe, known: Known) -> str:
    done, total = [outcome for outcome in known.values() if outcome is not None], len(known)
    same = [outcome for outcome in done if not outcome.error and not outcome.unequal]
    tensors = sum(outcome.tensors for outcome in same)
    exports = sum(outcome.export_equal for outcome in done)
    equal = sum(outcome.difference == 0 for outcome in done)
    close = sum(outcome.difference <= recipe.tolerance for outcome in done)
    return (
        f"* {len(same)} of {total} cells: every tensor md5-equal, A to B and back to A ({tensors:,} tensors compared"
        f" twice: weights, {'master weights, ' if recipe.bf16 else ''}moments, powers of beta"
        f"{', moving averages' if recipe.arguments.get('flex_ema_decay') else ''}).\n"
        f"* {exports} of {total} cells: the exports of A and B are md5-equal.\n"
        f"* {close} of {total} cells: the losses of the three steps after the resume are within"
        f" {recipe.tolerance:.0e} of those of A, which went on; in {equal} of them bitwise equal."
    )


def _text(outcome: CellOutcome | None, tolerance: float) -> str:
    if outcome is None:
        return NOT_RUN
    if not outcome.right(tolerance):
        return _WRONG
    return EQUAL if outcome.difference == 0 else f"{outcome.difference:.1e}"


def _experiment(recipe: Recipe, found: CellDigests) -> str:
    experiment = next(one for one in recipe.experiments if one.title == found.title)
    first, second = experiment.layouts
    lines = [
        f"## {found.title}",
        textwrap.fill(" ".join(experiment.text.split()), 120),
        f"Three steps of {first} and of {second} from the same weights, set by hand; there is no checkpoint in it.",
    ]
    rows = ["| | largest difference of the loss |", "|---|---|"]
    for variant, (one, other) in found.losses.items():
        rows.append(f"| {variant} | {max(abs(a - b) for a, b in zip(one, other, strict=True)):.1e} |")
    return "\n\n".join([*lines, "\n".join(rows)])
