"""Averaged weights in the model, and what is in it afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.corruption.guarantees import Observed, fault
from tests.harness.tiny import SD2S3
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

THREE = {"max_steps": 3, "save_steps": 1, "logging_steps": 1}
EVALUATED = {"flex_ema_decay": 0.9, "flex_ema_evaluate": True}


@pytest.mark.slow
@fault("G112", "`flex_ema_evaluate: true` under `sharding: stage3`: each pass moves the slices of weights")
def test_g112_the_weights_come_back_to_where_stage_three_has_moved_them(ranks: ForkServer, tmp_path: Path) -> Observed:
    runs: list[tuple[list[Any], list[Any]]] = []
    for name, arguments in (("plain", {}), ("averaged", EVALUATED)):
        given = {"layout": SD2S3.to_json(), "output_dir": str(tmp_path / name), "fail": bool(arguments)}
        ran = ranks.run("tests.trainer.ema_jobs:evaluated", 2, {**given, "arguments": {**THREE, **arguments}})
        stored = [one for one in canonical_digests(tmp_path / name / "checkpoint-3") if one.role != "ema_state"]
        runs.append((ran.values, stored))
    (plain, expected), (averaged, found) = runs
    assert [rank["restored"] for rank in averaged] == [[True, True]] * 2
    assert [rank["losses"] for rank in averaged] == [rank["losses"] for rank in plain]
    assert averaged[0]["evaluated"] != plain[0]["evaluated"]
    assert found == expected
    return Observed(
        "—",
        "also after an evaluation that fails in a pass, all losses and "
        f"{' and '.join(sorted({f'`{one.role}`' for one in found}))} of checkpoints are those of a run without it",
    )
