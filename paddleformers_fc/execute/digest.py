"""Read canonical tensors and compute their digests, which are equal for equal numbers under any layout and format.

Tensors are read and hashed in pieces, in the order of their elements. Memory: one piece and scratch memory, independent
of the size of a tensor. Open weights have one md5 per directory, which does not depend on how they are divided into
files. 16-bit weights are compared with their rounded master weights.

The digest of live weights hashes every element with its position in the canonical tensor, and adds the hashes of a
tensor modulo 2^64. Sums do not depend on the order, so each rank adds its own elements (the first holder those of
replicas), and the ranks exchange one number per tensor. Time: about 20 s per 10^9 elements of a rank.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import xxhash
from msgspec import structs

from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.errors import Corrupt
from paddleformers_fc.execute.memory import host_pieces, joined
from paddleformers_fc.execute.reading import Key, fill_arrays, verify_equal
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.layout.live import LocalTensor, describe_roles
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE
from paddleformers_fc.layout.shards import Fragment, Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import TensorSources
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.mapping.templates import BoxLink, pulled
from paddleformers_fc.plan.build import Planner, ReadSource, plan_reads, row_major_pieces
from paddleformers_fc.plan.items import LoadPlan, ReadItem
from paddleformers_fc.plan.sources import canonical_layout
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.executor import ReadPool
from paddleformers_fc.storage.operations import numpy_dtype
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.text import count_text, fold, natural

PIECE_BYTES = 32 << 20
"""Bytes of tensors in memory at a time, enough rows of a transposed tensor to make the runs of its columns long."""
_ELEMENT_BYTES = 8
"""Maximum bytes of an element, which may be larger than a piece."""

Array = np.ndarray[Any, Any]


class TensorDigest(msgspec.Struct, frozen=True):
    """One canonical tensor.

    Args:
        role: its role.
        name: its canonical name, with the suffix of an optimizer state.
        dtype: numpy name of the dtype.
        shape: global shape.
        md5: hex digest of its bytes, row-major and little-endian.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    md5: str


def digest_tensors(source: ReadSource, layout: ShardsByRole, piece_bytes: int = PIECE_BYTES) -> Iterator[TensorDigest]:
    """Yield the digests of some canonical tensors, in natural order within each role.

    Args:
        source: the source from a checkpoint to the canonical space.
        layout: role -> name -> the complete tensor.
        piece_bytes: bound on the bytes in memory.
    Raises:
        FlexError: as :func:`read_canonical`.
    """
    hasher = hashlib.md5()
    in_order = {role: {name: shards[name] for name in sorted(shards, key=natural)} for role, shards in layout.items()}
    for piece, numbers in read_in_pieces(source, in_order, piece_bytes):
        hasher.update(numbers.view(np.uint8).data)
        if piece.is_last:
            tensor = piece.tensor
            yield TensorDigest(piece.role, tensor.name, tensor.dtype, tensor.global_shape, hasher.hexdigest())
            hasher = hashlib.md5()


def require_plan(source: ReadSource, layout: ShardsByRole) -> LoadPlan:
    """Plan the reads of canonical tensors, and check that copies are equal.

    Raises:
        FlexError: the tensors do not match what is stored, or copies of a tied tensor differ.
    """
    catalog, plan = source.catalog, plan_reads(source, layout)
    plan.report.raise_error(str(catalog.root))
    verify_equal(plan.checks, catalog.root, catalog.identities)
    return plan


class Piece(msgspec.Struct, frozen=True):
    """A range of a tensor's elements.

    Args:
        role: role of the tensor.
        tensor: the complete tensor.
        part: the range.
    """

    role: str
    tensor: Shard
    part: Shard

    @property
    def begin(self) -> int:
        """Index of the first element in the tensor."""
        return 0 if self.part.flat is None else self.part.flat[0]

    @property
    def is_last(self) -> bool:
        """Whether this is the last piece of the tensor."""
        return self.begin + self.part.size == self.tensor.size


