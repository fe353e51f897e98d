"""Replicas that went apart are found by a save, by tensor and ranks; equal ones are passed over in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute import replicas
from paddleformers_fc.execute.replicas import Replica, Writers, hashed_range
from paddleformers_fc.execute.save import JobRecord, SaveReport, config_bytes, save_checkpoint
from paddleformers_fc.layout.shard_messages import decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from tests.corruption import ours
from tests.execute.simulated import CONFIG, MODEL, Roles, job, live

NORM = "model.norm.weight"
NORM_LINE = f"model_state {NORM} [0:16]: "


def save(
    directory: Path, ranks: int, tp: int, way: str, drift: dict[int, list[str]], sharded: int = 1
) -> list[SaveReport | Exception]:
    """Save a job on some of whose ranks a bit of some weights is another one; how that ended, by rank."""

    def work(channel: Any) -> SaveReport:
        roles = live(ours.ARRAYS, tp, channel.rank, sharded=sharded)
        for name in drift.get(channel.rank, []):
            flip(roles, name)
        files = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        return save_checkpoint(directory, roles, MODEL, files, JobRecord(3, 24, {}), channel, replicas=way)

    return job(ranks, work)


def flip(roles: Roles, name: str) -> None:
    """Change the last bit of the last number of a weight or state."""
    role = "model_state" if name in roles["model_state"] else "optimizer_state"
    weight = roles[role][name]
    bits = weight.local_tensor.numpy().copy().view(np.uint32)
    bits.reshape(-1)[-1] ^= 1
    weight.local_tensor.set_value(bits.view(np.float32))


@pytest.mark.parametrize(("ranks", "tp", "sharded"), [(2, 1, 1), (4, 2, 1), (2, 2, 1), (4, 2, 2), (3, 1, 3)])
@pytest.mark.parametrize("way", ["off", "warn", "refuse"])
def test_equal_replicas_are_no_matter_for_a_word(tmp_path: Path, ranks: int, tp: int, sharded: int, way: str) -> None:
    for report in save(tmp_path / "checkpoint-3", ranks, tp, way, {}, sharded):
        assert isinstance(report, SaveReport)
        assert report.differences == ()
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
def test_one_bit_of_one_replica_is_reported_with_its_ranks_and_recorded_in_the_checkpoint(
    tmp_path: Path, ranks: int, tp: int, odd: list[int], message: str
) -> None:
    outcomes = save(tmp_path / "checkpoint-3", ranks, tp, "warn", {rank: [NORM] for rank in odd})
    for report in outcomes:
        assert isinstance(report, SaveReport)
        assert report.differences == (NORM_LINE + message,)
    manifest = read_manifest(tmp_path / "checkpoint-3")
    assert manifest.differences == [NORM_LINE + message]
    verify_files(tmp_path / "checkpoint-3", manifest, "full")


def test_states_and_parts_of_tensors_are_compared_too_and_like_lines_are_folded(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.down_proj.weight.moment1_0" for layer in (0, 1)]
    report, *_ = save(tmp_path / "checkpoint-3", 4, 2, "warn", {3: names})
    assert isinstance(report, SaveReport)
    (line,) = report.differences
    assert line.startswith("optimizer_state model.layers.{0...1}.mlp.down_proj.weight.moment1_0 [12:24,0:16]: ")
    assert line.endswith("version 1 on rank 1; version 2 on rank 3")


def test_a_save_that_is_to_refuse_saves_nothing_and_raises_the_same_error_on_every_rank(tmp_path: Path) -> None:
    outcomes = save(tmp_path / "checkpoint-3", 4, 2, "refuse", {1: [NORM]})
    assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert NORM_LINE in str(outcomes[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["warn", "refuse"])
def test_differences_that_do_not_fit_into_a_message_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(replicas, "MAX_TOTAL_BYTES", 1)
    for outcome in save(tmp_path / "checkpoint-3", 4, 2, way, {1: [NORM]}):
        assert "tensors of a part of the model" in str(outcome)
        assert isinstance(outcome, MismatchError) == (way == "refuse")
    assert (tmp_path / "checkpoint-3").exists() == (way == "warn")


def test_a_save_that_does_not_look_is_as_it_always_was(tmp_path: Path) -> None:
    for report in save(tmp_path / "checkpoint-3", 2, 1, "off", {1: [NORM]}):
        assert isinstance(report, SaveReport)
        assert report.differences == ()


def test_what_one_rank_alone_holds_is_no_replica() -> None:
    shard = Shard("a", "float32", (4,), whole((4,)))
    other = Shard("b", "float32", (4,), whole((4,)))
    everyone = [{"model_state": {"a": shard, "b": other}}, {"model_state": {"a": shard}}, {"model_state": {}}]
    assignment = Writers(decode_shards([encode_rank_shards(roles) for roles in everyone])).assignment
    found = [assignment.share_of(rank, roles)[1] for rank, roles in enumerate(everyone)]
    assert [[(one.shard.name, one.holders) for one in replicas] for replicas in found] == [[("a", 2)], [("a", 2)], []]


@pytest.mark.parametrize(("rows", "row", "holders"), [(1 << 20, 1, 4), (700, 4096, 3), (5, 1 << 20, 16)])
def test_of_a_large_replica_every_row_has_its_turn_and_a_save_hashes_one_part(
    rows: int, row: int, holders: int
) -> None:
    replica = Replica("model_state", Shard("a", "float32", (rows, row), whole((rows, row))), holders, 0)
    hashed = [hashed_range(replica, step) for step in range(0, 100_000, 500)]
    assert all(0 < high - low <= (rows // holders + 1) * row for low, high in hashed)
    assert all(low % row == 0 and high % row == 0 for low, high in hashed)
    assert len({low for low, _ in hashed}) == min(holders, rows)
    assert {place for low, high in hashed for place in range(low // row, high // row)} == set(range(rows))


def test_a_small_replica_is_hashed_as_a_whole() -> None:
    replica = Replica("model_state", Shard("a", "float32", (100, 7), whole((100, 7))), 64, 0)
    assert hashed_range(replica, 5) == (0, 700)
