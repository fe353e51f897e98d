"""A damaged newest checkpoint, and which one a run resumes by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import flip
from tests.corruption.guarantees import Observed, fault
from tests.corruption.test_trainer_faults import first_line, trained
from tests.harness.tiny import DP2, SINGLE
from tests.trainer.test_newest_run import cut_into_small_blocks
from tests.trainer.test_trainer import JOBS, settings
from verification.forkserver import ForkServer

WEIGHTS = "model_state/rank-00000.safetensors"


@pytest.mark.slow
@fault("G70", "a byte of a tensor has changed in the newest checkpoint, and `resume_from_checkpoint: true` is set")
def test_g70_the_newest_checkpoint_that_passes_verification_is_resumed(
    bare_ranks: ForkServer, ranks: ForkServer, tmp_path: Path
) -> Observed:
    assert trained(bare_ranks, SINGLE, tmp_path / "stock")[0]["step"] == 6
    (stock,) = trained(bare_ranks, SINGLE, tmp_path / "stock", True)
    assert stock["error"].startswith("TypeError")
    given: dict[str, Any] = {"max_steps": 3, "save_steps": 1}
    ranks.run(f"{JOBS}:run", 2, settings(DP2, tmp_path, **given))
    newest = tmp_path / "checkpoint-3"
    cut_into_small_blocks(newest)
    flip(newest / WEIGHTS, (newest / WEIGHTS).stat().st_size // 2)  # A byte of a tensor.
    for found in ranks.run(f"{JOBS}:refused", 2, settings(DP2, tmp_path, newest, **given)).values:
        assert (found["error"], found["changed"]) == ("Corrupt", True)
    resumed = ranks.run(f"{JOBS}:run", 2, settings(DP2, tmp_path, True, **given))
    assert [len(value["losses"]) for value in resumed.values] == [1, 1]
    (line,) = [line for line in resumed.logs[0].read_text().splitlines() if "fails verification" in line]
    assert "checkpoint-3 fails verification and is skipped: checkpoint-3 is damaged" in line
    assert f"1 fault found: {WEIGHTS}" in line
    return Observed(
        first_line(stock),
        f"every rank skips checkpoint-3 with a warning that names {WEIGHTS}, and resumes checkpoint-2; checkpoint-3 is "
        "refused where it is named: `Corrupt`, and what it has filled is neither trained nor saved",
    )
