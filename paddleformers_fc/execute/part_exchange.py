"""Send parts of tensors from the ranks that hold them to the ranks that need them, in memory.

Both sides cut a tensor into the same boxes, and a rank holds or needs a range of a box. Sharding may therefore differ,
and tensor, pipeline and expert parallelism may not. A rank uses its own elements, and receives all others from the
lowest rank that holds them. Tensors are sent in rounds of :data:`ROUND_BYTES` per rank, a larger one alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Bytes, Channel, all_gather_checked
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.transfer_plan import ROUND_BYTES

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
    """Successive elements of a box that one rank sends to another."""

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
    for names in _rounds(everyone, holders):
        outgoing = {
            rank: np.concatenate([_bytes(held[one.name], segment) for one, segment in sent])
            for rank, parts in enumerate(everyone)
            if rank != channel.rank
            if (sent := list(_sent(parts.wanted, names, holders, rank, channel.rank)))
        }
        mine = [shard for shard in everyone[channel.rank].wanted if shard.name in names and _place(shard) in holders]
        segments = [(shard, _segments(shard, holders[_place(shard)], channel.rank)) for shard in mine]
        sizes: dict[int, int] = {}
        for _, cut in segments:
            for one in cut:
                if one.sender != channel.rank:
                    sizes[one.sender] = sizes.get(one.sender, 0) + (one.stop - one.start) * 4
        coming = channel.all_to_all(outgoing, sizes) if channel.world_size > 1 else {}
        yield from _assembled(segments, coming, held, channel.rank)


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


def _rounds(everyone: Sequence[_Parts], holders: _Holders) -> Iterator[frozenset[str]]:
    """Yield the names of every round; equal on all ranks."""
    bytes_of: dict[str, int] = {}
    for parts in everyone:
        for shard in parts.wanted:
            if _place(shard) in holders:
                bytes_of[shard.name] = max(bytes_of.get(shard.name, 0), shard.size * 4)
    names: list[str] = []
    total = 0
    for name in sorted(bytes_of):
        if names and total + bytes_of[name] > ROUND_BYTES:
            yield frozenset(names)
            names, total = [], 0
        names.append(name)
        total += bytes_of[name]
    if names:
        yield frozenset(names)


def _sent(
    wanted: Sequence[Shard], names: frozenset[str], holders: _Holders, receiver: int, sender: int
) -> Iterator[tuple[Shard, _Segment]]:
    """Yield what one rank sends to another in a round, in the order in which the receiver takes it."""
    for shard in wanted:
        own = holders.get(_place(shard), ()) if shard.name in names else ()
        if any(one.sender == sender for one in own):
            for one in _segments(shard, own, receiver):
                if one.sender == sender:
                    yield shard, one


def _bytes(part: LocalPart, segment: _Segment) -> Bytes:
    return _elements(part, segment).view(np.uint8)


def _elements(part: LocalPart, segment: _Segment) -> Array:
    first = _range(part.shard)[0]
    return part.values[segment.start - first : segment.stop - first]


def _assembled(
    segments: Sequence[tuple[Shard, Sequence[_Segment]]],
    coming: Mapping[int, Bytes],
    held: Mapping[str, LocalPart],
    rank: int,
) -> Iterator[tuple[str, Array]]:
    taken = dict.fromkeys(coming, 0)
    for shard, cut in segments:
        values, first = np.empty(shard.size, np.float32), _range(shard)[0]
        for one in cut:
            target = values[one.start - first : one.stop - first]
            if one.sender == rank:
                target[:] = _elements(held[shard.name], one)
            else:
                begin = taken[one.sender]
                taken[one.sender] = begin + target.nbytes
                target.view(np.uint8)[:] = coming[one.sender][begin : begin + target.nbytes]
        yield shard.name, values
