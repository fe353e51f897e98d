"""Templates: how a tensor consists of its sources, without names and shared by all tensors of a kind.

The layers and experts of a model are built in few ways. A :class:`Template` is one of them: boxes of numbered sources
and of a target. Results of geometry alone (proof, reverse, composition, byte positions) are computed once per template
instead of once per tensor.

Templates are compared by identity, so that lookups do not depend on their size. Equal templates that are separate
objects only cost time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TypeVar

import msgspec
from msgspec import structs

from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape, whole

NEW_AXIS = -1


class BoxLink(msgspec.Struct, frozen=True):
    """One box of a source that is one box of a target.

    Args:
        source: the position of the source in the list of the target's sources.
        source_box: global coordinates in the source.
        target_box: global coordinates in the target.
        axes: for every target axis the source axis that it reads, or -1 for a new target axis of length one. Source
            axes that are not listed have length one.
        cast: the dtype that values are converted to; None to keep the bits.
    """

    source: int
    source_box: Box
    target_box: Box
    axes: tuple[int, ...]
    cast: str | None = None


class Correspondence(msgspec.Struct, frozen=True):
    """One box of a source tensor that is one box of a target tensor.

    Args:
        source: name of the source tensor.
        source_box: global coordinates in the source.
        target: name of the target tensor.
        target_box: global coordinates in the target.
        axes: for every target axis the source axis that it reads, or -1 for a new target axis of length one. Source
            axes that are not listed have length one.
        cast: the dtype that values are converted to; None to keep the bits.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    axes: tuple[int, ...]
    cast: str | None = None


Boxed = TypeVar("Boxed", BoxLink, Correspondence)


class Template(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The relation of one tensor and its sources.

    Args:
        links: boxes of the sources and of the tensor.
    """

    links: tuple[BoxLink, ...]

    @property
    def keeps_positions(self) -> bool:
        """Return whether every element has the same position as in its source."""
        return all(
            link.source_box == link.target_box and link.axes == tuple(range(len(link.axes))) for link in self.links
        )

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


@lru_cache(maxsize=4096)
def identity(shape: Shape) -> Template:
    """Return the template of a tensor that is equal to its source; tensors of one shape share it."""
    box = whole(shape)
    return Template((BoxLink(0, box, box, tuple(range(len(shape)))),))


def inverted(parts: Sequence[tuple[Template, int]], cast: str | None) -> Template:
    """Return the reverse: how one source consists of the targets that read it.

    Args:
        parts: the template of every target that reads the source, and the position of the source in it.
        cast: the source's dtype, to which links with a cast are cast back.
    """
    links: list[BoxLink] = []
    for place, (template, source) in enumerate(parts):
        for link in template.by_source.get(source, ()):
            back = [NEW_AXIS] * len(link.source_box.lo)
            for axis, source_axis in enumerate(link.axes):
                # Skip invalid axes: the proof uses the reverse, and reports them.
                if 0 <= source_axis < len(back):
                    back[source_axis] = axis
            back_cast = None if link.cast is None else cast
            links.append(BoxLink(place, link.target_box, link.source_box, tuple(back), back_cast))
    return Template(tuple(links))


def composed(after: Template, before: Sequence[Template | None], places: Sequence[Sequence[int]]) -> Template:
    """Return the composition of a template and the templates of its sources.

    Args:
        after: the last step.
        before: the template of each source of ``after``, or None.
        places: for each template of ``before``, the positions of its sources in the result.
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

    A removed axis and a new axis both have length one, so they can be the same axis, such as the expert axis of two
    stacks. Experts that are consecutive in both stacks then form one box.
    """
    axes = [NEW_AXIS if axis == NEW_AXIS else link.axes[axis] for axis in last.axes]
    left = [axis for axis in range(len(link.source_box.lo)) if axis not in axes]
    return tuple([left.pop(0) if axis == NEW_AXIS and left else axis for axis in axes])


def pulled(link: BoxLink | Correspondence, part: Box) -> Box:
    """Return the source box of ``part``, a box inside the target box of ``link``."""
    return _carried(part, link.target_box, link.source_box, enumerate(link.axes))


def pushed(link: BoxLink | Correspondence, part: Box) -> Box:
    """Return the target box of ``part``, a box inside the source box of ``link``."""
    return _carried(part, link.source_box, link.target_box, zip(link.axes, range(len(link.axes)), strict=True))


def _carried(part: Box, here: Box, there: Box, axes: Iterable[tuple[int, int]]) -> Box:
    """Return the location in ``there`` of ``part``, a box inside ``here``. Axes without a counterpart stay complete."""
    lo, hi = list(there.lo), list(there.hi)
    for axis, other in axes:
        if axis != NEW_AXIS and other != NEW_AXIS:
            shift = there.lo[other] - here.lo[axis]
            lo[other] = part.lo[axis] + shift
            hi[other] = part.hi[axis] + shift
    return Box(tuple(lo), tuple(hi))


def coalesced(items: Iterable[Boxed]) -> list[Boxed]:
    """Merge boxes of one target that are adjacent on both sides.

    The composition of two equal fused layouts is then one box instead of one per head. A merged box can be adjacent to
    the preceding box: parts merge into an expert, and experts into their stack.
    """
    merged: list[Boxed] = []
    for item in sorted(items, key=lambda entry: (entry.source, entry.target_box.lo)):
        grown: Boxed | None = item
        while grown is not None:
            item = grown
            grown = _continued(merged[-1], item) if merged else None
            if grown is not None:
                merged.pop()
        merged.append(item)
    return merged


def _continued(first: Boxed, second: Boxed) -> Boxed | None:
    if (first.source, first.axes, first.cast) != (second.source, second.axes, second.cast):
        return None
    one, two = first.target_box, second.target_box
    differing = [axis for axis in range(len(one.lo)) if (one.lo[axis], one.hi[axis]) != (two.lo[axis], two.hi[axis])]
    if len(differing) != 1 or one.hi[differing[0]] != two.lo[differing[0]]:
        return None
    joint = structs.replace(
        first, source_box=Box(first.source_box.lo, second.source_box.hi), target_box=Box(one.lo, two.hi)
    )
    consistent = pulled(joint, one) == first.source_box and pulled(joint, two) == second.source_box
    return joint if consistent else None


def pruned(template: Template) -> tuple[Template, tuple[int, ...]]:
    """Return the template without unread sources, and the previous positions of the remaining sources."""
    kept = tuple(sorted(template.by_source))
    if kept == tuple(range(len(kept))):
        return template, kept
    place = {old: new for new, old in enumerate(kept)}
    return Template(tuple([structs.replace(link, source=place[link.source]) for link in template.links])), kept


def stack_templates(parts: Sequence[tuple[Template, int]]) -> Template:
    """Return the template of a tensor that several templates fill.

    Args:
        parts: templates, each with the number of its sources. The result has the sources of all, in order.
    """
    links: list[BoxLink] = []
    start = 0
    for template, count in parts:
        links += [structs.replace(link, source=start + link.source) for link in template.links]
        start += count
    return Template(tuple(links))
