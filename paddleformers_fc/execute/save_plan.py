"""Build the plan of a save before the first byte is written, and cache it for later saves of the job.

The coordinator receives the shards of all ranks, proves the mapping and that every tensor is complete, and assigns the
writers of replicas. From this :class:`Planning` and its own shards every rank builds its plan: its files with their
headers, and what it compares.

A plan depends only on the model's configuration and the shards of all ranks, which are the same at every save. It is
cached under a random name with a digest of this rank's input. Before a later save every rank sends the names of the
plans with the digest of its current input, and a plan is used only if all ranks have it. Memory: the headers of this
rank's files and the names of its replicas, for the last few plans; on the coordinator also the arrays of the index.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import structs

from paddleformers_fc.distributed.channel import Channel, broadcast, decoder_of
from paddleformers_fc.errors import MismatchError, OptionError, PeerError
from paddleformers_fc.execute.replicas import (
    Assignment,
    CopyPart,
    Replica,
    ShardPart,
    Ties,
    Writers,
    pack_files,
    ties_of,
)
from paddleformers_fc.families import ModelDescription, ModelTensor
from paddleformers_fc.families.stated import bind_model, decode_mapping, encode_mapping, family_name, model_ties
from paddleformers_fc.formats.catalog import gather_shards
from paddleformers_fc.formats.checkpoint import MAPPING_NAME
from paddleformers_fc.formats.flex import FLEX_WRITER, file_names
from paddleformers_fc.formats.index import Columns, shard_columns
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shard_messages import JobShards, decode_shards
from paddleformers_fc.layout.shards import Shard, ShardsByRole
from paddleformers_fc.mapping import RuleSet, Shape
from paddleformers_fc.plan.sources import declared_mapping
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.safetensors import FileLayout
from paddleformers_fc.text import count_text, fold

MAX_FILE_BYTES = 5 * 10**9
"""Maximum total size of the tensors in one file; a larger tensor is cut between rows."""

MAX_CACHED_PLANS = 8
"""Maximum number of plans in a cache, for checkpoints, exports and all ranks that are threads of this process."""

_NAME_BYTES = 8
"""Bytes of the random name of a plan."""

_Plan = TypeVar("_Plan")


class PlannedWrite(msgspec.Struct, frozen=True):
    """A range of a live shard that goes into a file.

    Args:
        name: name of the shard, and of the tensor in the file.
        start: index of the first element in the shard's memory.
        stop: index after the last element.
    """

    name: str
    start: int
    stop: int


class PlannedFile(msgspec.Struct, frozen=True):
    """One file of this rank.

    Args:
        path: posix path relative to the checkpoint.
        role: role of its tensors.
        layout: its header.
        pieces: the content after the header, in order.
    """

    path: str
    role: str
    layout: FileLayout
    pieces: tuple[PlannedWrite, ...]


class ModelRecord(msgspec.Struct, frozen=True):
    """The record of the complete model in a checkpoint.

    Args:
        family: the family's name.
        mapping: the bytes of ``mapping.json``.
        model: the description in these bytes.
        shards: the tensors in the files of all ranks, for the index.
        ties: the copies of tied tensors that all ranks hash.
    """

    family: str
    mapping: bytes
    model: ModelDescription
    shards: Columns
    ties: Ties


class Planning(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's message to all ranks about a new plan.

    Args:
        assignment: the writers of replicas.
        ties: the copies of tied tensors that ranks hash.
    """

    assignment: Assignment
    ties: list[CopyPart]


class SavePlan(msgspec.Struct, frozen=True):
    """The part of a save that one rank writes.

    Args:
        files: this rank's files.
        model: the record of the model that the coordinator writes; None on other ranks.
        replicas: this rank's shards that other ranks hold as well.
        ties: the copies of tied tensors that this rank hashes.
        failure: why this rank could not plan its files. All ranks raise it in their next exchange, because a separate
            exchange would cost more than the work until then.
    """

    files: tuple[PlannedFile, ...]
    model: ModelRecord | None
    replicas: tuple[Replica, ...] = ()
    ties: tuple[CopyPart, ...] = ()
    failure: Exception | None = None

    def raise_failures(self) -> None:
        """Raise the error of planning, in work whose errors reach all ranks."""
        if self.failure is not None:
            raise self.failure

    def model_record(self) -> ModelRecord:
        """Return the record that the coordinator writes.

        Raises:
            PeerError: this rank is not the coordinator.
        """
        if self.model is None:
            raise PeerError("Only the coordinator of a save has the record of the model.")
        return self.model


