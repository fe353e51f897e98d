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
        assert found["late"] == found["wanted"] - found["strided"], "contiguous tensors are filled on a side stream"


@pytest.mark.parametrize("strided", [False, True])
def test_a_range_of_a_device_tensor_comes_in_pieces(device_ranks: Ranks, strided: bool) -> None:
    (found,) = device_ranks.run("tests.device.memory_jobs:save_in_pieces", 1, {"strided": strided}).values
    size = (5 * 1024 - 10) * 4096
    assert found["right"]
    assert found["pieces"] == [16 * MIB, size - 16 * MIB]
    if device() == FAKE:
        assert found["copied"] == size


def test_a_load_waits_for_the_computation_before_it(device_ranks: Ranks) -> None:
    (found,) = device_ranks.run("tests.device.memory_jobs:fill_while_computing", 1).values
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
