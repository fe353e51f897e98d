"""Who reads what for whom: the ranges that a rank cannot read itself, or that several ranks want, each read once.

A plan says what one rank wants. Where every rank can read what it wants, nothing more is needed. Where files lie on
disks that only some ranks see, or where the storage is so slow that replicas should not be read once each, the ranks
tell each other what they want. Every rank works out the same **transfers** from it: a range, the rank that reads it,
and the ranks that get it. Ranges are equal or they are different; two that merely overlap are read twice.

The transfers are cut into pieces and the pieces dealt into **rounds**, so that in a round no rank sends or gets more
than a bound. All ranks go through the same rounds, which is why no rank can wait for one that does something else.

Time: linear in the wants of all ranks, and in the pieces. Memory: the wants of all ranks while transfers are made, then
the pieces that this rank reads or gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from paddleformers_fc.errors import StorageError
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.dtypes import item_size, to_safetensors

SeenBy = Mapping[str, Sequence[int]]
"""For every file that not all ranks see, the ranks that do, rising."""

ROUND_BYTES = 64 << 20
"""How much a rank sends, and how much it receives, in one round."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A range that one rank reads for others.

    Args:
        part: what is read.
        owner: the rank that reads it.
        receivers: the ranks that want it, rising; the owner is among them if it wants it too.
    """

    part: StoredPart
    owner: int
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferPiece:
    """A box of a transfer's range, which travels at once.

    Args:
        move: the transfer.
        box: the piece, in coordinates of the stored box, as the range is.
    """

    move: Transfer
    box: Box

    @property
    def stored(self) -> StoredPart:
        """The piece as a range of its own."""
        return structs.replace(self.move.part, part=self.box)

    @property
    def size(self) -> int:
        """Its bytes."""
        return size_of(self.stored)


@dataclass(frozen=True)
class TransferSchedule:
    """The part of one rank in the rounds that all ranks go through.

    Args:
        rounds: for every round the pieces that this rank reads or gets, in an order that all ranks agree on. All ranks
            have the same number of rounds.
    """

    rounds: tuple[tuple[TransferPiece, ...], ...] = ()

    def parts(self, rank: int) -> set[StoredPart]:
        """The ranges that a rank, whose schedule this is, gets in these rounds, be it from itself."""
        return {piece.move.part for pieces in self.rounds for piece in pieces if rank in piece.move.receivers}


EMPTY_SCHEDULE = TransferSchedule()
"""The schedule of ranks that all read for themselves."""


def size_of(part: StoredPart) -> int:
    """The bytes of a range, packed."""
    return part.part.volume * item_size(to_safetensors(part.dtype))


def assign_transfers(wants: Sequence[Sequence[StoredPart]], seen_by: SeenBy) -> list[Transfer]:
    """Which rank reads which range for which ranks, so that the bytes read are even.

    A range that one rank wants and can read is no transfer. Of ranks that see a range's file, those that want it come
    before those that would read it for others alone.

    Args:
        wants: by rank, the ranges it wants, in the order in which it wants them.
        seen_by: for every file that not all ranks see, the ranks that do.
    Returns:
        the transfers, in an order that follows the wishes of the ranks.
    Raises:
        StorageError: a wanted file is seen by no rank.
    """
    wanted: dict[StoredPart, list[int]] = {}
    first: dict[StoredPart, int] = {}
    for rank, parts in enumerate(wants):
        for position, part in enumerate(dict.fromkeys(parts)):
            wanted.setdefault(part, []).append(rank)
            first[part] = min(position, first.get(part, position))
    candidates = {part: _able(part.file, ranks, seen_by) for part, ranks in wanted.items()}
    shared = [part for part, ranks in wanted.items() if not (len(ranks) == 1 and ranks == list(candidates[part]))]
    owners = _owners({part: candidates[part] for part in shared}, len(wants))
    shared.sort(key=lambda part: (first[part], part.file, part.begin, part.part.lo, part.part.hi))
    return [Transfer(part, owners[part], tuple(wanted[part])) for part in shared]


def schedule_rounds(moves: Sequence[Transfer], rank: int, limit: int = ROUND_BYTES) -> TransferSchedule:
    """The rounds in which transfers are carried out, as one rank takes part in them.

    Args:
        moves: what :func:`assign_transfers` returned, the same on every rank.
        rank: whose part is asked for.
        limit: how many bytes a rank sends and receives in a round; with so many receivers that one element each is
            more, one element each.
    """
    sent, received = _Load(limit), _Load(limit)
    rounds: dict[int, list[TransferPiece]] = {}
    count = 0
    for move in moves:
        others = [receiver for receiver in move.receivers if receiver != move.owner]
        takes_part = rank == move.owner or rank in others
        width = item_size(to_safetensors(move.part.dtype))
        for box in boxes_within(move.part.part, max(1, limit // max(1, len(others)) // width)):
            size = box.volume * width
            # What an owner keeps to itself is not sent, and takes the memory all the same.
            leaving = size * max(1, len(others))
            number = max([sent.earliest(move.owner, leaving), *(received.earliest(other, size) for other in others)])
            sent.take(move.owner, number, leaving)
            for other in others:
                received.take(other, number, size)
            count = max(count, number + 1)
            if takes_part:
                rounds.setdefault(number, []).append(TransferPiece(move, box))
    return TransferSchedule(tuple(tuple(rounds.get(number, ())) for number in range(count)))


def readers(parts: Iterable[StoredPart], seen_by: SeenBy, ranks: int) -> dict[StoredPart, int]:
    """One rank that sees it for every distinct range, so that the bytes read are even.

    Args:
        parts: the ranges.
        seen_by: for every file that not all ranks see, the ranks that do.
        ranks: number of ranks.
    Raises:
        StorageError: a file is seen by no rank.
    """
    everyone = range(ranks)
    return _owners({part: _able(part.file, everyone, seen_by) for part in dict.fromkeys(parts)}, ranks)


def boxes_within(box: Box, most: int) -> Iterator[Box]:
    """A box cut into boxes of at most ``most`` elements, in row-major order."""
    if box.volume <= most:
        yield box
        return
    axis = next(index for index, length in enumerate(box.shape) if length > 1)
    rows = max(1, most // (box.volume // box.shape[axis]))
    for low in range(box.lo[axis], box.hi[axis], rows):
        lo, hi = list(box.lo), list(box.hi)
        lo[axis], hi[axis] = low, min(low + rows, box.hi[axis])
        yield from boxes_within(Box(tuple(lo), tuple(hi)), most)


def _able(file: str, wanting: Sequence[int], seen_by: SeenBy) -> Sequence[int]:
    """The ranks that may read a file for those that want it."""
    seeing = seen_by.get(file)
    if seeing is None:
        return wanting
    if not seeing:
        raise StorageError(f"{file} is wanted, and no rank sees it.", where=file)
    return [rank for rank in wanting if rank in seeing] or seeing


@dataclass
class _Load:
    """How full the rounds are, in one direction: every rank's last round, and its bytes in it."""

    limit: int

    def __post_init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}

    def earliest(self, rank: int, size: int) -> int:
        """The first round, not before the rank's last one, that has room."""
        number, used = self._last.get(rank, (0, 0))
        return number if used == 0 or used + size <= self.limit else number + 1

    def take(self, rank: int, number: int, size: int) -> None:
        """Put bytes into a round that :meth:`earliest` allows, or a later one."""
        last, used = self._last.get(rank, (0, 0))
        self._last[rank] = (number, size + (used if last == number else 0))


def _owners(candidates: Mapping[StoredPart, Sequence[int]], ranks: int) -> dict[StoredPart, int]:
    """Ranges with one candidate leave no choice; the rest, largest first, go where there is least."""
    load = [0] * ranks
    owners: dict[StoredPart, int] = {}

    def order(part: StoredPart) -> tuple[bool, int, str, int, tuple[int, ...], tuple[int, ...]]:
        return len(candidates[part]) > 1, -size_of(part), part.file, part.begin, part.part.lo, part.part.hi

    for part in sorted(candidates, key=order):
        owner = min(candidates[part], key=lambda rank: (load[rank], rank))
        load[owner] += size_of(part)
        owners[part] = owner
    return owners
