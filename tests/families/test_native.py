"""PaddleFormers' own statements, carried out by Paddle's engine: equal to ours.

The two share nothing: theirs are hand-written lists, forward and inverse apart, and Paddle's engine turns them into
slices; ours follow from one declaration. Real numbers go through both.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.aoa import stock
from tests.aoa.spaces import side_of
from tests.families import native
from tests.families.spaces import BY_NAME, differing, settings, spaces, tensors

logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.CRITICAL)

FLEET, PLAIN = {"is_fleet": True}, {"is_fleet": False}
NO_MTP = {"num_nextn_predict_layers": 0}
TIED = {"tie_word_embeddings": True}
ALL_SPARSE = {"mlp_only_layers": []}

AGREE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("ernie4_5", {}),
    ("ernie4_5_moe", {**NO_MTP, "moe_use_aux_free": False}),
    ("ernie4_5_moe", {"num_nextn_predict_layers": 1}),
    ("gpt_oss", {}),
    ("qwen2", PLAIN),
    ("qwen2", {**FLEET, "tie_word_embeddings": True}),
    ("qwen3", FLEET),
    ("qwen3", PLAIN),
    ("qwen2_moe", FLEET),
    ("qwen2_moe", {**PLAIN, "fd_fallback": True}),
    ("qwen3_moe", {**PLAIN, **ALL_SPARSE}),
    ("qwen3_moe", {**FLEET, **ALL_SPARSE, "moe_expert_fusion": True}),
    ("qwen3_moe", {**FLEET, **ALL_SPARSE, "using_sonic_moe": True}),
    ("glm4_moe", FLEET),
    ("glm4_moe", {**FLEET, "moe_expert_fusion": True, "tie_word_embeddings": True}),
    # Their statements count empty layers in both classes, and only that of PaddleFleet has any.
    ("glm4_moe", {**PLAIN, **NO_MTP, "num_empty_layers_add_in_head": 0}),
    ("deepseek_v3", {**NO_MTP, "attention_bias": True}),
    ("deepseek_v4", {}),
    ("deepseek_v4", {"moe_expert_fusion": True, "num_empty_layers_add_in_head": 2, "n_shared_experts": 0}),
    ("deepseek_v4", {"tie_word_embeddings": True, **NO_MTP}),
    ("deepseek_v4", {"moe_n_hash_layers": 3, "csa_compress_ratios": [8, 0, 4, 0]}),
    ("minimax_m2", {"v_head_dim": 8, "moe_expert_fusion": True, "n_shared_experts": 1}),
    ("minimax_m2", {"v_head_dim": 8, "use_dense_mtp": True, "num_empty_layers_add_in_head": 2}),
]

FULL_FIRST = ["full_attention", "linear_attention"]
# Stock cuts the channels of a delta net into heads of one size. Of a dense model it leaves out the prediction layers.
EQUAL_HEADS = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "layer_types": FULL_FIRST[::-1]}
NO_PREDICTION = {**EQUAL_HEADS, "mtp_num_hidden_layers": 0}
LATENT = {"multi_latent_attention": True, "use_qk_norm": True, **NO_MTP}
TEXT_MOE = {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": []}
LOADED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_vl", FLEET),
    ("qwen3_vl_moe", {**FLEET, "text_config": TEXT_MOE, "moe_expert_fusion": True}),
    ("glm_moe_dsa", {**LATENT, "moe_expert_fusion": False}),
    ("deepseek_v32", LATENT),
    ("phi3", {}),
    ("kimi_k2", {}),
    ("minimax_m2", {"v_head_dim": 8, "moe_expert_fusion": True, "using_sonic_moe": True}),
    ("qwen3_5", {"text_config": NO_PREDICTION}),
    ("qwen3_5", {"text_config": {**NO_PREDICTION, "attn_output_gate": False}, **TIED}),
    ("qwen3_5", {"text_config": {**NO_PREDICTION, "linear_num_key_heads": 8, "num_key_value_heads": 8}}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": EQUAL_HEADS}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": {**EQUAL_HEADS, "attn_output_gate": False}}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": {**EQUAL_HEADS, "layer_types": FULL_FIRST}, **TIED}),
]
"""Models of which the load alone is compared: stock exports them wrongly, or not at all."""


def config_of(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The tiny configuration with changes; that of a text is completed."""
    tiny = settings(BY_NAME[name])
    nested = {"text_config": {**tiny["text_config"], **changes["text_config"]}} if "text_config" in changes else {}
    return {**tiny, **changes, **nested}


@pytest.mark.parametrize(("name", "changes"), [*AGREE, *LOADED], ids=str)
def test_load_and_export_are_those_of_stock_where_stock_is_right(name: str, changes: dict[str, Any]) -> None:
    config, both = config_of(name, changes), (name, changes) in AGREE
    fleet = bool(config.get("is_fleet", name in ("kimi_k2", "minimax_m2")))
    for tp in (1, 2, 4) if both else (1, 2):
        rules, canonical, model = spaces(BY_NAME[name], config, tp)
        cuts = {tensor.name: tensor.cuts for tensor in tensors(BY_NAME[name], config, tp)}
        files, live = side_of(rules.mapping().sources), side_of(rules.targets, cuts)
        load = native.statements(name, config, inverse=False, fleet=fleet)
        assert differing(model, stock.moved(stock.plan(load, files, live), canonical, live)) == []
        if both:
            export = native.statements(name, config, inverse=True, fleet=fleet)
            assert differing(canonical, stock.moved(stock.plan(export, live, files), model, files)) == []
