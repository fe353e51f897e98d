"""Ranks that meet before they exchange: all of them continue, or all that live raise one error that lists the others.

Time passes only while every living rank waits (:class:`tests.harness.clocks.ThreadClock`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.distributed.communicator import (
    EXIT_CODE,
    KEY_PREFIX,
    MAX_FINAL_WAIT_SECONDS,
    Liveness,
    job_communicator,
)
from paddleformers_fc.errors import PeerError
from tests.cli.test_main import python
from tests.execute.simulated import Outcomes, ThreadChannel, job
from tests.harness.clocks import ThreadClock
from tests.harness.limits import LIMIT

PATIENCE = 1.0
SLACK = 0.01
"""A few ticks of the clock."""


class Counters:
    """A board in memory."""

    name = "the board in memory"
    clock: Any = time

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        """A counter's new value."""
        with self._lock:
            self.numbers[key] += amount
            return self.numbers[key]

    def post(self, amounts: Mapping[str, int]) -> None:
        """Add to counters."""
        for key, amount in amounts.items():
            self.add(key, amount)

    def set(self, key: str, value: str) -> None:
        """Put a text up."""
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        """A text."""
        return self.texts[key].encode()

    def wait(self, key: str, seconds: float) -> bool:
        """Whether a text is there in time."""
        end = self.clock.monotonic() + seconds
        while key not in self.texts:
            if self.clock.monotonic() >= end:
                return False
            self.clock.sleep(0.001)
        return True


class Gone(Counters):
    """A board whose server has ended."""

    def add(self, key: str, amount: int) -> int:
        """What Paddle's store raises then."""
        raise ValueError("(InvalidArgument) TCP send error. Details: Broken pipe.")


class Met:
    """A channel whose ranks meet before every exchange, without a thread that watches the clock of the machine."""

    def __init__(self, channel: Any, meeting: Liveness) -> None:
        self.rank, self._channel, self._meeting = channel.rank, channel, meeting

    def gather(self, doing: str, payload: bytes) -> Any:
        """Every rank's payload."""
        with self._meeting.guard(doing):
            return self._channel.gather(doing, payload)


def with_board(channel: ThreadChannel, board: Counters, patience: float = PATIENCE, prefix: str = KEY_PREFIX) -> Met:
    """A rank's channel with a board."""
    return Met(channel, Liveness(board, channel.rank, channel.world_size, patience, prefix))


def timed(board: Counters, ranks: int, work: Callable[[ThreadChannel, ThreadClock], Any]) -> Outcomes:
    """What every rank returned or raised, in a time of their own."""
    clock = board.clock = ThreadClock(ranks)

    def until_the_end(channel: ThreadChannel) -> Any:
        try:
            return work(channel, clock)
        finally:
            clock.leave()

    return job(ranks, until_the_end)


def outcomes(board: Counters, ranks: int, work: Callable[[Met], Any], patience: float = PATIENCE) -> Outcomes:
    """What every rank returned or raised, whose channel has a board."""
    return timed(board, ranks, lambda channel, _: work(with_board(channel, board, patience)))


def test_a_lost_channel_leaves_one_with_another_prefix_usable() -> None:
    board = Counters()

    def work(channel: ThreadChannel, clock: ThreadClock) -> Any:
        Liveness(board, channel.rank, 2, PATIENCE).abort()
        return with_board(channel, board, prefix="other").gather("a test", b"x")

    assert timed(board, 2, work) == [[b"x", b"x"]] * 2


@pytest.mark.parametrize("missing", [{0}, {2}, {1, 3}])
def test_ranks_that_do_not_come_are_named_to_all_others_and_the_job_stays_lost(missing: set[int]) -> None:
    board = Counters()

    def work(channel: ThreadChannel, clock: ThreadClock) -> Any:
        met = with_board(channel, board)
        met.gather("a test", b"")
        if channel.rank in missing:
            return "gone"
        raised = []
        for _ in range(2):
            began = clock.monotonic()
            try:
                met.gather("a test", b"")
            except PeerError as error:
                raised.append(str(error))
            assert clock.monotonic() - began < 2 * PATIENCE
        return raised

    found = timed(board, 4, work)
    assert [found[rank] for rank in missing] == ["gone"] * len(missing)
    reports = [found[rank] for rank in range(4) if rank not in missing]
    assert len(reports[0]) == 2
    assert reports[0][0] == reports[0][1]
    assert all(one == reports[0] for one in reports)
    named = ", ".join(map(str, sorted(missing)))
    assert f"rank{'s' if len(missing) > 1 else ''} {named} did not arrive" in reports[0][0]
    assert "Not every rank has arrived for a test within flex_timeout: 1 s." in reports[0][0]


def test_the_least_patient_rank_gives_up_for_all() -> None:
    board = Counters()

    def work(channel: ThreadChannel, clock: ThreadClock) -> Any:
        if channel.rank == 2:
            return None
        try:
            return with_board(channel, board, (0.4, 10_000.0)[channel.rank]).gather("a test", b"")
        finally:
            ended.append(clock.monotonic())

    ended: list[float] = []
    assert "rank 2 did not arrive" in str(timed(board, 3, work).error(PeerError, [0, 1]))
    assert max(ended) < 0.4 + MAX_FINAL_WAIT_SECONDS + SLACK


