"""``derive``: a derived mapping as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddleformers_fc.text import count_text
from paddleformers_fc.verification.derivation.from_weights import DerivedModel

if TYPE_CHECKING:
    from rich.console import Console


def show(found: DerivedModel, console: Console) -> None:
    """Print the derivation."""
    from rich.text import Text

    console.print(Text(f"{found.path}: {count_text(found.tensors, 'tensor')}, proved", "bold"))
    for reason, count in found.reasons.items():
        console.print(Text(f"  {count:6}  {reason}"))
    for note in found.notes:
        console.print(Text(f"  {note}", "dim"))
    for line in found.statements:
        console.print(Text(line), soft_wrap=True)
    if found.family is not None:
        console.print(Text(f"The family is in {found.family}: look at lengths in digits, and at its conditions."))
