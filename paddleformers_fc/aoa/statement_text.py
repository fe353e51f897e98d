"""From a block to the statements that say it.

A statement is chosen by what it is exact for: a rename, a layout that one statement has, or, where there is none,
lengths in which everything begins and ends: split into equal parts, named as an array, and joined anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paddleformers_fc.aoa.blocks import Block, Inexpressible, SourceView
from paddleformers_fc.aoa.layouts import layout_of
from paddleformers_fc.aoa.operations import DTYPES
from paddleformers_fc.aoa.runs import AxisBlock, AxisRun, Hints, axis_block
from paddleformers_fc.aoa.slabs import Slabs, slabs_of
from paddleformers_fc.aoa.syntax import KEYWORDS, NOTHING

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_MOST_PARTS = 4096


@dataclass(frozen=True, slots=True)
class Text:
    """One statement in writing.

    Args:
        left: what is read: names with ``^T`` or ``[0:2]``.
        right: what is written.
        attributes: what follows, without the first comma; may be empty.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    attributes: str = ""

    def __str__(self) -> str:
        said = f"{', '.join(self.left)} -> {', '.join(self.right)}"
        return f"{said}, {self.attributes}" if self.attributes else said


class StatementWriter:
    """Says blocks.

    Args:
        hints: shards and heads.
        taken: names of all tensors of both sides, which no statement may make up.
    """

    def __init__(self, hints: Hints, taken: frozenset[str]) -> None:
        self._hints = hints
        self._taken = taken

    def said(self, block: Block) -> list[Text]:
        """The statements of a block; none where equal names say it.

        Raises:
            Inexpressible: where the language cannot say it.
        """
        row = None if block.is_move else axis_block(block)
        if block.is_move or (
            row is not None and row.is_move and not self._hints.per_rank.keys() & block.targets.keys()
        ):
            return self._move(block)
        if row is not None:
            return self._row(row)
        slabs = slabs_of(block)
        if slabs is None:
            raise Inexpressible(f"{block.names}: the boxes lie along several axes in a way that no statements make")
        return self._slabs(slabs)

    def _move(self, block: Block) -> list[Text]:
        piece = block.pieces[0]
        facing = block.facings[piece.source]
        if piece.source == piece.target and facing.straight and facing.cast is None:
            return []
        if facing.straight or facing.reversed:
            return [Text((_view(piece.source, facing),), (piece.target,), _cast(facing))]
        if facing.cast is None:
            return [Text((piece.source,), (piece.target,), _permute(facing))]
        return [
            Text((piece.source,), (piece.source,), _permute(facing)),
            Text((piece.source,), (piece.target,), _cast(facing)),
        ]

    def _row(self, row: AxisBlock) -> list[Text]:
        layout = layout_of(row, self._hints, self._taken)
        if layout is None:
            return self._parts(row)
        # Paddle loses the number of shards of a tensor that such a statement reads transposed: turn it first.
        turned_first = layout.by_shards and len(layout.sources) == 1
        said: list[Text] = []
        left = [self.seen(name, row.block.facings[name], said, plain=turned_first) for name in layout.sources]
        return [*said, Text(tuple(left), layout.targets, layout.attributes)]

    def seen(self, name: str, facing: SourceView, said: list[Text], *, plain: bool = False) -> str:
        """How a source is read; what has to be said before is added to ``said`` and done under its own name."""
        if facing.straight or facing.reversed:
            if facing.cast is None and not (plain and facing.reversed):
                return _view(name, facing)
            said.append(Text((_view(name, facing),), (name,), _cast(facing)))
            return name
        said.append(Text((name,), (name,), _permute(facing)))
        if facing.cast is not None:
            said.append(Text((name,), (name,), _cast(facing)))
        return name

    def _parts(self, row: AxisBlock) -> list[Text]:
        """The general case: equal parts as long as possible, named as arrays, and joined anew."""
        said: list[Text] = []
        spelled: dict[str, str] = {}
        units: dict[str, int] = {}
        for name, length in row.sources.items():
            unit = units[name] = row.unit(name)
            spelled[name] = view = self.seen(name, row.block.facings[name], said)
            if unit < length:
                said.append(Text((view,), (self._array(name, length // unit),), _axis(row)))
        for target in dict.fromkeys(run.target for run in row.runs):
            runs = [run for run in row.runs if run.target == target]
            left = tuple(_stretch(run, units[run.source], row.sources[run.source], spelled) for run in runs)
            several = sum(run.length // units[run.source] for run in runs) > 1
            said.append(Text(left, (target,), _axis(row) if several else ""))
        return said

    def _array(self, name: str, count: int) -> str:
        """The array of a name, whose elements must not be tensors."""
        if count > _MOST_PARTS:
            raise Inexpressible(f"{name}: the language splits equally only, and this would need {count} equal parts")
        if not self._taken.isdisjoint(f"{name}_{index}" for index in range(count)):
            raise Inexpressible(f"{name}: its parts would be named {name}_0 and so on, and such tensors exist")
        return f"{name}[0:{count}]"

    def _slabs(self, slabs: Slabs) -> list[Text]:
        """Slabs one by one, and one statement that joins or splits the tensor that holds them."""
        array = self._array(slabs.stack, len(slabs.blocks))
        said: list[Text] = []
        if slabs.facing is not None:
            view = self.seen(slabs.stack, slabs.facing, said)
            said.append(Text((view,), (array,), f"axis={slabs.axis}"))
        for block in slabs.blocks:
            said += self.said(block)
        if slabs.facing is None:
            said.append(Text((array,), (slabs.stack,), f"axis={slabs.axis}"))
        return said


def name_fault(name: str) -> str | None:
    """Why the language cannot name a tensor, or None where it can."""
    if name == NOTHING or name in KEYWORDS:
        return f"{name}: is a word of the language"
    if _IDENTIFIER.fullmatch(name) is None:
        return f"{name}: names hold letters, digits, `_` and `.` only, and begin with a letter or `_`"
    return None


def _view(name: str, facing: SourceView) -> str:
    return name + "^T" if facing.reversed else name


def _permute(facing: SourceView) -> str:
    return f'permute="{list(facing.axes)}"'


def _cast(facing: SourceView) -> str:
    if facing.cast is None:
        return ""
    for dtype in facing.cast:
        if dtype not in DTYPES:
            raise Inexpressible(f"a cast with {dtype}: the language knows {', '.join(DTYPES)}")
    return f"src_dtype='{facing.cast[0]}', dst_dtype='{facing.cast[1]}'"


def _axis(row: AxisBlock) -> str:
    return f"axis={row.axis}"


def _stretch(run: AxisRun, unit: int, length: int, spelled: dict[str, str]) -> str:
    """A run as names: the whole source, or a stretch of its array."""
    if unit == length:
        return spelled[run.source]
    return f"{run.source}[{run.source_at // unit}:{(run.source_at + run.length) // unit}]"
