"""``families``: the declared families and what is verified of each, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddleformers_fc.families.evidence import FamilyFacts, FamilyTable
from paddleformers_fc.text import count_text

if TYPE_CHECKING:
    from rich.console import Console

HEADINGS = ("family", "classes", "mapping", "logits compared", "layouts", "note")


def row(one: FamilyFacts) -> tuple[str, ...]:
    """Return the texts of a family under :data:`HEADINGS`."""
    degrees = ", ".join(f"TP {degree}" for degree in one.degrees)
    compared = f"{count_text(one.fixtures, 'checkpoint')}, {degrees}" if one.fixtures else ""
    return one.family, ", ".join(one.classes), one.verified, compared, one.layouts, one.note


def show(found: FamilyTable, console: Console) -> None:
    """Print a row per family."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    for heading in HEADINGS:
        table.add_column(heading, style="cyan" if heading == "family" else None)
    for one in found.families:
        table.add_row(*row(one))
    console.print(table)
