"""Replicas: those that went apart are found by a save, by tensor and ranks; what several ranks hold is written once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute import replicas
from paddleformers_fc.execute.replicas import Assignment, Replica, ShardPart, Writers, hashed_range, pack_files
from paddleformers_fc.layout.shard_messages import JobShards, decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import shifted, whole
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from tests.execute.simulated import ARRAYS, Roles, attempt_save, live
from tests.harness.sampling import thorough

NORM = "model.norm.weight"
NORM_LINE = f"model_state {NORM} [0:16]: "


def save(directory: Path, ranks: int, tp: int, way: str, drift: dict[int, list[str]], sharded: int = 1) -> list[Any]:
    """Save a job on some of whose ranks a bit of some weights is another one; how that ended, by rank."""

    def held(rank: int) -> Roles:
        roles = live(ARRAYS, tp, rank, sharded=sharded)
        for name in drift.get(rank, []):
            flip(roles, name)
        return roles

    return attempt_save(directory / "checkpoint-3", held, ranks, replicas=way)


def flip(roles: Roles, name: str) -> None:
    """Change the last bit of the last number of a weight or state."""
    role = "model_state" if name in roles["model_state"] else "optimizer_state"
    weight = roles[role][name]
    bits = weight.local_tensor.numpy().copy().view(np.uint32)
    bits.reshape(-1)[-1] ^= 1
    weight.local_tensor.set_value(bits.view(np.float32))


@pytest.mark.parametrize(("ranks", "tp", "sharded"), [(2, 1, 1), (4, 2, 1), (2, 2, 1), (4, 2, 2), (3, 1, 3)])
@pytest.mark.parametrize("way", ["off", "warn", "refuse"])
def test_equal_replicas_are_not_reported(tmp_path: Path, ranks: int, tp: int, sharded: int, way: str) -> None:
    reports = save(tmp_path, ranks, tp, way, {}, sharded).results()
    assert {report.differences for report in reports} == {()}
    assert b"differing_replicas" not in (tmp_path / "checkpoint-3/flex_checkpoint.json").read_bytes()


@pytest.mark.parametrize(
    ("ranks", "tp", "odd", "message"),
    [
        (2, 1, [1], "version 1 on rank 0; version 2 on rank 1"),
        (4, 1, [2], "version 1 on ranks 0-1, 3; version 2 on rank 2"),
        (4, 2, [0, 2], "version 1 on ranks 0, 2; version 2 on ranks 1, 3"),
        (2, 2, [0], "version 1 on rank 0; version 2 on rank 1"),
    ],
)
def test_one_bit_of_one_replica_is_reported_with_its_ranks_and_recorded_or_refused_or_not_looked_for(
    tmp_path: Path, ranks: int, tp: int, odd: list[int], message: str
) -> None:
    drift = {rank: [NORM] for rank in odd}
    assert NORM_LINE + message in str(save(tmp_path, ranks, tp, "refuse", drift).error(MismatchError))
    assert list(tmp_path.iterdir()) == []
    for way, found in (("off", ()), ("warn", (NORM_LINE + message,))):
        reports = save(tmp_path, ranks, tp, way, drift).results()
        assert {report.differences for report in reports} == {found}
        manifest = read_manifest(tmp_path / "checkpoint-3")
        assert manifest.differences == list(found)
        verify_files(tmp_path / "checkpoint-3", manifest, "full")


def test_states_and_parts_of_tensors_are_compared_too_and_like_lines_are_folded(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.down_proj.weight.moment1_0" for layer in (0, 1)]
    report, *_ = save(tmp_path, 4, 2, "warn", {3: names}).results()
    (line,) = report.differences
    assert line.startswith("optimizer_state model.layers.{0...1}.mlp.down_proj.weight.moment1_0 [12:24,0:16]: ")
    assert line.endswith("version 1 on rank 1; version 2 on rank 3")


@pytest.mark.parametrize("way", ["warn", "refuse"])
def test_differences_that_exceed_a_message_are_still_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(replicas, "MAX_TOTAL_BYTES", 1)
    for outcome in save(tmp_path, 4, 2, way, {1: [NORM]}):
        assert "tensors of a part of the model" in str(outcome)
        assert isinstance(outcome, MismatchError) == (way == "refuse")
    assert (tmp_path / "checkpoint-3").exists() == (way == "warn")


@pytest.mark.parametrize(("rows", "row", "holders"), [(1 << 20, 1, 4), (700, 4096, 3), (5, 1 << 20, 16)])
def test_each_save_hashes_one_part_of_a_large_replica_and_every_row_in_turn(rows: int, row: int, holders: int) -> None:
    replica = Replica("model_state", Shard("a", "float32", (rows, row), whole((rows, row))), holders, 0)
    hashed = [hashed_range(replica, step) for step in range(0, 100_000, 500)]
    assert all(0 < high - low <= (rows // holders + 1) * row for low, high in hashed)
    assert all(low % row == 0 and high % row == 0 for low, high in hashed)
    assert len({low for low, _ in hashed}) == min(holders, rows)
    assert {place for low, high in hashed for place in range(low // row, high // row)} == set(range(rows))
    small = Replica("model_state", Shard("a", "float32", (100, 7), whole((100, 7))), 64, 0)
    assert hashed_range(small, 5) == (0, 700), "small ones are hashed as a whole"


# ---- Who writes what: every element once, bytes even, files bounded.


MEBI = 1024 * 1024
RankShards = dict[str, dict[str, Shard]]


def held(*shards: Shard) -> RankShards:
    return {"model_state": {shard.name: shard for shard in shards}}


def job_of(everyone: Sequence[RankShards]) -> JobShards:
    return decode_shards([encode_rank_shards(roles) for roles in everyone])


def assign_writers(everyone: Sequence[RankShards]) -> list[list[ShardPart]]:
    """What each rank writes: as the coordinator knows it, and as the rank finds out from what it is told."""
    writers = Writers(job_of(everyone))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(writers.assignment), type=Assignment)
    shares = [told.share_of(rank, roles)[0] for rank, roles in enumerate(everyone)]
    assert [sorted(map(repr, share)) for share in shares] == [
        sorted(map(repr, writers.share_of(rank))) for rank in range(len(everyone))
    ]
    return shares


def tensor(name: str, *shape: int, dtype: str = "float32") -> Shard:
    return Shard(name, dtype, shape, whole(shape))


def loads(given: Sequence[Sequence[ShardPart]]) -> list[int]:
    return [sum(piece.nbytes for piece in pieces) for pieces in given]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_one_big_tensor_that_every_rank_holds_is_written_by_all_of_them(ranks: int) -> None:
    everyone = [held(tensor("embed", 64 * MEBI // 4, 4), tensor("small", 100))] * ranks
    found = loads(assign_writers(everyone))
    assert max(found) <= 1.01 * sum(found) / ranks


def test_a_big_tensor_balances_the_bytes_of_its_writers_without_tiny_cuts() -> None:
    own, shared = tensor("own", 5 * MEBI), tensor("shared", 15 * MEBI // 4, 4)
    assert loads(assign_writers([held(own, shared), held(shared)])) == [40 * MEBI, 40 * MEBI]
    big, nearly = tensor("big", 6 * MEBI // 4, 4), tensor("nearly", 5 * MEBI + 100)
    given = assign_writers([held(big, own), held(big, nearly), held(big)])
    assert [[piece.shard.name for piece in pieces] for pieces in given] == [["own"], ["nearly"], ["big"]]


def test_the_holders_of_a_tensor_are_those_of_its_role() -> None:
    one, other = held(tensor("a", 4), tensor("b", 7)), {**held(tensor("b", 7)), "ema_state": {"a": tensor("a", 4)}}
    job = job_of([one, other, one, {}])
    assert [job.holders("model_state", name) for name in "abc"] == [[0, 2], [0, 1, 2], []]
    assert job.holders("ema_state", "a") == [1]


SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def shards(draw: st.DrawFn, name: str) -> Shard:
    """A whole tensor, or a half of one; or a flattened range of either."""
    shape = draw(SHAPES)
    place, whole_shape = whole(shape), shape
    if shape and draw(st.booleans()):
        whole_shape = (2 * shape[0], *shape[1:])
        place = shifted(shape, (shape[0], *[0] * (len(shape) - 1)))
    flat = None
    if draw(st.booleans()):
        begin = draw(st.integers(0, place.volume))
        flat = (begin, draw(st.integers(begin, place.volume)))
    return Shard(name, draw(st.sampled_from(["float32", "bfloat16", "uint8"])), whole_shape, place, flat)


@st.composite
def jobs(draw: st.DrawFn) -> list[RankShards]:
    """Ranks that hold shards, each held by one rank or by several."""
    ranks = draw(st.integers(1, 4))
    everyone: list[RankShards] = [{"model_state": {}} for _ in range(ranks)]
    for number in range(draw(st.integers(1, 5))):
        shard = draw(shards(f"t{number}"))
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            everyone[rank]["model_state"][shard.name] = shard
    return everyone


def elements(shard: Shard) -> np.ndarray:
    """The numbers of a shard's elements in its whole tensor, in the order of its memory."""
    numbers = np.arange(int(np.prod(shard.global_shape, dtype=int))).reshape(shard.global_shape)
    part = numbers[tuple(slice(a, b) for a, b in zip(shard.box.lo, shard.box.hi, strict=True))].ravel()
    return part if shard.flat is None else part[shard.flat[0] : shard.flat[1]]


