"""Paddle's own AOAEngine as an oracle: what it plans for given statements and tensors, without reading a file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine, ShardMappingEntry
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

from paddleformers_fc.aoa import AoaTensor
from paddleformers_fc.mapping import Box, Correspondence
from paddleformers_fc.mapping.boxes import shifted
from paddleformers_fc.mapping.correspondences import coalesced
from tests.mapping.numbers import Arrays, slices

Tensors = Mapping[str, AoaTensor]


def shards(name: str, tensor: AoaTensor) -> list[ShardedWeightDesc]:
    """Every tensor-parallel shard of a tensor, as a job describes it to Paddle."""
    local = tuple(length // cuts for length, cuts in zip(tensor.shape, tensor.cuts, strict=True))
    return [
        ShardedWeightDesc(
            name, local, tensor.shape, tuple(at * length for at, length in zip(index, local, strict=True)), tensor.dtype
        )
        for index in itertools.product(*(range(cuts) for cuts in tensor.cuts))
    ]


def described(side: Tensors, suffix: str = "") -> dict[str, list[ShardedWeightDesc]]:
    """Every shard of every tensor of a side."""
    return {name + suffix: shards(name + suffix, tensor) for name, tensor in side.items()}


def plan(
    statements: Sequence[str], left: Tensors, right: Tensors, *, reverse: bool = False, suffix: str = ""
) -> list[ShardMappingEntry]:
    """What Paddle would move into every shard of ``right``; with a suffix, for optimizer states of that name."""
    wanted = described(right, suffix)
    engine = AOAEngine(
        {"aoa_statements": list(statements), "aoa_config_reverse": reverse, "enable_traceback": False},
        described(left, suffix),
        wanted,
    )
    return [entry for pieces in wanted.values() for piece in pieces for entry in engine.find_shard_sources(piece)]


def correspondences(entries: Sequence[ShardMappingEntry]) -> set[Correspondence]:
    """Paddle's slices as ours, in the largest boxes; a cast is its last one."""
    by_target: dict[str, list[Correspondence]] = {}
    for entry in entries:
        source, target = entry.source_slice, entry.target_slice
        axes = list(range(len(source.local_shape)))
        cast = None
        for step in entry.postprocess_list or []:
            if step.startswith("["):
                axes = [axes[int(axis)] for axis in step.strip("[]").split(",")]
            else:
                cast = step
        item = Correspondence(
            source.key,
            shifted(source.local_shape, source.global_offset),
            target.key,
            shifted(target.local_shape, target.global_offset),
            tuple(axes),
            cast,
        )
        by_target.setdefault(target.key, []).append(item)
    return {item for items in by_target.values() for item in coalesced(items)}


def moved(entries: Sequence[ShardMappingEntry], arrays: Arrays, right: Tensors) -> Arrays:
    """The right tensors as Paddle would fill them; what it leaves alone stays at -1."""
    out = {name: np.full(tensor.shape, -1.0) for name, tensor in right.items()}
    for entry in entries:
        source, target = entry.source_slice, entry.target_slice
        part = arrays[source.key][slices(shifted(source.local_shape, source.global_offset))]
        box: Box = shifted(target.local_shape, target.global_offset)
        out[target.key][slices(box)] = transposed(part, entry.postprocess_list)
    return out


def transposed(part: np.ndarray[Any, Any], steps: Sequence[str] | None) -> np.ndarray[Any, Any]:
    """A slice after Paddle's steps, of which those in brackets are permutations of axes and others casts."""
    for step in steps or []:
        if step.startswith("["):
            part = part.transpose([int(axis) for axis in step.strip("[]").split(",")])
    return part
