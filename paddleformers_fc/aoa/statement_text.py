"""Render a component as statements.

A component is a rename, a layout of one statement, or in general a split into equal parts, which are named as an array
and joined again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paddleformers_fc.aoa.components import Component, Inexpressible, SourceView
from paddleformers_fc.aoa.layouts import layout_of
from paddleformers_fc.aoa.operations import DTYPES
from paddleformers_fc.aoa.runs import AxisComponent, AxisRun, Hints, axis_component
from paddleformers_fc.aoa.slabs import Slabs, slabs_of
from paddleformers_fc.aoa.syntax import KEYWORDS, NOTHING

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
