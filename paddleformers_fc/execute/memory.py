"""Read, fill and average the memory of live tensors, without a copy if possible.

A contiguous tensor in host memory is viewed as a numpy array, so that files are read directly into it. A tensor that is
not contiguous is filled through a host array. Tensors of an accelerator are copied through staging buffers
(:mod:`.staging_pool`), while the next shards are read or the previous piece is written.

Moving averages are updated in place as ``average += weight * (value - average)`` in float32, which rounds once at the
magnitude of the average. The result does not depend on blocks and threads. An update costs one pass over the memory,
because all steps of a block run while it is in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.reading import Key, Slot
from paddleformers_fc.execute.staging_pool import DeviceCopy, StagingPool, bytes_of, in_host_memory, pool_of
from paddleformers_fc.layout.live import Roles, dtype_name
from paddleformers_fc.storage.executor import DEFAULT_STAGING_MEMORY_BYTES
from paddleformers_fc.storage.operations import Memory, numpy_dtype

_PIECE_BYTES = 16 * 1024 * 1024
"""Size of the pieces in which noncontiguous tensors in host memory are copied."""


def dtype_of(tensor: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a tensor's elements."""
    return numpy_dtype(dtype_name(tensor))


def host_view(tensor: Any) -> np.ndarray[Any, Any] | None:
    """Return a flat, writable array that shares the tensor's memory; None if no view is possible.

    Args:
        tensor: a ``paddle.Tensor``.
    """
    return _memory(tensor).array() if _has_view(tensor) else None


def _has_view(tensor: Any) -> bool:
    return bool(in_host_memory(tensor.place) and tensor.is_contiguous())


def _memory(tensor: Any) -> Memory:
    """Return the memory of a contiguous tensor in host memory."""
    return Memory(tensor, tensor.data_ptr(), math.prod(tensor.shape), dtype_of(tensor))


