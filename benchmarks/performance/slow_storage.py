"""A limited reader below the page cache: files in memory are read as if they were on storage of some rate."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from paddleformers_fc.storage import vectored_read

_SHORTEST_WAIT = 0.002
"""Seconds. A shorter sleep takes many times as long as it should, so reads of single rows wait together."""


@contextmanager
def limited(bytes_per_second: float) -> Iterator[None]:
    """A block in which ``os.preadv`` of this process, on all threads together, brings so many bytes a second.

    Reads of many rows become one call per row, so that all of them pass it.

    Args:
        bytes_per_second: 0 for no limit.
    """
    if not bytes_per_second:
        yield
        return
    lock, original, free = threading.Lock(), os.preadv, 0.0

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal free
        count = original(descriptor, buffers, offset)
        with lock:
            free = max(free, time.perf_counter()) + count / bytes_per_second
            ahead = free - time.perf_counter()
        if ahead >= _SHORTEST_WAIT:
            time.sleep(ahead)
        return count

    def missing() -> None:
        return None

    queues, vectors = patch.object(vectored_read, "_taken", missing), patch.object(vectored_read, "_vector", missing)
    with patch.object(os, "preadv", preadv), queues, vectors:
        yield
