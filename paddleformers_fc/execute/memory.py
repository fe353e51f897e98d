"""Read and fill the memory of live tensors, without a copy if possible.

On a CPU a contiguous tensor is viewed as a numpy array at its address, so that bytes are read from a file directly into
the tensor. On an accelerator, or for a tensor that is not contiguous, a host array is filled and then copied to the
tensor; it is released after the copy. If the device has streams (:mod:`.device`), the copy runs beside the computation,
while the next shards are read; the host array is page-locked if Paddle supports that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.device import (
    current_stream,
    has_pinned_memory,
    has_streams,
    in_host_memory,
    side_stream,
)
from paddleformers_fc.execute.read_jobs import Key, Memory
from paddleformers_fc.execute.reading import Slot
from paddleformers_fc.layout.live import Roles
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors

_PIECE_BYTES = 16 * 1024 * 1024


def dtype_name(tensor: Any) -> str:
    """Return the numpy name of a tensor's dtype."""
    return _name_of(tensor.dtype)


@lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    return str(dtype).rsplit(".", maxsplit=1)[-1]


_dtypes: dict[int, tuple[Any, np.dtype[Any]]] = {}
"""The numpy dtypes of Paddle's dtypes, by identity, because hashing a Paddle dtype is slow. The values keep the Paddle
dtypes alive, so that identities stay valid."""


def _numpy_of(dtype: Any) -> np.dtype[Any]:
    known = _dtypes.get(id(dtype))
    if known is None:
        known = _dtypes[id(dtype)] = dtype, to_numpy(to_safetensors(_name_of(dtype)))
    return known[1]


def host_view(tensor: Any) -> np.ndarray[Any, Any] | None:
    """Return a flat, writable array over the tensor's own memory; None if no view is possible.

    Args:
        tensor: a ``paddle.Tensor``.
    """
    return _memory(tensor).array() if _has_view(tensor) else None


def _has_view(tensor: Any) -> bool:
    return bool(in_host_memory(tensor.place) and tensor.is_contiguous())


def _memory(tensor: Any) -> Memory:
    """Return the memory of a contiguous tensor that the host can address."""
    return Memory(tensor, tensor.data_ptr(), math.prod(tensor.shape), _numpy_of(tensor.dtype))


def _host_tensor(tensor: Any) -> Any:
    """Return a tensor of the same shape and dtype in host memory, page-locked if Paddle supports that."""
    import paddle

    staged = paddle.empty(tensor.shape, dtype=tensor.dtype, device=paddle.CPUPlace())
    return staged.pin_memory() if has_pinned_memory(tensor.place) else staged


def _begin_copy(source: Any, target: Any) -> Any:
    """Copy host memory into a contiguous tensor of a device that has streams.

    Returns:
        the event at the end of the copy; the source must live until then.
    """
    import paddle

    stream = side_stream(target.place)
    # The computation may still be writing to the target.
    stream.wait_stream(current_stream(target.place))
    with paddle.no_grad(), paddle.device.stream_guard(stream):
        target.copy_(source, False)
        return stream.record_event()


def _on_device_of(tensor: Any, source: Any) -> Any:
    """The source in the memory where the tensor is: Paddle crashes if it copies from the host into a strided tensor."""
    return source if in_host_memory(tensor.place) else source._copy_to(tensor.place, True)


def host_pieces(tensor: Any, start: int, stop: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a range of a tensor's elements as successive flat arrays in host memory.

    If the host can address the memory, that is one view. Otherwise pieces are copied one at a time.

    Args:
        tensor: a ``paddle.Tensor``.
        start: index of the first element, in row-major order; the first of a row where the tensor is not contiguous.
        stop: index behind the last.
    """
    view = host_view(tensor)
    if view is not None:
        yield view[start:stop]
        return
    dtype = to_numpy(to_safetensors(dtype_name(tensor)))
    rows = tensor.flatten() if tensor.is_contiguous() else _without_leading_ones(tensor)
    row = math.prod(int(n) for n in rows.shape[1:])
    step = max(1, _PIECE_BYTES // max(row * dtype.itemsize, 1))
    for low in range(start // row if row else 0, stop // row if row else 0, step):
        part = rows[low : min(low + step, stop // row)].contiguous().cpu().numpy()
        yield np.ascontiguousarray(part).reshape(-1).view(dtype)


HostPieces = Callable[[int, int], Iterator[np.ndarray[Any, Any]]]
"""Returns the elements of a tensor from one index to another, as :func:`host_pieces` does."""


def view_of(tensor: Any) -> HostPieces:
    """Return a view of a live tensor: copied to the host in pieces if the host cannot address it, and never as a whole.

    Args:
        tensor: a ``paddle.Tensor``, which must not change while the view is in use.
    """
    return partial(host_pieces, tensor)


def _without_leading_ones(tensor: Any) -> Any:
    """Return the tensor without its leading axes of length one; nothing is copied."""
    while len(tensor.shape) > 1 and int(tensor.shape[0]) == 1:
        tensor = tensor.squeeze(0)
    return tensor


class TensorSlot(msgspec.Struct, eq=False, gc=False):
    """The memory of one live tensor.

    A struct that the garbage collector does not track, because there is one per tensor. The address is looked up when a
    thread reads, while other threads are copying.

    Args:
        tensor: the ``paddle.Tensor`` to be filled.
        host_bytes: bytes of the array that stands in for the tensor; 0 where its own memory is filled.
    """

    tensor: Any
    host_bytes: int
    _staged: Any = None
    _arrival: Any = None

    def open(self) -> Memory:
        """Return the tensor's own memory, or that of a new host array."""
        if not self.host_bytes:
            return _memory(self.tensor)
        self._staged = _host_tensor(self.tensor)
        return _memory(self._staged)

    def close(self) -> None:
        """Begin to copy a host array into the tensor, which keeps its dtype, place and strides."""
        if self._staged is None:
            return
        if has_streams(self.tensor.place) and self.tensor.is_contiguous():
            self._arrival = _begin_copy(self._staged, self.tensor)
            return
        import paddle

        with paddle.no_grad():
            self.tensor.copy_(_on_device_of(self.tensor, self._staged), True)

    def settle(self) -> None:
        """Wait until the copy is done, and give the host array back."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self._arrival = self._staged = None


def slot_of(tensor: Any) -> TensorSlot:
    """The slot of a tensor that has memory."""
    return TensorSlot(tensor, 0 if _has_view(tensor) else math.prod(tensor.shape) * _numpy_of(tensor.dtype).itemsize)


def slots_of(roles: Roles) -> dict[Key, Slot]:
    """The slots of live weights: role -> name -> ``ShardedWeight``.

    Raises:
        MismatchError: tensors without memory, such as parameters released by sharding stage 3.
    """
    slots: dict[Key, Slot] = {}
    empty: list[str] = []
    for role, names in roles.items():
        for name, weight in names.items():
            tensor = weight.local_tensor
            if tensor._is_initialized():
                slots[role, name] = slot_of(tensor)
            else:
                empty.append(f"{role} {name}")
    if empty:
        raise MismatchError(
            f"{len(empty)} live tensors have no memory.",
            evidence=empty,
            next_step="Load after the model and optimizer have been built, before parameters are released.",
        )
    return slots
