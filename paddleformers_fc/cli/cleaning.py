"""``clean``: leftovers of interrupted saves as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddleformers_fc.execute.output_directory import Cleaned, LeftoverFacts
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console


def show(found: Cleaned, console: Console) -> None:
    """Print a line per directory, and the sum."""
    from rich.text import Text

    console.print(Text(found.path, "bold"))
    show_leftovers(found.left, console)
    for one in found.removed:
        console.print(f"  removed  {one.name}  {size_text(one.bytes)}")
    size = size_text(sum(one.bytes for one in found.removed))
    summary = f": {count_text(len(found.removed), 'leftover')}, {size}; {len(found.left)} left"
    console.print(Text.assemble(("removed", "bold green"), summary))


def show_leftovers(found: list[LeftoverFacts], console: Console) -> None:
    """Print every leftover with its size and its reason."""
    for one in found:
        console.print(f"  {one.name}  {size_text(one.bytes)}: {one.why}")
