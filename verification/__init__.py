"""What verifies the package and is not part of its wheel: matrices, demo, simulated ranks, counts, the fork server."""

from __future__ import annotations

import sys
from collections.abc import Callable

from paddleformers_fc.errors import FlexError


def exit_code(work: Callable[[], int]) -> int:
    """Return the exit code of a tool; 2 after an error of this package, which is printed."""
    try:
        return work()
    except FlexError as error:
        sys.stderr.write(f"{error.render()}\n")
        return 2
