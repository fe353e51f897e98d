"""Threads that do jobs, with the files they have open and their scratch memory.

A *job* is a few MiB of work that depends on no other; a *task* is some jobs that are worth drawing together. Threads
draw tasks from one stream until it is empty, the caller is one of them, and the first failure, an interrupt too, ends
the others after the task they are at. What jobs there are is said in :mod:`paddleformers_fc.execute.read_jobs`.

Memory: ``scratch_bytes`` for each thread, all together never more than ``staging_memory_bytes``. The stream is made as
it is drawn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import numpy as np

from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.identity import Identities
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.prefetch import ExpectedRange
from paddleformers_fc.storage.ranges import NO_IDENTITIES, RangeReader
from paddleformers_fc.storage.regions import (
    DEFAULT_STAGING_MEMORY_BYTES,
    HOT_BYTES,
    MAX_OVER_READ,
    Region,
    Workspace,
    ranges_of,
    read_region,
)

_SMALLEST_SCRATCH = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class ReadOptions:
    """How reads are carried out.

    Args:
        threads: how many read at a time.
        staging_memory_bytes: bound of the memory that transposes, casts and host copies pass through, of all threads.
        max_over_read: bound on bytes read over bytes needed, where short runs are read with the gaps between them.
        once: whether what several ranks want is read by one of them, which hands it to the others.
    Raises:
        OptionError: a bound that nothing can be read within.
    """

    threads: int = 4
    staging_memory_bytes: int = DEFAULT_STAGING_MEMORY_BYTES
    max_over_read: float = MAX_OVER_READ
    once: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1 or self.staging_memory_bytes < 1 or self.max_over_read < 1:
            raise OptionError(
                "Nothing can be read with these options.",
                evidence=[
                    f"threads: {self.threads}",
                    f"staging_memory_bytes: {self.staging_memory_bytes}",
                    f"max_over_read: {self.max_over_read}",
                ],
                next_step="Each of them is 1 or more.",
            )

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of one thread."""
        return max(_SMALLEST_SCRATCH, min(HOT_BYTES, self.staging_memory_bytes // self.threads))


DEFAULT_OPTIONS = ReadOptions()


class ReadJob(Protocol):
    """A piece of work that any thread can do at any time."""

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """Do it; bytes read from storage."""


ReadTask = list[ReadJob]


class StopLatch:
    """Lets threads in until it is shut; who closes it waits until the last has left.

    Attributes:
        shut: whether no more may come in, and who is in is to leave.
    """

    def __init__(self) -> None:
        self.shut = False
        self._inside = 0
        self._change = threading.Condition()

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Inside, with the right to work, or not if the gate was shut before."""
        with self._change:
            may = not self.shut
            self._inside += may
        try:
            yield may
        finally:
            with self._change:
                self._inside -= may
                self._change.notify_all()

    def close(self) -> None:
        """Shut the gate, and wait until nobody is inside."""
        with self._change:
            self.shut = True
            self._change.wait_for(lambda: self._inside == 0)


def run_workers(
    pool: ThreadPoolExecutor, threads: int, stream: Iterator[_T], work: Callable[[Callable[[], _T | None]], int]
) -> int:
    """Let threads draw from one stream until it is empty; the caller is one of them, and the only one for one thing.

    Args:
        pool: where the other threads come from.
        threads: how many work, the caller among them.
        stream: what is drawn; made as it is drawn, by one thread at a time.
        work: what each thread does: it calls what it is given for the next thing, until that is None.
    Returns:
        the sum of what they return.

    Raises:
        Exception: of the first thread that failed. No other has begun another thing after that.
    """
    first = list(islice(stream, 2))
    stream = chain(first, stream)
    if threads == 1 or len(first) < 2:
        return work(lambda: next(stream, None))
    lock, latch = threading.Lock(), StopLatch()

    def draw() -> _T | None:
        with lock:
            return None if latch.shut else next(stream, None)

    def other() -> int:
        with latch.entered() as may:
            try:
                return work(draw) if may else 0
            except BaseException:
                # An interrupt too must stop the other threads; it is raised again where results are collected.
                latch.shut = True
                raise

    futures: list[Future[int]] = []
    try:
        for _ in range(threads - 1):
            futures.append(pool.submit(other))
        # This thread is one of them, and waits for none to be started. It passes no gate: its end is seen here.
        total = work(draw)
    finally:
        # An interrupt, even one between the start of a thread and our knowing of it, ends the work after what is
        # under way: nothing is written after this returns.
        latch.close()
    return total + sum(future.result() for future in futures if not future.cancel())


class ReadPool:
    """Threads with their open files and scratch memory; a context manager that joins them and closes everything.

    Args:
        options: threads and staging.
        identities: which files were checked; another one under a path is refused.
    """

    def __init__(self, options: ReadOptions = DEFAULT_OPTIONS, identities: Identities = NO_IDENTITIES) -> None:
        self.options = options
        self._reader = RangeReader(identities=identities, threads=options.threads)
        self._pool = ThreadPoolExecutor(options.threads, "flex-read")
        self._idle: list[Workspace] = []

    def run(self, tasks: Iterator[ReadTask]) -> int:
        """Do all tasks, in any order; bytes read from storage. One task is done here, for it is not worth a thread.

        Raises:
            Corrupt, StorageError: of the first thread that failed. No other has begun a task after that.
        """
        return run_workers(self._pool, self.options.threads, tasks, self._work)

    def expect(self, regions: Iterable[Region]) -> None:
        """Announce what will be read, so that the small reads of a remote directory come in few requests.

        Args:
            regions: all that will be read, about in this order; not looked at beyond one that is not remote.
        """
        wanted: dict[AnyPath, list[ExpectedRange]] = {}
        for region in regions:
            if not isinstance(region.path, RemotePath):
                return
            wanted.setdefault(region.path, []).extend(ranges_of(region))
        for path, found in wanted.items():
            self._reader.expect(path, found)

    def begin(self, region: Region, out: np.ndarray[Any, Any]) -> Future[int]:
        """Start to read a region into an array of its shape, in one thread; bytes read from storage."""
        return self._pool.submit(self._read, region, out)

    def _read(self, region: Region, out: np.ndarray[Any, Any]) -> int:
        with self._workspace() as workspace:
            return read_region(self._reader, region, out, workspace, self.options.max_over_read)

    @contextmanager
    def _workspace(self) -> Iterator[Workspace]:
        """A workspace that no other thread has."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace(self.options.scratch_bytes)
        try:
            yield workspace
        finally:
            self._idle.append(workspace)

    def _work(self, draw: Callable[[], ReadTask | None]) -> int:
        total = 0
        with self._workspace() as workspace:
            while (task := draw()) is not None:
                for job in task:
                    total += job.read(self._reader, workspace)
        return total

    def close(self) -> None:
        """Join the threads and give everything back."""
        self._pool.shutdown()
        for workspace in self._idle:
            workspace.close()
        self._reader.close()

    def __enter__(self) -> ReadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close()
        if kind is None:
            self._reader.refuse_replaced()
