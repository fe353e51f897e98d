"""The catalog: where each box of each stored tensor is, for every format.

A catalog is built from headers; no tensor bytes are read. Tensors with equal cuts share a :class:`StoredForm`, so facts
about boxes are computed once for all of them, and a tensor only has its name and file offsets. Time and memory are
linear in the stored shards, a few hundred bytes each. Readers of all formats raise :func:`damaged` and
:func:`malformed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np

from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, BoxFinder, CoverFault, Shape, cover_faults, have_own_hashes, whole
from paddleformers_fc.storage import paths
from paddleformers_fc.storage.identities import NO_IDENTITIES, Identities
from paddleformers_fc.text import fold

EVERYONE: Mapping[str, Sequence[int]] = MappingProxyType({})
"""Visibility of a catalog whose files are visible to every rank."""


FileOffset = tuple[str, int]
"""Path of a file relative to the catalog's root, and the byte offset of a box's first element in it."""


class StoredFragment(msgspec.Struct, frozen=True):
    """A box that is stored contiguously, in row-major order.

    Args:
        file: path relative to the catalog's root.
        begin: byte offset of the box's first element.
        box: global coordinates.
    """

    file: str
    begin: int
    box: Box


class StoredForm(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The properties that tensors with equal cuts share. Forms are compared by identity.

    Args:
        dtype: numpy name of the element type.
        shape: the global shape.
        boxes: the stored boxes, in global coordinates.
        file_dtype: element type in the files, if it differs; values are cast when they are read.
        turned: whether the files contain every box transposed, with its axes in reverse order.
        tiles: whether the boxes are known to tile the tensor.
    """

    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]
    file_dtype: str = ""
    turned: bool = False
    tiles: bool = False

    @property
    def held_dtype(self) -> str:
        """Element type in the files."""
        return self.file_dtype or self.dtype

    @property
    def content(self) -> tuple[object, ...]:
        """All properties, for comparisons of forms by value."""
        return self.dtype, self.shape, self.boxes, self.file_dtype, self.turned

    def in_file(self, shape: Shape, part: Box) -> tuple[Shape, Box]:
        """Return the shape of a stored box, and a region of it, in the orientation of the file."""
        return (shape[::-1], Box(part.lo[::-1], part.hi[::-1])) if self.turned else (shape, part)

    def file_axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Convert axes of the tensor to axes in the file; negative values are kept."""
        last = len(self.shape) - 1
        return tuple(last - axis if axis >= 0 else axis for axis in axes) if self.turned else axes

    @cached_property
    def finder(self) -> BoxFinder:
        """Finds the stored boxes that intersect a box."""
        return BoxFinder(self.boxes)

    @cached_property
    def faults(self) -> list[CoverFault]:
        """The gaps and overlaps of the boxes."""
        return [] if self.tiles else cover_faults(whole(self.shape), self.boxes)


class StoredTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor as it is stored.

    Args:
        name: its stored name.
        form: its dtype, shape and boxes.
        offsets: file and byte offset of each box of the form.
    """

    name: str
    form: StoredForm
    offsets: tuple[FileOffset, ...] | StoredOffsets

    @property
    def dtype(self) -> str:
        """Numpy name of the element type."""
        return self.form.dtype

    @property
    def shape(self) -> Shape:
        """The global shape."""
        return self.form.shape

    @property
    def fragments(self) -> tuple[StoredFragment, ...]:
        """The boxes with their locations."""
        return tuple(
            StoredFragment(file, begin, box) for (file, begin), box in zip(self.offsets, self.form.boxes, strict=True)
        )

    def faults(self) -> Iterator[str]:
        """Yield the gaps and overlaps of the stored boxes."""
        for fault in self.form.faults:
            if fault.writers:
                first, second = (self.offsets[index][0] for index in fault.writers)
                yield f"{self.name}: {fault.where} is stored twice, in {first} and {second}"
            else:
                yield f"{self.name}: {fault.where} is not stored"


