"""Compare the copies of tied tensors when they are saved.

A tied tensor has one copy per pipeline stage that uses it, under different names and with optimizer states of its own.
Training keeps the copies equal, and a load refuses copies that differ. Every save therefore compares them, under every
value of ``flex_check_replicas``. A checkpoint with diverged copies is saved with a record of it in the manifest, and is
never resumed or kept in place of a whole one.

The written pieces are compared. Stages may shard the copies differently (flattened ranges of fused buffers,
tensor-parallel cuts). The plan therefore intersects the written pieces of one copy with those of the other. Each rank
hashes its sides of the intersections, and the digests travel with the checksums to the coordinator, which compares.

Time: one xxh3 pass over the tied tensors that the rank writes, and on an accelerator their copy to the host. Memory:
one block of 16 MiB, and 16 bytes per intersection of this rank; on the coordinator, of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from paddleformers_fc.distributed.channel import format_ranks
from paddleformers_fc.execute.memory import HostPieces, HostTensors
from paddleformers_fc.execute.replica_assignment import ShardPart
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shard_messages import JobShards
from paddleformers_fc.layout.shards import Fragment, Shard
from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape
from paddleformers_fc.storage.files import byte_view
from paddleformers_fc.storage.manifest import DivergedTie

_BLOCK_BYTES = 16 * 1024 * 1024


class CopyPart(msgspec.Struct, frozen=True, array_like=True):
    """A box of one copy that one rank writes.

    Args:
        rank: the rank.
        role: role of the shard.
        name: full name of the shard.
        start: index, in elements, of the fragment in the rank's shard.
        shape: shape of the fragment.
        part: the box, in coordinates of the fragment.
    """

    rank: int
    role: str
    name: str
    start: int
    shape: Shape
    part: Box


@dataclass(frozen=True, slots=True)
class TiedPart:
    """A box that two copies of a tied tensor both hold, or two copies that cannot be compared.

    Args:
        owner: the tied parameter.
        line: the two copies and their ranks, for a report.
        sides: the box in either copy; none of copies that differ in shape or dtype.
    """

    owner: str
    line: str
    sides: tuple[CopyPart, ...]


@dataclass(frozen=True, slots=True)
class Ties:
    """The parts of tied tensors that a save compares, on the coordinator.

    Args:
        parts: the boxes to compare.
        stages: the names of every tied parameter's copies by pipeline stage, first to last.
    """

    parts: tuple[TiedPart, ...]
    stages: Mapping[str, tuple[str, ...]]

    @property
    def sides(self) -> list[CopyPart]:
        """The boxes of all ranks, in the order in which each rank hashes its own."""
        return [side for part in self.parts for side in part.sides]


_Copies = dict[str, list[tuple[int, ShardPart]]]
"""Rank and piece of everything that is written, by the parameter's name."""


def ties_of(job: JobShards, shares: Iterable[Sequence[ShardPart]], owners: Mapping[str, str]) -> Ties:
    """Return the parts of tied tensors that a save compares.

    Args:
        job: the shards of all ranks.
        shares: the pieces that every rank writes, by rank.
        owners: the owner of every alias.
    """
    if not owners:
        return Ties((), {})
    parts: list[TiedPart] = []
    for (owner, role, _), copies in _states(shares, owners).items():
        first, *others = sorted(copies, key=lambda name: (name != owner, name))
        for other in others:
            one, two = (copies[name][0][1].shard for name in (other, first))
            if (one.global_shape, one.dtype) != (two.global_shape, two.dtype):
                parts.append(TiedPart(owner, f"{role} {one.name}: {_form(one)}, {two.name}: {_form(two)}", ()))
                continue
            places = [f"{shard.name} on {format_ranks(job.holders(role, shard.name))}" for shard in (one, two)]
            line = f"{role} {', '.join(places)}"
            parts.extend(TiedPart(owner, line, sides) for sides in _intersections(copies[other], copies[first]))
    return Ties(tuple(parts), _stages(job, owners))


def hash_ties(tensors: HostTensors, sides: Iterable[CopyPart]) -> list[bytes]:
    """Return the digests of this rank's sides, 16 bytes each.

    Args:
        tensors: role -> name -> host memory of this rank.
        sides: the boxes, in the order of :attr:`Ties.sides`.
    """
    return [_digest(tensors[side.role][side.name], side) for side in sides]


