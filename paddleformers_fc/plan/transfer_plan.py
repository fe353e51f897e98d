"""Plan transfers of ranges that a rank cannot read, or that several ranks request: one rank reads and sends them.

If some files are visible only to some ranks, the ranks exchange the ranges that they request. Replicas have equal
plans, so they need not exchange anything. All ranks derive the same **transfers**: a range, the rank that reads it, and
the ranks that receive it. Ranges that overlap without being equal are separate transfers. Transfers are cut into
pieces, and the pieces are assigned to **rounds** with a bound on the bytes that a rank sends and receives. All ranks
take part in every round, even if they neither send nor receive.

Time: linear in the requested ranges of all ranks, and in the pieces. Memory: the requested ranges of all ranks during
planning, then the pieces that this rank reads or receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec
from msgspec import structs

from paddleformers_fc.errors import StorageError
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.dtypes import dtype_size

VisibleTo = Mapping[str, Sequence[int]]
"""For every file that is not visible to all ranks, the ranks with access to it, in ascending order."""

ROUND_BYTES = 64 << 20
"""Maximum bytes that a rank sends, and receives, in one round."""

TURN_BYTES = 32 << 20
"""Maximum bytes that one of several replicas reads at a time and sends in several rounds."""


class Transfer(msgspec.Struct, frozen=True):
    """A range that one rank reads for others.

    Args:
        part: the range.
        owner: the rank that reads it.
        receivers: the ranks that request it, in ascending order; may include the owner.
    """

    part: StoredPart
    owner: int
    receivers: tuple[int, ...]


class TransferPiece(msgspec.Struct, frozen=True):
    """A box of a transfer's range that is sent as one message.

    Args:
        move: the transfer.
        box: the piece, in coordinates of the stored box.
    """

    move: Transfer
    box: Box

    @property
    def stored(self) -> StoredPart:
        """The piece as a range."""
        return structs.replace(self.move.part, part=self.box)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return size_of(self.stored)


class TransferSchedule(msgspec.Struct, frozen=True):
    """One rank's part in the rounds.

    Args:
        rounds: for every round the pieces that this rank reads or receives, in the same order on all ranks that send
            or receive any of them. Ranks that exchange nothing with each other may have different numbers of rounds.
        turn: number of successive rounds whose pieces a rank reads together.
    """

    rounds: tuple[tuple[TransferPiece, ...], ...] = ()
    turn: int = 1

    def round(self, number: int) -> tuple[TransferPiece, ...]:
        """Return the pieces of a round; none after the last round."""
        return self.rounds[number] if number < len(self.rounds) else ()

    def read_by(self, rank: int) -> list[list[TransferPiece]]:
        """Return the pieces that a rank reads together, turn by turn."""
        turns = [chain(*self.rounds[low : low + self.turn]) for low in range(0, len(self.rounds), self.turn)]
        return [[piece for piece in pieces if piece.move.owner == rank] for pieces in turns]

    def parts(self, rank: int) -> set[StoredPart]:
        """Return the ranges that the rank of this schedule receives, including from itself."""
        return {piece.move.part for pieces in self.rounds for piece in pieces if rank in piece.move.receivers}


EMPTY_SCHEDULE = TransferSchedule()
"""The schedule of ranks without transfers."""


def size_of(part: StoredPart) -> int:
    """Return the number of bytes of a packed range."""
    return part.part.volume * dtype_size(part.dtype)


def assign_transfers(requests: Sequence[Sequence[StoredPart]], visible_to: VisibleTo) -> list[Transfer]:
    """Assign ranges to the ranks that read them, so that all ranks read about the same number of bytes.

    A range that only one rank requests, and that it can read, is not a transfer. Ranks that request a range take
    precedence over other ranks with access to its file.

    Args:
        requests: the requested ranges of every rank, in order.
        visible_to: see :data:`VisibleTo`.
    Returns:
        the transfers, in the order of the requested ranges.
    Raises:
        StorageError: a requested file is visible to no rank.
    """
    requesters: dict[StoredPart, list[int]] = {}
    first: dict[StoredPart, int] = {}
    for rank, parts in enumerate(requests):
        for position, part in enumerate(dict.fromkeys(parts)):
            requesters.setdefault(part, []).append(rank)
            first[part] = min(position, first.get(part, position))
    candidates = {part: _possible_readers(part.file, ranks, visible_to) for part, ranks in requesters.items()}
    shared = [part for part, ranks in requesters.items() if not (len(ranks) == 1 and ranks == list(candidates[part]))]
    owners = _owners({part: candidates[part] for part in shared}, len(requests))
    shared.sort(key=lambda part: (first[part], part.file, part.begin, part.part.lo, part.part.hi))
    return [Transfer(part, owners[part], tuple(requesters[part])) for part in shared]


def share_rounds(parts: Sequence[StoredPart], ranks: Sequence[int], limit: int = ROUND_BYTES) -> TransferSchedule:
    """Return the rounds in which ranks that request the same ranges each read a share and send it to the others.

    The ranks take turns. In its turn a rank reads at most :data:`TURN_BYTES` at once, so that few checksum blocks are
    read by two ranks, and sends them in equal parts in several rounds.

    Args:
        parts: the distinct ranges, in the order in which they are needed.
        ranks: the ranks, in ascending order.
        limit: maximum bytes that a rank sends and receives in a round; at least one element per receiver is sent.
    """
    receivers = tuple(ranks)
    share = max(1, min(TURN_BYTES, -(-sum(map(size_of, parts)) // len(receivers))))
    most = max(1, min(limit // len(receivers), share))
    turn = max(1, share // most)
    rounds: list[list[TransferPiece]] = []
    number = used = 0
    for part in parts:
        width = dtype_size(part.dtype)
        moves = [Transfer(part, rank, receivers) for rank in receivers]
        for box in boxes_within(part.part, max(1, most // width)):
            size = box.volume * width
            if used and used + size > most:
                number, used = number + 1, 0
            used += size
            cycle, place = divmod(number, turn * len(receivers))
            owner, step = divmod(place, turn)
            while len(rounds) <= cycle * turn + step:
                rounds.append([])
            rounds[cycle * turn + step].append(TransferPiece(moves[owner], box))
    return TransferSchedule(tuple(map(tuple, rounds)), turn)


def schedule_rounds(moves: Sequence[Transfer], rank: int, limit: int = ROUND_BYTES) -> TransferSchedule:
    """Return one rank's part in the rounds of the transfers.

    Args:
        moves: the transfers of :func:`assign_transfers`, equal on all ranks.
        rank: the rank.
        limit: maximum bytes that a rank sends and receives in a round; at least one element per receiver is sent.
    """
    sent, received = _Load(limit), _Load(limit)
    rounds: dict[int, list[TransferPiece]] = {}
    count = 0
    for move in moves:
        others = [receiver for receiver in move.receivers if receiver != move.owner]
        takes_part = rank == move.owner or rank in others
        width = dtype_size(move.part.dtype)
        for box in boxes_within(move.part.part, max(1, limit // max(1, len(others)) // width)):
            size = box.volume * width
            # A piece that only the owner requests is not sent, but needs the same memory.
            leaving = size * max(1, len(others))
            number = max([sent.earliest(move.owner, leaving), *(received.earliest(other, size) for other in others)])
            sent.take(move.owner, number, leaving)
            for other in others:
                received.take(other, number, size)
            count = max(count, number + 1)
            if takes_part:
                rounds.setdefault(number, []).append(TransferPiece(move, box))
    return TransferSchedule(tuple(tuple(rounds.get(number, ())) for number in range(count)))


def readers(parts: Iterable[StoredPart], visible_to: VisibleTo, ranks: int) -> dict[StoredPart, int]:
    """Assign every distinct range to a rank with access to it, so that all ranks read about the same number of bytes.

    Args:
        parts: the ranges.
        visible_to: see :data:`VisibleTo`.
        ranks: number of ranks.
    Raises:
        StorageError: a file is visible to no rank.
    """
    everyone = range(ranks)
    return _owners({part: _possible_readers(part.file, everyone, visible_to) for part in dict.fromkeys(parts)}, ranks)


def boxes_within(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``most`` elements, in row-major order."""
    if box.volume <= most:
        yield box
        return
    axis = next(index for index, length in enumerate(box.shape) if length > 1)
    rows = max(1, most // (box.volume // box.shape[axis]))
    for low in range(box.lo[axis], box.hi[axis], rows):
        lo, hi = list(box.lo), list(box.hi)
        lo[axis], hi[axis] = low, min(low + rows, box.hi[axis])
        yield from boxes_within(Box(tuple(lo), tuple(hi)), most)


def _possible_readers(file: str, requesters: Sequence[int], visible_to: VisibleTo) -> Sequence[int]:
    """Return the ranks that may read a file for the ranks that request it."""
    visible = visible_to.get(file)
    if visible is None:
        return requesters
    if not visible:
        raise StorageError(
            f"{file} is visible to no rank.",
            where=file,
            next_step="Copy the missing part of the checkpoint to a disk of the job, or use another checkpoint.",
        )
    return [rank for rank in requesters if rank in visible] or visible


class _Load(msgspec.Struct):
    """The load of rounds in one direction: for every rank its last round, and its bytes in that round."""

    limit: int
    _last: dict[int, tuple[int, int]] = {}

    def earliest(self, rank: int, size: int) -> int:
        """Return the first round with free capacity, starting at the rank's last round."""
        number, used = self._last.get(rank, (0, 0))
        return number if used == 0 or used + size <= self.limit else number + 1

    def take(self, rank: int, number: int, size: int) -> None:
        """Add bytes to the round of :meth:`earliest`, or to a later round."""
        last, used = self._last.get(rank, (0, 0))
        self._last[rank] = (number, size + (used if last == number else 0))


def _owners(candidates: Mapping[StoredPart, Sequence[int]], ranks: int) -> dict[StoredPart, int]:
    """Assign ranges with one candidate first, then the others, largest first, to the rank with the fewest bytes."""
    load = [0] * ranks
    owners: dict[StoredPart, int] = {}

    def order(part: StoredPart) -> tuple[bool, int, str, int, tuple[int, ...], tuple[int, ...]]:
        return len(candidates[part]) > 1, -size_of(part), part.file, part.begin, part.part.lo, part.part.hi

    for part in sorted(candidates, key=order):
        owner = min(candidates[part], key=lambda rank: (load[rank], rank))
        load[owner] += size_of(part)
        owners[part] = owner
    return owners
