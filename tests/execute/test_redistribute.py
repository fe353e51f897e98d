"""Reading together, between threads: what several ranks want is read once, and what arrives is what is stored."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import Corrupt, FlexError, PeerError
from paddleformers_fc.execute.exchange import ReadContext, Replicas, read_redistributed
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.load import LoadReport, load_checkpoint, prepare_weights
from paddleformers_fc.execute.memory import slots_of
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.plan import transfer_plan
from paddleformers_fc.plan.build import plan_reads
from paddleformers_fc.plan.items import LoadPlan
from paddleformers_fc.plan.sources import resume_source
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.operations import Memory
from tests.execute.simulated import MODEL, Roles, canonical, job, live, load, save, succeed

ARRAYS = canonical()
ONCE = ReadOptions(replicas="once")


def loaded(directory: Path, ranks: int, tp: int, options: ReadOptions, sharded: int = 1) -> list[LoadReport]:
    """Load on ranks of which ``tp`` differ."""
    return load(directory, ARRAYS, tp, sharded, options=options, ranks=ranks)


@pytest.mark.parametrize(("stored", "tp"), [((1, 1), 1), ((2, 1), 2), ((2, 2), 1), ((1, 3), 2)])
def test_replicas_read_as_many_bytes_together_as_one_of_them_alone(
    tmp_path: Path, stored: tuple[int, int], tp: int
) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, *stored)
    alone = sum(report.bytes_read for report in loaded(tmp_path / "checkpoint-3", tp, tp, ReadOptions()))
    each = loaded(tmp_path / "checkpoint-3", 3 * tp, tp, ReadOptions())
    once = loaded(tmp_path / "checkpoint-3", 3 * tp, tp, ONCE)
    assert sum(report.bytes_read for report in each) == 3 * alone
    assert [report.bytes_received for report in each] == [0] * 3 * tp
    assert sum(report.bytes_read for report in once) <= alone
    assert sum(report.bytes_received for report in once) >= sum(report.bytes_read for report in once)
    # Each of the replicas reads a share of it.
    assert max(report.bytes_read for report in once) < 0.6 * alone


def test_open_weights_are_read_once_and_cast_by_the_ranks_that_want_them(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)
    export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "hf", 4000)

    def work(options: ReadOptions) -> list[LoadReport]:
        def one(channel: Any) -> LoadReport:
            roles = live(ARRAYS, 1, channel.rank, empty=True)["model_state"]
            for weight in roles.values():
                weight.local_tensor = weight.local_tensor.astype("float64")
            report = prepare_weights(tmp_path / "hf", {"model_state": roles}, MODEL, channel, options, "size").fill()
            for name, weight in live(ARRAYS, 1, channel.rank)["model_state"].items():
                assert (roles[name].local_tensor == weight.local_tensor.astype("float64")).all()
            return report

        return succeed(2, one)

    each, once = work(ReadOptions()), work(ONCE)
    assert 2 * sum(report.bytes_read for report in once) == sum(report.bytes_read for report in each)


def test_ranks_that_read_for_themselves_exchange_nothing_between_the_preflight_and_the_end(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 2)

    def work(channel: Any) -> tuple[int, int]:
        checkpoint = open_on_all_ranks(tmp_path / "checkpoint-3", channel)
        before = channel.exchanges
        load_checkpoint(checkpoint, live(ARRAYS, 2, channel.rank, empty=True), MODEL, channel)
        return channel.exchanges - before, channel.largest

    # The plans, with the consistency check, and the end; no rank has ties to compare.
    assert succeed(2, work) == [(2, 0)] * 2


def plan_of(checkpoint: OpenedCheckpoint, roles: Roles) -> LoadPlan:
    """The plan of a rank that loads everything it holds."""
    shards = describe_roles(roles)
    source, _ = resume_source(checkpoint, model_rules(MODEL, shards["model_state"]))
    return plan_reads(source, shards)


def shared(directory: Path, plan: LoadPlan, ranks: int) -> ReadContext:
    """The files of a rank whose plan is that of all ranks, and which reads a share if there are several."""
    parts = tuple(item.stored for item in plan.items)
    return ReadContext(directory, replicas=Replicas(tuple(range(ranks)), parts) if ranks > 1 else None)


@pytest.mark.parametrize("way", ["each", "once"])
def test_a_read_that_fails_on_one_rank_fails_on_all_with_its_error(tmp_path: Path, way: str) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 4)
    victim = tmp_path / "checkpoint-3/model_state/rank-00002.safetensors"

    def work(channel: Any) -> None:
        checkpoint = open_on_all_ranks(tmp_path / "checkpoint-3", channel)
        if channel.rank == 0:
            os.truncate(victim, victim.stat().st_size - 8)
        channel.gather("a test", b"")
        load_checkpoint(
            checkpoint, live(ARRAYS, 1, channel.rank, empty=True), MODEL, channel, ReadOptions(replicas=way)
        )

    outcomes = job(4, work)
    assert isinstance(outcomes[0], FlexError)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "model_state/rank-00002.safetensors" in str(outcomes[0])


def test_a_rank_that_fails_in_the_midst_stops_all_after_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_plan, "TURN_BYTES", 2000)
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)
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
    assert all(isinstance(outcome, Corrupt) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "rank 2" in str(outcomes[0])
    assert 10 < stopped < whole - 10


@dataclass
class LateSlot:
    """A slot whose numbers are there only when its copy is finished, as on an accelerator.

    Attributes:
        target: a flat array of the shard's dtype and size.
        host_bytes: of the array that stands in for it.
        done: what was called, in order.
    """

    target: np.ndarray[Any, Any]
    host_bytes: int
    done: list[str] = field(default_factory=list)
    staged: Any = None

    def open(self) -> Memory:
        """An array of its own."""
        self.done.append("open")
        self.staged = np.zeros_like(self.target)
        return Memory.of(self.staged)

    def close(self) -> None:
        """The copy begins."""
        self.done.append("close")

    def finish_copy(self) -> None:
        """The copy is done, and the array is given back."""
        self.done.append("finish_copy")
        self.target[:] = self.staged
        self.staged = None


@pytest.mark.parametrize("together", [3, 1], ids=["once", "each"])
def test_what_arrives_is_handed_over_and_waited_for(tmp_path: Path, together: int) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 2, 2)

    def work(channel: Any) -> None:
        roles, expected = live(ARRAYS, 1, channel.rank, empty=True), live(ARRAYS, 1, channel.rank)
        plan = plan_of(open_on_all_ranks(tmp_path / "checkpoint-3", channel), roles)
        slots = {}
        for role, names in roles.items():
            for name, weight in names.items():
                array = weight.local_tensor.numpy().ravel()
                slots[role, name] = LateSlot(array.copy(), array.nbytes)
        read_redistributed(plan, shared(tmp_path / "checkpoint-3", plan, together), slots, channel, ReadOptions(), 1000)
        for (role, name), slot in slots.items():
            assert slot.done == ["open", "close", "finish_copy"], name
            assert slot.target.tobytes() == expected[role][name].local_tensor.numpy().tobytes(), name

    succeed(3, work)


def test_host_arrays_of_shards_that_a_failed_load_left_incomplete_are_given_back(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)
    victim = tmp_path / "checkpoint-3/model_state/rank-00000.safetensors"
    opened: list[LateSlot] = []

    def work(channel: Any) -> None:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        plan = plan_of(open_on_all_ranks(tmp_path / "checkpoint-3", channel), roles)
        arrays = {(r, n): one.local_tensor.numpy().ravel() for r, names in roles.items() for n, one in names.items()}
        slots = {key: LateSlot(array.copy(), array.nbytes) for key, array in arrays.items()}
        opened.extend(slots.values())
        channel.gather("a test", b"")
        if channel.rank == 0:
            os.truncate(victim, victim.stat().st_size - 8)
        channel.gather("a test", b"")
        read_redistributed(plan, shared(tmp_path / "checkpoint-3", plan, 2), slots, channel, ONCE, 100)

    assert all(isinstance(outcome, Corrupt) for outcome in job(2, work))
    assert any(slot.done for slot in opened)
    assert all(slot.staged is None for slot in opened)


def test_ranks_that_do_not_read_in_the_same_way_are_refused_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-3", ARRAYS, 1, 1)

    def work(channel: Any) -> Roles:
        roles = live(ARRAYS, 1, channel.rank, empty=True)
        options = ReadOptions(replicas="once" if channel.rank == 1 else "each")
        load_checkpoint(open_on_all_ranks(tmp_path / "checkpoint-3", channel), roles, MODEL, channel, options)
        return roles

    first, second = job(2, work)
    assert isinstance(first, PeerError)
    assert str(first) == str(second)
    assert "flex_read: each on rank 0; once on rank 1" in str(first)
