"""Copies of a tied weight that diverge between the stages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.storage.manifest import read_manifest
from tests.corruption.guarantees import Observed, fault
from tests.harness.tiny import PP2

JOB = "tests.trainer.tied_jobs:run_and_part_copies"
NEVER = 10**6


def train(ranks: ForkServer, output_dir: Path, after: int, ours: bool, resume: str | bool | None = None) -> list[Any]:
    """Train a tied Llama to step 3 with a checkpoint at every step, of which one stays; the outcome by rank."""
    arguments: dict[str, Any] = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1, "max_grad_norm": 0.0}
    if ours:
        arguments["flex_check_replicas"] = "off"
    given = {"layout": PP2.to_json(), "output_dir": str(output_dir), "arguments": arguments, "after": after}
    return list(ranks.run(JOB, 2, {**given, "ours": ours, "resume": resume}).values)


def checkpoints(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.glob("checkpoint-*"))


@pytest.mark.slow
@fault("G40", "copies of a tied weight diverge on two pipeline stages of a run with `save_total_limit: 1`")
def test_g40_diverged_copies_of_a_tied_weight_cost_no_whole_checkpoint(ranks: ForkServer, tmp_path: Path) -> Observed:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    train(ranks, stock, 2, ours=False)
    assert checkpoints(stock) == ["checkpoint-3"]
    one, other = train(ranks, stock, NEVER, False, str(stock / "checkpoint-3"))
    assert {*one["copies"].values()} != {*other["copies"].values()}

    train(ranks, ours, 2, ours=True)
    assert checkpoints(ours) == ["checkpoint-1", "checkpoint-3"]
    (line, *_) = (line for tie in read_manifest(ours / "checkpoint-3").ties for line in tie.differences)
    refused = train(ranks, ours, NEVER, True, str(ours / "checkpoint-3"))
    assert [outcome["error"] for outcome in refused] == ["Diverged"] * 2
    resumed = train(ranks, ours, NEVER, True, True)
    assert [len(outcome["losses"]) for outcome in resumed] == [2, 2]
    assert len({bits for outcome in resumed for bits in outcome["copies"].values()}) == 1
    return Observed(
        "the last checkpoint with equal copies is deleted; a resume continues with two different copies, without an "
        "error",
        f"saved with the record “{line}”, under every option; the whole checkpoint-1 stays, and is the one that "
        "`resume_from_checkpoint: true` resumes; checkpoint-3 is refused unless `flex_tied` chooses a copy",
    )
