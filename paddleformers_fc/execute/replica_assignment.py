"""Assign the parts of shards to the ranks that write them, each replica once, and to files.

Shards without replicas are written by their holder. Replicas are found by box, not by count, and are assigned largest
first, each to the rank with the fewest bytes. If that would exceed the even share of a rank, the rows of the shard are
distributed so that its holders write the same number of bytes. A part of a shard is a shard again, so readers need no
special case.

Time: linear in the shards of all ranks, apart from sorting; ranks with equal shards are processed once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from paddleformers_fc.layout import Shard
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.storage.dtypes import dtype_size

RankShards = dict[str, dict[str, Shard]]

LEAST_PART_BYTES = 4 * 1024 * 1024
"""No rank writes less than this of a shard that is written by several."""

MOST_TENSORS = 100_000
"""Maximum number of tensors of one file: a header is read as a whole."""


@dataclass(frozen=True, slots=True)
class ShardPart:
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
        return self.shard.size * dtype_size(self.shard.dtype)


@dataclass(frozen=True, slots=True)
class Replica:
    """A shard of one rank that others hold as well.

    Args:
        role: of the shard.
        name: of the shard.
        rows: number of stretches of equal length that it can be cut into.
        row: elements of one.
        nbytes: its size in bytes.
        holders: how many ranks hold it.
        group: a name of the group of ranks that hold it, the same on all of them.
        described: the shard in words, the same on all holders and of no other shard.
    """

    role: str
    name: str
    rows: int
    row: int
    nbytes: int
    holders: int
    group: str
    described: str


def find_replicas(everyone: Sequence[RankShards], rank: int) -> list[Replica]:
    """Return the shards of one rank that other ranks hold as well.

    Args:
        everyone: as for :func:`assign_writers`.
        rank: whose.
    """
    groups: dict[tuple[int, ...], str] = {}
    found: list[Replica] = []
    for (role, shard), ranks in _holders(everyone):
        if len(ranks) > 1 and rank in ranks:
            key = tuple(sorted(ranks))
            group = groups.setdefault(key, hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest())
            (rows, row_bytes), width = _rows(shard), dtype_size(shard.dtype)
            replica = Replica(
                role=role,
                name=shard.name,
                rows=rows,
                row=row_bytes // width,
                nbytes=shard.size * width,
                holders=len(ranks),
                group=group,
                described=_shard_text(role, shard),
            )
            found.append(replica)
    return found


def _shard_text(role: str, shard: Shard) -> str:
    box = ",".join(f"{low}:{high}" for low, high in zip(shard.box.lo, shard.box.hi, strict=True))
    flat = "" if shard.flat is None else f" flat {shard.flat[0]}:{shard.flat[1]}"
    return f"{role} {shard.name} [{box}]{flat}"


def assign_writers(everyone: Sequence[RankShards]) -> list[list[ShardPart]]:
    """Assign writers so that each distinct shard is written once and bytes are balanced.

    Args:
        everyone: the shards of every rank, by rank. Ranks with equal shards may share one object.
    Returns:
        the pieces that each rank writes, by rank.
    """
    load = [0] * len(everyone)
    given: list[list[ShardPart]] = [[] for _ in everyone]
    sized = [(shard.size * dtype_size(shard.dtype), role, shard, ranks) for (role, shard), ranks in _holders(everyone)]
    even = -(-sum(size for size, *_ in sized) // len(everyone))
    # Shards with one holder leave no choice; the rest, largest first, go where there is least.
    for size, role, shard, ranks in sorted(
        sized, key=lambda entry: (len(entry[3]) > 1, -entry[0], entry[1], entry[2].name, entry[2].box.lo)
    ):
        rank = ranks[0] if len(ranks) == 1 else min(ranks, key=lambda candidate: (load[candidate], candidate))
        if len(ranks) == 1 or size < 2 * LEAST_PART_BYTES or load[rank] + size <= even:
            load[rank] += size
            given[rank].append(ShardPart(role, shard, 0))
            continue
        for rank, piece in _split(role, shard, _bytes_to_level(size, ranks, load)):
            load[rank] += piece.nbytes
            given[rank].append(piece)
    return given


def _holders(everyone: Sequence[RankShards]) -> Iterable[tuple[tuple[str, Shard], list[int]]]:
    alike: dict[int, list[int]] = {}
    for rank, roles in enumerate(everyone):
        alike.setdefault(id(roles), []).append(rank)
    holders: dict[tuple[str, Shard], list[int]] = {}
    for ranks in alike.values():
        for role, shards in everyone[ranks[0]].items():
            for shard in shards.values():
                holders.setdefault((role, shard), []).extend(ranks)
    return holders.items()


def _bytes_to_level(size: int, ranks: Sequence[int], load: Sequence[int]) -> list[tuple[int, int]]:
    """Return rank and bytes of every writer, so that all writers of a shard write the same number of bytes in total."""
    takers = sorted(ranks, key=lambda rank: (load[rank], rank))
    while True:
        level = (size + sum(load[rank] for rank in takers)) // len(takers)
        if len(takers) == 1 or level - load[takers[-1]] >= LEAST_PART_BYTES:
            return [(rank, level - load[rank]) for rank in sorted(takers)]
        takers.pop()


def _split(role: str, shard: Shard, deficits: list[tuple[int, int]]) -> Iterator[tuple[int, ShardPart]]:
    rows, row_bytes = _rows(shard)
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
            if not files or piece.nbytes > room or len(files[-1]) == MOST_TENSORS:
                files.append([])
                room = max_bytes
            files[-1].append(piece)
            room -= piece.nbytes
    return files


def _cut(piece: ShardPart, max_bytes: int) -> Iterator[ShardPart]:
    rows, row_bytes = _rows(piece.shard)
    if piece.nbytes <= max_bytes or rows == 1:
        yield piece
        return
    # As many rows as fit: two parts of one tensor never fit into one file, where they would have the same name.
    step = max(1, max_bytes // row_bytes)
    for low in range(0, rows, step):
        yield _part(piece, low, min(low + step, rows))


def _rows(shard: Shard) -> tuple[int, int]:
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
    shard, (rows, row_bytes) = piece.shard, _rows(piece.shard)
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
