"""Build the plan of a save before its first byte, and cache it for the next save of the same job.

The files of this rank, with their headers; on the coordinator also ``mapping.json``, proved. A plan depends only on the
model's configuration and on the shard descriptions of every rank, which are the same at every save of a job. It is
therefore cached under a digest of the descriptions of *all* ranks, and a later save exchanges digests alone. If the
description of one rank differs, its digest differs, and every rank builds a new plan. A plan is therefore never used
for other shards.

Memory: the headers of this rank's files and the names of its replicas, for the last few plans.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paddleformers_fc.errors import MismatchError, OptionError, PeerError
from paddleformers_fc.execute.replica_assignment import (
    RankShards,
    Replica,
    ShardPart,
    assign_writers,
    find_replicas,
    pack_files,
)
from paddleformers_fc.execute.ties import Ties, ties_of
from paddleformers_fc.families import ModelDescription, ModelTensor
from paddleformers_fc.families.stated import bind_model, decode_mapping, encode_mapping, family_name, model_ties
from paddleformers_fc.formats.catalog import gather_shards
from paddleformers_fc.formats.checkpoint import MAPPING_NAME
from paddleformers_fc.formats.index import Columns, shard_columns
from paddleformers_fc.formats.registry import SAVED
from paddleformers_fc.layout import Shard
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.mapping import RuleSet, Shape
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan.sources import declared_mapping
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.safetensors import FileLayout
from paddleformers_fc.text import count_text

MAX_FILE_BYTES = 5 * 10**9
"""Bound on the tensors of one file of a checkpoint, in bytes; a larger tensor is cut between rows."""

MAX_CACHED_PLANS = 8
"""Maximum number of cached plans per process: of checkpoints, exports, and every rank where ranks are threads."""


@dataclass(frozen=True)
class PlannedWrite:
    """A range of a live shard that goes into a file.

    Args:
        name: of the shard, and of the tensor in the file.
        start: index of the first element in the shard's memory.
        stop: index behind the last.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class PlannedFile:
    """One file of this rank.

    Args:
        path: posix path relative to the checkpoint.
        role: of its tensors.
        layout: its header.
        pieces: the content after the header, in order.
    """

    path: str
    role: str
    layout: FileLayout
    pieces: tuple[PlannedWrite, ...]


@dataclass(frozen=True)
class ModelRecord:
    """The record of the whole model in a checkpoint.

    Args:
        family: the family's name.
        mapping: the bytes of ``mapping.json``.
        model: the description in these bytes.
        shards: the tensors of the files of all ranks, for the index.
    """

    family: str
    mapping: bytes
    model: ModelDescription
    shards: Columns


@dataclass(frozen=True)
class SavePlan:
    """The part of a save that one rank writes.

    Args:
        files: this rank's files.
        model: the description that the coordinator writes beside them; None on other ranks.
        replicas: this rank's shards that other ranks hold as well.
        ties: the copies of tied tensors that all ranks compare.
    """

    files: tuple[PlannedFile, ...]
    model: ModelRecord | None
    replicas: tuple[Replica, ...] = ()
    ties: Ties = field(default_factory=Ties)

    def model_record(self) -> ModelRecord:
        """Return the record that the coordinator writes.

        Raises:
            PeerError: this rank is not the coordinator.
        """
        if self.model is None:
            raise PeerError("Only the coordinator of a save can describe the model.")
        return self.model


class SavePlanCache:
    """The last plans of this process, by rank and by the digest of the shards of all ranks."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[int, bytes], SavePlan] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, rank: int) -> dict[bytes, SavePlan]:
        """Return the plans of one rank by the digest of the shards of all ranks."""
        with self._lock:
            return {shards_digest: plan for (owner, shards_digest), plan in self._plans.items() if owner == rank}

    def keep(self, rank: int, shards_digest: bytes, plan: SavePlan) -> None:
        """Remember a plan that every rank has agreed to; the one that was not used for longest is forgotten.

        Args:
            rank: the rank that it is for.
            shards_digest: the digest of the shards of all ranks.
            plan: the plan.
        """
        with self._lock:
            self._plans[rank, shards_digest] = plan
            self._plans.move_to_end((rank, shards_digest))
            while len(self._plans) > MAX_CACHED_PLANS:
                self._plans.popitem(last=False)


def digest(*parts: bytes) -> bytes:
    """Return one digest of several byte strings, 16 bytes; it depends on their lengths."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def build_save_plan(everyone: list[RankShards], model: ModelDescription, rank: int) -> SavePlan:
    """Return the plan of one rank.

    Args:
        everyone: the shards of every rank, by rank; those that hold the same may share one object.
        model: the description of the model.
        rank: this rank; the first one proves the model.
    Raises:
        MappingError: the model's mapping cannot be bound or proved.
        MismatchError: the shards of all ranks are not the whole model, once.
    """
    proved = _proved_mapping(everyone, model) if rank == 0 else None
    shares = assign_writers(everyone)
    record = None
    if proved is not None:
        files = {
            path: [piece.shard for piece in group]
            for number, share in enumerate(shares)
            for path, _, group in _grouped(share, number)
        }
        record = ModelRecord(family_name(model), *proved, shard_columns(files))
    ties = ties_of(everyone, shares, model_ties(model))
    return SavePlan(tuple(planned_files(shares[rank], rank)), record, tuple(find_replicas(everyone, rank)), ties)


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
    return replace(rules, cuts={**cuts, **rules.cuts})


