"""The common form of every source of tensors: the location of each stored box.

A catalog is built from headers alone; no tensor byte is read. Tensors with equal cuts share one :class:`StoredForm`.
Facts that depend on boxes are computed once for all of them, and a tensor consists of its name and its places. Time and
memory are linear in the stored shards, a few hundred bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

import msgspec

from paddleformers_fc.errors import FormatError
from paddleformers_fc.layout.shards import Fragment, Shard
from paddleformers_fc.mapping.boxes import Box, BoxFinder, CoverFault, Shape, cover_faults, whole
from paddleformers_fc.storage import paths
from paddleformers_fc.storage.identities import NO_IDENTITIES, Identities

EVERYONE: Mapping[str, Sequence[int]] = MappingProxyType({})
"""For catalogs with files that are visible to every rank."""


FileOffset = tuple[str, int]
"""Path of a file relative to the catalog's root, and the byte offset of a box's first element in it."""


class FileOffsets(Protocol):
    """The places of the boxes of a tensor: a tuple, or what looks them up."""

    def __len__(self) -> int: ...

    def __getitem__(self, box: int, /) -> FileOffset: ...

    def __iter__(self) -> Iterator[FileOffset]: ...


@dataclass(frozen=True, slots=True)
class StoredFragment:
    """A box that is contiguous and row-major in a file.

    Args:
        file: path relative to the catalog's root.
        begin: byte offset of the box's first element in the file.
        box: global coordinates.
    """

    file: str
    begin: int
    box: Box


@dataclass(frozen=True, eq=False)
class StoredForm:
    """The properties that tensors with equal cuts share. Two are equal only if they are the same object.

    Args:
        dtype: element type by its numpy name.
        shape: the global shape.
        boxes: the boxes that are stored, in global coordinates.
        file_dtype: element type in the files, if it differs: numbers are cast when they are read.
        turned: whether files contain every box with its axes in reverse order.
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
        """Element type of the bytes in the files."""
        return self.file_dtype or self.dtype

    @property
    def content(self) -> tuple[object, ...]:
        """Everything that the form consists of, for comparisons of forms by value."""
        return self.dtype, self.shape, self.boxes, self.file_dtype, self.turned

    def in_file(self, shape: Shape, part: Box) -> tuple[Shape, Box]:
        """Return the shape of a stored box and a region of it as the file contains them."""
        return (shape[::-1], Box(part.lo[::-1], part.hi[::-1])) if self.turned else (shape, part)

    def file_axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Return axes of the file for axes of the tensor; negative ones are kept."""
        last = len(self.shape) - 1
        return tuple(last - axis if axis >= 0 else axis for axis in axes) if self.turned else axes

    @cached_property
    def finder(self) -> BoxFinder:
        """Finds boxes by box."""
        return BoxFinder(self.boxes)

    @cached_property
    def faults(self) -> list[CoverFault]:
        """The positions at which the boxes fail to tile the tensor."""
        return [] if self.tiles else cover_faults(whole(self.shape), self.boxes)


class StoredTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor as it is stored.

    Args:
        name: its name in the stored space.
        form: its dtype, its shape and how it is cut.
        offsets: file and byte offset of each box of the form.
    """

    name: str
    form: StoredForm
    offsets: FileOffsets

    @property
    def dtype(self) -> str:
        """Element type by its numpy name."""
        return self.form.dtype

    @property
    def shape(self) -> Shape:
        """The global shape."""
        return self.form.shape

    @property
    def fragments(self) -> tuple[StoredFragment, ...]:
        """The boxes, each with its place."""
        return tuple(
            StoredFragment(file, begin, box) for (file, begin), box in zip(self.offsets, self.form.boxes, strict=True)
        )

    def faults(self) -> Iterator[str]:
        """Yield the positions at which the stored boxes fail to tile the tensor: holes and overlaps."""
        for fault in self.form.faults:
            if fault.writers:
                first, second = (self.offsets[index][0] for index in fault.writers)
                yield f"{self.name}: {fault.where} is stored twice, in {first} and {second}"
            else:
                yield f"{self.name}: {fault.where} is not stored"


