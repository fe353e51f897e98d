"""Cut components with a stack along one axis into slabs, each of which is a component."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paddleformers_fc.aoa.components import BoxPair, Component, Inexpressible, SourceView
from paddleformers_fc.mapping.boxes import Box, Shape


@dataclass(frozen=True)
class Slabs:
    """A stack and its slabs.

    Args:
        stack: the name of the tensor that contains the slabs.
        axis: the axis of the slabs.
        view: the orientation of a stack that is the source; None if it is the target.
        components: the slabs, in order; in each the stack is replaced by ``<stack>_<index>``.
    """

    stack: str
    axis: int
    view: SourceView | None
    components: tuple[Component, ...]


def slabs_of(component: Component) -> Slabs | None:
    """Return the stack of a component, or None.

    Raises:
        Inexpressible: a stacked source has slabs of several lengths.
    """
    for of_target in (len(component.targets) == 1, False):
        if of_target or len(component.sources) == 1:
            rank = len(next(iter(component.targets.values())))
            for axis in range(rank):
                groups = _groups(component.pairs, axis, of_target=of_target)
                if len(groups) > 1 and _apart(groups, of_target=of_target):
                    return _cut(component, axis, groups, of_target=of_target)
    return None


def _box(piece: BoxPair, of_target: bool) -> Box:
    return piece.target_box if of_target else piece.source_box


def _groups(pieces: Iterable[BoxPair], axis: int, *, of_target: bool) -> list[list[BoxPair]]:
    """Return groups of pieces whose boxes overlap along the axis."""
    groups: list[list[BoxPair]] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: _box(piece, of_target).lo[axis]):
        box = _box(piece, of_target)
        if groups and box.lo[axis] < end:
            groups[-1].append(piece)
        else:
            groups.append([piece])
        end = max(end, box.hi[axis])
    return groups


def _apart(groups: list[list[BoxPair]], *, of_target: bool) -> bool:
    """Return whether every tensor of the other side belongs to one slab."""
    names = [{_other(piece, of_target) for piece in group} for group in groups]
    return sum(map(len, names)) == len(set[str]().union(*names))


def _span(group: list[BoxPair], axis: int, *, of_target: bool) -> tuple[int, int]:
    boxes = [_box(piece, of_target) for piece in group]
    return min(box.lo[axis] for box in boxes), max(box.hi[axis] for box in boxes)


def _cut(component: Component, axis: int, groups: list[list[BoxPair]], *, of_target: bool) -> Slabs:
    side, others = component.targets, component.sources
    if not of_target:
        side, others = others, side
    ((stack, shape),) = side.items()
    components = []
    for index, group in enumerate(groups):
        begin, end = _span(group, axis, of_target=of_target)
        if not of_target and (end - begin) * len(groups) != shape[axis]:
            raise Inexpressible(f"{stack}: the language has equal splits only, and its slabs have several lengths")
        name = f"{stack}_{index}"
        slab = {name: _with(shape, axis, end - begin)}
        rest = {other: others[other] for other in (_other(piece, of_target) for piece in group)}
        if of_target:
            pairs = [replace(one, target=name, target_box=_moved(one.target_box, axis, -begin)) for one in group]
            views = {source: component.views[source] for source in rest}
            components.append(Component(rest, slab, views, tuple(pairs)))
        else:
            pairs = [replace(one, source=name, source_box=_moved(one.source_box, axis, -begin)) for one in group]
            views = {name: SourceView(tuple(range(len(shape))))}
            components.append(Component(slab, rest, views, tuple(pairs)))
    return Slabs(stack, axis, None if of_target else component.views[stack], tuple(components))


def _other(piece: BoxPair, of_target: bool) -> str:
    return piece.source if of_target else piece.target


def _moved(box: Box, axis: int, by: int) -> Box:
    return Box(_with(box.lo, axis, box.lo[axis] + by), _with(box.hi, axis, box.hi[axis] + by))


def _with(shape: Shape, axis: int, length: int) -> Shape:
    return (*shape[:axis], length, *shape[axis + 1 :])
