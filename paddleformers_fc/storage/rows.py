"""Rows: runs of bytes of one length, at equal distances in a file and at equal distances in memory.

A slice of the columns of a matrix is such rows. A range of the file may begin and end inside a row, so that a file that
is read in blocks fills each row from one block or from two.

Time and memory: a copy of the bytes of the range, and a scatter list of the rows to read. Rows that are adjacent in the
file are read by one system call; every other row takes a call of its own, about 2 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paddleformers_fc.storage.files import MOST_BUFFERS, OpenFile, memory_at, read_several


@dataclass(frozen=True)
class ScatterList:
    """Ranges of a file, each with an address in memory.

    Args:
        offsets: of each range in the file, in bytes, int64.
        addresses: target of each range, uint64; the memory is the caller's and must outlive the read.
        lengths: of each range, in bytes, int64; positive.
    """

    offsets: np.ndarray[Any, Any]
    addresses: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]

    @classmethod
    def alike(cls, offsets: np.ndarray[Any, Any], addresses: np.ndarray[Any, Any], length: int) -> ScatterList:
        """Return ranges of one length."""
        return cls(offsets, addresses, np.full(len(offsets), length, np.int64))

    def views(self) -> list[tuple[int, memoryview]]:
        """Return the offset and the memory of every range."""
        if not len(self.addresses):
            return []
        lows = self.addresses.astype(np.int64)
        highs, base = lows + self.lengths, int(lows.min())
        # Slices of one view are created several times as fast as views of their own.
        memory = memory_at(base, int(highs.max()) - base)
        places = zip(self.offsets.tolist(), (lows - base).tolist(), (highs - base).tolist(), strict=True)
        return [(offset, memory[low:high]) for offset, low, high in places]


def read_scattered(file: OpenFile, ranges: ScatterList) -> None:
    """Fill every range; those that are adjacent in the file are read together.

    Raises:
        Corrupt: the file ends before a range does.
        StorageError: the operating system refused.
    """
    views = ranges.views()
    gaps = np.flatnonzero(ranges.offsets[1:] - ranges.offsets[:-1] != ranges.lengths[:-1]) + 1
    firsts = sorted({*gaps.tolist(), *range(0, len(views), MOST_BUFFERS)})
    for first, end in pairwise([*firsts, len(views)]):
        read_several(file, views[first][0], [view for _, view in views[first:end]])


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a file, and where each goes in memory. All numbers are bytes.

    Args:
        owner: the object that owns the memory; this reference keeps it alive.
        offset: of the first row in the file.
        stride: from one row to the next in the file, ``length`` at least.
        address: of the first row in memory.
        pitch: from one row to the next in memory.
        length: of a row.
        count: number of rows, 1 at least.
    """

    owner: object
    offset: int
    stride: int
    address: int
    pitch: int
    length: int
    count: int

    @property
    def end(self) -> int:
        """Offset behind the last byte of the last row."""
        return self.offset + (self.count - 1) * self.stride + self.length

    def between(self, begin: int, end: int) -> ScatterList:
        """Return the parts of rows that lie in a range of the file.

        Args:
            begin: offset of the first byte of the range.
            end: offset behind its last byte.
        """
        first = max(0, (begin - self.offset) // self.stride)
        last = min(self.count, -(-(end - self.offset) // self.stride))
        numbers = np.arange(first, max(first, last), dtype=np.int64)
        starts = self.offset + numbers * self.stride
        lows = np.maximum(starts, begin)
        lengths = np.minimum(starts + self.length, end) - lows
        addresses = self.address + numbers * self.pitch + (lows - starts)
        found = lengths > 0
        return ScatterList(lows[found], addresses[found].astype(np.uint64), lengths[found])

    def fill(self, begin: int, memory: memoryview) -> None:
        """Copy the parts of rows that lie in a range of the file.

        Args:
            begin: offset of the first byte of the range.
            memory: the bytes of the range, flat.
        """
        end = begin + memory.nbytes
        first = max(0, -(-(begin - self.offset) // self.stride))
        last = min(self.count, (end - self.length - self.offset) // self.stride + 1)
        if first < last:
            count = last - first
            start = self.offset + first * self.stride - begin
            target = memory_at(self.address + first * self.pitch, (count - 1) * self.pitch + self.length)
            np.copyto(
                np.ndarray((count, self.length), np.uint8, target, strides=(self.pitch, 1)),
                np.ndarray((count, self.length), np.uint8, memory, start, (self.stride, 1)),
            )
        # The rows that the range cuts; one row if the range is inside it.
        for row in {first - 1, last} - set(range(first, last)):
            start = self.offset + row * self.stride
            low, high = max(begin, start), min(end, start + self.length)
            if 0 <= row < self.count and low < high:
                address = self.address + row * self.pitch + low - start
                memory_at(address, high - low)[:] = memory[low - begin : high - begin]