def host_pieces(
    tensor: Any, start: int, stop: int, staging_bytes: int = DEFAULT_STAGING_MEMORY_BYTES
) -> Iterator[np.ndarray[Any, Any]]:
    """Return a range of a tensor's elements as successive flat arrays in host memory.

    For a contiguous tensor in host memory, this is one view. Otherwise the copy of the first piece starts at once, and
    the copy of each other piece before its predecessor is returned. A piece is valid until the next one is requested.

    Args:
        tensor: a ``paddle.Tensor``.
        start: row-major index of the first element; must begin a row if the tensor is not contiguous.
        stop: index after the last element.
        staging_bytes: maximum staging memory of the process.
    """
    view = host_view(tensor)
    if view is not None:
        return iter((view[start:stop],))
    dtype = dtype_of(tensor)
    if in_host_memory(tensor.place):
        parts = _rows_in_order(tensor, start, stop, _PIECE_BYTES // dtype.itemsize)
        return (part.cpu().numpy().reshape(-1).view(dtype) for part in parts)
    pool = pool_of(tensor.place, staging_bytes)
    return pool.pieces(_bytes_in_order(tensor, start, stop, dtype.itemsize, pool.piece_bytes), dtype)


def joined(pieces: Iterator[np.ndarray[Any, Any]], elements: int) -> np.ndarray[Any, Any]:
    """Return the pieces of :func:`host_pieces` as one array, which is valid until the iterator is advanced or released.

    One piece is returned as it is. Each of several is copied before the next one is requested, which reuses its memory.

    Args:
        pieces: at least one piece.
        elements: number of elements of all pieces.
    """
    first = next(pieces)
    if first.size == elements:
        return first
    return np.concatenate([first.copy(), *(piece.copy() for piece in pieces)])


HostPieces = Callable[[int, int], Iterator[np.ndarray[Any, Any]]]
"""Returns the elements of a tensor from one index to another, like :func:`host_pieces`."""

HostTensors = Mapping[str, Mapping[str, HostPieces]]
"""The host memory of tensors: role -> name -> pieces."""


def view_of(tensor: Any) -> HostPieces:
    """Return access to a live tensor, which is copied to the host only in pieces, and only if necessary.

    Args:
        tensor: a ``paddle.Tensor``, which must not change while the view is in use.
    """
    return partial(host_pieces, tensor)


def copy_to_host(tensor: Any, start: int, stop: int, memory: np.ndarray[Any, Any]) -> None:
    """Copy a range of a tensor's elements within host memory.

    Args:
        tensor: a ``paddle.Tensor``.
        start: as for :func:`host_pieces`.
        stop: as for :func:`host_pieces`.
        memory: the bytes to fill.
    """
    dtype, filled = dtype_of(tensor), 0
    target = memory.view(dtype)
    for part in host_pieces(tensor, start, stop):
        np.copyto(target[filled : filled + part.size], part)
        filled += part.size


def copy_ends(tensor: Any, start: int, stop: int, memory: np.ndarray[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a range of a device tensor, each with the host memory to copy it to.

    Args:
        tensor: a ``paddle.Tensor``.
        start: as for :func:`host_pieces`.
        stop: as for :func:`host_pieces`.
        memory: the bytes to fill, which must live until the copies are done.
    """
    filled = 0
    for part in _bytes_in_order(tensor, start, stop, dtype_of(tensor).itemsize, _PIECE_BYTES):
        size = int(part.shape[0])
        yield part, memory[filled : filled + size]
        filled += size


def _bytes_in_order(tensor: Any, start: int, stop: int, width: int, most: int) -> Iterator[Any]:
    """Yield the bytes of a range of a device tensor, in row-major order, as flat tensors of the device.

    Args:
        tensor: a ``paddle.Tensor``.
        start: index of the first element.
        stop: index after the last element.
        width: bytes of an element.
        most: maximum bytes of a noncontiguous tensor to copy at a time; at least one row.
    """
    if start == stop:
        return
    if tensor.is_contiguous():
        yield bytes_of(tensor)._slice(start * width, stop * width)
        return
    for part in _rows_in_order(tensor, start, stop, most // width):
        yield bytes_of(part)


def _rows_in_order(tensor: Any, start: int, stop: int, most: int) -> Iterator[Any]:
    """Yield contiguous copies of the rows of a tensor, at most ``most`` elements or one row at a time."""
    rows = tensor.detach()
    while len(rows.shape) > 1 and int(rows.shape[0]) == 1:
        rows = rows.squeeze(0)  # A view.
    row = math.prod(int(n) for n in rows.shape[1:])
    step, last = max(1, most // max(row, 1)), stop // row if row else 0
    for low in range(start // row if row else 0, last, step):
        yield rows[low : min(low + step, last)].contiguous()


class TensorSlot(msgspec.Struct, eq=False, gc=False):
    """The memory of one live tensor.

    The garbage collector does not track these structs, because there is one per tensor.

    Args:
        tensor: the ``paddle.Tensor`` to fill.
        host_bytes: bytes of the host array that is filled first; 0 if the tensor is filled in place.
        pool: the staging buffers of the tensor's device; None in host memory.
        begin: byte offset of the range to fill, of a contiguous tensor of a device.
    """

    tensor: Any
    host_bytes: int
    pool: StagingPool | None = None
    begin: int = 0
    _staged: Any = None
    _on_device: Any = None
    _transfer: DeviceCopy | None = None

    @property
    def elements(self) -> int:
        """Number of elements of a contiguous device tensor, which can be filled in pieces; 0 for any other tensor."""
        divisible = self.pool is not None and self.tensor.is_contiguous()
        return self.host_bytes // dtype_of(self.tensor).itemsize if divisible else 0

    def part(self, start: int, stop: int) -> TensorSlot:
        """Return the slot of a range of elements of a contiguous device tensor."""
        width = dtype_of(self.tensor).itemsize
        return TensorSlot(self.tensor, (stop - start) * width, self.pool, self.begin + start * width)

    def open(self) -> Memory:
        """Return the tensor's own memory, or a host array."""
        if not self.host_bytes:
            return _memory(self.tensor)
        if self.pool is None:
            import paddle

            self._staged = paddle.empty(self.tensor.shape, dtype=self.tensor.dtype, device=paddle.CPUPlace())
            return _memory(self._staged)
        self._staged = self.pool.take(self.host_bytes)
        dtype = dtype_of(self.tensor)
        return Memory(self._staged, self._staged.owner.data_ptr(), self.host_bytes // dtype.itemsize, dtype)

    def close(self) -> None:
        """Start to copy the host array into the tensor, which keeps its dtype, place and strides."""
        if self._staged is None:
            return
        import paddle

        if self.pool is None:
            with paddle.no_grad():
                self.tensor.copy_(self._staged, True)
            return
        target = self.tensor
        if not target.is_contiguous():  # Paddle crashes if it copies from the host into a strided tensor.
            target = self._on_device = paddle.empty(target.shape, dtype=target.dtype, device=target.place)
        part = bytes_of(target)._slice(self.begin, self.begin + self.host_bytes)
        self._transfer = self._staged.begin_copy_to(part)

    def finish_copy(self) -> None:
        """Wait until the copy is done, and release the host array."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None
        if self._on_device is not None:
            import paddle

            with paddle.no_grad():  # From contiguous to strided memory of the device.
                self.tensor.copy_(self._on_device, True)
            self._on_device = None
        if self.pool is not None and self._staged is not None:
            self.pool.give(self._staged)
        self._staged = None


def slot_of(tensor: Any, staging_bytes: int = DEFAULT_STAGING_MEMORY_BYTES) -> TensorSlot:
    """Return the slot of an initialized tensor.

    Args:
        tensor: a ``paddle.Tensor``.
        staging_bytes: maximum staging memory of the process.
    """
    if _has_view(tensor):
        return TensorSlot(tensor, 0)
    pool = None if in_host_memory(tensor.place) else pool_of(tensor.place, staging_bytes)
    return TensorSlot(tensor, math.prod(tensor.shape) * dtype_of(tensor).itemsize, pool)


def slots_of(roles: Roles, staging_bytes: int = DEFAULT_STAGING_MEMORY_BYTES) -> dict[Key, Slot]:
    """Return the slots of live weights.

    Args:
        roles: role -> name -> ``ShardedWeight``.
        staging_bytes: maximum staging memory of the process.
    Raises:
        MismatchError: tensors have no memory, such as parameters released by sharding stage 3.
    """
    slots: dict[Key, Slot] = {}
    empty: list[str] = []
    for role, names in roles.items():
        for name, weight in names.items():
            tensor = weight.local_tensor
            if tensor._is_initialized():
                slots[role, name] = slot_of(tensor, staging_bytes)
            else:
                empty.append(f"{role} {name}")
    if empty:
        raise MismatchError(
            f"{len(empty)} live tensors have no memory.",
            evidence=empty,
            next_step="Load after the model and optimizer are built, and before parameters are released.",
        )
    return slots


BLOCK_ELEMENTS = 1 << 18
"""Elements of a block: its three arrays of 1 MiB stay in a cache, and the overhead of the interpreter is small."""

THREADS = 2
"""Threads of an update; two nearly reach the memory bandwidth, and leave other cores to the training."""

_CHUNK_ELEMENTS = 1 << 24
"""Elements that a thread takes at a time: four pieces of a device's memory, so that copies run ahead."""

Array = np.ndarray[Any, np.dtype[np.float32]]


class AveragedTensor(msgspec.Struct, frozen=True):
    """One tensor and its average.

    Args:
        average: float32, one-dimensional and contiguous; changed in place.
        values: the tensor's elements as float32; see :data:`~paddleformers_fc.execute.memory.HostPieces`.
        first: index in the tensor of the average's first element.
    """

    average: Array
    values: HostPieces
    first: int = 0


_Chunk = tuple[AveragedTensor, int, int]
"""A part of a tensor: first and end index in its average."""


def update_averages(tensors: Iterable[AveragedTensor], weight: float) -> None:
    """Update averages in place.

    Args:
        tensors: the tensors, which must not change during the call, and their averages.
        weight: the weight of the new values, above 0 and at most 1. With 1 an average becomes a copy of the values.
    """
    # The threads share one iterator, which is safe because of the interpreter lock.
    chunks = iter(list(chain.from_iterable(map(_chunks, tensors))))
    with ThreadPoolExecutor(THREADS, "flex-average") as pool:
        for done in [pool.submit(_run, chunks, weight) for _ in range(THREADS)]:
            done.result()


def _chunks(tensor: AveragedTensor) -> Iterator[_Chunk]:
    size = tensor.average.size
    # Each of two threads gets half of a small tensor.
    step = min(_CHUNK_ELEMENTS, max(BLOCK_ELEMENTS, -(-size // 2)))
    return ((tensor, start, min(start + step, size)) for start in range(0, size, step))


def _run(chunks: Iterable[_Chunk], weight: float) -> None:
    scratch = np.empty(BLOCK_ELEMENTS, np.float32)
    for tensor, begin, stop in chunks:
        for piece in tensor.values(tensor.first + begin, tensor.first + stop):
            _update(tensor.average[begin : begin + piece.size], piece, np.float32(weight), scratch)
            begin += piece.size


def _update(average: Array, values: Array, weight: np.float32, scratch: Array) -> None:
    if weight == 1:
        np.copyto(average, values)
        return
    for start in range(0, average.size, BLOCK_ELEMENTS):
        block = average[start : start + BLOCK_ELEMENTS]
        change = scratch[: block.size]
        np.subtract(values[start : start + BLOCK_ELEMENTS], block, out=change)
        np.multiply(change, weight, out=change)
        np.add(block, change, out=block)
