"""Reading together, between threads: what several ranks want is read once, and what arrives is what is stored."""

from __future__ import annotations

import os
import shutil
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import Corrupt, MismatchError
from paddleformers_fc.execute import exchange
from paddleformers_fc.execute.exchange import (
    MIN_HOSTS,
    LocalPart,
    ReadContext,
    Replicas,
    SharedReads,
    gather_parts,
    read_redistributed,
    replicas_of,
    shared_parts,
)
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import LoadReport
from paddleformers_fc.execute.memory import slots_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan import transfer_plan
from paddleformers_fc.plan.build import plan_reads
from paddleformers_fc.plan.items import LoadPlan, StoredPart
from paddleformers_fc.plan.sources import resume_source
from paddleformers_fc.plan.transfer_plan import ROUND_BYTES, TURN_BYTES, schedule_rounds, share_rounds, size_of
from paddleformers_fc.storage.executor import ReadOptions
from tests.execute.simulated import (
    ARRAYS,
    MODEL,
    Roles,
    attempt,
    flex,
    job,
    live,
    load,
    open_weights,
    same_values,
    save,
    succeed,
)
from tests.execute.test_reading import HostSlot

ONCE = ReadOptions(replicas="once")


@pytest.mark.parametrize(("stored", "tp"), [((1, 1), 1), ((2, 1), 2), ((2, 2), 1), ((1, 3), 2)])
def test_replicas_read_as_many_bytes_together_as_one_of_them_alone(
    tmp_path: Path, stored: tuple[int, int], tp: int
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, *stored)
    alone = sum(report.bytes_read for report in load(tmp_path / "checkpoint-3", tp))
    each = load(tmp_path / "checkpoint-3", tp, ranks=3 * tp)
    once = load(tmp_path / "checkpoint-3", tp, ranks=3 * tp, options=ONCE)
    assert sum(report.bytes_read for report in each) == 3 * alone
    assert [report.bytes_received for report in each] == [0] * 3 * tp
    assert sum(report.bytes_read for report in once) <= alone
    assert sum(report.bytes_received for report in once) >= sum(report.bytes_read for report in once)
    # Each of the replicas reads a share of it.
    assert max(report.bytes_read for report in once) < 0.6 * alone


def test_open_weights_are_read_once_and_cast_by_the_ranks_that_want_them(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3")
    export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "hf", 4000)

    def bytes_read(options: ReadOptions) -> int:
        def work(channel: Any) -> int:
            roles = {"model_state": live(ARRAYS, 1, channel.rank, empty=True)["model_state"]}
            for weight in roles["model_state"].values():
                weight.local_tensor = weight.local_tensor.astype("float64")
            report = open_weights("size", options)(tmp_path / "hf", roles, channel)
            for name, weight in live(ARRAYS, 1, channel.rank)["model_state"].items():
                assert (roles["model_state"][name].local_tensor == weight.local_tensor.astype("float64")).all()
            return report.bytes_read

        return sum(succeed(2, work))

    assert 2 * bytes_read(ONCE) == bytes_read(ReadOptions())


def plan_of(checkpoint: OpenedCheckpoint, roles: Roles) -> LoadPlan:
    """The plan of a rank that loads everything it holds."""
    shards = describe_roles(roles)
    source, _ = resume_source(checkpoint, model_rules(MODEL, shards["model_state"]))
    return plan_reads(source, shards)


def shared(directory: Path, plan: LoadPlan, ranks: int) -> ReadContext:
    """The files of a rank whose plan is that of all ranks, and which reads a share if there are several."""
    parts = tuple(item.stored for item in plan.items)
    return ReadContext(directory, replicas=Replicas(tuple(range(ranks)), parts) if ranks > 1 else None)


def open_and_truncate(directory: Path, channel: Any) -> OpenedCheckpoint:
    """Open a checkpoint of which a file is then shorter than it was."""
    checkpoint = open_on_all_ranks(directory, channel)
    victim = directory / "model_state/rank-00000.safetensors"
    channel.gather("a test", b"")
    if channel.rank == 0:
        os.truncate(victim, victim.stat().st_size - 8)
    channel.gather("a test", b"")
    return checkpoint


