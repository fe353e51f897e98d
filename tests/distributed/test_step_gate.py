"""Loops at different steps act at the same one, whatever their speeds are."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence

import pytest

from paddleformers_fc.distributed.step_agreement import StepGate
from tests.harness.limits import LIMIT

RANKS = 3
STEPS = 400


class Exchange:
    """An all-gather of threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._given: dict[int, int] = {}

    def gather(self, rank: int, number: int) -> Sequence[int]:
        self._given[rank] = number
        self._barrier.wait(LIMIT)
        return [self._given[one] for one in range(RANKS)]


@pytest.mark.parametrize("seed", range(5))
def test_every_loop_runs_an_action_at_the_end_of_the_same_step(seed: int) -> None:
    chance = random.Random(seed)
    begins = [chance.randrange(STEPS // 2) for _ in range(RANKS)]
    gates, exchange = [StepGate() for _ in range(RANKS)], Exchange()
    # Training exchanges gradients in every step, so no loop is more than a step ahead of another.
    gradients = threading.Barrier(RANKS)
    arrivals = threading.Barrier(RANKS)
    acted: dict[int, int] = {}
    steps = [0] * RANKS

    def loop(rank: int) -> None:
        for step in range(1, STEPS + 1):
            gradients.wait(LIMIT)
            steps[rank] = step
            gates[rank].step_ended(step)

    def thread(rank: int) -> None:
        while steps[rank] < begins[rank]:
            os.sched_yield()  # A slower look would come after the last step.
        arrivals.wait(LIMIT)  # A thread that comes later would need a step of a loop that is held.
        gates[rank].agree(lambda step: exchange.gather(rank, step), lambda: acted.__setitem__(rank, steps[rank]))

    threads = [threading.Thread(target=work, args=(rank,)) for work in (loop, thread) for rank in range(RANKS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LIMIT)
    for rank, gate in enumerate(gates):
        if rank not in acted:  # The loops ended before the agreed step.
            gate.step_ended(STEPS + 1)
    assert len(set(acted.values())) == 1


def test_a_loop_waits_at_the_end_of_its_step_while_its_rank_agrees() -> None:
    gate, begun, may_end = StepGate(), threading.Event(), threading.Event()
    gate.begin(7)
    log: list[str] = []

    def gather(step: int) -> list[int]:
        log.append(f"gave {step}")
        begun.set()
        may_end.wait(LIMIT)
        return [step, 9]

    agreeing = threading.Thread(target=gate.agree, args=(gather, lambda: log.append("acted")))
    agreeing.start()
    begun.wait(LIMIT)
    loop = threading.Thread(target=lambda: (gate.step_ended(8), log.append("ended 8")))
    loop.start()
    assert log == ["gave 7"]
    may_end.set()
    loop.join(LIMIT)
    agreeing.join(LIMIT)
    gate.step_ended(9)
    assert log == ["gave 7", "ended 8"]
    gate.step_ended(10)
    gate.step_ended(11)
    assert log == ["gave 7", "ended 8", "acted"]


def test_nothing_is_agreed_and_no_loop_is_held_if_the_exchange_fails() -> None:
    gate, log = StepGate(), []

    def gather(step: int) -> list[int]:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        gate.agree(gather, lambda: log.append("acted"))
    gate.step_ended(1)
    gate.alone(lambda: log.append("alone"))
    gate.step_ended(2)
    assert log == ["alone"]


def test_an_action_that_is_run_at_once_is_not_run_again() -> None:
    gate, log = StepGate(), []

    def action() -> None:
        log.append("acted")

    gate.agree(lambda step: [step], action)
    gate.run_now(action)
    gate.run_now(action)
    gate.step_ended(1)
    assert log == ["acted"]
