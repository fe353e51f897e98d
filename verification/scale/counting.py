"""Count the system calls, messages and processor time of ranks that are threads of this process.

A thread that a rank starts is charged to the same rank. Opens, listings and connections are counted by an audit hook,
which stays in the process and does nothing outside of a measurement. Stats and reads have no audit event; their
functions in ``os`` are wrapped while :func:`counted_calls` runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

OPENS, STATS, LISTINGS, CONNECTIONS = "opens", "stats", "listings", "connections"
READ, PROCESSOR, MEMORY = "bytes read", "processor seconds", "peak memory"

_EVENTS = {"open": OPENS, "os.listdir": LISTINGS, "os.scandir": LISTINGS, "socket.connect": CONNECTIONS}
_lock = threading.Lock()
_charged = threading.local()


class Meter(dict[str, float]):
    """What one rank has done."""

    def add(self, name: str, amount: float) -> None:
        """Add to a count."""
        with _lock:
            self[name] = self.get(name, 0) + amount

    def raise_to(self, name: str, amount: float) -> None:
        """Keep the highest of several values."""
        with _lock:
            self[name] = max(self.get(name, 0), amount)


def current() -> Meter:
    """Return the meter of the rank that this thread works for; a new one outside of a measurement."""
    meter: Meter | None = getattr(_charged, "meter", None)
    return Meter() if meter is None else meter


@contextlib.contextmanager
def charged(meter: Meter | None) -> Iterator[None]:
    """Context manager that charges the work of this thread to a rank; with None, to no rank."""
    outer, started = getattr(_charged, "meter", None), time.thread_time()
    _charged.meter = meter
    try:
        yield
    finally:
        _charged.meter = outer
        seconds = time.thread_time() - started
        for one, sign in ((meter, 1), (outer, -1)):
            if one is not None:
                one.add(PROCESSOR, sign * seconds)


@contextlib.contextmanager
def counted_calls() -> Iterator[None]:
    """Context manager around measurements."""
    _add_audit_hook()
    with (
        mock.patch.object(os, "stat", _counted_stat(os.stat)),
        mock.patch.object(os, "lstat", _counted_stat(os.lstat)),
        mock.patch.object(os, "preadv", _counted_read(os.preadv)),
        mock.patch.object(threading.Thread, "start", _inheriting(threading.Thread.start)),
    ):
        yield


@functools.cache
def _add_audit_hook() -> None:
    def hook(event: str, _: object) -> None:
        if event in _EVENTS:
            meter = getattr(_charged, "meter", None)
            if meter is not None:
                meter.add(_EVENTS[event], 1)

    sys.addaudithook(hook)


def _counted_stat(native: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    def stat(*args: Any, **kwargs: Any) -> os.stat_result:
        current().add(STATS, 1)
        return native(*args, **kwargs)

    return stat


def _counted_read(native: Callable[..., int]) -> Callable[..., int]:
    def preadv(*args: Any) -> int:
        length = native(*args)
        current().add(READ, length)
        return length

    return preadv


def _inheriting(native: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def start(thread: threading.Thread) -> None:
        meter, run = getattr(_charged, "meter", None), thread.run

        def charged_run() -> None:
            with charged(meter):
                run()

        if meter is not None:
            thread.run = charged_run  # type: ignore[method-assign]
        native(thread)

    return start


@contextlib.contextmanager
def peak_memory(meters: list[Meter]) -> Iterator[None]:
    """Context manager that charges the growth of the resident memory of this process to its ranks in equal parts."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Resets the peak.
    before = _status("VmRSS")
    yield
    for meter in meters:
        meter.raise_to(MEMORY, max(0, _status("VmHWM") - before) / len(meters))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
