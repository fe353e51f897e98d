"""``plan`` forecasts a load onto other ranks, and refuses layouts that the model cannot have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.layout.batch_sizes import ACCUMULATION as PASSES, MICRO_BATCH as BATCH, BatchSizes, step_samples
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.storage.state_json import encode
from paddleformers_fc.trainer.position import Position, SampleOrder, to_document
from tests.cli.support import document_of, run, seal


def planned(directory: Path, *arguments: object) -> dict[str, Any]:
    """The JSON document of a plan that can be carried out."""
    found = document_of("plan", directory, *arguments)
    return found


def test_a_plan_has_every_rank_of_the_target(stored: Path) -> None:
    found = planned(stored, "--to", "tp=2,pp=2,dp=2")
    assert (found["to"], found["world_size"], found["dtype"]) == ("dp=2,tp=2,pp=2", 8, "float32")
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert found["bytes"] == sum(rank["bytes"] for rank in found["ranks"])
    assert found["read"] == sum(rank["read"] for rank in found["ranks"])
    assert found["items"] == sum(rank["items"] for rank in found["ranks"])
    assert found["peak"] == max(rank["peak"] for rank in found["ranks"])
    assert found["amplification"] == pytest.approx(found["read"] / found["bytes"], abs=1e-4)
    assert (found["fresh"], found["dropped"], found["cast"], found["samples"]) == ([], [], [], None)
    held = run("inspect", stored, "--json").document["roles"]
    assert planned(stored, "--to", "dp=1")["bytes"] == sum(role["bytes"] for role in held.values())


def test_open_weights_are_planned_and_casts_are_listed(stored: Path, tmp_path: Path) -> None:
    weights = tmp_path / "open"
    assert run("export", stored, weights).code == 0
    found = planned(weights, "--to", "tp=2", "--dtype", "bfloat16")
    assert {(cast["stored"], cast["wanted"]) for cast in found["cast"]} == {("float32", "bfloat16")}
    assert found["bytes"] * 2 < found["read"] * 1.01
    assert planned(weights, "--to", "tp=2")["cast"] == []
    assert f"cast  {len(found['cast'])} tensors" in run("plan", weights, "--to", "tp=2", "--dtype", "bfloat16").out


@pytest.mark.parametrize("spelling", ["fp32", "float", "torch.float32", "F32"])
def test_usual_spellings_of_a_dtype_give_the_same_plan(stored: Path, spelling: str) -> None:
    assert planned(stored, "--to", "tp=2", "--dtype", spelling) == planned(stored, "--to", "tp=2", "--dtype", "float32")


def with_data(stored: Path, directory: Path, pace: BatchSizes) -> Path:
    """A copy of a checkpoint of a run with these batch sizes."""
    made = Path(shutil.copytree(stored, directory))
    (made / "trainer").mkdir()
    document = to_document(
        Position(consumed=read_manifest(made).consumed_samples), pace, SampleOrder(True, 64, False, 0)
    )
    (made / "trainer/data.json").write_bytes(encode(document, "data.json"))
    seal(made)
    return made


@pytest.mark.parametrize(
    ("to", "planned_samples", "keep", "text"),
    [
        ("tp=2,dp=2", 32, {BATCH: 4, PASSES: 8}, "64 saved, 32 with dp=2,tp=2; to keep 64, set"),
        ("dp=2,sharding=2", 64, {}, "64, as saved"),
        ("sharding=32", 512, {BATCH: 2, PASSES: 1}, f"{BATCH}: 2, {PASSES}: 1"),
        ("dp=3", 48, {}, "64 saved, 48 with dp=3; no setting keeps 64"),
    ],
)
def test_the_samples_per_step_are_compared(
    stored: Path, tmp_path: Path, to: str, planned_samples: int, keep: dict[str, int], text: str
) -> None:
    made = with_data(stored, tmp_path / "checkpoint-3", BatchSizes(4, 4, 4))
    assert planned(made, "--to", to)["samples"] == {"saved": 64, "planned": planned_samples, "keep": keep}
    shown = " ".join(run("plan", made, "--to", to).out.split())
    assert "samples per step 64" in shown
    assert text in shown


def test_all_faults_of_a_layout_are_in_one_error_and_each_on_one_line(stored: Path) -> None:
    assert document_of("plan", stored, "--to", "tp=3,pp=6,ep=3", code=2)["evidence"] == [
        "vocab_size=32 is not divisible by tp=3",
        "num_attention_heads=4 is not divisible by tp=3",
        "num_key_value_heads=2 is not divisible by tp=3",
        "ep=3: the model has no experts",
        "2 layers, embedding, norm and head are 5 items, fewer than pp=6",
    ]


def test_equal_ranks_share_a_row_of_the_text(stored: Path) -> None:
    text = run("plan", stored, "--to", "pp=2,dp=2").out
    assert "-> dp=2,pp=2" in text
    # The order is dp, pp: neighbours are different stages.
    assert [line.split()[0] for line in text.splitlines() if line[:3].strip().isdigit()] == ["0", "1", "2", "3"]
    assert "each a part of a stored tensor that one rank reads" in text
    assert "100% of the bytes held" in run("plan", stored, "--to", "tp=2,sharding=2").out
    text = run("plan", stored, "--to", "dp=4").out
    assert "0-3" in text
    assert not any(word in text for word in ("not loaded", "dropped", "cast", "samples per step"))


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
    assert document_of("plan", stored, "--to", "tp=2", "--aoa-config", wrong, code=1)["error"] == "MappingError"


@pytest.mark.parametrize("saved", [BatchSizes(2 * 1_000_000_007, 1, 3), BatchSizes(2**31 - 1, 2**31 - 1, 2**31 - 1)])
def test_settings_that_no_run_would_have_are_not_searched_for(saved: BatchSizes) -> None:
    found = step_samples(saved, 2)
    assert found.keep in ({}, {BATCH: 3, PASSES: 1_000_000_007})


def test_invalid_batch_sizes_of_a_checkpoint_are_reported(stored: Path, tmp_path: Path) -> None:
    made = with_data(stored, tmp_path / "checkpoint-3", BatchSizes(0, 4, 4))
    outcome = run("plan", made, "--to", "tp=2")
    assert outcome.code == 1
    assert "The batch sizes in trainer/data.json are invalid" in outcome.err
