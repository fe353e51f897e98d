"""Assign replicas to the ranks that write them, and compare replicas and the copies of tied tensors in a save.

Shards that exactly the same ranks hold form a *group*; its members share the writing so that bytes are balanced. The
coordinator sends an :class:`Assignment` (4 kB for 4,096 ranks), from which each rank derives its own part.

Replicas should be bitwise equal; differences are a fault of training that a checkpoint would hide. Each save hashes
small replicas completely, and of a large replica on n ranks the n-th that the step selects. The shards of a group share
one digest. Copies of a tied tensor are compared where the written pieces of two copies overlap, because pipeline stages
may shard them differently; they are compared under every value of ``flex_check_replicas``.

Time: one xxh3 pass over about as many bytes as the rank writes; on an accelerator also their copy to the host. Memory:
a block of 16 MiB, and 16 bytes per group and overlap of this rank (of all ranks on the coordinator).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import structs

from paddleformers_fc.distributed.channel import MAX_TOTAL_BYTES, format_ranks, group_by_value
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.memory import HostPieces, HostTensors, joined
from paddleformers_fc.execute.reading import box_in_rows
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shard_messages import JobShards, Numbers
from paddleformers_fc.layout.shards import Fragment, Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape
from paddleformers_fc.plan.items import row_axis, rows_around
from paddleformers_fc.plan.transfer_plan import boxes_within
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.files import byte_view
from paddleformers_fc.storage.manifest import DivergedTie
from paddleformers_fc.text import count_text, fold

MIN_PART_BYTES = 4 * 1024 * 1024
"""Minimum number of bytes that a rank writes of a shard that several ranks write."""

MAX_TENSORS = 100_000
"""Maximum number of tensors in a file, because headers are read completely."""

_LOAD_STEPS = 1024
"""Loads are sent in this many steps of the even share, so that most ranks have equal loads."""


class ShardPart(msgspec.Struct, frozen=True):
    """The part of a shard that one rank writes.

    Args:
        role: role of the shard.
        shard: the written part, as the file's header describes it.
        start: index of its first element in the rank's own shard of this name.
    """

    role: str
    shard: Shard
    start: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return shard_bytes(self.shard)


class Replica(msgspec.Struct, frozen=True):
    """A shard of one rank that other ranks hold as well.

    Args:
        role: role of the shard.
        shard: the shard.
        holders: number of ranks that hold it.
        group: number of its group.
    """

    role: str
    shard: Shard
    holders: int
    group: int

    def __str__(self) -> str:
        """Return a unique description of the shard, equal on all holders."""
        box, flat = self.shard.box, self.shard.flat
        ends = ",".join(f"{low}:{high}" for low, high in zip(box.lo, box.hi, strict=True))
        return f"{self.role} {self.shard.name} [{ends}]" + ("" if flat is None else f" flat {flat[0]}:{flat[1]}")


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """The ranks that write the shards that several ranks hold.

    Args:
        even: the even share of a rank, in bytes.
        groups: for every group its members in ascending order, each as the difference to the previous member.
        loads: for every group and member, what the member writes in addition, including earlier groups, in steps.
        patterns: the groups of a rank's shards, in its order, as pairs of a group and a number of shards. Group 0 means
            none, 1 the first group that the rank is a member of.
        pattern_of: for every rank, its pattern.
    """

    even: int
    groups: list[list[int]]
    loads: list[list[int]]
    patterns: list[list[tuple[int, int]]]
    pattern_of: list[int]

    @property
    def step(self) -> int:
        """The bytes in one step of loads."""
        return max(1, self.even // _LOAD_STEPS)

    def share_of(self, rank: int, roles: ShardsByRole) -> tuple[list[ShardPart], list[Replica]]:
        """Return what one rank writes, and its shards that other ranks hold as well.

        Args:
            rank: the rank.
            roles: its shards, in the order of its description.
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
    """Assigns the shards of a job to ranks, so that each distinct shard is written once and bytes are balanced.

    Within a group, shards are assigned largest first, each to the member with the fewest bytes. If that exceeds the
    even share, the rows of the shard are distributed. A part of a shard is again a shard, so readers need no special
    case.

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
        """Return members and shards of every group, smallest groups first, and the group number of every shard."""
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
            # The added -1 gets the number 0, even if every shard has a group.
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
        members: the members in ascending order.
        loads: what each member writes in addition.
        even: the even share of a rank.
    """
    load = dict(zip(members, loads, strict=True))
    sized = ((shard_bytes(shard), role, shard) for role, shard in held)
    for size, role, shard in sorted(sized, key=lambda entry: (-entry[0], entry[1], entry[2].name)):
        rank = min(load, key=lambda member: (load[member], member))
        parts = [(rank, ShardPart(role, shard, 0))]
        if size >= 2 * MIN_PART_BYTES and load[rank] + size > even:
            parts = list(_split(role, shard, _bytes_to_level(size, members, load)))
        for rank, part in parts:
            load[rank] += part.nbytes
            yield rank, part


