"""Tables of the commands, as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(first: str, headings: Iterable[str], left: Collection[str] = ()) -> Table:
    """Return a table without rows.

    Args:
        first: the heading of the first column.
        headings: of the others, whose cells are numbers.
        left: headings of cells that are text.
    """
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD)
    found.add_column(first, style="cyan")
    for heading in headings:
        found.add_column(heading, justify="left" if heading in left else "right")
    return found


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of facts, each with its label."""
    from rich.table import Table

    found = Table.grid(padding=(0, 2))
    found.add_column(style="dim")
    found.add_column()
    for label, value in rows:
        found.add_row(f"  {label}", value)
    return found
