"""Write tests/parity/*.npz: tiny checkpoints as Transformers writes them, inputs, and the logits that it computes in
float64.

Run in an environment of its own, for PaddleFormers and PyTorch disturb each other:

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.3.0
    /tmp/hf/bin/python tools/parity.py tests/parity [CASE...]

A file contains ``config.json``, the tensors of the checkpoint under ``tensor/``, the arguments of the forward pass
under ``input/``, and ``logits``. Values are random and few, so that files are small and no two tensors are equal. Sizes
are chosen so that wrong mappings pass every check of shapes: attention is square, keys are as wide as values.
"""

from __future__ import annotations

import json
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
}


ZERO_CENTRED = ("gemma3",)
"""Models whose norms multiply by one plus their weight."""

ENDS = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with smaller values, which make logits of order one."""


def values(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return random values for a tensor: around one for a norm, otherwise around zero."""
    numbers = np.random.default_rng(zlib.crc32(f"{case}: {name}".encode())).integers(-100, 101, size=shape)
    norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
    scale = 1024 if name in ENDS else 400
    around = 1.0 if norm and not case.startswith(ZERO_CENTRED) else 0.0
    return (around + numbers / scale).astype(np.float32)


def filled(case: str, written: Path) -> Arrays:
    """Return a checkpoint with the names and shapes of another."""
    return {name: values(case, name, tensor.shape) for name, tensor in sorted(load_file(written).items())}


def inputs(config: Any) -> Arrays:
    """Return the arguments of the forward pass."""
    rows = np.random.default_rng(5).integers(3, config.vocab_size, size=(2, 12))
    return {"input_ids": rows.astype(np.int64)}


def fixture(case: str) -> Arrays:
    """Return the content of one file.

    Raises:
        ValueError: Transformers does not read all tensors, or does not write them as they were read.
    """
    model_type = case.split(",")[0]
    config = transformers.AutoConfig.for_model(model_type, **TOY | CASES[case])
    with tempfile.TemporaryDirectory() as directory:
        first, given, again = (Path(directory) / name for name in ("first", "given", "again"))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(first)
        tensors = filled(case, first / "model.safetensors")
        given.mkdir()
        (given / "config.json").write_text((first / "config.json").read_text())
        save_file(tensors, given / "model.safetensors", metadata={"format": "pt"})
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            given,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        model.eval().save_pretrained(again)
        written = load_file(again / "model.safetensors")
        if found["missing_keys"] or found["unexpected_keys"] or not _equal(tensors, written):
            raise ValueError(f"{case}: {found}")
        arguments = inputs(config)
        with torch.no_grad():
            logits = model.double()(
                **{name: torch.from_numpy(array) for name, array in arguments.items()}
            ).logits.float()
        return {
            "config": np.array(json.dumps(json.loads((again / "config.json").read_text()), sort_keys=True)),
            "logits": logits.numpy(),
            **{f"input/{name}": array for name, array in arguments.items()},
            **{f"tensor/{name}": array for name, array in tensors.items()},
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
