"""Who reads what for whom: every want is served once, by a rank that sees the file, within the bounds of a round."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import StorageError
from paddleformers_fc.mapping.boxes import Box, cover_faults, whole
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.plan.transfer_plan import (
    Transfer,
    VisibleTo,
    assign_transfers,
    readers,
    schedule_rounds,
    size_of,
)
from tests.harness.sampling import thorough

FILES = ("a", "b", "c")


def part(file: str, length: int, begin: int = 0, dtype: str = "float32") -> StoredPart:
    """A range of so many elements that lies in one piece."""
    return StoredPart(file, begin, (length,), whole((length,)), dtype)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[list[StoredPart]], VisibleTo]:
    """What a few ranks want and see; every file is seen by one of them at least."""
    ranks = draw(st.integers(1, 5))
    stored = [
        StoredPart(draw(st.sampled_from(FILES)), begin, shape, whole(shape), draw(st.sampled_from(["int8", "float64"])))
        for begin, shape in enumerate(draw(st.lists(st.sampled_from([(), (1,), (7,), (3, 5)]), max_size=8)))
    ]
    requests = [draw(st.lists(st.sampled_from(stored), max_size=10)) if stored else [] for _ in range(ranks)]
    visible_to = {
        file: sorted(draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
        for file in draw(st.sets(st.sampled_from(FILES)))
    }
    return requests, visible_to


def sees(rank: int, file: str, visible_to: VisibleTo) -> bool:
    return rank in visible_to.get(file, [rank])


@given(jobs())
def test_every_want_is_served_once_by_a_rank_that_sees_the_file(
    job: tuple[list[list[StoredPart]], VisibleTo],
) -> None:
    requests, visible_to = job
    moves = assign_transfers(requests, visible_to)
    assert len({move.part for move in moves}) == len(moves)
    served = Counter((receiver, move.part) for move in moves for receiver in move.receivers)
    for rank, parts in enumerate(requests):
        for one in set(parts):
            alone = sees(rank, one.file, visible_to) and not any(
                one in others for others in requests if others is not parts
            )
            assert served.pop((rank, one), 0) == (0 if alone else 1)
    assert not served
    for move in moves:
        assert sees(move.owner, move.part.file, visible_to)
        able = [rank for rank in move.receivers if sees(rank, move.part.file, visible_to)]
        assert move.owner in able or not able


@given(jobs(), st.integers(1, 64))
@thorough(200)
def test_all_ranks_go_through_the_same_rounds_within_the_bound(
    job: tuple[list[list[StoredPart]], VisibleTo], limit: int
) -> None:
    requests, visible_to = job
    moves = assign_transfers(requests, visible_to)
    schedules = [schedule_rounds(moves, rank, limit) for rank in range(len(requests))]
    assert len({len(one.rounds) for one in schedules}) == 1
    arrived: dict[tuple[int, StoredPart], list[Box]] = {}
    for number in range(len(schedules[0].rounds)):
        taken = [schedule.rounds[number] for schedule in schedules]
        assert any(taken)
        for rank, pieces in enumerate(taken):
            # A rank receives in the same round and order in which the other rank sends.
            for owner in {piece.move.owner for piece in pieces}:
                owned = [piece for piece in taken[owner] if piece.move.owner == owner]
                theirs = [piece for piece in owned if rank in (owner, *piece.move.receivers)]
                mine = [piece for piece in pieces if piece.move.owner == owner]
                assert theirs == mine
            sizes = [piece.size for piece in pieces if piece.move.owner != rank]
            assert sum(sizes) <= limit or len(sizes) == 1
            left = [
                (piece.size, len(set(piece.move.receivers) - {rank})) for piece in pieces if piece.move.owner == rank
            ]
            assert sum(size * others for size, others in left) <= limit or len(left) == 1
            for piece in pieces:
                if rank in piece.move.receivers:
                    arrived.setdefault((rank, piece.move.part), []).append(piece.box)
    assert arrived.keys() == {(rank, move.part) for move in moves for rank in move.receivers}
    for (rank, one), boxes in arrived.items():
        assert not list(cover_faults(one.part, boxes))
        assert one in schedules[rank].parts(rank)


def test_replicas_are_read_once_and_the_bytes_are_even() -> None:
    parts = [part("a", length, begin) for begin, length in enumerate((8, 4, 4, 2, 2, 2, 2))]
    moves = assign_transfers([parts, parts], {})
    loads = Counter[int]()
    for move in moves:
        assert move.receivers == (0, 1)
        loads[move.owner] += size_of(move.part)
    assert loads[0] == loads[1] == sum(map(size_of, parts)) / 2


def test_a_rank_that_wants_a_range_reads_it_before_one_that_does_not_and_alone_if_it_sees_it() -> None:
    (move,) = assign_transfers([[part("b", 3)], [part("a", 3)], [part("a", 3)]], {"a": [0, 1]})
    assert move == Transfer(part("a", 3), 1, (1, 2))
    with pytest.raises(StorageError, match="b is visible to no rank"):
        assign_transfers([[part("b", 1)], []], {"b": []})


def test_one_reader_is_found_for_every_range_even_by_bytes() -> None:
    parts = [part("a", 6, 0), part("a", 3, 1), part("a", 3, 2), part("b", 1)]
    found = readers([*parts, *parts], {"b": [1]}, 2)
    assert found[parts[3]] == 1
    assert {found[one] for one in parts[1:3]} == {1 - found[parts[0]]}
