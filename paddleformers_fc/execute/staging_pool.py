"""Copy between host and device through reused staging buffers.

Every device has one :class:`StagingPool` per process. Its buffers are host memory, page-locked if Paddle supports that
for the device (only CUDA, not a CustomDevice). They are reused for later tensors and checkpoints, because page-locked
allocation and the first access to new pages are slow. Copies run on a side stream of the device: one buffer is written
to storage, or filled from it, while others are copied. Tensors in host memory use no pool.

No other module compares places; others ask only whether the host can address a tensor's memory and which copies it
supports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.storage.files import memory_at


def in_host_memory(place: Any) -> bool:
    """Return whether the host can address memory at this place; offloaded tensors have such memory."""
    return bool(place.is_cpu_place() or place.is_cuda_pinned_place() or place.is_xpu_pinned_place())


def has_pinned_memory(place: Any) -> bool:
    """Return whether Paddle can allocate page-locked host memory for copies to this place."""
    return bool(place.is_gpu_place())


def current_stream(place: Any) -> Any:
    """Return the ``paddle.device.Stream`` of the computation at a place with streams."""
    import paddle

    return paddle.device.current_stream(_stream_place(place))


_side_streams: dict[str, Any] = {}


def side_stream(place: Any) -> Any:
    """Return the ``paddle.device.Stream`` for copies to a place with streams; there is one per device."""
    import paddle

    known = _side_streams.get(str(place))
    return known or _side_streams.setdefault(str(place), paddle.device.Stream(_stream_place(place)))


Ends: TypeAlias = Sequence[tuple[Any, Any]]
"""Pairs of source and target of copies."""


def begin_copies(ends: Ends, place: Any) -> Any:
    """Start copies between contiguous host memory and a device, after the running computation.

    Args:
        ends: pairs of ``paddle.Tensor`` of the same shape and dtype.
        place: place of the device.
    Returns:
        the event at the end of all copies, until which the tensors must live; None if the copies are done.
    """
    import paddle

    with paddle.no_grad():
        if not (place.is_gpu_place() or place.is_custom_place()):  # Other places have no streams.
            for source, target in ends:
                target.copy_(source, True)
            return None
        stream = side_stream(place)
        # The computation may still be writing to either end.
        stream.wait_stream(current_stream(place))
        with paddle.device.stream_guard(stream):
            for source, target in ends:
                target.copy_(source, False)
            return stream.record_event()


def _stream_place(place: Any) -> Any:
    """Convert a tensor's place, which has the base class, to the class that Paddle requires for streams."""
    import paddle

    if place.is_custom_place():
        return paddle.CustomPlace(place.custom_device_type(), place.custom_device_id())
    return paddle.CUDAPlace(place.gpu_device_id())


_MAX_PIECE_BYTES = 16 * 1024 * 1024
_POLL_SECONDS = 0.0005
_QUIET_SECONDS = 60.0
_PIECES_IN_USE = 3
"""Pieces of a save with a buffer at a time: one is written; its successor and the next tensor's first are copied."""


class StagingBuffer(msgspec.Struct, frozen=True, eq=False):
    """Host memory for one copy at a time.

    Args:
        owner: the ``paddle.Tensor`` that owns the memory.
        bytes: the memory as an array.
    """

    owner: Any
    bytes: np.ndarray[Any, Any]

    def begin_copy_to(self, target: Any) -> DeviceCopy:
        """Start to copy the full buffer to a flat device tensor of equally many bytes."""
        return DeviceCopy([(_host_tensor(self.bytes), target)], target.place)


