"""A pool of threads that execute read jobs, with their open files and scratch memory.

A *job* is a few MiB of work that depends on no other (:mod:`.read_jobs`); a *task* is a batch of jobs. Threads take
tasks from one stream until it is empty; the calling thread is one of them. After the first error, or an interrupt, the
other threads stop once their current task is done.

Memory: ``scratch_bytes`` for each thread, at most ``staging_memory_bytes`` for all of them. The stream is lazy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import numpy as np

from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.prefetch import ExpectedRange
from paddleformers_fc.storage.ranges import NO_IDENTITIES, Identities, RangeReader
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
    """Options of reads.

    Args:
        threads: number of threads.
        staging_memory_bytes: maximum staging memory of all threads, used by transposes, casts and host copies.
        max_over_read: maximum ratio of bytes read to bytes needed, if short runs are read with the gaps between them.
        once: whether a range for several ranks is read by one of them and sent to the others.
    Raises:
        OptionError: a bound is below 1.
    """

    threads: int = 4
    staging_memory_bytes: int = DEFAULT_STAGING_MEMORY_BYTES
    max_over_read: float = MAX_OVER_READ
    once: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1 or self.staging_memory_bytes < 1 or self.max_over_read < 1:
            raise OptionError(
                "Invalid options of reads.",
                evidence=[
                    f"threads: {self.threads}",
                    f"staging_memory_bytes: {self.staging_memory_bytes}",
                    f"max_over_read: {self.max_over_read}",
                ],
                next_step="Set each of them to 1 or more.",
            )

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of one thread."""
        return max(_SMALLEST_SCRATCH, min(HOT_BYTES, self.staging_memory_bytes // self.threads))

    @property
    def host_copy_bytes(self) -> int:
        """Staging memory for host copies: all but the scratch memory of the threads."""
        return max(0, self.staging_memory_bytes - self.threads * self.scratch_bytes)


DEFAULT_OPTIONS = ReadOptions()


class ReadJob(Protocol):
    """Work that any thread can execute at any time."""

    def read(self, reader: RangeReader, workspace: Workspace) -> int:
        """Execute the job and return the bytes read from storage."""


ReadTask = list[ReadJob]


class StopLatch:
    """Admits threads until it is shut; closing it waits for the threads inside.

    Attributes:
        shut: whether no more threads are admitted, and those inside should stop.
    """

    def __init__(self) -> None:
        self.shut = False
        self._inside = 0
        self._change = threading.Condition()

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Enter; yield whether the thread may work, which it may not once the latch is shut."""
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
        """Shut the latch, and wait until no thread is inside."""
        with self._change:
            self.shut = True
            self._change.wait_for(lambda: self._inside == 0)


def run_workers(
    pool: ThreadPoolExecutor, threads: int, stream: Iterator[_T], work: Callable[[Callable[[], _T | None]], int]
) -> int:
    """Let threads take items from one stream until it is empty. A single item is processed by the caller alone.

    Args:
        pool: runs the other threads.
        threads: number of threads, the caller included.
        stream: the items; advanced by one thread at a time.
        work: run by each thread. It calls its argument for the next item, until that returns None.
    Returns:
        the sum of the results.

    Raises:
        Exception: of the first thread that failed. No other thread takes an item after that.
    """
    first = list(islice(stream, 2))
    stream = chain(first, stream)
    if threads == 1 or len(first) < 2:
        return work(lambda: next(stream, None))
    lock, latch = threading.Lock(), StopLatch()

    def take() -> _T | None:
        with lock:
            return None if latch.shut else next(stream, None)

    def other() -> int:
        with latch.entered() as may:
            try:
                return work(take) if may else 0
            except BaseException:
                # An interrupt too must stop the other threads; it is raised again where results are collected.
                latch.shut = True
                raise

    futures: list[Future[int]] = []
    try:
        for _ in range(threads - 1):
            futures.append(pool.submit(other))
        # This thread works too and does not wait for others to start. It bypasses the latch, so its end is detected
        # here.
        total = work(take)
    finally:
        # An interrupt, even one between the start of a thread and the append above, ends the work after the current
        # items: nothing is written after this returns.
        latch.close()
    return total + sum(future.result() for future in futures if not future.cancel())


def _ignore(count: int) -> None:
    """Count nothing."""


class ReadPool:
    """Threads with their open files and scratch memory; a context manager that joins them and closes everything.

    Args:
        options: threads and staging.
        identities: the identities of the checked files; another file under a path is refused.
    """

    def __init__(self, options: ReadOptions = DEFAULT_OPTIONS, identities: Identities = NO_IDENTITIES) -> None:
        self.options = options
        self._reader = RangeReader(identities=identities, threads=options.threads)
        self._pool = ThreadPoolExecutor(options.threads, "flex-read")
        self._idle: list[Workspace] = []

    def run(self, tasks: Iterator[ReadTask], advance: Callable[[int], object] = _ignore) -> int:
        """Execute all tasks in any order and return the bytes read from storage; a single task needs no thread.

        Args:
            tasks: the tasks.
            advance: receives the bytes that each task has read, from any thread.
        Raises:
            Corrupt, StorageError: of the first thread that failed. No other thread takes a task after that.
        """
        return run_workers(self._pool, self.options.threads, tasks, partial(self._work, advance))

    def expect(
        self, regions: Iterable[Region], also: Callable[[AnyPath], Iterable[ExpectedRange]] = lambda path: ()
    ) -> None:
        """Announce reads, so that the small reads of a remote directory become few requests.

        Args:
            regions: all regions that will be read, roughly in this order; the first local one ends the iteration.
            also: returns other ranges of a file that will be read.
        """
        wanted: dict[AnyPath, list[ExpectedRange]] = {}
        for region in regions:
            if not isinstance(region.path, RemotePath):
                return
            wanted.setdefault(region.path, []).extend(ranges_of(region))
        for path, found in wanted.items():
            self._reader.expect(path, [*found, *also(path)])

    def begin(self, region: Region, out: np.ndarray[Any, Any], before: Sequence[ReadJob] = ()) -> Future[int]:
        """Start to read a region into an array of its shape in one thread, after other jobs.

        Returns:
            bytes read from storage.
        """
        return self._pool.submit(self._read, region, out, before)

    def _read(self, region: Region, out: np.ndarray[Any, Any], before: Sequence[ReadJob]) -> int:
        with self._workspace() as workspace:
            count = sum(job.read(self._reader, workspace) for job in before)
            return count + read_region(self._reader, region, out, workspace, self.options.max_over_read)

    @contextmanager
    def _workspace(self) -> Iterator[Workspace]:
        """Yield a workspace that no other thread uses."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace(self.options.scratch_bytes)
        try:
            yield workspace
        finally:
            self._idle.append(workspace)

    def _work(self, advance: Callable[[int], object], take: Callable[[], ReadTask | None]) -> int:
        total = 0
        with self._workspace() as workspace:
            while (task := take()) is not None:
                count = sum(job.read(self._reader, workspace) for job in task)
                advance(count)
                total += count
        return total

    def close(self) -> None:
        """Join the threads and release all resources."""
        self._pool.shutdown()
        self._reader.close()

    def __enter__(self) -> ReadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close()
        if kind is None:
            self._reader.refuse_replaced()
