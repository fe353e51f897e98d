"""Execute read operations: read each byte of a file once, hash this rank's blocks, and copy the bytes to memory.

A file is read in windows: its checksum blocks if some of them are compared, otherwise :data:`WINDOW_BYTES`. Any thread
can execute any window. It reads long runs directly into memory, and runs that are cast, transposed or short into an
image of the window; hashes a block while it is in the processor's cache; then copies parts of the image to memory.

Threads, including the caller, take windows from one stream until it is empty. After an error or an interrupt the
others stop once their current task is done. Each thread opens its own files, and compares the identity of a file when
it opens and before it closes it. Memory per thread: an image and as much scratch memory, 1 MiB each for a local file
and 8 MiB for a store, plus 8 MiB of answers. Requests to a store join ranges if the gap costs less than a request.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from paddleformers_fc.errors import FlexError
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.files import MAX_BUFFERS, OpenFile, memory_at, open_local, read_several
from paddleformers_fc.storage.identities import NO_IDENTITIES, Identities, check_unreplaced, check_unreplaced_meanwhile
from paddleformers_fc.storage.operations import Array, Operation, is_read_directly
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.progress import advance
from paddleformers_fc.storage.remote import RemoteFile, open_remote

DEFAULT_STAGING_MEMORY_BYTES = 64 << 20
"""Default bound on the staging memory of all threads together."""
IMAGE_BYTES = 1 << 20
"""Bytes of the image of a local file; a larger image would not stay in the processor's cache."""
WINDOW_BYTES = 8 << 20
"""Bytes of a window: large enough to make system calls and requests cheap, small enough to divide a tensor."""
GAP_BYTES = 256 << 10
"""Gaps up to this length are read as well: a store sends them in less time than another request takes."""
MAX_GAP_RATIO = 16.0
"""Maximum ratio of requested to needed bytes, for requests of more than ``FREE_BYTES``."""
FREE_BYTES = 64 << 10
"""A request of this length takes as long as a request of one byte."""
_HASHED_RUN = 64 << 10
"""Shorter runs of a hashed block are copied from its image, which is cheaper than scattering the read."""
_SLACK = 4096
"""Extra bytes of an image, for the alignment of its first element and the end of its last element."""
_TASK_WINDOWS = 16
_PIECE_BYTES = 16 << 10
"""The fixed cost of a piece, as the number of bytes that are read in the same time."""
_MAX_REQUESTS = 64
"""Maximum number of requests that a thread sends at the same time."""
_SMALLEST_IMAGE = 64
_NO_SCRATCH = np.empty(0, np.uint8)
_T = TypeVar("_T")

Part = tuple[int, int, int]
"""A range of a file that is read: its offset, its length, and its address in memory."""


