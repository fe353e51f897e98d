"""Shards as JSON in the headers of safetensors files, and as bytes in the exchange between ranks.

A checkpoint's safetensors header carries, under ``flex_shards``, which box or flattened range of which tensor each
entry is. The form is ``{key: {"name", "global_shape", "offset", "shape", "flat"}}``; the dtype is the entry's own.

Between ranks the shards of all roles travel together. A parameter's states lie where the parameter does, and layers
repeat, so each distinct place is sent once and every shard is a name and a number.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, Box, Shape, shifted
from paddleformers_fc.mapping.folding import fold

HEADER_KEY = "flex_shards"


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One shard in JSON. Lengths and offsets are in elements."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None


_records = msgspec.json.Decoder(dict[str, ShardRecord])


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where shards lie, without their names. Lengths and offsets are in elements."""

    dtype: str
    global_shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    flat: tuple[int, int] | None


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """The shards of one rank: by role, names and the numbers of their places."""

    places: list[_Place]
    roles: dict[str, tuple[list[str], list[int]]]


_held = msgspec.msgpack.Decoder(_Held)


def encode_held(held: Mapping[str, Mapping[str, Shard]]) -> bytes:
    """The shards of one rank for the others; equal shards in equal order give equal bytes.

    Args:
        held: role -> full name -> shard.
    """
    numbers: dict[tuple[str, Shape, Box, tuple[int, int] | None], int] = {}
    roles: dict[str, tuple[list[str], list[int]]] = {}
    for role, shards in held.items():
        where = [(shard.dtype, shard.global_shape, shard.box, shard.flat) for shard in shards.values()]
        roles[role] = (list(shards), [numbers.setdefault(place, len(numbers)) for place in where])
    places = [_Place(dtype, shape, box.lo, box.hi, flat) for dtype, shape, box, flat in numbers]
    return msgspec.msgpack.encode(_Held(places, roles))


def decode_held(data: bytes) -> dict[str, dict[str, Shard]]:
    """What :func:`encode_held` was given: role -> full name -> shard. It comes from this very job, and is trusted."""
    found = _held.decode(data)
    boxes = [Box(place.lo, place.hi) for place in found.places]

    def shard(name: str, number: int) -> Shard:
        place = found.places[number]
        return Shard(name, place.dtype, place.global_shape, boxes[number], place.flat)

    return {
        role: {name: shard(name, number) for name, number in zip(names, numbers, strict=True)}
        for role, (names, numbers) in found.roles.items()
    }


def record_of(shard: Shard) -> ShardRecord:
    """The JSON record of a shard."""
    return ShardRecord(shard.name, shard.global_shape, shard.box.lo, shard.box.shape, shard.flat)


def encode_shards(shards: Mapping[str, Shard]) -> str:
    """Header text for these shards, by safetensors key."""
    return msgspec.json.encode({key: record_of(shard) for key, shard in shards.items()}).decode()


def decode_shards(text: str, dtypes: Mapping[str, str], where: str) -> dict[str, Shard]:
    """The shards of one file.

    Args:
        text: what :func:`encode_shards` wrote.
        dtypes: element type of every safetensors key, by numpy name.
        where: the file, for the error.
    Raises:
        FormatError: malformed JSON, keys that are not the file's, or a shard outside its tensor.
    """
    try:
        records = _records.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(
            "The shard description in this header cannot be read.", where=where, evidence=[str(error)]
        ) from error
    if records.keys() != dtypes.keys():
        odd = sorted(records.keys() ^ dtypes.keys())
        raise FormatError("Header and shard description name different tensors.", where=where, evidence=fold(odd))
    shards: dict[str, Shard] = {}
    faults: list[str] = []
    # Layers lie alike: what is possible in one of them is so in all.
    possible: dict[tuple[Shape, Shape, Shape, tuple[int, int] | None], Box] = {}
    for key, record in records.items():
        place = (record.global_shape, record.offset, record.shape, record.flat)
        box = possible.get(place)
        if box is None:
            if not _is_possible(record):
                faults.append(
                    f"{record.name}: {_short(record.shape)} at {_short(record.offset)} of {_short(record.global_shape)}"
                )
                continue
            box = shifted(record.shape, record.offset)
            found = list(Shard(record.name, dtypes[key], record.global_shape, box, record.flat).faults())
            if found:
                faults.extend(found)
                continue
            possible[place] = box
        shards[key] = Shard(record.name, dtypes[key], record.global_shape, box, record.flat)
    if faults:
        raise FormatError("The header describes impossible shards.", where=where, evidence=fold(faults))
    return shards


def _is_possible(record: ShardRecord) -> bool:
    lengths = (*record.global_shape, *record.offset, *record.shape)
    ranks = {len(record.global_shape), len(record.offset), len(record.shape)}
    return len(ranks) == 1 and len(record.shape) <= MAX_AXES and all(0 <= one <= MAX_LENGTH for one in lengths)


def _short(lengths: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, lengths[:8]))}{', ...' if len(lengths) > 8 else ''}]"
