"""``verify`` and ``doctor``: print the checks of a checkpoint, or a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc import output
from paddleformers_fc.execute.verify import Verification
from paddleformers_fc.formats.checkpoint import UNCOMPARED, Check

if TYPE_CHECKING:
    from paddleformers_fc.trainer.diagnosis import Diagnosis  # Importing it looks up the installed libraries.

_KNOWN_FAULTS = "  known faults of the installed versions, which paddleformers-fc avoids"


def show(outcome: Verification, console: output.Console) -> None:
    """Print a line per check, and the verdict."""
    console.print(outcome.path, style="bold")
    # The error that follows lists the faults.
    shown = [one if one.passed else msgspec.structs.replace(one, detail="see below") for one in outcome.checks]
    show_checks(shown, console, outcome.not_checked)
    for line in outcome.cannot_be_checked:
        console.print(f"  cannot be checked: {line}", soft_wrap=True)
    if outcome.below:
        console.print("  below it, and not checked:")
    for line in outcome.below:
        console.print(f"    {line}", soft_wrap=True)
    output.print_styled(console, _verdict(outcome), f": level {outcome.level}, {outcome.seconds:.2f} s")


def show_checks(checks: Iterable[Check], console: output.Console, not_checked: Iterable[str] = ()) -> None:
    """Print a line per check and its result."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for check in checks:
        mark = Text("  OK", "green") if check.passed else Text("  FAILED", "bold red")
        table.add_row(mark, check.name, check.detail)
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


def show_diagnosis(found: Diagnosis, console: output.Console) -> None:
    """Print versions, checks, checkpoints that a resume skips, and the number of known faults of the versions."""
    _show_checked(found, console)
    if found.known_faults:
        count = len(found.known_faults)
        console.print(f"{_KNOWN_FAULTS}: {count}; --all lists them", soft_wrap=True)
    _show_passed(found, console)


def show_all_of_diagnosis(found: Diagnosis, console: output.Console) -> None:
    """Print what :func:`show_diagnosis` prints, and the known faults."""
    _show_checked(found, console)
    if found.known_faults:
        console.print(f"{_KNOWN_FAULTS} (docs/results/guarantees.md):", soft_wrap=True)
    for fault in found.known_faults:
        console.print(f"    {fault.id}  {fault.package}: {fault.what}", style="dim", soft_wrap=True)
    _show_passed(found, console)


def _show_checked(found: Diagnosis, console: output.Console) -> None:
    versions = [f"{one.name} {one.version or 'not installed'}" for one in found.packages]
    console.print(", ".join(versions), soft_wrap=True)
    if found.path:
        console.print(found.path, style="bold")
    show_checks(found.checks, console)
    for line in found.skipped:
        console.print(f"  skipped: {line}", soft_wrap=True)


def _show_passed(found: Diagnosis, console: output.Console) -> None:
    output.print_styled(console, ("OK", "bold green") if found.passed else ("FAILED", "bold red"))
