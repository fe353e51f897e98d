"""Encode the shards of a rank as bytes for other ranks.

The shards of all roles travel together. States have the boxes of their parameter, and layers repeat, so
each distinct layout is sent once and a shard is a name and an index.

Time: linear in the shards of all ranks. Memory: the shards of one rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, Shape


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """The layout of shards without their names. Lengths and offsets are in elements."""

    dtype: str
    global_shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    flat: tuple[int, int] | None


class _RankShards(msgspec.Struct, frozen=True, array_like=True):
    """The shards of one rank: by role, names and the indices of their layouts."""

    places: list[_Place]
    roles: dict[str, tuple[list[str], list[int]]]


_rank_shards = msgspec.msgpack.Decoder(_RankShards)


def encode_rank_shards(shards_by_role: Mapping[str, Mapping[str, Shard]]) -> bytes:
    """Encode and compress the shards of one rank; equal shards in equal order give equal bytes.

    Args:
        shards_by_role: role -> full name -> shard.
    """
    numbers: dict[tuple[str, Shape, Box, tuple[int, int] | None], int] = {}
    roles: dict[str, tuple[list[str], list[int]]] = {}
    for role, shards in shards_by_role.items():
        where = [(shard.dtype, shard.global_shape, shard.box, shard.flat) for shard in shards.values()]
        roles[role] = (list(shards), [numbers.setdefault(place, len(numbers)) for place in where])
    places = [_Place(dtype, shape, box.lo, box.hi, flat) for dtype, shape, box, flat in numbers]
    return zlib.compress(msgspec.msgpack.encode(_RankShards(places, roles)), 1)


def decode_rank_shards(data: bytes) -> dict[str, dict[str, Shard]]:
    """Decode the shards of :func:`encode_rank_shards`: role -> full name -> shard. The sender is trusted."""
    found = _rank_shards.decode(zlib.decompress(data))
    boxes = [Box(place.lo, place.hi) for place in found.places]

    def shard(name: str, number: int) -> Shard:
        place = found.places[number]
        return Shard(name, place.dtype, place.global_shape, boxes[number], place.flat)

    return {
        role: {name: shard(name, number) for name, number in zip(names, numbers, strict=True)}
        for role, (names, numbers) in found.roles.items()
    }
