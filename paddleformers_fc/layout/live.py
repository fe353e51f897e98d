"""Shards from live ``ShardedWeight`` objects, by their fields alone.

Paddle's ``ShardedWeight`` (``paddle/distributed/flex_checkpoint/dcp/sharded_weight.py``) carries a key, a local
tensor, its local shape, the global shape and offset, and for sharding stage 1 v2 a ``flattened_range``. This module
reads those fields and imports no framework, so it is tested with any object that has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, Shape, shifted


class ShardedWeightLike(Protocol):
    """The fields of a ``ShardedWeight`` that are read here."""

    key: str
    local_tensor: Any
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_flattened: bool
    flattened_range: slice | None


def describe(weight: ShardedWeightLike, name: str) -> Shard:
    """The shard that a live weight holds.

    Args:
        weight: the live weight.
        name: its key in the state dict, which is the tensor's name.
    """
    flat = None
    if weight.is_flattened and weight.flattened_range is not None:
        flat = (int(weight.flattened_range.start), int(weight.flattened_range.stop))
    local = tuple(int(n) for n in weight.local_shape)
    offset = tuple(int(n) for n in weight.global_offset)
    return Shard(
        name=name,
        dtype=_dtype_name(weight.local_tensor.dtype),
        global_shape=tuple(int(n) for n in weight.global_shape),
        box=shifted(local, offset),
        flat=flat,
    )


def facts_of(roles: Mapping[str, Mapping[str, ShardedWeightLike]]) -> bytes:
    """Everything that :func:`describe_roles` reads, as bytes that are equal if and only if all of it is.

    Nothing is checked and no shard is made, so that a job which saves the same shards again and again can see that
    they are the same: a few microseconds per shard.

    Args:
        roles: role -> name -> live weight.
    """
    dtypes: dict[Any, str] = {}
    facts: list[object] = []
    for role, names in roles.items():
        for name, weight in names.items():
            tensor, flat = weight.local_tensor, weight.flattened_range
            dtype = tensor.dtype
            facts.append(
                (
                    role,
                    name,
                    dtypes.get(dtype) or dtypes.setdefault(dtype, _dtype_name(dtype)),
                    weight.local_shape,
                    weight.global_shape,
                    weight.global_offset,
                    (flat.start, flat.stop) if weight.is_flattened and flat is not None else None,
                    tensor.shape,
                )
            )
    # Lengths may be numpy's integers, which are the same numbers.
    return msgspec.msgpack.encode(facts, enc_hook=int)


def _dtype_name(dtype: object) -> str:
    return str(dtype).rsplit(".", maxsplit=1)[-1]


def describe_roles(roles: Mapping[str, Mapping[str, ShardedWeightLike]]) -> dict[str, dict[str, Shard]]:
    """The shards of every role of this rank, checked against the parameters they belong to.

    Args:
        roles: role -> name -> live weight.
    Raises:
        MismatchError: a shard outside its tensor, a tensor that does not hold as many elements as its shard claims,
            or a state whose shape is not its parameter's.
    """
    faults: list[str] = []
    kinds: dict[_Claimed, _Kind] = {}
    described = {role: _described(names, kinds, faults) for role, names in roles.items()}
    parameters = described.get(MODEL_STATE, {})
    for role, shards in described.items():
        if role == MODEL_STATE:
            continue
        for name, shard in shards.items():
            state = split_state_name(role, name)
            parameter = parameters.get(state.parameter)
            if parameter is not None and not state.scalar and parameter.global_shape != shard.global_shape:
                faults.append(
                    f"{name}: shape {list(shard.global_shape)} is not its parameter's {list(parameter.global_shape)}"
                )
    if faults:
        raise MismatchError(
            f"{len(faults)} live shards contradict themselves.",
            where="sharded_state_dict of this rank",
            evidence=faults,
            next_step="The model or optimizer describes its shards wrongly; nothing was read or written.",
        )
    return described


_Claimed = tuple[object, ...]
"""All that a live weight says of itself but its name, as it says it."""


class _Kind(msgspec.Struct, frozen=True, gc=False):
    """What weights that say the same of themselves are shards of.

    Args:
        claimed: their dtype as they say it. It is compared by identity, for Paddle's takes longer to hash than all the
            rest to ask for, and while it is kept here, no other has its identity.
        dtype: the same by its numpy name.
        global_shape: of the whole tensor.
        box: what is held of it.
        flat: the range of the box that is held, where it is one.
    """

    claimed: object
    dtype: str
    global_shape: Shape
    box: Box
    flat: tuple[int, int] | None


def _described(
    names: Mapping[str, ShardedWeightLike], kinds: dict[_Claimed, _Kind], faults: list[str]
) -> dict[str, Shard]:
    """The shards of one role. What is possible of one weight is so of all that say the same: layers lie alike."""
    shards: dict[str, Shard] = {}
    for name, weight in names.items():
        tensor, flat = weight.local_tensor, weight.flattened_range if weight.is_flattened else None
        dtype = tensor.dtype
        claimed = (
            id(dtype),
            tuple(tensor.shape),
            tuple(weight.local_shape),
            tuple(weight.global_offset),
            tuple(weight.global_shape),
            None if flat is None else (flat.start, flat.stop),
        )
        kind = kinds.get(claimed)
        if kind is not None:
            shards[name] = Shard(name, kind.dtype, kind.global_shape, kind.box, kind.flat)
            continue
        shard = shards[name] = describe(weight, name)
        found = list(_faults(shard, tensor))
        if found:
            # To be said of every weight, and so it is not remembered.
            faults.extend(found)
        else:
            kinds[claimed] = _Kind(dtype, shard.dtype, shard.global_shape, shard.box, shard.flat)
    return shards


def _faults(shard: Shard, tensor: Any) -> Iterator[str]:
    yield from shard.faults()
    held = math.prod(int(n) for n in tensor.shape)
    if held != shard.size:
        yield f"{shard.name}: the tensor holds {held} elements, its shard {shard.size}"
