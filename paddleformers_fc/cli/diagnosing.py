"""``doctor``: the diagnosis as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddleformers_fc.cli.verification import show_checks
from paddleformers_fc.trainer.diagnosis import Diagnosis

if TYPE_CHECKING:
    from rich.console import Console


def show(found: Diagnosis, console: Console) -> None:
    """Print versions, a line per check, what a resume skips, and the known faults of the installed versions."""
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
