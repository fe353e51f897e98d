"""One set of weights and states through every layout in turn, on real ranks: every bit survives every hop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.distributed.channel import job_channel
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from tests.harness import tiny
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2, PP2, SD2V1, SD2V2, TP2, MatrixLayout
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

TOUR = [replace(layout, bf16=True) for layout in (DP2, PP2, SD2V2, TP2, SD2V1)]


def hop(model_type: str, layout: MatrixLayout, output_dir: Path, source: Path | None, target: Path) -> None:
    """Train a tied model a little under a layout, load ``source`` over it if there is one, and save ``target``."""
    from paddleformers_fc.trainer.description import describe_model

    # The step gives the optimizer its states, and the model weights that a load must overwrite.
    args = tiny.training_arguments(layout.to_json(), str(output_dir), max_steps=1 if source else 3)
    built = tiny.build(model_type, layout.to_json(), args, tie_word_embeddings=True)
    trainer = tiny.trainer(built, args)
    trainer.train()
    weights = built.sharded_state_dict()
    roles = tiny.by_role(weights, trainer.optimizer.sharded_state_dict(weights))
    channel, described = job_channel(), describe_model(built)
    if source is not None:
        assert not load_checkpoint(open_on_all_ranks(source, channel), roles, described, channel).fresh
    files = {"config.json": config_bytes(described.config)} if channel.rank == 0 else {}
    save_checkpoint(target, roles, described, files, JobRecord(3, 24, {}), channel)


@pytest.mark.parametrize("model_type", ["llama", "ernie4_5_moe"])
def test_a_tour_of_tied_weights_through_every_layout_changes_no_bit(
    ranks: ForkServer, tmp_path: Path, model_type: str
) -> None:
    source: Path | None = None
    digests: list[Any] = []
    exports: set[str] = set()
    for number, layout in enumerate(TOUR):
        target = tmp_path / f"{number}-{layout.name}" / "checkpoint-3"
        given = {"model_type": model_type, "layout": layout, "output_dir": tmp_path / f"run-{number}"}
        run_on_ranks(ranks, layout.nproc, hop, **given, source=source, target=target)
        found = list(canonical_digests(target))
        digests = digests or found
        assert found == digests
        exports |= set(export_checkpoint(target, tmp_path / f"hf-{number}").digests().values())
        source = target
    assert {digest.role for digest in digests} == {"model_state", "optimizer_state", "master_weight"}
    assert len(exports) == 1
