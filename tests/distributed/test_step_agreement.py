"""Loops of all ranks agree at step ends: they act at the same one, and send few requests."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.distributed import step_agreement
from paddleformers_fc.distributed.communicator import Liveness
from paddleformers_fc.distributed.step_agreement import StepAgreement
from paddleformers_fc.errors import PeerError
from tests.distributed.test_liveness import Counters
from tests.execute.simulated import Outcomes, ThreadChannel, job
from tests.harness.limits import LIMIT

RANKS = 3
STEPS = 400
FIRST, SECOND = "the first part", "the second part"


@pytest.fixture(autouse=True)
def one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a test share a process, and run one loop."""
    monkeypatch.setattr(step_agreement, "_loops", itertools.repeat(0))


def on_ranks(work: Callable[[StepAgreement, int], Any], board: Counters | None, patience: float = LIMIT) -> Outcomes:
    """What every rank returned or raised."""

    def run(channel: ThreadChannel) -> Any:
        liveness = None if board is None else Liveness(board, channel.rank, RANKS, patience)
        agreement = StepAgreement(channel, liveness)
        with agreement.running():
            return work(agreement, channel.rank)

    return job(RANKS, run)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("has_store", [True, False])
def test_all_loops_act_at_the_end_of_the_same_step_whatever_their_speeds_are(
    monkeypatch: pytest.MonkeyPatch, seed: int, has_store: bool
) -> None:
    monkeypatch.setattr(step_agreement, "IDLE_SECONDS", 0.005)
    monkeypatch.setattr(step_agreement, "PENDING_SECONDS", 0.001)
    chance = random.Random(seed)
    done_at = [[chance.randrange(STEPS // 2) for _ in range(RANKS)] for _ in (FIRST, SECOND)]
    signalled_at = chance.randrange(STEPS // 2)

    def loop(agreement: StepAgreement, rank: int) -> list[tuple[int, str]]:
        pace, seen, subjects = random.Random(rank), [], [FIRST, SECOND]
        for step in range(STEPS):
            sum(range(pace.randrange(20_000)))  # Every rank takes its own time.
            agreed = agreement.read()
            if agreed is not None and agreed.is_signalled:
                seen.append((step, "signal"))
            if subjects and agreed is not None and agreed.subject is subjects[0]:
                seen.append((step, subjects.pop(0)))
            subject = subjects[0] if subjects else None
            is_done = subject is not None and step >= done_at[2 - len(subjects)][rank]
            is_signalled = rank == 1 and step >= signalled_at
            agreement.begin_next("training", subject, is_done, is_signalled)
        return seen

    found = on_ranks(loop, Counters() if has_store else None)
    assert found[1:] == found[:1] * (RANKS - 1)
    assert {name for _, name in found[0]} == {"signal", FIRST, SECOND}
    first, second = (next(step for step, name in found[0] if name == one) for one in (FIRST, SECOND))
    assert max(done_at[0]) < first < second > max(done_at[1])


class Clock:
    """A clock that every step moves on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class WithAnother(Counters):
    """A board to which another rank always adds at once."""

    def add(self, key: str, amount: int) -> int:
        return super().add(key, amount + (amount > 0))


@pytest.mark.parametrize(
    ("seconds", "subject", "apart"),
    [(0.1, None, 50), (0.1, FIRST, 10), (2.0, None, 2), (2.0, FIRST, 1), (60.0, None, 1), (60.0, FIRST, 1)],
)
def test_agreements_are_a_second_apart_while_a_save_is_under_way_and_else_five(
    monkeypatch: pytest.MonkeyPatch, seconds: float, subject: str | None, apart: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(step_agreement, "time", clock)
    channel: Any = SimpleNamespace(rank=0, world_size=2)
    agreement = StepAgreement(channel, Liveness(WithAnother(), 0, 2, LIMIT))
    read_at = []
    with agreement.running():
        for step in range(201):
            clock.now += seconds
            if agreement.read() is not None:
                read_at.append(step)
            agreement.begin_next("training", subject, False, False)
    gaps = [after - before for before, after in zip(read_at, read_at[1:], strict=False)]
    assert set(gaps[2:]) == {apart}


def test_another_kind_of_step_has_a_pace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After fast evaluations the next agreement would otherwise be thousands of steps away."""
    clock = Clock()
    monkeypatch.setattr(step_agreement, "time", clock)

    def loop(agreement: StepAgreement, rank: int) -> list[tuple[str, int]]:
        read_at = []
        for kind, count, seconds in (("evaluation", 1000, 0.001), ("training", 10, 60.0)):
            for step in range(count):
                clock.now += seconds / RANKS
                if agreement.read() is not None:
                    read_at.append((kind, step))
                agreement.begin_next(kind, None, False, False)
        return read_at

    (first, *others) = on_ranks(loop, Counters())
    assert others == [first] * (RANKS - 1)
    assert [step for kind, step in first if kind == "training" and step > 0] == list(range(1, 10))


def test_a_rank_sends_two_requests_per_agreement_and_the_store_keeps_a_few_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[int] = []

    class Counting(Counters):
        def add(self, key: str, amount: int) -> int:
            requests.append(amount)
            return super().add(key, amount)

    def loop(agreement: StepAgreement, rank: int) -> int:
        read = 0
        for _ in range(STEPS):
            barrier.wait(LIMIT)  # Gradients are exchanged at the same point.
            read += agreement.read() is not None
            agreement.begin_next("training", None, False, False)
        return read

    monkeypatch.setattr(step_agreement, "IDLE_SECONDS", 0.005)
    board, barrier = Counting(), threading.Barrier(RANKS)
    agreements = max(on_ranks(loop, board))
    assert agreements > 3
    assert len(board.numbers) == 3
    # Rank 0 clears a counter, too. The last agreement may have begun only.
    assert 2 * RANKS * agreements <= len(requests) <= (2 * RANKS + 1) * (agreements + 1)


def test_ranks_name_one_that_does_not_come() -> None:
    def loop(agreement: StepAgreement, rank: int) -> None:
        if rank != 1:
            agreement.begin_next("training", FIRST, True, False)
            agreement.read()

    error = on_ranks(loop, Counters(), patience=0.4).error(PeerError, [0, 2])
    assert "rank 1 did not arrive" in error.evidence[0]


def test_all_ranks_know_whether_all_of_them_end_their_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_agreement, "ENDING_SECONDS", LIMIT)
    assert on_ranks(lambda agreement, _: agreement.all_end(), Counters()) == [True] * RANKS
    monkeypatch.setattr(step_agreement, "ENDING_SECONDS", 0.4)
    assert on_ranks(lambda agreement, rank: rank == 1 or agreement.all_end(), Counters()) == [False, True, False]
