"""Copies of a tied weight that diverge between the stages of a pipeline, and those that stock stores without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.formats.paddle_distcp import PADDLE_DISTCP
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.storage.manifest import read_manifest
from tests.corruption.guarantees import Observed, fault
from tests.harness.tiny import DP2, PP2, MatrixLayout
from verification.forkserver import ForkServer

JOB = "tests.trainer.tied_jobs:run_and_part_copies"
NEVER = 10**6


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def train(
    ranks: ForkServer,
    output_dir: Path,
    after: int,
    ours: bool,
    resume: str | bool | None = None,
    layout: MatrixLayout = PP2,
) -> list[Any]:
    """Train a tied Llama to step 3 with a checkpoint at every step, of which one stays; the outcome by rank."""
    arguments: dict[str, Any] = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1, "max_grad_norm": 0.0}
    if ours:
        arguments["flex_check_replicas"] = "off"
    given = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": arguments, "after": after}
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


@pytest.mark.slow
@fault(
    "G117",
    "a stock checkpoint of a tied model stores the weight under both names and its optimizer states under the one that "
    "is not the owner's; then the stored copies differ",
)
def test_g117_every_stored_name_of_a_tied_weight_counts(ranks: ForkServer, tmp_path: Path) -> Observed:
    stored = tmp_path / "stock" / "checkpoint-3"
    train(ranks, stored.parent, NEVER, False, layout=DP2)
    roles = PADDLE_DISTCP.open(stored).catalog.roles
    assert {EMBEDDING, HEAD} <= roles[MODEL_STATE].keys()
    assert f"{HEAD}.moment1_0" in roles[OPTIMIZER_STATE]
    assert f"{EMBEDDING}.moment1_0" not in roles[OPTIMIZER_STATE]

    def resumed(ours: bool, name: str) -> list[Any]:
        given = {"layout": DP2.to_json(), "output_dir": str(tmp_path / name), "arguments": {"max_steps": 5}}
        return list(ranks.run(JOB, 2, {**given, "after": NEVER, "ours": ours, "resume": str(stored)}).values)

    whole, own = (resumed(ours, f"whole-{ours}")[0]["losses"] for ours in (False, True))
    assert own == whole
    ((file, begin),) = roles[MODEL_STATE][HEAD].offsets
    with (stored / file).open("r+b") as data:
        data.seek(begin)
        data.write(bytes(4 * 64))
    altered, refused = (resumed(ours, f"altered-{ours}") for ours in (False, True))
    assert altered[0]["losses"] != whole
    assert [one["error"] for one in refused] == ["Diverged"] * 2
    (line,) = (one for one in refused[0]["text"].splitlines() if HEAD in one)
    return Observed(
        "resumes; also with differing copies, where the losses are others; no error",
        "resumes with the losses of stock; differing copies are refused on every rank: "
        f"`Diverged`, “{line.strip().removeprefix('- ')}”",
    )
