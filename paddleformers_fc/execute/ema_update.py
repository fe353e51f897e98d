"""Moving averages of tensors, in place in host memory.

An update is ``average += weight * (value - average)`` in float32. This form rounds once at the magnitude of the
average, where ``decay * average + weight * value`` rounds three times. Every element is computed alone, so the result
has the same bits whatever the blocks and the number of threads are. Increments below half a unit in the last place of
an element are lost, as in every average that is stored in float32.

Time: the passes of a block are made while it is in the processor's cache, so an update costs one pass over the memory:
two reads and a write per element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from paddleformers_fc.execute.memory import HostPieces

BLOCK_ELEMENTS = 1 << 18
"""Elements of one pass: its three arrays of 1 MiB stay in a cache, and the interpreter is needed a few thousand times
for a billion elements."""

THREADS = 2
"""Threads of an update; two come close to the bandwidth of the memory, and leave other cores to the training."""

_CHUNK_ELEMENTS = 1 << 24
"""Elements that a thread takes at a time, such as four pieces of a device's memory that are copied ahead."""

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class AveragedTensor:
    """One tensor and its average.

    Args:
        average: float32, one-dimensional and contiguous; changed in place.
        values: the tensor's elements as float32; see :data:`~paddleformers_fc.execute.memory.HostPieces`.
        first: index of the tensor's element that belongs to the first element of the average.
    """

    average: Array
    values: HostPieces
    first: int = 0


def update_averages(tensors: Iterable[AveragedTensor], weight: float, threads: int = THREADS) -> None:
    """Update averages in place.

    Args:
        tensors: the tensors, which must not change during the call, and their averages.
        weight: of the tensors, above 0 and at most 1. With 1 an average becomes a copy of the values.
        threads: number of threads.
    """
    chunks = list(chain.from_iterable(map(_chunks, tensors)))
    if threads == 1 or len(chunks) < 2:
        _run(chunks, weight)
        return
    remaining = iter(chunks)  # Elements are taken under the interpreter's lock.
    with ThreadPoolExecutor(threads, "flex-average") as pool:
        for done in [pool.submit(_run, remaining, weight) for _ in range(threads)]:
            done.result()


@dataclass(frozen=True)
class _Chunk:
    tensor: AveragedTensor
    start: int
    stop: int


def _chunks(tensor: AveragedTensor) -> Iterator[_Chunk]:
    size = tensor.average.size
    # Half a tensor for each of two threads, if it is not larger.
    step = min(_CHUNK_ELEMENTS, max(BLOCK_ELEMENTS, -(-size // 2)))
    return (_Chunk(tensor, start, min(start + step, size)) for start in range(0, size, step))


def _run(chunks: Iterable[_Chunk], weight: float) -> None:
    scratch = np.empty(BLOCK_ELEMENTS, np.float32)
    for chunk in chunks:
        begin = chunk.start
        for piece in chunk.tensor.values(chunk.tensor.first + chunk.start, chunk.tensor.first + chunk.stop):
            _update(chunk.tensor.average[begin : begin + piece.size], piece, np.float32(weight), scratch)
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
