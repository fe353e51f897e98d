"""Progress of long operations on the error stream, after two seconds: a bar on a terminal, lines elsewhere.

The bar shows bytes, rate and time left. The lines show the total at the start, the progress every ten seconds, and
bytes, seconds and rate at the end. Operations on few bytes print no lines, because on a busy machine they can take
seconds too. Training logs beginning and end itself (:func:`shown_in_training`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from paddleformers_fc import output
from paddleformers_fc.storage.progress import Meter, measured
from paddleformers_fc.text import rate_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 2.0
"""Seconds after which an operation shows its progress."""

LEAST_BYTES = 64 << 20
"""Without a terminal, operations on fewer bytes print no lines."""

INTERVAL = 10.0
"""Seconds between lines without a terminal."""

_REFRESH = 0.2


@contextmanager
def shown(doing: str, console: Console | None, has_ends: bool = True) -> Iterator[Meter]:
    """Context manager that shows the progress of an operation.

    Args:
        doing: the text, such as ``exporting checkpoint-3``.
        console: the console of a terminal; None without a terminal.
        has_ends: whether to print a first and a last line without a terminal.
    """
    meter, ended = Meter(), threading.Event()
    show = _Lines(doing, meter, has_ends) if console is None else _Bar(doing, meter, console)
    ticker = threading.Thread(target=_tick, args=(show, ended), name="flex-progress", daemon=True)
    with measured(meter):
        ticker.start()
        try:
            yield meter
        finally:
            ended.set()
            ticker.join()
            show.close()


@contextmanager
def working(doing: str) -> Iterator[None]:
    """Context manager that shows the progress of an operation on the error stream.

    Args:
        doing: the text, such as ``reading checkpoint-3``.
    """
    with shown(doing, output.console(stderr=True) if sys.stderr.isatty() else None):
        yield


def shown_in_training(doing: str, is_shown: bool) -> AbstractContextManager[object]:
    """Return a context manager that shows a bar on a terminal, and a line every ten seconds elsewhere.

    Args:
        doing: the text, such as ``saving checkpoint-3``.
        is_shown: whether this process shows progress; only one rank does.
    """
    console = output.console(stderr=True) if sys.stderr.isatty() else None
    return shown(doing, console, has_ends=False) if is_shown else nullcontext()


def _tick(show: _Bar | _Lines, ended: threading.Event) -> None:
    if not ended.wait(PATIENCE):
        show.begin()
    while not ended.wait(_REFRESH):
        show.refresh()


class _Bar:
    """A spinner, replaced by a bar once bytes are counted. Both disappear at the end."""

    def __init__(self, doing: str, meter: Meter, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._meter, self._is_begun = meter, False
        self._status = console.status(f"{doing} …")
        text = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(f"{doing} …", total=None)
        self._status.start()

    def begin(self) -> None:
        """Replace the spinner by the bar if bytes are counted."""
        if self._meter.expected and not self._is_begun:
            self._is_begun = True
            self._status.stop()
            self._bar.start()

    def refresh(self) -> None:
        """Update the bar."""
        self.begin()
        self._bar.update(self._task, total=self._meter.expected, completed=self._meter.done)

    def close(self) -> None:
        """Remove the spinner and the bar."""
        self._status.stop()
        self._bar.stop()


class _Lines:
    """Prints a line every ten seconds; with ``has_ends`` also a first and a last line."""

    def __init__(self, doing: str, meter: Meter, has_ends: bool) -> None:
        self._doing, self._meter, self._has_ends = doing, meter, has_ends
        self._started, self._is_begun = time.monotonic(), not has_ends
        self._due = self._started + INTERVAL

    def begin(self) -> None:
        """Print the first line if enough bytes are expected."""
        if self._meter.expected >= LEAST_BYTES and not self._is_begun:
            self._is_begun = True
            sys.stderr.write(f"{self._doing}: {size_text(self._meter.expected)}\n")

    def refresh(self) -> None:
        """Print the first line once enough bytes are expected, and further lines when they are due."""
        self.begin()
        if self._is_begun and time.monotonic() >= self._due:
            self._due += INTERVAL
            self._print(f"{size_text(self._meter.done)} of {size_text(self._meter.expected)}")

    def close(self) -> None:
        """Print the last line."""
        if self._is_begun and self._has_ends:
            self._print(size_text(self._meter.done))

    def _print(self, count: str) -> None:
        seconds = time.monotonic() - self._started
        sys.stderr.write(f"{self._doing}: {count} in {seconds:.2f} s, {rate_text(self._meter.done, seconds)}\n")
