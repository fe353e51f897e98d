"""config.json of exports: of PaddleFormers' own configuration classes, and read by Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from tests.families.test_transformers import CASES
from tests.parity import fixtures

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTING = {"norm_topk_prob": True, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1}
DEEPSEEK = {**LATENT, **EXPERTS, **ROUTING, "n_routed_experts": 4, "first_k_dense_replace": 1}
TOY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "architectures": ["AModel"],
    "use_cache": True,
}
YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}
OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "pretraining_tp": 1},
    "qwen2": {"rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2},
    "qwen3": {"head_dim": 8, "rope_theta": 1000000, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "router_aux_loss_coef": 0.002, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "num_experts": 4, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.002},
    "glm4_moe": {**EXPERTS, "head_dim": 8, "n_routed_experts": 4, "rope_theta": 1000000, "partial_rotary_factor": 0.5},
    "deepseek_v3": {**DEEPSEEK, "rope_theta": 10000, "rope_scaling": {"type": "yarn", "mscale": 1.0, **YARN}},
    "kimi_k2": {**DEEPSEEK, "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "mscale": 1.0, **YARN}},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 256, "intermediate_size": 1536, "rope_theta": 5000000},
    "ernie4_5": {"head_dim": 4, "rope_theta": 500000.0, "use_cache": False},
    "ernie4_5_moe": {
        "rope_theta": 500000,
        "moe_num_experts": 4,
        "moe_intermediate_size": 16,
        "moe_k": 2,
        "moe_use_aux_free": False,
        "use_rmsnorm": True,
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN},
        "router_aux_loss_coef": 0.9,
        "swiglu_limit": 7.0,
    },
    "gemma3_text": {"head_dim": 8, "rope_theta": 2000000.0, "rope_local_base_freq": 20000.0, "rope_scaling": None},
    "phi3": {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    },
}
"""Configurations as public models have them, whose keys are older than Transformers 5."""

# PaddleFormers reads another key for the experts of the one, and no nested configuration of the text of the others.
UNREAD = ("minimax_m2", "paddleocr_vl", "ernie4_5_moe_vl")
SOURCES: dict[str, dict[str, Any]] = {
    **{f"{name}, of Transformers": case["config"] for name, case in CASES.items() if not name.startswith(UNREAD)},
    **{f"{name}, of an older one": {"model_type": name, **TOY, **keys} for name, keys in OLDER.items()},
    **{f"{name}, published": fixtures.read(name).config for name in ("paddleocr_vl", "ernie4_5_moe_vl")},
}
WRITTEN_ANEW = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "paddleformers_version"}
# PaddleFormers' class of DeepSeek V3 has no prediction layers, whatever its configuration is given.
CHANGED = {"deepseek_v3, of Transformers": {"num_nextn_predict_layers": 0}}
# PaddleFormers' classes build models without the tie of these sources.
LOST_TIES = (
    "qwen2_5_vl, tied, of Transformers",
    "qwen3_vl, tied, of Transformers",
    "qwen3_vl_moe, a dense layer, tied, of Transformers",
    "qwen3_5, tied, of Transformers",
    "qwen3_5_moe, tied, of Transformers",
)
CHANGED |= {name: {"tie_word_embeddings": False} for name in LOST_TIES}


def exported(ranks: ForkServer, sources: dict[str, dict[str, Any]], kept: bool) -> dict[str, Any]:
    """The configurations that a process of PaddleFormers writes, by name."""
    result = ranks.run("tests.families.jobs:exported_configs", 1, {"sources": sources, "kept": kept})
    assert result.ok, result.logs[0].read_text()
    return dict(result.values[0])


def resolved(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A configuration as Transformers understands it, defaults included."""
    from transformers import AutoConfig, DeepseekV3Config

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if config["model_type"] == "ernie4_5_moe_vl":  # Transformers has no class of published ones.
        return {key: value for key, value in config.items() if key not in WRITTEN_ANEW}
    if config["model_type"] == "kimi_k2":  # Its own code, which is not Transformers', is a copy of this class.
        found = DeepseekV3Config.from_dict(config)
    else:
        found = AutoConfig.from_pretrained(directory)
    return {key: value for key, value in found.to_dict().items() if key not in WRITTEN_ANEW}


