"""Accidents of every kind at sampled instants; ``make soak`` tries all and writes ``docs/results/soak.md``.

``make test`` tries one instant of some scenarios, ``make test-all`` of every scenario the number that
``docs/results/guarantees.md`` states.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from tests.corruption.guarantees import observe
from tests.crash import soaked, sweep

ALL = "FLEX_ALL_INSTANTS" in os.environ


@dataclass(frozen=True)
class Usual:
    """One kind of accident in the ordinary tests.

    Args:
        kind: of the sweep.
        each: how many instants of each scenario.
        instants: how many there are at least, so that a net with a hole is noticed.
        what: for people.
    """

    kind: str
    each: int
    instants: int
    what: str


EVERY = 9
"""One scenario of so many is in ``make test``, with one instant."""

USUAL = [
    Usual("kills", 38, 5000, "saves with one rank or all ranks killed (SIGKILL) at a file-system operation"),
    Usual("exports", 14, 600, "exports with one rank or all ranks killed (SIGKILL) at a file-system operation"),
    Usual("refusals", 6, 5000, "failed file-system operations (no space, I/O error, read-only mount)"),
    Usual("rooms", 25, 75, "saves on a full disk, with a file size limit, or on a read-only disk"),
    Usual("power", 40, 5000, "power losses during a run, each of which keeps a different part of the unsynced writes"),
]


def test_a_complete_checkpoint_is_found_after_a_few_accidents_of_every_kind() -> None:
    found = sweep.run([usual.kind for usual in USUAL], 1, EVERY, workers=1)
    for usual, tally in zip(USUAL, found.values(), strict=True):
        assert not tally.lost, "\n\n".join(tally.lost[:5])
        assert tally.instants >= usual.instants // (2 * EVERY)  # Scenarios differ in length.
        assert tally.tried == tally.scenarios


@pytest.mark.slow
@pytest.mark.parametrize("usual", USUAL, ids=lambda usual: usual.kind)
def test_a_complete_checkpoint_is_found_whatever_happens(usual: Usual) -> None:
    tally = sweep.run([usual.kind], 0 if ALL else usual.each)[usual.kind]
    assert not tally.lost, "\n\n".join(tally.lost[:5])
    assert tally.instants >= usual.instants
    assert tally.tried >= (tally.instants if ALL else usual.each * tally.scenarios // 2)
    if ALL:
        text = f"{tally.tried:,} {usual.what}, of {tally.instants:,} in {tally.scenarios} scenarios"
        soaked.write(usual.kind, f"{text}; no checkpoint was lost.")
    else:  # The number of instants is omitted: it changes with every line of the package.
        observe(usual.kind, tried=tally.tried, scenarios=tally.scenarios)
