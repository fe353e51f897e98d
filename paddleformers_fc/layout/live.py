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


_dtypes: dict[int, tuple[object, str]] = {}
"""The names of dtypes by the identity of their objects, because hashing Paddle's takes longer than reading all fields.

While an object is kept here, no other object has its identity.
"""
_MOST_DTYPES = 256
"""Paddle has few; other tensors may have a new object at every access."""

_Fields = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, int] | None]
"""Dtype, shape of the memory, local shape, global shape, offset and range of a live tensor."""


def dtype_name(tensor: Any) -> str:
    """Return the numpy name of a tensor's dtype."""
    dtype = tensor.dtype
    known = _dtypes.get(id(dtype))
    if known is None:
        if len(_dtypes) == _MOST_DTYPES:
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
    # Lengths may be integers of numpy.
    local, whole, offset = (tuple(map(int, lengths)) for lengths in (local, whole, offset))
    return Shard(name, dtype, whole, shifted(local, offset), None if flat is None else (int(flat[0]), int(flat[1])))


def facts_of(roles: Roles) -> bytes:
    """Return all fields that :func:`describe_roles` reads, as bytes that are equal if and only if the fields are.

    No field is validated and no shard is created, so that repeated saves compare their shards in a few microseconds
    per shard.

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
        MismatchError: a shard outside its tensor, a tensor that does not hold as many elements as its shard claims,
            or a state whose shape is not its parameter's.
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


def _shards_of(names: Mapping[str, LocalTensor], kinds: dict[_Fields, Shard], faults: list[str]) -> dict[str, Shard]:
    """Return the shards of one role. Tensors with equal fields are validated once: layers repeat."""
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
            # Faults are reported for every tensor, so they are not kept.
            faults.extend(found)
        else:
            kinds[fields] = shard
    return shards


def _faults(shard: Shard, tensor: Any) -> Iterator[str]:
    yield from shard.faults()
    elements = math.prod(int(n) for n in tensor.shape)
    if elements != shard.size:
        yield f"{shard.name}: the tensor holds {elements} elements, its shard {shard.size}"
