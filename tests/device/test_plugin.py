"""The fake accelerator notices what it is there to notice."""

from __future__ import annotations

import signal

import pytest

from tests.device.running import FAKE, Ranks, device

pytestmark = pytest.mark.skipif(device() != FAKE, reason="a real accelerator gives no such guarantee")

RIGHT = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_the_host_cannot_read_device_memory(device_ranks: Ranks) -> None:
    result = device_ranks.attempt("tests.device.jobs:touch_device_memory", 1)
    assert result.returncodes == (-signal.SIGSEGV,)


@pytest.mark.parametrize("job", ["read_too_early", "reuse_too_early"])
def test_a_missing_wait_is_a_wrong_number(device_ranks: Ranks, job: str) -> None:
    found = {
        synchronised: device_ranks.run(f"tests.device.jobs:{job}", 1, {"synchronised": synchronised}).values[0]
        for synchronised in (True, False)
    }
    assert found == {True: RIGHT, False: [0.0] * 8 if job == "read_too_early" else [-1.0] * 8}


def test_streams_without_an_order_overtake_each_other(device_ranks: Ranks) -> None:
    found = {
        ordered: device_ranks.run("tests.device.jobs:overtake_the_computation", 1, {"ordered": ordered}).values[0]
        for ordered in (True, False)
    }
    assert found == {True: [5.0] * 8, False: [0.0] * 8}


def test_bytes_are_counted_each_way(device_ranks: Ranks) -> None:
    (found,) = device_ranks.run("tests.device.jobs:counts", 1).values
    assert found == [
        [4000, 0, 0, 0, 0, 0],
        [4000, 0, 0, 4000, 0, 0],
        [0, 4000, 0, 0, 0, 0],
        [0, 0, 4000, 0, 0, 0],
    ]
