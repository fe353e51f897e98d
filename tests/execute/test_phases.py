"""Saves and loads report where their time went, and which rank took longest."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddleformers_fc.execute.phases import Phases, PhaseTimer, Slowest, rounded, slowest_of
from tests.execute.simulated import canonical, load, save

RANKS = 3
ARRAYS = canonical()


def test_the_coordinator_of_a_save_knows_the_rank_that_wrote_longest(tmp_path: Path) -> None:
    reports = save(tmp_path / "checkpoint-3", ARRAYS, 1, RANKS)
    assert {(*report.phases.seconds,) for report in reports} == {("plan", "capture", "write", "agree", "commit")}
    assert reports[0].phases.slowest == slowest_of("write", [one.phases.seconds["write"] for one in reports])
    assert [one.phases.slowest for one in reports[1:]] == [None, None]


def test_every_rank_of_a_load_knows_the_one_that_read_longest(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, RANKS)
    reports = load(tmp_path / "checkpoint-3", ARRAYS, 1, RANKS)
    assert {(*report.phases.seconds,) for report in reports} == {("plan", "agree", "read", "finish")}
    slowest = slowest_of("read", [rounded(one.phases.seconds["read"]) for one in reports])
    assert {one.phases.slowest for one in reports} == {slowest}
    assert all(sum(one.phases.seconds.values()) <= one.seconds for one in reports)


def test_the_slowest_rank_is_the_first_with_most_seconds() -> None:
    assert slowest_of("write", [1.0, 3.0, 2.0, 3.0]) == Slowest("write", 1, 3.0)


@pytest.mark.parametrize(
    ("slowest", "text"),
    [
        (None, "plan 0.25 s, write 2.00 s"),
        (Slowest("write", 37, 4.4), "plan 0.25 s, write 2.00 s"),
        (Slowest("write", 37, 4.6), "plan 0.25 s, write 2.00 s (write on rank 37: 4.60 s)"),
    ],
)
def test_the_slowest_rank_is_shown_if_it_took_much_longer(slowest: Slowest | None, text: str) -> None:
    assert str(Phases({"plan": 0.25, "write": 2.0}, slowest)) == text


def test_a_phase_that_is_repeated_adds_up_and_earlier_seconds_count() -> None:
    timer = PhaseTimer({"open": 100.0})
    first, again, plan = timer.end("open"), timer.end("open"), timer.end("plan")
    assert 100 <= first <= again
    assert timer.phases() == Phases({"open": again, "plan": plan})
    assert again + plan <= timer.elapsed
