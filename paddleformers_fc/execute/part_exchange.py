"""Send parts of tensors from the ranks that hold them to the ranks that need them, in memory.

Both sides cut a tensor into the same boxes, and a rank holds or needs a range of a box. Sharding may therefore differ,
and tensor, pipeline and expert parallelism may not. A rank uses its own elements, and receives all others from the
lowest rank that holds them, in the rounds of :mod:`.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.exchange import exchange_round
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.plan.transfer_plan import Transfer, schedule_rounds

Array = np.ndarray[Any, np.dtype[np.float32]]
_Place = tuple[str, Box]


@dataclass(frozen=True)
class LocalPart:
    """A part that this rank holds.

    Args:
        shard: its box, and the range of it.
        values: its elements, float32 and one-dimensional.
    """

    shard: Shard
    values: Array


class _Parts(msgspec.Struct):
    """The parts that one rank holds and needs."""

    held: list[Shard]
    wanted: list[Shard]


class _Segment(msgspec.Struct, frozen=True):
    """Successive elements of a box that one rank has."""

    sender: int
    start: int
    stop: int


def gather_parts(
    held: Mapping[str, LocalPart], wanted: Mapping[str, Shard], channel: Channel
) -> Iterator[tuple[str, Array]]:
    """Yield the names and elements of the wanted parts that some ranks hold; every rank must iterate to the end.

    Args:
        held: this rank's parts by name.
        wanted: the parts that this rank needs, by name. Names that no rank holds are left out.
        channel: all ranks of the job.
    Raises:
        MismatchError: the same on every rank: ranks hold only some elements of a wanted part.
    """

    def own_parts() -> _Parts:
        return _Parts([one.shard for one in held.values()], list(wanted.values()))

    everyone = all_gather_checked(channel, "describing parts of tensors", own_parts, _Parts)
    holders = _holders(everyone)
    _refuse_holes(everyone, holders)
    for name, shard in wanted.items():
        if not shard.size and _place(shard) in holders:
            yield name, np.empty(0, np.float32)
    found: dict[str, Array] = {}
    left: dict[str, int] = {}
    for piece, values in _exchanged(held, _transfers(everyone, holders), channel):
        name, low, high = piece.file, piece.part.lo[0], piece.part.hi[0]
        shard = wanted[name]
        if name not in found:
            found[name], left[name] = np.empty(shard.size, np.float32), shard.size
        first = _range(shard)[0]
        found[name][low - first : high - first] = values
        left[name] -= high - low
        if not left[name]:
            yield name, found.pop(name)


def _exchanged(
    held: Mapping[str, LocalPart], moves: Sequence[Transfer], channel: Channel
) -> Iterator[tuple[StoredPart, Array]]:
    """Yield the ranges that this rank wants, and their elements."""
    for pieces in schedule_rounds(moves, channel.rank).rounds:
        own = [_elements(held[one.stored.file], one.stored.part) for one in pieces if one.move.owner == channel.rank]
        for piece, values in exchange_round(channel, pieces, own):
            yield piece.stored, values


def _transfers(everyone: Sequence[_Parts], holders: _Holders) -> list[Transfer]:
    """Return the ranges that one rank has and others want, tensor by tensor; equal on all ranks."""
    receivers: dict[tuple[str, Box, _Segment], list[int]] = {}
    for rank, parts in enumerate(everyone):
        for shard in parts.wanted:
            for one in _segments(shard, holders.get(_place(shard), ()), rank):
                receivers.setdefault((*_place(shard), one), []).append(rank)
    ordered = sorted(receivers.items(), key=lambda found: (found[0][0], found[0][1].lo, found[0][2].start))
    return [
        Transfer(
            StoredPart(name, 0, (box.volume,), Box((one.start,), (one.stop,)), "float32"), one.sender, tuple(ranks)
        )
        for (name, box, one), ranks in ordered
    ]


def _place(shard: Shard) -> _Place:
    return shard.name, shard.box


def _range(shard: Shard) -> tuple[int, int]:
    return (0, shard.box.volume) if shard.flat is None else shard.flat


_Holders = Mapping[_Place, Sequence[_Segment]]
"""The ranges of every box, with the ranks that hold them, in the order of ranks."""


def _holders(everyone: Sequence[_Parts]) -> _Holders:
    found: dict[_Place, list[_Segment]] = {}
    for rank, parts in enumerate(everyone):
        for shard in parts.held:
            found.setdefault(_place(shard), []).append(_Segment(rank, *_range(shard)))
    return found


def _segments(shard: Shard, holders: Sequence[_Segment], receiver: int) -> list[_Segment]:
    """Return the segments that make up a part; they end where no rank holds the next element."""
    at, stop = _range(shard)
    ordered = sorted(holders, key=lambda one: (one.sender != receiver, one.sender))
    found: list[_Segment] = []
    while at < stop:
        holder = next((one for one in ordered if one.start <= at < one.stop), None)
        if holder is None:
            break
        found.append(_Segment(holder.sender, at, min(holder.stop, stop)))
        at = found[-1].stop
    return found


def _refuse_holes(everyone: Sequence[_Parts], holders: _Holders) -> None:
    faults = {
        f"{shard.name}: {_range(shard)[0]}:{_range(shard)[1]} of {shard.box}"
        for rank, parts in enumerate(everyone)
        for shard in parts.wanted
        if _place(shard) in holders
        if sum(one.stop - one.start for one in _segments(shard, holders[_place(shard)], rank)) != shard.size
    }
    if faults:
        raise MismatchError(
            "The ranks together do not hold all elements of a tensor.",
            evidence=sorted(faults),
            next_step="Let every rank of the job call, with the parts that its optimizer updates.",
        )


def _elements(part: LocalPart, box: Box) -> Array:
    first = _range(part.shard)[0]
    return part.values[box.lo[0] - first : box.hi[0] - first]
