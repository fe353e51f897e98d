"""The data of a plan: every byte range that one rank reads, and its target.

A large model has a hundred thousand items per rank, so items are structs that share equal boxes.
"""

from __future__ import annotations

import math

import msgspec

from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.operations import row_major


class StoredPart(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A box inside a stored, row-major box.

    Args:
        file: path relative to the catalog's root.
        begin: byte offset of the stored box's first element.
        shape: shape of the stored box, in elements.
        part: the region, in coordinates of the stored box.
        dtype: numpy name of the dtype.
    """

    file: str
    begin: int
    shape: Shape
    part: Box
    dtype: str


class ReadItem(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One stored box that fills one box of one target shard.

    Args:
        role: role of the target shard.
        name: full name of the target shard.
        stored: the region to read.
        start: index of the target fragment's first element in the shard's buffer.
        shape: shape of the target fragment.
        part: the region, in coordinates of the target fragment.
        axes: for every axis of the target region the stored axis it reads, or -1 for a new axis of length one.
    """

    role: str
    name: str
    stored: StoredPart
    start: int
    shape: Shape
    part: Box
    axes: tuple[int, ...]

    def target_strides(self, width: int) -> tuple[int, ...]:
        """Return the byte strides of the target region in the order of the stored axes.

        A stored axis that the target lacks has length one; its stride is 0.

        Args:
            width: bytes of an element of the target shard.
        """
        by_axis = dict(zip(self.axes, row_major(self.shape, width), strict=True))
        return tuple(by_axis.get(axis, 0) for axis in range(len(self.stored.shape)))


class EqualCheck(msgspec.Struct, frozen=True, array_like=True):
    """Two stored boxes that must be bitwise equal: copies of a tied tensor, or of one number."""

    name: str
    left: StoredPart
    right: StoredPart
    tied: bool = False


class LoadPlan(msgspec.Struct, frozen=True):
    """The plan of one rank.

    Args:
        items: the reads, ordered by file and offset.
        checks: stored boxes that must be equal before anything is loaded.
        touched: stored names that this rank reads, by role.
        report: the mismatches.
    """

    items: tuple[ReadItem, ...]
    checks: tuple[EqualCheck, ...]
    touched: dict[str, frozenset[str]]
    report: Report


def is_contiguous(shape: Shape, part: Box) -> bool:
    """Return whether the elements of a box follow one another in a row-major tensor."""
    inside = False
    for length, low, high in zip(shape, part.lo, part.hi, strict=True):
        if inside and high - low != length:
            return False
        inside = inside or high - low > 1
    return True


def row_axis(shape: Shape) -> int:
    """Return the first axis that is longer than one, or the last axis.

    The elements between two cuts along it follow one another.
    """
    return next((axis for axis, length in enumerate(shape) if length > 1), max(len(shape) - 1, 0))


def rows_around(shape: Shape, box: Box) -> tuple[int, int]:
    """Return the range of elements of the rows that contain a box of a row-major shape."""
    if not shape:
        return 0, 1
    axis = row_axis(shape)
    row = math.prod(shape[axis + 1 :])
    return box.lo[axis] * row, box.hi[axis] * row
