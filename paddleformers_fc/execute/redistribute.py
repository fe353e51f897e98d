"""Read a range on one rank for other ranks, which lack the file or need not read it as well.

Every rank sends the list of the ranges that it requests from others or shares with them. All ranks compute the same
rounds from these (:mod:`paddleformers_fc.plan.transfer_plan`). In a round every rank reads its pieces, packed and in
the stored dtype, and sends them. A receiver copies a piece to the place in its plan, and transposes and casts there.
The next round is read while this one is sent. A rank that fails completes its round and reports the failure; then all
ranks stop.

If every file is visible to every rank and each reads for itself, no range is exchanged.

Memory beyond the targets: two rounds that are read and one that is received, each of ``ROUND_BYTES``; on an accelerator
also host copies of incomplete shards. There are few of these, because pieces arrive in the order in which ranks request
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import xxhash

from paddleformers_fc.distributed.channel import Bytes, Channel, all_gather_checked, run_on_all
from paddleformers_fc.execute.collective_checksums import fill_and_compare
from paddleformers_fc.execute.phases import PhaseTimer, Slowest
from paddleformers_fc.execute.read_jobs import Key, item_view, region_of
from paddleformers_fc.execute.read_pool import DEFAULT_OPTIONS, ReadJob, ReadOptions, ReadPool
from paddleformers_fc.execute.reading import ArraySlot, Slot, execute_reads, refuse_unequal, verify_equal
from paddleformers_fc.execute.verified_reads import UNVERIFIED, BlockVerifier
from paddleformers_fc.formats.catalog import EVERYONE
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.block_owners import NO_BLOCKS, BlockReads, RecordedBlocks, byte_runs
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.transfer_plan import (
    EMPTY_SCHEDULE,
    ROUND_BYTES,
    TransferPiece,
    TransferSchedule,
    VisibleTo,
    assign_transfers,
    boxes_within,
    readers,
    schedule_rounds,
)
from paddleformers_fc.storage import paths
from paddleformers_fc.storage.block_checksums import BlockComparison
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from paddleformers_fc.storage.files import byte_view
from paddleformers_fc.storage.ranges import NO_IDENTITIES, Identities, same_bytes_key

Array = np.ndarray[Any, Any]
PlaceRange = Callable[[TransferPiece, Array], None]
_Begun = tuple[Array, Future[int]]

_DIGEST_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class ReadContext:
    """The files that this rank reads.

    Args:
        root: the directory that files are relative to.
        identities: the identities of the checked files; another file under a path is refused.
        visible_to: for every file that is not visible to all ranks, the ranks with access to it.
        recorded: the checksums of blocks, which are compared while they are read.
        block_reads: by rank, the blocks that it reads if every rank reads for itself.
    """

    root: paths.AnyPath
    identities: Identities = field(default_factory=lambda: NO_IDENTITIES)
    visible_to: VisibleTo = field(default_factory=lambda: EVERYONE)
    recorded: RecordedBlocks = NO_BLOCKS
    block_reads: Sequence[BlockReads] = ()

    def can_read(self, rank: int, file: str) -> bool:
        """Return whether a file is visible to a rank."""
        return file not in self.visible_to or rank in self.visible_to[file]


@dataclass(frozen=True)
class Traffic:
    """Bytes read and received.

    Args:
        read: from storage, by this rank, for itself and for others.
        received: from other ranks.
        hashed: of the bytes read, those whose checksums were compared.
        slowest: the rank that read longest.
    """

    read: int
    received: int
    hashed: int = 0
    slowest: Slowest | None = None


class _RangeMessage(msgspec.Struct, array_like=True, frozen=True):
    """A range of a file, as it is sent to the other ranks."""

    begin: int
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    dtype: str


_RangeMessages = dict[str, list[tuple[int, _RangeMessage]]]
"""Ranges and their positions in the order of a rank, by file: a path is sent once."""


def agreed_schedule(
    requests: Sequence[StoredPart], storage: ReadContext, channel: Channel, limit: int
) -> TransferSchedule:
    """Return this rank's part of the rounds that all ranks compute from the wanted ranges.

    Args:
        requests: the ranges that this rank requests from others or shares with them, in its order.
        storage: the visible files of each rank.
        channel: all ranks; every rank must call.
        limit: bound on the bytes that a rank sends, and receives, in a round.
    Raises:
        StorageError: a range is in a file that is visible to no rank.
    """
    everyone = all_gather_checked(channel, "assigning reads", lambda: _to_messages(requests), _RangeMessages)
    moves = assign_transfers([_from_messages(messages) for messages in everyone], storage.visible_to)
    return schedule_rounds(moves, channel.rank, limit)


def read_redistributed(
    plan: LoadPlan,
    storage: ReadContext,
    slots: Mapping[Key, Slot],
    channel: Channel,
    options: ReadOptions = DEFAULT_OPTIONS,
    limit: int = ROUND_BYTES,
    timer: PhaseTimer | None = None,
) -> Traffic:
    """Fill every slot of every rank; each rank reads for itself the visible ranges that it does not share.

    Args:
        plan: this rank's plan; its report must be empty.
        storage: the files that it reads.
        slots: memory by role and full name.
        channel: all ranks; every rank must call.
        options: threads, staging memory, and whether a range for several ranks is read once.
        limit: bound on the bytes that a rank sends, and receives, in a round.
        timer: gets the end of the phase ``read``.
    Raises:
        Corrupt: the same on every rank: blocks do not match their checksums; targets hold an undefined mixture.
        FlexError: the same on every rank: reads failed; targets hold an undefined mixture.
    """
    timer = timer or PhaseTimer()
    schedule, block_reads = EMPTY_SCHEDULE, storage.block_reads
    if storage.visible_to or options.once:
        parts = [item.stored for item in _by_shard(plan)]
        requests = [part for part in parts if options.once or not storage.can_read(channel.rank, part.file)]
        schedule = agreed_schedule(requests, storage, channel, limit)
        block_reads = _agreed_block_reads(parts, schedule, storage, channel) if storage.recorded.files else ()
    numbers = storage.recorded.owned(block_reads, channel.rank) if block_reads else {}
    verifier = BlockVerifier(storage.root, storage.recorded, numbers)
    filling = _ShardFiller(plan, schedule.parts(channel.rank), slots, storage, options, verifier)

    def read() -> Traffic:
        try:
            return run_rounds(schedule, storage, channel, filling.place, options, filling.read_alone, verifier)
        finally:
            filling.release()

    def compare() -> BlockComparison:
        filling.alone += verifier.finish(options, storage.identities)
        return verifier.comparison()

    next_step = storage.recorded.next_step
    done, hashed, slowest = fill_and_compare(storage.root, channel, read, compare, timer, next_step)
    return replace(done, read=done.read + filling.alone, hashed=hashed, slowest=slowest)


def _agreed_block_reads(
    parts: Sequence[StoredPart], schedule: TransferSchedule, storage: ReadContext, channel: Channel
) -> list[BlockReads]:
    """Return the blocks that each rank reads, for itself or for others."""

    def own() -> BlockReads:
        arriving = schedule.parts(channel.rank)
        owned = {piece.move.part for pieces in schedule.rounds for piece in pieces if piece.move.owner == channel.rank}
        reads = [*(part for part in parts if part not in arriving), *owned]
        return storage.recorded.reads(reads, same_bytes_key(storage.identities))

    return all_gather_checked(channel, "assigning blocks", own, BlockReads)


def run_rounds(
    schedule: TransferSchedule,
    storage: ReadContext,
    channel: Channel,
    place: PlaceRange,
    options: ReadOptions = DEFAULT_OPTIONS,
    before: Callable[[], None] = lambda: None,
    verifier: BlockVerifier = UNVERIFIED,
) -> Traffic:
    """Execute the rounds of a schedule.

    Every rank must call, inside an agreement helper: an error of this rank is raised after all ranks have left the
    rounds.

    Args:
        schedule: this rank's part.
        storage: the files that it reads.
        channel: all ranks.
        place: called with every piece that this rank requested, in its stored shape and dtype.
        options: threads and staging memory.
        before: work of this rank alone that precedes the rounds; it may fail.
        verifier: compares blocks that this rank reads.
    Returns:
        the bytes that this rank read and received in the rounds.
    """
    failures: list[Exception] = []
    _attempt(failures, before)
    read = received = 0
    with ReadPool(options, storage.identities) as pool:
        source = _RangeSource(pool, storage.root, channel.rank, verifier)
        mine = (piece for pieces in schedule.rounds for piece in pieces if piece.move.owner == channel.rank)
        pool.expect((region_of(storage.root, piece.stored) for piece in mine), verifier.expected)
        begun = [source.begin(pieces) for pieces in schedule.rounds[:1]]
        for number, pieces in enumerate(schedule.rounds):
            begun.extend(source.begin(later) for later in schedule.rounds[number + 1 : number + 2])
            results = {index: _result(failures, one, pieces[index]) for index, one in begun.pop(0).items()}
            arrived = _round(channel, pieces, {index: array for index, (array, _) in results.items()})
            for piece, array in arrived:
                _attempt(failures, partial(place, piece, array))
            read += sum(count for _, count in results.values())
            received += sum(piece.size for piece, _ in arrived if piece.move.owner != channel.rank)
            if any(channel.gather("redistributing", b"failed" if failures else b"") or ()):
                break
    if failures:
        raise failures[0]
    return Traffic(read, received)


def compare_redistributed(
    checks: Sequence[EqualCheck], storage: ReadContext, channel: Channel, options: ReadOptions = DEFAULT_OPTIONS
) -> None:
    """Compare both sides of every check; if they may be on different disks, compare digests.

    Args:
        checks: the checks of this rank's plan.
        storage: the files that this rank reads.
        channel: all ranks; every rank must call.
        options: whether a range for several ranks is read once.
    Raises:
        MismatchError: the same on every rank, naming every pair that differs.
    """
    digests: dict[StoredPart, bytes] = {}
    if storage.visible_to or options.once:
        digests = _agreed_digests(
            [side for check in checks for side in (check.left, check.right)], storage, channel, options
        )

    def compare() -> None:
        if digests:
            refuse_unequal([check for check in checks if digests[check.left] != digests[check.right]], storage.root)
        else:
            verify_equal(tuple(checks), storage.root, options, storage.identities)

    run_on_all(channel, "comparing tied tensors", compare)


def _agreed_digests(
    wanted: Sequence[StoredPart], storage: ReadContext, channel: Channel, options: ReadOptions
) -> dict[StoredPart, bytes]:
    """Return the digests of all ranges that any rank requests; each is read by one rank."""
    requests = all_gather_checked(channel, "asking for tied tensors", lambda: _to_messages(wanted), _RangeMessages)
    parts = (part for messages in requests for part in _from_messages(messages))
    owners = readers(parts, storage.visible_to, channel.world_size)
    mine = [part for part, owner in owners.items() if owner == channel.rank]
    answers = all_gather_checked(channel, "reading tied tensors", lambda: _digests(mine, storage, options), list[bytes])
    left = [iter(answer) for answer in answers]
    return {part: next(left[owner]) for part, owner in owners.items()}


def _digests(parts: Sequence[StoredPart], storage: ReadContext, options: ReadOptions) -> list[bytes]:
    found: list[bytes] = []
    with ReadPool(options, storage.identities) as pool:
        pool.expect(region_of(storage.root, part) for part in parts)
        for part in parts:
            hasher = xxhash.xxh3_128()
            for box in boxes_within(part.part, _DIGEST_ELEMENTS):
                array, reading = _begin(pool, storage.root, msgspec.structs.replace(part, part=box))
                reading.result()
                hasher.update(byte_view(array))
            found.append(hasher.digest())
    return found


@dataclass(frozen=True)
class _RangeSource:
    """Reads this rank's pieces in threads."""

    pool: ReadPool
    root: paths.AnyPath
    rank: int
    verifier: BlockVerifier

    def begin(self, pieces: Sequence[TransferPiece]) -> dict[int, _Begun]:
        """Start to read the pieces of a round that this rank owns, and their blocks; return the reads by index."""
        own = {index: piece.stored for index, piece in enumerate(pieces) if piece.move.owner == self.rank}
        return {index: _begin(self.pool, self.root, part, self._blocks(part)) for index, part in own.items()}

    def _blocks(self, part: StoredPart) -> Sequence[ReadJob]:
        path = self.root / part.file
        spans = byte_runs(part, sys.maxsize)
        return [block for first, last in spans for block in self.verifier.blocks_in(path, first, last + 1)]


