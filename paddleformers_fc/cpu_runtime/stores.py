"""Stores for the rendezvous of ranks, with a fast start, 40 ms less per request, and bounded waits.

Paddle's TCP store is slow in two places. Its client sleeps three seconds after a refused connection, whenever rank 0 is
not the first; so ranks wait until the port accepts connections before Paddle connects. It also writes each request in
several small parts without ``TCP_NODELAY``, so that every reply waits 40 ms for a delayed acknowledgement, and groups
send dozens of requests; so this option is set on the store's sockets after they are open.

Time: eight ranks with all groups of tp2 pp2 sharding2 find each other in 1 s instead of 9 s.
"""

from __future__ import annotations

import functools
import os
import socket
import stat
import time
from contextlib import suppress
from typing import Any

from paddle.base import core

from ..distributed.store_client import job_store_address, on_several_nodes
from .ranks import PATIENCE_SECONDS

_POLL_SECONDS = 0.02
LOOPBACK = "127.0.0.1"


def own_host() -> str:
    """Return the address at which the other ranks reach this one; the loopback address if all are on one node."""
    own = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0]
    return own if own and on_several_nodes() else LOOPBACK


def wait_for(address: tuple[str, int], deadline_seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait until something listens at ``address``; return False after the timeout, which Paddle then reports."""
    end = time.monotonic() + deadline_seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(address, timeout=1).close()
        except OSError:
            time.sleep(_POLL_SECONDS)
        else:
            return True
    return False


def open_store(host: str, port: int, is_master: bool) -> Any:
    """Open a TCP store with ``TCP_NODELAY``: the server if ``is_master``, otherwise a client."""
    # With a world size of 1, the server replies at once instead of waiting for all clients.
    store = core.TCPStore(host, port, is_master, 1, int(PATIENCE_SECONDS))
    send_at_once()
    return store


def send_at_once() -> None:
    """Set ``TCP_NODELAY`` on all open TCP sockets of this process, because Paddle does not expose the store's."""
    for descriptor in _open_sockets():
        with suppress(OSError):  # The socket was closed meanwhile, or is not TCP.
            with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _open_sockets() -> list[int]:
    directory = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = []
    for descriptor in map(int, os.listdir(directory)):
        with suppress(OSError):  # The listing's own descriptor is closed already.
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
    return found


def apply() -> None:
    """Patch the job's default store: ranks wait until it listens, and use ``TCP_NODELAY``."""
    original = core.create_or_get_global_tcp_store

    @functools.wraps(original)
    def create_or_get_global_tcp_store() -> Any:
        address = job_store_address()
        if address is not None and os.environ.get("PADDLE_TRAINER_ID", "0") != "0":
            wait_for(address)
        store = original()
        send_at_once()
        return store

    core.create_or_get_global_tcp_store = create_or_get_global_tcp_store
