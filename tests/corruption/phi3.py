"""A Phi-3 of one layer, fused per tensor-parallel rank by hand, and the same weights as in open files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from paddleformers_fc.families import ModelDescription
from tests.execute.simulated import Arrays, Roles

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, GROUPS, HEAD = 16, 24, 32, 4, 2, 4
CONFIG = {
    "model_type": "phi3",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
MODEL = ModelDescription(CONFIG)
QKV, GATE_UP = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
PARTS = {QKV: (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD), GATE_UP: (INTERMEDIATE, INTERMEDIATE)}
"""How many rows of an open, fused tensor belong to query, key and value, and to gate and up."""


def canonical() -> Arrays:
    """The weights as in open files, [out, in]."""
    random = np.random.RandomState(0)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        QKV: (sum(PARTS[QKV]), HIDDEN),
        GATE_UP: (sum(PARTS[GATE_UP]), HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    return {name: random.randn(*shape).astype(np.float32) for name, shape in shapes.items()}


def live(arrays: Arrays, tp: int, rank: int, empty: bool = False) -> Roles:
    """One rank's live weights: fused tensors hold, rank after rank, that rank's share of every part."""
    weights: dict[str, Any] = {}
    for name, array in arrays.items():
        axis: int | None = None
        if name in PARTS:
            parts = np.split(array.T, np.cumsum(PARTS[name])[:-1], axis=1)
            shares = [np.split(part, tp, axis=1) for part in parts]
            array, axis = np.concatenate([share[at] for at in range(tp) for share in shares], axis=1), 1
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            array, axis = array.T, 0
        elif array.ndim == 2:
            axis = 0
        weights[name] = _part(name, array, axis, tp, rank, empty)
    return {"model_state": weights}


def _part(name: str, array: np.ndarray[Any, Any], axis: int | None, tp: int, rank: int, empty: bool) -> Any:
    offset = [0] * array.ndim
    local = array
    if axis is not None:
        size = array.shape[axis] // tp
        offset[axis] = size * rank
        local = np.take(array, range(offset[axis], offset[axis] + size), axis)
    return SimpleNamespace(
        key=name,
        local_tensor=paddle.to_tensor(np.zeros_like(local) if empty else np.ascontiguousarray(local)),
        local_shape=local.shape,
        global_shape=array.shape,
        global_offset=tuple(offset),
        is_flattened=False,
        flattened_range=None,
    )
