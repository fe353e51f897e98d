"""Shards as JSON in the headers of safetensors files, and as bytes in the exchange between ranks.

A checkpoint's safetensors header carries, under ``flex_shards``, which box or flattened range of which tensor each
entry is. The form is ``{key: {"name", "global_shape", "offset", "shape", "flat"}}``; the dtype is the entry's own.

Between ranks the shards of all roles travel together. A parameter's states lie where the parameter does, and layers
repeat, so each distinct place is sent once and every shard is a name and a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, Box, Shape, shifted
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import from_safetensors, item_size
from paddleformers_fc.storage.safetensors import TensorEntry

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


class _Kind(msgspec.Struct, frozen=True, gc=False):
    """What shards have in common that lie alike in tensors that are alike.

    Args:
        dtype: element type by its numpy name.
        global_shape: of the whole tensor.
        box: what is held of it.
        flat: the range of the box that is held, where it is one.
        size: in bytes.
    """

    dtype: str
    global_shape: Shape
    box: Box
    flat: tuple[int, int] | None
    size: int


def decode_shards(text: str, tensors: Mapping[str, TensorEntry], where: str) -> list[tuple[Shard, TensorEntry]]:
    """The shards of one file, each with its place in it.

    Args:
        text: what :func:`encode_shards` wrote.
        tensors: what the file holds, by safetensors key.
        where: the file, for the error.
    Raises:
        FormatError: malformed JSON, keys that are not the file's, a shard outside its tensor, or of another size than
            the file holds of it.
    """
    try:
        records = _records.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(
            "The shard description in this header cannot be read.", where=where, evidence=[str(error)]
        ) from error
    if records.keys() != tensors.keys():
        odd = sorted(records.keys() ^ tensors.keys())
        raise FormatError("Header and shard description name different tensors.", where=where, evidence=fold(odd))
    shards: list[tuple[Shard, TensorEntry]] = []
    faults: list[str] = []
    # Layers lie alike: what is possible in one of them is so in all.
    kinds: dict[tuple[object, ...], _Kind] = {}
    for key, record in records.items():
        entry = tensors[key]
        claimed = (entry.dtype, record.global_shape, record.offset, record.shape, record.flat)
        kind = kinds.get(claimed)
        if kind is None:
            found = list(_faults(record, entry.dtype))
            if found:
                faults.extend(found)
                continue
            kind = kinds[claimed] = _kind(record, entry.dtype)
        if entry.end - entry.begin != kind.size:
            faults.append(f"{record.name}: {entry.end - entry.begin} bytes are held, its shard has {kind.size}")
        shards.append((Shard(record.name, kind.dtype, kind.global_shape, kind.box, kind.flat), entry))
    if faults:
        raise FormatError("The header describes impossible shards.", where=where, evidence=fold(faults))
    return shards


def _faults(record: ShardRecord, code: str) -> Iterator[str]:
    """What is impossible about a record."""
    if _is_possible(record):
        yield from _shard(record, code).faults()
    else:
        yield f"{record.name}: {_short(record.shape)} at {_short(record.offset)} of {_short(record.global_shape)}"


def _shard(record: ShardRecord, code: str) -> Shard:
    box = shifted(record.shape, record.offset)
    return Shard(record.name, from_safetensors(code), record.global_shape, box, record.flat)


def _kind(record: ShardRecord, code: str) -> _Kind:
    shard = _shard(record, code)
    return _Kind(shard.dtype, shard.global_shape, shard.box, shard.flat, shard.size * item_size(code))


def _is_possible(record: ShardRecord) -> bool:
    lengths = (*record.global_shape, *record.offset, *record.shape)
    ranks = {len(record.global_shape), len(record.offset), len(record.shape)}
    return len(ranks) == 1 and len(record.shape) <= MAX_AXES and all(0 <= one <= MAX_LENGTH for one in lengths)


def _short(lengths: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, lengths[:8]))}{', ...' if len(lengths) > 8 else ''}]"
