"""Write tests/parity/*.npz: tiny checkpoints as Transformers writes them, inputs, and the logits that it computes in
float64.

Run in an environment of its own, for PaddleFormers and PyTorch disturb each other:

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.3.0 torchcodec
    /tmp/hf/bin/python tools/parity.py tests/parity [CASE...]

Transformers imports PaddleOCR VL only where torchcodec is installed.

A file contains ``config.json``, the tensors of the checkpoint under ``tensor/``, the arguments of the forward pass
under ``input/``, and ``logits``. Values are random and few, so that files are small and no two tensors are equal. Sizes
are chosen so that wrong mappings pass every check of shapes: attention is square, keys are as wide as values.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

Arrays = dict[str, np.ndarray[Any, Any]]

TOY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TIED = {"tie_word_embeddings": True}
HEAD = {"head_dim": 8}
WIDE = {"head_dim": 16}
BIAS = {"attention_bias": True}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
THETA = {"rope_type": "default", "rope_theta": 1000000.0}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}
DEEPSEEK |= {"rope_parameters": YARN, "first_k_dense_replace": 1, "num_key_value_heads": 4}
GLM = {**EXPERTS, **HEAD, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
QWEN2_MOE = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
QWEN3_MOE = {**EXPERTS, **HEAD, "num_experts": 4}
ERNIE_MOE = {**HEAD, "moe_num_experts": 4, "moe_intermediate_size": 16, "moe_k": 2, "num_hidden_layers": 3}
# PaddleFormers derives the factor from the two numbers of positions.
OSS_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 16}
OSS_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS = {**HEAD, "rope_parameters": OSS_YARN, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS["sliding_window"] = 4
GEMMA = {**HEAD, "query_pre_attn_scalar": 8, "sliding_window": 4}
# PaddleFormers turns positions of sliding layers by the base of the others.
GEMMA |= {"rope_parameters": {"sliding_attention": THETA, "full_attention": THETA}}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
# Of vision-language models; every image has 16 patches, which are four tokens.
TEXT = {key: value for key, value in TOY.items() if key != "tie_word_embeddings"}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
QWEN_VL = {**TEXT, **HEAD, **SECTIONS}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32}
TOWER |= {"depth": 2}
QWEN2_5_TOWER = {**TOWER, "fullatt_block_indexes": [1], "window_size": 8}
QWEN3_TOWER = {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
VL_MOE = {**QWEN_VL, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "num_experts": 4}
TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
NEXT = {**QWEN2_MOE, **DELTA, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
GLM_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
GLM_TEXT = {**TEXT, **GLM, **BIAS, "rope_parameters": {**GLM_SECTIONS, "partial_rotary_factor": 0.5}}
GLM_TOWER = {**TOWER, "image_size": 16}
# PaddleFormers' layers have this epsilon, whatever the configuration gives.
GLM_OCR_TEXT = {**QWEN_VL, "rms_norm_eps": 1e-6}
GLM_OCR_TOWER = {**TOWER, "attention_bias": True}
OCR_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OCR_TOWER |= {"patch_size": 4, "image_size": 16}
# On a CPU PaddleFormers runs the dense layers alone.
ERNIE_TEXT = {**TEXT, "head_dim": 16, "moe_num_experts": 4, "moe_intermediate_size": [16, 8], "moe_k": 2}
ERNIE_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
ERNIE_DENSE = {**ERNIE_TEXT, "mlp_layer_types": ["dense", "dense"]}
ERNIE_TOWER = {**TOWER, "hidden_size": 16}
TEXT_BEFORE, IMAGE, TEXT_AFTER = range(3), ([3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]), range(5, 10)
"""Positions of tokens before an image, of those of an image of 2 x 2 tokens, and of those behind it."""


def vision(text: dict[str, Any], tower: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return the configuration of a vision-language model."""
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": False, **TOKENS, **others}


CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": TIED,
    "llama, biases": {**BIAS, "mlp_bias": True},
    "llama, every query has its key": {"num_key_value_heads": 4},
    "qwen2": {},
    "qwen2, tied": TIED,
    "qwen2, every query has its key": {"num_key_value_heads": 4},
    "qwen3": HEAD,
    "qwen3, tied": {**HEAD, **TIED},
    "qwen3, biases": {**HEAD, **BIAS},
    "qwen3, wide heads": WIDE,
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe, no biases": {**QWEN2_MOE, "qkv_bias": False},
    "qwen2_moe, tied": {**QWEN2_MOE, **TIED, "norm_topk_prob": True},
    "qwen2_moe, every second layer": {**QWEN2_MOE, "decoder_sparse_step": 2},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, tied, a dense layer": {**QWEN3_MOE, **TIED, "mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_moe, every second layer": {**QWEN3_MOE, **BIAS, "decoder_sparse_step": 2},
    "glm4_moe": {**GLM, "use_qk_norm": True},
    "glm4_moe, biases": {**GLM, **BIAS, "n_shared_experts": 2},
    "glm4_moe, tied, groups": {**GLM, **TIED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, biases": {**DEEPSEEK, **BIAS, "n_shared_experts": 2},
    "deepseek_v3, whole queries": {**DEEPSEEK, **TIED, "q_lora_rank": None, "first_k_dense_replace": 0},
    "ernie4_5": HEAD,
    "ernie4_5, tied": {**HEAD, **TIED},
    "ernie4_5, biases": {**HEAD, "use_bias": True},
    "ernie4_5_moe": ERNIE_MOE,
    "ernie4_5_moe, tied, every second layer": {**ERNIE_MOE, **TIED, "moe_layer_interval": 2},
    "ernie4_5_moe, biases": {**ERNIE_MOE, "use_bias": True, "moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    "gpt_oss": GPT_OSS,
    "gpt_oss, tied": {**GPT_OSS, **TIED},
    "gpt_oss, no biases": {**GPT_OSS, "attention_bias": False, "num_hidden_layers": 3},
    "gemma3_text": GEMMA,
    "gemma3_text, tied": {**GEMMA, **TIED},
    "gemma3_text, biases": {**GEMMA, **BIAS},
    "phi3": {},
    "phi3, tied": TIED,
    "phi3, every query has its key": {"num_key_value_heads": 4},
    "qwen2_5_vl": vision(QWEN_VL, QWEN2_5_TOWER),
    "qwen2_5_vl, tied": vision(QWEN_VL, QWEN2_5_TOWER, **TIED),
    "qwen2_5_vl, every query has its key": vision({**QWEN_VL, "num_key_value_heads": 4}, QWEN2_5_TOWER),
    "qwen3_vl": vision(QWEN_VL, QWEN3_TOWER),
    "qwen3_vl, tied": vision(QWEN_VL, QWEN3_TOWER, **TIED),
    "qwen3_vl, biases": vision({**QWEN_VL, **BIAS}, {**QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": vision(VL_MOE, QWEN3_TOWER),
    # PaddleFormers' class cannot be built with dense layers.
    "qwen3_vl_moe, tied": vision(VL_MOE, QWEN3_TOWER, **TIED),
    "qwen3_vl_moe, biases": vision({**VL_MOE, **BIAS}, QWEN3_TOWER),
    "qwen3_next": NEXT,
    "qwen3_next, tied, a dense layer": {**NEXT, **TIED, "mlp_only_layers": [0]},
    "qwen3_next, biases, every second layer": {**NEXT, **BIAS, "decoder_sparse_step": 2},
    "glm4v_moe": vision(GLM_TEXT, GLM_TOWER),
    "glm4v_moe, tied, no dense layer": vision({**GLM_TEXT, "first_k_dense_replace": 0}, GLM_TOWER, **TIED),
    "glm4v_moe, no biases": vision({**GLM_TEXT, "attention_bias": False, "n_shared_experts": 2}, GLM_TOWER),
    "glm_ocr": vision(GLM_OCR_TEXT, GLM_OCR_TOWER),
    "glm_ocr, tied": vision(GLM_OCR_TEXT, GLM_OCR_TOWER, **TIED),
    "glm_ocr, no biases": vision(GLM_OCR_TEXT, {**GLM_OCR_TOWER, "attention_bias": False}),
    "glm_ocr, every query has its key": vision({**GLM_OCR_TEXT, "num_key_value_heads": 4}, GLM_OCR_TOWER),
    "paddleocr_vl": vision(QWEN_VL, OCR_TOWER),
    "paddleocr_vl, tied": vision(QWEN_VL, OCR_TOWER, **TIED),
    "paddleocr_vl, biases": vision({**QWEN_VL, "use_bias": True, "num_key_value_heads": 4}, OCR_TOWER),
    "ernie4_5_moe_vl": vision(ERNIE_TEXT, ERNIE_TOWER),
    "ernie4_5_moe_vl, no experts": vision(ERNIE_DENSE, ERNIE_TOWER),
    "ernie4_5_moe_vl, tied, no experts": vision(ERNIE_DENSE, ERNIE_TOWER, **TIED),
    "ernie4_5_moe_vl, every query has its key, no experts": vision(
        {**ERNIE_DENSE, "num_key_value_heads": 4}, ERNIE_TOWER
    ),
}
RENAMED = {"ernie4_5_moe_vl": "ernie4_5_vl_moe"}
"""Published model types that Transformers calls otherwise."""


ZERO_CENTRED = ("gemma3", "qwen3_next")
"""Models whose norms multiply by one plus their weight."""

ENDS = ("embed_tokens.weight", "lm_head.weight")
"""Tensors with smaller values, which make logits of order one."""


def values(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return random values for a tensor: around one for a norm, otherwise around zero."""
    numbers = np.random.default_rng(zlib.crc32(f"{case}: {name}".encode())).integers(-100, 101, size=shape)
    norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
    scale = 1024 if name.endswith(ENDS) else 400
    around = 1.0 if norm and not case.startswith(ZERO_CENTRED) else 0.0
    return (around + numbers / scale).astype(np.float32)


def published_config(case: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` as published ones are: those of PaddleOCR VL and ERNIE 4.5 VL are not nested."""
    if not case.startswith(("paddleocr_vl", "ernie4_5_moe_vl")):
        return config
    outer = {key: value for key, value in config.items() if key != "text_config"}
    rope = dict(config["text_config"]["rope_parameters"])
    inner = {key: value for key, value in config["text_config"].items() if key != "rope_parameters"}
    flat = {**inner, **outer, "rope_theta": rope.pop("rope_theta")}
    if case.startswith("paddleocr_vl"):
        return {**flat, "rope_scaling": rope}
    tower = flat["vision_config"]
    width, layers = (
        tower["hidden_size"],
        [layer for layer, kind in enumerate(flat["mlp_layer_types"]) if kind != "dense"],
    )
    first, last = (layers[0], layers[-1]) if layers else (flat["num_hidden_layers"],) * 2
    return flat | {
        "model_type": "ernie4_5_moe_vl",
        "moe_num_experts": [flat["moe_num_experts"]] * 2,
        "moe_layer_start_index": [first] * 2,
        "moe_layer_end_index": [last] * 2,
        "moe_capacity": [64, 64, 64],
        "moe_use_aux_free": True,
        "freq_allocation": rope["mrope_section"][2],
        "pixel_hidden_size": width,
        "im_patch_id": flat["image_token_id"],
        "vision_config": tower
        | {
            "model_type": "DFNRope_vision_transformer",
            "embed_dim": width,
            "mlp_ratio": tower["intermediate_size"] / width,
        },
    }


def published(case: str, tensors: Arrays) -> Arrays:
    """Return tensors as published files have them.

    Transformers turns those of Qwen 3 VL MoE when it reads them, and leaves them so. It ignores the positions of packed
    images of PaddleOCR VL, whose values repeat here for the size of the file. ERNIE 4.5 VL's tower has another name.
    """
    if case.startswith("paddleocr_vl"):
        name = "visual.vision_model.embeddings.packing_position_embedding.weight"
        return {**tensors, name: np.arange(32768 * 32, dtype=np.float32).reshape(32768, 32) % 61 / 61}
    if case.startswith("ernie4_5_moe_vl"):
        return {name.replace("model.vision_model.", "vision_model."): tensor for name, tensor in tensors.items()}
    if not case.startswith("qwen3_vl_moe"):
        return tensors
    return {
        name: np.ascontiguousarray(tensor.swapaxes(1, 2)) if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def filled(case: str, written: Path) -> Arrays:
    """Return a checkpoint with the names and shapes of another."""
    return {name: values(case, name, tensor.shape) for name, tensor in sorted(load_file(written).items())}


def inputs(config: Any) -> Arrays:
    """Return the arguments of the forward pass."""
    random = np.random.default_rng(5)
    rows = random.integers(3, 58, size=(2, 12)).astype(np.int64)
    tower = getattr(config, "vision_config", None)
    if tower is None:
        return {"input_ids": rows}
    # Time, height and width; what Transformers 5.3 derives for Qwen 2.5 VL counts an image's time twice.
    positions = np.array([[[*TEXT_BEFORE, *one, *TEXT_AFTER]] * 2 for one in IMAGE])
    if config.model_type == "ernie4_5_vl_moe":  # PaddleFormers' tower does not run on a CPU.
        return {"input_ids": rows, "position_ids": positions}
    rows[:, 2:8] = [62, 60, 60, 60, 60, 63]
    patch = (tower.patch_size, tower.patch_size)
    has_frames = hasattr(tower, "temporal_patch_size")
    pixels = (tower.in_channels * tower.temporal_patch_size * math.prod(patch),) if has_frames else (3, *patch)
    return {
        "input_ids": rows,
        "position_ids": positions,
        "pixel_values": (random.integers(-100, 101, size=(32, *pixels)) / 64).astype(np.float32),
        "image_grid_thw": np.array([[1, 4, 4], [1, 4, 4]]),
    }


def fixture(case: str) -> Arrays:
    """Return the content of one file.

    Raises:
        ValueError: Transformers does not read all tensors, or does not write them as they were read.
    """
    model_type = case.split(",")[0]
    has_tower = "vision_config" in CASES[case]
    transformers_type = RENAMED.get(model_type, model_type)
    config = transformers.AutoConfig.for_model(transformers_type, **CASES[case] if has_tower else TOY | CASES[case])
    kind = transformers.AutoModelForImageTextToText if has_tower else transformers.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as directory:
        first, given, again = (Path(directory) / name for name in ("first", "given", "again"))
        kind.from_config(config).save_pretrained(first)
        tensors = filled(case, first / "model.safetensors")
        given.mkdir()
        written_config = json.loads((first / "config.json").read_text())
        (given / "config.json").write_text(json.dumps(published_config(case, written_config)))
        save_file(published(case, tensors), given / "model.safetensors", metadata={"format": "pt"})
        model, found = kind.from_pretrained(
            given,
            config=config if model_type in RENAMED else None,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        model.eval().save_pretrained(again)
        written = load_file(again / "model.safetensors")
        if found["missing_keys"] or found["unexpected_keys"] or not _equal(tensors, written):
            raise ValueError(f"{case}: {found}")
        arguments, config_again = inputs(config), json.loads((again / "config.json").read_text())
        with torch.no_grad():
            logits = model.double()(
                **{name: torch.from_numpy(array) for name, array in arguments.items()}
            ).logits.float()
        return {
            "config": np.array(json.dumps(published_config(case, config_again), sort_keys=True)),
            "logits": logits.numpy(),
            **{f"input/{name}": array for name, array in arguments.items()},
            **{f"tensor/{name}": array for name, array in published(case, tensors).items()},
        }


def _equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def main(directory: Path, *chosen: str) -> None:
    """Write the files of the cases that are chosen, or of all."""
    for case in chosen or CASES:
        made = fixture(case)
        path = directory / f"{case.replace(', ', '-').replace(' ', '_')}.npz"
        np.savez_compressed(path, **made)
        print(f"{case}: {path.stat().st_size} bytes, largest logit {np.abs(made['logits']).max():.2f}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
