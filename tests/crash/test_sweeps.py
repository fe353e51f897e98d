"""At sampled instants of every kind of accident; all of them with ``make soak``, which writes ``docs/results/soak.md``.

``make test`` tries one instant of some scenarios, ``make test-all`` of every scenario the number that
``docs/results/guarantees.md`` states.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from tests.corruption.guarantees import count
from tests.crash import soaked, sweep

ALL = "FLEX_ALL_INSTANTS" in os.environ


@dataclass(frozen=True)
class Usual:
    """One kind of accident in the ordinary tests.

    Args:
        kind: of the sweep.
        each: how many instants of each scenario.
        instants: how many there are at least, so that a net with a hole is noticed.
    """

    kind: str
    each: int
    instants: int


EVERY = 9
"""One scenario of so many is in ``make test``, with one instant."""

USUAL = [
    Usual("kills", 38, 5000),
    Usual("exports", 14, 600),
    Usual("refusals", 6, 5000),
    Usual("power", 40, 5000),
]


def test_a_whole_checkpoint_is_found_after_a_few_accidents_of_every_kind() -> None:
    found = sweep.run([usual.kind for usual in USUAL], 1, EVERY, workers=1)
    for usual, tally in zip(USUAL, found.values(), strict=True):
        assert not tally.lost, "\n\n".join(tally.lost[:5])
        # Scenarios differ in length, and of losses of power one instant of so many is looked at.
        assert tally.instants >= usual.instants // (2 * EVERY * (EVERY if usual.kind == "power" else 1))
        assert tally.tried >= tally.scenarios // 2


@pytest.mark.slow
@pytest.mark.parametrize("usual", USUAL, ids=lambda usual: usual.kind)
def test_a_whole_checkpoint_is_found_whatever_happens(usual: Usual) -> None:
    tally = sweep.run([usual.kind], 0 if ALL else usual.each)[usual.kind]
    print(soaked.sentence(usual.kind, tally))
    assert not tally.lost, "\n\n".join(tally.lost[:5])
    assert tally.instants >= usual.instants
    assert tally.tried >= (tally.instants if ALL else usual.each * tally.scenarios // 2)
    if ALL:
        soaked.write(usual.kind, soaked.sentence(usual.kind, tally))
    else:
        count(f"crash-{usual.kind}", soaked.usual(usual.kind, tally))
