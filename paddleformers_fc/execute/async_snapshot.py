"""Copies of live tensors in a kept block of host memory, for a save beside training.

New memory is 20 times as slow as memory that has been touched, because every page is faulted in. A buffer is therefore
allocated once, with its pages, and filled again by every snapshot. Its memory is page-locked if Paddle supports that
for the device.

Host memory is copied in pieces by every thread that calls :meth:`SnapshotCopy.help`, and by the training thread once it
would only wait. Copies from a device are begun by :meth:`SnapshotBuffer.begin`, which runs on the training thread.
Paddle's choice of a stream holds for the whole process, so another thread would move kernels of the training to the
stream of the copies.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddleformers_fc.execute.memory import HostPieces, HostTensors, begin_copies, copy_to_host, dtype_of
from paddleformers_fc.execute.replicas import ElementRange, ElementRanges
from paddleformers_fc.execute.staging_pool import DeviceCopy, has_pinned_memory, in_host_memory, page_locked_bytes
from paddleformers_fc.layout.live import Roles

_PIECE_BYTES = 16 << 20
"""Bytes of host memory that a thread copies at a time."""

_ALIGNMENT = 64
"""Bytes that the copies of tensors are aligned to, so that any dtype can be viewed."""


class SnapshotBuffer:
    """Host memory that one snapshot fills at a time.

    Attributes:
        capacity: bytes of host memory.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._memory = np.empty(0, np.uint8)
        self._owner: Any = None

    def reserve(self, tensors: Roles, ranges: ElementRanges) -> bool:
        """Return whether memory had to be allocated for a snapshot. No earlier snapshot may be in use."""
        needed = snapshot_bytes(tensors, ranges)
        if needed <= self.capacity:
            return False
        # Released first, because both together may be too much.
        self.capacity, self._memory, self._owner = 0, np.empty(0, np.uint8), None
        pinned = any(has_pinned_memory(tensors[role][name].local_tensor.place) for role, name in ranges)
        if pinned:
            self._owner = page_locked_bytes(needed)
            self._memory = self._owner.bytes
        else:
            self._memory = _touched_bytes(needed)
        self.capacity = needed
        return True

    def begin(self, tensors: Roles, ranges: ElementRanges) -> SnapshotCopy:
        """Assign memory to every range, and begin the copies from devices. On the training thread.

        Args:
            tensors: role -> name -> live weight.
            ranges: the ranges to copy of them; their memory is reserved.
        """
        copied: dict[str, dict[str, list[_Copied]]] = {}
        on_host: list[_HostPiece] = []
        transfers: list[DeviceCopy] = []
        used = 0
        try:
            for (role, name), some in ranges.items():
                tensor = tensors[role][name].local_tensor
                width, addressable = dtype_of(tensor).itemsize, in_host_memory(tensor.place)
                for begin, end in some:
                    size = (end - begin) * width
                    one = _Copied((begin, end), self._memory[used : used + size])
                    used += _aligned(size)
                    copied.setdefault(role, {}).setdefault(name, []).append(one)
                    if addressable:
                        on_host.extend(_host_pieces(tensor, width, one))
                    else:
                        transfers.extend(begin_copies(tensor, begin, end, one.memory))
        except BaseException:
            _wait_for(transfers)  # The memory is used again.
            raise
        return SnapshotCopy(tensors, copied, _HostCopies(on_host), transfers)


@dataclass(frozen=True)
class _Copied:
    """The memory of one range."""

    elements: ElementRange
    memory: np.ndarray[Any, Any]


@dataclass(frozen=True)
class _HostPiece:
    """A part of a range of host memory, with the memory for it."""

    tensor: Any
    one: _Copied

    def copy(self) -> None:
        copy_to_host(self.tensor, *self.one.elements, self.one.memory)


