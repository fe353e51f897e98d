"""Copy live tensors to a reused buffer in host memory, for an asynchronous save.

Writing to new memory is 20 times slower than to touched memory, because every page is faulted in. The buffer is
therefore allocated once, with its pages, and reused by every snapshot. It is page-locked if Paddle supports that for
the device.

:meth:`SnapshotBuffer.begin` runs on the training thread and starts the copies from a device: Paddle's current stream is
process-wide, so another thread would move training kernels to the copy stream. :meth:`SnapshotCopy.finish` runs on the
save's thread and copies host memory with two more threads.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.execute.memory import HostPieces, HostTensors, copy_ends, copy_to_host, dtype_of
from paddleformers_fc.execute.replicas import ElementRange, ElementRanges, TensorKey, hashed_range
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.staging_pool import begin_copies_to_host, has_pinned_memory, in_host_memory, new_buffer
from paddleformers_fc.layout.live import Roles
from paddleformers_fc.plan.items import rows_around

_PIECE_BYTES = 16 << 20
_THREADS = 2
"""Threads that copy host memory; one thread does not reach the memory bandwidth."""

_ALIGNMENT = 64
"""Alignment of copied tensors in bytes, so that any dtype can be viewed."""


class SnapshotBuffer:
    """Host memory for one snapshot at a time.

    Attributes:
        capacity: bytes of host memory.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._memory = np.empty(0, np.uint8)
        self._owner: Any = None

    def reserve(self, tensors: Roles, ranges: ElementRanges) -> bool:
        """Ensure that a snapshot fits, and return whether memory was allocated. No earlier snapshot may be in use."""
        needed = snapshot_bytes(tensors, ranges)
        if needed <= self.capacity:
            return False
        # The old memory is released first, because both together may not fit.
        self.capacity, self._memory, self._owner = 0, np.empty(0, np.uint8), None
        pinned = any(has_pinned_memory(tensors[role][name].local_tensor.place) for role, name in ranges)
        if pinned:
            self._owner = new_buffer(needed, pinned)
            self._memory = self._owner.bytes
        else:
            self._memory = _touched_bytes(needed)
        self.capacity = needed
        return True

    def begin(self, tensors: Roles, ranges: ElementRanges) -> SnapshotCopy:
        """Assign memory to every range, and start the copies from devices. Must run on the training thread.

        Args:
            tensors: role -> name -> live weight.
            ranges: the ranges to copy; :meth:`reserve` has reserved their memory.
        """
        copying = SnapshotCopy({}, [])
        used = 0
        try:
            for (role, name), some in ranges.items():
                tensor = tensors[role][name].local_tensor
                for begin, end in some:
                    size = (end - begin) * dtype_of(tensor).itemsize
                    one = _Copied(tensor, begin, end, self._memory[used : used + size])
                    used += _aligned(size)
                    copying.ranges.setdefault(role, {}).setdefault(name, []).append(one)
                    if not in_host_memory(tensor.place):
                        ends = copy_ends(tensor, begin, end, one.memory)
                        copying.waits.extend(begin_copies_to_host([pair]).wait for pair in ends)
        except BaseException:
            copying.wait()  # The memory will be reused.
            raise
        return copying


class _Copied(msgspec.Struct, frozen=True):
    """A range of a live tensor, and the memory that it is copied to."""

    tensor: Any
    begin: int
    end: int
    memory: np.ndarray[Any, Any]

    def copies(self) -> Iterator[tuple[Any, int, int, np.ndarray[Any, Any]]]:
        """Yield the arguments of :func:`copy_to_host` for each piece."""
        width = dtype_of(self.tensor).itemsize
        for start in range(self.begin, self.end, _PIECE_BYTES // width):
            stop = min(start + _PIECE_BYTES // width, self.end)
            yield self.tensor, start, stop, self.memory[(start - self.begin) * width : (stop - self.begin) * width]


class SnapshotCopy(msgspec.Struct, frozen=True):
    """A snapshot that is being copied.

    Args:
        ranges: the ranges and their memory: role -> name -> ranges.
        waits: wait for the started copies from devices.
    """

    ranges: dict[str, dict[str, list[_Copied]]]
    waits: list[Callable[[], None]]

    def finish(self) -> HostTensors:
        """Copy tensors in host memory, and wait for copies from devices. Afterwards the live tensors may change."""
        ranges = [one for names in self.ranges.values() for some in names.values() for one in some]
        on_host = [piece for one in ranges if in_host_memory(one.tensor.place) for piece in one.copies()]
        try:
            with ThreadPoolExecutor(_THREADS, "flex-copy") as threads:
                for _ in threads.map(lambda piece: copy_to_host(*piece), on_host):
                    pass  # Raises the error of a piece.
        finally:
            self.wait()
        return {role: {name: _pieces(some) for name, some in names.items()} for role, names in self.ranges.items()}

    def wait(self) -> None:
        """Wait for the copies from devices."""
        for wait in self.waits:
            wait()


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
    """Allocate memory with all its pages."""
    populate: int = getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    return np.frombuffer(memory, np.uint8)


def _pieces(copied: list[_Copied]) -> HostPieces:
    """Return the copied ranges of a tensor as its host memory."""
    dtype = dtype_of(copied[0].tensor)
    begins = [one.begin for one in copied]

    def pieces(start: int, stop: int) -> Iterator[np.ndarray[Any, Any]]:
        one = copied[max(0, bisect_right(begins, start) - 1)]
        if not one.begin <= start <= stop <= one.end:
            raise IndexError(f"elements {start} to {stop} are not in the snapshot, which has {one.begin} to {one.end}")
        return iter((one.memory.view(dtype)[start - one.begin : stop - one.begin],))

    return pieces


def ranges_of(plan: SavePlan, step: int | None, replicas: str) -> ElementRanges:
    """Return the ranges of live tensors that one rank writes or hashes in a save.

    A snapshot copies exactly these ranges, so its memory is this rank's share of the checkpoint and not its complete
    state. Overlapping ranges are joined.

    Args:
        plan: the save plan of the rank.
        step: the step, which selects the part of a large replica to hash. None for an upper bound over all steps; the
            ranges may then overlap.
        replicas: as for :func:`.save_checkpoint`; with ``off`` no replica is hashed.
    """
    found: dict[TensorKey, list[ElementRange]] = {}
    for file in plan.files:
        for piece in file.pieces:
            found.setdefault((file.role, piece.name), []).append((piece.start, piece.stop))
    for side in plan.ties:
        low, high = rows_around(side.shape, side.part)
        found.setdefault((side.role, side.name), []).append((side.start + low, side.start + high))
    for one in plan.replicas if replicas != "off" else ():
        found.setdefault((one.role, one.shard.name), []).append(hashed_range(one, step))
    return {key: tuple(some if step is None else _joined(some)) for key, some in found.items()}


def _joined(some: list[ElementRange]) -> Iterator[ElementRange]:
    begin, end = min(some)
    for start, stop in sorted(some):
        if start > end:
            yield begin, end
            begin, end = start, stop
        end = max(end, stop)
    yield begin, end