def _bytes_to_level(size: int, ranks: Sequence[int], load: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return rank and bytes of every writer of a shard, such that all its writers have the same total load."""
    writers = sorted(ranks, key=lambda rank: (load[rank], rank))
    total = size + sum(load[rank] for rank in writers)
    while True:
        level = total // len(writers)
        if len(writers) == 1 or level - load[writers[-1]] >= MIN_PART_BYTES:
            return [(rank, level - load[rank]) for rank in sorted(writers)]
        total -= load[writers.pop()]


def _split(role: str, shard: Shard, deficits: list[tuple[int, int]]) -> Iterator[tuple[int, ShardPart]]:
    rows, row_bytes = rows_of(shard)
    low = assigned = 0
    for rank, deficit in deficits:
        assigned += deficit
        high = rows if rank == deficits[-1][0] else min(rows, round(assigned / row_bytes))
        if high > low:
            yield rank, _part(ShardPart(role, shard, 0), low, high)
        low = high


def pack_files(pieces: Iterable[ShardPart], max_bytes: int) -> list[list[ShardPart]]:
    """Divide the pieces of one role into files.

    Wide dtypes come first, so that all tensors are aligned. A piece that is larger than a file is cut between rows.

    Args:
        pieces: the pieces of one role and one rank.
        max_bytes: bound on the tensors of a file; a longer row gets its own file.
    """
    files: list[list[ShardPart]] = []
    room = 0
    for whole in sorted(pieces, key=lambda piece: (-dtype_size(piece.shard.dtype), piece.shard.name)):
        for piece in _cut(whole, max_bytes):
            size = piece.nbytes
            if not files or size > room or len(files[-1]) == MAX_TENSORS:
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
    # As many rows as fit, so that two parts of a tensor, which have the same name, are never in the same file.
    step = max(1, max_bytes // row_bytes)
    for low in range(0, rows, step):
        yield _part(piece, low, min(low + step, rows))


def rows_of(shard: Shard) -> tuple[int, int]:
    """Return the number of rows that a shard can be cut between, and the bytes of a row."""
    if shard.flat is not None or shard.size < 2:
        return shard.size, dtype_size(shard.dtype)
    axis = row_axis(shard.box.shape)
    return shard.box.shape[axis], math.prod(shard.box.shape[axis + 1 :]) * dtype_size(shard.dtype)


def _part(piece: ShardPart, low: int, high: int) -> ShardPart:
    """Return the rows ``low:high`` of a piece."""
    shard, (rows, row_bytes) = piece.shard, rows_of(piece.shard)
    if (low, high) == (0, rows):
        return piece
    start = piece.start + low * (row_bytes // dtype_size(shard.dtype))
    if shard.flat is not None:
        first = shard.flat[0]
        return ShardPart(piece.role, structs.replace(shard, flat=(first + low, first + high)), start)
    axis, box = row_axis(shard.box.shape), shard.box
    lo, hi = list(box.lo), list(box.hi)
    lo[axis], hi[axis] = box.lo[axis] + low, box.lo[axis] + high
    return ShardPart(piece.role, structs.replace(shard, box=Box(tuple(lo), tuple(hi))), start)


WHOLE_BYTES = 1024 * 1024
"""Replicas up to this size are always hashed completely."""

_BLOCK_ELEMENTS = 2 * 1024 * 1024
"""Elements of a tied tensor that are hashed at a time."""

_NAME_BYTES = 256
"""Upper estimate of the bytes of a replica's name and digest."""

_K = TypeVar("_K", int, str)


TensorKey: TypeAlias = tuple[str, str]
"""Role and name of a live tensor."""

ElementRange: TypeAlias = tuple[int, int]
"""Row-major index of the first element, and index after the last element."""

ElementRanges: TypeAlias = Mapping[TensorKey, tuple[ElementRange, ...]]
"""Disjoint ranges of live tensors, in ascending order."""


class ReplicaDigests(msgspec.Struct, frozen=True):
    """The digests of a rank's replicas.

    Args:
        groups: the digest of every replica, by group and by the replica's description.
    """

    groups: Mapping[int, Mapping[str, bytes]]

    @classmethod
    def of(cls, tensors: HostTensors, replicas: Iterable[Replica], step: int) -> ReplicaDigests:
        """Hash the replicas of a rank.

        Args:
            tensors: role -> name -> host memory of this rank.
            replicas: the shards that other ranks hold as well.
            step: the step, which selects the part of a large replica to hash.
        """
        found: dict[int, dict[str, bytes]] = {}
        for one in replicas:
            hasher = xxhash.xxh3_128()
            for part in tensors[one.role][one.shard.name](*hashed_range(one, step)):
                hasher.update(byte_view(part))
            found.setdefault(one.group, {})[str(one)] = hasher.digest()
        return cls(found)

    def of_groups(self) -> dict[int, bytes]:
        """Return one digest per group."""
        joined = {group: b"".join(own[key] for key in sorted(own)) for group, own in self.groups.items()}
        return {group: xxhash.xxh3_128_digest(digests) for group, digests in joined.items()}

    def by_name(self, groups: Iterable[int], ranks: int) -> dict[str, bytes]:
        """Return the digests of replicas by description, as many as fit into one exchange of all ranks.

        Args:
            groups: the groups whose replicas differ.
            ranks: number of ranks that send digests.
        """
        held = [self.groups[group] for group in groups if group in self.groups]
        most = max(1, MAX_TOTAL_BYTES // (_NAME_BYTES * ranks * max(1, len(held))))
        return {name: digests[name] for digests in held for name in sorted(digests)[:most]}


def hashed_range(replica: Replica, step: int | None) -> ElementRange:
    """Return the range of elements of a replica that is hashed at a step; equal for all holders.

    Args:
        replica: the replica.
        step: the step; None for a range of the maximum length.
    """
    rows, row_bytes = rows_of(replica.shard)
    row = row_bytes // dtype_size(replica.shard.dtype)
    if rows * row_bytes <= WHOLE_BYTES:
        return 0, rows * row
    if step is None:
        return 0, -(-rows // replica.holders) * row
    # The step is hashed, because saves come at regular steps, whose remainders might never change.
    turn = int.from_bytes(xxhash.xxh3_64_digest(str(step).encode()), "big") % replica.holders
    low = rows * turn // replica.holders
    high = max(low + 1, rows * (turn + 1) // replica.holders)
    return low * row, high * row


def differences(shards: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Return the differences between replicas, one line per tensor; one general line if no tensor can be named.

    Args:
        shards: the results of :meth:`ReplicaDigests.by_name`, by rank.
    """
    return list(fold(_lines(shards))) or ["tensors of a part of the model that several ranks hold"]


def check_replicas_equal(lines: Sequence[str]) -> None:
    """Check that no replicas differ.

    Raises:
        MismatchError: names the tensors and the ranks.
    """
    if lines:
        raise MismatchError(
            "Ranks that hold the same part of a tensor hold different numbers: "
            f"{count_text(len(lines), 'kind')} of tensors. Nothing was saved.",
            where="the live weights and optimizer states",
            evidence=lines,
            next_step="Training has diverged on these ranks. Resume from an older checkpoint and look for the cause, "
            "or set flex_check_replicas: warn to save one of the versions. Of tied tensors all copies are saved, and "
            "a resume must name the checkpoint, with flex_tied.",
        )


def unequal_keys(everyone: Iterable[Mapping[_K, bytes]]) -> list[_K]:
    """Return the keys whose digests differ."""
    found: dict[_K, set[bytes]] = {}
    for digests in everyone:
        for key, digest in digests.items():
            found.setdefault(key, set()).add(digest)
    return sorted(key for key, values in found.items() if len(values) > 1)


def _lines(shards: Sequence[Mapping[str, bytes]]) -> Iterator[str]:
    for key in unequal_keys(shards):
        holders = [rank for rank, digests in enumerate(shards) if key in digests]
        versions: dict[bytes, str] = {}
        for rank in holders:
            versions.setdefault(shards[rank][key], f"version {len(versions) + 1}")
        yield f"{key}: {group_by_value({rank: versions[shards[rank][key]] for rank in holders})}"


class CopyPart(msgspec.Struct, frozen=True, array_like=True):
    """A box of one copy that one rank writes.

    Args:
        rank: the rank.
        role: role of the shard.
        name: full name of the shard.
        start: index of the fragment's first element in the rank's shard.
        shape: shape of the fragment.
        part: the box, in coordinates of the fragment.
    """

    rank: int
    role: str
    name: str
    start: int
    shape: Shape
    part: Box


class TiedPart(msgspec.Struct, frozen=True):
    """A box that two copies of a tied tensor have in common, or two copies that cannot be compared.

    Args:
        owner: the tied parameter.
        line: the two copies and their ranks, for a report.
        sides: the box in both copies; empty if the copies differ in shape or dtype.
    """

    owner: str
    line: str
    sides: tuple[CopyPart, ...]


class Ties(msgspec.Struct, frozen=True):
    """The parts of tied tensors that a save compares, on the coordinator.

    Args:
        parts: the boxes to compare.
        stages: for every tied parameter the names of its copies by pipeline stage, first to last.
    """

    parts: tuple[TiedPart, ...]
    stages: Mapping[str, tuple[str, ...]]

    @property
    def sides(self) -> list[CopyPart]:
        """The boxes of all ranks, in the order in which each rank hashes its own."""
        return [side for part in self.parts for side in part.sides]

    def diverged(self, digests: Sequence[Sequence[bytes]]) -> tuple[DivergedTie, ...]:
        """Return the tied tensors whose copies differ.

        Args:
            digests: the results of :func:`hash_ties`, by rank.
        """
        ranks = [iter(own) for own in digests]
        compared: dict[tuple[str, str], list[bool]] = {}
        for part in self.parts:
            hashed = {next(ranks[side.rank]) for side in part.sides}
            compared.setdefault((part.owner, part.line), []).append(len(hashed) == 1)
        lines: dict[str, list[str]] = {}
        for (owner, line), equal in compared.items():
            if not all(equal):
                some = f": {equal.count(False)} of {len(equal)} parts differ" if any(equal) else ""
                lines.setdefault(owner, []).append(line + some)
        return tuple(DivergedTie(list(self.stages[owner]), found) for owner, found in lines.items())


_Copies = dict[str, list[tuple[int, ShardPart]]]
"""Rank and written piece, by the parameter's name."""


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


def _states(shares: Iterable[Sequence[ShardPart]], owners: Mapping[str, str]) -> dict[tuple[str, str, str], _Copies]:
    """Return the written pieces of every tied weight and state with several copies, by owner, role and suffix."""
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

    Among ranks that differ only in their stage, a later stage has the higher rank. Copies are therefore ordered by the
    lowest rank that holds them.
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
    """Yield every box that a piece of one copy and a piece of the other have in common, for both copies."""
    fragments = [(rank, piece, fragment) for rank, piece in other for fragment in piece.shard.fragments]
    finder = BoxFinder([fragment.box for _, _, fragment in fragments])
    for rank, piece in one:
        for fragment in piece.shard.fragments:
            for index in finder.near(fragment.box):
                common = fragment.box.intersect(fragments[index][2].box)
                if common is not None:
                    yield _copy_part(rank, piece, fragment, common), _copy_part(*fragments[index], common)


def _copy_part(rank: int, piece: ShardPart, fragment: Fragment, common: Box) -> CopyPart:
    box = fragment.box
    start = piece.start + fragment.start
    return CopyPart(rank, piece.role, piece.shard.name, start, box.shape, common.relative_to(box.lo))


def _digest(tensor: HostPieces, side: CopyPart) -> bytes:
    """Return the digest of a box's elements in row-major order."""
    hasher = xxhash.xxh3_128()
    low, high = rows_around(side.shape, side.part)
    for box in boxes_within(side.part, max(1, _BLOCK_ELEMENTS * side.part.volume // (high - low))):
        low, high = rows_around(side.shape, box)
        pieces = tensor(side.start + low, side.start + high)
        rows = joined(pieces, high - low)
        hasher.update(byte_view(np.ascontiguousarray(box_in_rows(rows, side.shape, box))))
    return hasher.digest()
