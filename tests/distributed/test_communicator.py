"""An exchange that takes too long ends the process with a report; another one is passed through."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.distributed.communicator import EXIT_CODE, Communicator, job_communicator
from tests.harness.limits import LIMIT

WAITS_FOR_EVER = """
import threading
from paddleformers_fc.distributed.communicator import Communicator

class Deaf:
    rank, world_size = 3, 8
    def gather(self, *arguments):
        threading.Event().wait()

Communicator(Deaf(), 0.05, None).gather("a test", b"")
"""


class Echo:
    """Two ranks with equal messages."""

    rank, world_size = 1, 2

    def gather(self, doing: str, payload: bytes, *_: object) -> list[bytes]:
        return [payload, payload]


def test_a_rank_that_waits_too_long_reports_it_and_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WAITS_FOR_EVER], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == EXIT_CODE
    assert "Rank 3 has waited 0.05 s for the other ranks and ends its process." in ended.stderr
    assert "raise flex_timeout" in ended.stderr
    assert "in gather" in ended.stderr


@pytest.mark.parametrize("instead", ["io.StringIO()", "None", "closed()"])
def test_a_rank_whose_errors_go_elsewhere_ends_all_the_same(instead: str) -> None:
    redirected = f"""
import io, sys

def closed():
    file = io.StringIO()
    file.close()
    return file

sys.stderr = {instead}
"""
    ended = subprocess.run(
        [sys.executable, "-c", redirected + WAITS_FOR_EVER], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == EXIT_CODE
    assert "Rank 3 has waited" in ended.stderr
    assert "in gather" in ended.stderr


def test_an_exchange_in_time_is_passed_on() -> None:
    channel = Communicator(Echo(), LIMIT, None)
    assert (channel.rank, channel.world_size, channel.gather("a test", b"x")) == (1, 2, [b"x", b"x"])


def test_a_process_alone_opens_no_communicator() -> None:
    assert job_communicator() is ALONE
