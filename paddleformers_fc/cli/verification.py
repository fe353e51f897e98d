"""``verify`` and ``doctor``: print the checks of a checkpoint, or a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc.execute.verify import Verification
from paddleformers_fc.formats.checkpoint import UNCOMPARED, Check

if TYPE_CHECKING:
    from rich.console import Console

    from paddleformers_fc.trainer.diagnosis import Diagnosis  # Importing it looks up the installed libraries.


def show(outcome: Verification, console: Console) -> None:
    """Print a line per check, and the verdict."""
    from rich.text import Text

    console.print(Text(outcome.path, "bold"))
    # The error that follows lists the faults.
    shown = [one if one.passed else msgspec.structs.replace(one, detail="see below") for one in outcome.checks]
    show_checks(shown, console, outcome.not_checked)
    for line in outcome.cannot_be_checked:
        console.print(Text(f"  cannot be checked: {line}"), soft_wrap=True)
    if outcome.below:
        console.print(Text("  below it, and not checked:"))
    for line in outcome.below:
        console.print(Text(f"    {line}"), soft_wrap=True)
    console.print(Text.assemble(_verdict(outcome), f": level {outcome.level}, {outcome.seconds:.2f} s"))


def show_checks(checks: Iterable[Check], console: Console, not_checked: Iterable[str] = ()) -> None:
    """Print a line per check and its result."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for check in checks:
        mark = Text("  OK", "green") if check.passed else Text("  FAILED", "bold red")
        table.add_row(mark, check.name, Text(check.detail))
    for name in not_checked:
        table.add_row(Text("  -", "dim"), name, Text("not checked", "dim"))
    console.print(table)


def _verdict(outcome: Verification) -> tuple[str, str]:
    if outcome.passed and any(line.startswith(UNCOMPARED) for line in outcome.cannot_be_checked):
        return "no fault found, but bytes could not be compared", "bold yellow"
    if outcome.passed:
        return "OK", "bold green"
    if all(check.passed for check in outcome.checks):
        return "could not be checked", "bold yellow"
    return "FAILED", "bold red"


def show_diagnosis(found: Diagnosis, console: Console) -> None:
    """Print versions, a line per check, checkpoints that a resume skips, and known faults of the installed versions."""
    from rich.text import Text

    versions = [f"{one.name} {one.version or 'not installed'}" for one in found.packages]
    console.print(Text(", ".join(versions)), soft_wrap=True)
    if found.path:
        console.print(Text(found.path, "bold"))
    show_checks(found.checks, console)
    for line in found.skipped:
        console.print(Text(f"  skipped: {line}"), soft_wrap=True)
    if found.known_faults:
        console.print("  faults of the installed versions that paddleformers-fc avoids (docs/results/guarantees.md):")
    for fault in found.known_faults:
        console.print(Text(f"    {fault.id}  {fault.package}: {fault.what}", "dim"), soft_wrap=True)
    console.print(Text("OK", "bold green") if found.passed else Text("FAILED", "bold red"))
