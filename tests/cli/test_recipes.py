"""The recipes for GPUs: every key is one of PaddleFormers or of this package, and checkpoints fit their layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paddleformers_fc.cli import training
from tests.cli.support import run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("gpu_*.yaml"))
DEGREES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "sharding_parallel_size": "sharding",
}


def test_there_are_recipes_for_gpus() -> None:
    assert [path.stem for path in RECIPES if "lora" not in path.stem] == ["gpu_dpo", "gpu_pt", "gpu_sft"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_for_gpus_is_accepted_and_its_layout_is_planned(
    recipe: Path, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "local_device", lambda: "gpu:0")
    values: dict[str, Any] = yaml.safe_load(recipe.read_text())
    (tmp_path / "data.jsonl").touch()
    here = [f"{key}={tmp_path / 'data.jsonl'}" for key in ("train_dataset_path", "eval_dataset_path")]
    outcome = run("train", recipe, *here, f"output_dir={tmp_path / 'out'}", "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["ranks"] is None
    degrees = ",".join(f"{axis}={values[key]}" for key, axis in DEGREES.items())
    assert run("plan", stored, "--to", f"{degrees},split=true").code == 0
