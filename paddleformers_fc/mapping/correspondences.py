"""The denotation of every rule: box correspondences, and what follows from them.

A :class:`Correspondence` says that a box of one tensor *is* a box of another, up to a permutation of axes and a
declared cast. A :class:`Mapping` is a set of them between two spaces of named tensors. Reading the set the other way
is the reverse; joining two sets through a common space is the composition. Neither is ever written by hand.

Cost: reversing is linear in the correspondences; composing visits, per target correspondence, only the
correspondences of the one tensor that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape

NEW_AXIS = -1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its numbers.

    Args:
        shape: the global shape, in elements.
        dtype: the element type by its numpy name, such as ``bfloat16``.
    """

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Correspondence:
    """One box of a source tensor that is one box of a target tensor.

    Args:
        source: name of the source tensor.
        source_box: global coordinates in the source.
        target: name of the target tensor.
        target_box: global coordinates in the target.
        axes: for every target axis the source axis that it reads, or -1 for a target axis of length one that the
            source does not have. A source axis that is not listed has length one.
        cast: the dtype that the numbers are converted to on the way, or None where their bits are kept.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    axes: tuple[int, ...]
    cast: str | None = None

    def pull(self, part: Box) -> Box:
        """The source box of ``part``, a box inside ``target_box``."""
        lo, hi = list(self.source_box.lo), list(self.source_box.hi)
        for axis, source_axis in enumerate(self.axes):
            if source_axis != NEW_AXIS:
                shift = self.source_box.lo[source_axis] - self.target_box.lo[axis]
                lo[source_axis] = part.lo[axis] + shift
                hi[source_axis] = part.hi[axis] + shift
        return Box(tuple(lo), tuple(hi))

    def push(self, part: Box) -> Box:
        """The target box of ``part``, a box inside ``source_box``."""
        lo, hi = list(self.target_box.lo), list(self.target_box.hi)
        for axis, source_axis in enumerate(self.axes):
            if source_axis != NEW_AXIS:
                shift = self.target_box.lo[axis] - self.source_box.lo[source_axis]
                lo[axis] = part.lo[source_axis] + shift
                hi[axis] = part.hi[source_axis] + shift
        return Box(tuple(lo), tuple(hi))

    def reversed(self, cast: str | None) -> Correspondence:
        """The same boxes read the other way; ``cast`` is the dtype to convert back to, if any."""
        back = [NEW_AXIS] * len(self.source_box.lo)
        for axis, source_axis in enumerate(self.axes):
            if source_axis != NEW_AXIS:
                back[source_axis] = axis
        return Correspondence(self.target, self.target_box, self.source, self.source_box, tuple(back), cast)


@dataclass(frozen=True)
class Mapping:
    """Box correspondences from a source space onto a target space.

    Args:
        sources: every tensor of the source space.
        targets: every tensor of the target space.
        correspondences: which box of which source is which box of which target.
        fresh: targets that no source writes and that keep their initial values, by declaration.
        dropped: sources that nothing reads, by declaration.
    """

    sources: dict[str, TensorSpec]
    targets: dict[str, TensorSpec]
    correspondences: tuple[Correspondence, ...]
    fresh: frozenset[str] = field(default_factory=frozenset)
    dropped: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def by_target(self) -> dict[str, list[Correspondence]]:
        """The correspondences that write each target."""
        return _grouped(self.correspondences, lambda item: item.target)

    @cached_property
    def by_source(self) -> dict[str, list[Correspondence]]:
        """The correspondences that read each source."""
        return _grouped(self.correspondences, lambda item: item.source)

    def reversed(self) -> Mapping:
        """The mapping from the targets back onto the sources: the same boxes, the casts turned round."""
        return Mapping(
            sources=self.targets,
            targets=self.sources,
            correspondences=tuple(
                item.reversed(None if item.cast is None else self.sources[item.source].dtype)
                for item in self.correspondences
            ),
            fresh=self.dropped,
            dropped=self.fresh,
        )

    def then(self, after: Mapping) -> Mapping:
        """This mapping followed by ``after``, whose sources are this mapping's targets.

        Targets of ``after`` that read something this mapping does not write are left uncovered: :func:`prove` and the
        plan name them.
        """
        groups = _grouped(_joined(self.by_target, after.correspondences), lambda item: item.target)
        joined = tuple(item for items in groups.values() for item in coalesced(items))
        reached = {item.target for item in joined}
        return Mapping(
            sources=self.sources,
            targets=after.targets,
            correspondences=joined,
            fresh=after.fresh - reached,
            dropped=self.dropped | (frozenset(self.sources) - {item.source for item in joined} - self.fresh),
        )


def _grouped(items: Iterable[Correspondence], key: Callable[[Correspondence], str]) -> dict[str, list[Correspondence]]:
    groups: dict[str, list[Correspondence]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _joined(first: dict[str, list[Correspondence]], second: Iterable[Correspondence]) -> Iterable[Correspondence]:
    finders = {name: BoxFinder([item.target_box for item in items]) for name, items in first.items()}
    for after in second:
        if after.source not in first:
            continue
        items = first[after.source]
        for index in finders[after.source].near(after.source_box):
            before = items[index]
            middle = before.target_box.intersect(after.source_box)
            if middle is None:
                continue
            yield Correspondence(
                source=before.source,
                source_box=before.pull(middle),
                target=after.target,
                target_box=after.push(middle),
                axes=tuple(NEW_AXIS if axis == NEW_AXIS else before.axes[axis] for axis in after.axes),
                cast=after.cast or before.cast,
            )


def coalesced(items: Sequence[Correspondence]) -> list[Correspondence]:
    """The same correspondences of one target, neighbours that continue each other on both sides made one.

    Without this, composing two equal fused layouts would read a tensor head by head; with it, as the one box it is.
    """
    merged: list[Correspondence] = []
    for item in sorted(items, key=lambda entry: (entry.source, entry.target_box.lo)):
        joint = _continued(merged[-1], item) if merged else None
        if joint is None:
            merged.append(item)
        else:
            merged[-1] = joint
    return merged


def _continued(first: Correspondence, second: Correspondence) -> Correspondence | None:
    if (first.source, first.axes, first.cast) != (second.source, second.axes, second.cast):
        return None
    one, two = first.target_box, second.target_box
    differing = [axis for axis in range(len(one.lo)) if (one.lo[axis], one.hi[axis]) != (two.lo[axis], two.hi[axis])]
    if len(differing) != 1 or one.hi[differing[0]] != two.lo[differing[0]]:
        return None
    whole_target = Box(one.lo, two.hi)
    candidate = Correspondence(
        first.source,
        Box(first.source_box.lo, second.source_box.hi),
        first.target,
        whole_target,
        first.axes,
        first.cast,
    )
    consistent = candidate.pull(one) == first.source_box and candidate.pull(two) == second.source_box
    return candidate if consistent else None
