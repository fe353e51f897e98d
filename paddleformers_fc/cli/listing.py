"""Stored tensors as text, each with its shards.

Tensors that differ only in their indices and are stored alike are one entry, ``layers.{0...31}``, and an entry shows at
most four shards. JSON output lists all of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paddleformers_fc.formats.inspection import ShardFacts, TensorFacts
from paddleformers_fc.mapping.boxes import shifted
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.text import size_text

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_SHARDS = 4
_SHOWN_FILES = 3


def show_tensors(tensors: Iterable[TensorFacts], console: Console) -> None:
    """Print tensors under the heading of their role; below each, a line per shard: its box in the tensor, its files."""
    from rich.text import Text

    for role, rows in groupby(_rows(tensors), key=itemgetter(0)):
        console.print(Text(role, "bold cyan"))
        for _, name, alike in rows:
            first = alike[0]
            shape = " x ".join(map(str, first.shape)) or "scalar"
            form = f"{first.dtype} {shape}, {size_text(first.bytes)}"
            console.print(Text.assemble(f"  {name}  ", (form, "green")))
            for line in _shard_lines(alike):
                console.print(Text(f"      {line}", "dim"))


def _rows(tensors: Iterable[TensorFacts]) -> Iterator[tuple[str, str, list[TensorFacts]]]:
    """Role and folded name of every row, and its tensors, which are all stored alike."""
    groups: dict[tuple[object, ...], list[TensorFacts]] = {}
    for tensor in tensors:
        places = tuple((piece.offset, piece.shape, piece.flat) for piece in tensor.pieces)
        groups.setdefault((tensor.role, tensor.dtype, tensor.shape, places, _template(tensor.name)), []).append(tensor)
    for alike in groups.values():
        names = fold((tensor.name for tensor in alike), limit=len(alike))
        if len(names) == 1:
            yield alike[0].role, names[0], alike
        else:
            yield from ((tensor.role, tensor.name, [tensor]) for tensor in alike)


def _template(name: str) -> str:
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _shard_lines(alike: list[TensorFacts]) -> Iterator[str]:
    first = alike[0]
    for index, piece in enumerate(first.pieces[:_SHOWN_SHARDS]):
        files = sorted({PurePosixPath(tensor.pieces[index].file).stem for tensor in alike})
        names = " or ".join(files) if len(files) <= _SHOWN_FILES else f"{len(files)} files"
        yield f"{_place(piece, first.shape)}  {names}"
    if len(first.pieces) > _SHOWN_SHARDS:
        yield f"and {len(first.pieces) - _SHOWN_SHARDS} more"


def _place(piece: ShardFacts, shape: tuple[int, ...]) -> str:
    box = "" if piece.shape == shape else str(shifted(piece.shape, piece.offset))
    if piece.flat is None:
        return box or "whole"
    return f"{box} elements {piece.flat[0]}:{piece.flat[1]}".lstrip()
