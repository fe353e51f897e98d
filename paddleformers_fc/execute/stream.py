"""Stream live weights: complete canonical tensors, one by one, on the ranks that receive them.

The live tensors of all ranks are treated as a checkpoint in memory, whose "files" are held by ranks, so that a stream
is planned like the reads of a checkpoint and transferred in rounds. A few receivers among many ranks get pieces
directly (:mod:`.exchange`). If all ranks or many receive, every holder broadcasts its part of a round, or an all-reduce
unites the parts of many holders, so that the bytes that a rank sends do not grow with the number of receivers.
Before every batch all ranks exchange whether they continue, and raise the error of any rank; a batch is yielded only
after that. All receivers get all tensors, or the files of an export are divided among them (:mod:`.live_export`).

Time: a rank sends its pieces once per receiver, or twice the bytes of all tensors. Planning is linear in the distinct
shards of the job and the pieces, and cached. Memory: a batch and the pieces of a round, at most ``max_bytes``, or one
tensor and a round.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, broadcast, decoder_of, run_on_all
from paddleformers_fc.errors import Diverged, FlexError, OptionError, PeerError
from paddleformers_fc.execute.exchange import attempt, exchange_round, fill_piece, unpacked
from paddleformers_fc.execute.export import export_source, recast
from paddleformers_fc.execute.memory import copy_ends, copy_to_host, dtype_of, host_view, slot_of
from paddleformers_fc.execute.merging import Merge
from paddleformers_fc.execute.reading import batches, box_in_rows
from paddleformers_fc.execute.replicas import Assignment, CopyPart, Ties, Writers, hash_ties, ties_of
from paddleformers_fc.execute.save import JobRecord, LivePart, capture, live_part
from paddleformers_fc.execute.save_plan import PlanCache, PlannedWrite, grouped, proved_mapping
from paddleformers_fc.execute.staging_pool import begin_copies_to_host, current_stream, in_host_memory, pool_of
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.description import shared_copies
from paddleformers_fc.families.stated import decode_mapping, model_ties
from paddleformers_fc.formats.catalog import Catalog, gather_shards
from paddleformers_fc.formats.checkpoint import REFUSE, OpenedCheckpoint, OutputFile, StoredModel, with_role, with_tied
from paddleformers_fc.formats.flex import FLEX
from paddleformers_fc.formats.huggingface import DEFAULT_MAX_SHARD_BYTES
from paddleformers_fc.formats.registry import default_writer
from paddleformers_fc.layout.live import LiveRoles, Roles, describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shard_messages import decode_shards, encode_rank_shards
from paddleformers_fc.layout.shards import Shard, ShardsByRole, shard_bytes
from paddleformers_fc.plan.build import Planner, ReadSource
from paddleformers_fc.plan.items import ReadItem, StoredPart, rows_around
from paddleformers_fc.plan.sources import canonical_layout, canonical_source
from paddleformers_fc.plan.transfer_plan import ROUND_BYTES, Transfer, TransferPiece, boxes_within, schedule_rounds
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.executor import DEFAULT_STAGING_MEMORY_BYTES
from paddleformers_fc.storage.operations import numpy_dtype
from paddleformers_fc.text import count_text, likely_meant

Array = np.ndarray[Any, Any]
Tensors: TypeAlias = Generator[tuple[str, Any], None, None]
"""Canonical names and tensors."""
Buffer: TypeAlias = tuple[Any, Array]
"""A tensor that is being assembled, and a flat array over the same memory."""
_T = TypeVar("_T")

DEFAULT_BYTES = 512 << 20
"""Default maximum number of bytes in transit on a rank."""

MAX_DIRECT_RECEIVERS = 8
"""Maximum number of receivers to which pieces are sent directly, if other ranks receive nothing."""

MAX_BROADCASTS = 8
"""Maximum number of holders that broadcast in one round; an all-reduce is one collective for any number."""

_MODEL = Path("the live model")
_NAME_BYTES = 8


@dataclass(frozen=True)
class StreamRequest:
    """The content of a stream, equal on all ranks.

    Args:
        receivers: the ranks that receive the tensors, in ascending order.
        ranks: number of ranks of the job.
        names: the canonical names of the tensors; None for all tensors.
        dtype: the dtype for tensors with the model's dtype; empty to keep it.
        max_bytes: maximum number of bytes in transit on a rank; one tensor may exceed it.
        is_exported: whether adapters have PEFT's names, as in an export; otherwise canonical names.
        max_file_bytes: bound on the tensors of one file of an export.
        is_divided: whether the files are divided among the receivers; otherwise each receiver gets all tensors.
        tied: the pipeline stage whose copy of a tied tensor to use; under ``refuse`` the copies must be equal.
        role: ``model_state``, or ``ema_state`` for the moving averages.
    """

    receivers: tuple[int, ...]
    ranks: int
    names: tuple[str, ...] | None = None
    dtype: str = ""
    max_bytes: int = DEFAULT_BYTES
    is_exported: bool = True
    max_file_bytes: int = DEFAULT_MAX_SHARD_BYTES
    is_divided: bool = False
    tied: str = REFUSE
    role: str = MODEL_STATE

    @property
    def is_united(self) -> bool:
        """Whether every rank gets all pieces of a round."""
        if self.is_divided or self.ranks == 1:
            return False
        return len(self.receivers) == self.ranks or len(self.receivers) > MAX_DIRECT_RECEIVERS

    @property
    def round_bytes(self) -> int:
        """Bound on the bytes that a rank sends, and receives, in a round."""
        return max(1, min(ROUND_BYTES, self.max_bytes // 8))

    @property
    def batch_bytes(self) -> int:
        """Bound on the bytes of the tensors that are assembled together; a larger tensor is a batch of its own."""
        return max(1, min(ROUND_BYTES, self.max_bytes // 2))


@dataclass(frozen=True)
class Batch:
    """Tensors that are assembled together.

    Args:
        tensors: the complete canonical tensors that this rank receives, in the order of the stream.
        items: for every range of a live shard that this rank receives, the parts of tensors that it fills.
        rounds: the pieces that this rank sends or receives; those of all ranks if every rank gets all pieces.
    """

    tensors: tuple[Shard, ...]
    items: Mapping[Transfer, Sequence[ReadItem]]
    rounds: tuple[tuple[TransferPiece, ...], ...]


@dataclass(frozen=True)
class StreamPlan:
    """The part of one rank in a stream.

    Args:
        batches: all tensors.
        held: role and range of the fragments of live shards that this rank sends, by file and offset.
        sides: this rank's copies of tied tensors, which are hashed before the first batch.
        has_ties: whether any rank has such a copy.
        ties: the tied tensors to compare, on the first rank.
        shared: canonical name of an adapter's tensor -> canonical name of the tensor that several layers share.
        files: the files of an export that is divided among the receivers.
        checkpoint: the live tensors as a checkpoint, for the metadata files of such an export; on the first rank.
    """

    batches: tuple[Batch, ...]
    held: Mapping[tuple[str, int], tuple[str, PlannedWrite]]
    sides: tuple[CopyPart, ...]
    has_ties: bool
    ties: Ties
    shared: Mapping[str, str]
    files: tuple[OutputFile, ...] = ()
    checkpoint: OpenedCheckpoint | None = None


class _LiveJob(msgspec.Struct, frozen=True, array_like=True):
    """Message with the live tensors of all ranks as a checkpoint.

    Args:
        name: name of the plan.
        assignment: the ranks that send shards with several holders.
        files: path -> name -> shard, encoded.
        owners: the rank that holds each file, by path. A path begins with the role of its tensors.
        mapping: the content of ``mapping.json``.
        sides: the copies of tied tensors that ranks hash.
    """

    name: bytes
    assignment: Assignment
    files: bytes
    owners: dict[str, int]
    mapping: bytes
    sides: list[CopyPart]


_PLANS = PlanCache[StreamPlan]()


def part_of(weights: Roles, model: ModelDescription) -> LivePart:
    """Return this rank's part of a stream.

    Args:
        weights: role -> name -> live ``ShardedWeight`` of this rank.
        model: the description of the model.
    """
    return live_part(weights, model, {}, JobRecord(0, 0, {}), "off")


def known_plans(part: LivePart, request: StreamRequest, rank: int) -> dict[bytes, StreamPlan]:
    """Return the plans that this rank has cached for a stream, by name."""
    return _PLANS.known(rank, _facts(part, request))


def _facts(part: LivePart, request: StreamRequest) -> bytes:
    return part.facts + repr(request).encode()


def plan_stream(
    part: LivePart,
    request: StreamRequest,
    plans: Mapping[bytes, StreamPlan],
    named: Sequence[Sequence[bytes]],
    channel: Channel,
) -> StreamPlan:
    """Return the plan of a stream, from the cache if all ranks have it. Every rank must call.

    Args:
        part: this rank's part.
        request: the content of the stream, equal on all ranks.
        plans: the result of :func:`known_plans`.
        named: the names of the plans of every rank, by rank.
        channel: all ranks.
    Raises:
        FlexError: the same on every rank: the weights cannot be mapped, or do not match the request.
    """
    usable = set.intersection(*(set(names) for names in named))
    if usable:
        return plans[min(usable)]
    shards: dict[str, dict[str, Shard]] = {}

    def describe() -> bytes:
        shards.update(describe_roles(part.tensors))
        return encode_rank_shards(shards)

    payloads = all_gather_checked(channel, "describing shards", describe, bytes, to=0)
    ties: list[Ties] = []
    packed = broadcast(channel, "planning a stream", partial(describe_job, payloads, part.model, ties), bytes)
    plan = partial(plan_of_rank, packed, shards, part.model, request, channel.rank, ties)
    name, made = run_on_all(channel, "planning a stream", plan)
    _PLANS.keep(channel.rank, _facts(part, request), name, made)
    return made


def describe_job(payloads: Sequence[bytes], model: ModelDescription, ties: list[Ties]) -> bytes:
    """Return the live tensors of all ranks as a checkpoint, encoded, for all ranks.

    Args:
        payloads: the shards of every rank, encoded, by rank.
        model: the description of the model.
        ties: receives the tied tensors that the first rank compares.
    Raises:
        MappingError: the mapping of the model cannot be bound or proved.
        MismatchError: the shards of all ranks do not form the complete model.
    """
    job = decode_shards(payloads)
    mapping, _ = proved_mapping(job, model)
    writers = Writers(job)
    ranks = range(len(job.held))
    files: dict[str, dict[str, Shard]] = {}
    owners: dict[str, int] = {}
    for rank in ranks:
        for path, _, pieces in grouped(writers.share_of(rank), rank):
            files[path], owners[path] = {piece.shard.name: piece.shard for piece in pieces}, rank
    ties.append(ties_of(job, map(writers.share_of, ranks), model_ties(model)))
    name = secrets.token_bytes(_NAME_BYTES)
    live = _LiveJob(name, writers.assignment, encode_rank_shards(files), owners, mapping, ties[0].sides)
    return zlib.compress(msgspec.msgpack.encode(live), 1)


def plan_of_rank(
    packed: bytes,
    shards: ShardsByRole,
    model: ModelDescription,
    request: StreamRequest,
    rank: int,
    ties: Sequence[Ties],
) -> tuple[bytes, StreamPlan]:
    """Return the name of a plan, and one rank's part of it.

    Args:
        packed: the result of :func:`describe_job`.
        shards: the shards of the rank, in the order of its description.
        model: the description of the model.
        request: the content of the stream.
        rank: the rank.
        ties: the tied tensors to compare; empty except on the first rank.
    Raises:
        FlexError: the request does not match the model.
    """
    job = decoder_of(_LiveJob).decode(zlib.decompress(packed))
    files, offsets = decode_shards([job.files]), dict[tuple[str, str], int]()
    stored: dict[str, list[tuple[Shard, str, int, int]]] = {}
    used = dict.fromkeys(job.owners, 0)
    for number in files.held[0]:
        path, shard = files[number]
        offsets[path, shard.name] = used[path]
        stored.setdefault(path.split("/")[0], []).append((shard, path, used[path], dtype_size(shard.dtype)))
        used[path] += max(1, shard_bytes(shard))
    # The coordinator has proved that the shards form every tensor exactly once.
    roles = {role: gather_shards(theirs)[0] for role, theirs in stored.items()}
    described, rules = decode_mapping(job.mapping, str(_MODEL))
    visible = {path: (owner,) for path, owner in job.owners.items()}
    live = OpenedCheckpoint(
        FLEX,
        Catalog(_MODEL, roles, visible_to=visible),
        dict(model.config),
        StoredModel(rules, described or model),
    )
    checkpoint = with_tied(with_role(live, request.role), request.tied)
    share, _ = job.assignment.share_of(rank, shards)
    held = {
        (path, offsets[path, one.name] + fragment.start * dtype_size(one.dtype)): (
            role,
            PlannedWrite(one.name, piece.start + fragment.start, piece.start + one.size),
        )
        for path, role, pieces in grouped(share, rank)
        for piece in pieces
        for one in [piece.shard]
        for fragment in one.fragments  # A flattened shard is read by its fragments.
    }
    source, output = _source_and_files(checkpoint, request)
    made = tuple(_batches(source, output, job.owners, request, rank))
    sides = tuple(side for side in job.sides if side.rank == rank)
    own_ties = ties[0] if ties else Ties((), {})
    plan = StreamPlan(made, held, sides, bool(job.sides), own_ties, shared_copies(rules))
    if request.is_divided:
        plan = replace(plan, files=output, checkpoint=checkpoint if rank == 0 else None)
    return job.name, plan


def _batches(
    source: ReadSource, files: Sequence[OutputFile], owners: Mapping[str, int], request: StreamRequest, rank: int
) -> Iterator[Batch]:
    planner = Planner(source)
    groups = [(receiver,) for receiver in request.receivers] if request.is_divided else [request.receivers]
    shares = [_share(files[number :: len(groups)], request) for number in range(len(groups))]
    for step in zip_longest(*shares, fillvalue=()):
        moves: list[Transfer] = []
        own: list[Shard] = []
        items: dict[Transfer, list[ReadItem]] = {}
        for receivers, tensors in zip(groups, step, strict=True):
            parts: dict[StoredPart, list[ReadItem]] = {}
            for item in (item for shard in tensors for item in planner.items(MODEL_STATE, shard)):
                parts.setdefault(item.stored, []).append(item)
            transfers = {Transfer(part, owners[part.file], receivers): theirs for part, theirs in parts.items()}
            moves.extend(transfers)
            if rank in receivers:
                own.extend(tensors)
                items.update(transfers)
        planner.report.raise_error(str(_MODEL))
        if request.is_united:
            rounds = tuple(_united_rounds(moves, request.round_bytes))
        else:
            rounds = schedule_rounds(moves, rank, request.round_bytes).rounds
        yield Batch(tuple(own), items, rounds)


def _share(files: Sequence[OutputFile], request: StreamRequest) -> Iterator[Sequence[Shard]]:
    """Yield the tensors of some files in batches. The first tensor is a batch of its own, so that it arrives early."""
    tensors = _selected([one for file in files for one in file.tensors], request.names)
    if tensors:
        yield tensors[:1]
    yield from batches(tensors[1:], shard_bytes, request.batch_bytes)


def _united_rounds(moves: Sequence[Transfer], limit: int) -> Iterator[tuple[TransferPiece, ...]]:
    """Yield the pieces of all ranks in rounds of at most ``limit`` bytes, or of one element."""
    pieces = (
        TransferPiece(move, box)
        for move in moves
        for box in boxes_within(move.part.part, max(1, limit // dtype_size(move.part.dtype)))
    )
    return map(tuple, batches(pieces, attrgetter("size"), limit))


def _source_and_files(
    checkpoint: OpenedCheckpoint, request: StreamRequest
) -> tuple[ReadSource, tuple[OutputFile, ...]]:
    """Return the source of all tensors that a stream may contain, and the files of an export with these tensors."""
    if not request.is_exported:
        source = canonical_source(checkpoint)
        return source, (OutputFile("", MODEL_STATE, tuple(canonical_layout(source)[MODEL_STATE].values())),)
    writer = default_writer(checkpoint)
    source = export_source(checkpoint, writer)
    layout: ShardsByRole = canonical_layout(source)
    if request.dtype:
        source, layout = recast(checkpoint, source, layout, request.dtype)
    return source, writer.files(checkpoint, layout, request.max_file_bytes)


def _selected(tensors: Sequence[Shard], names: Sequence[str] | None) -> Sequence[Shard]:
    """Return the tensors with these names, in the order of the model.

    Raises:
        OptionError: lists the names that the model does not have.
    """
    if names is None:
        return tensors
    known = {one.name for one in tensors}
    missing = [name for name in names if name not in known]
    if missing:
        raise OptionError(
            f"The model has no such tensor: {count_text(len(missing), 'name')} of {len(names)}.",
            where="names",
            evidence=[f"{name}; {likely_meant(name, known)}".rstrip("; ") for name in missing[:8]],
            next_step="Use canonical names, as in an export.",
        )
    return [one for one in tensors if one.name in set(names)]


@dataclass(frozen=True)
class Stream:
    """A planned stream.

    Args:
        plan: this rank's plan.
        part: this rank's part; its weights must not change while the stream is read.
        request: the content of the stream.
        channel: all ranks of the job.
        place: place for the tensors; None for host memory.
        merge: adapters to merge into the weights, if any.
        as_arrays: whether to yield numpy arrays instead of Paddle tensors.
    """

    plan: StreamPlan
    part: LivePart
    request: StreamRequest
    channel: Channel
    place: Any = None
    merge: Merge | None = None
    as_arrays: bool = False

    def tensors(self) -> Tensors:
        """Yield canonical names and tensors; a rank that receives nothing only sends. Every rank must iterate.

        Raises:
            FlexError: the same on every rank. Tensors that were yielded before are complete.
        """
        failures: list[Exception] = []
        ready: list[tuple[str, Any]] = []
        self._compare_ties(failures)
        for batch in (*self.plan.batches, None):
            self._agree(failures)
            try:
                yield from ready
            except GeneratorExit:  # The other ranks are about to receive this batch.
                rank = self.channel.rank
                ended = PeerError(
                    f"Rank {rank} has ended the stream before its end.",
                    where=f"rank {rank} of {self.channel.world_size}",
                    next_step="Read the stream to its end on every rank.",
                )
                with suppress(FlexError):
                    self._leave(batch, ended)
                raise
            except Exception as error:
                self._leave(batch, error)
            ready = []  # Releases the memory of the batch.
            if batch is not None:
                ready = self._assemble(batch, failures)
        self._agree(failures)

    def _compare_ties(self, failures: list[Exception]) -> None:
        """Compare the copies of tied tensors, if there are any; the first rank records a difference as its error."""
        if not self.plan.has_ties or self.request.tied != REFUSE:
            return
        hashing = partial(hash_ties, capture(self.part), self.plan.sides)
        digests = all_gather_checked(self.channel, "hashing tied tensors", hashing, list[bytes], to=0)
        found = self.plan.ties.diverged(digests) if self.channel.rank == 0 else ()
        if found:
            failures.append(
                Diverged(
                    "Copies of tied tensors differ between pipeline stages.",
                    where=str(_MODEL),
                    evidence=[line for tie in found for line in tie.differences],
                    next_step="Resume from an older checkpoint and look for the cause.",
                )
            )

    def _agree(self, failures: Sequence[Exception]) -> None:
        """Exchange errors with the other ranks, and raise the error of any rank."""

        def raise_own() -> None:
            if failures:
                raise failures[0]

        run_on_all(self.channel, "streaming weights", raise_own)

    def _leave(self, batch: Batch | None, error: Exception) -> None:
        """Take part in the next batch, then raise an error of this rank on all ranks."""
        if batch is not None:
            self._assemble(batch, [error])
        self._agree([error])

    def _assemble(self, batch: Batch, failures: list[Exception]) -> list[tuple[str, Any]]:
        """Send and receive the pieces of a batch, and return its tensors.

        Errors are added to the failures, and this rank takes part in all rounds.
        """
        buffers: dict[str, Buffer] = {}
        reader = LiveReader(self.part.tensors, self.plan.held)
        attempt(failures, lambda: buffers.update({one.name: self._empty(one) for one in batch.tensors}))
        for pieces in batch.rounds:
            own = reader.read([one for one in pieces if one.move.owner == self.channel.rank], failures)
            exchange = _unite_round if self.request.is_united else exchange_round
            for piece, array in exchange(self.channel, pieces, own):
                attempt(failures, partial(_place, batch.items.get(piece.move, ()), piece, array, buffers))
            reader.release()
        found: list[tuple[str, Any]] = []
        attempt(failures, lambda: found.extend(self._finished(buffers)))
        return found

    def _empty(self, shard: Shard) -> Buffer:
        """Allocate host memory for a complete tensor."""
        if self.as_arrays:
            array = np.empty(shard.global_shape, numpy_dtype(shard.dtype))
            return array, array.reshape(-1)
        tensor = empty_tensor(shard)
        return tensor, slot_of(tensor).open().array()

    def _finished(self, buffers: Mapping[str, Buffer]) -> list[tuple[str, Any]]:
        """Return assembled tensors with merged adapters, at the requested place."""
        if self.merge is not None:
            for name, (_, elements) in buffers.items():
                self.merge.apply(name, 0, elements)
        if self.place is None:
            return [(name, tensor) for name, (tensor, _) in buffers.items()]
        found = [(name, tensor._copy_to(self.place, False)) for name, (tensor, _) in buffers.items()]
        current_stream(self.place).synchronize()
        return found


def consume(
    tensors: Tensors, channel: Channel, doing: str, work: Callable[[Tensors], _T], kind: type[_T]
) -> Sequence[_T]:
    """Do work with the tensors of a stream on every rank, and return the results of all ranks. Every rank must call.

    Args:
        tensors: the stream.
        channel: all ranks of the job.
        doing: description of the work.
        work: receives the stream, and need not read it to its end.
        kind: type of its result; anything that msgspec encodes.
    Raises:
        FlexError: the same on every rank: the stream or the work failed on some rank.
    """
    ended: list[bool] = []
    draining = _draining(tensors, ended)
    failures: list[Exception] = []
    results: list[_T] = []
    attempt(failures, lambda: results.append(work(draining)))
    if failures:
        next(draining, None)  # Starts the stream, in case the work failed before it began to read.
        if not ended:
            draining.throw(failures[0])  # The stream raises it on all ranks.
    for _ in draining:
        pass
    return all_gather_checked(channel, doing, partial(_result, results, failures), kind)


def _draining(tensors: Tensors, ended: list[bool]) -> Tensors:
    """Yield the tensors of a stream, and record when all ranks have reached its end."""
    yield from tensors
    ended.append(True)


def _result(results: Sequence[_T], failures: Sequence[Exception]) -> _T:
    if failures:
        raise failures[0]
    return results[0]


def _unite_round(
    channel: Channel, pieces: Sequence[TransferPiece], own: Sequence[Array]
) -> list[tuple[TransferPiece, Array]]:
    """Return all pieces of a round on every rank, like :func:`.exchange_round`. Every rank must call."""
    held: dict[int, list[TransferPiece]] = {}
    for piece in pieces:
        held.setdefault(piece.move.owner, []).append(piece)
    sizes = {owner: sum(piece.size for piece in theirs) for owner, theirs in held.items()}
    mine = np.concatenate([array.reshape(-1).view(np.uint8) for array in own]) if own else np.empty(0, np.uint8)
    if len(held) <= MAX_BROADCASTS:
        arrays = {owner: mine if owner == channel.rank else np.zeros(size, np.uint8) for owner, size in sizes.items()}
        parts = channel.share(arrays)
    else:
        parts = _united(channel, mine, sizes)
    found: list[tuple[TransferPiece, Array]] = []
    for owner, theirs in held.items():
        found.extend(zip(theirs, unpacked(parts[owner], theirs), strict=True))
    return found


def _united(channel: Channel, mine: Array, sizes: Mapping[int, int]) -> dict[int, Array]:
    """Return the bytes of every holder, by rank, from one all-reduce."""
    ends = dict(zip(sizes, accumulate(sizes.values()), strict=True))
    array = np.zeros(sum(sizes.values()), np.uint8)
    if channel.rank in ends:
        array[ends[channel.rank] - mine.size : ends[channel.rank]] = mine
    everything = channel.unite(array, None, None)
    return {owner: everything[ends[owner] - size : ends[owner]] for owner, size in sizes.items()}


def empty_tensor(shard: Shard) -> Any:
    """Allocate host memory for a complete tensor, as a ``paddle.Tensor``."""
    import paddle

    return paddle.empty(shard.global_shape, dtype=shard.dtype, device=paddle.CPUPlace())


def _place(items: Sequence[ReadItem], piece: TransferPiece, array: Array, buffers: Mapping[str, Buffer]) -> None:
    """Copy a received piece into every tensor that contains it."""
    for item in items:
        fill_piece(buffers[item.name][1], item, piece, array, _MODEL)


class LiveReader:
    """Reads pieces of live shards, from a device through staging memory with one wait per round.

    Args:
        weights: role -> name -> live weight.
        held: role and range of the fragments of live shards that this rank sends, by file and offset.
    """

    def __init__(self, weights: LiveRoles, held: Mapping[tuple[str, int], tuple[str, PlannedWrite]]) -> None:
        self._weights, self._held = weights, held
        self._releases: list[Callable[[], None]] = []

    def read(self, pieces: Sequence[TransferPiece], failures: list[Exception]) -> list[Array]:
        """Return the elements of pieces, or zeros after an error, which is added to the failures."""
        found: list[Array] = []
        if not failures:
            attempt(failures, lambda: found.extend(self._read(pieces)))
        return found or [np.zeros(one.box.shape, numpy_dtype(one.move.part.dtype)) for one in pieces]

    def release(self) -> None:
        """Release staging memory after the pieces have been sent."""
        for release in self._releases:
            release()
        self._releases.clear()

    def _read(self, pieces: Sequence[TransferPiece]) -> list[Array]:
        rows: list[Array] = []
        ends: list[tuple[Any, Array]] = []
        for piece in pieces:
            part = piece.move.part
            role, held = self._held[part.file, part.begin]
            tensor = self._weights[role][held.name].local_tensor
            low, high = rows_around(part.shape, piece.box)
            rows.append(self._elements(tensor, held.start + low, held.start + high, ends))
        if ends:
            begin_copies_to_host(ends).wait()
        return [box_in_rows(flat, one.move.part.shape, one.box) for flat, one in zip(rows, pieces, strict=True)]

    def _elements(self, tensor: Any, start: int, stop: int, ends: list[tuple[Any, Array]]) -> Array:
        """Return a range of a tensor's elements; ``ends`` receives the copies from a device that are needed first."""
        view = host_view(tensor)
        if view is not None:
            return view[start:stop]
        dtype = dtype_of(tensor)
        size = (stop - start) * dtype.itemsize
        if in_host_memory(tensor.place):
            memory = np.empty(size, np.uint8)
            copy_to_host(tensor, start, stop, memory)
        else:
            pool = pool_of(tensor.place, DEFAULT_STAGING_MEMORY_BYTES)
            buffer = pool.take(size)
            self._releases.append(partial(pool.give, buffer))
            memory = buffer.bytes
            ends.extend(copy_ends(tensor, start, stop, memory))
        return memory.view(dtype)
