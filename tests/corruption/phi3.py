"""A Phi-3 of one layer, fused per tensor-parallel rank by hand, and the same weights as in open files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle

from paddleformers_fc.families import ModelDescription
from tests.corruption import ours
from tests.execute.simulated import Roles

LAYER = "model.layers.0."
QKV, GATE_UP = f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}mlp.gate_up_proj.weight"
PARTS = {QKV: (16, 8, 8), GATE_UP: (24, 24)}
"""How many rows of an open, fused tensor belong to query, key and value, and to gate and up."""
SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (32, 16),
    f"{LAYER}input_layernorm.weight": (16,),
    f"{LAYER}post_attention_layernorm.weight": (16,),
    QKV: (32, 16),
    GATE_UP: (48, 16),
    f"{LAYER}self_attn.o_proj.weight": (16, 16),
    f"{LAYER}mlp.down_proj.weight": (16, 24),
}
_RANDOM = np.random.RandomState(0)
ARRAYS = {name: _RANDOM.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}
"""The weights as in open files, [out, in]."""
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
MODEL = ModelDescription({"model_type": "phi3", **SIZES, **HEADS})


def live(tp: int, rank: int, empty: bool = False) -> Roles:
    """One rank's live weights: fused tensors hold, rank after rank, that rank's share of every part."""
    weights = {}
    for name, array in ARRAYS.items():
        axis = 0 if array.ndim == 2 else None
        if name in PARTS:
            parts = np.split(array.T, np.cumsum(PARTS[name])[:-1], axis=1)
            shares = [np.split(part, tp, axis=1) for part in parts]
            array, axis = np.concatenate([share[at] for at in range(tp) for share in shares], axis=1), 1
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            array = array.T
        local, offset = array, [0] * array.ndim
        if axis is not None:
            local = np.split(array, tp, axis)[rank]
            offset[axis] = rank * local.shape[axis]
        weights[name] = SimpleNamespace(
            key=name,
            local_tensor=paddle.to_tensor(np.zeros_like(local) if empty else np.ascontiguousarray(local)),
            local_shape=local.shape,
            global_shape=array.shape,
            global_offset=tuple(offset),
            is_flattened=False,
            flattened_range=None,
        )
    return {"model_state": weights}


def save(directory: Path) -> Path:
    """Save it from two ranks; the directory."""
    return ours.save(directory, tp=2, described=MODEL, held=lambda rank: live(2, rank))
