"""Reading a box out of a stored, row-major box, straight into any strided array.

Where the box is one run of bytes and the target is contiguous and of the same dtype, the bytes go from the file into
the target with no copy. Otherwise they pass through a staging buffer of bounded size and one strided assignment, which
also transposes and casts. A box that is many short runs (columns) is read as one span when the span is at most
``max_over_read`` times the bytes needed, and run by run when it is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.storage.ranges import RangeReader

DEFAULT_STAGING_BYTES = 64 << 20
MAX_OVER_READ = 2.0


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside a stored, row-major box.

    Args:
        path: the file.
        begin: byte offset of the stored box's first element.
        shape: shape of the stored box, in elements.
        lo: first coordinate of the region in the stored box.
        size: lengths of the region.
        dtype: element type of the stored numbers.
    """

    path: Path
    begin: int
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    size: tuple[int, ...]
    dtype: np.dtype[Any]


def read_region(
    reader: RangeReader, region: Region, out: np.ndarray[Any, Any], staging_bytes: int = DEFAULT_STAGING_BYTES
) -> int:
    """Read a region into an array of the same shape; a different dtype is cast as numpy casts.

    Args:
        reader: where bytes come from.
        region: what to read.
        out: array of shape ``region.size``, with any strides.
        staging_bytes: upper bound of the buffer that non-contiguous reads pass through.
    Returns:
        bytes read from storage.
    Raises:
        Corrupt: the file ends before the region does.
        StorageError: the operating system refused the read.
    """
    if 0 in region.size:
        return 0
    strides = _strides(region.shape, region.dtype.itemsize)
    begin = region.begin + sum(low * stride for low, stride in zip(region.lo, strides, strict=True))
    return _read(reader, region, begin, strides, region.size, out, staging_bytes)


def _read(
    reader: RangeReader,
    region: Region,
    begin: int,
    strides: tuple[int, ...],
    size: tuple[int, ...],
    out: np.ndarray[Any, Any],
    staging_bytes: int,
) -> int:
    width = region.dtype.itemsize
    needed = math.prod(size) * width
    span = sum((n - 1) * stride for n, stride in zip(size, strides, strict=True)) + width
    if span == needed and out.dtype == region.dtype and out.flags.c_contiguous:
        reader.read_into(region.path, begin, out.reshape(-1).view(np.uint8))
        return needed
    if span <= staging_bytes and span <= needed * MAX_OVER_READ:
        staged = np.empty(span, np.uint8)
        reader.read_into(region.path, begin, staged)
        view: np.ndarray[Any, Any] = np.ndarray(size, region.dtype, buffer=staged, strides=strides)
        np.copyto(out, view, casting="unsafe")
        return span
    axis = next(index for index, length in enumerate(size) if length > 1)
    row_span = sum((n - 1) * s for n, s in zip(size[axis + 1 :], strides[axis + 1 :], strict=True)) + width
    rows = 1
    if strides[axis] * 1.0 <= row_span * MAX_OVER_READ:
        rows = max(1, (staging_bytes - row_span) // strides[axis] + 1)
    rows = min(rows, max(1, size[axis] // 2))
    total = 0
    for low in range(0, size[axis], rows):
        count = min(rows, size[axis] - low)
        part = (*size[:axis], count, *size[axis + 1 :])
        slot = out[(slice(None),) * axis + (slice(low, low + count),)]
        total += _read(reader, region, begin + low * strides[axis], strides, part, slot, staging_bytes)
    return total


def _strides(shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    strides: list[int] = []
    step = width
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))
