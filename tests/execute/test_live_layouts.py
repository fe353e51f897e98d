"""One set of weights and states through every layout in turn, on real ranks: every bit survives every hop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.execute.digest import canonical_digests
from paddleformers_fc.execute.export import export_checkpoint
from tests.harness.tiny import DP2, PP2, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout

TOUR = (DP2, TP2, PP2, SD2V2, TP2, SD2V1, SINGLE, DP2)
CASES = [
    ("llama", {}, False),
    ("llama", {"tie_word_embeddings": True}, True),
    ("ernie4_5_moe", {"moe_use_aux_free": True}, False),
    ("ernie4_5_moe", {"tie_word_embeddings": True}, True),
]


@pytest.mark.parametrize(("model_type", "model", "bf16"), CASES)
def test_a_tour_through_every_layout_changes_no_bit(
    ranks: ForkServer, tmp_path: Path, model_type: str, model: dict[str, Any], bf16: bool
) -> None:
    source: Path | None = None
    digests: list[Any] = []
    exports: set[str] = set()
    for number, plain in enumerate(TOUR):
        layout: MatrixLayout = replace(plain, bf16=bf16)
        if bf16 and plain is SINGLE:
            continue
        target = tmp_path / f"{number}-{layout.name}" / "checkpoint-3"
        job = {
            "model_type": model_type,
            "layout": layout.to_json(),
            "model": model,
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
    roles = {digest.role for digest in digests}
    assert roles == {"model_state", "optimizer_state"} | ({"master_weight"} if bf16 else set())
    assert len(exports) == 1
