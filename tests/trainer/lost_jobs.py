"""Time on ranks of which one dies or never comes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.harness.clocks import ProcessClock


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
