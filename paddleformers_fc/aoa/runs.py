"""Components whose boxes differ on one axis only, as runs along this axis.

A *run* is a number of elements of a source and of a target, each with an offset. Layouts are found by comparing the
runs with those of interleaved parts, never by names.

Reduce a mapping to one layer of each kind, whose text with placeholders holds for all layers of the kind.

A *layer* is all tensors of both sides whose names have the same first number. Two layers are alike if they have the
same names apart from the number, shapes, dtypes, cuts and templates, and read tensors of their own layer only. The
reduced mapping has the first layer of each kind:

- a pattern matches a layer if and only if it matches the first layer of its kind, so that a statement with a
  placeholder expands to equal steps with other numbers;
- no step of one layer reads or writes a name of another, so that these steps give equal boxes with other numbers.

Text that is evaluated to the reduced mapping is therefore evaluated to the whole one, unless it contains the number of
a reduced layer (:meth:`ReducedMapping.holds_for_all`). Layers are not reduced if they exchange tensors with others,
have dropped or fresh tensors, or have numbers in another form than placeholders. Linear in the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd

from paddleformers_fc.aoa.components import Component
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.correspondences import TensorMapping, TensorSources
from paddleformers_fc.mapping.rules import interleave, parts_by_tensor


@dataclass(frozen=True)
class Hints:
    """Facts that boxes do not contain.

    Args:
        left: the number of shards of left tensors on each axis; others have one.
        right: the same for the right side.
        per_rank: tensors whose fused layout is per shard, even of a single one: ``fused_ffn`` or ``fused_qkv_old`` by
            name.
        heads: numbers of query heads and of kv heads, for layouts that are fused per rank.
    """

    left: Mapping[str, Shape] = field(default_factory=dict)
    right: Mapping[str, Shape] = field(default_factory=dict)
    per_rank: Mapping[str, str] = field(default_factory=dict)
    heads: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class AxisRun:
    """``length`` elements of a source, from ``source_at``, that are elements of a target, from ``target_at``."""

    source: str
    source_at: int
    target: str
    target_at: int
    length: int


@dataclass(frozen=True)
class AxisComponent:
    """A component along one axis.

    Args:
        component: the component.
        axis: the axis, the same for all its oriented tensors.
        runs: ordered by target and offset, merged if adjacent.
    """

    component: Component
    axis: int
    runs: tuple[AxisRun, ...]

    @property
    def is_move(self) -> bool:
        """Return whether one whole tensor becomes one whole tensor."""
        return len(self.runs) == len(self.component.sources) == len(self.component.targets) == 1

    @property
    def sources(self) -> dict[str, int]:
        """Length of every source along the axis, in the order in which they are first written."""
        order = dict.fromkeys(run.source for run in self.runs)
        return {name: self.component.sources[name][self.axis] for name in order}

    @property
    def targets(self) -> dict[str, int]:
        """Length of every target along the axis, in the order of the sources."""
        order = dict.fromkeys(run.target for run in sorted(self.runs, key=lambda run: (run.source, run.source_at)))
        return {name: self.component.targets[name][self.axis] for name in order}

    def unit(self, source: str) -> int:
        """Return the longest length that divides the offsets and lengths of all runs of a source."""
        places = [place for run in self.runs if run.source == source for place in (run.source_at, run.length)]
        return gcd(self.component.sources[source][self.axis], *places)

    def is_interleaving(self, parts: Shape, source_rounds: int, target_rounds: int) -> bool:
        """Return whether interleaving these parts in these groups gives the runs."""
        sources, targets = list(self.sources), list(self.targets)
        if not parts or any(not part or part % source_rounds or part % target_rounds for part in parts):
            return False
        sides = parts_by_tensor(len(sources), parts), parts_by_tensor(len(targets), parts)
        made = [
            AxisRun(sources[run.source], run.in_source, targets[run.target], run.in_target, run.length)
            for run in interleave(*sides, source_rounds, target_rounds)
        ]
        return _joined(made) == self.runs


def axis_component(component: Component) -> AxisComponent | None:
    """Return the component along the only axis on which its boxes do not span their tensors, or None."""
    spans = {
        axis
        for piece in component.pairs
        for box, shape in (
            (piece.source_box, component.sources[piece.source]),
            (piece.target_box, component.targets[piece.target]),
        )
        for axis, length in enumerate(shape)
        if box.lo[axis] or box.hi[axis] != length
    }
    if len(spans) != 1:
        return None
    (axis,) = spans
    runs = [
        AxisRun(
            piece.source,
            piece.source_box.lo[axis],
            piece.target,
            piece.target_box.lo[axis],
            piece.target_box.hi[axis] - piece.target_box.lo[axis],
        )
        for piece in component.pairs
    ]
    return AxisComponent(component, axis, _joined(runs))


def _joined(runs: list[AxisRun]) -> tuple[AxisRun, ...]:
    ordered = sorted(runs, key=lambda run: (run.target, run.target_at))
    joined = ordered[:1]
    for before, run in pairwise(ordered):
        continues = (run.source, run.target) == (before.source, before.target) and (
            run.source_at - before.source_at == run.target_at - before.target_at == before.length
        )
        if continues:
            last = joined[-1]
            joined[-1] = AxisRun(last.source, last.source_at, last.target, last.target_at, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


_FIRST = re.compile(r"\.([0-9]+|\$[A-Z_]+)")
_PLAIN = re.compile(r"0|[1-9][0-9]{0,17}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$]*")

Split = tuple[str, str, str]
"""The text before the number of the layer, the number, and the text after it. Names without a layer have the first."""


@dataclass(frozen=True)
class ReducedMapping:
    """A mapping with one layer of each kind.

    Args:
        mapping: the mapping.
        representatives: the numbers of layers that represent others.
    """

    mapping: TensorMapping
    representatives: frozenset[str]

    def holds_for_all(self, statements: Iterable[str]) -> bool:
        """Return whether the statements contain no number of a layer that represents others."""
        first = (_FIRST.search(name) for statement in statements for name in _NAME.findall(statement))
        return not any(found is not None and found.group(1) in self.representatives for found in first)


def reduce_layers(mapping: TensorMapping, hints: Hints) -> ReducedMapping | None:
    """Return the mapping with one layer of each kind, or None if all layers differ.

    Args:
        mapping: the whole mapping.
        hints: shards and layouts by name, on which the text depends as well.
    """
    split = {name: _split(name) for name in (*mapping.targets, *mapping.sources)}
    alone = _alone(mapping, split)
    facts: dict[str, list[object]] = {}
    for name, made in mapping.made.items():
        number = split[name][1]
        if number and number not in alone:
            facts.setdefault(number, []).append(_facts(name, made, mapping, hints, split))
    first: dict[tuple[object, ...], str] = {}
    representative_of = {number: first.setdefault(tuple(own), number) for number, own in facts.items()}
    absent = {number for number, other in representative_of.items() if number != other}
    if not absent:
        return None
    reduced = TensorMapping(
        {name: spec for name, spec in mapping.sources.items() if split[name][1] not in absent},
        {name: spec for name, spec in mapping.targets.items() if split[name][1] not in absent},
        {name: made for name, made in mapping.made.items() if split[name][1] not in absent},
        mapping.fresh,
        mapping.dropped,
    )
    return ReducedMapping(reduced, frozenset(representative_of[number] for number in absent))


def _split(name: str) -> Split:
    found = _FIRST.search(name)
    # The number needs a name after it: parts of `a.1` would be `a.1_0`, which is not a name of a layer.
    if found is None or name[found.end() : found.end() + 1] != "." or not _PLAIN.fullmatch(found.group(1)):
        return name, "", ""
    return name[: found.start(1)], found.group(1), name[found.end(1) :]


def _alone(mapping: TensorMapping, split: dict[str, Split]) -> set[str]:
    """Return the numbers of the layers that are not reduced."""
    alone: set[str] = set()
    read: set[str] = set()
    for name, made in mapping.made.items():
        numbers = {split[source][1] for source in made.names if source in split}
        if numbers != {split[name][1]}:
            alone |= numbers | {split[name][1]}
        read.update(made.names)
    # Fresh and dropped tensors are written by name.
    alone |= {split[name][1] for name in mapping.targets.keys() - mapping.made.keys()}
    alone |= {split[name][1] for name in mapping.sources.keys() - read}
    return alone


def _facts(name: str, made: TensorSources, mapping: TensorMapping, hints: Hints, split: dict[str, Split]) -> object:
    """Return all facts about a tensor and its sources, without the number of the layer."""
    sources = [
        (split[one][::2], mapping.sources.get(one), hints.left.get(one), hints.per_rank.get(one)) for one in made.names
    ]
    target = (split[name][::2], mapping.targets.get(name), hints.right.get(name), hints.per_rank.get(name))
    return target, made.template, tuple(sources)
