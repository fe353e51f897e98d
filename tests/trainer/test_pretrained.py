"""Open weights into live models under several layouts, and out again: the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import tiny
from verification.forkserver import ForkServer

JOB = "tests.trainer.export_jobs:start_from_open_weights"
MOE = {"num_nextn_predict_layers": 1}


def weights_of(ranks: ForkServer, directory: Path, model_type: str, model: dict[str, Any]) -> Path:
    """The export of a tiny model with its initial weights."""
    run = {
        "layout": tiny.SINGLE.to_json(),
        "output_dir": str(directory / "run"),
        "model_type": model_type,
        "model": model,
    }
    ranks.run("tests.trainer.export_jobs:export_initial", 1, {**run, "target": str(directory / "weights")})
    return directory / "weights"


def start(
    ranks: ForkServer, directory: Path, layout: tiny.MatrixLayout, source: Path, **job: Any
) -> dict[str, list[str]]:
    settings = {"layout": layout.to_json(), "output_dir": str(directory / f"run-{layout.name}"), **job}
    target = str(directory / f"again-{layout.name}")
    return ranks.run(JOB, layout.nproc, {**settings, "source": str(source), "target": target}).values[0]


@pytest.mark.parametrize(("model_type", "model"), [("llama", {}), ("ernie4_5_moe", MOE)])
def test_weights_pass_through_every_layout_unchanged(
    ranks: ForkServer, tmp_path: Path, model_type: str, model: dict[str, Any]
) -> None:
    source = weights_of(ranks, tmp_path, model_type, model)
    original = (source / "model.safetensors").read_bytes()
    for layout in (tiny.SINGLE, tiny.TP2, tiny.DP2):
        report = start(ranks, tmp_path, layout, source, model_type=model_type, model=model)
        assert report == {"fresh": [], "dropped": []}
        assert (tmp_path / f"again-{layout.name}/model.safetensors").read_bytes() == original