@dataclass(frozen=True)
class Catalog:
    """Everything that is stored under one directory.

    Args:
        root: the directory, of this machine or of a store.
        roles: role -> full name -> tensor.
        identities: the identities of the files when they were checked.
        visible_to: for every file that is not visible to all ranks of the job, the ranks with access to it, rising.
    """

    root: paths.AnyPath
    roles: dict[str, dict[str, StoredTensor]]
    identities: Identities = field(default_factory=lambda: NO_IDENTITIES)
    visible_to: Mapping[str, Sequence[int]] = field(default_factory=lambda: EVERYONE)

    @cached_property
    def sorted_names(self) -> dict[str, list[str]]:
        """The names of every role in an order that is the same on all ranks."""
        return {role: sorted(tensors) for role, tensors in self.roles.items()}

    @property
    def count(self) -> int:
        """The number of stored tensors, of all roles."""
        return sum(map(len, self.roles.values()))

    def reader(self, file: str) -> int:
        """Return the first rank with access to a file."""
        return self.visible_to.get(file, (0,))[0]

    def faults(self) -> Iterator[str]:
        """Return the tensors that are not stored whole and once."""
        for names in self.roles.values():
            for tensor in names.values():
                if tensor.form.faults:
                    yield from tensor.faults()


def gather_shards(shards: Iterable[tuple[Shard, str, int, int]]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Gather tensors from the shards of many files.

    Args:
        shards: shard, file, byte offset of its first element, bytes per element.
    Returns:
        the tensors by name, and the contradictions between files as text.
    """
    # Most tensors are in one file. Objects that are made per tensor here are visited at every garbage collection.
    only: dict[str, tuple[Shard, str, int, int]] = {}
    several: dict[str, list[tuple[Shard, str, int, int]]] = {}
    faults: list[str] = []
    for part in shards:
        shard, file, _, _ = part
        first = only.setdefault(shard.name, part)
        if first is part:
            continue
        known = first[0]
        if (known.dtype, known.global_shape) == (shard.dtype, shard.global_shape):
            several.setdefault(shard.name, [first]).append(part)
        else:
            faults.append(
                f"{shard.name}: {file} has {shard.dtype} {list(shard.global_shape)}, "
                f"another file {known.dtype} {list(known.global_shape)}"
            )
    gatherer = _Gatherer()
    tensors = {
        name: gatherer.tensor(several[name]) if name in several else gatherer.alone(part) for name, part in only.items()
    }
    return tensors, faults


class _Gatherer:
    """Makes tensors, and caches the common form of those with equal cuts."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[Box, tuple[int, int] | None], tuple[Fragment, ...]] = {}
        self._forms: dict[tuple[object, ...], StoredForm] = {}
        self._alone: dict[tuple[object, ...], StoredForm] = {}
        self._hashes: set[int] = set()

    def alone(self, part: tuple[Shard, str, int, int]) -> StoredTensor:
        """Return the tensor of one shard. This is the usual case, so equal forms are looked up once."""
        shard, file, begin, _ = part
        kind = (shard.dtype, shard.global_shape, shard.box, shard.flat)
        form = self._alone.get(kind)
        if form is None:
            self._require_own_hash(kind, file)
            form = self._alone[kind] = self.tensor([part]).form
        # One box begins where its shard does; of several it is worked out where.
        return StoredTensor(shard.name, form, ((file, begin),)) if len(form.boxes) == 1 else self.tensor([part])

    def tensor(self, parts: Sequence[tuple[Shard, str, int, int]]) -> StoredTensor:
        """Return the tensor of several shards."""
        boxes: list[Box] = []
        places: list[FileOffset] = []
        for shard, file, begin, width in parts:
            cut = (shard.box, shard.flat)
            fragments = self._cuts.get(cut)
            if fragments is None:
                self._require_own_hash(cut, file)
                fragments = self._cuts[cut] = shard.fragments
            for fragment in fragments:
                boxes.append(fragment.box)
                places.append((file, begin + fragment.start * width))
        shard = parts[0][0]
        key = (shard.dtype, shard.global_shape, *boxes)
        form = self._forms.get(key)
        if form is None:
            self._require_own_hash(key, parts[0][1])
            form = self._forms[key] = StoredForm(shard.dtype, shard.global_shape, tuple(boxes))
        return StoredTensor(shard.name, form, tuple(places))

    def _require_own_hash(self, key: object, file: str) -> None:
        """Refuse different shapes of one hash: a file has chosen them, because dicts of them take quadratic time."""
        if hash(key) in self._hashes:
            raise FormatError(
                f"{file} has tensors of shapes that were chosen to be slow to read.",
                where=file,
                evidence=["two different shapes or positions have the same hash"],
                next_step="Use another checkpoint, from a source that you trust.",
            )
        self._hashes.add(hash(key))