class _ShardFiller:
    """Fills this rank's shards from its own reads and from received ranges.

    Args:
        plan: this rank's plan.
        arriving: the received ranges.
        slots: memory by role and full name.
        storage: the files that it reads.
        options: threads and staging memory.
        verifier: compares blocks that this rank reads alone.
    """

    def __init__(
        self,
        plan: LoadPlan,
        arriving: Collection[StoredPart],
        slots: Mapping[Key, Slot],
        storage: ReadContext,
        options: ReadOptions,
        verifier: BlockVerifier,
    ) -> None:
        self.alone, self._verifier = 0, verifier
        self._plan, self._slots, self._storage, self._options = plan, slots, storage, options
        self._arriving: dict[StoredPart, list[ReadItem]] = {}
        self._left: dict[Key, int] = {}
        self._own: dict[Key, list[ReadItem]] = {}
        self._buffers: dict[Key, Array] = {}
        for item in plan.items if arriving else ():
            key = (item.role, item.name)
            if item.stored in arriving:
                self._arriving.setdefault(item.stored, []).append(item)
                self._left[key] = self._left.get(key, 0) + item.stored.part.volume
            else:
                self._own.setdefault(key, []).append(item)

    def read_alone(self) -> None:
        """Fill the shards of which no range is received."""
        items = self._plan.items
        if self._left:
            items = tuple(item for item in items if (item.role, item.name) not in self._left)
        self._read(items, self._slots)

    def place(self, piece: TransferPiece, array: Array) -> None:
        """Copy a received piece to its place in the plan, and pass a complete shard on."""
        for item in self._arriving[piece.move.part]:
            key = (item.role, item.name)
            box = piece.box.relative_to(item.stored.part.lo)
            target = item_view(self._buffer(key), item)
            target = target[tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))]
            np.copyto(target, array, casting="unsafe")
            self._left[key] -= array.size
            if self._left[key] == 0:
                self._slots[key].close()
                self._slots[key].finish_copy()
                del self._buffers[key]

    def release(self) -> None:
        """Give the host arrays of incomplete shards back, which a load that fails leaves."""
        for key in self._buffers:
            self._slots[key].finish_copy()
        self._buffers.clear()

    def _buffer(self, key: Key) -> Array:
        if key not in self._buffers:
            self._buffers[key] = self._slots[key].open().array()
            self._read(tuple(self._own.get(key, ())), {key: ArraySlot(self._buffers[key])})
        return self._buffers[key]

    def _read(self, items: tuple[ReadItem, ...], slots: Mapping[Key, Slot]) -> None:
        part = replace(self._plan, items=items)
        storage, options = self._storage, self._options
        self.alone += execute_reads(part, storage.root, slots, options, storage.identities, self._verifier)