class _HostCopies:
    """Copies of host memory that several threads share.

    Attributes:
        pieces: their number.
    """

    def __init__(self, pieces: Sequence[_HostPiece]) -> None:
        self.pieces = len(pieces)
        self._pieces = deque(pieces)
        self._left = self.pieces
        self._errors: list[Exception] = []
        self._changed = threading.Condition()

    def help(self) -> None:
        """Copy pieces until none is left that no thread has begun."""
        while self._pieces:
            with suppress(IndexError):  # Another thread has taken the last one.
                self._copy(self._pieces.popleft())

    def finish(self) -> None:
        """Copy what is left, and wait for the other threads.

        Raises:
            Exception: that of the first piece that could not be copied.
        """
        self.help()
        with self._changed:
            self._changed.wait_for(lambda: not self._left)
        if self._errors:
            raise self._errors[0]

    def drop(self) -> None:
        """Leave out pieces that no thread has begun, and wait for the others."""
        dropped = 0
        while self._pieces:
            with suppress(IndexError):
                self._pieces.popleft()
                dropped += 1
        with self._changed:
            self._left -= dropped
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._left)

    def _copy(self, piece: _HostPiece) -> None:
        try:
            piece.copy()
        except Exception as error:  # Raised by the thread of the save.
            self._errors.append(error)
        with self._changed:
            self._left -= 1
            self._changed.notify_all()


@dataclass(frozen=True)
class SnapshotCopy:
    """A snapshot that is being copied.

    Args:
        tensors: the live tensors, role -> name -> weight.
        copied: where the ranges are copied to.
        on_host: copies of host memory.
        transfers: copies from devices that have begun.
    """

    tensors: Roles
    copied: Mapping[str, Mapping[str, list[_Copied]]]
    on_host: _HostCopies
    transfers: list[DeviceCopy]

    def help(self) -> None:
        """Copy host memory until no piece is left that no thread has begun; an error is raised by :meth:`finish`."""
        self.on_host.help()

    def finish(self) -> HostTensors:
        """Copy what is in host memory, and wait for devices. Afterwards the live tensors may change."""
        try:
            self.on_host.finish()
        finally:
            self.drop()
        return {
            role: {name: _pieces(self.tensors[role][name].local_tensor, some) for name, some in names.items()}
            for role, names in self.copied.items()
        }

    def drop(self) -> None:
        """Wait for copies that have begun, and leave out the others. Afterwards the memory may be used again."""
        self.on_host.drop()
        _wait_for(self.transfers)


def _wait_for(transfers: list[DeviceCopy]) -> None:
    for transfer in transfers:
        transfer.wait()


def _host_pieces(tensor: Any, width: int, one: _Copied) -> Iterator[_HostPiece]:
    """Yield the parts of a range that one thread copies at a time."""
    begin, end = one.elements
    most = _PIECE_BYTES // width
    for start in range(begin, end, most):
        stop = min(start + most, end)
        yield _HostPiece(tensor, _Copied((start, stop), one.memory[(start - begin) * width : (stop - begin) * width]))


def snapshot_bytes(tensors: Roles, ranges: ElementRanges) -> int:
    """Return the memory of a snapshot in bytes."""
    total = 0
    for (role, name), some in ranges.items():
        width = dtype_of(tensors[role][name].local_tensor).itemsize
        total += sum(_aligned((stop - start) * width) for start, stop in some)
    return total


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _touched_bytes(size: int) -> np.ndarray[Any, Any]:
    """Return memory whose pages exist already."""
    populate: int = getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    return np.frombuffer(memory, np.uint8)


def _pieces(tensor: Any, copied: list[_Copied]) -> HostPieces:
    """Return the copied ranges of a tensor as its host memory."""
    dtype = dtype_of(tensor)
    begins = [one.elements[0] for one in copied]

    def pieces(start: int, stop: int) -> Iterator[np.ndarray[Any, Any]]:
        one = copied[max(0, bisect_right(begins, start) - 1)]
        first, last = one.elements
        if not first <= start <= stop <= last:
            raise IndexError(f"elements {start} to {stop} are not in the snapshot, which has {first} to {last}")
        return iter((one.memory.view(dtype)[start - first : stop - first],))

    return pieces
