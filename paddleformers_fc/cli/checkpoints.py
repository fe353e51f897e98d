"""``list`` and ``clean``: the checkpoints of an output directory, and leftovers of interrupted saves, as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paddleformers_fc.execute.output_directory import Cleaned, LeftoverFacts, OutputFacts, directories_below
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.text import count_text, size_text
from paddleformers_fc.trainer.lineage import degrees_text

if TYPE_CHECKING:
    from rich.console import Console


def show_cleaned(found: Cleaned, console: Console) -> None:
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


def show(found: OutputFacts, console: Console) -> None:
    """Print a row per checkpoint, the reason below one that is not whole, and the leftovers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(found.path, "bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("checkpoint", style="cyan")
    for heading in ("step", "ranks", "layout", "size", "saved (UTC)", "whole"):
        table.add_column(heading, justify="right" if heading in ("step", "ranks", "size") else "left")
    for one in found.checkpoints:
        state = Text("FAILED", "bold red") if one.fault else Text("OK", "green")
        step, ranks = "" if one.step is None else f"{one.step:,}", str(one.world_size or "")
        when = one.time.replace("T", " ").removesuffix("Z")
        layout = degrees_text(one.parallel) if one.world_size else ""
        table.add_row(one.name, step, ranks, layout, size_text(one.bytes), when, state)
    if found.checkpoints:
        console.print(table)
    for one in found.checkpoints:
        if one.fault:
            console.print(Text(f"  {one.name}: {one.fault}"), soft_wrap=True)
    if found.leftovers:
        console.print("  leftovers (paddleformers-fc clean removes those that you confirm):")
        show_leftovers(found.leftovers, console)
    whole = sum(not one.fault for one in found.checkpoints)
    console.print(
        f"{count_text(len(found.checkpoints), 'checkpoint')}, {whole} whole, "
        f"{size_text(sum(one.bytes for one in found.checkpoints))}; {count_text(len(found.leftovers), 'leftover')}"
    )
    below = [] if found.checkpoints else directories_below(Path(found.path))
    if below:
        console.print("Directories below that contain checkpoints; list one of them:")
        for name in fold(below):
            console.print(Text(f"  {name}"), soft_wrap=True)
