"""What ranks do in the tests of this directory; each public function is a job and returns JSON."""

from __future__ import annotations

from typing import Any

from tests.device.counting import copied
from tests.device.running import device


def _numbers(count: int) -> Any:
    import numpy as np

    return np.arange(1, count + 1, dtype="float32")


def touch_device_memory() -> int:
    """Read a tensor's memory as if it were the host's."""
    import ctypes

    import paddle

    paddle.set_device(device())
    tensor = paddle.to_tensor(_numbers(8))
    return ctypes.string_at(tensor.data_ptr(), 1)[0]


def read_too_early(synchronised: bool) -> list[float]:
    """Copy to the host on a stream, and read what has arrived."""
    import paddle

    from paddleformers_fc.execute.staging_pool import current_stream, side_stream

    paddle.set_device(device())
    tensor = paddle.to_tensor(_numbers(8))
    target = paddle.zeros([8], dtype="float32", device=paddle.CPUPlace())
    stream = side_stream(tensor.place)
    stream.wait_stream(current_stream(tensor.place))
    with paddle.device.stream_guard(stream):
        target.copy_(tensor, False)
        event = stream.record_event()
    if synchronised:
        event.synchronize()
    found: list[float] = target.numpy().copy().tolist()
    event.synchronize()  # The target must live until the copy has come.
    return found


def reuse_too_early(synchronised: bool) -> list[float]:
    """Copy to the device on a stream, overwrite the source, and read the device."""
    import paddle

    from paddleformers_fc.execute.staging_pool import current_stream, side_stream

    paddle.set_device(device())
    tensor = paddle.zeros([8], dtype="float32")
    source = paddle.to_tensor(_numbers(8), place=paddle.CPUPlace())
    stream = side_stream(tensor.place)
    stream.wait_stream(current_stream(tensor.place))
    with paddle.device.stream_guard(stream):
        tensor.copy_(source, False)
        event = stream.record_event()
    if synchronised:
        event.synchronize()
    source.fill_(-1.0)
    event.synchronize()
    found: list[float] = tensor.numpy().tolist()
    return found


def overtake_the_computation(ordered: bool) -> list[float]:
    """Read on one stream what another one is still to compute."""
    import paddle

    from paddleformers_fc.execute.staging_pool import current_stream, side_stream

    paddle.set_device(device())
    tensor = paddle.zeros([8], dtype="float32")
    target = paddle.zeros([8], dtype="float32", device=paddle.CPUPlace())
    paddle.device.synchronize(device())
    tensor.fill_(5.0)
    stream = side_stream(tensor.place)
    if ordered:
        stream.wait_stream(current_stream(tensor.place))
    with paddle.device.stream_guard(stream):
        target.copy_(tensor, False)
        event = stream.record_event()
    event.synchronize()
    found: list[float] = target.numpy().tolist()
    return found


def counts() -> list[list[int]]:
    """Bytes to the device, to the host and inside: of each kind of copy, synchronous and asynchronous."""
    from dataclasses import astuple

    import paddle

    paddle.set_device(device())
    tensor, other = paddle.zeros([1000], dtype="float32"), paddle.zeros([1000], dtype="float32")
    host = paddle.to_tensor(_numbers(1000), place=paddle.CPUPlace())
    found = []
    for work in (
        lambda: tensor.copy_(host, True),
        lambda: tensor.copy_(host, False),
        lambda: host.copy_(tensor, True),
        lambda: other.copy_(tensor, True),
    ):
        before = copied()
        work()
        paddle.device.synchronize(device())
        found.append(list(astuple(copied() - before)))
    return found
