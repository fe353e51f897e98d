"""``derive`` finds the mapping of a model from open weights, lists open questions, and writes a family."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.aoa import normal
from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.families import bind
from paddleformers_fc.families.registry import prove_family
from tests.families.derivation import Case
from tests.families.spaces import BY_NAME, settings
from tests.storage.support import writer_of

CLASSES = {"ernie4_5": "Ernie4_5ForCausalLM", "phi3": "Phi3ForCausalLM", "llama": "LlamaForCausalLM"}


def weights(directory: Path, name: str) -> Case:
    """Open weights of a family's tiny model, all zeros, with their configuration."""
    case = Case(BY_NAME[name], None, 1)
    directory.mkdir()
    more = {"pad_token_id": 0} if name == "phi3" else {}
    config = {**settings(case.family), **more, "model_type": name, "architectures": [CLASSES[name]]}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arrays = {key: np.zeros(spec.shape, np.float32) for key, spec in case.canonical.items()}
    entries = [(key, "F32", array.shape) for key, array in arrays.items()]
    with writer_of(directory / "model.safetensors", entries, {"format": "np"}) as writer:
        for key, array in arrays.items():
            writer.write(key, array)
        writer.close()
    return case


def derive(ranks: ForkServer, *arguments: object) -> dict[str, Any]:
    words = ["derive", *map(str, arguments)]
    result = ranks.run("tests.cli.deriving_jobs:command", 1, {"arguments": words})
    assert result.ok, result.logs[0].read_text()
    (outcome,) = result.values
    return outcome


def test_a_generated_family_binds_the_model_like_the_declared_one(ranks: ForkServer, tmp_path: Path) -> None:
    case = weights(tmp_path / "weights", "ernie4_5")
    target = tmp_path / "family.py"
    found = derive(ranks, tmp_path / "weights", "--family", target, "--json")
    assert found["code"] == 0, found["err"]
    assert json.loads(found["out"])["reasons"]["the proved hint"] == 4
    family = runpy.run_path(str(target))["FAMILY"]
    prove_family(family)
    for tp in (1, 2, 4):
        tensors = Case(case.family, None, tp).tensors()
        made = bind(family, case.model, tensors).mapping()
        assert normal(made) == normal(bind(case.family, case.model, tensors).mapping())


def test_questions_left_without_native_statements_can_be_settled(ranks: ForkServer, tmp_path: Path) -> None:
    weights(tmp_path / "weights", "ernie4_5")
    asked = derive(ranks, tmp_path / "weights", "--no-native")
    assert asked["code"] == 1
    line = next(
        text.strip().removeprefix("1) ") for text in asked["err"].replace("- ", "").splitlines() if "1) " in text
    )
    settled = derive(ranks, tmp_path / "weights", "--no-native", "--settle", line, "--json")
    assert settled["code"] == 0, settled["err"]
    assert any("fused_qkv, num_heads=8" in text for text in json.loads(settled["out"])["statements"])


def test_a_layer_that_is_fused_in_files_too_is_not_guessed(ranks: ForkServer, tmp_path: Path) -> None:
    case = weights(tmp_path / "weights", "phi3")
    target = tmp_path / "family.py"
    refused = derive(ranks, tmp_path / "weights", "--family", target)
    assert (refused["code"], target.exists()) == (1, False)
    assert "qkv_proj=same|linear|fused_ffn|fused_qkv_old" in refused["err"]
    geometry = ["--fused", "qkv_proj=fused_qkv_old", "--fused", "gate_up_proj=fused_ffn"]
    found = derive(ranks, tmp_path / "weights", "--family", target, *geometry)
    assert found["code"] == 0, found["err"]
    family = runpy.run_path(str(target))["FAMILY"]
    tensors = Case(case.family, None, 2).tensors()
    assert normal(bind(family, case.model, tensors).mapping()) == normal(
        bind(case.family, case.model, tensors).mapping()
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--fused", "a=b"], "no geometry"),
        (["--family", "/"], "exists"),
        (["--settle", "a -> b"], "Invalid settling lines"),
    ],
)
def test_invalid_arguments_are_refused(ranks: ForkServer, tmp_path: Path, words: list[str], why: str) -> None:
    weights(tmp_path / "weights", "llama")
    found = derive(ranks, tmp_path / "weights", *words)
    assert found["code"] != 0
    assert why in found["err"]


def test_a_configuration_that_paddleformers_cannot_build_is_reported(ranks: ForkServer, tmp_path: Path) -> None:
    weights(tmp_path / "weights", "llama")
    config = tmp_path / "weights" / "config.json"
    config.write_text(json.dumps({"model_type": "unheard_of"}), encoding="utf-8")
    found = derive(ranks, tmp_path / "weights")
    assert found["code"] == 2
    assert "PaddleFormers cannot build this model." in found["err"]
