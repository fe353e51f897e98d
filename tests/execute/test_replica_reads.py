"""Replicas that read a share each: which ranks they are, what they read, and how they end together."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.execute.exchange import (
    MIN_HOSTS,
    ReadContext,
    Replicas,
    SharedReads,
    read_redistributed,
    replicas_of,
    shared_parts,
)
from paddleformers_fc.execute.load import LoadReport, load_checkpoint
from paddleformers_fc.execute.memory import slots_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.plan.transfer_plan import ROUND_BYTES, TURN_BYTES, share_rounds, size_of
from paddleformers_fc.storage.executor import ReadOptions
from tests.execute.simulated import MODEL, canonical, job, live, same_values, save, succeed
from tests.execute.test_redistribute import loaded, plan_of

ARRAYS = canonical()
HOSTS = ("one", "two", "three", "four")


def automatic(*hosts: str) -> ReadOptions:
    """The default of a run on these hosts."""
    return ReadOptions(replicas="auto", hosts=hosts)


def read(reports: list[LoadReport]) -> int:
    return sum(report.bytes_read for report in reports)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one rank."""
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)
    return tmp_path / "checkpoint-3"


def test_replicas_on_many_hosts_share_their_reads_by_themselves(saved: Path) -> None:
    each = loaded(saved, 4, 1, ReadOptions(replicas="each", hosts=HOSTS))
    shared = loaded(saved, 4, 1, automatic(*HOSTS))
    assert len(HOSTS) == MIN_HOSTS
    assert 4 * read(shared) == read(each)
    assert sum(report.bytes_received for report in shared) == 3 * read(shared)


@pytest.mark.parametrize(
    "hosts",
    [("one", "two", "three", "three"), ("one",) * 4, (), HOSTS[:3], (*HOSTS, "five")],
    ids=["three", "one", "unknown", "too few", "too many"],
)
def test_replicas_on_few_or_unknown_hosts_read_for_themselves(saved: Path, hosts: tuple[str, ...]) -> None:
    alone = read(loaded(saved, 1, 1, ReadOptions()))
    reports = loaded(saved, 4, 1, automatic(*hosts))
    assert [(report.bytes_read, report.bytes_received) for report in reports] == [(alone, 0)] * 4


def test_hosts_that_ranks_name_differently_share_nothing_and_nobody_waits(saved: Path) -> None:
    def work(channel: Any) -> int:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        options = automatic(*HOSTS) if channel.rank else automatic(*HOSTS[::-1])
        return load_checkpoint(open_on_all_ranks(saved, channel), roles, MODEL, channel, options).bytes_received

    assert succeed(4, work) == [0] * 4


def test_weights_are_shared_and_states_that_are_cut_over_the_replicas_are_not(saved: Path) -> None:
    options = ReadOptions(replicas="once")
    whole, cut = loaded(saved, 4, 1, options), loaded(saved, 4, 1, options, sharded=4)
    weights = sum(one.local_tensor.numpy().nbytes for one in live(ARRAYS, 1, 0)["model_state"].values())
    # Three quarters of the weights come from other ranks, and everything else is read by one rank alone.
    assert sum(report.bytes_received for report in cut) == 3 * weights
    assert read(whole) <= read(cut) < 1.2 * read(whole)