class Catalog(msgspec.Struct, frozen=True, dict=True):
    """Everything that is stored under one directory.

    Args:
        root: the directory, local or at a URL.
        roles: role -> full name -> tensor.
        identities: the identities of the files when they were checked.
        visible_to: for every file that is not visible to all ranks, the ranks with access to it, in ascending order.
    """

    root: paths.AnyPath
    roles: dict[str, dict[str, StoredTensor]]
    identities: Identities = msgspec.field(default_factory=lambda: NO_IDENTITIES)
    visible_to: Mapping[str, Sequence[int]] = msgspec.field(default_factory=lambda: EVERYONE)

    @cached_property
    def sorted_names(self) -> dict[str, list[str]]:
        """The names of every role, in the same order on all ranks."""
        return {role: sorted(tensors) for role, tensors in self.roles.items()}

    @property
    def count(self) -> int:
        """The number of stored tensors of all roles."""
        return sum(map(len, self.roles.values()))

    def reader(self, file: str) -> int:
        """Return the first rank with access to a file."""
        return self.visible_to.get(file, (0,))[0]

    def faults(self) -> Iterator[str]:
        """Yield the gaps and overlaps of all tensors."""
        for names in self.roles.values():
            for tensor in names.values():
                if tensor.form.faults:
                    yield from tensor.faults()


Array = np.ndarray[Any, Any]


class _Cut(msgspec.Struct, frozen=True):
    """How a tensor is cut into shards.

    Args:
        form: its dtype, shape and boxes.
        fragments: for every box, the number of its shard, and its byte offset in the shard.
        odd: the numbers of shards whose dtype or global shape differs from the first; the form does not contain them.
    """

    form: StoredForm
    fragments: list[tuple[int, int]]
    odd: list[int]


class StoredOffsets(msgspec.Struct, frozen=True, gc=False):
    """The file offsets of a tensor's boxes, computed on access.

    Args:
        table: the shards.
        rows: the numbers of shards, sorted by tensor.
        begin: the position of the tensor's first shard in ``rows``.
        fragments: the fragments of the tensor's cut.
    """

    table: ShardTable
    rows: Array
    begin: int
    fragments: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.fragments)

    def __getitem__(self, box: int) -> FileOffset:
        shard, start = self.fragments[box]
        table, row = self.table, self.rows[self.begin + shard]
        return table.paths[table.file[row]], int(table.offset[row]) + start

    def __iter__(self) -> Iterator[FileOffset]:
        return map(self.__getitem__, range(len(self)))


class ShardTable(msgspec.Struct, frozen=True):
    """The shards of many files, in columns.

    Layers repeat, so each distinct *place* (dtype, global shape, box, range) is stored once. Tensors with the same
    places share their form, which is computed once.

    Args:
        names: the names of tensors.
        places: for every place a shard, whose name is meaningless.
        widths: for every place the bytes per element in the file.
        paths: the files.
        name: for every shard, the number of its name.
        place: for every shard, the number of its place.
        file: for every shard, the number of its file.
        offset: for every shard, the offset of its first byte in the file.
    """

    names: Sequence[str]
    places: Sequence[Shard]
    widths: Sequence[int]
    paths: Sequence[str]
    name: Array
    place: Array
    file: Array
    offset: Array
    _cuts: dict[bytes, _Cut] = msgspec.field(default_factory=dict)
    _forms: dict[str, StoredForm] = msgspec.field(default_factory=dict)

    def tensors(self, rows: Array) -> tuple[dict[str, StoredTensor], list[str]]:
        """Group some shards by tensor, in the order of each tensor's first shard.

        Returns:
            the tensors by name, and the contradictions between files as text.
        """
        rows = rows[self.name[rows].argsort(kind="stable")]
        named = self.name[rows]
        begins = np.flatnonzero(np.diff(named, prepend=-1))
        ends = np.append(begins[1:], len(rows))
        order = rows[begins].argsort()
        places = self.place[rows].astype(np.int32).tobytes()
        found: dict[str, StoredTensor] = {}
        faults: list[str] = []
        bounds = (column[order].tolist() for column in (named[begins], begins, ends))
        for number, begin, end in zip(*bounds, strict=True):
            name, cut = self.names[number], self._cut(places[4 * begin : 4 * end])
            found[name] = StoredTensor(name, cut.form, StoredOffsets(self, rows, begin, cut.fragments))
            if cut.odd:
                faults += [self._contradiction(name, rows[begin], rows[begin + one]) for one in cut.odd]
        return found, faults

    def _contradiction(self, name: str, first: int, other: int) -> str:
        """Describe two shards of a tensor with different dtypes or global shapes."""
        known, one = (self.places[self.place[row]] for row in (first, other))
        return (
            f"{name}: {self.paths[self.file[other]]} has {one.dtype} {list(one.global_shape)}, "
            f"another file {known.dtype} {list(known.global_shape)}"
        )

    def _cut(self, places: bytes) -> _Cut:
        """Return the cut of a tensor with these places."""
        found = self._cuts.get(places)
        if found is None:
            found = self._cuts[places] = self._new_cut(np.frombuffer(places, np.int32).tolist())
        return found

    def _new_cut(self, places: list[int]) -> _Cut:
        shards, boxes, fragments, odd = [self.places[one] for one in places], list[Box](), list[tuple[int, int]](), []
        first = shards[0]
        for number, (shard, place) in enumerate(zip(shards, places, strict=True)):
            if (shard.dtype, shard.global_shape) != (first.dtype, first.global_shape):
                odd.append(number)
                continue
            for one in shard.fragments:
                boxes.append(one.box)
                fragments.append((number, one.start * self.widths[place]))
        key = f"{first.dtype} {first.global_shape} {boxes}"  # A file cannot choose the hash of text.
        form = self._forms.get(key)
        if form is None:
            tiles = not odd and _tile(shards)
            form = self._forms[key] = StoredForm(first.dtype, first.global_shape, tuple(boxes), tiles=tiles)
        return _Cut(form, fragments, odd)