def diverged(ties: Ties, digests: Sequence[Sequence[bytes]]) -> tuple[DivergedTie, ...]:
    """Return the tied tensors whose copies differ.

    Args:
        ties: the compared parts.
        digests: the results of :func:`hash_ties`, by rank.
    """
    ranks = [iter(own) for own in digests]
    compared: dict[tuple[str, str], list[bool]] = {}
    for part in ties.parts:
        hashed = {next(ranks[side.rank]) for side in part.sides}
        compared.setdefault((part.owner, part.line), []).append(len(hashed) == 1)
    lines: dict[str, list[str]] = {}
    for (owner, line), equal in compared.items():
        if not all(equal):
            some = f": {equal.count(False)} of {len(equal)} parts differ" if any(equal) else ""
            lines.setdefault(owner, []).append(line + some)
    return tuple(DivergedTie(list(ties.stages[owner]), found) for owner, found in lines.items())


def _states(shares: Iterable[Sequence[ShardPart]], owners: Mapping[str, str]) -> dict[tuple[str, str, str], _Copies]:
    """Return the written pieces of every tied weight and state that has several copies, by owner, role and suffix."""
    names = {*owners, *owners.values()}
    beginnings = tuple(names)
    found: dict[tuple[str, str, str], _Copies] = {}
    for rank, share in enumerate(shares):
        for piece in share:
            if not piece.shard.name.startswith(beginnings):
                continue
            state = split_state_name(piece.role, piece.shard.name)
            if state.parameter in names:
                key = (owners.get(state.parameter, state.parameter), piece.role, state.suffix)
                found.setdefault(key, {}).setdefault(state.parameter, []).append((rank, piece))
    return {key: copies for key, copies in found.items() if len(copies) > 1}


def _stages(job: JobShards, owners: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the copies of every tied parameter by pipeline stage.

    Among ranks that differ in their stage alone, a later stage has the higher rank. So the stages of two copies are in
    the order of the lowest ranks that hold them.
    """
    copies: dict[str, list[str]] = {}
    for alias, owner in owners.items():
        copies.setdefault(owner, [owner]).append(alias)
    return {
        owner: tuple(sorted(present, key=lambda name: present[name][0]))
        for owner, names in copies.items()
        if (present := {name: ranks for name in names if (ranks := job.holders(MODEL_STATE, name))})
    }


def _form(shard: Shard) -> str:
    return f"{shard.dtype} {list(shard.global_shape)}"


def _intersections(
    one: Sequence[tuple[int, ShardPart]], other: Sequence[tuple[int, ShardPart]]
) -> Iterator[tuple[CopyPart, CopyPart]]:
    """Yield every box that a piece of one copy and a piece of the other have in common, in both."""
    fragments = [(rank, piece, fragment) for rank, piece in other for fragment in piece.shard.fragments]
    finder = BoxFinder([fragment.box for _, _, fragment in fragments])
    for rank, piece in one:
        for fragment in piece.shard.fragments:
            for index in finder.near(fragment.box):
                common = fragment.box.intersect(fragments[index][2].box)
                if common is not None:
                    yield _part(rank, piece, fragment, common), _part(*fragments[index], common)


def _part(rank: int, piece: ShardPart, fragment: Fragment, common: Box) -> CopyPart:
    box = fragment.box
    start = piece.start + fragment.start
    return CopyPart(rank, piece.role, piece.shard.name, start, box.shape, common.relative_to(box.lo))


def _digest(tensor: HostPieces, side: CopyPart) -> bytes:
    """Return the digest of a box's elements in row-major order."""
    hasher = xxhash.xxh3_128()
    shape = side.shape or (1,)
    part = side.part if side.shape else Box((0,), (1,))
    row = math.prod(shape[1:])
    inside = (slice(None), *(slice(low, high) for low, high in zip(part.lo[1:], part.hi[1:], strict=True)))
    step = max(1, _BLOCK_BYTES // max(row * 8, 1))
    for low in range(part.lo[0], part.hi[0], step):
        high = min(low + step, part.hi[0])
        blocks = list(tensor(side.start + low * row, side.start + high * row))
        block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        rows = block.reshape((high - low, *shape[1:]))[inside]
        hasher.update(byte_view(np.ascontiguousarray(rows)))
    return hasher.digest()
