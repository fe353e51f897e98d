"""Configurations of adapters in files of PEFT and of PaddleFormers: variants of another meaning are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddleformers_fc.errors import FormatError, OptionError
from paddleformers_fc.formats.paddleformers_lora import open_paddleformers_lora
from paddleformers_fc.formats.peft import open_peft

PEFT_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "peft_version": "0.21.0",
    "r": 4,
    "lora_alpha": 8,
    "init_lora_weights": True,
    "bias": "none",
    "target_modules": ["q_proj"],
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "an_option_of_tomorrow": None,
}
OURS = {"r": 4, "lora_alpha": 8, "scaling": 2.0, "enable_lora_list": None, "pissa": False, "loraga": False}
TENSORS = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((4, 8), np.float32)}


def peft(directory: Path, **changes: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps({**PEFT_CONFIG, **changes}))
    save_file(TENSORS, directory / "adapter_model.safetensors")
    return directory


def paddleformers(directory: Path, **changes: Any) -> Path:
    name = "peft_model-00001-of-00001.safetensors"
    (directory / "lora_config.json").write_text(json.dumps({**OURS, **changes}))
    save_file({"model.layers.0.self_attn.q_proj.lora_A": np.zeros((8, 4), np.float32)}, directory / name)
    index = {"weight_map": {"model.layers.0.self_attn.q_proj.lora_A": name}}
    (directory / "peft_model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        *({"init_lora_weights": kept} for kept in (True, False, "gaussian", "eva", "orthogonal")),
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
    ],
)
def test_initialisations_that_keep_the_base_are_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert open_peft(peft(tmp_path, **changes)).catalog.count == 1


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_16", "olora", "loftq", "corda", "lora_ga", "tomorrow"])
def test_initialisations_that_change_the_base_are_refused(tmp_path: Path, initial: str) -> None:
    with pytest.raises(OptionError) as refused:
        open_peft(peft(tmp_path, init_lora_weights=initial))
    assert f"init_lora_weights: '{initial}'" in refused.value.render()


def test_an_unknown_key_with_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as refused:
        open_peft(peft(tmp_path, an_option_of_tomorrow=[1]))
    assert "an_option_of_tomorrow: [1]: unknown" in refused.value.render()


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -float("inf")])
def test_an_infinite_alpha_is_refused(tmp_path: Path, alpha: float) -> None:
    with pytest.raises(FormatError, match="Invalid configuration of adapters"):
        open_peft(peft(tmp_path, lora_alpha=alpha))
    with pytest.raises(FormatError, match="Invalid configuration of adapters"):
        open_paddleformers_lora(paddleformers(tmp_path, lora_alpha=alpha))


@pytest.mark.parametrize("key", ["pissa", "use_mora", "lora_use_mixer", "enable_lora_list", "loraga", "do_qat"])
def test_variants_of_paddleformers_are_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(OptionError) as refused:
        open_paddleformers_lora(paddleformers(tmp_path, **{key: [True]}))
    assert f"{key}: [True]" in refused.value.render()


@pytest.mark.parametrize(("scaling", "rslora"), [(2.0, False), (4.0, True), (None, False)])
def test_a_scaling_of_the_rank_and_alpha_is_read(tmp_path: Path, scaling: float | None, rslora: bool) -> None:
    assert open_paddleformers_lora(paddleformers(tmp_path, scaling=scaling, rslora=rslora)).catalog.count == 1


@pytest.mark.parametrize("scaling", [4.0, 0, float("nan"), "2.0"])
def test_a_scaling_that_contradicts_the_rank_and_alpha_is_refused(tmp_path: Path, scaling: object) -> None:
    with pytest.raises(FormatError) as refused:
        open_paddleformers_lora(paddleformers(tmp_path, scaling=scaling))
    assert "r, lora_alpha and rslora give 2.0" in refused.value.render()
