"""The demo's corpus, models and settings, what it calls right and wrong, and what it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from paddleformers_fc.errors import OptionError
from tests.cli.support import content
from verification.demo import demo as run_demo, jobs, settings as demo
from verification.demo.assets import SEQUENCE_LENGTH, Assets, prepare
from verification.demo.jobs import DemoRun
from verification.demo.report import LossComparison, LossLine, draw, table


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return prepare(tmp_path_factory.mktemp("assets"))


def test_preparing_again_gives_the_same_bytes(assets: Assets, tmp_path: Path) -> None:
    prepare(tmp_path)
    assert content(tmp_path) == content(assets.corpus.parent)


RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.parametrize(
    ("file", "model", "more"),
    [("llama_pt", "llama", {}), ("ernie_moe_pt", "ernie_moe", {}), ("llama_lora", "llama", demo.LORA)],
)
def test_a_recipe_is_the_demos_settings_and_one_key(file: str, model: str, more: dict[str, Any]) -> None:
    recipe = yaml.safe_load((RECIPES / f"{file}.yaml").read_text())
    output = f"./out/{file.removesuffix('_pt')}"
    shown = demo.settings(f"./demo_out/assets/{model}", "./demo_out/assets/corpus.jsonl", output, demo.DP2)
    assert recipe == shown | more | {"flex_checkpoint": True}
    lengths = (demo.STEPS, demo.RESUME_AT, SEQUENCE_LENGTH)
    assert (recipe["max_steps"], recipe["save_steps"], recipe["max_seq_len"]) == lengths


@pytest.mark.parametrize(
    "layout", [demo.SINGLE, demo.DP2, demo.TP2, demo.PP2, demo.SHARDING2V2], ids=lambda layout: layout.name
)
def test_every_layout_takes_the_same_number_of_samples_per_step(layout: demo.DemoLayout) -> None:
    content = demo.settings("model", "corpus", "output", layout)
    per_rank = content["per_device_train_batch_size"] * content["gradient_accumulation_steps"]
    assert per_rank * layout.replicas == demo.GLOBAL_BATCH
    assert layout.ranks == (1 if layout == demo.SINGLE else 2)


def test_a_run_of_ours_adds_one_key_and_the_registration() -> None:
    ours, stock = (
        jobs._content(DemoRun("run", Path("m"), Path("c"), demo.DP2, flex=flex, resume=Path("checkpoint-3")), Path("o"))
        for flex in (True, False)
    )
    assert stock["custom_register_path"] == str(jobs.STOCK)
    assert stock["resume_from_checkpoint"] == "checkpoint-3"
    assert "flex_checkpoint" not in stock
    assert ours == stock | {"flex_checkpoint": True, "custom_register_path": str(jobs.OURS)}


def test_the_losses_are_read_from_the_log_of_a_rank() -> None:
    log = (
        "[32m[    INFO] - loss: 6.2801218, learning_rate: 0.004167, global_step: 1, interval_runtime: 0.07, ppl: 5[0m\n"
        "[32m[    INFO] - loss: nan, learning_rate: 0.003333, global_step: 2, interval_runtime: 0.03[0m\n"
        "[32m[    INFO] - train_runtime: 0.4, train_loss: 6.0, progress_or_epoch: 1.0[0m\n"
    )
    assert jobs._losses(log) == pytest.approx({1: 6.2801218, 2: float("nan")}, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", ["my demo", "a,b", "a#2"])
def test_a_path_that_paddleformers_would_cut_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="separators"):
        jobs.train(DemoRun("run", tmp_path, tmp_path / name / "corpus.jsonl", demo.DP2), tmp_path)


MD5 = "0" * 32
REFERENCE = LossLine("dp2", {step: 7.0 - step / 8 for step in range(1, 7)}, MD5)
RESUMED = LossLine("tp2", {step: 7.0 - step / 8 for step in (4, 5, 6)}, MD5)
RIGHT = LossComparison("Llama", 3, REFERENCE, (RESUMED,), reloaded=6.5)


def _with(line: LossLine) -> LossComparison:
    return replace(RIGHT, lines=(line,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"losses": {4: 6.5, 5: 6.375, 6: 6.25001}}, "1.0e-05"),
        ({"losses": {4: 6.5, 5: 6.375, 6: float("nan")}}, "inf"),
        ({"losses": {4: 6.5, 5: 6.375}}, "inf"),
        ({"unequal_tensors": ("optimizer_state lm_head.weight.moment1_0",)}, "lm_head.weight.moment1_0"),
        ({"export_md5": "1" * 32}, "md5"),
        ({"losses": {}, "export_md5": None, "stock": True}, ""),
    ],
)
def test_a_difference_from_the_uninterrupted_run_is_a_fault(changes: dict[str, Any], message: str) -> None:
    faults = _with(replace(RESUMED, **changes)).faults()
    assert len(faults) == bool(message)
    assert all("tp2" in fault and message in fault for fault in faults)


def test_an_export_that_trains_otherwise_is_a_fault() -> None:
    (fault,) = replace(RIGHT, reloaded=6.4).faults()
    assert "reloaded export" in fault


def test_the_table_has_a_row_per_run_with_losses_difference_and_md5_and_the_picture_is_a_png(tmp_path: Path) -> None:
    console = Console(width=200, record=True)
    console.print(table(RIGHT))
    text = console.export_text()
    for expected in ("dp2", "tp2", "6.50000000", "6.25000000", "0.0e+00", MD5):
        assert expected in text
    draw([RIGHT, _with(replace(RESUMED, stock=True))], tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_that_holds_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.tex"
    kept.touch()
    with pytest.raises(OptionError, match="contains other files"):
        run_demo(tmp_path)
    assert kept.exists()