class PieceBatch(msgspec.Struct, frozen=True):
    """Successive pieces that are read together.

    Args:
        pieces: the pieces, at most one per tensor.
        items: their reads.
    """

    pieces: list[Piece]
    items: list[ReadItem]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return sum(shard_bytes(one.part) for one in self.pieces)

    def read(self, pool: ReadPool, root: AnyPath, memory: Array) -> list[Array]:
        """Read the pieces one after the other into memory, and return a flat array for each.

        Args:
            pool: the threads.
            root: the catalog's directory.
            memory: the bytes to fill, at least :attr:`nbytes`.
        """
        arrays: dict[Key, Array] = {}
        at = 0
        for one in self.pieces:
            size = shard_bytes(one.part)
            arrays[one.role, one.tensor.name] = memory[at : at + size].view(numpy_dtype(one.part.dtype))
            at += size
        fill_arrays(pool, root, sorted(self.items, key=_file_order), arrays)
        return list(arrays.values())


def piece_batches(
    planner: Planner,
    tensors: Iterable[tuple[str, Shard, list[ReadItem], int]],
    batch_bytes: int,
) -> Iterator[PieceBatch]:
    """Yield tensors in order, in batches; at least one, which may be empty.

    Args:
        planner: plans the reads of pieces.
        tensors: every tensor, with its role, its reads, and a bound on the bytes of its pieces.
        batch_bytes: bound on the bytes of a batch; a larger piece is a batch of its own.
    """
    pieces: list[Piece] = []
    items: list[ReadItem] = []
    used = 0
    for role, tensor, own, piece_bytes in tensors:
        for part in row_major_pieces(tensor, piece_bytes):
            size = shard_bytes(part)
            # An empty piece joins the previous batch, because a file is finished when its last byte is written.
            if pieces and size and (used + size > batch_bytes or pieces[-1].tensor is tensor):
                yield PieceBatch(pieces, items)
                pieces, items, used = [], [], 0
            pieces.append(Piece(role, tensor, part))
            items.extend(own if part.flat is None else planner.items(role, part))
            used += size
    yield PieceBatch(pieces, items)


def read_in_pieces(
    source: ReadSource, layout: ShardsByRole, piece_bytes: int = PIECE_BYTES, plan: LoadPlan | None = None
) -> Iterator[tuple[Piece, Array]]:
    """Yield tensors in the order of a layout, in pieces with their numbers, which are valid until the next piece.

    Args:
        source: the source from a checkpoint to the canonical space.
        layout: role -> name -> the complete tensor. Equal layouts give equal pieces.
        piece_bytes: bound on the bytes in memory.
        plan: the result of :func:`require_plan` for at least these tensors, if there is one.
    Raises:
        FlexError: as :func:`read_canonical`.
    """
    catalog = source.catalog
    items: dict[Key, list[ReadItem]] = {}
    for item in (plan or require_plan(source, layout)).items:
        items.setdefault((item.role, item.name), []).append(item)
    expect(sum(shard_bytes(one) for shards in layout.values() for one in shards.values()))
    tensors = (
        (role, tensor, items.get((role, tensor.name), []), piece_bytes)
        for role, shards in layout.items()
        for tensor in shards.values()
    )
    memory = np.empty(piece_bytes + _ELEMENT_BYTES, np.uint8)
    with ReadPool(identities=catalog.identities) as pool:
        for batch in piece_batches(Planner(source), tensors, piece_bytes):
            for piece, numbers in zip(batch.pieces, batch.read(pool, catalog.root, memory), strict=True):
                yield piece, numbers
                advance(numbers.nbytes)


_file_order = attrgetter("stored.file", "stored.begin")


def read_canonical(source: ReadSource, layout: ShardsByRole) -> dict[Key, Array]:
    """Return some shards of canonical tensors as flat arrays, by role and name.

    Args:
        source: the source from a checkpoint to the canonical space.
        layout: role -> name -> the shard to read.
    Raises:
        FlexError: the shards do not match what is stored, copies of a tied tensor differ, or a file cannot be read.
    """
    plan = require_plan(source, layout)
    arrays = {
        (role, name): np.empty(shard.size, numpy_dtype(shard.dtype))
        for role, shards in layout.items()
        for name, shard in shards.items()
    }
    with ReadPool(identities=source.catalog.identities) as pool:
        fill_arrays(pool, source.catalog.root, plan.items, arrays)
    return arrays


