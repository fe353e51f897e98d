"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.harness.clocks import has_ended
from tests.harness.limits import LIMIT


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return as soon as a condition holds; fail when it does not within the suite's limit."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.01)


def pause() -> None:
    """Let others run for a moment; what a test finds must not depend on how long it is."""
    time.sleep(0.02)


def wait_for_file(path: Path) -> str:
    """The content of a file as soon as it exists."""
    wait_until(path.exists, f"{path} comes")
    return path.read_text()


def wait_for_end(pid: int) -> None:
    """Return as soon as a process has ended."""
    wait_until(lambda: has_ended(pid), f"process {pid} ends")


def reached(start: Callable[[float], object], place: Path) -> None:
    """Start something with a deadline, and again with twice the time until it has come to where it is to be stopped.

    Args:
        start: what to start, given its deadline in seconds.
        place: the file that it makes when it has come there.
    """
    seconds = 1.0
    while not place.exists():
        assert seconds < LIMIT, f"{place} never came"
        start(seconds)
        seconds *= 2