def test_groups_with_other_numbers_of_rounds_leave_together(saved: Path) -> None:
    def work(channel: Any) -> int:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        plan = plan_of(open_on_all_ranks(saved, channel), roles)
        parts = tuple(item.stored for item in plan.items)
        # Two ranks share everything in many rounds, two a single tensor in one, and one rank nothing.
        replicas = [Replicas((0, 1), parts), Replicas((2, 3), parts[:1]), Replicas((4,), ())][channel.rank // 2]
        before = channel.exchanges
        read_redistributed(plan, ReadContext(saved, replicas=replicas), slots_of(roles), channel, limit=1000)
        assert same_values(live(ARRAYS, 1, channel.rank), roles)
        return int(channel.exchanges) - before

    (exchanges,) = set(succeed(5, work))
    assert exchanges > 20


def test_a_rank_alone_enters_the_rounds_of_the_replicas_of_others() -> None:
    shares = [SharedReads(b"a"), SharedReads(b"b"), SharedReads(b"a")]
    found = [replicas_of(shares, rank, ReadOptions(replicas="once"), ()) for rank in range(3)]
    assert [one.ranks for one in found if one] == [(0, 2), (1,), (0, 2)]
    assert replicas_of(shares[:2], 0, ReadOptions(replicas="once"), ()) is None


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 2), (4, 2)])
def test_damage_is_found_also_where_no_rank_has_a_replica(saved: Path, ranks: int, tp: int) -> None:
    file = saved / "model_state/rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)

    def work(channel: Any) -> None:
        roles = live(ARRAYS, tp, channel.rank, empty=True)
        checkpoint = open_on_all_ranks(saved, channel, "full")
        load_checkpoint(checkpoint, roles, MODEL, channel, ReadOptions(replicas="once"))

    outcomes = job(ranks, work)
    assert all(isinstance(outcome, Corrupt) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1


def wide(count: int, rows: int) -> list[StoredPart]:
    """Matrices of 4 KiB per row."""
    return [StoredPart("file", n * rows * 4096, (rows, 1024), whole((rows, 1024)), "float32") for n in range(count)]


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [2, 5, 16, 64])
@pytest.mark.parametrize(("count", "rows"), [(40, 4096), (3, 200_000), (5000, 3)])
def test_rounds_of_replicas_are_as_many_as_their_bytes_need_whatever_the_number_of_ranks(
    ranks: int, count: int, rows: int
) -> None:
    parts, limit = wide(count, rows), ROUND_BYTES
    schedule = share_rounds(parts, range(ranks), limit)
    covered: dict[StoredPart, int] = {}
    read = [0] * ranks
    for pieces in schedule.rounds:
        sent = [0] * ranks
        for piece in pieces:
            covered[piece.move.part] = covered.get(piece.move.part, 0) + piece.size
            sent[piece.move.owner] += piece.size
        assert sum(sent) <= limit
        assert max(sent) * (ranks - 1) <= limit
        read = [one + more for one, more in zip(read, sent, strict=True)]
    assert covered == {part: size_of(part) for part in parts}
    total = sum(covered.values())
    assert len(schedule.rounds) <= 1.5 * total / limit + 2 * schedule.turn
    assert max(read) <= total / ranks + 2 * TURN_BYTES


def test_a_replica_reads_successive_pieces_together_and_sends_them_in_several_rounds() -> None:
    schedule = share_rounds(wide(8, 65536), range(16))
    turns = schedule.read_by(3)
    assert schedule.turn == 8
    assert len(turns) * schedule.turn >= len(schedule.rounds)
    for pieces in turns:
        assert 0 < sum(piece.size for piece in pieces) <= TURN_BYTES
        ends = [[piece.move.part.begin + row * 4096 for row in (piece.box.lo[0], piece.box.hi[0])] for piece in pieces]
        assert all(one[1] == other[0] for one, other in pairwise(ends))


def test_many_replicas_form_groups_whose_members_are_far_apart() -> None:
    shares = [SharedReads(b"a")] * 200
    found = [replicas_of(shares, rank, ReadOptions(replicas="once"), ()) for rank in range(200)]
    groups = {one.ranks for one in found if one}
    assert sorted(map(len, groups)) == [50] * 4
    assert sorted(chain(*groups)) == list(range(200))
    assert tuple(range(0, 200, 4)) in groups


def test_ranges_are_shared_in_the_order_of_shards_so_that_few_are_incomplete(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 1)

    def work(channel: Any) -> list[StoredPart]:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        plan = plan_of(open_on_all_ranks(tmp_path / "checkpoint-3", channel), roles)
        parts = shared_parts(plan, roles)
        shard = {item.stored: (item.role, item.name) for item in plan.items}
        order = [shard[part] for part in parts]
        assert sum(one != other for one, other in pairwise(order)) == len(set(order)) - 1
        return list(parts)

    (parts,) = succeed(1, work)
    assert len({part.file for part in parts}) > 2
