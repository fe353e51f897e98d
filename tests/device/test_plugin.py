"""The fake accelerator notices what it is there to notice."""

from __future__ import annotations

import ctypes
import signal
from typing import Any

import numpy as np
import paddle
import pytest

from paddleformers_fc.execute.staging_pool import current_stream, side_stream
from tests.device.running import FAKE, Ranks, device
from tests.harness.on_ranks import job_on_ranks, on_ranks

pytestmark = pytest.mark.skipif(device() != FAKE, reason="a real accelerator gives no such guarantee")


def numbers() -> Any:
    return np.arange(1, 9, dtype="float32")


def on_host(values: Any) -> Any:
    return paddle.to_tensor(values, place=paddle.CPUPlace())


def copying(target: Any, source: Any, place: Any, ordered: bool = True) -> Any:
    """Copy on a side stream, after the computation if that is ordered; the event that comes after it."""
    stream = side_stream(place)
    if ordered:
        stream.wait_stream(current_stream(place))
    with paddle.device.stream_guard(stream):
        target.copy_(source, False)
        return stream.record_event()


def touch_device_memory() -> int:
    """Read a tensor's memory as if it were the host's."""
    paddle.set_device(device())
    return ctypes.string_at(paddle.to_tensor(numbers()).data_ptr(), 1)[0]


def test_the_host_cannot_read_device_memory(device_ranks: Ranks) -> None:
    result = job_on_ranks(device_ranks.attempt, 1, touch_device_memory)
    assert result.returncodes == (-signal.SIGSEGV,)


@pytest.mark.parametrize("waits", [True, False])
@on_ranks(1, server="device_ranks")
def test_a_missing_wait_is_a_wrong_number(waits: bool) -> None:
    paddle.set_device(device())
    tensor, target = paddle.to_tensor(numbers()), on_host(np.zeros(8, "float32"))
    event = copying(target, tensor, tensor.place)
    if waits:
        event.synchronize()
    assert target.numpy().copy().tolist() == (numbers() if waits else np.zeros(8)).tolist()
    event.synchronize()  # The target must live until the copy has come.
    tensor, source = paddle.zeros([8], dtype="float32"), on_host(numbers())
    event = copying(tensor, source, tensor.place)
    if waits:
        event.synchronize()
    source.fill_(-1.0)  # It is used again.
    event.synchronize()
    assert tensor.numpy().tolist() == (numbers() if waits else -np.ones(8)).tolist()


@pytest.mark.parametrize("ordered", [True, False])
@on_ranks(1, server="device_ranks")
def test_streams_without_an_order_overtake_each_other(ordered: bool) -> None:
    paddle.set_device(device())
    tensor, target = paddle.zeros([8], dtype="float32"), on_host(np.zeros(8, "float32"))
    paddle.device.synchronize(device())
    tensor.fill_(5.0)
    copying(target, tensor, tensor.place, ordered).synchronize()
    assert target.tolist() == [5.0 * ordered] * 8
