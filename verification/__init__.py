"""What verifies the package and is not part of its wheel: matrices, demo, simulated ranks, counts, the fork server."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paddleformers_fc.errors import FlexError

_MEMORY = Path("/dev/shm")


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Context manager around a temporary directory, in memory where the system has files there."""
    with tempfile.TemporaryDirectory(prefix="verification-", dir=_MEMORY if _MEMORY.is_dir() else None) as path:
        yield Path(path)


def exit_code(work: Callable[[], int]) -> int:
    """Return the exit code of a tool; 2 after an error of this package, which is printed."""
    try:
        return work()
    except FlexError as error:
        sys.stderr.write(f"{error.render()}\n")
        return 2
