"""Optimizer states of a checkpoint whose parameters have other names in the live model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.tiny import SINGLE, TP2, MatrixLayout
from verification.forkserver import ForkServer

JOBS = "tests.trainer.optimizer_jobs"
HALF = replace(SINGLE, name="single-bf16", bf16=True)


@pytest.mark.parametrize(
    ("layout", "by_trainer"), [(TP2, True), (HALF, True), (HALF, False)], ids=["tp2", "bfloat16", "load"]
)
def test_states_follow_their_parameters_through_statements_that_rename_them(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, by_trainer: bool
) -> None:
    given = {"layout": layout.to_json(), "output_dir": str(tmp_path), "by_trainer": by_trainer}
    for found in ranks.run(f"{JOBS}:load_into_more_layers", layout.nproc, given).values:
        assert found == {"differ": [], "missing": [], "new": []}


def test_master_weights_are_read_from_renamed_weights_without_stored_states(ranks: ForkServer, tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path)}
    assert ranks.run(f"{JOBS}:load_weights_into_more_layers", 1, given).values == ([],)
