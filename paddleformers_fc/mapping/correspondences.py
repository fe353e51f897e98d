"""Mappings between two sets of named tensors, with reverse and composition.

A :class:`TensorMapping` is a set of correspondences. Each :class:`Correspondence` says that a box of one tensor *is* a
box of another, up to a permutation of axes and a declared cast. The reverse reads the same set from target to source;
the composition joins two sets through their common tensors. A mapping stores the template and the source names of every
target, and creates single correspondences on demand.

Reverse and composition do one lookup per target, and geometry once per kind of tensor: linear in its boxes, up to the
bisection that finds overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec

from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.templates import NEW_AXIS, Correspondence, Template, coalesced, composed, inverted, pruned

__all__ = ["NEW_AXIS", "Correspondence", "TensorMapping", "TensorSources", "TensorSpec", "coalesced"]


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Shape and dtype of a tensor.

    Args:
        shape: the global shape, in elements.
        dtype: numpy name of the element type, such as ``bfloat16``.
    """

    shape: Shape
    dtype: str


class TensorSources(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The sources of one tensor.

    Args:
        template: the relation of boxes; tensors with the same relation share it.
        names: the source tensors, in the order in which the template counts them.
    """

    template: Template
    names: tuple[str, ...]


class TensorMapping(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Box correspondences from source tensors to target tensors.

    Args:
        sources: every source tensor.
        targets: every target tensor.
        made: the sources of every target that is written.
        fresh: targets that keep their initial values, by declaration.
        dropped: sources that no target reads, by declaration.
    """

    sources: dict[str, TensorSpec]
    targets: dict[str, TensorSpec]
    made: dict[str, TensorSources]
    fresh: frozenset[str] = msgspec.field(default_factory=frozenset)
    dropped: frozenset[str] = msgspec.field(default_factory=frozenset)

    @cached_property
    def correspondences(self) -> tuple[Correspondence, ...]:
        """Every correspondence, target by target."""
        return tuple(item for items in self.by_target.values() for item in items)

    @cached_property
    def by_target(self) -> dict[str, list[Correspondence]]:
        """The correspondences that write each target."""
        return {target: list(spelled(target, made)) for target, made in self.made.items()}

    @cached_property
    def read(self) -> dict[str, TensorSources]:
        """The targets of every source that is read."""
        # Target, template and place of every reader, flat: garbage collection takes longer with a tuple for each.
        groups: dict[str, list[Any]] = {}
        for target, made in self.made.items():
            for place, source in enumerate(made.names):
                groups.setdefault(source, []).extend((target, made.template, place))
        templates: dict[tuple[object, ...], Template] = {}
        read: dict[str, TensorSources] = {}
        for source, group in groups.items():
            spec = self.sources.get(source)
            dtype = None if spec is None else spec.dtype
            key = (dtype, *group[1::3], *group[2::3])
            if key not in templates:
                templates[key] = inverted(list(zip(group[1::3], group[2::3], strict=True)), dtype)
            read[source] = TensorSources(templates[key], tuple(group[::3]))
        return read

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """The names of the targets that read each source, in the order of the targets."""
        return {source: made.names for source, made in self.read.items()}

    def reversed(self) -> TensorMapping:
        """Return the mapping from the targets to the sources: the same boxes with inverted casts."""
        return TensorMapping(self.targets, self.sources, self.read, self.dropped, self.fresh)

    def then(self, after: TensorMapping) -> TensorMapping:
        """Return this mapping followed by ``after``, whose sources are this mapping's targets.

        Targets of ``after`` that read a tensor without sources here stay uncovered: :func:`prove` reports them.
        """
        composer, made = Composer(), dict[str, TensorSources]()
        for name, last in after.made.items():
            joint = composer.joint(last.template, [self.made.get(source) for source in last.names])
            if joint is not None:
                made[name] = joint
        reached = {name for joint in made.values() for name in joint.names}
        return TensorMapping(
            sources=self.sources,
            targets=after.targets,
            made=made,
            fresh=after.fresh - made.keys(),
            dropped=self.dropped | (frozenset(self.sources) - reached - self.fresh),
        )


class Composer:
    """Composes the sources of tensors, with geometry once per kind of composition."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Template, tuple[int, ...]]] = {}

    def joint(self, last: Template, first: Sequence[TensorSources | None]) -> TensorSources | None:
        """Return the sources of a tensor; None if nothing writes a part of it.

        Args:
            last: the relation of the tensor and its parts.
            first: the sources of every part; None for a part that nothing writes.
        """
        # Several parts may come from one tensor, such as fused queries and keys.
        index: dict[str, int] = {}
        places = tuple(
            [
                () if made is None else tuple([index.setdefault(name, len(index)) for name in made.names])
                for made in first
            ]
        )
        templates = tuple([None if made is None else made.template for made in first])
        key = (last, templates, places)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = pruned(composed(last, templates, places))
        template, kept = known
        if not kept:
            return None
        names = tuple(index)
        return TensorSources(template, names if len(kept) == len(names) else tuple([names[place] for place in kept]))


def spelled(target: str, made: TensorSources) -> Iterator[Correspondence]:
    """Yield the correspondences of a tensor."""
    for link in made.template.links:
        yield Correspondence(made.names[link.source], link.source_box, target, link.target_box, link.axes, link.cast)
