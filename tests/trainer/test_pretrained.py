"""Open weights into live models under several layouts, and out again: the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness import tiny
from verification.forkserver import ForkServer

JOB = "tests.trainer.export_jobs:start_from_open_weights"


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


def test_weights_pass_through_layouts_unchanged_with_layers_that_predict_several_tokens(
    ranks: ForkServer, tmp_path: Path
) -> None:
    """Other models, by ``from_pretrained``: test_open_weights.py."""
    given: dict[str, Any] = {"model_type": "ernie4_5_moe", "model": {"num_nextn_predict_layers": 1}}
    source = weights_of(ranks, tmp_path, **given)
    assert start(ranks, tmp_path, tiny.TP2, source, **given) == {"fresh": [], "dropped": []}
    again = tmp_path / f"again-{tiny.TP2.name}/model.safetensors"
    assert again.read_bytes() == (source / "model.safetensors").read_bytes()
