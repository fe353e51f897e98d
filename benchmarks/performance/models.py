"""What is saved and loaded: models of given sizes, laid over ranks, with numbers that depend on their names alone.

Four models: 1 GiB in 65 matrices of 16 MiB (a Llama of nine square layers), 1 GiB in some 20,000 tensors (a mixture
with 9,728 small experts, two tensors each), 1.2 GiB in some 100,000 (the same with 48,640 experts), and Llama-2-7B, of
which two layers have bytes and the rest is a hole in a sparse file.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.storage.dtypes import dtype_size, to_numpy, to_safetensors

Array = np.ndarray[Any, Any]
Roles = dict[str, dict[str, Shard]]


@dataclass(frozen=True)
class Model:
    """A model of the benchmark.

    Args:
        title: what a reader sees.
        config: as in ``config.json``.
        dtype: of its weights, by its numpy name.
    """

    title: str
    config: Mapping[str, Any]
    dtype: str = "float32"


def _llama(layers: int, hidden: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": hidden // 16,
        "vocab_size": hidden // 2,
        "tie_word_embeddings": False,
        **other,
    }


def _mixture(layers: int, expert: int) -> dict[str, Any]:
    """A mixture with 128 experts a layer, two tensors each, of this intermediate size."""
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "num_experts": 128,
        "moe_intermediate_size": expert,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }


MODELS: Mapping[str, Model] = {
    "large": Model("1 GiB in 65 matrices", _llama(9, 2048)),
    "quarter": Model("256 MiB in 16 matrices", {**_llama(2, 2048), "vocab_size": 4096}),
    "small": Model("1 GiB in 20,000 tensors", _mixture(76, 72)),
    "many": Model("1.2 GiB in 100,000 tensors", _mixture(380, 16)),
    "7b": Model(
        "two layers of Llama-2-7B",
        _llama(
            32,
            4096,
            intermediate_size=11008,
            num_attention_heads=32,
            num_key_value_heads=32,
            head_dim=128,
            vocab_size=32000,
            tie_word_embeddings=False,
        ),
        "bfloat16",
    ),
}
"""The models by name."""


@lru_cache(maxsize=8)
def laid_over(model: str, grid: str) -> SimulatedModel:
    """A model over a grid."""
    chosen = MODELS[model]
    return declared_model(
        family_for(chosen.config), ModelDescription(chosen.config, is_fleet=False), parse_grid(grid), chosen.dtype
    )


def roles_of(model: str, layout: str, rank: int, ranks: int) -> Roles:
    """The shards of one rank.

    Args:
        model: a name of :data:`MODELS`.
        layout: a grid such as ``tp=4``; ``rows`` or ``columns`` for every matrix cut the same way; a grid and
            ``+states`` for a layout whose moments of AdamW are held as well.
        rank: which one.
        ranks: how many there are.
    """
    if layout in ("rows", "columns"):
        whole_model = laid_over(model, "").weights(0)
        axis = 0 if layout == "rows" else 1
        return {MODEL_STATE: {name: _cut(shard, axis, rank, ranks) for name, shard in whole_model.items()}}
    grid, _, states = layout.partition("+")
    roles = laid_over(model, grid).roles(rank)
    if states:
        return {MODEL_STATE: roles[MODEL_STATE], OPTIMIZER_STATE: roles[OPTIMIZER_STATE]}
    return {MODEL_STATE: roles[MODEL_STATE]}


def _cut(shard: Shard, axis: int, rank: int, ranks: int) -> Shard:
    if len(shard.global_shape) < 2:
        return shard
    length = shard.global_shape[axis] // ranks
    low, high = list(shard.box.lo), list(shard.box.hi)
    low[axis], high[axis] = rank * length, (rank + 1) * length
    return msgspec.structs.replace(shard, box=Box(tuple(low), tuple(high)))


def nbytes(shard: Shard) -> int:
    """Bytes of a shard."""
    return shard.size * dtype_size(shard.dtype)


def whole_tensor(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """All numbers of a tensor: random bits that depend on its name, finite as floating numbers."""
    element = to_numpy(to_safetensors(dtype))
    size = math.prod(shape)
    if size == 1:
        return np.full(shape, 0.5, element)  # A power of beta, which is one number for all parameters.
    bits = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, size * element.itemsize, np.uint8)
    # The highest bit of the exponent stays clear: no infinities and no numbers that are none.
    bits[element.itemsize - 1 :: element.itemsize] &= 0xBF
    return bits.view(element).reshape(shape)


def part_of(shard: Shard) -> Array:
    """What a rank holds of a tensor, flat and contiguous."""
    tensor = whole_tensor(shard.name, shard.global_shape, shard.dtype)
    part = tensor[tuple(slice(low, high) for low, high in zip(shard.box.lo, shard.box.hi, strict=True))]
    flat = np.ascontiguousarray(part).reshape(-1)
    return flat if shard.flat is None else flat[shard.flat[0] : shard.flat[1]].copy()


def whole_shard(shard: Shard) -> Shard:
    """The whole tensor that a shard is of."""
    return msgspec.structs.replace(shard, box=whole(shard.global_shape), flat=None)
