"""Snapshots in kept memory: exactly what a save reads, of any tensor, and what is written from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute import replicas, save as saving, save_plan
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy, ranges_of, snapshot_bytes
from paddleformers_fc.execute.memory import HostTensors, host_view, slots_of
from paddleformers_fc.execute.replicas import CopyPart, ElementRanges, Replica
from paddleformers_fc.execute.save import (
    JobRecord,
    PlannedSave,
    SaveReport,
    begin_save,
    capture,
    comparable_facts,
    config_bytes,
    live_part,
    write_and_commit,
)
from paddleformers_fc.execute.save_plan import PlannedFile, PlannedWrite, SavePlan
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from tests.execute.simulated import succeed
from tests.execute.test_ties import TIED, model_of, tied_value
from verification import simulate_ranks

ROLE = "model_state"


# ---- A whole save.


def copied_and_overwritten(planned: PlannedSave) -> HostTensors:
    """A snapshot in a buffer of tensors that are other numbers afterwards."""
    part = planned.part
    ranges = ranges_of(planned.plan, part.job.step, part.replicas)
    buffer = SnapshotBuffer()
    assert buffer.reserve(part.tensors, ranges)
    taken = buffer.begin(part.tensors, ranges).finish()
    for weights in part.tensors.values():
        for weight in weights.values():
            weight.local_tensor.array.view(np.uint8)[...] = 0x55
    return taken


def saved(directory: Path, grid: str, beside: bool, odd: bool) -> tuple[list[SaveReport], dict[Path, bytes]]:
    """Save a model with tied weights; the reports of all ranks, and all files but the manifest."""
    model, record = model_of(grid), JobRecord(3, 24, {})

    def save(channel: Channel) -> SaveReport:
        roles = simulate_ranks.filled(model.roles(channel.rank), tied_value)
        if odd and channel.rank == 1:
            for weight in roles[ROLE].values():
                weight.local_tensor.array.view(np.uint8)[...] ^= 1
        files = {"config.json": config_bytes(TIED.config)} if channel.rank == 0 else {}
        check = ConsistencyCheck("saving", comparable_facts(TIED, record, "warn"))
        planned = begin_save(lambda: live_part(roles, TIED, files, record, "warn"), directory, channel, check)
        tensors = copied_and_overwritten(planned) if beside else capture(planned.part)
        return write_and_commit(planned, tensors, channel)

    reports = succeed(model.grid.world_size, save)
    found = {path.relative_to(directory): path for path in directory.rglob("*") if path.name != MANIFEST_NAME}
    return reports, {name: path.read_bytes() for name, path in found.items() if path.is_file()}


@pytest.mark.parametrize("odd", [False, True], ids=["equal", "diverged"])
@pytest.mark.parametrize("grid", ["dp=2,pp=2", "tp=2,pp=2", "sharding=2,split=true,pp=2"])
def test_a_save_from_a_snapshot_reads_no_live_tensor_and_writes_and_finds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: str, odd: bool
) -> None:
    monkeypatch.setattr(replicas, "WHOLE_BYTES", 512)  # Only one part of larger replicas is hashed.
    monkeypatch.setattr(save_plan, "MAX_FILE_BYTES", 20_000)
    monkeypatch.setattr(saving, "_PLANS", save_plan.PlanCache())
    (plain, expected), (reports, found) = (
        saved(tmp_path / str(beside) / "checkpoint-3", grid, beside, odd) for beside in (False, True)
    )
    assert found == expected
    for one, other in zip(reports, plain, strict=True):
        assert (one.differences, one.diverged_ties) == (other.differences, other.diverged_ties)
        assert bool(one.differences or one.diverged_ties) == odd


# ---- What is read.


def plan_of(pieces: list[PlannedWrite], found: tuple[Replica, ...] = (), ties: tuple[CopyPart, ...] = ()) -> SavePlan:
    files = (PlannedFile("a.safetensors", ROLE, SimpleNamespace(), tuple(pieces)),)  # type: ignore[arg-type]
    return SavePlan(files, None, found, ties)


def replica(name: str, shape: tuple[int, ...], holders: int = 2) -> Replica:
    return Replica(ROLE, Shard(name, "float32", shape, whole(shape)), holders, group=0)


def test_overlapping_or_adjacent_ranges_are_joined_and_tied_copies_are_read_by_rows() -> None:
    ends = [(8, 12), (0, 4), (1, 3), (4, 6)]
    pieces = [*(PlannedWrite("a", start, stop) for start, stop in ends), PlannedWrite("b", 0, 0)]
    assert ranges_of(plan_of(pieces), 3, "warn") == {(ROLE, "a"): ((0, 6), (8, 12)), (ROLE, "b"): ((0, 0),)}
    box = CopyPart(0, ROLE, "alias", 100, (6, 10), Box((2, 3), (4, 5)))
    scalar = CopyPart(1, ROLE, "owner", 7, (), Box((), ()))
    plan = plan_of([], ties=(box, scalar))
    assert ranges_of(plan, 3, "off") == {(ROLE, "alias"): ((120, 140),), (ROLE, "owner"): ((7, 8),)}


def test_the_largest_ranges_are_enough_for_every_step_and_not_more_than_a_step_needs() -> None:
    """Of replicas whose hashed part is another one at each step, and overlaps what is written at some."""
    rows = {"small": (5, 4), "even": (1 << 18, 4), "odd": ((1 << 18) + 1, 3)}
    written = [PlannedWrite("even", 0, 3 << 16), PlannedWrite("odd", 0, 100), PlannedWrite("alone", 4, 9)]
    plan = plan_of(written, tuple(replica(name, (count, 3), holders) for name, (count, holders) in rows.items()))
    roles = roles_of({name: paddle.zeros([1]) for name in (*rows, "alone")})
    for option in ("warn", "off"):
        sizes = {snapshot_bytes(roles, ranges_of(plan, step, option)) for step in range(64)}
        assert len(sizes) == (1 if option == "off" else 4)
        assert snapshot_bytes(roles, ranges_of(plan, None, option)) == max(sizes)


# ---- One tensor.


def roles_of(tensors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {ROLE: {name: SimpleNamespace(local_tensor=tensor) for name, tensor in tensors.items()}}


def begun(tensors: dict[str, Any], ranges: ElementRanges) -> SnapshotCopy:
    buffer = SnapshotBuffer()
    buffer.reserve(roles_of(tensors), ranges)
    return buffer.begin(roles_of(tensors), ranges)


def taken(tensors: dict[str, Any], ranges: ElementRanges) -> HostTensors:
    return begun(tensors, ranges).finish()


def read(pieces: Callable[..., Any], start: int, stop: int) -> bytes:
    return b"".join(np.ascontiguousarray(part).tobytes() for part in pieces(start, stop))


def strided(shape: list[int], dtype: str) -> tuple[Any, np.ndarray[Any, Any]]:
    """A tensor that is not contiguous, and its elements in row-major order, as bytes of each."""
    base = (paddle.arange(int(np.prod(shape))).reshape(shape[::-1]) % 50).astype(dtype)
    tensor = base.transpose(list(range(len(shape)))[::-1])
    assert not tensor.is_contiguous()
    dense = host_view(tensor.contiguous())
    assert dense is not None
    return tensor, dense.copy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize(("shape", "row"), [([6, 5], 5), ([1, 6, 5], 5), ([4, 3, 5], 15)])
def test_rows_of_a_strided_tensor_are_copied_in_order(dtype: str, shape: list[int], row: int) -> None:
    tensor, dense = strided(shape, dtype)
    found = taken({"a": tensor}, {(ROLE, "a"): ((row, 3 * row),)})[ROLE]["a"]
    assert read(found, row, 3 * row) == dense[row : 3 * row].tobytes()
    assert read(found, 2 * row - 1, 3 * row - 2) == dense[2 * row - 1 : 3 * row - 2].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_scalars_empty_and_several_tensors_of_one_snapshot_keep_their_bytes(dtype: str) -> None:
    tensors = {
        "scalar": paddle.to_tensor(1).astype(dtype),
        "empty": paddle.zeros([0, 4], dtype=dtype),
        "odd": (paddle.arange(13) % 7).astype(dtype),
    }
    expected = {name: host_view(tensor).tobytes() for name, tensor in tensors.items()}  # type: ignore[union-attr]
    ends = {"scalar": 1, "empty": 0, "odd": 13}
    found = taken(tensors, {(ROLE, name): ((0, end),) for name, end in ends.items()})[ROLE]
    for tensor in tensors.values():
        if tensor.size:
            tensor.zero_()
    assert {name: read(found[name], 0, end) for name, end in ends.items()} == expected


def test_tensors_outside_a_snapshot_are_not_read() -> None:
    found = taken({"a": paddle.arange(20)}, {(ROLE, "a"): ((2, 5), (8, 12))})[ROLE]["a"]
    assert read(found, 3, 5) == np.arange(3, 5).tobytes()
    assert read(found, 8, 12) == np.arange(8, 12).tobytes()
    for start, stop in ((0, 2), (4, 6), (2, 12), (12, 13), (5, 8)):
        with pytest.raises(IndexError, match="not in the snapshot"):
            read(found, start, stop)


def test_an_error_of_a_copy_is_raised_where_the_copy_ends() -> None:
    tensor = paddle.arange(20)
    copying = begun({"a": tensor}, {(ROLE, "a"): ((0, 10),)})
    tensor._clear_data()
    with pytest.raises(RuntimeError, match="not initialized"):
        copying.finish()


def test_tensors_without_memory_are_not_loaded_into() -> None:
    tensor = paddle.arange(20)
    tensor._clear_data()
    with pytest.raises(MismatchError) as caught:
        slots_of(roles_of({"a": tensor, "b": paddle.arange(3)}))
    assert list(caught.value.evidence) == [f"{ROLE} a"]


def test_memory_is_kept_for_the_next_snapshot_and_grows_only_if_it_is_too_small() -> None:
    buffer, roles = SnapshotBuffer(), roles_of({"a": paddle.zeros([100])})
    small, large = {(ROLE, "a"): ((0, 40),)}, {(ROLE, "a"): ((0, 100),)}
    assert snapshot_bytes(roles, small) == 192, "copies are aligned"
    assert [buffer.reserve(roles, ranges) for ranges in (small, small, large, small)] == [True, False, True, False]
    assert buffer.capacity == snapshot_bytes(roles, large) == 448
