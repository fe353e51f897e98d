"""The data of a plan: every byte range that one rank reads, and its target.

A large model has a hundred thousand items per rank, so items are structs and share equal boxes.

Pairs of stored boxes of two checkpoints that contain the same elements of a tensor.

Two whole tensors are compared without their canonical form. The stored boxes of one side are intersected with those of
the other, and each common box is read in the stored order of the *left* side. Tensors that both sides store alike are
therefore never transposed.

Time: per pair of boxes that touch, which are found by bisection. Tensors that are stored alike share a result, which
the caller keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec

from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape, whole
from paddleformers_fc.mapping.correspondences import NEW_AXIS
from paddleformers_fc.plan.report import Report


class StoredPart(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A box inside a stored, row-major box.

    Args:
        file: path relative to the catalog's root.
        begin: byte offset of the stored box's first element.
        shape: shape of the stored box, in elements.
        part: the region, in coordinates of the stored box.
        dtype: element type by its numpy name.
    """

    file: str
    begin: int
    shape: Shape
    part: Box
    dtype: str


class ReadItem(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One stored box that fills one box of one wanted shard.

    Args:
        role: role of the wanted shard.
        name: full name of the wanted shard.
        stored: the region to read.
        start: index, in elements, of the wanted fragment in the shard's buffer.
        shape: shape of the wanted fragment.
        part: the region, in coordinates of the wanted fragment.
        axes: for every axis of the wanted region the stored axis it reads, or -1 for a new axis of length one.
    """

    role: str
    name: str
    stored: StoredPart
    start: int
    shape: Shape
    part: Box
    axes: tuple[int, ...]


class EqualCheck(msgspec.Struct, frozen=True, array_like=True):
    """Two stored boxes that must be equal bit by bit: copies of a tied tensor, or of one number."""

    name: str
    left: StoredPart
    right: StoredPart
    tied: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """The plan of one rank.

    Args:
        items: the reads, in the order of files and offsets.
        checks: stored boxes that must be equal before anything is loaded.
        touched: stored names that this rank reads, by role.
        report: the mismatches.
    """

    items: tuple[ReadItem, ...]
    checks: tuple[EqualCheck, ...]
    touched: dict[str, frozenset[str]]
    report: Report


class SideBox(msgspec.Struct, frozen=True, gc=False):
    """The part of a common box that one side stores.

    Args:
        item: the index of one of the tensor's read items.
        part: the region, in coordinates of the stored box.
        axes: for every axis of the common box the stored axis, or -1 for a new axis of length one.
    """

    item: int
    part: Box
    axes: tuple[int, ...]


class PairedBox(msgspec.Struct, frozen=True, gc=False):
    """A box of a tensor that both sides store.

    Args:
        shape: its lengths, in the order of the left side's stored axes.
        left: the box as the left side stores it.
        right: the box as the right side stores it.
    """

    shape: Shape
    left: SideBox
    right: SideBox

    @property
    def is_transposed(self) -> bool:
        """Return whether the two sides store its axes in different order."""
        return self.left.axes != self.right.axes

    def pieces(self, elements: int) -> Iterator[PairedBox]:
        """Yield the box as smaller ones of at most so many elements, in row-major order of the left side.

        Args:
            elements: at least 1. Pieces of a transposed box are about as high as wide, so that neither side is read in
                short runs.
        """
        lengths = _piece_shape(self.shape, self._growing_axes(), elements, self.is_transposed)
        for lows in product(*(range(0, n, step) for n, step in zip(self.shape, lengths, strict=True))):
            highs = tuple(min(low + step, n) for low, step, n in zip(lows, lengths, self.shape, strict=True))
            box = Box(tuple(lows), highs)
            yield PairedBox(box.shape, _narrowed(self.left, box), _narrowed(self.right, box))

    def _growing_axes(self) -> list[int]:
        """Return the axes, the fastest of the left side first, then the fastest of the right side."""
        last_first = sorted(range(len(self.shape)), key=lambda axis: -self.left.axes[axis])
        if not self.is_transposed:
            return last_first
        fast = max(range(len(self.shape)), key=lambda axis: (self.shape[axis] > 1, self.right.axes[axis]))
        return [*last_first[:1], *([fast] if fast != last_first[0] else []), *(a for a in last_first[1:] if a != fast)]


def _piece_shape(shape: Shape, axes: Sequence[int], elements: int, is_square: bool) -> list[int]:
    lengths = [1] * len(shape)
    room = elements
    for place, axis in enumerate(axes):
        most = math.isqrt(room) if is_square and place == 0 else room
        lengths[axis] = max(1, min(shape[axis], most))
        room //= lengths[axis]
    return lengths


def paired_boxes(left: Sequence[ReadItem], right: Sequence[ReadItem]) -> list[PairedBox]:
    """Return the boxes that two sides have in common; together they are the tensor.

    Args:
        left: the items that make the whole tensor on one side.
        right: the items that make the whole tensor on the other side.
    """
    finder = BoxFinder([item.part for item in right])
    found = []
    for number, one in enumerate(left):
        axes = one.axes
        order = [axis for axis in sorted(range(len(axes)), key=axes.__getitem__) if axes[axis] != NEW_AXIS]
        order += [axis for axis, stored in enumerate(axes) if stored == NEW_AXIS]
        for other in finder.near(one.part):
            common = one.part.intersect(right[other].part)
            if common is not None:
                shape = tuple(common.shape[axis] for axis in order)
                sides = (_side(number, one, common, order), _side(other, right[other], common, order))
                found.append(PairedBox(shape, *sides))
    return found


def _side(number: int, item: ReadItem, common: Box, order: Sequence[int]) -> SideBox:
    inside = common.relative_to(item.part.lo)
    box = Box(tuple(inside.lo[axis] for axis in order), tuple(inside.hi[axis] for axis in order))
    return _narrowed(SideBox(number, item.stored.part, tuple(item.axes[axis] for axis in order)), box)


def _narrowed(side: SideBox, box: Box) -> SideBox:
    """Return the stored part of a side in coordinates of the common box."""
    lo, hi = list(side.part.lo), list(side.part.hi)
    for axis, stored in enumerate(side.axes):
        if stored != NEW_AXIS:
            lo[stored], hi[stored] = side.part.lo[stored] + box.lo[axis], side.part.lo[stored] + box.hi[axis]
    return SideBox(side.item, Box(tuple(lo), tuple(hi)), side.axes)


def read_item(box: PairedBox, side: SideBox, item: ReadItem, name: str, start: int) -> ReadItem:
    """Return how one side's part of a common box is read into a buffer in the left side's order.

    Args:
        box: the common box.
        side: of it.
        item: the item of the whole tensor that ``side`` counts.
        name: of the buffer.
        start: where the box begins in the buffer, in elements.
    """
    stored = msgspec.structs.replace(item.stored, part=side.part)
    return ReadItem(item.role, name, stored, start, box.shape, whole(box.shape), side.axes)
