"""Render a component as statements.

A component is a rename, a layout of one statement, or in general a split into equal parts, which are named as an array
and joined again.

Find the layout of the language that the runs of a component follow, and the attributes of its statement.

A layout per tensor-parallel shard is chosen only if the tensor has as many shards as groups. All others are written
with lengths, which are independent of the number of ranks.

Combine statements that differ only in numbers into one with placeholders, if it is exact.

Placeholders take their numbers from the tensors that match the first name, in all combinations. Statements are combined
only if these tensors are exactly theirs. Linear in the statements and in the tensors that their patterns match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from paddleformers_fc.aoa.components import Component, Inexpressible, Slabs, SourceView, slabs_of
from paddleformers_fc.aoa.names import EXPERT, LAYER, NameIndex
from paddleformers_fc.aoa.operations import DTYPES
from paddleformers_fc.aoa.runs import AxisComponent, AxisRun, Hints, axis_component
from paddleformers_fc.aoa.syntax import KEYWORDS, NOTHING
from paddleformers_fc.mapping.boxes import Shape

FFN, QKV = "fused_ffn", "fused_qkv_old"
_MOST_HEADS = 4096


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """The layout of a statement.

    Args:
        attributes: its attributes, without the first comma.
        sources: the left names, in order.
        targets: the right names, in order.
        by_shards: whether the number of groups is the number of shards.
    """

    attributes: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    by_shards: bool = False


def layout_of(row: AxisComponent, hints: Hints, taken: frozenset[str]) -> FusedLayout | None:
    """Return the layout of a row, or None if no single statement expresses it.

    Args:
        row: the runs.
        hints: shards and heads.
        taken: the names of all tensors, which intermediate names must not repeat.
    """
    sources, targets = tuple(row.sources), tuple(row.targets)
    by_shards = _per_rank(row, hints)
    if by_shards is not None:
        return FusedLayout(by_shards, sources, targets, by_shards=True)
    by_lengths = _plain(row) or _per_head(row, taken)
    return None if by_lengths is None else FusedLayout(by_lengths, sources, targets)


def _plain(row: AxisComponent) -> str | None:
    """Match whole tensors in order, or one tensor in equal lengths."""
    sources, targets = row.sources, row.targets
    if len(targets) == 1 and len(sources) > 1 and row.is_interleaving(tuple(sources.values()), 1, 1):
        return f"axis={row.axis}"
    equal = len(set(targets.values())) == 1
    if len(sources) == 1 and len(targets) > 1 and equal and row.is_interleaving(tuple(targets.values()), 1, 1):
        return f"axis={row.axis}"
    return None


def _per_rank(row: AxisComponent, hints: Hints) -> str | None:
    """Match gate and up, or query, key and value, in one group per shard."""
    sources, targets = list(row.sources), list(row.targets)
    if len(sources) > 1 and len(targets) > 1:
        return None
    read = written = 1
    if len(sources) == 1:
        read = _shards(hints.left.get(sources[0]), row.component.views[sources[0]].axes[row.axis])
    if len(targets) == 1:
        written = _shards(hints.right.get(targets[0]), row.axis)
    kinds = [hints.per_rank[side[0]] for side in (sources, targets) if len(side) == 1 and side[0] in hints.per_rank]
    if not read * written or (read == written == 1 and not kinds):
        return None
    lengths = _lengths(row)
    half = lengths if len(lengths) == 2 else (lengths[0] // 2,) * 2
    halves = (FFN in kinds or not kinds) and half[0] == half[1] and len(lengths) < 3
    if halves and row.is_interleaving(half, read, written):
        return _with_axis(FFN, row.axis)
    # Separate query, key and value are written per kv head, which is independent of the number of ranks.
    parts = _headed(lengths, hints.heads) if QKV in kinds or len(lengths) == 1 else ()
    if hints.heads is None or not parts:
        return None
    heads, groups = hints.heads
    shared = not any(count % rounds for count in (heads, groups) for rounds in (read, written))
    if not shared or not row.is_interleaving(parts, read, written):
        return None
    return _with_axis(f"{QKV}, num_heads={heads}, num_key_value_groups={groups}", row.axis)


def _per_head(row: AxisComponent, taken: frozenset[str]) -> str | None:
    """Match query, key and value in one group per kv head."""
    sources, targets = list(row.sources), list(row.targets)
    lengths = _lengths(row)
    if len(lengths) != 3 or min(len(sources), len(targets)) != 1:
        return None
    joining = len(targets) == 1
    # The number of groups is the number of runs of the first part.
    rounds = sum(run.source == sources[0] if joining else run.target == targets[0] for run in row.runs)
    query, key, value = lengths
    if not (row.is_interleaving(lengths, 1, rounds) if joining else row.is_interleaving(lengths, rounds, 1)):
        return None
    head = key // rounds
    if key == value and query % (head * rounds) == 0:
        heads = query // head
    elif joining:
        heads = rounds
    else:
        return None
    made_up = [f"{name}{i}" for name in (sources if joining else targets) for i in range(min(heads, _MOST_HEADS))]
    if heads > _MOST_HEADS or not taken.isdisjoint(made_up):
        return None
    return _with_axis(f"fused_qkv, num_heads={heads}, num_key_value_groups={rounds}", row.axis)


def _lengths(row: AxisComponent) -> Shape:
    """Return the lengths of the parts: of the side with several names, or of the single tensor."""
    sources, targets = row.sources, row.targets
    return tuple((sources if len(sources) > 1 else targets).values())


def _headed(lengths: Shape, heads: tuple[int, int] | None) -> Shape:
    """Return the lengths of query, key and value; empty if they do not follow from the heads."""
    if heads is None:
        return ()
    counts = (heads[0], heads[1], heads[1])
    if len(lengths) == 1 and lengths[0] % sum(counts) == 0:
        return tuple(lengths[0] // sum(counts) * count for count in counts)
    if len(lengths) == 3 and lengths[0] % counts[0] == 0:
        head = lengths[0] // counts[0]
        return lengths if lengths == tuple(head * count for count in counts) else ()
    return ()


def _shards(cuts: Shape | None, axis: int) -> int:
    """Return the number of shards along an axis; 0 if another axis is cut, which no statement expresses."""
    if cuts is None:
        return 1
    return 0 if prod(cuts) != cuts[axis] else cuts[axis]


def _with_axis(attributes: str, axis: int) -> str:
    """Return the attributes with the axis, unless it is the default 1."""
    return attributes if axis == 1 else f"{attributes}, axis={axis}"


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_MOST_PARTS = 4096


@dataclass(frozen=True, slots=True)
class Text:
    """One statement in writing.

    Args:
        left: the names that are read, with ``^T`` or ``[0:2]``.
        right: the names that are written.
        attributes: the attributes, without the first comma; may be empty.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    attributes: str = ""

    def __str__(self) -> str:
        text = f"{', '.join(self.left)} -> {', '.join(self.right)}"
        return f"{text}, {self.attributes}" if self.attributes else text


