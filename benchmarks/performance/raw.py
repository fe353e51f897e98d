"""A raw copy of the bytes, as they are, to a file or by broadcasts: what everybody would have to do at least."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.performance.held import Done, Held
from benchmarks.performance.streamed import FIRST_TENSOR

_CHECKED_BYTES = 4 << 20


def save(directory: Path, held: Held) -> Done:
    """Write and sync one file."""
    descriptor = os.open(directory / f"{held.rank}.raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for array in held.memory:
            view = array.view(np.uint8).data
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Done()


def load(directory: Path, held: Held) -> Done:
    """Read this rank's file, one tensor after the other."""
    descriptor, position = os.open(directory / f"{held.rank}.raw", os.O_RDONLY), 0
    try:
        for array in held.memory:
            view = array.view(np.uint8).data
            while view:
                count = os.preadv(descriptor, [view], position)
                position, view = position + count, view[count:]
    finally:
        os.close(descriptor)
    return Done(position)


start = load


def verify(directory: Path, held: Held) -> Done:
    """Read every file, piece by piece into one buffer."""
    buffer = memoryview(bytearray(_CHECKED_BYTES))
    for path in sorted(directory.glob("*.raw")):
        descriptor, position = os.open(path, os.O_RDONLY), 0
        try:
            while count := os.preadv(descriptor, [buffer], position):
                position += count
        finally:
            os.close(descriptor)
    return Done()


def diff(directory: Path, held: Held) -> Done:
    """Read every file twice."""
    verify(directory, held)
    return verify(directory, held)


def stream(directory: Path, held: Held, is_checked: bool = False) -> Done:
    """Broadcast the shards of every rank in the order of the tensors' names, and assemble nothing."""
    import paddle
    import paddle.distributed as dist

    begun, ends = time.monotonic(), dict[str, float]()
    everyone: list[list[tuple[str, tuple[int, ...]]]] = []
    dist.all_gather_object(everyone, [(piece.name, piece.local_shape) for piece in held.pieces])
    own = {piece.name: weight.local_tensor for piece, weight in zip(held.pieces, held.tensors, strict=True)}
    shards = sorted((name, rank, shape) for rank, pieces in enumerate(everyone) for name, shape in pieces)
    for name, rank, shape in shards:
        dist.broadcast(own[name] if rank == held.rank else paddle.empty(shape, dtype="float32"), src=rank)
        ends[name] = time.monotonic() - begun
    return Done(phases={FIRST_TENSOR: min(ends.values())})
