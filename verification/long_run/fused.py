"""Weights as PaddleFormers' unified checkpoint of ERNIE 4.5 MoE stores them: projections stay fused, inputs first.

This is written without this package's mappings, with numpy alone, so that it can be held against them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np


def fused_md5(directory: Path, key_value_heads: int) -> str:
    """Return the md5 over names and bytes of all tensors after fusing, as :func:`.weights_md5` computes it.

    Args:
        directory: an export.
        key_value_heads: groups of query, key and value.
    """
    from safetensors.numpy import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    for name in sorted(tensors):
        layer, _, last = name.rpartition(".q_proj.weight")
        if layer and not last:
            parts = [tensors.pop(f"{layer}.{kind}_proj.weight") for kind in "qkv"]
            groups = [part.reshape(key_value_heads, -1, part.shape[-1]) for part in parts]
            tensors[f"{layer}.qkv_proj.weight"] = np.concatenate(groups, axis=1).reshape(-1, parts[0].shape[-1]).T
        layer, _, last = name.rpartition(".gate_proj.weight")
        if layer and not last:
            gate_and_up = [tensors.pop(f"{layer}.{kind}_proj.weight") for kind in ("gate", "up")]
            tensors[f"{layer}.up_gate_proj.weight"] = np.concatenate(gate_and_up).T
    lines = [f"{name} {hashlib.md5(tensors[name].tobytes()).hexdigest()}\n" for name in sorted(tensors)]
    return hashlib.md5("".join(lines).encode()).hexdigest()
