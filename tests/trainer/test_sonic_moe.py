"""Experts of ``using_sonic_moe``, whose rows of gate and up alternate: trained, saved, resumed and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.errors import OptionError
from tests.trainer.alternating_jobs import KEYS, SIZES
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"


def train(ranks: ForkServer, output_dir: Path, sonic: bool, steps: int, **given: Any) -> dict[str, Any]:
    """Train in a new output directory, and save at the end."""
    arguments = {"max_steps": steps, "save_steps": 2}
    kwargs = {"sonic": sonic, "output_dir": str(output_dir), "arguments": arguments}
    given = {name: str(value) for name, value in given.items()}
    values: list[dict[str, Any]] = ranks.run("tests.trainer.alternating_jobs:run", 1, {**kwargs, **given}).values
    return values[0]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Open weights of the model."""
    directory = tmp_path_factory.mktemp("weights")
    vocabulary, hidden, width, count = SIZES.values()
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for expert in range(count):
        shapes |= {EXPERT.format(expert, part): (width, hidden) for part in ("gate", "up")}
        shapes[EXPERT.format(expert, "down")] = (hidden, width)
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    tensors["model.norm.weight"] = np.ones(hidden, "float32")
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**KEYS, **SIZES}))
    return directory


@pytest.fixture(scope="module")
def runs(ranks: ForkServer, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, Any]]:
    """Four steps from these weights without and with the option: the output directory and the outcome."""
    root = tmp_path_factory.mktemp("runs")
    return {
        sonic: (root / str(sonic), train(ranks, root / str(sonic), sonic, 4, weights=weights))
        for sonic in (False, True)
    }


def test_both_layouts_train_the_same_model(runs: dict[bool, tuple[Path, Any]]) -> None:
    # With rows in the wrong order, the first forward pass would use gate as up.
    assert runs[True][1]["losses"] == pytest.approx(runs[False][1]["losses"], abs=2e-5)
    assert len(runs[True][1]["losses"]) == 4


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("sonic", [False, True])
def test_a_run_of_either_layout_resumes_the_other_bit_by_bit(
    ranks: ForkServer, runs: dict[bool, tuple[Path, Any]], tmp_path: Path, sonic: bool, saved: bool
) -> None:
    checkpoint = runs[saved][0] / "checkpoint-2"
    # No step is trained, so the second save contains the loaded state, including moments.
    train(ranks, tmp_path / "again", sonic, 2, resume=checkpoint)
    assert list(canonical_digests(tmp_path / "again/checkpoint-2")) == list(canonical_digests(checkpoint))
    resumed = train(ranks, tmp_path / "on", sonic, 4, resume=checkpoint)
    expected = runs[sonic][1]["losses"][2:]
    assert resumed["losses"] == (expected if sonic == saved else pytest.approx(expected, abs=2e-5))
    if sonic == saved:
        assert resumed["stack"] == runs[sonic][1]["stack"]


def test_gate_and_up_alternate_and_are_exported_apart(
    ranks: ForkServer, runs: dict[bool, tuple[Path, Any]], tmp_path: Path
) -> None:
    stack = np.array(runs[True][1]["stack"], "float32")
    exported = load_file(runs[True][0] / "export/model.safetensors")
    for expert in range(SIZES["num_experts"]):
        for first, part in enumerate(("gate", "up")):
            assert np.array_equal(stack[expert, first::2], exported[EXPERT.format(expert, part)])
    paddleformers_fc.open(runs[True][0] / "checkpoint-4").convert(tmp_path / "hf", format="hf")
    again = load_file(tmp_path / "hf/model.safetensors")
    assert {name: one.tobytes() for name, one in again.items()} == {
        name: one.tobytes() for name, one in exported.items()
    }


def test_paddles_own_format_which_does_not_record_the_order_is_refused(
    runs: dict[bool, tuple[Path, Any]], tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        paddleformers_fc.open(runs[True][0] / "checkpoint-4").convert(tmp_path / "distcp", format="distcp")
    assert "using_sonic_moe" in caught.value.what