class PlanCache(Generic[_Plan]):
    """The last plans of this process, by rank and name."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[int, bytes], tuple[bytes, _Plan]] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, rank: int, facts: bytes) -> dict[bytes, _Plan]:
        """Return the plans of one rank by name.

        Args:
            rank: the rank.
            facts: the digest of its input.
        """
        with self._lock:
            plans = [(name, plan) for (owner, name), plan in self._plans.items() if (owner, plan[0]) == (rank, facts)]
        return {name: plan for name, (_, plan) in plans}

    def keep(self, rank: int, facts: bytes, name: bytes, plan: _Plan) -> None:
        """Cache a plan that all ranks have; the least recently used plan is evicted.

        Args:
            rank: the rank of the plan.
            facts: the digest of the rank's input.
            name: the name of the plan, the same on all ranks.
            plan: the plan.
        """
        with self._lock:
            self._plans[rank, name] = facts, plan
            self._plans.move_to_end((rank, name))
            while len(self._plans) > MAX_CACHED_PLANS:
                self._plans.popitem(last=False)


def digest(*parts: bytes) -> bytes:
    """Return a 16-byte digest of several byte strings and their lengths."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def plan_for_all(job: JobShards, model: ModelDescription) -> tuple[Planning, ModelRecord]:
    """Return the message to all ranks about a new plan, and the coordinator's record.

    Args:
        job: the shards of all ranks.
        model: the description of the model.
    Raises:
        MappingError: the model's mapping cannot be bound or proved.
        MismatchError: the shards of all ranks do not form the complete model.
    """
    mapping, stored = proved_mapping(job, model)
    writers = Writers(job)
    ranks = range(len(job.held))
    ties = ties_of(job, map(writers.share_of, ranks), model_ties(model))
    files = (
        (path, [piece.shard for piece in group])
        for rank in ranks
        for path, _, group in grouped(writers.share_of(rank), rank)
    )
    record = ModelRecord(family_name(model), mapping, stored, shard_columns(files), ties)
    return Planning(writers.assignment, ties.sides), record


def new_plan(
    model: ModelDescription, roles: ShardsByRole, payloads: Sequence[bytes], channel: Channel
) -> tuple[bytes, SavePlan]:
    """Return the name of a new plan, and this rank's part of it. Every rank must call.

    Args:
        model: the description of the model.
        roles: the shards of this rank, in the order of its description.
        payloads: the shards of all ranks, encoded, on the coordinator.
        channel: all ranks.
    """
    records: list[ModelRecord] = []

    def plan() -> tuple[bytes, bytes]:
        planning, record = plan_for_all(decode_shards(payloads), model)
        records.append(record)
        return secrets.token_bytes(_NAME_BYTES), zlib.compress(msgspec.msgpack.encode(planning))

    name, packed = broadcast(channel, "planning the save", plan, tuple[bytes, bytes])
    planning = decoder_of(Planning).decode(zlib.decompress(packed))
    return name, plan_of_rank(planning, roles, channel.rank, records[0] if records else None)


def plan_of_rank(planning: Planning, roles: ShardsByRole, rank: int, record: ModelRecord | None) -> SavePlan:
    """Return the plan of one rank; if planning fails, the plan contains the error.

    Args:
        planning: the result of :func:`plan_for_all`.
        roles: the shards of the rank, in the order of its description.
        rank: the rank.
        record: the record of :func:`plan_for_all`, on the coordinator.
    """
    try:
        share, replicas = planning.assignment.share_of(rank, roles)
        files = tuple(planned_files(share, rank))
    except Exception as error:  # Not raised here, because the other ranks have a plan and would wait.
        return SavePlan((), record, failure=error)
    ties = tuple(side for side in planning.ties if side.rank == rank)
    return SavePlan(files, record, tuple(replicas), ties)


