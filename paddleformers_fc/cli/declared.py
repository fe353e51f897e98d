"""``families``: the declared families and their verification, as text."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from paddleformers_fc.families.evidence import FamilyFacts, FamilyTable
from paddleformers_fc.text import count_text

if TYPE_CHECKING:
    from rich.console import Console

HEADINGS = ("family", "classes", "mapping", "logits compared", "layouts", "note")

_LEGEND = (
    "logits compared: with those of Transformers, for tiny checkpoints, at degrees of tensor parallelism (TP).",
    "layouts: a cell is a pair of layouts, of which one has resumed what the other saved.",
    "mapping: proved, and resumed under other layouts by trained models on real ranks, or by simulated ranks.",
)


def row(one: FamilyFacts) -> tuple[str, ...]:
    """Return the texts of a family under :data:`HEADINGS`."""
    degrees = ", ".join(f"TP {degree}" for degree in one.degrees)
    compared = f"{count_text(one.fixtures, 'checkpoint')}, {degrees}" if one.fixtures else ""
    return one.family, ", ".join(one.classes), one.verified, compared, one.layouts, one.note


def show(found: FamilyTable, console: Console) -> None:
    """Print a row per family, then the notes; without a terminal in 80 columns or those of ``COLUMNS``."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS[:-1]:
        whole = heading in ("family", "classes", "mapping")
        table.add_column(heading, style="cyan" if heading == "family" else None, no_wrap=whole)
    for one in found.families:
        name, classes, *texts, _ = row(one)
        table.add_row(name, classes.replace(", ", ",\n"), *texts)
    width = None if console.is_terminal else shutil.get_terminal_size().columns
    console.print(table, width=width)
    for one in found.families:
        if one.note:
            console.print(Text(f"  {one.family}: {one.note}"), width=width)
    for line in _LEGEND:
        console.print(Text(line), width=width)
