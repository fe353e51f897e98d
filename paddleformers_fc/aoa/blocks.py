"""A mapping taken apart into blocks: tensors that share boxes, directly or through others.

A block is what one statement, or a few, must say together. Its boxes are *oriented*: every source is seen with its axes
in the order of the targets, as the language sees it behind ``^T`` or a permutation; after that, source boxes and
target boxes have equal shapes. Linear in the correspondences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS, Correspondence, Mapping


class Inexpressible(Exception):
    """Something that the language has no statement for; the text says what."""


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """A box of a source that is a box of a target, both in the order of the target's axes."""

    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(frozen=True, slots=True)
class SourceView:
    """How a source is seen before anything else is said of it.

    Args:
        axes: for every axis as it is seen the axis that it is in the source.
        cast: dtypes of the source and of the result where the numbers are converted, or None.
    """

    axes: Shape
    cast: tuple[str, str] | None = None

    @property
    def straight(self) -> bool:
        """Whether the axes are in their own order."""
        return self.axes == tuple(range(len(self.axes)))

    @property
    def reversed(self) -> bool:
        """Whether ``^T`` says it."""
        return not self.straight and self.axes == tuple(reversed(range(len(self.axes))))


@dataclass(frozen=True)
class Block:
    """Sources and targets that share boxes.

    Args:
        sources: shape of every source as it is seen.
        targets: shape of every target.
        facings: how every source is seen.
        pieces: all boxes.
    """

    sources: dict[str, Shape]
    targets: dict[str, Shape]
    facings: dict[str, SourceView]
    pieces: tuple[BlockPiece, ...]

    @property
    def is_move(self) -> bool:
        """Whether one whole tensor becomes one whole tensor."""
        return len(self.pieces) == 1 and all(
            shape == self.pieces[0].target_box.shape for shape in (*self.sources.values(), *self.targets.values())
        )

    @property
    def names(self) -> str:
        """How reports name it."""
        return f"{', '.join(list(self.sources)[:3])} -> {', '.join(list(self.targets)[:3])}"


def components(mapping: Mapping) -> Iterator[list[Correspondence]]:
    """The correspondences of each block, in the order of the first target of each."""
    done: set[str] = set()
    for name in mapping.by_target:
        if name in done:
            continue
        done.add(name)
        waiting, sources, found = [name], set[str](), list[Correspondence]()
        while waiting:
            items = mapping.by_target[waiting.pop()]
            found += items
            for item in items:
                if item.source in sources:
                    continue
                sources.add(item.source)
                fellows = {fellow.target: None for fellow in mapping.by_source[item.source]}
                waiting += [fellow for fellow in fellows if fellow not in done]
                done.update(fellows)
        yield found


def oriented(items: list[Correspondence], mapping: Mapping) -> Block:
    """The block of one component.

    Raises:
        Inexpressible: where an axis appears or vanishes, or a source is seen in two ways.
    """
    facings: dict[str, SourceView] = {}
    pieces: list[BlockPiece] = []
    for item in items:
        rank = len(item.source_box.lo)
        if NEW_AXIS in item.axes or len(item.axes) != rank:
            raise Inexpressible(
                f"{item.target} has {len(item.axes)} axes and its source {item.source} {rank}: "
                "the language neither adds nor removes an axis"
            )
        cast = None if item.cast is None else (mapping.sources[item.source].dtype, item.cast)
        facing = SourceView(item.axes, cast)
        if facings.setdefault(item.source, facing) != facing:
            raise Inexpressible(f"{item.source} is read in two orders of its axes, or in two dtypes")
        pieces.append(BlockPiece(item.source, _turned(item.source_box, item.axes), item.target, item.target_box))
    shapes = {name: mapping.sources[name].shape for name in facings}
    return Block(
        {name: tuple(shapes[name][axis] for axis in facing.axes) for name, facing in facings.items()},
        {name: mapping.targets[name].shape for name in dict.fromkeys(item.target for item in items)},
        facings,
        tuple(pieces),
    )


def _turned(box: Box, axes: Shape) -> Box:
    return Box(tuple(box.lo[axis] for axis in axes), tuple(box.hi[axis] for axis in axes))
