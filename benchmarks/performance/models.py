"""What is saved and loaded: models of given sizes, laid over ranks, with numbers that depend on their names alone.

Five models: 1 GiB in 65 matrices of 16 MiB (a Llama of nine square layers), 1 GiB in some 20,000 tensors (a mixture
with 9,728 small experts, two tensors each), 1.2 GiB in some 100,000 (the same with 48,640 experts), 0.2 GiB in some
100,000 with the names of Llama-70B, and Llama-2-7B, of which two layers have bytes and the rest is a hole in a sparse
file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.performance.pieces import FILE, Piece, canonical, whole_tensor
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.storage.dtypes import to_safetensors


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
    "names": Model("0.2 GiB in 100,000 tensors named as in Llama-70B", _llama(11_111, 32)),
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


def pieces_of(model: str, layout: str, rank: int, ranks: int) -> list[Piece]:
    """The pieces of one rank.

    Args:
        model: a name of :data:`MODELS`.
        layout: a grid such as ``tp=4``; ``rows`` or ``columns`` for every matrix cut the same way; a grid and
            ``+states`` for a layout whose moments of AdamW are held as well.
        rank: which one.
        ranks: how many there are.
    """
    if layout in ("rows", "columns"):
        axis = 0 if layout == "rows" else 1
        return [_cut(piece_of(MODEL_STATE, shard), axis, rank, ranks) for shard in _whole(model).values()]
    grid, _, states = layout.partition("+")
    roles = laid_over(model, grid).roles(rank)
    held = (MODEL_STATE, OPTIMIZER_STATE) if states else (MODEL_STATE,)
    return [piece_of(role, shard) for role in held for shard in roles[role].values()]


def piece_of(role: str, shard: Shard) -> Piece:
    """A shard without this package."""
    return Piece(role, shard.name, shard.dtype, shard.global_shape, shard.box.lo, shard.box.hi, shard.flat)


def _whole(model: str) -> dict[str, Shard]:
    return laid_over(model, "").weights(0)


def _cut(piece: Piece, axis: int, rank: int, ranks: int) -> Piece:
    if len(piece.shape) < 2:
        return piece
    length = piece.shape[axis] // ranks
    low, high = list(piece.lo), list(piece.hi)
    low[axis], high[axis] = rank * length, (rank + 1) * length
    return replace(piece, lo=tuple(low), hi=tuple(high))


def write_open_weights(model: str, directory: Path, stage: str = "") -> None:
    """Write a directory of open weights, without this package's executors.

    Args:
        model: a name of :data:`MODELS`.
        directory: created.
        stage: a layout of which the first rank's tensors get bytes; all others are holes. All have bytes by default.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(MODELS[model].config)), encoding="utf-8")
    pieces = [canonical(piece_of(MODEL_STATE, shard)) for shard in _whole(model).values()]
    filled = {piece.name for piece in pieces_of(model, stage, 0, 1)} if stage else {piece.name for piece in pieces}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for piece in pieces:
        offsets = [position, position + piece.nbytes]
        header[piece.name] = {"dtype": to_safetensors(piece.dtype), "shape": list(piece.shape), "data_offsets": offsets}
        position += piece.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        file.truncate(begin + position)
        for piece in pieces:
            if piece.name in filled:
                file.seek(begin + header[piece.name]["data_offsets"][0])
                file.write(whole_tensor(piece).tobytes())
