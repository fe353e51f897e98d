"""``verify``: the checks of a checkpoint as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddleformers_fc.execute.verify import Verification

if TYPE_CHECKING:
    from rich.console import Console


def show(outcome: Verification, console: Console) -> None:
    """Print a line per check, and the verdict."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(outcome.path, "bold"))
    table = Table.grid(padding=(0, 2))
    for check in outcome.checks:
        mark = Text("  OK", "green") if check.passed else Text("  FAILED", "bold red")
        # The error below lists the faults once.
        table.add_row(mark, check.name, check.detail if check.passed else "see below")
    for name in outcome.not_checked:
        table.add_row(Text("  -", "dim"), name, Text("not checked", "dim"))
    console.print(table)
    for line in outcome.cannot_be_checked:
        console.print(Text(f"  cannot be checked: {line}"), soft_wrap=True)
    if outcome.below:
        console.print(Text("  below it, and not checked:"))
    for line in outcome.below:
        console.print(Text(f"    {line}"), soft_wrap=True)
    console.print(Text.assemble(_verdict(outcome), f": level {outcome.level}, {outcome.seconds:.2f} s"))


def _verdict(outcome: Verification) -> tuple[str, str]:
    if outcome.passed:
        return "OK", "bold green"
    if all(check.passed for check in outcome.checks):
        return "could not be checked", "bold yellow"
    return "FAILED", "bold red"
