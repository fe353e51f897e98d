"""Describe the shards of live tensors by the fields of :class:`LocalTensor`.

Paddle's ``ShardedWeight`` (``paddle/distributed/flex_checkpoint/dcp/sharded_weight.py``) and the tensors of simulated
ranks have these fields. Tensors of any other source can be saved and loaded once they have them. This module imports
no framework.
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
        """Shape of the global tensor."""

    @property
    def global_offset(self) -> tuple[int, ...]:
        """First index of the box on every axis."""

    @property
    def is_flattened(self) -> bool:
        """Whether the memory is a range of the box in row-major order."""

    @property
    def flattened_range(self) -> slice | None:
        """The range of a flattened tensor."""


Roles = Mapping[str, Mapping[str, LocalTensor]]
"""The tensors of one rank: role -> name -> tensor."""

LiveRoles = dict[str, dict[str, LocalTensor]]
"""A mutable :data:`Roles`."""


_dtypes: dict[int, tuple[object, str]] = {}
"""Dtype names by the ``id`` of the dtype object, because hashing Paddle's dtypes is slow.

Storing the object keeps its ``id`` unique.
"""
_MAX_DTYPES = 256
"""Bounds the cache, because some tensors create a new dtype object at every access."""

_Fields = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, int] | None]
"""Dtype, shape of the memory, local shape, global shape, offset and range of a live tensor."""


def dtype_name(tensor: Any) -> str:
    """Return the numpy name of a tensor's dtype."""
    dtype = tensor.dtype
    known = _dtypes.get(id(dtype))
    if known is None:
        if len(_dtypes) == _MAX_DTYPES:
            _dtypes.clear()
        known = _dtypes[id(dtype)] = dtype, str(dtype).rsplit(".", maxsplit=1)[-1]
    return known[1]


def _fields_of(weight: LocalTensor) -> _Fields:
    tensor, flat = weight.local_tensor, weight.flattened_range if weight.is_flattened else None
    return (
        dtype_name(tensor),
        tuple(tensor.shape),
        tuple(weight.local_shape),
        tuple(weight.global_shape),
        tuple(weight.global_offset),
        None if flat is None else (flat.start, flat.stop),
    )


def _shard(name: str, fields: _Fields) -> Shard:
    dtype, _, local, whole, offset, flat = fields
    # Lengths may be numpy integers.
    local, whole, offset = (tuple(map(int, lengths)) for lengths in (local, whole, offset))
    return Shard(name, dtype, whole, shifted(local, offset), None if flat is None else (int(flat[0]), int(flat[1])))


def facts_of(roles: Roles) -> bytes:
    """Return all fields that :func:`describe_roles` reads, as bytes that are equal if and only if the fields are.

    It validates no field and creates no shard, so that repeated saves compare shards in a few microseconds each.

    Args:
        roles: role -> name -> live weight.
    """
    facts = [(role, name, _fields_of(weight)) for role, names in roles.items() for name, weight in names.items()]
    return msgspec.msgpack.encode(facts, enc_hook=int)


def describe_roles(roles: Roles) -> dict[str, dict[str, Shard]]:
    """Return the shards of every role of this rank, validated against their parameters.

    Args:
        roles: role -> name -> live weight.
    Raises:
        MismatchError: a shard is outside its tensor, a local tensor has another number of elements than its shard, or
            the shape of a state does not match its parameter.
    """
    faults: list[str] = []
    kinds: dict[_Fields, Shard] = {}
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
            expected, whose = parameter.global_shape, "its parameter's"
            if state.shape is StateShape.SHARD_NUMBER:
                expected, whose = parameter.cuts, "the number of its parameter's shards"
            if expected != shard.global_shape:
                faults.append(f"{name}: shape {list(shard.global_shape)} is not {whose} {list(expected)}")
    if faults:
        raise MismatchError(
            f"{len(faults)} live shards are described inconsistently.",
            where="sharded_state_dict of this rank",
            evidence=faults,
            next_step="Correct the sharded_state_dict of the model or optimizer; nothing was read or written.",
        )
    return described


def _shards_of(names: Mapping[str, LocalTensor], kinds: dict[_Fields, Shard], faults: list[str]) -> dict[str, Shard]:
    """Return the shards of one role. Tensors with equal fields are validated once, because layers repeat."""
    shards: dict[str, Shard] = {}
    for name, weight in names.items():
        fields = _fields_of(weight)
        like = kinds.get(fields)
        if like is not None:
            shards[name] = Shard(name, like.dtype, like.global_shape, like.box, like.flat)
            continue
        shard = shards[name] = _shard(name, fields)
        found = list(_faults(shard, weight.local_tensor))
        if found:
            # Faults must be reported for every tensor, so faulty fields are not cached.
            faults.extend(found)
        else:
            kinds[fields] = shard
    return shards


def _faults(shard: Shard, tensor: Any) -> Iterator[str]:
    yield from shard.faults()
    elements = math.prod(int(n) for n in tensor.shape)
    if elements != shard.size:
        yield f"{shard.name}: the tensor has {elements} elements, its shard {shard.size}"