def _tile(shards: Sequence[Shard]) -> bool:
    """Return whether the ranges fill their boxes and these boxes tile the tensor, which is cheaper to check."""
    ranges: dict[Box, list[tuple[int, int]]] = {}
    for one in shards:
        ranges.setdefault(one.box, []).append(one.flat or (0, one.box.volume))
    for box, own in ranges.items():
        at = 0
        for begin, end in sorted(one for one in own if one[0] < one[1]):
            if begin != at:
                return False
            at = end
        if at != box.volume:
            return False
    return not cover_faults(whole(shards[0].global_shape), list(ranges))


def gather_shards(shards: Iterable[tuple[Shard, str, int, int]]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Group the shards of many files by tensor.

    Args:
        shards: shard, file, byte offset of its first element, bytes per element.
    Returns:
        the tensors by name, and the contradictions between files as text.
    """
    names: dict[str, int] = {}
    paths: dict[str, int] = {}
    places: dict[tuple[object, ...], tuple[int, Shard]] = {}
    hashes: dict[int, object] = {}
    numbers: list[int] = []
    for shard, file, begin, width in shards:
        place = (shard.dtype, shard.global_shape, shard.box, shard.flat, width)
        number, _ = places.setdefault(place, (len(places), shard))
        if number == len(places) - 1 and not have_own_hashes(hashes, (place, shard.box)):
            raise FormatError(
                f"{file} has tensors whose shapes have colliding hashes.",
                where=file,
                evidence=["two different shapes or positions have the same hash"],
                next_step="Use another checkpoint, from a source that you trust.",
            )
        numbers += (names.setdefault(shard.name, len(names)), number, paths.setdefault(file, len(paths)), begin)
    columns = np.ascontiguousarray(np.array(numbers, np.int64).reshape(-1, 4).T)
    placed, widths = [shard for _, shard in places.values()], [cast(int, place[-1]) for place in places]
    return ShardTable([*names], placed, widths, [*paths], *columns).tensors(np.arange(columns.shape[1]))


# ---- The errors of readers.


_MOST_LINES = 10_000
"""A user may need every name of a missing file; errors bound their characters."""

COPY_AGAIN_STEP = "Use another checkpoint, or copy the files again: all of one save."


def damaged(where: paths.AnyPath, what: str, evidence: Iterable[str], next_step: str = COPY_AGAIN_STEP) -> Corrupt:
    """Return the error for a checkpoint that cannot be used, for its files or their content; evidence is folded."""
    return Corrupt(what, where=str(where), evidence=fold(evidence, _MOST_LINES), next_step=next_step)


def malformed(where: paths.AnyPath, what: str, evidence: Iterable[str], next_step: str) -> FormatError:
    """Return the error for files that are malformed or not supported; lines of evidence are folded."""
    return FormatError(what, where=str(where), evidence=fold(evidence, _MOST_LINES), next_step=next_step)
