"""Shards of live tensors, from the fields of :class:`LocalTensor` alone.

Paddle's ``ShardedWeight`` (``paddle/distributed/flex_checkpoint/dcp/sharded_weight.py``) and the tensors of simulated
ranks have these fields. Another source of layouts is saved and loaded as soon as its tensors have them. This module
imports no framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.layout.roles import MODEL_STATE, StateShape, split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import shifted


class LocalTensor(Protocol):
    """One rank's part of a tensor: its layout and its memory. Lengths and offsets are in elements."""

    @property
    def local_tensor(self) -> Any:
        """The memory, a ``paddle.Tensor`` or an object with its interface."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's box."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def global_offset(self) -> tuple[int, ...]:
        """First index of the box on every axis."""

    @property
    def is_flattened(self) -> bool:
        """Return whether the memory is a range of the box in row-major order."""

    @property
    def flattened_range(self) -> slice | None:
        """That range."""


Roles = Mapping[str, Mapping[str, LocalTensor]]
"""The tensors of one rank: role -> name -> tensor."""

LiveRoles = dict[str, dict[str, LocalTensor]]
""":data:`Roles` that are being collected."""


def shard_of(weight: LocalTensor, name: str) -> Shard:
    """Return the shard of a live tensor.

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


def facts_of(roles: Roles) -> bytes:
    """Return all fields that :func:`describe_roles` reads, as bytes that are equal if and only if the fields are.

    No field is validated and no shard is created, so that repeated saves compare their shards in a few microseconds
    per shard.

    Args:
        roles: role -> name -> live weight.
    """
    dtypes: dict[int, tuple[Any, str]] = {}  # By identity, as :data:`_Kinds`.
    facts: list[object] = []
    for role, names in roles.items():
        for name, weight in names.items():
            tensor, flat = weight.local_tensor, weight.flattened_range
            dtype = tensor.dtype
            known = dtypes.get(id(dtype)) or dtypes.setdefault(id(dtype), (dtype, _dtype_name(dtype)))
            facts.append(
                (
                    role,
                    name,
                    known[1],
                    weight.local_shape,
                    weight.global_shape,
                    weight.global_offset,
                    (flat.start, flat.stop) if weight.is_flattened and flat is not None else None,
                    tensor.shape,
                )
            )
    # Lengths may be integers of numpy.
    return msgspec.msgpack.encode(facts, enc_hook=int)


def _dtype_name(dtype: object) -> str:
    return str(dtype).rsplit(".", maxsplit=1)[-1]


def describe_roles(roles: Roles) -> dict[str, dict[str, Shard]]:
    """Return the shards of every role of this rank, validated against their parameters.

    Args:
        roles: role -> name -> live weight.
    Raises:
        MismatchError: a shard outside its tensor, a tensor that does not hold as many elements as its shard claims,
            or a state whose shape is not its parameter's.
    """
    faults: list[str] = []
    kinds: _Kinds = {}
    described = {role: _shards_of(names, kinds, faults) for role, names in roles.items()}
    parameters = described.get(MODEL_STATE, {})
    for role, shards in described.items():
        if role == MODEL_STATE:
            continue
        for name, shard in shards.items():
            state = split_state_name(role, name, shard.global_shape)
            parameter = parameters.get(state.parameter)
            if parameter is None or state.scalar:
                continue
            wanted, whose = parameter.global_shape, "its parameter's"
            if state.shape is StateShape.SHARD_NUMBER:
                wanted, whose = parameter.cuts, "the number of its parameter's shards"
            if wanted != shard.global_shape:
                faults.append(f"{name}: shape {list(shard.global_shape)} is not {whose} {list(wanted)}")
    if faults:
        raise MismatchError(
            f"{len(faults)} live shards contradict themselves.",
            where="sharded_state_dict of this rank",
            evidence=faults,
            next_step="The model or optimizer describes its shards wrongly; nothing was read or written.",
        )
    return described


_Claimed = tuple[object, ...]
"""All fields of a live tensor but its name."""


_Kinds = dict[_Claimed, tuple[object, Shard]]
"""A shard of tensors with equal fields, and their dtype object.

Dtypes are compared by identity, because hashing Paddle's takes longer than reading all other fields. While the object
is kept here, no other object has its identity.
"""


def _shards_of(names: Mapping[str, LocalTensor], kinds: _Kinds, faults: list[str]) -> dict[str, Shard]:
    """Return the shards of one role. Tensors with equal fields are validated once: layers repeat."""
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
        known = kinds.get(claimed)
        if known is not None:
            like = known[1]
            shards[name] = Shard(name, like.dtype, like.global_shape, like.box, like.flat)
            continue
        shard = shards[name] = shard_of(weight, name)
        found = list(_faults(shard, tensor))
        if found:
            # Faults are reported for every tensor, so they are not kept.
            faults.extend(found)
        else:
            kinds[claimed] = dtype, shard
    return shards


def _faults(shard: Shard, tensor: Any) -> Iterator[str]:
    yield from shard.faults()
    elements = math.prod(int(n) for n in tensor.shape)
    if elements != shard.size:
        yield f"{shard.name}: the tensor holds {elements} elements, its shard {shard.size}"
