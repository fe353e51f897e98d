"""Directories of open weights that the cases start from, made without this package's executors, and places of copies.

A canonical linear weight is the model's, transposed; so what a load must have filled its targets with is known without
asking the mapping that is measured.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from benchmarks.performance.models import MODELS, Array, laid_over, roles_of, whole_tensor
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.storage.dtypes import to_safetensors

FILE = "model.safetensors"


def is_transposed(name: str) -> bool:
    """Whether Paddle holds this weight the other way round than open weights do."""
    return name.endswith("_proj.weight")


def canonical_shape(shard: Shard) -> tuple[int, ...]:
    """The shape of a tensor in open weights."""
    return shard.global_shape[::-1] if is_transposed(shard.name) else shard.global_shape


def canonical(shard: Shard) -> Array:
    """A whole tensor as open weights hold it."""
    return whole_tensor(shard.name, canonical_shape(shard), shard.dtype)


def from_canonical(shard: Shard) -> Array:
    """What a rank must hold after a load from open weights, flat and contiguous."""
    tensor = canonical(shard)
    tensor = tensor.T if is_transposed(shard.name) else tensor
    part = tensor[tuple(slice(low, high) for low, high in zip(shard.box.lo, shard.box.hi, strict=True))]
    return np.ascontiguousarray(part).reshape(-1)


def write_open_weights(model: str, directory: Path, stage: str = "") -> None:
    """Write a directory of open weights.

    Args:
        model: a name of :data:`.models.MODELS`.
        directory: created.
        stage: a layout of which the first rank's tensors get bytes; all others are holes. All have bytes by default.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(MODELS[model].config)), encoding="utf-8")
    shards = laid_over(model, "").weights(0)
    if not stage:
        tensors = {name: canonical(shard) for name, shard in shards.items()}
        safetensors.numpy.save_file(tensors, directory / FILE, metadata={"format": "pt"})
        return
    filled = roles_of(model, stage, 0, 1)[MODEL_STATE].keys()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shard in shards.items():
        size = shard.size * np.dtype(np.uint16).itemsize
        header[name] = {
            "dtype": to_safetensors(shard.dtype),
            "shape": list(canonical_shape(shard)),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        file.truncate(begin + position)
        for name in filled:
            file.seek(begin + header[name]["data_offsets"][0])
            file.write(canonical(shards[name]).tobytes())


def copy_of(saved: Path) -> Path:
    """Where the copy of a checkpoint is that ``diff`` reads."""
    return saved.with_name(f"{saved.name}-copy")
