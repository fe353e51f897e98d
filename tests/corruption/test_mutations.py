"""Every random mutation of a checkpoint is refused under ``full``, and the file that was damaged is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.corruption import mutations
from tests.corruption.guarantees import count
from tests.crash import soaked

SEED = 1
USUAL = 2000
COUNT = int(os.environ.get("FLEX_MUTATIONS", USUAL))
"""Number of mutations; ``make soak`` sets more."""

FEW = 200
"""How many in ``make test``."""


def test_a_few_random_mutations_of_every_kind_are_refused_and_the_damaged_file_is_named(tmp_path: Path) -> None:
    tally = mutations.run(tmp_path, SEED, FEW)
    assert len(tally.tried) == 11
    assert not tally.missed, "\n".join(tally.missed[:20])


@pytest.mark.slow
def test_every_random_mutation_is_refused_and_the_damaged_file_is_named(tmp_path: Path) -> None:
    tally = mutations.run(tmp_path, SEED, COUNT)
    print(tally.sentence(SEED))
    assert sum(tally.tried.values()) == COUNT
    assert len(tally.tried) == 11
    assert not tally.missed, "\n".join(tally.missed[:20])
    if COUNT == USUAL:
        count("mutations", tally.sentence(SEED))
    else:
        soaked.write("mutations", tally.sentence(SEED))