def model_rules(model: ModelDescription, shards: Mapping[str, Shard]) -> RuleSet:
    """Return the rules of a model, or of one rank's part of it, from its live shards.

    Args:
        model: the description of the model.
        shards: ``model_state`` shards by name.
    """
    tensors = [
        ModelTensor(shard.name, shard.global_shape, shard.dtype, cuts_of(model, shard)) for shard in shards.values()
    ]
    cuts = {tensor.name: tensor.cuts for tensor in tensors if any(cut > 1 for cut in tensor.cuts)}
    rules = bind_model(model, tensors)
    return structs.replace(rules, cuts={**cuts, **rules.cuts})


def cuts_of(model: ModelDescription, shard: Shard) -> Shape:
    """Return the tensor-parallel degree on every axis of a tensor, given one of its shards."""
    return (1,) * len(shard.global_shape) if model.is_global else shard.cuts


def planned_files(share: Iterable[ShardPart], rank: int) -> Iterator[PlannedFile]:
    """Yield the files of one rank.

    Args:
        share: what the rank writes.
        rank: the rank.
    """
    for path, role, group in grouped(share, rank):
        layout = FLEX_WRITER.header(Path(path), [piece.shard for piece in group])
        planned = tuple(PlannedWrite(one.shard.name, one.start, one.start + one.shard.size) for one in group)
        yield PlannedFile(path, role, layout, planned)


def grouped(share: Iterable[ShardPart], rank: int) -> Iterator[tuple[str, str, Sequence[ShardPart]]]:
    """Yield path, role and content of the files of one rank."""
    by_role: dict[str, list[ShardPart]] = {}
    for piece in share:
        by_role.setdefault(piece.role, []).append(piece)
    for role, pieces in sorted(by_role.items()):
        groups = pack_files(pieces, MAX_FILE_BYTES)
        for path, group in zip(file_names(role, rank, len(groups)), groups, strict=True):
            yield path, role, group


def proved_mapping(job: JobShards, model: ModelDescription) -> tuple[bytes, ModelDescription]:
    """Check that the checkpoint will be complete, and its mapping as a reader does; return mapping and description."""
    # One shard of every model tensor of the job; its cuts determine the tensor-parallel degree.
    parameters = {name: job[numbers[0]][1] for name, numbers in job.tensors(MODEL_STATE)}
    if not parameters:
        raise OptionError("The model has no tensors.", where="model", next_step="Pass a layer or state dict with some.")
    empty = [name for name, shard in parameters.items() if 0 in shard.global_shape]
    if empty:
        raise OptionError(
            f"{count_text(len(empty), 'tensor')} of the model without elements cannot be mapped.",
            where="model",
            evidence=empty,
            next_step="Remove these tensors from the model.",
        )
    mapping = encode_mapping(model, model_rules(model, parameters))
    _check_complete(job, parameters)
    stored, rules = decode_mapping(mapping, MAPPING_NAME)
    declared_mapping(stored or model, rules, MAPPING_NAME)
    return mapping, stored or model


def _check_complete(job: JobShards, parameters: Mapping[str, Shard]) -> None:
    faults: list[str] = []
    complete: set[bytes] = set()
    for role in sorted(job.roles):
        for name, numbers in job.tensors(role):
            # States have the layouts of their parameter and layers repeat, so each combination is checked once.
            places = job.columns[2][numbers].tobytes()
            if places not in complete:
                shards = (job[number][1] for number in numbers)
                tensors, found = gather_shards((one, f"rank {role}", 0, dtype_size(one.dtype)) for one in shards)
                found.extend(fault for tensor in tensors.values() for fault in tensor.faults())
                faults.extend(found)
                complete.update([] if found else [places])
            if split_state_name(role, name).parameter not in parameters:
                faults.append(f"{name}: is a state of no parameter")
    if faults:
        raise MismatchError(
            "The shards of all ranks do not form every tensor exactly once: "
            f"{count_text(len(faults), 'fault')}. No tensor was written or sent.",
            evidence=fold(faults),
            next_step="Check the parallel configuration; the ranks describe inconsistent shards.",
        )