class StatementWriter:
    """Writes the statements of components.

    Args:
        hints: shards and heads.
        taken: names of all tensors of both sides, which intermediate names must not repeat.
    """

    def __init__(self, hints: Hints, taken: frozenset[str]) -> None:
        self._hints = hints
        self._taken = taken

    def statements(self, component: Component) -> list[Text]:
        """Return the statements of a component; none for equal names.

        Raises:
            Inexpressible: the language does not express the component.
        """
        row = None if component.is_move else axis_component(component)
        if component.is_move or (
            row is not None and row.is_move and not self._hints.per_rank.keys() & component.targets.keys()
        ):
            return self._move(component)
        if row is not None:
            return self._row(row)
        slabs = slabs_of(component)
        if slabs is None:
            raise Inexpressible(f"{component.names}: no statements express boxes that differ on several axes")
        return self._slabs(slabs)

    def _move(self, component: Component) -> list[Text]:
        piece = component.pairs[0]
        view = component.views[piece.source]
        if piece.source == piece.target and view.straight and view.cast is None:
            return []
        if view.straight or view.reversed:
            return [Text((_view(piece.source, view),), (piece.target,), _cast(view))]
        if view.cast is None:
            return [Text((piece.source,), (piece.target,), _permute(view))]
        return [
            Text((piece.source,), (piece.source,), _permute(view)),
            Text((piece.source,), (piece.target,), _cast(view)),
        ]

    def _row(self, row: AxisComponent) -> list[Text]:
        layout = layout_of(row, self._hints, self._taken)
        if layout is None:
            return self._parts(row)
        # Paddle loses the number of shards of a tensor that such a statement reads transposed.
        transposed_first = layout.by_shards and len(layout.sources) == 1
        texts: list[Text] = []
        left = [
            self.source_text(name, row.component.views[name], texts, plain=transposed_first) for name in layout.sources
        ]
        return [*texts, Text(tuple(left), layout.targets, layout.attributes)]

    def source_text(self, name: str, view: SourceView, texts: list[Text], *, plain: bool = False) -> str:
        """Return the text of an oriented source; statements that must precede it are appended to ``texts``."""
        if view.straight or view.reversed:
            if view.cast is None and not (plain and view.reversed):
                return _view(name, view)
            texts.append(Text((_view(name, view),), (name,), _cast(view)))
            return name
        texts.append(Text((name,), (name,), _permute(view)))
        if view.cast is not None:
            texts.append(Text((name,), (name,), _cast(view)))
        return name

    def _parts(self, row: AxisComponent) -> list[Text]:
        """Return the general case: equal parts as long as possible, named as arrays, and joined again."""
        texts: list[Text] = []
        source_texts: dict[str, str] = {}
        units: dict[str, int] = {}
        for name, length in row.sources.items():
            unit = units[name] = row.unit(name)
            source_texts[name] = view = self.source_text(name, row.component.views[name], texts)
            if unit < length:
                texts.append(Text((view,), (self._array(name, length // unit),), _axis(row)))
        for target in dict.fromkeys(run.target for run in row.runs):
            runs = [run for run in row.runs if run.target == target]
            left = tuple(_stretch(run, units[run.source], row.sources[run.source], source_texts) for run in runs)
            several = sum(run.length // units[run.source] for run in runs) > 1
            texts.append(Text(left, (target,), _axis(row) if several else ""))
        return texts

    def _array(self, name: str, count: int) -> str:
        """Return the array of a name, whose elements must not be tensors."""
        if count > _MOST_PARTS:
            raise Inexpressible(f"{name}: the language has equal splits only, and this one has {count} parts")
        if not self._taken.isdisjoint(f"{name}_{index}" for index in range(count)):
            raise Inexpressible(f"{name}: its parts would have the names {name}_0 and so on, and such tensors exist")
        return f"{name}[0:{count}]"

    def _slabs(self, slabs: Slabs) -> list[Text]:
        """Render each slab, and one statement that joins or splits the tensor that holds them."""
        array = self._array(slabs.stack, len(slabs.components))
        texts: list[Text] = []
        if slabs.view is not None:
            view = self.source_text(slabs.stack, slabs.view, texts)
            texts.append(Text((view,), (array,), f"axis={slabs.axis}"))
        for component in slabs.components:
            texts += self.statements(component)
        if slabs.view is None:
            texts.append(Text((array,), (slabs.stack,), f"axis={slabs.axis}"))
        return texts


def name_fault(name: str) -> str | None:
    """Return why a name is not valid in the language, or None."""
    if name == NOTHING or name in KEYWORDS:
        return f"{name}: is a keyword of the language"
    if _IDENTIFIER.fullmatch(name) is None:
        return f"{name}: names consist of letters, digits, `_` and `.`, and begin with a letter or `_`"
    return None


def _view(name: str, view: SourceView) -> str:
    return name + "^T" if view.reversed else name


def _permute(view: SourceView) -> str:
    return f'permute="{list(view.axes)}"'


def _cast(view: SourceView) -> str:
    if view.cast is None:
        return ""
    for dtype in view.cast:
        if dtype not in DTYPES:
            raise Inexpressible(f"a cast with {dtype}: the language has {', '.join(DTYPES)}")
    return f"src_dtype='{view.cast[0]}', dst_dtype='{view.cast[1]}'"


def _axis(row: AxisComponent) -> str:
    return f"axis={row.axis}"


def _stretch(run: AxisRun, unit: int, length: int, source_texts: dict[str, str]) -> str:
    """Return a run as names: the whole source, or a stretch of its array."""
    if unit == length:
        return source_texts[run.source]
    return f"{run.source}[{run.source_at // unit}:{(run.source_at + run.length) // unit}]"


_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=[.^\[]|$)")
_BASE = re.compile(r"[^\^\[]*")
_CHOICES = ((0, 1), (1,), (0,))
"""The positions of numbers that become placeholders; those that combine most statements come first."""

ComponentTexts = Sequence[Text]
Numbers = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Statements with placeholders, and the numbers of one component."""

    texts: tuple[Text, ...]
    numbers: Numbers


def compacted(components: Sequence[ComponentTexts], index: NameIndex) -> list[str]:
    """Return as few statements as possible for all components.

    Args:
        components: the statements of every component.
        index: the names of the left side.
    Returns:
        statements, in the order of the components; those of one component keep their order.
    """
    placed: dict[int, list[str]] = {}
    waiting = [number for number, component in enumerate(components) if component]
    for positions in _CHOICES:
        groups: dict[tuple[Text, ...], list[tuple[int, Numbers]]] = {}
        for number in waiting:
            pattern = _pattern(components[number], positions)
            if pattern is not None:
                groups.setdefault(pattern.texts, []).append((number, pattern.numbers))
        done: set[int] = set()
        for texts, members in groups.items():
            numbers = {entry for _, entry in members}
            if _exact(texts[0], numbers, index):
                placed[members[0][0]] = _group(texts, members, components, index)
                done.update(number for number, _ in members)
        waiting = [number for number in waiting if number not in done]
    for number in waiting:
        placed[number] = [str(text) for text in components[number]]
    return [text for number in sorted(placed) for text in placed[number]]


def _group(
    texts: tuple[Text, ...], members: list[tuple[int, Numbers]], components: Sequence[ComponentTexts], index: NameIndex
) -> list[str]:
    """Return a group's statements; a statement that is not exact is written once per member."""
    numbers = {entry for _, entry in members}
    statements: list[str] = []
    for at, text in enumerate(texts):
        if _exact(text, numbers, index):
            statements.append(str(text))
        else:
            statements += [str(components[number][at]) for number, _ in members]
    return statements


def _exact(text: Text, numbers: set[Numbers], index: NameIndex) -> bool:
    columns = [{entry[at] for entry in numbers} for at in range(len(next(iter(numbers))))]
    if prod(map(len, columns)) != len(numbers):
        return False
    base = _BASE.match(text.left[0])
    matched = index.matches(base.group()) if base else []
    return len(matched) == len(numbers) and {entry for _, entry in matched} == numbers


def _pattern(component: ComponentTexts, positions: tuple[int, ...]) -> _Pattern | None:
    """Return the statements with placeholders at these positions, or None if names differ in these numbers."""
    first = component[0].left[0]
    found = list(_NUMBER.finditer(first))
    if len(found) <= max(positions):
        return None
    numbers = tuple(found[position].group() for position in positions)
    expert = EXPERT if first[: found[positions[-1]].start()].endswith("experts.") or len(positions) > 1 else LAYER
    names = dict(zip(positions, (LAYER, expert)[-len(positions) :], strict=True))

    def patterned(item: str) -> str | None:
        places = list(_NUMBER.finditer(item))
        if len(places) <= max(positions) or any(
            places[position].group() != number for position, number in zip(positions, numbers, strict=True)
        ):
            return None
        for position in reversed(positions):
            begin, end = places[position].span()
            item = item[:begin] + names[position] + item[end:]
        return item

    texts: list[Text] = []
    for text in component:
        left, right = [patterned(item) for item in text.left], [patterned(item) for item in text.right]
        known_left, known_right = [item for item in left if item], [item for item in right if item]
        if len(known_left) < len(left) or len(known_right) < len(right):
            return None
        texts.append(replace(text, left=tuple(known_left), right=tuple(known_right)))
    return _Pattern(tuple(texts), numbers)
