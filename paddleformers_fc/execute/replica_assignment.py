"""Assign the parts of shards to the ranks that write them, each replica once, and to files.

Shards without replicas are written by their holder. Replicas are found by box, not by count. The shards that exactly
the same ranks hold are a *group*, and are assigned largest first, each to the member with the fewest bytes. If that
would exceed the even share of a rank, the rows of the shard are distributed so that the members write the same number
of bytes. A part of a shard is a shard again, so readers need no special case.

All members of a group hold all of its shards. The coordinator, which knows the shards of all ranks, therefore sends an
:class:`Assignment` of the groups, of what their members write besides, and of the group of every shard. Each member
assigns the shards of its groups by itself, like all others. Layers and ranks repeat, so it has 4 kB for 4,096 ranks.

Time: linear in the shards of all ranks on the coordinator, and in its own shards and the members of groups on another
rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec
import numpy as np
from msgspec import structs

from paddleformers_fc.layout import Shard
from paddleformers_fc.layout.shard_messages import JobShards, Numbers
from paddleformers_fc.layout.shards import ShardsByRole, shard_bytes
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.storage.dtypes import dtype_size

LEAST_PART_BYTES = 4 * 1024 * 1024
"""No rank writes less than this of a shard that is written by several."""

MOST_TENSORS = 100_000
"""Maximum number of tensors of one file: a header is read as a whole."""

_LOAD_STEPS = 1024
"""Steps of the even share in which loads are sent: most ranks have equal ones then."""


class ShardPart(msgspec.Struct, frozen=True):
    """The part of a shard that one rank writes.

    Args:
        role: of the shard.
        shard: the written part, as the file's header describes it.
        start: index, in elements, of its first element in the rank's own shard of this name.
    """

    role: str
    shard: Shard
    start: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return shard_bytes(self.shard)


class Replica(msgspec.Struct, frozen=True):
    """A shard of one rank that others hold as well.

    Args:
        role: of the shard.
        shard: the shard.
        holders: how many ranks hold it.
        group: the number of its group.
    """

    role: str
    shard: Shard
    holders: int
    group: int

    def __str__(self) -> str:
        """Describe the shard, the same on all holders and as no other shard."""
        box, flat = self.shard.box, self.shard.flat
        ends = ",".join(f"{low}:{high}" for low, high in zip(box.lo, box.hi, strict=True))
        return f"{self.role} {self.shard.name} [{ends}]" + ("" if flat is None else f" flat {flat[0]}:{flat[1]}")


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Who writes the shards that several ranks hold.

    Args:
        even: the even share of a rank, in bytes.
        groups: by group, its members in ascending order, each as the difference to the one before.
        loads: by group and member, what the member writes besides, of groups before this one too, in steps.
        patterns: the groups of a rank's shards, in its order, as pairs of a group and a number of shards; 0 for none,
            and 1 for the first group that has the rank as a member.
        pattern_of: by rank, its pattern.
    """

    even: int
    groups: list[list[int]]
    loads: list[list[int]]
    patterns: list[list[tuple[int, int]]]
    pattern_of: list[int]

    @property
    def step(self) -> int:
        """The bytes of a step of loads."""
        return max(1, self.even // _LOAD_STEPS)

    def share_of(self, rank: int, roles: ShardsByRole) -> tuple[list[ShardPart], list[Replica]]:
        """Return what one rank writes, and its shards that other ranks hold as well.

        Args:
            rank: the rank.
            roles: its shards, in the order in which it has described them.
        """
        members = {number: np.cumsum(group).tolist() for number, group in enumerate(self.groups)}
        groups = [number for number, group in members.items() if rank in group]
        numbers = [group for group, count in self.patterns[self.pattern_of[rank]] for _ in range(count)]
        share: list[ShardPart] = []
        shared: dict[int, list[_Held]] = {}
        owned = ((role, shard) for role, shards in roles.items() for shard in shards.values())
        for held, group in zip(owned, numbers, strict=True):
            if group:
                shared.setdefault(groups[group - 1], []).append(held)
            else:
                share.append(ShardPart(*held, 0))
        replicas: list[Replica] = []
        for group, some in shared.items():
            loads = [load * self.step for load in self.loads[group]]
            share += [part for one, part in _assign(some, members[group], loads, self.even) if one == rank]
            replicas += [Replica(role, shard, len(members[group]), group) for role, shard in some]
        return share, replicas


_Held = tuple[str, Shard]
"""A shard and its role."""


class Writers:
    """The ranks that write the shards of a job, so that each distinct shard is written once and bytes are balanced.

    Args:
        job: the shards of all ranks.
    """

    def __init__(self, job: JobShards) -> None:
        self._job = job
        _, _, places = job.columns
        sizes = np.array([shard_bytes(place) for place in job.places], np.int64)[places]
        counts = np.zeros(len(sizes), np.int64)
        for own in job.held:
            counts[own] += 1
        self._alone = counts == 1
        even = -(-int(sizes.sum()) // len(job.held))
        groups, group_of = self._groups()
        loads = [int(sizes[own[self._alone[own]]].sum()) for own in job.held]
        self._parts: dict[int, list[ShardPart]] = {}
        self.assignment = Assignment(even, [], [], *self._patterns(group_of))
        step = self.assignment.step
        for members, numbers in groups:
            known = [loads[rank] // step for rank in members]
            self.assignment.groups.append(np.diff(members, prepend=0).tolist())
            self.assignment.loads.append(known)
            for rank, part in _assign([job[number] for number in numbers], members, [step * n for n in known], even):
                loads[rank] += part.nbytes
                self._parts.setdefault(rank, []).append(part)

    def share_of(self, rank: int) -> list[ShardPart]:
        """Return what one rank writes."""
        held = self._job.held[rank]
        alone = [ShardPart(*self._job[number], 0) for number in held[self._alone[held]]]
        return alone + self._parts.get(rank, [])

    def _groups(self) -> tuple[list[tuple[list[int], list[int]]], Numbers]:
        """Return members and shards of every group, few members first, and the number of every shard's group."""
        held = [numbers[~self._alone[numbers]] for numbers in self._job.held]
        shards = np.concatenate(held)
        order = np.argsort(shards, kind="stable")
        ranks = np.repeat(np.arange(len(held)), [len(numbers) for numbers in held])[order]
        distinct, begins = np.unique(shards[order], return_index=True)
        found: dict[tuple[int, ...], list[int]] = {}
        for number, members in zip(distinct.tolist(), np.split(ranks, begins[1:]), strict=bool(distinct.size)):
            found.setdefault(tuple(members.tolist()), []).append(number)
        groups = sorted(found.items(), key=lambda group: (len(group[0]), group[0]))
        group_of = np.full(len(self._alone), -1, np.int32)
        for index, (_, some) in enumerate(groups):
            group_of[some] = index
        return [(list(members), some) for members, some in groups], group_of

    def _patterns(self, group_of: Numbers) -> tuple[list[list[tuple[int, int]]], list[int]]:
        patterns: dict[tuple[tuple[int, int], ...], int] = {}
        pattern_of: list[int] = []
        for numbers in self._job.held:
            # -1 comes first, also where every shard has a group.
            _, local = np.unique(np.append(group_of[numbers], -1), return_inverse=True)
            pattern = tuple((group, len(list(run))) for group, run in groupby(local[:-1].tolist()))
            pattern_of.append(patterns.setdefault(pattern, len(patterns)))
        return [list(pattern) for pattern in patterns], pattern_of


def _assign(
    held: Iterable[_Held], members: Sequence[int], loads: Sequence[int], even: int
) -> Iterator[tuple[int, ShardPart]]:
    """Yield rank and part of everything that the members of a group write of its shards.

    Args:
        held: the shards of the group, in any order.
        members: in ascending order.
        loads: what each writes besides.
        even: the even share of a rank.
    """
    load = dict(zip(members, loads, strict=True))
    sized = ((shard_bytes(shard), role, shard) for role, shard in held)
    for size, role, shard in sorted(sized, key=lambda entry: (-entry[0], entry[1], entry[2].name)):
        rank = min(load, key=lambda member: (load[member], member))
        parts = [(rank, ShardPart(role, shard, 0))]
        if size >= 2 * LEAST_PART_BYTES and load[rank] + size > even:
            parts = list(_split(role, shard, _bytes_to_level(size, members, load)))
        for rank, part in parts:
            load[rank] += part.nbytes
            yield rank, part


def _bytes_to_level(size: int, ranks: Sequence[int], load: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return rank and bytes of every writer, so that all writers of a shard write the same number of bytes in total."""
    takers = sorted(ranks, key=lambda rank: (load[rank], rank))
    together = size + sum(load[rank] for rank in takers)
    while True:
        level = together // len(takers)
        if len(takers) == 1 or level - load[takers[-1]] >= LEAST_PART_BYTES:
            return [(rank, level - load[rank]) for rank in sorted(takers)]
        together -= load[takers.pop()]


def _split(role: str, shard: Shard, deficits: list[tuple[int, int]]) -> Iterator[tuple[int, ShardPart]]:
    rows, row_bytes = rows_of(shard)
    low = taken = 0
    for rank, wanted in deficits:
        taken += wanted
        high = rows if rank == deficits[-1][0] else min(rows, round(taken / row_bytes))
        if high > low:
            yield rank, _part(ShardPart(role, shard, 0), low, high)
        low = high


def pack_files(pieces: Iterable[ShardPart], max_bytes: int) -> list[list[ShardPart]]:
    """Return the pieces of one role in the order of the files, one list per file.

    Wide dtypes come first, so that all tensors are aligned. A piece that is larger than a file is cut between rows.

    Args:
        pieces: of one role and one rank.
        max_bytes: bound on the tensors of a file; a single row that is longer has a file of its own.
    """
    files: list[list[ShardPart]] = []
    room = 0
    for whole in sorted(pieces, key=lambda piece: (-dtype_size(piece.shard.dtype), piece.shard.name)):
        for piece in _cut(whole, max_bytes):
            size = piece.nbytes
            if not files or size > room or len(files[-1]) == MOST_TENSORS:
                files.append([])
                room = max_bytes
            files[-1].append(piece)
            room -= size
    return files


def _cut(piece: ShardPart, max_bytes: int) -> Iterator[ShardPart]:
    if piece.nbytes <= max_bytes:
        yield piece
        return
    rows, row_bytes = rows_of(piece.shard)
    if rows == 1:
        yield piece
        return
    # As many rows as fit: two parts of one tensor never fit into one file, where they would have the same name.
    step = max(1, max_bytes // row_bytes)
    for low in range(0, rows, step):
        yield _part(piece, low, min(low + step, rows))


def rows_of(shard: Shard) -> tuple[int, int]:
    """Return the rows that a shard can be cut between: how many, and the bytes of one."""
    if shard.flat is not None or shard.size < 2:
        return shard.size, dtype_size(shard.dtype)
    axis = _row_axis(shard)
    return shard.box.shape[axis], math.prod(shard.box.shape[axis + 1 :]) * dtype_size(shard.dtype)


def _row_axis(shard: Shard) -> int:
    """Return the first axis that can be cut; the elements between two cuts of it are contiguous."""
    return next(axis for axis, length in enumerate(shard.box.shape) if length > 1)


def _part(piece: ShardPart, low: int, high: int) -> ShardPart:
    """Return the rows ``low:high`` of a piece."""
    shard, (rows, row_bytes) = piece.shard, rows_of(piece.shard)
    if (low, high) == (0, rows):
        return piece
    start = piece.start + low * (row_bytes // dtype_size(shard.dtype))
    if shard.flat is not None:
        first = shard.flat[0]
        return ShardPart(piece.role, structs.replace(shard, flat=(first + low, first + high)), start)
    axis, box = _row_axis(shard), shard.box
    lo, hi = list(box.lo), list(box.hi)
    lo[axis], hi[axis] = box.lo[axis] + low, box.lo[axis] + high
    return ShardPart(piece.role, structs.replace(shard, box=Box(tuple(lo), tuple(hi))), start)
