"""The connected components of a mapping, which are tensors that share boxes directly or through others, in order.

The boxes of a component are *oriented*: the axes of every source are in the order of the targets, as after ``^T`` or a
permutation of the language. Source boxes and target boxes then have equal shapes.

Statements are executed in order, and a name refers to its last assignment. A component that reads a left name precedes
the component that overwrites it. Components in a cycle, and those behind them, read copies that are made beforehand.
Linear in the correspondences.

Cut components with a stack along one axis into slabs, each of which is a component.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from paddleformers_fc.mapping.boxes import Box, Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS, Correspondence, TensorMapping


class Inexpressible(Exception):
    """A relation that no statement of the language expresses; the text describes it."""


@dataclass(frozen=True, slots=True)
class BoxPair:
    """A box of a source and the equal box of a target, both in the order of the target's axes."""

    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(frozen=True, slots=True)
class SourceView:
    """The orientation of a source in its component.

    Args:
        axes: for every oriented axis the axis of the source.
        cast: dtypes of the source and of the result where values are converted, or None.
    """

    axes: Shape
    cast: tuple[str, str] | None = None

    @property
    def straight(self) -> bool:
        """Return whether the axes are in their own order."""
        return self.axes == tuple(range(len(self.axes)))

    @property
    def reversed(self) -> bool:
        """Return whether ``^T`` expresses the orientation."""
        return not self.straight and self.axes == tuple(reversed(range(len(self.axes))))


@dataclass(frozen=True)
class Component:
    """Sources and targets that share boxes.

    Args:
        sources: oriented shape of every source.
        targets: shape of every target.
        views: orientation of every source.
        pairs: all boxes.
    """

    sources: dict[str, Shape]
    targets: dict[str, Shape]
    views: dict[str, SourceView]
    pairs: tuple[BoxPair, ...]

    @property
    def is_move(self) -> bool:
        """Return whether one whole tensor is one whole tensor."""
        return len(self.pairs) == 1 and all(
            shape == self.pairs[0].target_box.shape for shape in (*self.sources.values(), *self.targets.values())
        )

    @property
    def names(self) -> str:
        """The name in reports."""
        return f"{', '.join(list(self.sources)[:3])} -> {', '.join(list(self.targets)[:3])}"


def connected(mapping: TensorMapping) -> Iterator[list[Correspondence]]:
    """Yield the correspondences of each component, in the order of its first target."""
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


def oriented(items: list[Correspondence], mapping: TensorMapping) -> Component:
    """Orient the boxes of one component.

    Raises:
        Inexpressible: an axis is added or removed, or a source is read in two orientations.
    """
    views: dict[str, SourceView] = {}
    pairs: list[BoxPair] = []
    for item in items:
        rank = len(item.source_box.lo)
        if NEW_AXIS in item.axes or len(item.axes) != rank:
            raise Inexpressible(
                f"{item.target} has {len(item.axes)} axes and its source {item.source} {rank}: "
                "the language neither adds nor removes an axis"
            )
        cast = None if item.cast is None else (mapping.sources[item.source].dtype, item.cast)
        view = SourceView(item.axes, cast)
        if views.setdefault(item.source, view) != view:
            raise Inexpressible(f"{item.source} is read in two orders of its axes, or in two dtypes")
        pairs.append(BoxPair(item.source, _turned(item.source_box, item.axes), item.target, item.target_box))
    shapes = {name: mapping.sources[name].shape for name in views}
    return Component(
        {name: tuple(shapes[name][axis] for axis in view.axes) for name, view in views.items()},
        {name: mapping.targets[name].shape for name in dict.fromkeys(item.target for item in items)},
        views,
        tuple(pairs),
    )


def _turned(box: Box, axes: Shape) -> Box:
    return Box(tuple(box.lo[axis] for axis in axes), tuple(box.hi[axis] for axis in axes))


@dataclass(frozen=True)
class ComponentOrder:
    """Components by their positions in a list.

    Args:
        free: components that share no name with another.
        ranks: the others: every component is in a later rank than those that read the names which it overwrites.
        copied: components in cycles; their sources are copied before the first rank, and they come last.
    """

    free: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    copied: tuple[int, ...]


def ordered(components: Sequence[Component]) -> ComponentOrder:
    """Order components so that no name is overwritten before it is read."""
    reader = {name: place for place, component in enumerate(components) for name in component.sources}
    before: dict[int, set[int]] = {}
    bound: set[int] = set()
    for place, component in enumerate(components):
        firsts = {reader[name] for name in component.targets if name in reader} - {place}
        if firsts:
            before[place] = firsts
            bound |= firsts | {place}
    ranks, copied = _ranked(sorted(bound), before)
    return ComponentOrder(tuple(place for place in range(len(components)) if place not in bound), ranks, copied)


def _ranked(places: list[int], before: dict[int, set[int]]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    after: dict[int, list[int]] = {}
    for place, firsts in before.items():
        for first in firsts:
            after.setdefault(first, []).append(place)
    waiting = {place: len(before.get(place, ())) for place in places}
    rank = [place for place in places if not waiting[place]]
    ranks: list[tuple[int, ...]] = []
    while rank:
        ranks.append(tuple(rank))
        for place in ranks[-1]:
            for following in after.get(place, ()):
                waiting[following] -= 1
        rank = sorted({one for place in ranks[-1] for one in after.get(place, ()) if not waiting[one]})
    return tuple(ranks), tuple(place for place in places if waiting[place])


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
