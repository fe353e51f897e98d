"""This rank's shards of tensors under Paddle's semi-automatic parallelism, and state dicts as a source of live tensors.

A ``DistTensor`` has a mesh, placements and a local value. Mesh and placements determine this rank's box. Saves read the
local value, and loads fill it in place. Other tensors are complete on every rank. ``AdamW.sharded_state_dict`` is not
used, because it describes every optimizer state as complete.

Whatever its placements, such a tensor has the layout of a single device: a fused layer is not interleaved by
tensor-parallel ranks (``ModelDescription.is_global``).

Time and memory: a description per tensor; no copies and no communication.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import paddle
import paddle.distributed as dist
from paddle.distributed import ShardedWeight

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.layout.live import Roles
from paddleformers_fc.layout.roles import MASTER, MODEL_STATE, OPTIMIZER_STATE, STATES, StateDescriptor, StateShape
from paddleformers_fc.layout.shards import AxisShard, Placements, coordinate_of, placed_box
from paddleformers_fc.text import fold

_MASTERS, _SCHEDULER = "master_weights", "LR_Scheduler"
"""Entries of ``Optimizer.state_dict`` that are not accumulators. The scheduler has no tensors and is not read."""

_BY_SUFFIX = {one.suffix: one for one in STATES if one.suffix and one.shape is not StateShape.SHARD_NUMBER}
_ACCUMULATORS = {one.paddle_name: one for one in _BY_SUFFIX.values() if one.role == OPTIMIZER_STATE}
_SHARD = re.compile(r"Shard\(dim=(?P<axis>\d+)(, shard_order=(?P<order>\d+))?\)")
"""The text of a placement, which alone describes an axis that several mesh axes divide."""

_STATE = re.compile(rf"(?P<parameter>.+?)(_fp32_master_\d+)?_(?P<accumulator>{'|'.join(_ACCUMULATORS)})_\d+")
"""A key of ``Optimizer.state_dict``: the static name of the parameter and the name of the accumulator."""


def shard_of_rank(name: str, tensor: Any) -> Any:
    """Return this rank's shard of a tensor as a ``ShardedWeight``; None if this rank has no element of it.

    Args:
        name: the key of the shard.
        tensor: a ``DistTensor``, or a tensor that is complete on every rank.
    Raises:
        MismatchError: a placement is not supported.
    """
    shape = tuple(int(length) for length in tensor.shape)
    if not tensor.is_dist():
        if getattr(tensor, "is_distributed", False):
            raise MismatchError(
                f"{name} is a shard of a tensor-parallel layer, and a state dict does not contain its position.",
                where="state_dict",
                evidence=[f"{name}: local shape {list(shape)}, no mesh and no placements"],
                next_step="Pass the layer instead of its state dict.",
            )
        return ShardedWeight(name, tensor, shape, shape, (0,) * len(shape))
    mesh = tensor.process_mesh
    lengths = tuple(int(length) for length in mesh.shape)
    coordinate = coordinate_of(dist.get_rank(), lengths, mesh.process_ids)
    placements = _placements(name, tensor)
    if coordinate is None:
        return None
    box = placed_box(shape, lengths, placements, coordinate)
    if 0 not in shape and not box.volume:
        return None
    if not tensor._is_initialized() or tuple(tensor._local_value().shape) != box.shape:
        raise MismatchError(
            f"The local value of {name} does not match its placements.",
            where="the state dict of this rank",
            evidence=[f"placements {tensor.placements} of shape {list(shape)}: expected shape {list(box.shape)}"],
            next_step="Initialise the tensor, and shard it with paddle.distributed.shard_tensor.",
        )
    return ShardedWeight(name, tensor, box.shape, shape, box.lo)


def _placements(name: str, tensor: Any) -> Placements:
    """Return the placements of a tensor.

    Raises:
        MismatchError: the local value is not a box of the tensor.
    """
    found: list[AxisShard | None] = []
    for one in tensor.placements:
        if one.is_partial():
            raise _unsupported(
                name,
                tensor,
                "under Partial the tensor is the sum of the local values of all ranks",
                "Reshard it to Replicate or Shard with paddle.distributed.reshard, which adds the local values.",
            )
        shard = _SHARD.fullmatch(str(one))
        if shard is None and not one.is_replicated():
            raise _unsupported(
                name,
                tensor,
                "the shard of a rank is not one box, as with a split_factor",
                "Reshard it to Shard without a split factor, or to Replicate.",
            )
        found.append(None if shard is None else AxisShard(int(shard["axis"]), int(shard["order"] or 0)))
    return found


def _unsupported(name: str, tensor: Any, reason: str, next_step: str) -> MismatchError:
    return MismatchError(
        f"The placement of {name} is not supported.",
        where="the state dict of this rank",
        evidence=[f"{name}: placements {tensor.placements}: {reason}"],
        next_step=next_step,
    )


class Named(msgspec.Struct, frozen=True):
    """A parameter in place of its shard, for callers that read only names; this rank may have no element of it."""

    local_tensor: Any


def leaves(state_dict: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield group, key and value of every tensor in a state dict, which may be nested.

    Args:
        state_dict: such as ``{"model": layer.state_dict(), "optimizer": optimizer.state_dict()}``.
        group: the key of this state dict in its parent.
    Raises:
        MismatchError: a value is not a tensor, or its key is not a string.
    """
    for key, value in state_dict.items():
        if key == _SCHEDULER:
            continue
        if isinstance(value, Mapping):
            yield from leaves(value, key)
        elif isinstance(value, paddle.Tensor) and isinstance(key, str):
            yield group, key, value
        else:
            raise MismatchError(
                f"Invalid entry {key!r} of a state dict.",
                where="state_dict",
                evidence=[
                    f"type {type(value).__name__} under a key of type {type(key).__name__}; supported are tensors "
                    "under string keys, and nested state dicts of tensors"
                ],
                next_step="Remove the entry from the state dict.",
            )


