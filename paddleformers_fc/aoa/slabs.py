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
    for side in (len(component.targets) == 1, False):
        if side or len(component.sources) == 1:
            rank = len(next(iter(component.targets.values())))
            for axis in range(rank):
                groups = _groups(component.pairs, axis, of_target=side)
                if len(groups) > 1 and _apart(groups, of_target=side):
                    return _target_slabs(component, axis, groups) if side else _source_slabs(component, axis, groups)
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
    names = [{piece.source if of_target else piece.target for piece in group} for group in groups]
    return sum(map(len, names)) == len(set[str]().union(*names))


def _span(group: list[BoxPair], axis: int, *, of_target: bool) -> tuple[int, int]:
    boxes = [_box(piece, of_target) for piece in group]
    return min(box.lo[axis] for box in boxes), max(box.hi[axis] for box in boxes)


def _target_slabs(component: Component, axis: int, groups: list[list[BoxPair]]) -> Slabs:
    ((stack, shape),) = component.targets.items()
    components = []
    for index, group in enumerate(groups):
        begin, end = _span(group, axis, of_target=True)
        name = f"{stack}_{index}"
        sources = dict.fromkeys(piece.source for piece in group)
        pieces = [replace(piece, target=name, target_box=_moved(piece.target_box, axis, -begin)) for piece in group]
        components.append(
            Component(
                {source: component.sources[source] for source in sources},
                {name: _with(shape, axis, end - begin)},
                {source: component.views[source] for source in sources},
                tuple(pieces),
            )
        )
    return Slabs(stack, axis, None, tuple(components))


def _source_slabs(component: Component, axis: int, groups: list[list[BoxPair]]) -> Slabs:
    ((stack, shape),) = component.sources.items()
    view = SourceView(tuple(range(len(shape))))
    components = []
    for index, group in enumerate(groups):
        begin, end = _span(group, axis, of_target=False)
        if (end - begin) * len(groups) != shape[axis]:
            raise Inexpressible(f"{stack}: the language has equal splits only, and its slabs have several lengths")
        name = f"{stack}_{index}"
        targets = dict.fromkeys(piece.target for piece in group)
        pieces = [replace(piece, source=name, source_box=_moved(piece.source_box, axis, -begin)) for piece in group]
        components.append(
            Component(
                {name: _with(shape, axis, end - begin)},
                {target: component.targets[target] for target in targets},
                {name: view},
                tuple(pieces),
            )
        )
    return Slabs(stack, axis, component.views[stack], tuple(components))


def _moved(box: Box, axis: int, by: int) -> Box:
    return Box(_with(box.lo, axis, box.lo[axis] + by), _with(box.hi, axis, box.hi[axis] + by))


def _with(shape: Shape, axis: int, length: int) -> Shape:
    return (*shape[:axis], length, *shape[axis + 1 :])
