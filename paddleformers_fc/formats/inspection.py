"""Facts about an opened checkpoint, from its manifest and headers; no tensor bytes are read.

Tensors are listed with their shards as they were written: a box of the tensor, or a range of a box's elements, with
file and byte offset. This comes from the headers, because the catalog splits ranges into boxes.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Collection, Iterator

import msgspec

from paddleformers_fc.formats.catalog import StoredTensor
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint, StoredShard
from paddleformers_fc.formats.index import IndexedFiles
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.manifest import Branch, Manifest
from paddleformers_fc.text import natural


class JobFacts(msgspec.Struct, frozen=True):
    """The job that saved a flex checkpoint.

    Attributes:
        step: optimizer steps done.
        consumed_samples: training samples seen.
        world_size: number of ranks.
        parallel: degree per parallel axis.
        family: the model family whose mapping was used.
        written_by: program and version.
        differing_replicas: parts of tensors for which ranks had different values, one line each.
        diverged_ties: tied tensors whose copies differ, one line each; an automatic resume skips such a checkpoint.
        run: id of the run; empty if no Trainer saved it.
        branches: the earlier runs that it continues, with their steps, first to last.
        time: when it was saved, UTC; empty if not recorded.
        host: the host that committed it; empty if not recorded.
    """

    step: int
    consumed_samples: int
    world_size: int
    parallel: dict[str, int]
    family: str
    written_by: str
    differing_replicas: list[str]
    diverged_ties: list[str]
    run: str
    branches: list[Branch]
    time: str
    host: str


class RoleFacts(msgspec.Struct, frozen=True):
    """The stored tensors of one role.

    Attributes:
        tensors: number of tensors.
        elements: number of elements; for ``model_state``, of parameters.
        bytes: size of the elements.
        dtypes: number of tensors by element type.
        files: number of files that contain them.
    """

    tensors: int
    elements: int
    bytes: int
    dtypes: dict[str, int]
    files: int


class ShardFacts(msgspec.Struct, frozen=True):
    """One stored shard of a tensor, written by one rank.

    Attributes:
        file: path relative to the directory.
        begin: byte offset of its first element in the file.
        bytes: its length.
        offset: first coordinate of its box on every axis.
        shape: shape of its box.
        flat: for a flattened shard, the stored range of the box's elements; else None.
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
        dtype: numpy name of the element type.
        shape: global shape.
        bytes: its global size.
        pieces: its shards.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    pieces: tuple[ShardFacts, ...]


def job_facts(manifest: Manifest | None) -> JobFacts | None:
    """Return the job that saved a checkpoint, from its commit record; None if its format has none."""
    if manifest is None:
        return None
    return JobFacts(
        manifest.step,
        manifest.consumed_samples,
        manifest.world_size,
        manifest.parallel,
        manifest.family,
        manifest.written_by,
        manifest.differences,
        [line for tie in manifest.ties for line in tie.differences],
        manifest.saved_by.id,
        manifest.saved_by.branches,
        manifest.saved_at.time,
        manifest.saved_at.host,
    )


def role_facts(checkpoint: OpenedCheckpoint) -> dict[str, RoleFacts]:
    """Return what is stored in every role."""
    return {role: _role_facts(stored.values()) for role, stored in checkpoint.catalog.roles.items()}


def _role_facts(tensors: Collection[StoredTensor]) -> RoleFacts:
    counts = [math.prod(one.shape) for one in tensors]
    size = sum(count * dtype_size(one.dtype) for count, one in zip(counts, tensors, strict=True))
    files = {file for one in tensors for file, _ in one.offsets}
    return RoleFacts(len(counts), sum(counts), size, dict(Counter(one.dtype for one in tensors)), len(files))


def list_tensors(checkpoint: OpenedCheckpoint, pattern: str) -> list[TensorFacts]:
    """Return the stored tensors whose names match, in natural order within each role.

    Args:
        checkpoint: an opened checkpoint of any format.
        pattern: a shell pattern for names.
    Raises:
        FlexError: a file vanished or changed since it was opened.
    """
    listed: list[TensorFacts] = []
    for role, tensors in checkpoint.catalog.roles.items():
        names = {name for name in tensors if fnmatch.fnmatchcase(name, pattern)}
        shards: dict[str, list[ShardFacts]] = {}
        for shard, file, begin, width in _stored_shards(checkpoint, role, names):
            shards.setdefault(shard.name, []).append(_shard_facts(shard, file, begin, width))
        for name in sorted(names, key=natural):
            tensor = tensors[name]
            size = math.prod(tensor.shape) * dtype_size(tensor.dtype)
            ordered = sorted(shards.get(name, ()), key=lambda shard: (shard.offset, shard.flat or (0, 0)))
            listed.append(TensorFacts(role, name, tensor.dtype, tensor.shape, size, tuple(ordered)))
    return listed


def _stored_shards(checkpoint: OpenedCheckpoint, role: str, names: Collection[str]) -> Iterator[StoredShard]:
    """Yield the shards of some tensors: as they were written if there is an index, else as boxes of the catalog."""
    tensors, identities = checkpoint.catalog.roles[role], checkpoint.catalog.identities
    if isinstance(identities, IndexedFiles):
        for file in sorted({file for name in names for file, _ in tensors[name].offsets}):
            yield from (stored for stored in identities.index.shards(file) if stored[0].name in names)
        return
    for name in sorted(names):
        tensor = tensors[name]
        width = dtype_size(tensor.form.held_dtype)
        for part in tensor.fragments:
            yield Shard(name, tensor.dtype, tensor.shape, part.box), part.file, part.begin, width


def _shard_facts(shard: Shard, file: str, begin: int, width: int) -> ShardFacts:
    return ShardFacts(file, begin, shard.size * width, shard.box.lo, shard.box.shape, shard.flat)
