"""The demo's settings, the recipes for people, and the YAML that a run gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paddleformers_fc.errors import OptionError
from verification.demo import jobs
from verification.demo.assets import SEQUENCE_LENGTH
from verification.demo.jobs import DemoRun
from verification.demo.settings import (
    DP2,
    GLOBAL_BATCH,
    LORA,
    PP2,
    RESUME_AT,
    SHARDING2V2,
    SINGLE,
    STEPS,
    TP2,
    DemoLayout,
    settings,
)

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.mark.parametrize(
    ("file", "model", "more"),
    [("llama_pt", "llama", {}), ("ernie_moe_pt", "ernie_moe", {}), ("llama_lora", "llama", LORA)],
)
def test_a_recipe_is_the_demos_settings_and_one_key(file: str, model: str, more: dict[str, Any]) -> None:
    recipe = yaml.safe_load((RECIPES / f"{file}.yaml").read_text())
    output = f"./out/{file.removesuffix('_pt')}"
    shown = settings(f"./demo_out/assets/{model}", "./demo_out/assets/corpus.jsonl", output, DP2)
    assert recipe == shown | more | {"flex_checkpoint": True}
    assert (recipe["max_steps"], recipe["save_steps"], recipe["max_seq_len"]) == (STEPS, RESUME_AT, SEQUENCE_LENGTH)


@pytest.mark.parametrize("layout", [SINGLE, DP2, TP2, PP2, SHARDING2V2], ids=lambda layout: layout.name)
def test_every_layout_takes_the_same_number_of_samples_per_step(layout: DemoLayout) -> None:
    content = settings("model", "corpus", "output", layout)
    per_rank = content["per_device_train_batch_size"] * content["gradient_accumulation_steps"]
    assert per_rank * layout.replicas == GLOBAL_BATCH
    assert layout.ranks == (1 if layout == SINGLE else 2)


def test_a_run_of_ours_adds_one_key_and_the_registration() -> None:
    ours, stock = (
        jobs._content(DemoRun("run", Path("m"), Path("c"), DP2, flex=flex), Path("o")) for flex in (True, False)
    )
    assert ours == stock | {"flex_checkpoint": True, "custom_register_path": str(jobs.OURS)}
    assert "flex_checkpoint" not in stock
    run = DemoRun("run", Path("model"), Path("corpus"), TP2, flex=False, resume=Path("checkpoint-3"))
    content = jobs._content(run, Path("output"))
    assert content["custom_register_path"] == str(jobs.STOCK)
    assert content["resume_from_checkpoint"] == "checkpoint-3"


def test_the_losses_are_read_from_the_log_of_a_rank() -> None:
    log = (
        "[32m[    INFO] - loss: 6.2801218, learning_rate: 0.004167, global_step: 1, interval_runtime: 0.07, ppl: 5[0m\n"
        "[32m[    INFO] - loss: nan, learning_rate: 0.003333, global_step: 2, interval_runtime: 0.03[0m\n"
        "[32m[    INFO] - train_runtime: 0.4, train_loss: 6.0, progress_or_epoch: 1.0[0m\n"
    )
    losses = jobs._losses(log)
    assert losses.keys() == {1, 2}
    assert losses[1] == 6.2801218
    assert losses[2] != losses[2]


@pytest.mark.parametrize("name", ["my demo", "a,b", "a#2"])
def test_a_path_that_paddleformers_would_cut_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="separators"):
        jobs.train(DemoRun("run", tmp_path, tmp_path / name / "corpus.jsonl", DP2), tmp_path)
