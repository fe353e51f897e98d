"""The memory of device tensors: filled and read through copies alone, in order with the computation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.running import FAKE, Ranks, device

MIB = 1024 * 1024


@pytest.mark.parametrize("staging_bytes", [1, 4096, 64 * MIB])
def test_every_way_of_reading_fills_device_tensors(device_ranks: Ranks, tmp_path: Path, staging_bytes: int) -> None:
    job = {"root": str(tmp_path), "staging_bytes": staging_bytes}
    (found,) = device_ranks.run("tests.device.memory_jobs:read_every_way", 1, job).values
    assert (found["tensors"], found["wrong"], found["on the host"]) == (96, [], 0)
    if device() == FAKE:
        assert found["copied"] == found["wanted"]
        assert found["late"] == found["wanted"], "on a side stream"


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("staging_bytes", "piece"), [(64 * MIB, 16 * MIB), (3 * MIB, MIB)])
def test_the_next_piece_of_a_device_tensor_is_copied_while_one_is_written(
    device_ranks: Ranks, strided: bool, staging_bytes: int, piece: int
) -> None:
    job = {"strided": strided, "staging_bytes": staging_bytes}
    (found,) = device_ranks.run("tests.device.memory_jobs:save_in_pieces", 1, job).values
    size = (5 * 1024 - 10) * 4096
    assert found["right"]
    assert found["pieces"] == [piece] * (size // piece) + [size % piece]
    assert found["held"] == 2 * piece < staging_bytes
    assert found["allocations"] == 2, "the second save uses the buffers of the first"
    assert (found["in flight"], found["measured"]) == (2, size)
    if device() == FAKE:
        assert found["copied"] == size
        # Under ``strided`` Paddle destroys the event of a computation, and waits for it on a CustomDevice alone.
        assert strided or found["waits"] == 0, "a wait in a call stops every other thread of the interpreter"
        assert found["begun"] == [min(number * piece, size) for number in range(2, len(found["pieces"]) + 2)]


@pytest.mark.skipif(device() != FAKE, reason="a device that can be told to fail")
def test_a_copy_that_a_device_never_reports_raises_the_error_of_the_device(device_ranks: Ranks) -> None:
    assert device_ranks.run("tests.device.memory_jobs:copy_on_a_broken_device", 1).values != ("",)


def test_the_buffers_of_an_abandoned_save_are_used_again(device_ranks: Ranks) -> None:
    (found,) = device_ranks.run("tests.device.memory_jobs:abandon_pieces", 1).values
    assert found == {"right": True, "held": 2 * 4096, "in flight": 2}


def test_staging_memory_of_a_load_is_bounded_and_used_again(device_ranks: Ranks, tmp_path: Path) -> None:
    job = {"root": str(tmp_path), "staging_bytes": 8 * MIB, "count": 24, "rows": 256}
    (found,) = device_ranks.run("tests.device.memory_jobs:load_through_the_pool", 1, job).values
    assert (found["wrong"], found["measured"]) == ([], 24 * MIB)
    assert found["held"] == found["kept"] == 4 * MIB, "two groups of two shards"
    assert found["allocations"] == 4
    assert found["in flight"] == 4, "one group of shards is copied while the next one is read"


def test_a_shard_beyond_the_staging_memory_is_read_in_pieces(device_ranks: Ranks, tmp_path: Path) -> None:
    job = {"root": str(tmp_path), "staging_bytes": 8 * MIB, "count": 2, "rows": 2049}
    (found,) = device_ranks.run("tests.device.memory_jobs:load_through_the_pool", 1, job).values
    assert (found["wrong"], found["measured"]) == ([], 2 * 2049 * 4096)
    assert found["held"] < 6 * MIB
    assert found["in flight"] == 2, "one piece is copied while the next one is read"


def test_a_load_waits_for_the_computation_before_it(device_ranks: Ranks) -> None:
    (found,) = device_ranks.run("tests.device.memory_jobs:fill_while_computing", 1).values
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_weights_that_are_still_being_received_are_waited_for(device_ranks: Ranks, tmp_path: Path) -> None:
    (found,) = device_ranks.run(
        "tests.device.memory_jobs:save_and_load_while_weights_arrive", 1, {"root": str(tmp_path)}
    ).values
    assert found == [[], []]


@pytest.mark.parametrize("where", ["host", "model"])
def test_a_stream_waits_for_the_device_once_per_round_and_not_once_per_tensor(
    device_ranks: Ranks, tmp_path: Path, where: str
) -> None:
    job = {"root": str(tmp_path), "where": where}
    (found,) = device_ranks.run("tests.device.memory_jobs:stream_from_device", 1, job).values
    assert found["wrong"] == []
    assert sum(found["rounds"]) == found["tensors"] > 10, "a copy for every tensor"
    assert found["batches"] == [1, 1]
    assert len(found["rounds"]) == 2, "which are waited for together in every round"
    if device() == FAKE:
        # One before the stream; tensors on the device are waited for once per batch.
        assert found["synchronisations"] == (3 if where == "host" else 5)
        assert found["event waits"] == 0


@pytest.mark.skipif(device() != FAKE, reason="a real accelerator has no limit that a test can set")
def test_a_save_and_a_load_need_no_memory_of_a_device_for_tensors(device_ranks: Ranks, tmp_path: Path) -> None:
    job = {"root": str(tmp_path), "spare": MIB}
    (found,) = device_ranks.run("tests.device.memory_jobs:save_and_load_on_a_full_device", 1, job).values
    assert found["bytes"] > 8 * MIB
    assert (found["refused"], found["changed"]) == (True, [])
