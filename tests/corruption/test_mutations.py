"""Every random mutation of a checkpoint is refused under ``full``, and the file that was damaged is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddleformers_fc.storage.manifest import MANIFEST_NAME
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


def test_a_look_at_sizes_alone_sees_every_change_of_size_and_misses_flipped_bits(tmp_path: Path) -> None:
    missed = "\n".join(mutations.run(tmp_path, SEED, 200, "size").missed)
    assert "bit flips in tensors" in missed
    for kind in ("truncations", "missing files", "extra files", "bit flips in the manifest", "bit flips in the index"):
        assert kind not in missed


def test_a_manifest_that_has_lost_any_number_of_bytes_is_refused(tmp_path: Path) -> None:
    files = mutations.checkpoint(tmp_path / "checkpoint-3", 0)
    size = len(files[MANIFEST_NAME])
    cuts = [*range(1, 9), *range(9, size, 97), size]
    assert [lost for lost in cuts if not mutations.is_refused(tmp_path / "checkpoint-3", files, lost)] == []
