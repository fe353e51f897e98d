"""Progress of a matrix while it runs, and its document with a table and a picture.

This module only presents; :mod:`.running` decides what is equal. The document is a function of the outcomes, without
date or duration, so that equal results give equal documents.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from paddleformers_fc.text import count_text
from paddleformers_fc.upstream import VERSIONS
from verification.matrix.picture import EQUAL, NOT_RUN, NOTE, WRONG, draw
from verification.matrix.recipe import Cell, Recipe
from verification.matrix.running import CellDigests, CellOutcome, file_name

_WRONG = f"**{WRONG}**"


def reason(outcome: CellOutcome) -> str:
    """Return the fault of a cell in a few words."""
    if outcome.error:
        return outcome.error
    if outcome.unequal:
        return f"{count_text(len(outcome.unequal), 'tensor')} with another md5, the first is {outcome.unequal[0]}"
    if not outcome.export_equal:
        return "the exports are not md5-equal"
    return f"a loss differs by {outcome.difference:.1e}"


def directory_of(outcome: CellOutcome) -> str:
    """Return the name of the directory with a wrong cell's logs."""
    return file_name(outcome.name)


def show(recipe: Recipe, outcomes: Sequence[CellOutcome], seconds: float, document: Path) -> None:
    """Print a summary of two lines."""
    right = sum(outcome.right(recipe.tolerance) for outcome in outcomes)
    equal = sum(outcome.right(recipe.tolerance) and outcome.difference == 0 for outcome in outcomes)
    print(f"{recipe.title}: {right} of {len(outcomes)} cells right, {equal} of them with bitwise equal losses.")
    print(f"{document}: {seconds:.0f} s.")


def write(
    recipe: Recipe,
    cells: Sequence[Cell],
    known: Mapping[str, CellOutcome | None],
    found: Sequence[CellDigests],
    stem: Path,
) -> None:
    """Write the document and the picture.

    Args:
        recipe: of the matrix.
        cells: all of it.
        known: the outcome of each, by name; None if unknown.
        found: the results of the experiments.
        stem: of the two files, without ending.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        f"# {recipe.title}: any layout to any layout",
        textwrap.fill(" ".join(recipe.text.split()), 120),
        _summary(recipe, cells, known),
        _table(recipe, cells, known),
        f"![The same as a picture]({stem.name}.png)",
        _legend(recipe, stem.name),
        *_remarks(recipe, known),
        *(_experiment(recipe, one) for one in found),
    ]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    columns = len(recipe.targets)
    texts = [_text(known[cell.name], recipe.tolerance).strip("*") for cell in cells]
    rows = [texts[begin : begin + columns] for begin in range(0, len(texts), columns)]
    title = f"{recipe.title}: difference of the loss after resuming row as column"
    draw(title, recipe.sources, recipe.targets, rows, stem.with_suffix(".png"))


def _summary(recipe: Recipe, cells: Sequence[Cell], known: Mapping[str, CellOutcome | None]) -> str:
    done = [outcome for cell in cells if (outcome := known[cell.name]) is not None]
    tensors = sum(outcome.tensors for outcome in done if not outcome.unequal and not outcome.error)
    md5 = sum(not outcome.error and not outcome.unequal for outcome in done)
    exports = sum(outcome.export_equal for outcome in done)
    equal = sum(outcome.difference == 0 for outcome in done)
    close = sum(outcome.difference <= recipe.tolerance for outcome in done)
    return "\n".join(
        [
            f"* {md5} of {len(cells)} cells: every tensor md5-equal, A to B and back to A ({tensors:,} tensors compared"
            f" twice: weights, {'master weights, ' if recipe.bf16 else ''}moments, powers of beta"
            f"{', moving averages' if recipe.arguments.get('flex_ema_decay') else ''}).",
            f"* {exports} of {len(cells)} cells: the exports of A and B are md5-equal.",
            f"* {close} of {len(cells)} cells: the losses of the three steps after the resume are within"
            f" {recipe.tolerance:.0e} of those of A, which went on; in {equal} of them bitwise equal.",
        ]
    )


def _table(recipe: Recipe, cells: Sequence[Cell], known: Mapping[str, CellOutcome | None]) -> str:
    lines = ["| from \\ to | " + " | ".join(recipe.targets) + " |", "|---" * (len(recipe.targets) + 1) + "|"]
    for source in recipe.sources:
        row = [known[cell.name] for cell in cells if cell.source.name == source]
        lines.append(f"| **{source}** | " + " | ".join(_text(outcome, recipe.tolerance) for outcome in row) + " |")
    return "\n".join(lines)


def _text(outcome: CellOutcome | None, tolerance: float) -> str:
    if outcome is None:
        return NOT_RUN
    if not outcome.right(tolerance):
        return _WRONG
    note = f" {NOTE}" if outcome.difference > tolerance else ""
    return (EQUAL if outcome.difference == 0 else f"{outcome.difference:.1e}") + note


def _legend(recipe: Recipe, name: str) -> str:
    text = f"""
        A cell is the largest difference of the loss over the first three steps after the resume, against the run
        that was not interrupted; *equal* is bitwise equal. Rows saved, columns resumed. `sd2v1` and `sd2v2` are
        sharding stage 1 of whole parameters and of flattened ranges (`sd2` alone is the latter), `sd2s2` and `sd2s3`
        stages 2 and 3, with slices of all parameters above 1000 elements; `pp4vpp2` has two virtual stages on each of
        four ranks; `(ep2)` spreads the experts over two ranks. Losses are around 4.8, where neighbouring float32
        numbers are 4.8e-07 apart. Measured with {_software()} on CPUs;
        `make matrix` writes this page.
    """
    return textwrap.fill(" ".join(text.split()), 120)


def _software() -> str:
    return f"Paddle {VERSIONS['paddle']} and PaddleFormers {VERSIONS['paddleformers']}"


def _remarks(recipe: Recipe, known: Mapping[str, CellOutcome | None]) -> list[str]:
    larger = [
        one for one in known.values() if one and one.difference > recipe.tolerance and one.right(recipe.tolerance)
    ]
    if not larger:
        return []
    lines = [
        "## Larger differences",
        "¹ These cells were run again with every weight and every state set by hand, by a program that shares no line "
        "with the loader. The losses are bitwise those of the cell: it is the layouts that add in another order, and "
        "the checkpoint is not involved.",
        "\n".join(f"* {one.name}: {one.difference:.1e} resumed, and by hand the same three losses." for one in larger),
    ]
    return ["\n\n".join(lines)]


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
