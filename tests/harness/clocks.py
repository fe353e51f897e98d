"""Clocks for tests of timeouts: time passes only while every living rank waits, so that a slow machine changes nothing.

Ranks wait for keys of a store by them instead of the machine's clock. A rank that works, reads or
is not scheduled does not wait, and holds the clock; so a rank is missing in a test if and only if it never comes.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REAL_SECONDS = 0.001


class ThreadClock:
    """The clock of ranks that are threads of one process.

    Args:
        ranks: how many there are; each calls :meth:`sleep` in a thread of its own, and says when it has ended.
        tick: seconds by which time moves when every rank has slept.
    """

    def __init__(self, ranks: int, tick: float = 0.001) -> None:
        self._tick = tick
        self._now = 0.0
        self._living = ranks
        self._asleep: set[int] = set()
        self._moved = threading.Condition()

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Count as waiting. Returns before ``seconds`` are over, as a polling caller may."""
        with self._moved:
            self._asleep.add(threading.get_ident())
            if not self._move():
                self._moved.wait(_REAL_SECONDS)

    def wait(self, seconds: float) -> None:
        """Sleep until ``seconds`` are over."""
        end = self._now + seconds
        while self._now < end:
            self.sleep(end - self._now)

    @contextmanager
    def away(self) -> Iterator[None]:
        """While this lasts the rank counts as dead: time does not wait for it."""
        self.leave()
        yield
        with self._moved:
            self._living += 1

    def leave(self) -> None:
        """The rank has ended."""
        with self._moved:
            self._living -= 1
            self._asleep.discard(threading.get_ident())
            self._move()

    def _move(self) -> bool:
        if len(self._asleep) < self._living:
            return False
        self._now += self._tick
        self._asleep.clear()
        self._moved.notify_all()
        return True


class ProcessClock:
    """One rank's clock in a job whose ranks are processes of this machine.

    A rank counts its own ticks and never gets further ahead of a living one than by one.

    Args:
        path: a file that all ranks of the job share; made where it is missing.
        rank: this rank.
        ranks: how many there are. One that has not made its clock yet counts as living.
        tick: seconds.
    """

    _ROW = struct.Struct("=qq")  # process id, ticks

    def __init__(self, path: Path, rank: int, ranks: int, tick: float = 1.0) -> None:
        self._tick, self._ticks = tick, 0
        self._rank, self._others = rank, [other for other in range(ranks) if other != rank]
        size = ranks * self._ROW.size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, size)
        self._board = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self._write()

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self._ticks * self._tick

    def sleep(self, seconds: float) -> None:
        """Wait, and count a tick where no living rank has counted fewer."""
        time.sleep(_REAL_SECONDS)
        if all(ticks >= self._ticks or _has_ended(pid) for pid, ticks in map(self._read, self._others)):
            self._ticks += 1
            self._write()

    def _read(self, rank: int) -> tuple[int, int]:
        pid, ticks = self._ROW.unpack_from(self._board, rank * self._ROW.size)
        return pid, ticks

    def _write(self) -> None:
        self._ROW.pack_into(self._board, self._rank * self._ROW.size, os.getpid(), self._ticks)


def _has_ended(pid: int) -> bool:
    return pid != 0 and has_ended(pid)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; one whose parent has not asked how it ended yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def keep_time(directory: Path, ranks: int | None = None) -> None:
    """Let the time in which ranks wait for each other pass only while all that live wait, or the first ``ranks``."""
    from paddleformers_fc.distributed import store_client

    rank, ranks = int(os.environ["PADDLE_TRAINER_ID"]), ranks or int(os.environ["PADDLE_TRAINERS_NUM"])
    clock, is_readable = ProcessClock(directory / "clock", rank, ranks), store_client._is_readable

    def in_time(connection: socket.socket, seconds: float) -> bool:
        end = clock.monotonic() + seconds
        while not is_readable(connection, 0):
            if clock.monotonic() >= end:
                return False
            clock.sleep(end - clock.monotonic())
        return True

    store_client._is_readable = in_time  # This process ends with the job.