def roles_of(state_dict: Mapping[str, Any], aliases: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return this rank's shards of the tensors in a state dict: role -> name -> ``ShardedWeight``.

    Args:
        state_dict: weights, and states of an optimizer under the keys of ``Optimizer.state_dict`` or of a checkpoint.
        aliases: names of tied weights whose states are named after the owner.
    Raises:
        MismatchError: a placement is not supported, two entries are the same tensor, or a state belongs to no weight.
    """
    entries = list(leaves(state_dict))
    keys = {key for group, key, _ in entries if group != _MASTERS}
    split = [(_state_of(group, key, keys), key, tensor) for group, key, tensor in entries]
    weights = {key: tensor for state, key, tensor in split if state is None}
    owners = {weights[key].name: key for key in sorted(weights, reverse=True) if key not in aliases}
    owners |= {key: key for key in weights}
    orphans = [key for state, key, _ in split if state is not None and state[0] not in owners]
    _raise_faults(f"{key}: the state dict has no weight for this state" for key in orphans)
    named = [
        (MODEL_STATE, key, tensor) if state is None else (state[1].role, owners[state[0]] + state[1].suffix, tensor)
        for state, key, tensor in split
    ]
    counts = Counter((role, name) for role, name, _ in named)
    _raise_faults(f"{name}: {count} entries" for (_, name), count in counts.items() if count > 1)
    found: dict[str, dict[str, Any]] = {MODEL_STATE: {}}
    for role, name, tensor in named:
        shard = shard_of_rank(name, tensor)
        if shard is not None:
            found.setdefault(role, {})[name] = shard
    return found


def _raise_faults(faults: Iterable[str]) -> None:
    found = fold(sorted(faults))
    if found:
        raise MismatchError(
            "The state dict has ambiguous or orphaned entries.",
            where="state_dict",
            evidence=found,
            next_step="Pass the weights with the states of one optimizer, such as {**model.state_dict(), "
            "**optimizer.state_dict()}.",
        )


def _state_of(group: str, key: str, keys: Collection[str]) -> tuple[str, StateDescriptor] | None:
    """Return the parameter (static name or key) and the descriptor of a state; None for a weight.

    Args:
        group: see :func:`leaves`.
        key: such as ``linear_0.w_0.dist_moment1_0``, or a state's name in a checkpoint.
        keys: all keys of the state dict.
    """
    if group == _MASTERS:
        return key, MASTER
    found = _STATE.fullmatch(key)
    if found is not None:
        return found["parameter"], _ACCUMULATORS[found["accumulator"]]
    parameter, dot, last = key.rpartition(".")
    state = _BY_SUFFIX.get(dot + last)
    return None if state is None or parameter not in keys else (parameter, state)


class StateDict(msgspec.Struct, frozen=True):
    """A source of live tensors: a state dict of tensors with a mesh and placements.

    Args:
        model: the state dict; see :func:`roles_of`.
        aliases: names of tied weights whose states are named after the owner.
    """

    model: Mapping[str, Any]
    aliases: frozenset[str] = frozenset()

    @property
    def is_global(self) -> bool:
        """True: every tensor has the layout of a single device."""
        return True

    @property
    def has_states(self) -> bool:
        """Return whether the state dict has optimizer states."""
        return len(self.roles()) > 1

    def weights(self) -> Roles:
        """Return the tensors of ``model_state``."""
        return {MODEL_STATE: self.roles()[MODEL_STATE]}

    def roles(self) -> Roles:
        """Return the tensors of every role."""
        return roles_of(self.model, self.aliases)

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of weights that have a master weight in the state dict."""
        return frozenset(name.removesuffix(MASTER.suffix) for name in self.roles().get(MASTER.role, ()))

    def prepare(self, stored: Collection[str]) -> None:
        """Do nothing: under semi-automatic parallelism ``Optimizer.state_dict`` creates the states."""