def weights_md5(digests: Mapping[str, str]) -> str:
    r"""Return the md5 of the names and bytes of all tensors, which is equal for every layout and size of files.

    It is the md5 of one line per tensor, sorted by name as text: the name, a space and the md5 of the tensor. With the
    safetensors library::

        lines = [f"{name} {hashlib.md5(tensors[name].tobytes()).hexdigest()}\n" for name in sorted(tensors)]
        hashlib.md5("".join(lines).encode()).hexdigest()

    Args:
        digests: the md5 of the bytes of every tensor by name, row-major and little-endian.
    """
    lines = (f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.md5("".join(lines).encode()).hexdigest()


class TensorHasher:
    """Computes the md5 of tensors from pieces that several threads read.

    The pieces of a tensor are hashed in order: a thread with a later piece waits for the thread with the piece before
    it. Threads must therefore take the pieces in order. Each uses the hasher as a context manager, so that its error
    releases the others.

    Attributes:
        digests: the md5 of every complete tensor by name.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        # The md5 of every tensor that is partly hashed, and the index of the next element to hash.
        self._open: dict[str, tuple[Any, int]] = {}
        self._is_stopped = False
        self._change = threading.Condition()

    def update(self, piece: Piece, numbers: Array) -> None:
        """Hash a piece after the pieces before it; do nothing after an error of any thread."""
        name = piece.tensor.name
        with self._change:
            self._change.wait_for(lambda: self._is_stopped or piece.begin == self._open.get(name, (None, 0))[1])
            if self._is_stopped:
                return
            md5, _ = self._open.get(name, (hashlib.md5(), 0))
        md5.update(numbers.view(np.uint8).data)
        with self._change:
            if piece.is_last:
                self._open.pop(name, None)
                self.digests[name] = md5.hexdigest()
            else:
                self._open[name] = md5, piece.begin + piece.part.size
            self._change.notify_all()

    def __enter__(self) -> TensorHasher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        with self._change:
            self._is_stopped |= kind is not None
            self._change.notify_all()


def compare_rounded(source: ReadSource) -> int:
    """Compare 16-bit weights with their rounded master weights, and return the number of compared weights.

    A load does not compare them, because it would read master weights that other ranks need.

    Args:
        source: the source from a checkpoint to the canonical space.
    Raises:
        Corrupt: lists every weight that differs from its master weight, rounded half to even.
    """
    layout, catalog = canonical_layout(source), source.catalog
    masters = layout.get(MASTER_WEIGHT, {})
    weights = {
        name: shard
        for name, shard in layout.get(MODEL_STATE, {}).items()
        if name + MASTER.suffix in masters and dtype_size(shard.dtype) == 2
    }
    stored = {name.removesuffix(MASTER.suffix): one for name, one in catalog.roles.get(MASTER_WEIGHT, {}).items()}
    exact = structs.replace(source, catalog=structs.replace(catalog, roles={MODEL_STATE: stored}))
    exact_weights = {name: msgspec.structs.replace(shard, dtype=MASTER.dtype) for name, shard in weights.items()}
    pairs = zip(
        read_in_pieces(source, {MODEL_STATE: weights}, PIECE_BYTES),
        read_in_pieces(exact, {MODEL_STATE: exact_weights}, 2 * PIECE_BYTES),
        strict=True,
    )
    mismatched = {one.tensor.name: None for (one, own), (_, master) in pairs if not _is_rounded(own, master)}
    if mismatched:
        is_are = "is" if len(mismatched) == 1 else "are"
        raise Corrupt(
            f"{count_text(len(mismatched), 'weight')} of {catalog.root} {is_are} not the rounded master weight.",
            where=str(catalog.root),
            evidence=fold(mismatched),
            next_step="Use another checkpoint. Weights were changed after the save or outside of the optimizer, or "
            "replicas differed under flex_check_replicas: off.",
        )
    return len(weights)


def _is_rounded(own: Array, master: Array) -> bool:
    """Return whether a weight equals its rounded master weight; NaN may have any bits."""
    with np.errstate(over="ignore"):
        rounded = master.astype(own.dtype)
    other = np.flatnonzero(own.view(np.uint16) != rounded.view(np.uint16))
    return bool(np.isnan(own[other]).all() and np.isnan(rounded[other]).all())


_PIECE_ELEMENTS = 1 << 20
_MODULUS = 1 << 64
_PER_AXIS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
_PER_VALUE = np.uint64(0xD6E8FEB86659FD93)
_STEPS = tuple((np.uint64(shift), np.uint64(by)) for shift, by in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
_LAST = np.uint64(31)

Sums = dict[str, int]
"""The sum of hashes of every canonical tensor, by its name and dtype."""


def digest_live(weights: Mapping[str, LocalTensor], model: ModelDescription, channel: Channel) -> str:
    """Return the digest of the weights of all ranks; every rank must call.

    Args:
        weights: name -> live ``ShardedWeight`` of this rank.
        model: the description of the model.
        channel: all ranks of the job.
    Returns:
        32 hex digits.
    Raises:
        FlexError: the same on every rank: the weights cannot be mapped.
    """

    def own_shards() -> list[Shard]:
        return list(describe_roles({MODEL_STATE: weights})[MODEL_STATE].values())

    everyone = all_gather_checked(channel, "describing the weights", own_shards, list[Shard])
    earlier = {shard for shards in everyone[: channel.rank] for shard in shards}

    def add_up() -> Sums:
        shards = {shard.name: shard for shard in everyone[channel.rank]}
        made = model_rules(model, shards).mapping().made
        sums: Sums = {}
        for shard in shards.values():
            # Aliases, and tensors without a canonical form, are not part of the base.
            if shard not in earlier and shard.name in made:
                _add_shard(sums, shard, weights[shard.name].local_tensor, made[shard.name])
        return sums

    totals: Counter[str] = Counter()
    for sums in all_gather_checked(channel, "hashing the weights", add_up, Sums):
        totals.update(sums)
    hasher = xxhash.xxh3_128()
    for name in sorted(totals):
        hasher.update(f"{name} {totals[name] % _MODULUS}\n".encode())
    return hasher.hexdigest()


def _add_shard(sums: Sums, shard: Shard, tensor: Any, sources: TensorSources) -> None:
    unsigned = np.dtype(f"<u{dtype_size(shard.dtype)}")
    for fragment, values in _pieces(shard, tensor, unsigned):
        for link in sources.template.links:
            part = link.target_box.intersect(fragment.box)
            if part is not None:
                name = f"{sources.names[link.source]} {shard.dtype}"
                inside = part.relative_to(fragment.box.lo)
                box = values[tuple(slice(low, high) for low, high in zip(inside.lo, inside.hi, strict=True))]
                sums[name] = (sums.get(name, 0) + _sum_of(box, _positions(link, part))) % _MODULUS


def _pieces(shard: Shard, tensor: Any, unsigned: np.dtype[Any]) -> Iterator[tuple[Fragment, Array]]:
    """Yield the boxes of a shard with the bits of their elements, a bounded number at a time."""
    begin = 0 if shard.flat is None else shard.flat[0]
    for start in range(0, shard.size, _PIECE_ELEMENTS):
        stop = min(start + _PIECE_ELEMENTS, shard.size)
        parts = host_pieces(tensor, start, stop)
        values = joined(parts, stop - start).view(unsigned)
        piece = Shard(shard.name, shard.dtype, shard.global_shape, shard.box, (begin + start, begin + stop))
        for fragment in piece.fragments:
            size = fragment.box.volume
            yield fragment, values[fragment.start : fragment.start + size].reshape(fragment.box.shape)


def _positions(link: BoxLink, part: Box) -> Array:
    """Return a number for the position of every element of a target box in its source; it can be broadcast."""
    start = sum(at * _PER_AXIS[axis] for axis, at in enumerate(pulled(link, part).lo)) % _MODULUS
    found = np.full((1,) * len(part.shape), start, np.uint64)
    for axis, length in enumerate(part.shape):
        steps = np.arange(length, dtype=np.uint64) * np.uint64(_PER_AXIS[link.axes[axis]] if length > 1 else 0)
        found = found + steps.reshape([-1 if other == axis else 1 for other in range(len(part.shape))])
    return found


def _sum_of(bits: Array, positions: Array) -> int:
    """Return the sum of the hashes of elements with their positions, modulo 2^64."""
    mixed = positions + bits.astype(np.uint64) * _PER_VALUE
    for shift, factor in _STEPS:
        mixed ^= mixed >> shift
        mixed *= factor
    mixed ^= mixed >> _LAST
    return int(mixed.sum(dtype=np.uint64))
