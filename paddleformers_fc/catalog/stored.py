"""The form that every source of tensors takes: which box of which tensor lies where.

A catalog is built from headers alone; no tensor byte is read. Its size is linear in the stored shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import Box, BoxFinder, Shape, cover_faults, whole
from paddleformers_fc.storage.identity import Identities
from paddleformers_fc.storage.ranges import NO_IDENTITIES

EVERYONE: Mapping[str, Sequence[int]] = MappingProxyType({})
"""Where every rank sees every file."""


@dataclass(frozen=True, slots=True)
class StoredFragment:
    """A box that lies contiguous and row-major in a file.

    Args:
        file: path relative to the catalog's root.
        begin: byte offset of the box's first element in the file.
        box: global coordinates.
    """

    file: str
    begin: int
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it is stored.

    Args:
        name: its name in the stored space.
        dtype: element type by its numpy name.
        shape: the global shape.
        fragments: where its boxes lie.
    """

    name: str
    dtype: str
    shape: Shape
    fragments: tuple[StoredFragment, ...]

    @cached_property
    def finder(self) -> BoxFinder:
        """Finds fragments by box."""
        return BoxFinder([fragment.box for fragment in self.fragments])

    def faults(self) -> Iterator[str]:
        """Where the stored boxes fail to tile the tensor; nothing where every element is stored once."""
        for fault in cover_faults(whole(self.shape), [fragment.box for fragment in self.fragments]):
            if fault.writers:
                first, second = (self.fragments[index].file for index in fault.writers)
                yield f"{self.name}: {fault.where} is stored twice, in {first} and {second}"
            else:
                yield f"{self.name}: {fault.where} is not stored"


@dataclass(frozen=True)
class Catalog:
    """Everything that is stored under one directory.

    Args:
        root: the directory.
        roles: role -> full name -> tensor.
        identities: which files these were when they were checked.
        seen_by: for every file that not all ranks of the job see, the ranks that do, rising.
    """

    root: Path
    roles: dict[str, dict[str, StoredTensor]]
    identities: Identities = field(default_factory=lambda: NO_IDENTITIES)
    seen_by: Mapping[str, Sequence[int]] = field(default_factory=lambda: EVERYONE)

    def faults(self) -> Iterator[str]:
        """Tensors that are not stored whole and once."""
        for names in self.roles.values():
            for tensor in names.values():
                yield from tensor.faults()


def gather_shards(shards: Iterable[tuple[Shard, str, int, int]]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors from the shards of many files.

    Args:
        shards: shard, file, byte offset of its first element, bytes per element.
    Returns:
        the tensors by name, and the contradictions between files as text.
    """
    fragments: dict[str, list[StoredFragment]] = {}
    first: dict[str, Shard] = {}
    faults: list[str] = []
    for shard, file, begin, width in shards:
        known = first.setdefault(shard.name, shard)
        if (known.dtype, known.global_shape) != (shard.dtype, shard.global_shape):
            faults.append(
                f"{shard.name}: {file} says {shard.dtype} {list(shard.global_shape)}, "
                f"another file {known.dtype} {list(known.global_shape)}"
            )
            continue
        fragments.setdefault(shard.name, []).extend(
            StoredFragment(file, begin + part.start * width, part.box) for part in shard.fragments
        )
    tensors = {
        name: StoredTensor(name, shard.dtype, shard.global_shape, tuple(fragments.get(name, ())))
        for name, shard in first.items()
    }
    return tensors, faults