def _by_shard(plan: LoadPlan) -> list[ReadItem]:
    """Return the items ordered by shard, so that shards are completed one after the other."""
    shards: dict[Key, list[ReadItem]] = {}
    for item in plan.items:
        shards.setdefault((item.role, item.name), []).append(item)
    return [item for items in shards.values() for item in items]


def _round(
    channel: Channel, pieces: Sequence[TransferPiece], arrays: Mapping[int, Array]
) -> list[tuple[TransferPiece, Array]]:
    """Send the pieces that this rank has read; return the pieces that it requested, from all ranks."""
    leaving: dict[int, list[Bytes]] = {}
    for index, array in arrays.items():
        for receiver in pieces[index].move.receivers:
            if receiver != channel.rank:
                leaving.setdefault(receiver, []).append(_packed(array))
    coming: dict[int, list[TransferPiece]] = {}
    for index, piece in enumerate(pieces):
        if index not in arrays:
            coming.setdefault(piece.move.owner, []).append(piece)
    outgoing = {receiver: np.concatenate(parts) for receiver, parts in leaving.items()}
    sizes = {owner: sum(piece.size for piece in theirs) for owner, theirs in coming.items()}
    arrived = channel.all_to_all(outgoing, sizes)
    found = [(pieces[index], array) for index, array in arrays.items() if channel.rank in pieces[index].move.receivers]
    for owner, theirs in coming.items():
        found.extend(zip(theirs, _unpacked(arrived[owner], theirs), strict=True))
    return found