@thorough(300)
@given(jobs(), st.integers(1, 40), st.integers(1, 60))
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    everyone: list[RankShards], least: int, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replicas, "MIN_PART_BYTES", least)
        given = assign_writers(everyone)
    written: dict[str, list[np.ndarray]] = {}
    for rank, pieces in enumerate(given):
        assert len({piece.shard.name for piece in pieces}) == len(pieces)
        for file in pack_files(pieces, most):
            assert len({piece.shard.name for piece in file}) == len(file)
            assert sum(piece.nbytes for piece in file) <= most or len(file) == 1
            for piece in file:
                own = elements(everyone[rank]["model_state"][piece.shard.name])
                part = elements(piece.shard)
                assert not list(piece.shard.faults())
                assert (own[piece.start : piece.start + piece.shard.size] == part).all()
                written.setdefault(piece.shard.name, []).append(part)
    for held_by_one in everyone:
        for name, shard in held_by_one["model_state"].items():
            assert sorted(np.concatenate(written[name])) == sorted(elements(shard))


def test_wide_dtypes_come_first_and_files_hold_no_more_tensors_than_a_header_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "MAX_TENSORS", 2)
    dtypes = {"a": "bfloat16", "b": "float32", "c": "bfloat16", "d": "float32", "e": "bfloat16"}
    files = pack_files([ShardPart("r", tensor(name, 1, dtype=dtype), 0) for name, dtype in dtypes.items()], 10**9)
    assert [[one.shard.name for one in file] for file in files] == [["b", "d"], ["a", "c"], ["e"]]