def test_a_rank_that_comes_in_the_moment_of_giving_up_is_waited_for() -> None:
    class LastMoment(Counters):
        """The second rank comes just before the first one's giving up is counted."""

        def add(self, key: str, amount: int) -> int:
            if key == "flex/claims/0" and not come.is_set():
                come.set()
                assert came.wait(LIMIT)
            value = super().add(key, amount)
            if key == "flex/claims/0":
                came.set()
            return value

    come, came = threading.Event(), threading.Event()

    def work(channel: ThreadChannel, clock: ThreadClock) -> None:
        if channel.rank == 1:
            with clock.away():
                assert come.wait(LIMIT)
        Liveness(board, channel.rank, 2, PATIENCE).wait_for_all("a test")

    board = LastMoment()
    assert timed(board, 2, work) == [None, None]
    assert not Liveness(board, 0, 2, PATIENCE).is_lost()


def test_a_rank_that_died_while_it_aborted_blocks_no_rank() -> None:
    board = Counters()
    # It gave up and could not report it.
    board.numbers.update({"flex/arrivals": 1, "flex/claims/0": 1})
    found = outcomes(board, 3, lambda channel: channel.gather("a test", b"") if channel.rank else None, 0.4)
    assert "rank 0 did not arrive" in str(found.error(PeerError, [1, 2]))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_arrive_at_any_time_all_continue_or_all_raise_the_same_error(seed: int) -> None:
    rng = random.Random(seed)
    board, ranks = Counters(), 4
    delays = [[rng.choice([0.0, 0.0, 0.04, 0.05, 0.06]) for _ in range(6)] for _ in range(ranks)]
    delays[seed % ranks][5] = 0.2  # Too late for the others.

    def work(channel: ThreadChannel, clock: ThreadClock) -> tuple[int, str]:
        for number, delay in enumerate(delays[channel.rank]):
            clock.wait(delay)
            try:
                with_board(channel, board, patience=0.07).gather("a test", b"")
            except PeerError as error:
                return number, str(error)
        return 6, ""

    ((number, _),) = set(timed(board, ranks, work))
    assert number < 6


def test_a_store_whose_server_has_ended_is_one_error_on_every_rank() -> None:
    found = outcomes(Gone(), 3, lambda channel: channel.gather("a test", b""))
    assert "rank 0" in str(found.error(PeerError))


def test_the_rank_that_serves_the_store_ends_when_all_that_live_have_read_the_report() -> None:
    class Served(Counters):
        """A board that ends with rank 0; the others read its report as late as can be."""

        def wait(self, key: str, seconds: float) -> bool:
            if key == "flex/read":
                looks.set()  # Rank 0 waits for readers.
            return super().wait(key, seconds)

        def get(self, key: str) -> bytes:
            if key == "flex/report" and threading.current_thread() not in servers:
                assert looks.wait(LIMIT)
            if ended.is_set():
                raise ValueError("(InvalidArgument) TCP send error. Details: Broken pipe.")
            return super().get(key)

    servers: list[threading.Thread] = []
    looks, ended = threading.Event(), threading.Event()

    def work(channel: ThreadChannel, clock: ThreadClock) -> Any:
        if channel.rank == 3:
            return None
        try:
            if channel.rank == 0:
                servers.append(threading.current_thread())
            return with_board(channel, board).gather("a test", b"")
        finally:
            if channel.rank == 0:
                ended.set()
                looks.set()

    board = Served()
    assert "rank 3 did not arrive" in str(timed(board, 4, work).error(ranks=range(3)))


# ---- An exchange that takes too long ends the process with a report; another one is passed through.


WAITS_FOR_EVER = """
import threading
from paddleformers_fc.distributed.communicator import Communicator

class Deaf:
    rank, world_size = 3, 8
    def gather(self, *arguments):
        threading.Event().wait()

Communicator(Deaf(), 0.05, None).gather("a test", b"")
"""


@pytest.mark.parametrize("errors_go_to", ["sys.stderr", "io.StringIO()", "None", "closed()"])
def test_a_rank_that_waits_too_long_reports_it_wherever_errors_go_and_ends(errors_go_to: str) -> None:
    redirected = f"""
import io, sys

def closed():
    file = io.StringIO()
    file.close()
    return file

sys.stderr = {errors_go_to}
"""
    ended = python("-c", redirected + WAITS_FOR_EVER, check=False)
    assert ended.returncode == EXIT_CODE
    assert "Rank 3 has waited 0.05 s for the other ranks and ends its process." in ended.stderr
    assert "raise flex_timeout" in ended.stderr
    assert "in gather" in ended.stderr


def test_a_process_alone_opens_no_communicator() -> None:
    assert job_communicator() is ALONE
