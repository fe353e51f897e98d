"""Read ranges on one rank for others, and send them in rounds.

Ranges are exchanged if a file is not visible to all ranks, or if replicas share their reads; otherwise a load is one
local read. All ranks compute the same **rounds** (:mod:`paddleformers_fc.plan.transfer_plan`). In a round every rank
sends its pieces, packed and in the stored dtype, while the next round is read; receivers transpose and cast. A rank
that fails completes its round and reports the failure; then all ranks stop.

Replicas find each other by a digest of the ranges that they read, which planning exchanges in any case; no list of
ranges is sent. Memory beyond the targets: the reads of two rounds or turns, and one round that is sent and received,
each at most ``ROUND_BYTES``; on an accelerator also host copies of incomplete shards.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import xxhash
from msgspec import structs

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, decoder_of, gather_and_keep, run_on_all
from paddleformers_fc.errors import FlexError, MismatchError, StorageError
from paddleformers_fc.execute.opening import FillMessage, raise_faults
from paddleformers_fc.execute.phases import PhaseTimer, Slowest, rounded, slowest_of
from paddleformers_fc.execute.reading import ArraySlot, Key, Slot, check_equal, digests_of, execute_reads, read_parts
from paddleformers_fc.formats.catalog import EVERYONE
from paddleformers_fc.layout.live import LocalTensor, Roles
from paddleformers_fc.layout.roles import MODEL_STATE, parameter_of
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.block_owners import NO_BLOCKS, BlockReads, RecordedBlocks
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.transfer_plan import (
    EMPTY_SCHEDULE,
    ROUND_BYTES,
    Transfer,
    TransferPiece,
    TransferSchedule,
    VisibleTo,
    assign_transfers,
    readers,
    schedule_rounds,
    share_rounds,
)
from paddleformers_fc.storage import paths
from paddleformers_fc.storage.block_checksums import comparison_of
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, Blocks, OwnedBlocks, ReadOptions, ReadPool
from paddleformers_fc.storage.identities import NO_IDENTITIES, Identities, same_bytes_key
from paddleformers_fc.storage.operations import SCRATCH_BYTES, copy_tiled, numpy_dtype, row_major

Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
_Place = tuple[str, Box]
"""The name of a tensor, and a box of it."""

MIN_HOSTS = 4
"""Minimum number of hosts for replicas to share reads under ``auto``: the page cache serves all ranks of a host."""

MAX_REPLICAS = 64
"""Maximum number of ranks that share reads; more ranks form groups, because pieces would become short."""


class SharedReads(msgspec.Struct, frozen=True, array_like=True):
    """Message with digests of the ranges that a rank could share with others.

    Args:
        ranges: digest of the ranges; empty if the rank reads for itself.
        hosts: digest of the hosts of all ranks, under ``auto``.
    """

    ranges: bytes = b""
    hosts: bytes = b""

    @classmethod
    def of(
        cls, plan: LoadPlan, roles: Mapping[str, Mapping[str, LocalTensor]], options: ReadOptions
    ) -> tuple[SharedReads, tuple[StoredPart, ...]]:
        """Return a rank's message, and the ranges that it can share.

        Args:
            plan: the reads of the rank.
            roles: the tensors that it fills.
            options: whether ranks share reads.
        """
        is_automatic = options.replicas == "auto"
        if options.replicas == "each" or (is_automatic and len(set(options.hosts)) < MIN_HOSTS):
            return cls(), ()
        parts = shared_parts(plan, roles)
        ranges, hosts = (xxhash.xxh3_128_digest(msgspec.msgpack.encode(one)) for one in (parts, options.hosts))
        return cls(ranges if parts else b"", hosts if is_automatic else b""), parts


class Replicas(msgspec.Struct, frozen=True):
    """The ranks that read the same ranges as this rank, in a job with shared reads.

    Args:
        ranks: the ranks in ascending order, including this rank; it may be the only one.
        parts: the ranges, equal on all of these ranks.
    """

    ranks: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def schedule(self, limit: int) -> TransferSchedule:
        """Return the rounds in which replicas exchange what they have read; none for a single rank.

        Args:
            limit: bound on the bytes that a rank sends, and receives, in a round.
        """
        return share_rounds(self.parts, self.ranks, limit) if len(self.ranks) > 1 else EMPTY_SCHEDULE


def shared_parts(plan: LoadPlan, roles: Roles) -> tuple[StoredPart, ...]:
    """Return the ranges that replicas of a rank read as well: weights, and states that are not sharded over replicas.

    Args:
        plan: the reads of the rank.
        roles: the tensors that it fills.
    """
    elements = {role: _largest(role, names) for role, names in roles.items()}
    whole = {role for role, found in elements.items() if found == elements.get(MODEL_STATE)}
    return tuple(dict.fromkeys(item.stored for item in by_shard(plan) if item.role in whole))


def by_shard(plan: LoadPlan) -> list[ReadItem]:
    """Return the items ordered by shard, so that shards are completed one by one."""
    shards: dict[tuple[str, str], list[ReadItem]] = {}
    for item in plan.items:
        shards.setdefault((item.role, item.name), []).append(item)
    return [item for items in shards.values() for item in items]


def _largest(role: str, names: Mapping[str, LocalTensor]) -> dict[str, int]:
    """Return for each parameter the number of elements of its largest tensor in a role."""
    found: dict[str, int] = {}
    for name, weight in names.items():
        parameter = parameter_of(role, name)
        found[parameter] = max(found.get(parameter, 0), math.prod(weight.local_tensor.shape))
    return found


def replicas_of(
    everyone: Sequence[SharedReads], rank: int, options: ReadOptions, parts: Sequence[StoredPart]
) -> Replicas | None:
    """Return the replicas of a rank; None if no ranks of the job share reads.

    Args:
        everyone: the messages of all ranks, by rank.
        rank: the rank.
        options: its options, equal on all ranks.
        parts: the ranges that it can share.
    """
    groups: dict[bytes, list[int]] = {}
    for other, one in enumerate(everyone):
        if one.ranges:
            groups.setdefault(one.ranges, []).append(other)
    if options.replicas == "auto":
        # Ranks with different lists of hosts would not form the same groups.
        hosts = options.hosts if len({one.hosts for one in everyone}) == 1 else ()
        known = len(hosts) == len(everyone)
        groups = {
            key: ranks for key, ranks in groups.items() if known and len({hosts[rank] for rank in ranks}) >= MIN_HOSTS
        }
    groups = {key: ranks for key, ranks in groups.items() if len(ranks) > 1}
    if not groups:
        return None
    own = groups.get(everyone[rank].ranges, [rank])
    count = -(-len(own) // MAX_REPLICAS)
    # Neighbouring ranks, which are on one host, go into different groups.
    return Replicas(tuple(own[own.index(rank) % count :: count]), tuple(parts))


class ReadContext(msgspec.Struct, frozen=True):
    """The files that this rank reads.

    Args:
        root: the directory that files are relative to.
        identities: identities of the checked files; reading a replaced file raises an error.
        visible_to: for every file that is not visible to all ranks, the ranks with access to it.
        recorded: the block checksums to compare while reading.
        block_reads: for every rank, the blocks that it reads if every rank reads for itself.
        replicas: the ranks that read the same ranges; None if no ranks of the job share reads.
    """

    root: paths.AnyPath
    identities: Identities = NO_IDENTITIES
    visible_to: VisibleTo = EVERYONE
    recorded: RecordedBlocks = NO_BLOCKS
    block_reads: Sequence[BlockReads] = ()
    replicas: Replicas | None = None

    @property
    def is_exchanged(self) -> bool:
        """Whether ranks of the job read for each other; equal on all ranks."""
        return bool(self.visible_to) or self.replicas is not None

    def can_read(self, rank: int, file: str) -> bool:
        """Return whether a file is visible to a rank."""
        return file not in self.visible_to or rank in self.visible_to[file]

    def blocks(self, rank: int) -> Blocks:
        """Return the blocks that a rank compares."""
        numbers = self.recorded.owned(self.block_reads, rank) if self.block_reads else {}
        return {
            self.root / path: OwnedBlocks(self.recorded.files[path], frozenset(found))
            for path, found in numbers.items()
        }


class Traffic(msgspec.Struct, frozen=True):
    """Bytes read and received.

    Args:
        read: bytes that this rank read from storage, for itself and for others.
        received: bytes received from other ranks.
        hashed: bytes read whose checksums were compared.
        slowest: the rank that read longest.
    """

    read: int
    received: int
    hashed: int = 0
    slowest: Slowest | None = None


def _gather_ranges(channel: Channel, doing: str, parts: Sequence[StoredPart]) -> list[list[StoredPart]]:
    """Return the ranges of all ranks, by rank. Messages are compressed, because file names repeat."""
    packed = all_gather_checked(channel, doing, lambda: zlib.compress(msgspec.msgpack.encode(parts), 1), bytes)
    decoder = decoder_of(list[StoredPart])
    return [decoder.decode(zlib.decompress(one)) for one in packed]


def read_redistributed(
    plan: LoadPlan,
    storage: ReadContext,
    slots: Mapping[Key, Slot],
    channel: Channel,
    options: ReadOptions = DEFAULT_OPTIONS,
    limit: int = ROUND_BYTES,
    timer: PhaseTimer | None = None,
) -> Traffic:
    """Fill all slots on all ranks, and raise an error on all ranks if any rank failed or found damage.

    A rank reads visible ranges that it does not share by itself.

    Args:
        plan: this rank's plan; its report must be empty.
        storage: the files that this rank reads.
        slots: memory by role and full name.
        channel: all ranks; every rank must call.
        options: threads, staging memory, and how to read ranges that several ranks need.
        limit: bound on the bytes that a rank sends, and receives, in a round.
        timer: measures the phase ``read``.
    Raises:
        Corrupt: the same on every rank: blocks do not match their checksums. Targets are undefined.
        FlexError: the same on every rank: reads failed. Targets are undefined.
    """
    timer = timer or PhaseTimer()
    schedule = EMPTY_SCHEDULE
    if storage.is_exchanged:
        schedule = _schedule(plan, storage, channel, options, limit)
        if storage.recorded.files:
            own = partial(_own_block_reads, plan, schedule, storage, channel)
            # If this fails on one rank, no rank may enter the rounds.
            storage = structs.replace(storage, block_reads=run_on_all(channel, "assigning blocks", own))

    def fill() -> tuple[FillMessage, tuple[Traffic, FlexError | None]]:
        blocks, done, failure = storage.blocks(channel.rank), Traffic(0, 0), None
        try:
            if storage.is_exchanged:
                done = _Rounds(plan, schedule, slots, storage, options, blocks).run(channel)
            else:
                done = Traffic(execute_reads(plan, storage.root, slots, options, storage.identities, blocks), 0)
        except StorageError:
            raise
        except FlexError as error:  # Damaged blocks may explain it, and take precedence.
            failure = error
        with ReadPool(options, storage.identities) as pool:
            rest = pool.hash_rest(blocks)
        found = comparison_of(blocks)
        refusal = failure.to_wire() if failure else ""
        # Ranks with equal messages send them once.
        message = FillMessage(bool(found.faults), found.evidence, refusal, rounded(timer.end("read")))
        return message, (structs.replace(done, read=done.read + rest, hashed=found.bytes), failure)

    try:
        messages, (done, failure) = gather_and_keep(channel, f"reading {storage.root.name}", fill, FillMessage)
        raise_faults(storage.root, channel, messages, storage.recorded.next_step, failure)
    except FlexError as error:
        what = f"{error.what.rstrip('.')}. The tensors that were being filled are undefined."
        raise type(error)(what, where=error.where, evidence=error.evidence, next_step=error.next_step) from error
    return structs.replace(done, slowest=slowest_of("read", [one.seconds for one in messages]))


def _schedule(
    plan: LoadPlan, storage: ReadContext, channel: Channel, options: ReadOptions, limit: int
) -> TransferSchedule:
    """Return this rank's part in the rounds of a load, which all ranks compute from the same ranges.

    Every rank must call.

    Raises:
        StorageError: a range is in a file that is visible to no rank.
    """
    if storage.replicas is not None:
        return storage.replicas.schedule(limit)
    is_once = options.replicas == "once"
    parts = [item.stored for item in by_shard(plan)]
    requests = [part for part in parts if is_once or not storage.can_read(channel.rank, part.file)]
    moves = assign_transfers(_gather_ranges(channel, "assigning reads", requests), storage.visible_to)
    return schedule_rounds(moves, channel.rank, limit)


def _own_block_reads(
    plan: LoadPlan, schedule: TransferSchedule, storage: ReadContext, channel: Channel
) -> list[BlockReads]:
    """Return the blocks that this rank reads, for itself or for others, as an entry of a list by rank."""
    rank, arriving = channel.rank, schedule.parts(channel.rank)
    owned = (piece.stored for pieces in schedule.read_by(rank) for piece in pieces)
    reads = [*(item.stored for item in plan.items if item.stored not in arriving), *owned]
    block_reads = [BlockReads()] * channel.world_size
    block_reads[rank] = storage.recorded.reads(reads, same_bytes_key(storage.identities))
    return block_reads


def _goes_on(channel: Channel, has_failed: bool, has_more: bool) -> bool:
    """Return whether any rank has another round and no rank has failed. Every rank must call."""
    words = channel.gather("redistributing", b"failed" if has_failed else b"more" * has_more) or ()
    return b"failed" not in words and b"more" in words


def compare_copies(
    checks: Sequence[EqualCheck], storage: ReadContext, channel: Channel, options: ReadOptions = DEFAULT_OPTIONS
) -> None:
    """Compare both sides of every check, by digests if they may be on different disks.

    Args:
        checks: the checks of this rank's plan.
        storage: the files that this rank reads.
        channel: all ranks; every rank must call.
        options: threads.
    Raises:
        MismatchError: the same on every rank; names every pair that differs.
    """
    sides = [side for check in checks for side in (check.left, check.right)]
    agreed = _agreed_digests(sides, storage, channel, options) if storage.visible_to else None

    def compare() -> None:
        found = digests_of(sides, storage.root, options, storage.identities) if agreed is None else agreed
        check_equal(checks, found, storage.root)

    run_on_all(channel, "comparing tied tensors", compare)


def _agreed_digests(
    requests: Sequence[StoredPart], storage: ReadContext, channel: Channel, options: ReadOptions
) -> dict[StoredPart, bytes]:
    """Return the digests of all ranges that any rank requests; one rank reads each range."""
    everyone = chain(*_gather_ranges(channel, "asking for tied tensors", requests))
    owners = readers(everyone, storage.visible_to, channel.world_size)
    mine = [part for part, owner in owners.items() if owner == channel.rank]

    def hash_mine() -> list[bytes]:
        return list(digests_of(mine, storage.root, options, storage.identities).values())

    answers = all_gather_checked(channel, "reading tied tensors", hash_mine, list[bytes])
    left = [iter(answer) for answer in answers]
    return {part: next(left[owner]) for part, owner in owners.items()}


class _Rounds:
    """Fills this rank's shards from its own reads and from received ranges.

    Args:
        plan: this rank's plan.
        schedule: its part in the rounds.
        slots: memory by role and full name.
        storage: the files that this rank reads.
        options: threads and staging memory.
        blocks: the blocks that this rank compares.
    """

    def __init__(
        self,
        plan: LoadPlan,
        schedule: TransferSchedule,
        slots: Mapping[Key, Slot],
        storage: ReadContext,
        options: ReadOptions,
        blocks: Blocks,
    ) -> None:
        self._plan, self._schedule, self._slots = plan, schedule, slots
        self._storage, self._options, self._blocks = storage, options, blocks
        self._bytes_read = 0
        self._failures: list[Exception] = []
        self._arriving: dict[StoredPart, list[ReadItem]] = {}
        self._left: dict[Key, int] = {}
        self._own: dict[Key, list[ReadItem]] = {}
        self._buffers: dict[Key, Array] = {}

    def run(self, channel: Channel) -> Traffic:
        """Read what this rank does not share, and execute the rounds.

        Every rank must call, inside an exchange that reports errors: an error of this rank is raised after all ranks
        have left the rounds. At the end of each round ranks exchange whether they have more, because groups of replicas
        have different numbers of rounds.
        """
        arriving, received = self._schedule.parts(channel.rank), 0
        for item in self._plan.items:
            key = (item.role, item.name)
            if item.stored in arriving:
                self._arriving.setdefault(item.stored, []).append(item)
                self._left[key] = self._left.get(key, 0) + item.stored.part.volume
            else:
                self._own.setdefault(key, []).append(item)
        try:
            attempt(self._failures, self._read_alone)
            with ReadPool(self._options, self._storage.identities) as pool:
                received = self._execute(channel, pool)
        finally:
            # Also the host arrays of shards that a failed load has left incomplete.
            for key in self._buffers:
                self._slots[key].finish_copy()
        if self._failures:
            raise self._failures[0]
        return Traffic(self._bytes_read, received)

    def _execute(self, channel: Channel, pool: ReadPool) -> int:
        """Execute the rounds, and return the bytes received. The pieces of the next turn are read ahead."""
        turns, arrays = self._schedule.read_by(channel.rank), list[Array]()
        begun: list[Future[tuple[list[Array], int]]] = []
        is_going, number, received = bool(self._schedule.rounds) or self._storage.replicas is not None, 0, 0
        with ThreadPoolExecutor(1, "flex-round") as ahead:
            while is_going:
                turn, step = divmod(number, self._schedule.turn)
                if step == 0 and turn < len(turns):
                    arrays, count = begun.pop().result() if begun else self._read_turn(pool, turns[turn])
                    self._bytes_read += count
                    if turn + 1 < len(turns):
                        with suppress(RuntimeError):  # No thread can be started: the turn is read when it is due.
                            begun.append(ahead.submit(self._read_turn, pool, turns[turn + 1]))
                pieces = self._schedule.round(number)
                own = sum(piece.move.owner == channel.rank for piece in pieces)
                arrived = exchange_round(channel, pieces, arrays[:own])
                arrays = arrays[own:]
                for piece, array in arrived:
                    attempt(self._failures, partial(self._place, piece, array))
                received += sum(piece.size for piece, _ in arrived if piece.move.owner != channel.rank)
                number += 1
                is_going = _goes_on(channel, bool(self._failures), number < len(self._schedule.rounds))
        return received

    def _read_turn(self, pool: ReadPool, pieces: Sequence[TransferPiece]) -> tuple[list[Array], int]:
        """Return pieces and the bytes read from storage; after an error, zeros, because receivers expect the bytes."""
        try:
            return read_parts(pool, self._storage.root, [piece.stored for piece in pieces], self._blocks)
        except Exception as error:  # Raised after all ranks have left the rounds.
            self._failures.append(error)
            return [np.zeros(piece.box.shape, numpy_dtype(piece.move.part.dtype)) for piece in pieces], 0

    def _read_alone(self) -> None:
        """Fill the shards that receive no range."""
        self._read((item for item in self._plan.items if (item.role, item.name) not in self._left), self._slots)

    def _place(self, piece: TransferPiece, array: Array) -> None:
        """Copy a received piece to its targets, and close shards that are complete."""
        for item in self._arriving[piece.move.part]:
            key = (item.role, item.name)
            fill_piece(self._buffer(key), item, piece, array, self._storage.root / piece.move.part.file)
            self._left[key] -= array.size
            if self._left[key] == 0:
                self._slots[key].close()
                self._slots[key].finish_copy()
                del self._buffers[key]

    def _buffer(self, key: Key) -> Array:
        if key not in self._buffers:
            self._buffers[key] = self._slots[key].open().array()
            self._read(self._own.get(key, ()), {key: ArraySlot(self._buffers[key])})
        return self._buffers[key]

    def _read(self, items: Iterable[ReadItem], slots: Mapping[Key, Slot]) -> None:
        part = structs.replace(self._plan, items=tuple(items))
        storage, options = self._storage, self._options
        self._bytes_read += execute_reads(part, storage.root, slots, options, storage.identities, self._blocks)


def fill_piece(buffer: Array, item: ReadItem, piece: TransferPiece, array: Array, where: paths.AnyPath) -> None:
    """Copy a received piece to the part of an item that it fills.

    Args:
        buffer: the elements of the item's shard.
        item: an item that reads the range of the piece's transfer.
        piece: the piece.
        array: its elements.
        where: the file of the numbers, for errors.
    """
    box = piece.box.relative_to(item.stored.part.lo)
    part = tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))
    width, memory = buffer.itemsize, buffer.view(np.uint8)
    first = item.start * width
    first += sum(low * stride for low, stride in zip(item.part.lo, row_major(item.shape, width), strict=True))
    view: Array = np.ndarray(item.stored.part.shape, buffer.dtype, memory, first, item.target_strides(width))
    target = view[part or ...].squeeze()  # The index () would copy a number without axes.
    scratch = np.empty(SCRATCH_BYTES if target.ndim > 1 else 0, np.uint8)
    copy_tiled(target, array.squeeze(), scratch, where)


def exchange_round(
    channel: Channel, pieces: Sequence[TransferPiece], own: Sequence[Array]
) -> list[tuple[TransferPiece, Array]]:
    """Send this rank's pieces of one round, and return the pieces that it receives.

    Args:
        channel: all ranks; every rank must call.
        pieces: the pieces of the round, in the same order on all ranks.
        own: the elements of the pieces that this rank sends, in this order.
    """
    have = dict(
        zip((index for index, piece in enumerate(pieces) if piece.move.owner == channel.rank), own, strict=True)
    )
    leaving: dict[int, list[Array]] = {}
    coming: dict[int, list[TransferPiece]] = {}
    for index, piece in enumerate(pieces):
        if index not in have:
            coming.setdefault(piece.move.owner, []).append(piece)
            continue
        for receiver in piece.move.receivers:
            if receiver != channel.rank:
                leaving.setdefault(receiver, []).append(have[index].reshape(-1).view(np.uint8))
    outgoing = {receiver: parts[0] if len(parts) == 1 else np.concatenate(parts) for receiver, parts in leaving.items()}
    sizes = {owner: sum(piece.size for piece in theirs) for owner, theirs in coming.items()}
    arrived = channel.all_to_all(outgoing, sizes)
    found = [(pieces[index], array) for index, array in have.items() if channel.rank in pieces[index].move.receivers]
    for owner, theirs in coming.items():
        found.extend(zip(theirs, unpacked(arrived[owner], theirs), strict=True))
    return found


def unpacked(payload: Array, pieces: Sequence[TransferPiece]) -> Iterator[Array]:
    """Yield the elements of pieces that are concatenated in a payload."""
    start = 0
    for piece in pieces:
        yield payload[start : start + piece.size].view(numpy_dtype(piece.move.part.dtype)).reshape(piece.box.shape)
        start += piece.size


def attempt(failures: list[Exception], work: Callable[[], None]) -> None:
    """Run work unless an earlier error is recorded, and record its error.

    Errors are recorded because a rank must not leave the rounds before the others.
    """
    if failures:
        return
    try:
        work()
    except Exception as error:  # Raised after all ranks have left the rounds.
        failures.append(error)


class LocalPart(msgspec.Struct, frozen=True):
    """A part that this rank holds.

    Args:
        shard: its box, and the range of the box.
        values: its elements, float32 and one-dimensional.
    """

    shard: Shard
    values: Floats


class _Parts(msgspec.Struct):
    """The parts that one rank holds and needs."""

    held: list[Shard]
    needed: list[Shard]


_Holder = tuple[int, int, int]
"""A rank, and the first and end index of the elements of a box that it holds."""


def gather_parts(
    held: Mapping[str, LocalPart], needed: Mapping[str, Shard], channel: Channel
) -> Iterator[tuple[str, Floats]]:
    """Send parts of tensors in memory to the ranks that need them; every rank must iterate to the end.

    Both sides cut a tensor into the same boxes, and a rank holds or needs a range of a box. Sharding may therefore
    differ, but tensor, pipeline and expert parallelism may not. A rank uses its own elements, and receives others from
    the lowest rank that holds them.

    Args:
        held: this rank's parts by name.
        needed: the parts that this rank needs, by name. Names that no rank holds are left out.
        channel: all ranks of the job.
    Yields:
        name and elements of each needed part.
    Raises:
        MismatchError: the same on every rank: ranks hold only some elements of a needed part.
    """

    def own_parts() -> _Parts:
        return _Parts([one.shard for one in held.values()], list(needed.values()))

    everyone = all_gather_checked(channel, "describing parts of tensors", own_parts, _Parts)
    holders: dict[_Place, list[_Holder]] = {}
    for rank, parts in enumerate(everyone):
        for shard in parts.held:
            holders.setdefault(_place(shard), []).append((rank, *_range(shard)))
    moves = _transfers(everyone, holders)
    for name, shard in needed.items():
        if not shard.size and _place(shard) in holders:
            yield name, np.empty(0, np.float32)
    found: dict[str, Floats] = {}
    left: dict[str, int] = {}
    for pieces in schedule_rounds(moves, channel.rank).rounds:
        own = [_elements(held[one.move.part.file], one.box) for one in pieces if one.move.owner == channel.rank]
        for piece, values in exchange_round(channel, pieces, own):
            name, low, high = piece.move.part.file, piece.box.lo[0], piece.box.hi[0]
            shard = needed[name]
            if name not in found:
                found[name], left[name] = np.empty(shard.size, np.float32), shard.size
            first = _range(shard)[0]
            found[name][low - first : high - first] = values
            left[name] -= high - low
            if not left[name]:
                yield name, found.pop(name)


def _transfers(everyone: Sequence[_Parts], holders: Mapping[_Place, Sequence[_Holder]]) -> list[Transfer]:
    """Return the ranges that ranks hold for others, ordered by tensor; equal on all ranks.

    Raises:
        MismatchError: ranks hold only some elements of a needed part.
    """
    receivers: dict[tuple[str, Box, int, int, int], list[int]] = {}
    faults: set[str] = set()
    for rank, parts in enumerate(everyone):
        for shard in parts.needed:
            held, (low, high) = holders.get(_place(shard), ()), _range(shard)
            bounds = {bound for _, *ends in held for bound in ends if low < bound < high}
            cuts = sorted({low, high, *bounds}) if held else []
            for start, stop in zip(cuts, cuts[1:], strict=False):
                senders = [sender for sender, first, end in held if first <= start < end]
                if not senders:
                    faults.add(f"{shard.name}: {low}:{high} of {shard.box}")
                    continue
                sender = rank if rank in senders else min(senders)
                receivers.setdefault((*_place(shard), start, stop, sender), []).append(rank)
    if faults:
        raise MismatchError(
            "The ranks together do not hold all elements of a tensor.",
            evidence=sorted(faults),
            next_step="Call this on every rank of the job, with the parts that its optimizer updates.",
        )
    ordered = sorted(receivers.items(), key=lambda entry: (entry[0][0], entry[0][1].lo, entry[0][2]))
    return [
        Transfer(StoredPart(name, 0, (box.volume,), Box((start,), (stop,)), "float32"), sender, tuple(ranks))
        for (name, box, start, stop, sender), ranks in ordered
    ]


def _place(shard: Shard) -> _Place:
    return shard.name, shard.box


def _range(shard: Shard) -> tuple[int, int]:
    return (0, shard.box.volume) if shard.flat is None else shard.flat


def _elements(part: LocalPart, box: Box) -> Floats:
    first = _range(part.shard)[0]
    return part.values[box.lo[0] - first : box.hi[0] - first]