def cuts_of(model: ModelDescription, shard: Shard) -> Shape:
    """Return the tensor-parallel degree on every axis of a model's tensor by one of its shards."""
    return (1,) * len(shard.global_shape) if model.is_global else shard.cuts


def planned_files(share: Iterable[ShardPart], rank: int) -> Iterator[PlannedFile]:
    """Yield the files of one rank.

    Args:
        share: what the rank writes.
        rank: the rank.
    """
    for path, role, group in _grouped(share, rank):
        layout = SAVED.writer.header(Path(path), [piece.shard for piece in group])
        planned = tuple(PlannedWrite(one.shard.name, one.start, one.start + one.shard.size) for one in group)
        yield PlannedFile(path, role, layout, planned)


def _grouped(share: Iterable[ShardPart], rank: int) -> Iterator[tuple[str, str, Sequence[ShardPart]]]:
    """Yield path, role and content of the files of one rank."""
    by_role: dict[str, list[ShardPart]] = {}
    for piece in share:
        by_role.setdefault(piece.role, []).append(piece)
    for role, pieces in sorted(by_role.items()):
        groups = pack_files(pieces, MAX_FILE_BYTES)
        for path, group in zip(SAVED.writer.names(role, rank, len(groups)), groups, strict=True):
            yield path, role, group


def _proved_mapping(everyone: list[RankShards], model: ModelDescription) -> tuple[bytes, ModelDescription]:
    """Prove, before the first write, that the checkpoint will be whole, and check its mapping as a reader does."""
    distinct = list({id(roles): roles for roles in everyone}.values())
    parameters: dict[str, Shard] = {}
    for roles in distinct:
        parameters.update(roles.get(MODEL_STATE, {}))
    if not parameters:
        raise OptionError("The model has no tensors.", where="model", next_step="Save a layer or state dict that has.")
    # One shard of every model tensor of the job; its cuts determine the tensor-parallel degree.
    mapping = encode_mapping(model, model_rules(model, parameters))
    _refuse_partial(distinct, parameters)
    stored, rules = decode_mapping(mapping, MAPPING_NAME)
    declared_mapping(stored or model, rules, MAPPING_NAME)
    return mapping, stored or model


def _refuse_partial(everyone: list[RankShards], parameters: Mapping[str, Shard]) -> None:
    faults: list[str] = []
    for role in sorted({role for roles in everyone for role in roles}):
        by_name: dict[str, dict[Shard, None]] = {}
        for roles in everyone:
            for name, shard in roles.get(role, {}).items():
                by_name.setdefault(name, {})[shard] = None
        parts = [shard for shards in by_name.values() if not _is_whole(shards) for shard in shards]
        tensors, contradictions = gather_shards((shard, f"rank {role}", 0, dtype_size(shard.dtype)) for shard in parts)
        faults.extend(contradictions)
        for tensor in tensors.values():
            faults.extend(tensor.faults())
        for name in by_name:
            if split_state_name(role, name).parameter not in parameters:
                faults.append(f"{name}: is a state of no parameter")
    if faults:
        raise MismatchError(
            "Ranks do not hold every tensor of this job whole and once: "
            f"{count_text(len(faults), 'fault')}. Nothing was written.",
            evidence=fold(faults),
            next_step="The ranks describe shards that do not fit together; check the parallel configuration.",
        )


def _is_whole(shards: Mapping[Shard, None]) -> bool:
    """Return whether one rank, or several alike, hold a tensor as a whole."""
    if len(shards) != 1:
        return False
    (shard,) = shards
    return shard.flat is None and shard.box == whole(shard.global_shape)
