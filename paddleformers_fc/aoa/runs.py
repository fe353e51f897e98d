"""Components whose boxes differ on one axis only, as runs along this axis.

A *run* is a number of elements of a source and of a target, each with an offset. Layouts are found by comparing the
runs with those of interleaved parts, never by names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd

from paddleformers_fc.aoa.components import Component
from paddleformers_fc.mapping.boxes import Shape
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
