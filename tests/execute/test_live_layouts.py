"""One set of weights and states through every layout in turn, on real ranks: every bit survives every hop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.execute.export import export_checkpoint
from tests.harness.tiny import DP2, PP2, SD2V1, SD2V2, TP2
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

TOUR = [replace(layout, bf16=True) for layout in (DP2, TP2, PP2, SD2V2, TP2, SD2V1, DP2)]


@pytest.mark.parametrize("model_type", ["llama", "ernie4_5_moe"])
def test_a_tour_of_tied_weights_through_every_layout_changes_no_bit(
    ranks: ForkServer, tmp_path: Path, model_type: str
) -> None:
    source: Path | None = None
    digests: list[Any] = []
    exports: set[str] = set()
    for number, layout in enumerate(TOUR):
        target = tmp_path / f"{number}-{layout.name}" / "checkpoint-3"
        job = {
            "model_type": model_type,
            "layout": layout.to_json(),
            "model": {"tie_word_embeddings": True},
            "output_dir": str(tmp_path / f"run-{number}"),
            "source": None if source is None else str(source),
            "target": str(target),
        }
        result = ranks.run("tests.execute.live_jobs:hop", layout.nproc, job)
        assert not any(result.values)
        found = list(canonical_digests(target))
        digests = digests or found
        assert found == digests
        exports |= set(export_checkpoint(target, tmp_path / f"hf-{number}").digests().values())
        source = target
    assert {digest.role for digest in digests} == {"model_state", "optimizer_state", "master_weight"}
    assert len(exports) == 1
