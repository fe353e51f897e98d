"""Many short ranges of one file, read in few system calls straight to where each belongs.

A column slice is thousands of short rows. One ``preadv`` per row costs more in Python than in the kernel, and threads
do not help, because the part in Python is done under the interpreter's lock. Linux takes a whole batch of reads, each
with an offset, a length and an address, in one call: ``io_submit`` (man 2 io_submit, with io_setup, io_getevents and
io_destroy; the C library does not wrap them, so they go through ``syscall``). The batch is filled as one numpy array,
and the lock is free while the kernel works. A file in the page cache is read at once, within the call.

Whatever the kernel does not do is done here one by one, as any other read: a row that came back short or failed,
all rows where the calls are missing, forbidden or at the system's limit (``fs.aio-max-nr``). So errors are those of
:func:`~paddleformers_fc.storage.files.read_into`, and name file and offset.

To give a context back takes the kernel 30 ms, so one that has nothing under way is kept for the next thread of this
process; the kernel takes them all back when the process ends.

Memory: 32 KiB of requests and results for every thread that reads rows at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from paddleformers_fc.storage.files import OpenFile, read_into, refused

BATCH = 256
"""Requests per system call; what a context holds counts against a limit of the whole machine."""

# The kernel's ``struct iocb`` and ``struct io_event`` on a little-endian machine.
_REQUEST = np.dtype(
    [("data", "<u8"), ("key", "<u4"), ("flags", "<i4"), ("code", "<u2"), ("priority", "<i2"), ("descriptor", "<u4")]
    + [("address", "<u8"), ("length", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("wish", "<u4"), ("event", "<u4")]
)
_RESULT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("extra", "<i8")])
_PREAD = 0


@dataclass(frozen=True)
class Rows:
    """Ranges of one length, each with a place in memory.

    Args:
        offsets: of each range in the file, in bytes, int64.
        addresses: where each goes, uint64; the memory is the caller's and must outlive the read.
        length: of every range, in bytes.
    """

    offsets: np.ndarray[Any, Any]
    addresses: np.ndarray[Any, Any]
    length: int


class Scatter:
    """Reads rows for one thread; a context of the kernel is made at the first use and given back by ``close``."""

    def __init__(self) -> None:
        self._queue: _Queue | None = None
        self._offered = True

    def read(self, file: OpenFile, rows: Rows) -> None:
        """Fill every row.

        Args:
            file: open for reading.
            rows: what to read, and where to.

        Raises:
            Corrupt: the file ends before a row does.
            StorageError: the operating system refused.
        """
        if self._queue is None and self._offered:
            self._queue = _taken()
            self._offered = self._queue is not None
        if self._queue is None:
            _one_by_one(file, rows, range(len(rows.offsets)))
            return
        try:
            for low in range(0, len(rows.offsets), BATCH):
                some = Rows(rows.offsets[low : low + BATCH], rows.addresses[low : low + BATCH], rows.length)
                _one_by_one(file, some, self._queue.read(file, some))
        except BaseException:
            # An interrupt may have left requests under way; their results must not be taken for those of others.
            queue, self._queue = self._queue, None
            queue.close()
            raise

    def close(self) -> None:
        """Leave the context to another thread; harmless when repeated."""
        if self._queue is not None:
            queue, self._queue = self._queue, None
            _SPARE.append(queue)


def _one_by_one(file: OpenFile, rows: Rows, indices: Any) -> None:
    for index in indices:
        memory = (ctypes.c_char * rows.length).from_address(int(rows.addresses[index]))
        read_into(file, int(rows.offsets[index]), memoryview(memory).cast("B"))


class _Queue:
    """A context of the kernel with its requests and results."""

    def __init__(self, calls: _Calls, context: ctypes.c_ulong) -> None:
        self._calls = calls
        self._context = context
        self._requests = np.zeros(BATCH, _REQUEST)
        self._requests["code"] = _PREAD
        self._requests["data"] = np.arange(BATCH)
        self._pointers = self._requests.ctypes.data + _REQUEST.itemsize * np.arange(BATCH, dtype=np.uint64)
        self._results = np.zeros(BATCH, _RESULT)

    def read(self, file: OpenFile, rows: Rows) -> Any:
        """Read at most ``BATCH`` rows; the indices of those that are not wholly there."""
        count = len(rows.offsets)
        requests = self._requests[:count]
        requests["descriptor"] = file.descriptor
        requests["length"] = rows.length
        requests["offset"] = rows.offsets
        requests["address"] = rows.addresses
        taken = self._submit(count)
        found = self._reap(file, taken)
        whole = found["data"][found["result"] == rows.length]
        if len(whole) == count:
            return ()
        return np.setdiff1d(np.arange(count), whole.astype(np.int64))

    def close(self) -> None:
        """Wait for what is under way, and give the context back."""
        self._calls(self._calls.destroy, self._context)

    def _submit(self, count: int) -> int:
        """How many of the first ``count`` requests the kernel took."""
        taken = 0
        while taken < count:
            pointers = ctypes.c_void_p(self._pointers[taken:].ctypes.data)
            more = self._calls(self._calls.submit, self._context, ctypes.c_long(count - taken), pointers)
            if more <= 0:
                break
            taken += more
        return taken

    def _reap(self, file: OpenFile, count: int) -> np.ndarray[Any, Any]:
        """The results of ``count`` requests: memory is in use until the last of them is here."""
        done = 0
        while done < count:
            results = ctypes.c_void_p(self._results[done:].ctypes.data)
            wanted = ctypes.c_long(count - done)
            more = self._calls(self._calls.results, self._context, wanted, wanted, results, None)
            if more < 0 and ctypes.get_errno() != errno.EINTR:
                raise refused("read", file.path, OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
            done += max(0, more)
        return self._results[:count]


@dataclass(frozen=True)
class _Calls:
    """The system call entry and its numbers."""

    entry: Any
    setup: int = 206
    destroy: int = 207
    results: int = 208
    submit: int = 209

    def __call__(self, number: int, *arguments: Any) -> int:
        return int(self.entry(ctypes.c_long(number), *arguments))


@lru_cache(maxsize=1)
def _calls() -> _Calls | None:
    """The calls, where they are known to be what they are here: Linux on x86-64. Decided once."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return None
    entry = ctypes.CDLL(None, use_errno=True).syscall
    entry.restype = ctypes.c_long
    return _Calls(entry)


_SPARE: list[_Queue] = []
# A child process does not inherit contexts.
os.register_at_fork(after_in_child=_SPARE.clear)


def _taken() -> _Queue | None:
    """A queue that no other thread has, or None where the system has none to give."""
    with contextlib.suppress(IndexError):
        return _SPARE.pop()
    calls = _calls()
    if calls is None:
        return None
    context = ctypes.c_ulong(0)
    return _Queue(calls, context) if calls(calls.setup, ctypes.c_long(BATCH), ctypes.byref(context)) == 0 else None
