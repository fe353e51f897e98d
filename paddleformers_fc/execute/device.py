"""Describe the capabilities of a tensor's memory.

Each function takes the place of a tensor. No other module of the core compares places. Others need only two facts:
whether the host can address the memory, and which copy it supports. Paddle has page-locked memory for CUDA only; for a
CustomDevice ``Tensor.pin_memory`` raises, although its interface allocates page-locked memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any


def in_host_memory(place: Any) -> bool:
    """Return whether the host can address memory at this place, as that of offloaded tensors."""
    return bool(place.is_cpu_place() or place.is_cuda_pinned_place() or place.is_xpu_pinned_place())


def has_pinned_memory(place: Any) -> bool:
    """Return whether Paddle can allocate page-locked host memory for copies to this place."""
    return bool(place.is_gpu_place())


def has_streams(place: Any) -> bool:
    """Return whether copies to this place can run on a stream beside the computation."""
    return bool(place.is_gpu_place() or place.is_custom_place())


def current_stream(place: Any) -> Any:
    """Return the ``paddle.device.Stream`` of the computation at a place that has streams."""
    import paddle

    return paddle.device.current_stream(_stream_place(*_device(place)))


def side_stream(place: Any) -> Any:
    """Return the ``paddle.device.Stream`` for copies to a place that has streams; one per device."""
    return _side_stream(*_device(place))


def begin_copy(source: Any, target: Any, place: Any) -> Any:
    """Copy between contiguous host memory and a device, after the computation that is under way there.

    Args:
        source: a ``paddle.Tensor``.
        target: a ``paddle.Tensor`` of the same shape and dtype.
        place: that of the device.
    Returns:
        the event at the end of the copy, until which both tensors must live; None if the copy is done.
    """
    import paddle

    with paddle.no_grad():
        if not has_streams(place):
            target.copy_(source, True)
            return None
        stream = side_stream(place)
        # The computation may still be writing to either end.
        stream.wait_stream(current_stream(place))
        with paddle.device.stream_guard(stream):
            target.copy_(source, False)
            return stream.record_event()


@lru_cache(maxsize=64)
def _side_stream(kind: str, number: int) -> Any:
    import paddle

    return paddle.device.Stream(_stream_place(kind, number))


def _device(place: Any) -> tuple[str, int]:
    """Return the kind and the number of a device."""
    if place.is_custom_place():
        return place.custom_device_type(), place.custom_device_id()
    return "gpu", place.gpu_device_id()


def _stream_place(kind: str, number: int) -> Any:
    """Return the place in the class that Paddle requires for streams; that of a tensor is of the base class."""
    import paddle

    return paddle.CUDAPlace(number) if kind == "gpu" else paddle.CustomPlace(kind, number)