def _begin(pool: ReadPool, root: paths.AnyPath, part: StoredPart, before: Sequence[ReadJob] = ()) -> _Begun:
    """Start to read a range into an array of its own."""
    region = region_of(root, part)
    array: Array = np.empty(region.size, region.dtype)
    return array, pool.begin(region, array, before)


def _packed(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _unpacked(payload: Bytes, pieces: Sequence[TransferPiece]) -> Iterator[Array]:
    start = 0
    for piece in pieces:
        yield payload[start : start + piece.size].view(_dtype(piece)).reshape(piece.box.shape)
        start += piece.size


def _dtype(piece: TransferPiece) -> np.dtype[Any]:
    return to_numpy(to_safetensors(piece.move.part.dtype))


def _result(failures: list[Exception], one: _Begun, piece: TransferPiece) -> tuple[Array, int]:
    """Return a piece that was read, or zeros in its place: the receivers expect that many bytes."""
    try:
        return one[0], one[1].result()
    except Exception as error:  # Raised when all ranks have left the rounds.
        failures.append(error)
        return np.zeros(piece.box.shape, _dtype(piece)), 0


def _attempt(failures: list[Exception], work: Callable[[], None]) -> None:
    """Run work and collect its error; skip it after an error. A rank must not leave the rounds before the others."""
    if failures:
        return
    try:
        work()
    except Exception as error:  # As above.
        failures.append(error)


def _to_messages(parts: Iterable[StoredPart]) -> _RangeMessages:
    by_file: _RangeMessages = {}
    for position, one in enumerate(parts):
        part = _RangeMessage(one.begin, one.shape, one.part.lo, one.part.hi, one.dtype)
        by_file.setdefault(one.file, []).append((position, part))
    return by_file


def _from_messages(by_file: _RangeMessages) -> list[StoredPart]:
    found: list[tuple[int, StoredPart]] = []
    for file, parts in by_file.items():
        for position, one in parts:
            found.append((position, StoredPart(file, one.begin, one.shape, Box(one.lo, one.hi), one.dtype)))
    return [part for _, part in sorted(found, key=itemgetter(0))]