def test_transformers_reads_an_export_as_it_reads_the_source(ranks: ForkServer, tmp_path: Path) -> None:
    for name, written in exported(ranks, SOURCES, kept=True).items():
        wanted = resolved(SOURCES[name], tmp_path / "source") | CHANGED.get(name, {})
        found = resolved(written, tmp_path / "export")
        rotary = "rope_parameters"
        if SOURCES[name]["model_type"] == "qwen3_vl":  # PaddleFormers reads the keys of older files alone.
            wanted["text_config"][rotary] = found["text_config"][rotary]
        if SOURCES[name]["model_type"] == "gemma3_text":  # Transformers adds keys of no layer to its own.
            for config in (wanted, found):
                config[rotary] = {kind: one for kind, one in config[rotary].items() if isinstance(one, dict)}
        if SOURCES[name]["model_type"] == "glm_moe_dsa":  # PaddleFormers' class adds its own partial rotation.
            assert found[rotary].pop("partial_rotary_factor") == 0.5
        assert among(found, wanted) == wanted, name


def among(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The values of the keys of one configuration in another, also of nested configurations."""
    nested = {key: among(found[key], one) for key, one in wanted.items() if key.endswith("_config") and found.get(key)}
    return {key: found.get(key, "lost") for key in wanted} | nested


def test_every_key_of_a_source_is_in_the_export(ranks: ForkServer) -> None:
    for name, written in exported(ranks, SOURCES, kept=True).items():
        assert set(SOURCES[name]) - {"transformers_version"} <= set(written), name


def test_the_keys_of_the_rotary_embedding_agree(ranks: ForkServer) -> None:
    for name, written in exported(ranks, SOURCES, kept=False).items():
        written = written.get("text_config", written)
        rotary = written.get("rope_parameters")
        if rotary is None:
            assert written["model_type"] in ("kimi_k2", "ernie4_5_moe_vl"), name
            continue
        one = rotary.get("full_attention", rotary)
        assert written["rope_theta"] == one["rope_theta"], name
        if one["rope_type"] != "default":
            assert written["rope_scaling"] == one, name
        else:
            assert written.get("rope_scaling") is None, name


NEW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3_moe", {**EXPERTS, "num_experts": 4}, {"num_experts": 4, "num_local_experts": 4, "use_cache": True}),
    ("gpt_oss", {"num_local_experts": 4}, {"num_local_experts": 4, "num_experts": 4, "use_cache": True}),
    (
        "minimax_m2",
        {**EXPERTS, "n_routed_experts": 4},
        {"num_local_experts": 4, "intermediate_size": 16, "num_nextn_predict_layers": 0},
    ),
    (
        "minimax_m2",
        {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        {"num_local_experts": 4, "intermediate_size": 64, "num_nextn_predict_layers": 1},
    ),
    ("deepseek_v3", DEEPSEEK, {"num_nextn_predict_layers": 0}),
    ("kimi_k2", DEEPSEEK, {"num_nextn_predict_layers": 0}),
    ("glm4_moe", {**EXPERTS, "n_routed_experts": 4, "num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 0}),
    (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_use_aux_free": False, "num_nextn_predict_layers": 0, "use_bias": True},
        {"moe_use_aux_free": False, "num_nextn_predict_layers": 0, "mlp_bias": False, "lm_head_bias": False},
    ),
    ("ernie4_5_moe", {"moe_num_experts": 4, "use_bias": False}, {"moe_use_aux_free": True, "mlp_bias": "lost"}),
    ("ernie4_5", {"use_bias": True, "mlp_bias": True}, {"mlp_bias": True}),
]


def test_a_model_without_a_source_exports_every_key_that_describes_it(ranks: ForkServer) -> None:
    sources = {str(index): {"model_type": name, **TOY, **keys} for index, (name, keys, _) in enumerate(NEW)}
    written = exported(ranks, sources, kept=False)
    for index, (name, _, wanted) in enumerate(NEW):
        assert {key: written[str(index)].get(key, "lost") for key in wanted} == wanted, name


def test_the_configuration_that_a_save_writes_agrees_with_the_description_beside_it(ranks: ForkServer) -> None:
    anew = {f"{name}, new, {index}": {"model_type": name, **TOY, **keys} for index, (name, keys, _) in enumerate(NEW)}
    result = ranks.run("tests.families.jobs:contradicted_configs", 1, {"sources": {**SOURCES, **anew}})
    assert result.ok, result.logs[0].read_text()
    assert {name: faults for name, faults in result.values[0].items() if faults} == {}


@pytest.mark.parametrize("kept", [True, False])
def test_sizes_that_the_class_of_minimax_m2_does_not_read_are_refused(ranks: ForkServer, kept: bool) -> None:
    # It takes n_routed_experts alone, and builds 256 experts in place of four.
    (message,) = exported(ranks, {"minimax_m2": CASES["minimax_m2"]["config"]}, kept).values()
    assert "num_local_experts and n_routed_experts are names of one key, and their values differ" in message
    assert "n_routed_experts: 256" in message
