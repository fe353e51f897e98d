"""Plan transfers of ranges that a rank cannot read, or that several ranks request: each is read once and sent.

Ranks exchange their requested ranges if some files are visible to some ranks only. Replicas have equal plans, and
exchange nothing to share their reads. All derive the same **transfers**: a range, the rank that reads it, and the ranks
that receive it. Overlapping ranges that are not equal are separate transfers.

Transfers are cut into pieces, and pieces are assigned to **rounds**, in which no rank sends or receives more than a
bound. All ranks enter every round, also those that neither send nor receive in it.

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
"""The ranks with access to a file, in rising order, for every file that is not visible to all ranks."""

ROUND_BYTES = 64 << 20
"""Maximum bytes that a rank sends, and receives, in one round."""

TURN_BYTES = 32 << 20
"""Maximum bytes that one of several replicas reads at a time, to send them in some rounds."""


class Transfer(msgspec.Struct, frozen=True):
    """A range that one rank reads for others.

    Args:
        part: the range.
        owner: the rank that reads it.
        receivers: the ranks that request it, in rising order; they can include the owner.
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
    """The part of one rank in the rounds of all ranks.

    Args:
        rounds: for every round the pieces that this rank reads or receives, in an order that is equal on all ranks
            that send or receive any of them. Ranks that exchange nothing with each other may have another number.
        turn: so many successive rounds have pieces that a rank reads together.
    """

    rounds: tuple[tuple[TransferPiece, ...], ...] = ()
    turn: int = 1

    def round(self, number: int) -> tuple[TransferPiece, ...]:
        """Return the pieces of a round; none behind the last one."""
        return self.rounds[number] if number < len(self.rounds) else ()

    def read_by(self, rank: int) -> list[list[TransferPiece]]:
        """Return the pieces that a rank reads together, turn by turn."""
        turns = [chain(*self.rounds[low : low + self.turn]) for low in range(0, len(self.rounds), self.turn)]
        return [[piece for piece in pieces if piece.move.owner == rank] for pieces in turns]

    def parts(self, rank: int) -> set[StoredPart]:
        """Return the ranges that the rank of this schedule receives, from itself as well."""
        return {piece.move.part for pieces in self.rounds for piece in pieces if rank in piece.move.receivers}


EMPTY_SCHEDULE = TransferSchedule()
"""The schedule of ranks without transfers."""


def size_of(part: StoredPart) -> int:
    """Return the number of bytes of a packed range."""
    return part.part.volume * dtype_size(part.dtype)


def assign_transfers(requests: Sequence[Sequence[StoredPart]], visible_to: VisibleTo) -> list[Transfer]:
    """Assign ranges to ranks that read them, so that all ranks read the same number of bytes.

    A range that one rank requests and can read is not a transfer. Ranks that request a range take precedence over
    others with access to its file.

    Args:
        requests: the requested ranges of every rank in order.
        visible_to: see :data:`VisibleTo`.
    Returns:
        the transfers, in the order of the requested ranges.
    Raises:
        StorageError: a requested file is visible to no rank.
    """
    wanted: dict[StoredPart, list[int]] = {}
    first: dict[StoredPart, int] = {}
    for rank, parts in enumerate(requests):
        for position, part in enumerate(dict.fromkeys(parts)):
            wanted.setdefault(part, []).append(rank)
            first[part] = min(position, first.get(part, position))
    candidates = {part: _possible_readers(part.file, ranks, visible_to) for part, ranks in wanted.items()}
    shared = [part for part, ranks in wanted.items() if not (len(ranks) == 1 and ranks == list(candidates[part]))]
    owners = _owners({part: candidates[part] for part in shared}, len(requests))
    shared.sort(key=lambda part: (first[part], part.file, part.begin, part.part.lo, part.part.hi))
    return [Transfer(part, owners[part], tuple(wanted[part])) for part in shared]


def share_rounds(parts: Sequence[StoredPart], ranks: Sequence[int], limit: int = ROUND_BYTES) -> TransferSchedule:
    """Return the rounds in which ranks that want the same ranges read a share each, and send it to the others.

    The ranges are divided in turn among the ranks. In a turn each rank reads at most :data:`TURN_BYTES` at once, so
    that few checksum blocks are read by two ranks, and sends equal parts of them in several rounds.

    Args:
        parts: the ranges, distinct and in the order in which they are wanted.
        ranks: the ranks, in rising order.
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
    """Return the part of one rank in the rounds of the transfers.

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
            # A piece for the owner alone is not sent, but needs the same memory.
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
    """Assign every distinct range to a rank with access to it, so that all ranks read the same number of bytes.

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


def _possible_readers(file: str, wanting: Sequence[int], visible_to: VisibleTo) -> Sequence[int]:
    """Return the ranks that may read a file for those that request it."""
    seeing = visible_to.get(file)
    if seeing is None:
        return wanting
    if not seeing:
        raise StorageError(
            f"{file} is requested, and is visible to no rank.",
            where=file,
            next_step="Copy the missing part of the checkpoint to a disk of the job, or use another checkpoint.",
        )
    return [rank for rank in wanting if rank in seeing] or seeing


class _Load(msgspec.Struct):
    """The load of rounds in one direction: the last round of every rank, and its bytes in it."""

    limit: int
    _last: dict[int, tuple[int, int]] = {}

    def earliest(self, rank: int, size: int) -> int:
        """Return the first round with free capacity, not before the rank's last one."""
        number, used = self._last.get(rank, (0, 0))
        return number if used == 0 or used + size <= self.limit else number + 1

    def take(self, rank: int, number: int, size: int) -> None:
        """Add bytes to the round of :meth:`earliest`, or a later one."""
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