class StagingPool:
    """The staging buffers of one device; thread-safe.

    Args:
        pinned: whether buffers are page-locked.

    Attributes:
        capacity: maximum bytes of all buffers. A buffer beyond it is allocated if necessary, but not kept.
        allocated: bytes of all buffers.
        peak: maximum of ``allocated``.
        allocations: number of buffers that were allocated.
    """

    def __init__(self, pinned: bool) -> None:
        self.capacity = self.allocated = self.peak = self.allocations = 0
        self._pinned = pinned
        self._idle: list[StagingBuffer] = []
        self._lock = threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """Size of the pieces in which tensors are saved."""
        return max(1, min(_MAX_PIECE_BYTES, self.capacity // _PIECES_IN_USE))

    def limit(self, capacity: int) -> None:
        """Set the capacity, and release idle buffers beyond it."""
        with self._lock:
            self.capacity = max(capacity, 0)
            self._release(self.capacity)

    def take(self, size: int) -> StagingBuffer:
        """Return an unused buffer of this size, idle or new."""
        with self._lock:
            for number, buffer in enumerate(self._idle):
                if buffer.bytes.size == size:
                    return self._idle.pop(number)
            self._release(self.capacity - size)
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            self.allocations += 1
        return new_buffer(size, self._pinned)

    def give(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool. All copies from it or to it must be done."""
        with self._lock:
            self._idle.append(buffer)
            self._release(self.capacity)

    def pieces(self, parts: Iterator[Any], dtype: np.dtype[Any]) -> Iterator[np.ndarray[Any, Any]]:
        """Return successive pieces of device tensors in host memory.

        The copy of the first piece starts at once, and the copy of every other piece before its predecessor is
        returned. A piece is valid until the next one is requested.

        Args:
            parts: the bytes of complete elements, as flat tensors of the device.
            dtype: dtype of the pieces.
        """
        pieces = _staged(parts, dtype, self)
        next(pieces, None)
        return pieces

    def _release(self, most: int) -> None:
        """Release idle buffers, oldest first, until all buffers have at most ``most`` bytes."""
        while self._idle and self.allocated > most:
            self.allocated -= self._idle.pop(0).bytes.size


def pool_of(place: Any, capacity: int) -> StagingPool:
    """Return the pool of a device, and set its capacity in bytes."""
    pool = _pool(str(place), has_pinned_memory(place))
    if pool.capacity != capacity:
        pool.limit(capacity)
    return pool


@lru_cache(maxsize=64)
def _pool(device: str, pinned: bool) -> StagingPool:
    return StagingPool(pinned)


def new_buffer(size: int, pinned: bool) -> StagingBuffer:
    """Allocate host memory outside of a pool.

    Args:
        size: number of bytes.
        pinned: whether it is page-locked.
    """
    import paddle

    # Pinning it afterwards, with Tensor.pin_memory(), would temporarily need twice the memory.
    owner = paddle.empty([size], dtype="uint8", device=paddle.CUDAPinnedPlace() if pinned else paddle.CPUPlace())
    return StagingBuffer(owner, np.ndarray(size, np.uint8, memory_at(owner.data_ptr(), size)))


class DeviceCopy:
    """Copies in progress between buffers and a device. It keeps both alive until the copies are done.

    Args:
        ends: pairs of source and target, flat tensors of equally many bytes.
        place: place of the device.
    """

    def __init__(self, ends: Ends, place: Any) -> None:
        self._ends: Ends | None = ends
        self._arrival = begin_copies(ends, place)
        _count(1, size=sum(int(target.shape[0]) for _, target in ends))

    def wait(self) -> None:
        """Wait until the copies are done; a second call returns at once."""
        if self._ends is None:
            return
        started = time.monotonic()
        # The event's synchronize() holds the interpreter lock, which would block all other threads.
        while self._arrival is not None and not self._arrival.query():
            if time.monotonic() - started > _QUIET_SECONDS:
                self._arrival.synchronize()  # After an error some devices never complete a query; this raises it.
                break
            time.sleep(_POLL_SECONDS)
        self._ends = self._arrival = None
        _count(-1, waited=time.monotonic() - started)


def begin_copies_to_host(ends: Ends) -> DeviceCopy:
    """Start to copy flat device tensors to host arrays of equally many bytes."""
    return DeviceCopy([(source, _host_tensor(memory)) for source, memory in ends], ends[0][0].place)


def _staged(parts: Iterator[Any], dtype: np.dtype[Any], pool: StagingPool) -> Iterator[np.ndarray[Any, Any]]:
    """Yield once after the first copy has started, and then the pieces."""
    size = max(pool.piece_bytes // dtype.itemsize, 1) * dtype.itemsize
    begun: list[tuple[StagingBuffer, DeviceCopy, np.ndarray[Any, Any]]] = []
    try:
        for source in _cut(parts, size):
            buffer = pool.take(size)
            memory = buffer.bytes[: int(source.shape[0])]
            begun.append((buffer, begin_copies_to_host([(source, memory)]), memory.view(dtype)))
            if len(begun) == 1:
                yield memory
                continue
            begun[0][1].wait()
            yield begun[0][2]
            pool.give(begun.pop(0)[0])
        for _, copy, numbers in begun:
            copy.wait()
            yield numbers
    finally:
        # Also if the caller stops early, because buffers are reused.
        for buffer, copy, _ in begun:
            copy.wait()
            pool.give(buffer)


def _cut(parts: Iterator[Any], size: int) -> Iterator[Any]:
    """Yield the parts in slices of at most the size of a buffer."""
    for part in parts:
        length = int(part.shape[0])
        for low in range(0, length, size):
            yield part._slice(low, min(low + size, length))


def _host_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor over bytes of a buffer. Slicing a host tensor would copy it while a device is current."""
    import paddle
    from paddle.base import core

    return core.eager.Tensor(value=array, place=paddle.CPUPlace(), zero_copy=True)


def bytes_of(tensor: Any) -> Any:
    """Return the bytes of a contiguous tensor of a device as a flat tensor over the same memory.

    Args:
        tensor: a ``paddle.Tensor`` that is not a slice, because Paddle miscounts the memory of a slice.
    Raises:
        EnvironmentMismatch: Paddle returned a copy instead of a view.
    """
    import paddle

    with paddle.no_grad():
        view = tensor.flatten().view(paddle.uint8)
    if view.data_ptr() != tensor.data_ptr():
        raise EnvironmentMismatch(
            "Paddle returned a copy of a tensor instead of a view.",
            evidence=[f"shape: {list(tensor.shape)}", f"dtype: {tensor.dtype}", f"place: {tensor.place}"],
            next_step="Unset FLAGS_use_stride_kernel, or set it to 1.",
        )
    return view


class TransferFigures(msgspec.Struct):
    """Statistics of the copies between host and devices during an operation.

    Attributes:
        bytes: bytes of the started copies.
        in_flight: maximum number of copies in progress.
        waited: seconds that the host waited for copies before it could use or reuse a buffer.
    """

    bytes: int = 0
    in_flight: int = 0
    waited: float = 0.0


_measured: list[TransferFigures] = []
"""The statistics of all measured operations; every copy is added to all of them."""
_under_way = 0
_measuring = threading.Lock()


def _count(begun: int, size: int = 0, waited: float = 0.0) -> None:
    """Add the start or the end of a copy to the statistics.

    Args:
        begun: 1 for a start, -1 for an end.
        size: bytes of a copy that starts.
        waited: seconds that the host has waited for copies.
    """
    global _under_way
    with _measuring:
        _under_way += begun
        for figures in _measured:
            figures.bytes += size
            figures.waited += waited
            figures.in_flight = max(figures.in_flight, _under_way)


@contextmanager
def measured_transfers() -> Iterator[TransferFigures]:
    """Context manager that measures the copies of all threads inside it, and yields their statistics."""
    figures = TransferFigures()
    with _measuring:
        _measured.append(figures)
    try:
        yield figures
    finally:
        with _measuring:
            _measured[:] = [one for one in _measured if one is not figures]
