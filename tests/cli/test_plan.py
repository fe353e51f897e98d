"""``plan`` forecasts a load onto other ranks, and refuses layouts that the model cannot have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import run


@pytest.fixture
def weights(stored: Path, tmp_path: Path) -> Path:
    """The same weights as Hugging Face files."""
    assert run("export", stored, tmp_path / "open").code == 0
    return tmp_path / "open"


def planned(directory: Path, *arguments: object) -> dict[str, Any]:
    """The JSON document of a plan that can be carried out."""
    outcome = run("plan", directory, *arguments, "--json")
    assert outcome.code == 0, outcome.out
    return outcome.document


def test_a_plan_has_every_rank_of_the_target(stored: Path) -> None:
    found = planned(stored, "--to", "tp=2,pp=2,dp=2")
    assert (found["to"], found["world_size"], found["dtype"]) == ("dp=2,tp=2,pp=2", 8, "float32")
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert found["bytes"] == sum(rank["bytes"] for rank in found["ranks"])
    assert found["read"] == sum(rank["read"] for rank in found["ranks"])
    assert found["items"] == sum(rank["items"] for rank in found["ranks"])
    assert found["peak"] == max(rank["peak"] for rank in found["ranks"])
    assert found["amplification"] == pytest.approx(found["read"] / found["bytes"], abs=1e-4)
    assert (found["fresh"], found["dropped"], found["cast"]) == ([], [], [])
    held = run("inspect", stored, "--json").document["roles"]
    assert planned(stored, "--to", "dp=1")["bytes"] == sum(role["bytes"] for role in held.values())


def test_open_weights_are_planned_and_casts_are_listed(weights: Path) -> None:
    found = planned(weights, "--to", "tp=2", "--dtype", "bfloat16")
    assert {(cast["stored"], cast["wanted"]) for cast in found["cast"]} == {("float32", "bfloat16")}
    assert found["bytes"] * 2 < found["read"] * 1.01
    assert planned(weights, "--to", "tp=2")["cast"] == []
    assert f"cast  {len(found['cast'])} tensors" in run("plan", weights, "--to", "tp=2", "--dtype", "bfloat16").out


def test_equal_ranks_share_a_row_of_the_text(stored: Path) -> None:
    text = run("plan", stored, "--to", "pp=2,dp=2").out
    assert "-> dp=2,pp=2" in text
    # The order is dp, pp: neighbours are different stages.
    assert [line.split()[0] for line in text.splitlines() if line[:3].strip().isdigit()] == ["0", "1", "2", "3"]
    assert "each a part of a stored tensor that one rank reads" in text
    text = run("plan", stored, "--to", "dp=4").out
    assert "0-3" in text
    assert not any(word in text for word in ("not loaded", "dropped", "cast"))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("tp=4", "num_key_value_heads=2 is not divisible by tp=4"),
        ("tp=2,zp=3", "zp: unknown axis"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_numbers(stored: Path, grid: str, message: str) -> None:
    outcome = run("plan", stored, "--to", grid, "--json")
    assert outcome.code == 2
    assert outcome.document["error"] == "OptionError"
    assert any(message in line for line in outcome.document["evidence"])
    assert message in run("plan", stored, "--to", grid).err


def test_what_cannot_be_planned_is_refused_with_the_reason(stored: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(stored, tmp_path / "checkpoint-3"))
    next((broken / "model_state").iterdir()).unlink()
    for directory, options, code, text in (
        (stored, ("--to", " "), 2, "The grid to plan for is empty."),
        (stored, ("--to", "tp=2", "--dtype", "float12"), 2, "known: float32, bfloat16, float16"),
        (stored, ("--to", "tp=2", "--dtype", "bfloat16"), 1, "model.norm.weight: stored float32, expected bfloat16"),
        (broken, ("--to", "tp=2"), 1, "is missing"),
    ):
        outcome = run("plan", directory, *options)
        assert (outcome.code, text in outcome.err) == (code, True), outcome.err


def test_without_a_configuration_there_is_no_plan(weights: Path) -> None:
    (weights / "config.json").unlink()
    (weights / "flex_checksums.json").unlink()
    outcome = run("plan", weights, "--to", "tp=2")
    assert outcome.code == 2
    assert "Put the model's config.json next to its weights." in outcome.err


def test_a_plan_follows_the_statements_of_a_training(stored: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    written = tmp_path / "job.yaml"
    statements = [f"{name} -> _", f"_ -> {name}"]
    written.write_text(json.dumps({"output_dir": "out", "aoa_config": {"aoa_statements": statements}}))
    assert (planned(stored, "--to", "tp=2")["fresh"], planned(stored, "--to", "tp=2")["dropped"]) == ([], [])
    found = planned(stored, "--to", "tp=2", "--aoa-config", written)
    assert name in found["fresh"]
    assert {one.removesuffix("_0").split(".")[-1] for one in found["dropped"]} == {
        *("weight", "moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    }
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("aoa_statements: ['nowhere -> model.norm.weight']")
    outcome = run("plan", stored, "--to", "tp=2", "--aoa-config", wrong, "--json")
    assert (outcome.code, outcome.document["error"]) == (1, "MappingError")


def test_a_file_without_statements_is_refused(stored: Path, weights: Path, tmp_path: Path) -> None:
    written = tmp_path / "job.yaml"
    written.write_text("output_dir: out")
    outcome = run("plan", stored, "--to", "tp=2", "--aoa-config", written, "--json")
    assert (outcome.code, outcome.document["what"]) == (2, "The file contains no aoa_config.")
    written.write_text("aoa_statements: ['model.norm.weight -> model.norm.weight']")
    outcome = run("plan", weights, "--to", "tp=2", "--aoa-config", written, "--json")
    assert (outcome.code, outcome.document["error"]) == (2, "OptionError")
