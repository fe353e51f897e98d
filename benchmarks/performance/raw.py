"""A raw copy of the bytes, as they are: one file per rank, and what any reader would have to do at least."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from benchmarks.performance.held import Done, Held

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
