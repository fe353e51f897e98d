"""Encode the shards of one rank as bytes, and decode the shards of all ranks into columns.

States have the boxes of their parameter and layers repeat, so each distinct layout is sent once, and a shard is a name
and an index. The planning rank also keeps shards as numbers: equal shards of several ranks share one number.

Time: linear in the shards of all ranks, apart from a sort. Memory: to encode, the shards of one rank; to decode, four
bytes per shard and rank, 12 bytes per distinct shard, and an object per distinct name and layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, Shape

Numbers = np.ndarray[Any, np.dtype[np.int32]]
"""Numbers of roles, names, layouts or shards."""


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """The layout of a shard, without its name. Lengths and offsets are in elements."""

    dtype: str
    global_shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    flat: tuple[int, int] | None


class _RankShards(msgspec.Struct, frozen=True, array_like=True):
    """The shards of one rank: by role, the names and the indices of their layouts."""

    places: list[_Place]
    roles: dict[str, tuple[list[str], list[int]]]


_rank_shards = msgspec.msgpack.Decoder(_RankShards)


def encode_rank_shards(shards_by_role: Mapping[str, Mapping[str, Shard]]) -> bytes:
    """Encode and compress the shards of one rank. Equal shards in the same order give equal bytes.

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


class JobShards(msgspec.Struct, frozen=True):
    """The distinct shards of a job, numbered by role and name, and the ranks that hold them.

    Args:
        roles: the roles.
        names: the names of all tensors.
        places: the distinct layouts, as shards without a name.
        columns: for every distinct shard, the numbers of its role, name and layout.
        held: for every rank, its shards in its own order; ranks with equal shards share one array.
    """

    roles: list[str]
    names: list[str]
    places: list[Shard]
    columns: tuple[Numbers, Numbers, Numbers]
    held: list[Numbers]

    def __getitem__(self, number: int) -> tuple[str, Shard]:
        """Return a distinct shard and its role."""
        role, name, place = (int(column[number]) for column in self.columns)
        like = self.places[place]
        return self.roles[role], Shard(self.names[name], like.dtype, like.global_shape, like.box, like.flat)

    def tensors(self, role: str) -> Iterator[tuple[str, Numbers]]:
        """Yield the tensors of a role by name, with the numbers of their distinct shards."""
        if role not in self.roles:
            return
        (numbers,) = np.nonzero(self.columns[0] == self.roles.index(role))
        names = self.columns[1][numbers]
        for alike in np.split(numbers, np.nonzero(np.diff(names))[0] + 1):
            yield self.names[names[alike[0] - numbers[0]]], alike

    def holders(self, role: str, name: str) -> list[int]:
        """Return the ranks that hold a part of a tensor."""
        if role not in self.roles or name not in self.names:
            return []
        of_role, of_name, _ = self.columns
        matches = (of_role == self.roles.index(role)) & (of_name == self.names.index(name))
        return [rank for rank, numbers in enumerate(self.held) if matches[numbers].any()]


def decode_shards(payloads: Sequence[bytes]) -> JobShards:
    """Decode the results of :func:`encode_rank_shards` of all ranks, in rank order. The senders are trusted."""
    roles: dict[str, int] = {}
    names: dict[str, int] = {}
    boxes: dict[tuple[str, Shape, Shape, Shape], int] = {}
    places: dict[tuple[int, tuple[int, int] | None], int] = {}
    found: dict[bytes, Numbers] = {}
    for payload in dict.fromkeys(payloads):
        sent = _rank_shards.decode(zlib.decompress(payload))
        kinds = [(one.dtype, one.global_shape, one.lo, one.hi) for one in sent.places]
        where = [(boxes.setdefault(kind, len(boxes)), one.flat) for kind, one in zip(kinds, sent.places, strict=True)]
        placed = np.array([places.setdefault(place, len(places)) for place in where], np.int32)
        parts = [
            (
                np.full(len(own), roles.setdefault(role, len(roles)), np.int32),
                np.array([names.setdefault(name, len(names)) for name in own], np.int32),
                placed[numbered],
            )
            for role, (own, numbered) in sent.roles.items()
            if own
        ]
        found[payload] = np.hstack(parts) if parts else np.empty((3, 0), np.int32)
    whole = [Shard("", dtype, shape, Box(lo, hi)) for dtype, shape, lo, hi in boxes]
    shards = [
        whole[box] if flat is None else Shard("", whole[box].dtype, whole[box].global_shape, whole[box].box, flat)
        for box, flat in places
    ]
    sizes = max(len(roles), 1), max(len(names), 1), max(len(places), 1)
    keys = [np.ravel_multi_index(tuple(rows), sizes) for rows in found.values()]
    distinct, numbers = np.unique(np.concatenate(keys), return_inverse=True)
    of_role, of_name, of_place = np.array(np.unravel_index(distinct, sizes), np.int32)
    ends = np.cumsum([rows.shape[1] for rows in found.values()])
    own = dict(zip(found, np.split(numbers.astype(np.int32), ends[:-1]), strict=True))
    by_rank = [own[payload] for payload in payloads]
    return JobShards(list(roles), list(names), shards, (of_role, of_name, of_place), by_rank)
