"""``aoa``: statements as text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paddleformers_fc.formats.aoa_statements import StatementList, sizes_text

if TYPE_CHECKING:
    from rich.console import Console


def show(found: StatementList, console: Console) -> None:
    """Print the statements, one per line."""
    from rich.text import Text

    if found.toy_sizes is not None:
        sys.stderr.write(f"Statements for the sizes of a toy: {sizes_text(found.toy_sizes)}\n")
    for statement in found.aoa_statements:
        console.print(Text(statement), soft_wrap=True)