def test_a_rank_that_fails_in_the_midst_stops_all_after_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_plan, "TURN_BYTES", 2000)
    save(tmp_path / "checkpoint-3")
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "half/checkpoint-3")
    victim = tmp_path / "half/checkpoint-3/optimizer_state/rank-00000.safetensors"
    os.truncate(victim, victim.stat().st_size // 2)
    exchanges: dict[int, int] = {}

    def read(channel: Any, place: Path) -> None:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        plan = plan_of(open_on_all_ranks(tmp_path / "checkpoint-3", channel), roles)
        before = channel.exchanges
        try:
            read_redistributed(plan, shared(place / "checkpoint-3", plan, 3), slots_of(roles), channel, ONCE, 1000)
        finally:
            exchanges[channel.rank] = channel.exchanges - before

    succeed(3, lambda channel: read(channel, tmp_path))
    (whole,) = set(exchanges.values())
    # On the storage of one rank a file is shorter than it was when it was planned.
    outcomes = job(3, lambda channel: read(channel, tmp_path / "half" if channel.rank == 2 else tmp_path))
    (stopped,) = set(exchanges.values())
    assert "rank 2" in str(outcomes.error(Corrupt))
    assert 10 < stopped < whole - 10


def late_slots(roles: Roles) -> dict[tuple[str, str], HostSlot]:
    arrays = {(r, n): one.local_tensor.numpy().ravel() for r, names in roles.items() for n, one in names.items()}
    return {key: HostSlot(array.copy()) for key, array in arrays.items()}


@pytest.mark.parametrize("together", [3, 1], ids=["once", "each"])
def test_received_pieces_are_handed_over_and_awaited(tmp_path: Path, together: int) -> None:
    directory = tmp_path / "checkpoint-3"
    save(directory, ARRAYS, 2, 2)

    def work(channel: Any) -> None:
        roles, expected = live(ARRAYS, 1, channel.rank, empty=True), live(ARRAYS, 1, channel.rank)
        plan, slots = plan_of(open_on_all_ranks(directory, channel), roles), late_slots(roles)
        read_redistributed(plan, shared(directory, plan, together), slots, channel, ReadOptions(), 1000)
        for (role, name), slot in slots.items():
            assert slot.log == ["open", "close", "finish_copy"], name
            assert slot.target.tobytes() == expected[role][name].local_tensor.numpy().tobytes(), name

    succeed(3, work)


def test_host_arrays_of_shards_that_a_failed_load_left_incomplete_are_given_back(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-3"
    save(directory)
    opened: list[HostSlot] = []

    def work(channel: Any) -> None:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        plan, slots = plan_of(open_and_truncate(directory, channel), roles), late_slots(roles)
        opened.extend(slots.values())
        read_redistributed(plan, shared(directory, plan, 2), slots, channel, ONCE, 100)

    job(2, work).error(Corrupt)
    assert any(slot.log for slot in opened)
    assert all(slot.staged is None for slot in opened)


# ---- Replicas that read a share each: which ranks they are, what they read, and how they end together.


HOSTS = ("one", "two", "three", "four")


def automatic(*hosts: str) -> ReadOptions:
    """The default of a run on these hosts."""
    return ReadOptions(replicas="auto", hosts=hosts)


def read(reports: list[LoadReport]) -> int:
    return sum(report.bytes_read for report in reports)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one rank."""
    save(tmp_path / "checkpoint-3")
    return tmp_path / "checkpoint-3"


@pytest.mark.parametrize(
    ("options", "is_shared"),
    [
        pytest.param(automatic(*HOSTS), True, id="on many hosts"),
        pytest.param(ReadOptions(replicas="each", hosts=HOSTS), False, id="each"),
        pytest.param(automatic("one", "two", "three", "three"), False, id="three hosts"),
        pytest.param(automatic("one", "one", "one", "one"), False, id="one host"),
        pytest.param(automatic(), False, id="unknown hosts"),
        pytest.param(automatic(*HOSTS[:3]), False, id="too few"),
        pytest.param(automatic(*HOSTS, "five"), False, id="too many"),
    ],
)
def test_replicas_share_their_reads_by_themselves_on_many_hosts_alone(
    saved: Path, options: ReadOptions, is_shared: bool
) -> None:
    alone, reports = read(load(saved)), load(saved, ranks=4, options=options)
    assert len(HOSTS) == MIN_HOSTS
    assert read(reports) == (alone if is_shared else 4 * alone)
    assert sum(report.bytes_received for report in reports) == (3 * alone if is_shared else 0)


def test_hosts_that_ranks_name_differently_share_nothing_and_nobody_waits(saved: Path) -> None:
    def named_differently(place: Any, roles: Any, channel: Any) -> LoadReport:
        options = automatic(*HOSTS) if channel.rank else automatic(*HOSTS[::-1])
        return flex(options=options)(place, roles, channel)

    assert [report.bytes_received for report in attempt(saved, ranks=4, loader=named_differently)] == [0] * 4


def test_weights_are_shared_and_states_that_are_cut_over_the_replicas_are_not(saved: Path) -> None:
    whole, cut = load(saved, ranks=4, options=ONCE), load(saved, 1, 4, options=ONCE)
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


def test_replicas_form_groups_whose_members_are_far_apart_and_a_rank_alone_enters_their_rounds() -> None:
    def groups(shared: str) -> list[tuple[int, ...]]:
        shares, once = [SharedReads(one.encode()) for one in shared], ReadOptions(replicas="once")
        return [one.ranks for rank in range(len(shared)) if (one := replicas_of(shares, rank, once, ()))]

    assert groups("aba") == [(0, 2), (1,), (0, 2)]
    assert groups("ab") == []
    many = set(groups("a" * 200))
    assert sorted(map(len, many)) == [50] * 4
    assert sorted(chain(*many)) == list(range(200))
    assert tuple(range(0, 200, 4)) in many


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


# ---- Parts of tensors: what ranks want arrives in rounds, whatever ranks hold it.


SHAPES = {"a": (7, 5), "b": (40,), "c": (3, 2, 4), "number": (), "empty": (6,)}
VALUES = {
    name: np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32).ravel()
    for name, shape in SHAPES.items()
}


def part(name: str, low: int, high: int) -> Shard:
    return Shard(name, "float32", SHAPES[name], whole(SHAPES[name]), (low, high))


def cuts(name: str, ranks: int) -> list[tuple[int, int]]:
    """Ranges of a tensor, one for each rank; only the first rank has elements of ``empty``."""
    size = VALUES[name].size
    if name == "empty":
        return [(0, size), *[(size, size)] * (ranks - 1)]
    ends = [size * rank // ranks for rank in range(ranks + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


@pytest.mark.parametrize("limit", [8, 50, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_what_it_wants_of_parts_that_are_cut_otherwise(
    ranks: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "schedule_rounds", lambda moves, rank: schedule_rounds(moves, rank, limit))

    def work(channel: Any) -> None:
        held = {}
        for name, values in VALUES.items():
            low, high = cuts(name, ranks)[channel.rank]
            held[name] = LocalPart(part(name, low, high), values[low:high])
        # The first rank wants all of "a", the others the end of it.
        begin = 3 * channel.rank
        wanted = {name: part(name, min(begin, values.size), values.size) for name, values in VALUES.items()}
        wanted |= {"empty": part("empty", *cuts("empty", ranks)[channel.rank])}
        found = {name: values.copy() for name, values in gather_parts(held, wanted, channel)}
        assert found.keys() == wanted.keys()
        for name, shard in wanted.items():
            low, high = shard.flat or (0, 0)
            assert found[name].tobytes() == VALUES[name][low:high].tobytes(), name

    succeed(ranks, work)


def test_names_that_no_rank_holds_are_left_out_and_holes_are_refused_on_every_rank() -> None:
    def gathered(wanted: dict[str, Shard]) -> list[Any]:
        held = {"a": LocalPart(part("a", 0, 30), VALUES["a"][:30])}
        return job(2, lambda channel: [name for name, _ in gather_parts(held if channel.rank else {}, wanted, channel)])

    assert gathered({"a": part("a", 0, 30), "b": part("b", 0, 40)}) == [["a"], ["a"]]
    assert "a: 0:35" in gathered({"a": part("a", 0, 35)}).error(MismatchError).evidence[0]
