"""A limited reader below the page cache: files in memory are read as if they were on storage of some rate.

All ranks of a job share the storage and the page cache, as processes of one host do: a page waits for the storage when
the first of them reads it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

_PAGE_BYTES = 4096


@contextmanager
def limited(bytes_per_second: float, cache: Path | None) -> Iterator[None]:
    """A block in which pages that no rank has read come from storage at so many bytes a second.

    Args:
        bytes_per_second: of all ranks together; 0 for no limit.
        cache: a directory of all ranks, empty when the storage is cold; it holds which pages were read. None if there
            is no limit.
    """
    if not bytes_per_second or cache is None:
        yield
        return
    storage = _Storage(bytes_per_second, cache)
    original = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        count = original(descriptor, buffers, offset)
        storage.fetch(descriptor, np.array([offset]), np.array([count]))
        return count

    with closing(storage), patch.object(os, "preadv", preadv):
        yield


class _Storage:
    """The storage and the page cache, as one process sees them."""

    def __init__(self, rate: float, cache: Path) -> None:
        self._rate = rate
        self._cache = cache
        self._pages: dict[int, Any] = {}
        self._threads = threading.Lock()
        self._lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._lock, 8)
        # When the storage has done what it was asked for; the clock is that of the machine.
        self._free = np.memmap(cache / "lock", np.float64, "r+", shape=(1,))

    def fetch(self, descriptor: int, offsets: Any, lengths: Any) -> None:
        """Wait until the storage has brought the pages of some ranges of a file."""
        with self._threads:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                fresh = self._mark(self._pages_of(descriptor), offsets, lengths)
                free = max(float(self._free[0]), time.monotonic()) + fresh * _PAGE_BYTES / self._rate
                if fresh:
                    self._free[0] = free
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        if fresh:
            time.sleep(max(0.0, free - time.monotonic()))

    def close(self) -> None:
        """Close the lock."""
        os.close(self._lock)

    def _pages_of(self, descriptor: int) -> Any:
        """One byte per page of a file: whether it was read."""
        status = os.fstat(descriptor)
        if status.st_ino not in self._pages:
            path, count = self._cache / str(status.st_ino), -(-status.st_size // _PAGE_BYTES)
            if not path.exists():
                path.write_bytes(bytes(count))
            self._pages[status.st_ino] = np.memmap(path, np.uint8, "r+", shape=(count,))
        return self._pages[status.st_ino]

    def _mark(self, pages: Any, offsets: Any, lengths: Any) -> int:
        """Mark the pages of ranges as read; how many of them were not."""
        first, last = offsets // _PAGE_BYTES, (offsets + np.maximum(lengths, 1) - 1) // _PAGE_BYTES
        if len(first) == 1:
            found = pages[int(first[0]) : int(last[0]) + 1]
            fresh = int(found.size - found.sum())
            found[:] = 1
            return fresh
        wanted = np.concatenate([first + more for more in range(int((last - first).max()) + 1)])
        wanted = np.unique(np.minimum(wanted, np.tile(last, len(wanted) // len(last))))
        fresh = int(wanted.size - pages[wanted].sum())
        pages[wanted] = 1
        return fresh
