"""Every random mutation of a checkpoint is refused under ``full``, and the file that was damaged is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.corruption import mutations
from tests.corruption.guarantees import observe
from tests.crash import soaked

FEW, USUAL = 200, 2000
COUNT = int(os.environ.get("FLEX_MUTATIONS", USUAL))
"""Number of mutations; ``make soak`` sets more."""


@pytest.mark.parametrize("number", [FEW, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_every_random_mutation_is_refused_and_the_damaged_file_is_named(tmp_path: Path, number: int) -> None:
    counted, missed = mutations.run(tmp_path, 1, number)
    assert not missed, "\n".join(missed[:20])
    if number == USUAL:
        observe("mutations", counted=counted)
    elif number == COUNT:
        soaked.write("mutations", counted)
