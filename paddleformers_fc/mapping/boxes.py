"""Boxes of integer coordinates, which shards, rules and ranges consist of.

A :class:`Box` is half open on every axis, ``lo <= x < hi``. A zero-dimensional box contains exactly one element.
:func:`cover_faults` checks whether boxes tile a tensor. It sorts along the first axis on which the boxes differ and
recurses into the slabs, so that n boxes of one interleaving take O(n log n) and no element is visited. Boxes that
overlap on every axis would take a power of n. They are refused when the work exceeds a bound far above any layout.
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
"""The most axes that a tensor can have: numpy's bound, above Paddle's."""

MAX_LENGTH = 2**63 - 1
"""The largest length of an axis."""

_WORK_PER_BOX = 256
_WORK_AT_LEAST = 4096
_MOST_FAULTS = 64


class Box(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A half-open box of integer coordinates.

    A struct and not a dataclass, because boxes are compared and hashed by the hundred thousand.

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
        """Return the common part, or None where the two share no element."""
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
        """Return the same box in coordinates counted from ``origin``."""
        return Box(
            tuple(a - o for a, o in zip(self.lo, origin, strict=True)),
            tuple(a - o for a, o in zip(self.hi, origin, strict=True)),
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"


def whole(shape: Shape) -> Box:
    """Return the box of a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def shifted(shape: Shape, offset: Shape) -> Box:
    """Return the box of a shard with this local shape at this global offset."""
    return Box(tuple(offset), tuple(o + s for o, s in zip(offset, shape, strict=True)))


def have_own_hashes(known: dict[int, object], keys: Iterable[object]) -> bool:
    """Return whether no key has the hash of a different one.

    A file can choose numbers so that shapes and boxes have one hash. A dict of such keys takes quadratic time.

    Args:
        known: the keys so far by their hash; the keys are added.
        keys: more keys.
    """
    return all(known.setdefault(hash(key), key) == key for key in keys)


class BoxFinder:
    """Finds the boxes of one tensor that may touch a given box.

    The boxes of one tensor nearly always form disjoint stretches of one axis, and those of one stretch form stretches
    of another axis, as the parts of stacked experts do. A bisection per axis then finds the candidates. Boxes without
    this order are all returned, and the caller intersects them.

    Args:
        boxes: boxes of equal rank, in any order.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._root = _branch(list(range(len(boxes))), boxes)

    def near(self, box: Box) -> Sequence[int]:
        """Return the indices of boxes that may share an element with ``box``: a superset of those that do."""
        if isinstance(self._root, list):
            return self._root
        found: list[int] = []
        _search(self._root, box, found)
        return found


class _Branch(msgspec.Struct, frozen=True):
    """Disjoint stretches of one axis in order, and the boxes of each."""

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
        outer: the box to be tiled.
        boxes: boxes inside ``outer``, in any order. Boxes of no volume are ignored.
    Returns:
        gaps and overlaps, the first of each kind per slab. Elements of large faults and further faults are omitted.
    Raises:
        MappingError: the boxes overlap in too many ways for a check in bounded time.
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
    """Return whether the boxes are consecutive along one axis and fill ``outer``, as those of every rule."""
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
