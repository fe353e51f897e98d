"""Encode shards as JSON in the headers of safetensors files, and as bytes for other ranks.

``flex_shards`` in the safetensors header of a checkpoint states which box or flattened range of which tensor each entry
is, by the name of the tensor: ``{name: {"global_shape", "offset", "shape", "flat"}}``. The dtype is that of the entry.

Between ranks the shards of all roles travel together. States have the boxes of their parameter, and layers repeat, so
each distinct layout is sent once and a shard is a name and an index.

Fingerprint a layout: a digest of the boxes of every rank, which does not depend on names of layouts or degrees.

Time: linear in the shards of all ranks. Memory: the shards of one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, Box, Shape, shifted
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import from_safetensors, item_size
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.safetensors import TensorEntry
from paddleformers_fc.text import numbers_text

HEADER_KEY = "flex_shards"


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One shard of a tensor in JSON. Lengths and offsets are in elements."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None


_records = msgspec.json.Decoder(dict[str, ShardRecord])


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
    """Encode the shards of one rank; equal shards in equal order give equal bytes.

    Args:
        shards_by_role: role -> full name -> shard.
    """
    numbers: dict[tuple[str, Shape, Box, tuple[int, int] | None], int] = {}
    roles: dict[str, tuple[list[str], list[int]]] = {}
    for role, shards in shards_by_role.items():
        where = [(shard.dtype, shard.global_shape, shard.box, shard.flat) for shard in shards.values()]
        roles[role] = (list(shards), [numbers.setdefault(place, len(numbers)) for place in where])
    places = [_Place(dtype, shape, box.lo, box.hi, flat) for dtype, shape, box, flat in numbers]
    return msgspec.msgpack.encode(_RankShards(places, roles))


def decode_rank_shards(data: bytes) -> dict[str, dict[str, Shard]]:
    """Decode the shards of :func:`encode_rank_shards`: role -> full name -> shard. The sender is trusted."""
    found = _rank_shards.decode(data)
    boxes = [Box(place.lo, place.hi) for place in found.places]

    def shard(name: str, number: int) -> Shard:
        place = found.places[number]
        return Shard(name, place.dtype, place.global_shape, boxes[number], place.flat)

    return {
        role: {name: shard(name, number) for name, number in zip(names, numbers, strict=True)}
        for role, (names, numbers) in found.roles.items()
    }


def record_of(shard: Shard) -> ShardRecord:
    """Return the JSON record of a shard."""
    return ShardRecord(shard.global_shape, shard.box.lo, shard.box.shape, shard.flat)


def encode_shards(shards: Iterable[Shard]) -> str:
    """Return the header text of the shards of a file, each of another tensor."""
    return msgspec.json.encode({shard.name: record_of(shard) for shard in shards}).decode()


def decode_shards(text: str, tensors: Mapping[str, TensorEntry], where: str) -> list[tuple[Shard, TensorEntry]]:
    """Decode the shards of one file, each with its entry in the file.

    Args:
        text: the text of :func:`encode_shards`.
        tensors: the entries of the file by the name of their tensor.
        where: the file, for the error.
    Raises:
        FormatError: malformed JSON, other names than those of the file, or a shard that is outside its tensor or has
            another size than its entry.
    """
    try:
        records = _records.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(
            "Invalid shard description in this header.", where=where, evidence=[str(error)], next_step=RESTORE
        ) from error
    if records.keys() != tensors.keys():
        odd = sorted(records.keys() ^ tensors.keys())
        raise FormatError(
            "Header and shard description name different tensors.", where=where, evidence=fold(odd), next_step=RESTORE
        )
    shards: list[tuple[Shard, TensorEntry]] = []
    faults: list[str] = []
    # Layers repeat: equal records of equal dtypes are validated once. A size is in bytes.
    kinds: dict[tuple[object, ...], tuple[Shard, int]] = {}
    for name, record in records.items():
        entry = tensors[name]
        claimed = (entry.dtype, record.global_shape, record.offset, record.shape, record.flat)
        known = kinds.get(claimed)
        if known is None:
            found = list(_faults(name, record, entry.dtype))
            if found:
                faults.extend(found)
                continue
            shard = shard_of(name, record, from_safetensors(entry.dtype))
            known = kinds[claimed] = shard, shard.size * item_size(entry.dtype)
        like, size = known
        if entry.end - entry.begin != size:
            faults.append(f"{name}: {entry.end - entry.begin} bytes are held, its shard has {size}")
        shards.append((Shard(name, like.dtype, like.global_shape, like.box, like.flat), entry))
    if faults:
        raise FormatError(
            "The header describes impossible shards.", where=where, evidence=fold(faults), next_step=RESTORE
        )
    return shards


def _faults(name: str, record: ShardRecord, code: str) -> Iterator[str]:
    """Yield what is invalid in a record."""
    if _is_possible(record):
        yield from shard_of(name, record, from_safetensors(code)).faults()
    else:
        shape, offset, whole_shape = map(numbers_text, (record.shape, record.offset, record.global_shape))
        yield f"{name}: {shape} at {offset} of {whole_shape}"


def shard_of(name: str, record: ShardRecord, dtype: str) -> Shard:
    """Return the shard of a record."""
    return Shard(name, dtype, record.global_shape, shifted(record.shape, record.offset), record.flat)


def _is_possible(record: ShardRecord) -> bool:
    lengths = (*record.global_shape, *record.offset, *record.shape)
    ranks = {len(record.global_shape), len(record.offset), len(record.shape)}
    return len(ranks) == 1 and len(record.shape) <= MAX_AXES and all(0 <= one <= MAX_LENGTH for one in lengths)


def fingerprint(ranks: Iterable[Mapping[str, Mapping[str, Shard]]]) -> str:
    """Return the fingerprint of a layout, 32 hex digits.

    Args:
        ranks: role -> full name -> shard, for every rank. The order of names is ignored.
    """
    digest = hashlib.blake2b(digest_size=16)
    for roles in ranks:
        records = [
            (role, name, shard.dtype, record_of(shard))
            for role, shards in sorted(roles.items())
            for name, shard in sorted(shards.items())
        ]
        digest.update(hashlib.blake2b(msgspec.json.encode(records), digest_size=16).digest())
    return digest.hexdigest()
