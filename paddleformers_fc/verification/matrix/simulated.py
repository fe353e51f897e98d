"""A matrix whose model cannot be built here: simulated layouts, real bytes, no losses.

Its recipe names the model in place of layouts. Rows, columns and the question of a cell are those of
:mod:`paddleformers_fc.verification.simulate_ranks`. The document has the same form as the others'.

Time: about a second per cell. Memory: one tiny model per simulated rank.
"""

from __future__ import annotations

import tempfile
import textwrap
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from paddleformers_fc.cli import output
from paddleformers_fc.errors import OptionError
from paddleformers_fc.verification.matrix.picture import EQUAL, WRONG, draw
from paddleformers_fc.verification.matrix.recipe import ARROW
from paddleformers_fc.verification.simulate_ranks import (
    QWEN3_MOE_COLUMNS,
    QWEN3_MOE_ROWS,
    RoundTrip,
    qwen3_moe_round_trips,
)

_LEGEND = """
    A cell is one conversion: simulated ranks of the row save, ranks of the column load and save, and ranks of the row
    load that again. *equal*: every tensor of every role is md5-equal under both, and so are the exports. `sd` is
    sharding stage 1, v1 of whole parameters and v2 of flattened ranges; `ep` spreads the experts.
"""


class SimulatedRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix by simulated layouts.

    Args:
        title: of the document.
        text: a paragraph for its reader.
        simulated: the model.
    """

    title: str
    text: str
    simulated: Literal["qwen3_moe"]


def read_simulated(path: Path) -> SimulatedRecipe | None:
    """The recipe, or None where the file is a recipe of trained layouts.

    Raises:
        OptionError: it names a model that is not simulated, or has other keys.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "simulated" not in found:
            return None
        return msgspec.convert(found, SimulatedRecipe, strict=True)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise OptionError(
            "Invalid recipe of a verification matrix.",
            where=str(path),
            evidence=[str(error)],
            next_step="See recipes/verification for the two forms of a recipe.",
        ) from error


def run_simulated(recipe: SimulatedRecipe, stem: str, only: str | None, documents: Path, as_json: bool) -> int:
    """Run the matrix, or some of its cells, and write its document.

    Args:
        recipe: of the matrix.
        stem: of the document's two files.
        only: which cells, such as ``tp2->*``; the document is written when all of them ran.
        documents: gets ``<stem>.md`` and ``<stem>.png``.
        as_json: print one JSON document.
    Returns:
        0 when every cell that ran was equal, else 1.
    Raises:
        OptionError: no cell is called that.
    """
    source, _, target = (only or "*").partition(ARROW)

    def chosen(row: str, column: str) -> bool:
        return fnmatchcase(row, source) and fnmatchcase(column, target or "*")

    if not any(chosen(row, column) for row in QWEN3_MOE_ROWS for column in QWEN3_MOE_COLUMNS):
        raise OptionError(
            f"Unknown cell {only!r} of the matrix.",
            evidence=[f"rows: {', '.join(QWEN3_MOE_ROWS)}", f"columns: {', '.join(QWEN3_MOE_COLUMNS)}"],
            next_step="Write SOURCE->TARGET, in quotes; * matches any.",
        )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
        found = list(qwen3_moe_round_trips(Path(directory), chosen))
    wrong = [hop for hop in found if not hop.equal]
    if only is None:
        _write(recipe, found, documents / stem)
    if as_json:
        output.print_json({"cells": found, "wrong": [f"{hop.source}{ARROW}{hop.target}" for hop in wrong]})
    else:
        seconds = time.monotonic() - started
        print(f"{recipe.title}: {len(found) - len(wrong)} of {len(found)} cells bitwise equal, {seconds:.0f} s.")
        for hop in wrong:
            print(f"WRONG: {hop.source}{ARROW}{hop.target}: {hop.differences[0]}")
    return 1 if wrong else 0


def _write(recipe: SimulatedRecipe, found: Sequence[RoundTrip], stem: Path) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    cells = {(hop.source, hop.target): EQUAL if hop.equal else f"**{WRONG}**" for hop in found}
    equal = sum(hop.equal for hop in found)
    lines = ["| from \\ to | " + " | ".join(QWEN3_MOE_COLUMNS) + " |", "|---" * (len(QWEN3_MOE_COLUMNS) + 1) + "|"]
    for row in QWEN3_MOE_ROWS:
        lines.append(f"| **{row}** | " + " | ".join(cells[row, column] for column in QWEN3_MOE_COLUMNS) + " |")
    parts = [
        f"# {recipe.title}: any layout to any layout",
        textwrap.fill(" ".join(recipe.text.split()), 120),
        f"* {equal} of {len(found)} cells: every tensor md5-equal, A to B and back to A, and the exports of A and B "
        f"too ({found[0].tensors} tensors a cell: weights, master weights, moments, powers of beta, averages).",
        "\n".join(lines),
        f"![The same as a picture]({stem.name}.png)",
        textwrap.fill(" ".join(_LEGEND.split()), 120)
        + f"\n`paddleformers-fc matrix recipes/verification/{stem.name}.yaml` writes this page.",
    ]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    texts = [[cells[row, column].strip("*") for column in QWEN3_MOE_COLUMNS] for row in QWEN3_MOE_ROWS]
    title = f"{recipe.title}: md5 of every tensor and of the export, row to column and back"
    draw(title, list(QWEN3_MOE_ROWS), list(QWEN3_MOE_COLUMNS), texts, stem.with_suffix(".png"))
