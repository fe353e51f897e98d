"""A PaddleFormers that changes below this package, and a Trainer that goes around it."""

from __future__ import annotations

from pathlib import Path

from tests.corruption.guarantees import Observed, fault
from tests.harness.tiny import DP2, SINGLE
from verification.forkserver import ForkServer

JOBS = "tests.trainer.upstream_jobs"


@fault("G30", "`_save_checkpoint` of PaddleFormers' Trainer has another name")
def test_g30_a_renamed_hook_is_refused_before_training(ranks: ForkServer, tmp_path: Path) -> Observed:
    given = {"output_dir": str(tmp_path), "layout": SINGLE.to_json(), "name": "_save_checkpoint"}
    (found,) = ranks.run(f"{JOBS}:train_with_a_renamed_method", 1, given).values
    assert not list(tmp_path.glob("checkpoint-*"))
    line = "paddleformers.trainer.trainer:Trainer._save_checkpoint is missing"
    assert (found["error"], line in found["evidence"]) == ("EnvironmentMismatch", True)
    return Observed(
        "—",
        f"refused when arguments are made: `{found['error']}`, “{line}”; nothing was trained",
    )


@fault("G31", "a Trainer class overrides `_save_checkpoint` and does not call `super()`")
def test_g31_a_save_that_goes_around_stops_every_rank(ranks: ForkServer, tmp_path: Path) -> Observed:
    given = {"layout": DP2.to_json(), "output_dir": str(tmp_path), "method": "_save_checkpoint", "way": "installed"}
    found = ranks.run(f"{JOBS}:goes_around", 2, given).values
    assert [one["error"] for one in found] == ["EnvironmentMismatch"] * 2
    assert [one["step"] for one in found] == [2, 2]
    assert "_save_checkpoint of paddleformers_fc did not run" in found[0]["text"]
    written = sorted(path.name for path in (tmp_path / "checkpoint-2" / "model_state").glob("*.metadata"))
    return Observed(
        f"`checkpoint-2/model_state/{written[0]}`, and the run continues",
        f"every rank stops after that save: `{found[0]['error']}`, “_save_checkpoint of paddleformers_fc did not run”",
    )
