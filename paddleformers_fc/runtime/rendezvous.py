"""Ranks that start before rank 0 listens.

Paddle's TCP store client sleeps three seconds after a refused connection, so a job of ranks that start together
takes three seconds longer than it needs whenever rank 0 is not the first. Here a rank waits until the port answers, and
only then lets Paddle connect.

Time: at most one poll interval more than rank 0 needs.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from paddle.base import core

_POLL_SECONDS = 0.02
_DEADLINE_SECONDS = 60.0


def master_address() -> tuple[str, int] | None:
    """Where rank 0 listens, from the environment; None when nothing is said about it."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    endpoint = os.environ.get("PADDLE_MASTER") or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
    host, colon, port = endpoint.rpartition(":")
    return (host, int(port)) if colon else None


def wait_for(address: tuple[str, int], deadline_seconds: float = _DEADLINE_SECONDS) -> bool:
    """Wait until something listens at ``address``; False when the time is over (Paddle then reports it)."""
    end = time.monotonic() + deadline_seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(address, timeout=1).close()
        except OSError:
            time.sleep(_POLL_SECONDS)
        else:
            return True
    return False


def apply() -> None:
    """Make every rank but 0 wait for rank 0's store before it connects."""
    original = core.create_or_get_global_tcp_store

    def create_or_get_global_tcp_store() -> Any:
        address = master_address()
        if address is not None and os.environ.get("PADDLE_TRAINER_ID", "0") != "0":
            wait_for(address)
        return original()

    core.create_or_get_global_tcp_store = create_or_get_global_tcp_store
