"""Boxes of integer coordinates, the building block of shards, rules and ranges.

A :class:`Box` is half open on every axis, ``lo <= x < hi``. A zero-dimensional box contains exactly one element.
:func:`cover_faults` checks whether boxes tile a tensor. It sorts along the first axis on which boxes differ and
recurses into the slabs: O(n log n) for n interleaved boxes, without visiting elements. Boxes that overlap on every axis
would take a power of n; beyond a bound far above any real layout, the check raises an error.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter, sub

import msgspec

from paddleformers_fc.errors import MappingError

Shape = tuple[int, ...]

MAX_AXES = 32
"""Maximum number of axes of a tensor: numpy's limit, which is above Paddle's."""

MAX_LENGTH = 2**63 - 1
"""Maximum length of an axis."""

_WORK_PER_BOX = 256
_WORK_AT_LEAST = 4096
_MOST_FAULTS = 64


class Box(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A half-open box of integer coordinates.

    Args:
        lo: the first coordinate on every axis.
        hi: one past the last coordinate on every axis.
    """

    lo: Shape
    hi: Shape

    @property
    def shape(self) -> Shape:
        """The length of every axis, in elements."""
        return tuple(map(sub, self.hi, self.lo))

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        for low, high in zip(lo, hi, strict=True):
            if low >= high:
                return None
        return Box(lo, hi)

    def contains(self, other: Box) -> bool:
        """Return whether every element of ``other`` is in this box."""
        return all(a <= b for a, b in zip(self.lo, other.lo, strict=True)) and all(
            a >= b for a, b in zip(self.hi, other.hi, strict=True)
        )

    def relative_to(self, origin: Shape) -> Box:
        """Return this box in coordinates relative to ``origin``."""
        return Box(
            tuple(a - o for a, o in zip(self.lo, origin, strict=True)),
            tuple(a - o for a, o in zip(self.hi, origin, strict=True)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"


def whole(shape: Shape) -> Box:
    """Return the box that covers a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def shifted(shape: Shape, offset: Shape) -> Box:
    """Return the box with this shape at this global offset."""
    return Box(tuple(offset), tuple(o + s for o, s in zip(offset, shape, strict=True)))


def have_own_hashes(known: dict[int, object], keys: Iterable[object]) -> bool:
    """Return whether the hash of every key differs from the hashes of all other keys.

    A hostile file can choose numbers so that many shapes or boxes have the same hash. A dict of such keys takes
    quadratic time.

    Args:
        known: the keys so far, by hash; ``keys`` are added.
        keys: more keys.
    """
    return all(known.setdefault(hash(key), key) == key for key in keys)


class BoxFinder:
    """Finds the boxes of one tensor that may intersect a given box.

    The boxes of a tensor nearly always form disjoint stretches of one axis, and the boxes of a stretch form stretches
    of another axis, such as the parts of stacked experts. One bisection per axis then finds the candidates. Without
    this order, all boxes are candidates.

    Args:
        boxes: boxes of equal rank, in any order.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._root = _branch(list(range(len(boxes))), boxes)

    def near(self, box: Box) -> Sequence[int]:
        """Return the indices of all boxes that intersect ``box``, and possibly of others."""
        if isinstance(self._root, list):
            return self._root
        found: list[int] = []
        _search(self._root, box, found)
        return found


class _Branch(msgspec.Struct, frozen=True):
    """Disjoint stretches of one axis, in order, and the boxes of each stretch."""

    axis: int
    los: list[int]
    his: list[int]
    children: list[_Branch | list[int]]


def _branch(indices: list[int], boxes: Sequence[Box]) -> _Branch | list[int]:
    if len(indices) < 2:
        return indices
    for axis in range(len(boxes[indices[0]].lo)):
        stretches: dict[tuple[int, int], list[int]] = {}
        for index in indices:
            box = boxes[index]
            stretches.setdefault((box.lo[axis], box.hi[axis]), []).append(index)
        ordered = sorted(stretches)
        if len(ordered) > 1 and all(one[1] <= other[0] for one, other in zip(ordered, ordered[1:], strict=False)):
            children = [_branch(stretches[stretch], boxes) for stretch in ordered]
            return _Branch(axis, [low for low, _ in ordered], [high for _, high in ordered], children)
    return indices


def _search(branch: _Branch, box: Box, found: list[int]) -> None:
    first = bisect.bisect_right(branch.his, box.lo[branch.axis])
    last = bisect.bisect_left(branch.los, box.hi[branch.axis])
    for child in branch.children[first:last]:
        if isinstance(child, list):
            found.extend(child)
        else:
            _search(child, box, found)


class CoverFault(msgspec.Struct, frozen=True):
    """A gap between boxes (``writers`` is empty) or an overlap (two indices)."""

    where: Box
    writers: tuple[int, ...]


def cover_faults(outer: Box, boxes: Sequence[Box]) -> list[CoverFault]:
    """Return the faults of a tiling of ``outer`` by ``boxes``; empty if every element is covered once.

    Args:
        outer: the box to tile.
        boxes: boxes inside ``outer``, in any order. Empty boxes are ignored.
    Returns:
        gaps and overlaps: the first of each per slab, and a limited number in total.
    Raises:
        MappingError: the boxes overlap in too many ways to check in bounded time.
    """
    if outer.volume == 0 or _is_row(outer, boxes):
        return []
    return _faults(outer, [(box, i) for i, box in enumerate(boxes) if box.volume], 0, _Work(len(boxes)))


class _Work:
    """The remaining work for one tensor."""

    def __init__(self, boxes: int) -> None:
        self._left = _WORK_AT_LEAST + _WORK_PER_BOX * boxes
        self._boxes = boxes

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise MappingError(
                f"The {self._boxes} boxes of a tensor overlap in more ways than in any layout.",
                next_step="Restore the damaged description of the tensor, or use another checkpoint.",
            )


def _is_row(outer: Box, boxes: Sequence[Box]) -> bool:
    """Return whether the boxes are consecutive along one axis and fill ``outer``; this is the usual case."""
    ordered = sorted(boxes, key=attrgetter("lo"))
    if not outer.lo:
        return len(ordered) == 1
    if not ordered or ordered[0].lo != outer.lo or ordered[-1].hi != outer.hi:
        return False
    axis = next((i for i, high in enumerate(outer.hi) if ordered[0].hi[i] != high), 0)
    at = outer.lo[axis]
    for box in ordered:
        low, high = box.lo, box.hi
        if low[axis] != at or low[:axis] != outer.lo[:axis] or low[axis + 1 :] != outer.lo[axis + 1 :]:
            return False
        if high[:axis] != outer.hi[:axis] or high[axis + 1 :] != outer.hi[axis + 1 :]:
            return False
        at = high[axis]
    return True


def _faults(outer: Box, boxes: list[tuple[Box, int]], axis: int, work: _Work) -> list[CoverFault]:
    if not boxes:
        return [CoverFault(outer, ())]
    while axis < len(outer.lo) and all(
        box.lo[axis] <= outer.lo[axis] and box.hi[axis] >= outer.hi[axis] for box, _ in boxes
    ):
        axis += 1
    if axis == len(outer.lo):
        return [CoverFault(outer, (boxes[0][1], boxes[1][1]))] if len(boxes) > 1 else []
    cuts = sorted(
        {outer.lo[axis], outer.hi[axis]} | {box.lo[axis] for box, _ in boxes} | {box.hi[axis] for box, _ in boxes}
    )
    cuts = [cut for cut in cuts if outer.lo[axis] <= cut <= outer.hi[axis]]
    starts = sorted(boxes, key=lambda pair: pair[0].lo[axis])
    faults: list[CoverFault] = []
    active: list[tuple[Box, int]] = []
    upcoming = 0
    for low, high in zip(cuts, cuts[1:], strict=False):
        active = [pair for pair in active if pair[0].hi[axis] > low]
        while upcoming < len(starts) and starts[upcoming][0].lo[axis] <= low:
            if starts[upcoming][0].hi[axis] > low:
                active.append(starts[upcoming])
            upcoming += 1
        work.spend(1 + len(active))
        slab = Box(outer.lo[:axis] + (low,) + outer.lo[axis + 1 :], outer.hi[:axis] + (high,) + outer.hi[axis + 1 :])
        faults.extend(_faults(slab, list(active), axis + 1, work))
        if len(faults) >= _MOST_FAULTS:
            return faults[:_MOST_FAULTS]
    return faults
