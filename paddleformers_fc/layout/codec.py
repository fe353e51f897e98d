"""Shards as JSON, for the headers of safetensors files and for the exchange between ranks.

A checkpoint's safetensors header carries, under ``flex_shards``, which box or flattened range of which tensor each
entry is. The form is ``{key: {"name", "global_shape", "offset", "shape", "flat"}}``; the dtype is the entry's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import shifted

HEADER_KEY = "flex_shards"


class ShardRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shard in JSON. Lengths and offsets are in elements."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None


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
        records = msgspec.json.decode(text, type=dict[str, ShardRecord])
    except msgspec.MsgspecError as error:
        raise FormatError(
            "The shard description in this header cannot be read.", where=where, evidence=[str(error)]
        ) from error
    if records.keys() != dtypes.keys():
        odd = sorted(records.keys() ^ dtypes.keys())
        raise FormatError("Header and shard description name different tensors.", where=where, evidence=odd)
    shards: dict[str, Shard] = {}
    faults: list[str] = []
    for key, record in records.items():
        ranks = {len(record.global_shape), len(record.offset), len(record.shape)}
        if len(ranks) != 1 or min((*record.global_shape, *record.offset, *record.shape), default=0) < 0:
            faults.append(f"{record.name}: shape {record.shape} at {record.offset} of {record.global_shape}")
            continue
        shard = Shard(record.name, dtypes[key], record.global_shape, shifted(record.shape, record.offset), record.flat)
        faults.extend(shard.faults())
        shards[key] = shard
    if faults:
        raise FormatError("The header describes impossible shards.", where=where, evidence=faults)
    return shards
