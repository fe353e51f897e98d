"""What a tensor is made of, without names: one geometry for all tensors that are made alike.

The layers and experts of a model are made of their sources in a few ways. A :class:`Template` is one such way: boxes of
sources, which are counted and not named, and the boxes of a target that they are. Whatever follows from geometry alone
(the proof, the reverse, a composition, where bytes lie) is worked out once per stencil and not once per tensor.

Stencils are the same where they are the same object, so that looking one up does not depend on its size. Two equal
ones that were made apart cost time and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape, whole

NEW_AXIS = -1


class Boxed(Protocol):
    """A box of a source that is a box of a target, whatever the two are called."""

    @property
    def source(self) -> Any:
        """Which source it is."""

    @property
    def source_box(self) -> Box:
        """Global coordinates in the source."""

    @property
    def target_box(self) -> Box:
        """Global coordinates in the target."""

    @property
    def axes(self) -> tuple[int, ...]:
        """For every target axis the source axis that it reads, or -1."""

    @property
    def cast(self) -> str | None:
        """The dtype that the numbers are converted to, or None."""

    def boxed(self: _Boxed, source_box: Box, target_box: Box) -> _Boxed:
        """Return the same with other boxes."""


_Boxed = TypeVar("_Boxed", bound=Boxed)


@dataclass(frozen=True, slots=True)
class BoxLink:
    """One box of a source that is one box of a target.

    Args:
        source: which source, by its place among those of the target.
        source_box: global coordinates in the source.
        target_box: global coordinates in the target.
        axes: for every target axis the source axis that it reads, or -1 for a target axis of length one that the
            source does not have. A source axis that is not listed has length one.
        cast: the dtype that the numbers are converted to on the way, or None where their bits are kept.
    """

    source: int
    source_box: Box
    target_box: Box
    axes: tuple[int, ...]
    cast: str | None = None

    def boxed(self, source_box: Box, target_box: Box) -> BoxLink:
        """Return the same link of other boxes."""
        return BoxLink(self.source, source_box, target_box, self.axes, self.cast)


@dataclass(frozen=True, eq=False)
class Template:
    """How one tensor is made of others.

    Args:
        links: boxes of its sources, and which of its boxes they are.
    """

    links: tuple[BoxLink, ...]

    @cached_property
    def finder(self) -> BoxFinder:
        """Finds links by their target box."""
        return BoxFinder([link.target_box for link in self.links])

    @cached_property
    def by_source(self) -> dict[int, list[BoxLink]]:
        """The links that read each source."""
        groups: dict[int, list[BoxLink]] = {}
        for link in self.links:
            groups.setdefault(link.source, []).append(link)
        return groups


def identity(shape: Shape) -> Template:
    """Return the stencil of a tensor that is another one as it is."""
    box = whole(shape)
    return Template((BoxLink(0, box, box, tuple(range(len(shape)))),))


def inverted(parts: Sequence[tuple[Template, int]], cast: str | None) -> Template:
    """Return the other direction: how one source is made of the targets that read it.

    Args:
        parts: the stencil of every target that reads the source, and the source's place in it.
        cast: the source's dtype; what a link that casts is cast back to.
    """
    links: list[BoxLink] = []
    for place, (stencil, source) in enumerate(parts):
        for link in stencil.by_source.get(source, ()):
            back = [NEW_AXIS] * len(link.source_box.lo)
            for axis, source_axis in enumerate(link.axes):
                # Axes that the source does not have are for the proof to name, and it asks for the reverse.
                if 0 <= source_axis < len(back):
                    back[source_axis] = axis
            back_cast = None if link.cast is None else cast
            links.append(BoxLink(place, link.target_box, link.source_box, tuple(back), back_cast))
    return Template(tuple(links))


def composed(after: Template, before: Sequence[Template | None], places: Sequence[Sequence[int]]) -> Template:
    """Return a stencil whose sources are made by stencils themselves.

    Args:
        after: the last step.
        before: how each source of ``after`` is made; None for one that is not.
        places: for every source of each of ``before`` its place among the sources of the result.
    """
    links: list[BoxLink] = []
    for last in after.links:
        first = before[last.source]
        if first is None:
            continue
        for index in first.finder.near(last.source_box):
            link = first.links[index]
            middle = link.target_box.intersect(last.source_box)
            if middle is None:
                continue
            links.append(
                BoxLink(
                    places[last.source][link.source],
                    pulled(link, middle),
                    pushed(last, middle),
                    _joined(link, last),
                    last.cast or link.cast,
                )
            )
    return Template(tuple(coalesced(links)))


def _joined(link: BoxLink, last: BoxLink) -> tuple[int, ...]:
    """Return the axes of one link followed by another.

    An axis that vanishes on the way and one that appears have length one both, so that they may be the same: that of
    the experts in two stacks. Then experts that follow one another in both are one box.
    """
    axes = [NEW_AXIS if axis == NEW_AXIS else link.axes[axis] for axis in last.axes]
    left = [axis for axis in range(len(link.source_box.lo)) if axis not in axes]
    return tuple([left.pop(0) if axis == NEW_AXIS and left else axis for axis in axes])


def pulled(link: Boxed, part: Box) -> Box:
    """Return the source box of ``part``, a box inside the target box of ``link``."""
    return _carried(part, link.target_box, link.source_box, enumerate(link.axes))


def pushed(link: Boxed, part: Box) -> Box:
    """Return the target box of ``part``, a box inside the source box of ``link``."""
    return _carried(part, link.source_box, link.target_box, zip(link.axes, range(len(link.axes)), strict=True))


def _carried(part: Box, here: Box, there: Box, axes: Iterable[tuple[int, int]]) -> Box:
    """Return the location of ``part`` of one box in the other; an axis that only the other has is taken whole."""
    lo, hi = list(there.lo), list(there.hi)
    for axis, other in axes:
        if axis != NEW_AXIS and other != NEW_AXIS:
            shift = there.lo[other] - here.lo[axis]
            lo[other] = part.lo[axis] + shift
            hi[other] = part.hi[axis] + shift
    return Box(tuple(lo), tuple(hi))


def coalesced(items: Iterable[_Boxed]) -> list[_Boxed]:
    """Return the same boxes of one target, neighbours that continue each other on both sides made one.

    Without this, composing two equal fused layouts would read a tensor head by head; with it, as the one box it is.
    A box that grew may continue the one before it: parts become an expert, and experts the stack that they lie in.
    """
    merged: list[_Boxed] = []
    for item in sorted(items, key=lambda entry: (entry.source, entry.target_box.lo)):
        grown: _Boxed | None = item
        while grown is not None:
            item = grown
            grown = _continued(merged[-1], item) if merged else None
            if grown is not None:
                merged.pop()
        merged.append(item)
    return merged


def _continued(first: _Boxed, second: _Boxed) -> _Boxed | None:
    if (first.source, first.axes, first.cast) != (second.source, second.axes, second.cast):
        return None
    one, two = first.target_box, second.target_box
    differing = [axis for axis in range(len(one.lo)) if (one.lo[axis], one.hi[axis]) != (two.lo[axis], two.hi[axis])]
    if len(differing) != 1 or one.hi[differing[0]] != two.lo[differing[0]]:
        return None
    joint = first.boxed(Box(first.source_box.lo, second.source_box.hi), Box(one.lo, two.hi))
    consistent = pulled(joint, one) == first.source_box and pulled(joint, two) == second.source_box
    return joint if consistent else None


def pruned(stencil: Template) -> tuple[Template, tuple[int, ...]]:
    """Return the stencil without sources that it does not read, and the places that those it reads had before."""
    kept = tuple(sorted(stencil.by_source))
    if kept == tuple(range(len(kept))):
        return stencil, kept
    place = {old: new for new, old in enumerate(kept)}
    links = (BoxLink(place[one.source], one.source_box, one.target_box, one.axes, one.cast) for one in stencil.links)
    return Template(tuple(links)), kept


def stacked(parts: Sequence[tuple[Template, int]]) -> Template:
    """Return the stencil of a tensor that several fill a part of.

    Args:
        parts: each with the number of its sources; the sources of the result are theirs, one behind the other.
    """
    links: list[BoxLink] = []
    start = 0
    for stencil, count in parts:
        links += [
            BoxLink(start + one.source, one.source_box, one.target_box, one.axes, one.cast) for one in stencil.links
        ]
        start += count
    return Template(tuple(links))
