"""The least memory of a snapshot, before the optimizer has states."""

from __future__ import annotations

import math
from typing import Any

from paddleformers_fc.execute.memory import dtype_of
from paddleformers_fc.layout.roles import MODEL_STATE, OptimizerDescriptor, StateShape
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.trainer import live_roles
from paddleformers_fc.trainer.degrees import parallel_degrees
from paddleformers_fc.trainer.library_models import ShardingOption

_HALF_BYTES = 2


def least_snapshot_bytes(trainer: Any, optimizer: OptimizerDescriptor | None) -> int:
    """Return a lower bound of the bytes that this rank writes in a save.

    Ranks that hold the same part of a tensor share its bytes. Experts have fewer such ranks, so that it is no more than
    a bound.

    Args:
        trainer: the Trainer.
        optimizer: the declaration of its optimizer; None without states that are saved.
    """
    degrees = parallel_degrees(trainer.args)
    # Stage 3 holds slices, of which every one is of its rank alone.
    slices = ShardingOption.FULL_SHARD in trainer.args.sharding
    holders = degrees["dp"] * (1 if slices else degrees["sharding"])
    total = 0
    for weight in live_roles.model_roles(trainer.model)[MODEL_STATE].values():
        tensor = weight.local_tensor
        width = dtype_of(tensor).itemsize
        trained = optimizer is not None and not tensor.stop_gradient
        states = _state_bytes(optimizer, width) if trained and optimizer is not None else 0
        total += math.prod(int(n) for n in tensor.shape) * (width + states)
    return total // holders


def _state_bytes(optimizer: OptimizerDescriptor, width: int) -> int:
    """Return the bytes of the states of an element that has this many bytes."""
    return sum(
        dtype_size(one.dtype) if one.dtype else width
        for one in optimizer.states
        if one.shape is StateShape.PARAMETER and not one.sometimes and (width == _HALF_BYTES or not one.half_only)
    )
