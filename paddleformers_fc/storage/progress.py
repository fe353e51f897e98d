"""Progress of the running operation: bytes done and bytes expected.

Code that reads or writes many bytes calls :func:`expect` before and :func:`advance` after each piece, from any thread.
Both do nothing unless progress is displayed (:func:`measured`). A process displays one operation at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Meter:
    """Counts bytes.

    Attributes:
        expected: bytes announced so far; later phases of an operation may add more.
        done: bytes done.
    """

    def __init__(self) -> None:
        self.expected = self.done = 0
        self._lock = threading.Lock()

    def add(self, expected: int, done: int) -> None:
        """Add to both counts."""
        with self._lock:
            self.expected += expected
            self.done += done


_running: Meter | None = None


@contextmanager
def measured(meter: Meter) -> Iterator[None]:
    """Context manager that counts bytes in a meter."""
    global _running
    before, _running = _running, meter
    try:
        yield
    finally:
        _running = before


def is_measured() -> bool:
    """Return whether bytes are counted, so that callers can skip computing the expected number."""
    return _running is not None


def expect(count: int) -> None:
    """Announce bytes."""
    if _running is not None:
        _running.add(count, 0)


def advance(count: int) -> None:
    """Report bytes that are done."""
    if _running is not None:
        _running.add(0, count)
