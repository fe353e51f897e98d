"""Write tests/families/transformers.json: config.json and tensors of toy models as Transformers itself writes them.

Run in an environment of its own, for PaddleFormers and PyTorch disturb each other:

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers==5.3.0
    /tmp/hf/bin/python tools/transformers_fixtures.py tests/families/transformers.json

Every case is the configuration class of one model type at toy sizes. The names and shapes are those of the saved file,
so that the layout in memory, which Transformers changes between versions, does not matter.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

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
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEPSEEK = {**LATENT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
GLM = {**EXPERTS, "head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1}
QWEN2_MOE = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
QWEN3_MOE = {**EXPERTS, "head_dim": 8, "num_experts": 4}
ERNIE_MOE = {"moe_num_experts": 4, "moe_intermediate_size": 16, "moe_k": 2}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}
QWEN_VL = {**TOY, **SECTIONS}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32}
QWEN2_5_TOWER = {**TOWER, "depth": 2, "fullatt_block_indexes": [1]}
QWEN3_TOWER = {**TOWER, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
WIDE = {**QWEN_VL, "head_dim": 8}
VL_MOE = {**WIDE, **EXPERTS, "moe_intermediate_size": 12, "num_experts": 4}
DELTA = {"linear_key_head_dim": 4, "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
NEXT = {**EXPERTS, **DELTA, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 24}
FULL_LAST = ["linear_attention", "full_attention"]
GLM_TEXT = {**QWEN_VL, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}
GLM_TOWER = {**TOWER, "depth": 2, "image_size": 16}
DSA = {**DEEPSEEK, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "num_hidden_layers": 3}
ERNIE_VL = {
    **TOY,
    "rope_parameters": {**SECTIONS["rope_parameters"], "mrope_section": [6, 6, 4]},
    "head_dim": 32,
    "moe_num_experts": 4,
    "moe_intermediate_size": [16, 8],
    "moe_k": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
ERNIE_TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "patch_size": 4}
OCR_TOWER = {**TOY, "hidden_size": 16, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
QWEN3_5 = {**WIDE, **DELTA, "layer_types": FULL_LAST, "attn_output_gate": True}
QWEN3_5_MOE = {**QWEN3_5, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
QWEN3_5_TOWER = {**TOWER, "depth": 2, "num_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {"head_dim": 8},
    "qwen2": THETA,
    "qwen3": {**THETA, "head_dim": 8, "tie_word_embeddings": True},
    "qwen3, biases": {"head_dim": 8, "attention_bias": True},
    "qwen2_moe": {**QWEN2_MOE, "mlp_only_layers": [0]},
    "qwen2_moe, every second layer": {**QWEN2_MOE, "decoder_sparse_step": 2, "qkv_bias": False},
    "qwen3_moe": {**QWEN3_MOE, **THETA},
    "qwen3_moe, a dense layer": {**QWEN3_MOE, "mlp_only_layers": [1], "attention_bias": True},
    "glm4_moe": {**GLM, "use_qk_norm": True},
    "glm4_moe, biases": {**GLM, "attention_bias": True, "n_shared_experts": 2},
    "deepseek_v3": {**DEEPSEEK, "num_nextn_predict_layers": 1},
    "deepseek_v3, biases": {**DEEPSEEK, "attention_bias": True},
    "deepseek_v3, whole queries": {**DEEPSEEK, "q_lora_rank": None},
    "kimi_k2": DEEPSEEK,
    "kimi_k2, biases": {**DEEPSEEK, "attention_bias": True},
    "minimax_m2": {"head_dim": 8, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5": {"head_dim": 4},
    "ernie4_5, biases": {"head_dim": 4, "use_bias": True, "tie_word_embeddings": False},
    "ernie4_5_moe": ERNIE_MOE,
    "ernie4_5_moe, biases": {**ERNIE_MOE, "use_bias": True, "tie_word_embeddings": False},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "gemma3_text, biases": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16, "attention_bias": True},
    "phi3": {},
    "qwen2_5_vl": {"text_config": QWEN_VL, "vision_config": QWEN2_5_TOWER},
    "qwen2_5_vl, tied": {"text_config": QWEN_VL, "vision_config": QWEN2_5_TOWER, "tie_word_embeddings": True},
    "qwen2_5_vl, another tower": {
        "text_config": {**QWEN_VL, "num_hidden_layers": 3, "num_key_value_heads": 2},
        "vision_config": {**QWEN2_5_TOWER, "depth": 1, "in_channels": 1, "spatial_merge_size": 3},
    },
    "qwen3_vl": {"text_config": WIDE, "vision_config": QWEN3_TOWER},
    "qwen3_vl, tied": {"text_config": WIDE, "vision_config": QWEN3_TOWER, "tie_word_embeddings": True},
    "qwen3_vl, biases": {
        "text_config": {**WIDE, "attention_bias": True},
        "vision_config": {**QWEN3_TOWER, "deepstack_visual_indexes": [1], "temporal_patch_size": 1},
    },
    "qwen3_vl_moe": {"text_config": VL_MOE, "vision_config": QWEN3_TOWER},
    "qwen3_vl_moe, every second layer": {
        "text_config": {**VL_MOE, "decoder_sparse_step": 2, "attention_bias": True},
        "vision_config": QWEN3_TOWER,
    },
    "qwen3_vl_moe, a dense layer, tied": {
        "text_config": {**VL_MOE, "mlp_only_layers": [1]},
        "vision_config": QWEN3_TOWER,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {**NEXT, "num_hidden_layers": 4},
    "qwen3_next, a dense layer": {**NEXT, "layer_types": FULL_LAST, "mlp_only_layers": [0], "attention_bias": True},
    "qwen3_next, every second layer, tied": {
        **NEXT,
        "layer_types": FULL_LAST,
        "decoder_sparse_step": 2,
        "linear_num_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "glm4v_moe": {"text_config": GLM_TEXT, "vision_config": GLM_TOWER},
    "glm4v_moe, biases": {
        "text_config": {**GLM_TEXT, "attention_bias": False, "n_shared_experts": 2},
        "vision_config": {**GLM_TOWER, "attention_bias": True, "temporal_patch_size": 1},
    },
    "glm4v_moe, no dense layer, tied": {
        "text_config": {**GLM_TEXT, "first_k_dense_replace": 0},
        "vision_config": {**GLM_TOWER, "image_size": 12},
        "tie_word_embeddings": True,
    },
    "glm_ocr": {"text_config": WIDE, "vision_config": GLM_TOWER},
    "glm_ocr, no biases": {"text_config": WIDE, "vision_config": {**GLM_TOWER, "attention_bias": False}},
    "glm_ocr, another tower": {
        "text_config": {**WIDE, "num_key_value_heads": 2, "num_hidden_layers": 1},
        "vision_config": {**GLM_TOWER, "in_channels": 2, "spatial_merge_size": 4},
    },
    "paddleocr_vl": {"text_config": WIDE, "vision_config": OCR_TOWER, "tie_word_embeddings": False},
    "paddleocr_vl, tied": {"text_config": WIDE, "vision_config": OCR_TOWER, "tie_word_embeddings": True},
    "paddleocr_vl, biases": {
        "text_config": {**WIDE, "use_bias": True, "num_key_value_heads": 8},
        "vision_config": {**OCR_TOWER, "num_channels": 1, "num_hidden_layers": 1},
        "tie_word_embeddings": False,
    },
    "glm_moe_dsa": {**DSA, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "glm_moe_dsa, biases": {
        **DSA,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "mlp_layer_types": ["dense", "dense", "sparse"],
    },
    "glm_moe_dsa, no dense layer, tied": {
        **DSA,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"] * 3,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe_vl": {"text_config": ERNIE_VL, "vision_config": ERNIE_TOWER, "tie_word_embeddings": False},
    "ernie4_5_moe_vl, tied": {"text_config": ERNIE_VL, "vision_config": ERNIE_TOWER, "tie_word_embeddings": True},
    "ernie4_5_moe_vl, another tower": {
        "text_config": {**ERNIE_VL, "moe_num_shared_experts": 1, "moe_intermediate_size": [8, 24]},
        "vision_config": {**ERNIE_TOWER, "depth": 1, "in_channels": 1},
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"text_config": QWEN3_5, "vision_config": QWEN3_5_TOWER},
    "qwen3_5, tied": {"text_config": QWEN3_5, "vision_config": QWEN3_5_TOWER, "tie_word_embeddings": True},
    "qwen3_5, biases": {
        "text_config": {**QWEN3_5, "attention_bias": True, "linear_num_value_heads": 4},
        "vision_config": {**QWEN3_5_TOWER, "depth": 1, "temporal_patch_size": 1},
    },
    "qwen3_5_moe": {"text_config": QWEN3_5_MOE, "vision_config": QWEN3_5_TOWER},
    "qwen3_5_moe, tied": {"text_config": QWEN3_5_MOE, "vision_config": QWEN3_5_TOWER, "tie_word_embeddings": True},
    "qwen3_5_moe, biases": {
        "text_config": {**QWEN3_5_MOE, "attention_bias": True, "num_key_value_heads": 2},
        "vision_config": {**QWEN3_5_TOWER, "in_channels": 1},
    },
    "phi3, long": {"original_max_position_embeddings": 64, "rope_parameters": LONG},
}
REMOTE = {"kimi_k2": "deepseek_v3", "ernie4_5_moe_vl": "ernie4_5_vl_moe"}
"""Model types without a class in Transformers, and the class of which their own code is a copy."""


def case(name: str) -> dict[str, Any]:
    """Build one toy model, save it, and return its config.json and the shapes of its tensors by name."""
    model_type = name.split(",")[0]
    towers = "vision_config" in CASES[name]
    values = CASES[name] if towers else TOY | CASES[name]
    config = transformers.AutoConfig.for_model(REMOTE.get(model_type, model_type), **values)
    kind = transformers.AutoModelForImageTextToText if towers else transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as directory:
        kind.from_config(config).save_pretrained(directory)
        written = json.loads((Path(directory) / "config.json").read_text()) | {"model_type": model_type}
        return {"config": written, "tensors": _shapes(Path(directory) / "model.safetensors")}


def _shapes(path: Path) -> dict[str, list[int]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: entry["shape"] for name, entry in sorted(header.items()) if name != "__metadata__"}


if __name__ == "__main__":
    found = {name: case(name) for name in CASES}
    lines = [f"{json.dumps(name)}: {json.dumps(one, sort_keys=True)}" for name, one in found.items()]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
