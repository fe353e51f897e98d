"""``rederive``: the outcome as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddleformers_fc.execute.rederive import Rederivation
from paddleformers_fc.text import count_text

if TYPE_CHECKING:
    from rich.console import Console


def show(found: Rederivation, console: Console) -> None:
    """Print the outcome."""
    from rich.text import Text

    if not found.written:
        console.print(Text(f"{found.path}: nothing to change: the stored mapping fits the model's description", "bold"))
        return
    settled = ", ".join(f"{key}={str(value).lower()}" for key, value in found.settled.items())
    console.print(Text(f"{found.path}: the mapping was derived again and stored", "bold"))
    console.print(Text(f"  model     {settled}"))
    console.print(Text(f"  changed   {count_text(found.changed, 'place')} of the old mapping"))