class ReadOptions(msgspec.Struct, frozen=True):
    """Options of reads.

    Args:
        threads: number of threads.
        staging_memory_bytes: maximum staging memory of all threads, used by transposes, casts and host copies.
        replicas: how ranks read ranges that several of them need. ``each``: every rank reads them. ``once``: every rank
            reads a share and sends it to the others. ``auto``: like ``once`` if the ranks are on many hosts.
        hosts: the host of each rank, by rank; empty if unknown.
    """

    threads: int = 4
    staging_memory_bytes: int = DEFAULT_STAGING_MEMORY_BYTES
    replicas: str = "each"
    hosts: tuple[str, ...] = ()

    @property
    def image_bytes(self) -> int:
        """Bytes of a thread's image of a local file."""
        return max(_SMALLEST_IMAGE, min(IMAGE_BYTES, self.staging_memory_bytes // (2 * self.threads)))

    @property
    def host_copy_bytes(self) -> int:
        """Staging memory for host copies: all but the images and the scratch memory of the threads."""
        return max(0, self.staging_memory_bytes - 2 * self.threads * self.image_bytes)


DEFAULT_OPTIONS = ReadOptions()


class OwnedBlocks(msgspec.Struct):
    """The blocks of one file that this rank compares; safe for several threads.

    Args:
        checksum: the recorded checksums.
        numbers: the numbers of the blocks.

    Attributes:
        hashed: the blocks that have been hashed.
        differing: the blocks whose checksums differ.
        error: why the file could not be read, if errors are collected.
    """

    checksum: FileChecksum
    numbers: frozenset[int]
    hashed: set[int] = set()
    differing: set[int] = set()
    error: FlexError | None = None

    def length(self, number: int) -> int:
        """Return the length of a block in bytes."""
        return min(self.checksum.block_bytes, self.checksum.size - number * self.checksum.block_bytes)

    def window(self, path: AnyPath, number: int, pieces: list[Operation]) -> Window:
        """Return a block as a window."""
        low = number * self.checksum.block_bytes
        return Window(path, low, low + self.length(number), pieces, self)

    def compare(self, low: int, digest: bytes) -> None:
        """Compare the checksum of the block that begins at byte ``low``, and record the result."""
        number = low // self.checksum.block_bytes
        if digest != self.checksum.block(number):
            self.differing.add(number)
        self.hashed.add(number)


Blocks = Mapping[AnyPath, OwnedBlocks]
"""The blocks that a rank compares, by file."""
NO_BLOCKS: Blocks = MappingProxyType({})


class Window(msgspec.Struct, gc=False, eq=False):
    """A range of a file, and the operations on it.

    Args:
        path: the file.
        low: offset of the first byte.
        high: offset after the last byte.
        pieces: the parts of operations whose elements begin in the range.
        blocks: receives the checksum of the bytes; None if they are not hashed.
    """

    path: AnyPath
    low: int
    high: int
    pieces: list[Operation]
    blocks: OwnedBlocks | None = None


def windows_of(operations: Iterable[Operation], blocks: Blocks) -> Iterator[Window]:
    """Yield the windows of operations.

    Args:
        operations: the reads, grouped by file. Reads in file order need the fewest windows.
        blocks: the blocks that are hashed while they are read.
    """
    for path, grouped in groupby(operations, key=attrgetter("path")):
        found = iter(grouped)
        owned = blocks.get(path)
        step = WINDOW_BYTES if owned is None else owned.checksum.block_bytes
        following, high = next(found, None), 0
        active: list[Operation] = []
        while active or following is not None:
            low = high if active or following is None else following.begin // step * step
            high = low + step
            # An operation that begins before the window waits until the active ones have ended.
            while following is not None and low <= following.begin < high:
                active.append(following)
                following = next(found, None)
            pieces = [piece for one in active for piece in one.cut(low, high)]
            number = low // step
            if owned is not None and number in owned.numbers and number not in owned.hashed:
                yield owned.window(path, number, pieces)
            elif pieces:
                yield Window(path, low, high, pieces)
            active = [one for one in active if one.end > high]


def unread_blocks(blocks: Blocks) -> Iterator[Window]:
    """Yield the windows of blocks that have not been hashed yet."""
    for path, owned in blocks.items():
        yield from (owned.window(path, number, []) for number in sorted(owned.numbers - owned.hashed))


class _Worker:
    """The open files, image and scratch memory of one thread.

    Args:
        options: bounds on memory.
        identities: identities of the checked files.
        seen: remote files that any thread has opened.
    """

    def __init__(self, options: ReadOptions, identities: Identities, seen: dict[AnyPath, RemoteFile]) -> None:
        self._options, self._identities, self._seen = options, identities, seen
        self._files: dict[AnyPath, OpenFile] = {}
        self._image = self._scratch = _NO_SCRATCH

    def read(self, window: Window) -> int:
        """Execute a window, and return the number of bytes read from storage."""
        if window.blocks is None:
            return self._fill(window.path, window.low, window.high, window.pieces, None)
        hasher = xxhash.xxh3_64()
        count = self._fill(window.path, window.low, window.high, window.pieces, hasher)
        window.blocks.compare(window.low, hasher.digest())
        return count

    def close(self) -> None:
        """Close the files.

        Raises:
            Corrupt: a file has changed since it was checked.
            StorageError: a file cannot be closed; all others are closed.
        """
        with ExitStack() as stack:
            for _ in self._files:
                stack.callback(self._drop)

    def _fill(self, path: AnyPath, low: int, high: int, pieces: list[Operation], hasher: Any) -> int:
        runs: list[Part] = []
        copied: list[Operation] = []
        for piece in pieces:
            if not piece.sizes:
                runs.append((piece.begin, piece.size, piece.address))
            elif (run := piece.run) and _is_direct(piece, is_hashed=hasher is not None):
                offsets, addresses = piece.runs()
                runs.extend(zip(offsets.tolist(), [run] * len(offsets), addresses.tolist(), strict=True))
            else:
                copied.append(piece)
        runs.sort()
        gaps = _gaps(runs, low, high)
        if gaps is None or (hasher is not None and copied):
            # Several operations need the same range, or a hash needs all bytes in order: everything uses the image.
            runs, copied, gaps = [], pieces, [(low, high - low)]
        if hasher is None:
            gaps = _joined(copied)
        elif copied:
            gaps = [(low, max(high, *(piece.end for piece in copied)) - low)]
        room = self._room(path)
        if gaps and high - low > room:
            cuts = range(low, high, room)
            some = (([part for one in pieces for part in one.cut(at, at + room)], at) for at in cuts)
            return sum(
                self._fill(path, at, min(at + room, high), parts, hasher) for parts, at in some if parts or hasher
            )
        if gaps:
            base = self._base(path, copied[0].begin - low if copied else 0) - low
            parts = sorted([*runs, *((begin, length, base + begin) for begin, length in gaps)])
        else:
            base, parts = 0, runs
        self._read(path, parts)
        if hasher is not None:
            for begin, length, address in parts:
                if begin < high:
                    hasher.update(memory_at(address, min(length, high - begin)))
        for piece in copied:
            piece.place(base + piece.begin, self._scratch, self._scales(piece))
        return sum(map(itemgetter(1), parts))

    def _room(self, path: AnyPath) -> int:
        return WINDOW_BYTES if isinstance(path, RemotePath) else self._options.image_bytes

    def _base(self, path: AnyPath, first: int) -> int:
        """Return the address of an image in which the byte at offset ``first`` is aligned."""
        size = self._room(path) + _SLACK
        if self._image.size < size:
            self._image, self._scratch = np.empty(size, np.uint8), np.empty(size, np.uint8)
        address = int(self._image.ctypes.data)
        return address + (-(address + first) % 64)

    def _scales(self, piece: Operation) -> Array | None:
        if piece.scales is None:
            return None
        begin, length = piece.scales.rows(piece)
        scales = np.empty(length, np.uint8)
        self._read(piece.scales.tensor.scales_file, [(begin, length, int(scales.ctypes.data))])
        return scales

    def _read(self, path: AnyPath, parts: Sequence[Part]) -> None:
        if isinstance(path, RemotePath):
            _fetch(self._remote(path), parts)
            return
        file, index = self._opened(path), 0
        while index < len(parts):
            begin = end = parts[index][0]
            views: list[memoryview] = []
            while index < len(parts) and parts[index][0] == end and len(views) < MAX_BUFFERS:
                _, length, address = parts[index]
                views.append(memory_at(address, length))
                end, index = end + length, index + 1
            read_several(file, begin, views)

    def _remote(self, path: RemotePath) -> RemoteFile:
        found = self._seen.get(path)
        if found is None:
            file = open_remote(path)
            check_unreplaced(file, self._identities)
            found = self._seen.setdefault(path, file)
        return found

    def _opened(self, path: Path) -> OpenFile:
        file = self._files.get(path)
        if file is None:
            if len(self._files) == 2:
                self._drop()
            file = open_local(path)
            try:
                check_unreplaced(file, self._identities)
            except BaseException:
                file.close()
                raise
            self._files[path] = file
        return file

    def _drop(self) -> None:
        """Close the oldest open file."""
        file = self._files.pop(next(iter(self._files)))
        try:
            # A network file system fails if the file was deleted, which is harmless: all reads were complete.
            with suppress(OSError):
                check_unreplaced(file, self._identities)
        finally:
            file.close()


def _is_direct(piece: Operation, is_hashed: bool) -> bool:
    """Return whether runs of bytes are read directly into memory."""
    if is_hashed:
        return piece.run >= _HASHED_RUN
    return is_read_directly(piece.sizes, piece.sources, piece.dtype.itemsize)


def _gaps(runs: Sequence[Part], low: int, high: int) -> list[tuple[int, int]] | None:
    """Return the ranges between runs, by offset and length; None if runs overlap."""
    gaps: list[tuple[int, int]] = []
    at = low
    for begin, length, _ in runs:
        if begin < at:
            return None
        if begin > at:
            gaps.append((at, begin - at))
        at = begin + length
    if at < high:
        gaps.append((at, high - at))
    return gaps


def _joined(pieces: Iterable[Operation]) -> list[tuple[int, int]]:
    """Return the ranges of operations, by offset and length; overlapping and adjacent ranges are joined."""
    found: list[tuple[int, int]] = []
    for piece in pieces:
        offsets, length = piece.spans()
        found.extend(zip(offsets.tolist(), [length] * len(offsets), strict=True))
    joined: list[tuple[int, int]] = []
    for begin, length in sorted(found):
        if joined and begin <= sum(joined[-1]):
            joined[-1] = joined[-1][0], max(sum(joined[-1]), begin + length) - joined[-1][0]
        else:
            joined.append((begin, length))
    return joined


def _fetch(file: RemoteFile, parts: Sequence[Part]) -> None:
    """Request parts in order; parts that are close together share a request."""
    requests: list[tuple[int, int]] = []
    needed = 0
    for begin, length, _ in parts:
        end = begin + length
        if requests:
            low, high = requests[-1]
            is_cheap = end - low <= FREE_BYTES or end - low <= MAX_GAP_RATIO * (needed + length)
            if begin < high or (begin - high <= GAP_BYTES and is_cheap):
                requests[-1], needed = (low, max(high, end)), needed + length
                continue
        requests.append((begin, end))
        needed = length
    answers = [
        answer
        for at in range(0, len(requests), _MAX_REQUESTS)
        for answer in file.fetch(requests[at : at + _MAX_REQUESTS])
    ]
    begins = [low for low, _ in requests]
    for begin, length, address in parts:
        number = bisect_right(begins, begin) - 1
        first = begin - begins[number]
        memory_at(address, length)[:] = memoryview(answers[number])[first : first + length]


def run_workers(
    pool: ThreadPoolExecutor, threads: int, stream: Iterator[_T], work: Callable[[Callable[[], _T | None]], int]
) -> int:
    """Let threads take items from one stream until it is empty. A single item is processed by the caller alone.

    Args:
        pool: runs the other threads.
        threads: number of threads, including the caller.
        stream: the items; advanced by one thread at a time.
        work: run by each thread. It calls its argument for the next item, until the call returns None.
    Returns:
        the sum of the results.

    Raises:
        Exception: the error of the first thread that failed. No other thread takes an item after that.
    """
    first = list(islice(stream, 2))
    stream = chain(first, stream)
    if threads == 1 or len(first) < 2:
        return work(lambda: next(stream, None))
    lock, ended = threading.Lock(), threading.Event()
    turns = [threading.Lock() for _ in range(threads - 1)]

    def take() -> _T | None:
        with lock:
            return None if ended.is_set() else next(stream, None)

    def other(turn: threading.Lock) -> int:
        with turn:
            try:
                return work(take)
            except BaseException:
                # An interrupt must stop the other threads as well; collecting the results raises it again.
                ended.set()
                raise

    futures: list[Future[int]] = []
    try:
        for turn in turns:
            futures.append(pool.submit(other, turn))
        total = work(take)
    finally:
        # Nothing may be written after this function returns. An interrupt may come before a thread is known to the
        # list, or even to the pool, so the end of its turn is awaited. A thread whose turn begins later takes nothing.
        ended.set()
        begun = [future for future in futures if not future.cancel()]
        for turn in turns:
            with turn:
                pass
    return total + sum(future.result() for future in begun)


class ReadPool:
    """Threads with their open files and images; a context manager that joins the threads and closes the files.

    Args:
        options: threads and staging memory.
        identities: identities of the checked files; reading a replaced file raises an error.
    """

    def __init__(self, options: ReadOptions = DEFAULT_OPTIONS, identities: Identities = NO_IDENTITIES) -> None:
        self.options = options
        self.identities = identities
        self._pool = ThreadPoolExecutor(options.threads, "flex-read")
        self._idle: list[_Worker] = []
        self._remote: dict[AnyPath, RemoteFile] = {}

    def run(self, operations: Iterable[Operation], blocks: Blocks = NO_BLOCKS, is_counted: bool = False) -> int:
        """Execute operations in any order and return the bytes read from storage.

        Args:
            operations: grouped by file.
            blocks: the blocks that are hashed while they are read.
            is_counted: whether the bytes are part of the displayed progress.
        Raises:
            Corrupt, StorageError: the error of the first thread that failed. No other thread takes a task after that.
        """
        return self._run(windows_of(operations, blocks), is_counted, False)

    def hash_rest(self, blocks: Blocks, is_counted: bool = False, keep_errors: bool = False) -> int:
        """Hash the blocks that no operation has read, and return the bytes read from storage.

        Args:
            blocks: the blocks.
            is_counted: whether the bytes are part of the displayed progress.
            keep_errors: whether to record the error of a file in its blocks and continue with the others.
        Raises:
            Corrupt, StorageError: a read failed, unless errors are kept.
        """
        return self._run(unread_blocks(blocks), is_counted, keep_errors)

    def _run(self, windows: Iterator[Window], is_counted: bool, keep_errors: bool) -> int:
        work = partial(self._work, is_counted, keep_errors)
        return run_workers(self._pool, self.options.threads, _tasks(windows), work)

    def _work(self, is_counted: bool, keep_errors: bool, take: Callable[[], list[Window] | None]) -> int:
        total = 0
        with self._worker() as worker:
            while (task := take()) is not None:
                for window in task:
                    if window.blocks is not None and window.blocks.error is not None:
                        continue
                    try:
                        count = worker.read(window)
                    except FlexError as error:
                        if not keep_errors or window.blocks is None:
                            raise
                        window.blocks.error = error
                        continue
                    if is_counted:
                        advance(count)
                    total += count
        return total

    @contextmanager
    def _worker(self) -> Iterator[_Worker]:
        """Context manager that yields a worker that no other thread uses."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self.options, self.identities, self._remote)
        try:
            yield worker
        finally:
            self._idle.append(worker)

    def close(self) -> None:
        """Join the threads and close all files.

        Raises:
            Corrupt: a file was replaced or changed after it was checked.
            StorageError: a file cannot be closed.
        """
        self._pool.shutdown()
        with ExitStack() as stack:
            for worker in self._idle:
                stack.callback(worker.close)

    def __enter__(self) -> ReadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        # An earlier error is more specific than a failure to close a file after it.
        with suppress(*[] if kind is None else [FlexError]):
            self.close()
        if kind is None:
            check_unreplaced_meanwhile(self._remote, self.identities)


def _tasks(windows: Iterable[Window]) -> Iterator[list[Window]]:
    """Group windows into tasks of about :data:`WINDOW_BYTES`."""
    task: list[Window] = []
    size = 0
    for window in windows:
        needed = window.high - window.low if window.blocks else sum(piece.needed for piece in window.pieces)
        length = max(needed, len(window.pieces) * _PIECE_BYTES)
        if task and (size + length > WINDOW_BYTES or len(task) == _TASK_WINDOWS):
            yield task
            task, size = [], 0
        task.append(window)
        size += length
    if task:
        yield task
