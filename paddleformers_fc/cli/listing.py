"""The stored tensors of a directory, one by one, with the pieces they are stored in.

A piece is what one rank wrote: a box of the tensor, or a range of a box's elements, at a place in a file. It is read
from the headers, where it is written as it was saved; the catalog has only the boxes it is made of.

For a person, tensors that differ only in their indices and are stored alike are one entry, ``layers.{0...31}``, and an
entry shows at most four pieces. JSON has all of both.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc.cli.opening import Opened
from paddleformers_fc.formats import Catalog
from paddleformers_fc.layout.codec import HEADER_KEY, decode_shards
from paddleformers_fc.mapping.boxes import shifted
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan.report import natural
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.safetensors import read_header
from paddleformers_fc.text import size_text

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_PIECES = 4
_SHOWN_FILES = 3


class ShardFacts(msgspec.Struct, frozen=True):
    """One stored piece of a tensor.

    Attributes:
        file: path relative to the directory.
        begin: byte offset of its first element in the file.
        bytes: its length.
        offset: first coordinate of its box on every axis.
        shape: lengths of its box.
        flat: for a flattened shard the range of the box's elements that is stored; else None.
    """

    file: str
    begin: int
    bytes: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None


class TensorFacts(msgspec.Struct, frozen=True):
    """One stored tensor.

    Attributes:
        role: its role.
        name: its name in the model that saved it; for open weights the canonical name.
        dtype: element type by its numpy name.
        shape: global shape.
        bytes: of the whole tensor.
        pieces: where it lies.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    pieces: tuple[ShardFacts, ...]


def list_tensors(opened: Opened, pattern: str) -> list[TensorFacts]:
    """The stored tensors whose names match, in natural order within each role.

    Args:
        opened: the directory.
        pattern: a shell pattern for names.
    Raises:
        FlexError: a file vanished or changed since it was opened.
    """
    wanted = {
        role: {name for name in tensors if fnmatch.fnmatchcase(name, pattern)}
        for role, tensors in opened.catalog.roles.items()
    }
    pieces = (
        _written_pieces(opened.catalog, wanted) if opened.checkpoint is not None else _whole_tensors(opened.catalog)
    )
    found: dict[tuple[str, str], list[ShardFacts]] = {}
    for role, name, piece in pieces:
        found.setdefault((role, name), []).append(piece)
    listed: list[TensorFacts] = []
    for role, names in wanted.items():
        for name in sorted(names, key=natural):
            tensor = opened.catalog.roles[role][name]
            size = math.prod(tensor.shape) * item_size(to_safetensors(tensor.dtype))
            ordered = sorted(found.get((role, name), ()), key=lambda piece: (piece.offset, piece.flat or (0, 0)))
            listed.append(TensorFacts(role, name, tensor.dtype, tensor.shape, size, tuple(ordered)))
    return listed


def _written_pieces(catalog: Catalog, wanted: dict[str, set[str]]) -> Iterator[tuple[str, str, ShardFacts]]:
    for role, names in wanted.items():
        files = {fragment.file for name in names for fragment in catalog.roles[role][name].fragments}
        for file in sorted(files):
            path = catalog.root / file
            header = read_header(path)
            for shard, entry in decode_shards(header.metadata.get(HEADER_KEY, ""), header.tensors, str(path)):
                if shard.name in names:
                    size = entry.end - entry.begin
                    yield (
                        role,
                        shard.name,
                        ShardFacts(file, entry.begin, size, shard.box.lo, shard.box.shape, shard.flat),
                    )


def _whole_tensors(catalog: Catalog) -> Iterator[tuple[str, str, ShardFacts]]:
    for role, tensors in catalog.roles.items():
        for name, tensor in tensors.items():
            width = item_size(to_safetensors(tensor.dtype))
            for part in tensor.fragments:
                piece = ShardFacts(part.file, part.begin, part.box.volume * width, part.box.lo, part.box.shape)
                yield role, name, piece


def show_tensors(tensors: Iterable[TensorFacts], console: Console) -> None:
    """The tensors under the heading of their role; below each, a line per piece: its place in the tensor, its files."""
    from rich.text import Text

    for role, rows in groupby(_rows(tensors), key=itemgetter(0)):
        console.print(Text(role, "bold cyan"))
        for _, name, alike in rows:
            first = alike[0]
            shape = " x ".join(map(str, first.shape)) or "scalar"
            form = f"{first.dtype} {shape}, {size_text(first.bytes)}"
            console.print(Text.assemble(f"  {name}  ", (form, "green")))
            for line in _piece_lines(alike):
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


def _piece_lines(alike: list[TensorFacts]) -> Iterator[str]:
    first = alike[0]
    for index, piece in enumerate(first.pieces[:_SHOWN_PIECES]):
        files = sorted({PurePosixPath(tensor.pieces[index].file).stem for tensor in alike})
        names = " or ".join(files) if len(files) <= _SHOWN_FILES else f"{len(files)} files"
        yield f"{_place(piece, first.shape)}  {names}"
    if len(first.pieces) > _SHOWN_PIECES:
        yield f"and {len(first.pieces) - _SHOWN_PIECES} more"


def _place(piece: ShardFacts, shape: tuple[int, ...]) -> str:
    box = "" if piece.shape == shape else str(shifted(piece.shape, piece.offset))
    if piece.flat is None:
        return box or "whole"
    return f"{box} elements {piece.flat[0]}:{piece.flat[1]}".lstrip()
