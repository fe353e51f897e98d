"""Save a checkpoint in four steps: :func:`plan_save`, :func:`capture`, :func:`write` and :func:`commit`.

``plan_save`` creates the staging directories (:mod:`.commit_coordinator`) and uses a cached plan if all ranks have it;
otherwise the coordinator proves the mapping and assigns the writers of replicas (:mod:`.save_plan`, :mod:`.replicas`).
``capture`` returns views of the live tensors; an asynchronous save copies them (:mod:`.async_snapshot`). ``write``
hashes replicas and tied tensors, and writes this rank's files with checksums. ``commit`` compares the digests, writes
the metadata files and renames the directory. An asynchronous save runs each :class:`.Part` of the last two on a thread.

If any rank fails, all ranks raise the same error, and the staging directory is removed. The first save of a job makes
five exchanges, a later save four, and more with several disks or if replicas differ. Memory beyond the tensors: the
headers of this rank's files, and for a new plan on the coordinator the shards of all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paddleformers_fc import __version__
from paddleformers_fc.distributed.channel import Channel, Part, Parts, all_gather_checked, gather_and_keep, run_parts
from paddleformers_fc.distributed.consistency import ConsistencyCheck, comparable_config, software_versions
from paddleformers_fc.errors import FormatError, MappingError, OptionError
from paddleformers_fc.execute.commit_coordinator import CommitResult, DiskLeaders, StagingDirectory, StagingMaker
from paddleformers_fc.execute.memory import HostPieces, HostTensors, view_of
from paddleformers_fc.execute.phases import Phases, PhaseTimer, slowest_of
from paddleformers_fc.execute.replicas import ReplicaDigests, check_replicas_equal, differences, hash_ties, unequal_keys
from paddleformers_fc.execute.save_plan import PlanCache, PlannedFile, SavePlan, digest, new_plan
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.changes import contradictions
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, MAPPING_NAME, config_bytes as config_bytes, parse_config
from paddleformers_fc.formats.index import encode_index
from paddleformers_fc.layout.live import LiveRoles, Roles, describe_roles, facts_of
from paddleformers_fc.layout.roles import MODEL_STATE, split_state_name
from paddleformers_fc.layout.shard_messages import encode_rank_shards
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.storage.checksum import INDEX_NAME, FileChecksum, records_of
from paddleformers_fc.storage.files import RandomAccessWriter, write_file
from paddleformers_fc.storage.manifest import UNKNOWN_RUN, DivergedTie, Manifest, RunRecord, SaveOrigin
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.storage.safetensors import TensorWriter

_PLANS = PlanCache[SavePlan]()
_T = TypeVar("_T")


class JobRecord(msgspec.Struct, frozen=True):
    """The record of the job that wrote a checkpoint.

    Args:
        step: optimizer steps done.
        consumed_samples: training samples seen.
        parallel: degree per parallel axis, for information only.
        run: identifies the run; rank 0's value is recorded.
    """

    step: int
    consumed_samples: int
    parallel: dict[str, int]
    run: RunRecord | None = None


class SaveReport(msgspec.Struct, frozen=True):
    """The result of a save.

    Args:
        files: number of files of the finished checkpoint.
        size: total size of these files in bytes.
        set_aside: backups of files of other programs that had the checkpoint's name.
        disks: the ranks that wrote to the same disk.
        differences: replicas that differ, one line each; normally none.
        diverged_ties: tied tensors whose copies differ, which prevent a resume; normally none.
        phases: the seconds of this rank for ``plan, capture, write, agree, commit``.
    """

    files: int
    size: int
    set_aside: tuple[Path, ...]
    disks: DiskLeaders
    differences: tuple[str, ...] = ()
    diverged_ties: tuple[DivergedTie, ...] = ()
    phases: Phases = msgspec.field(default_factory=Phases)


class WriteMessage(msgspec.Struct):
    """What one rank has written.

    Args:
        checksums: checksums of its files.
        replicas: digests of its replicas.
        ties: digests of its tied tensors.
        seconds: duration of the write.
    """

    checksums: list[FileChecksum]
    replicas: dict[int, bytes]
    ties: list[bytes]
    seconds: float


class _Introduction(msgspec.Struct, array_like=True):
    """The plans that one rank can use, and on the coordinator the name of the staging directory."""

    plans: list[bytes]
    staging: bytes


class LivePart(msgspec.Struct, frozen=True):
    """The part of one rank in a save, described on the training thread.

    Args:
        tensors: role -> name -> live weight, without aliases that share the memory of their owner.
        model: the model.
        files: metadata files by path relative to the checkpoint.
        job: the job and its step.
        replicas: as for :func:`save_checkpoint`.
        facts: digest of this rank's input to a plan.
    """

    tensors: LiveRoles
    model: ModelDescription
    files: Mapping[str, bytes]
    job: JobRecord
    replicas: str
    facts: bytes


class PlannedSave(msgspec.Struct, frozen=True):
    """A save that all ranks have planned.

    Args:
        part: this rank's input.
        plan: the files of this rank.
        staged: the staging directory.
        timer: the timer of the save, in the phase ``capture``, which ends when this rank begins to write.
        removal: closing it deletes the staging directory, unless it was committed.
    """

    part: LivePart
    plan: SavePlan
    staged: StagingDirectory
    timer: PhaseTimer
    removal: contextlib.ExitStack


def save_checkpoint(
    directory: Path,
    roles: Roles,
    model: ModelDescription,
    files: Mapping[str, bytes],
    job: JobRecord,
    channel: Channel,
    replicas: str = "warn",
) -> SaveReport:
    """Write a finished checkpoint.

    Args:
        directory: ``checkpoint-N``. An older finished checkpoint of this name is replaced atomically.
        roles: role -> name -> live ``ShardedWeight`` of this rank.
        model: description of the model; it is stored in ``mapping.json``.
        files: this rank's metadata files, by path relative to the checkpoint; must contain ``config.json`` on rank 0.
        job: the job and its step.
        channel: all ranks of the job; every rank must call.
        replicas: what to do if replicas differ. ``off`` does not compare them, ``warn`` lists differences in the report
            and in the manifest, ``refuse`` saves nothing. Copies of a tied tensor are always compared, and handled as
            under ``warn`` unless the value is ``refuse``.
    Returns:
        number and size of the files, differences, and backups.
    Raises:
        FlexError: the same on every rank; the target is unchanged.
    """
    facts = comparable_facts(model, job, replicas)
    consistency = ConsistencyCheck(f"saving {directory.name}", facts)
    planned = begin_save(lambda: live_part(roles, model, files, job, replicas), directory, channel, consistency)
    return write_and_commit(planned, capture(planned.part), channel)


def comparable_facts(model: ModelDescription, job: JobRecord, replicas: str) -> dict[str, object]:
    """Return the facts that must be equal on all ranks of a save; see :func:`save_checkpoint` for the arguments."""
    return {
        "versions": software_versions(),
        "config": comparable_config(model),
        "step": job.step,
        "samples": job.consumed_samples,
        "replicas": replicas,
    }


def live_part(
    roles: Roles, model: ModelDescription, files: Mapping[str, bytes], job: JobRecord, replicas: str
) -> LivePart:
    """Return this rank's part of a save; see :func:`save_checkpoint` for the arguments."""
    own = _without_aliases(roles, model)
    described = json.dumps(
        [dict(model.config), model.is_fleet, model.adapters, model.is_global], sort_keys=True, default=repr
    )
    mapping = model.rules.digest if model.rules is not None else ""
    return LivePart(own, model, files, job, replicas, digest(described.encode(), mapping.encode(), facts_of(own)))


def begin_save(
    prepare: Callable[[], LivePart],
    directory: Path,
    channel: Channel,
    consistency: ConsistencyCheck,
    timer: PhaseTimer | None = None,
) -> PlannedSave:
    """Plan a save, and create its staging directory.

    Args:
        prepare: returns this rank's part; if it fails on one rank, all ranks raise the error.
        directory: ``checkpoint-N``.
        channel: all ranks; every rank must call.
        consistency: the facts that must be equal on all ranks.
        timer: measures the save; by default it begins now.
    Raises:
        FlexError: the same on every rank. If a rank cannot plan its files, its plan contains the error.
    """
    timer = timer or PhaseTimer()
    with contextlib.ExitStack() as stack:
        maker = stack.enter_context(contextlib.closing(StagingMaker(directory, channel)))
        part, plan = plan_save(prepare, channel, consistency, maker)
        timer.end("plan")
        return PlannedSave(part, plan, maker.staged, timer, stack.pop_all())


def plan_save(
    prepare: Callable[[], LivePart],
    channel: Channel,
    consistency: ConsistencyCheck,
    maker: StagingMaker | None = None,
) -> tuple[LivePart, SavePlan]:
    """Return this rank's part of a save, and the plan of its files.

    Args:
        prepare: as for :func:`begin_save`.
        channel: all ranks; every rank must call.
        consistency: the facts that must be equal on all ranks.
        maker: creates the staging directory, in the same exchanges; None if nothing will be written.
    Raises:
        FlexError: the same on every rank.
    """

    def introduce() -> tuple[_Introduction, tuple[LivePart, dict[bytes, SavePlan]]]:
        part = prepare()
        plans = _PLANS.known(channel.rank, _facts(part, channel))
        staging = maker.create(_runs(part)) if maker is not None and channel.rank == 0 else ""
        return _Introduction(list(plans), os.fsencode(staging)), (part, plans)

    everyone, (part, plans) = gather_and_keep(channel, "preparing a checkpoint", introduce, _Introduction, consistency)
    usable = set.intersection(*(set(one.plans) for one in everyone))
    roles: dict[str, dict[str, Shard]] = {}

    def describe() -> bytes:
        if usable:
            return b""
        roles.update(describe_roles(part.tensors))
        return encode_rank_shards(roles)

    payloads: list[bytes] = []
    if maker is not None:
        payloads = maker.find(os.fsdecode(everyone[0].staging), _runs(part), describe)
    elif not usable:
        payloads = all_gather_checked(channel, "describing shards", describe, bytes, to=0)
    if usable:
        name = min(usable)
        plan = plans[name]
    else:
        name, plan = new_plan(part.model, roles, payloads, channel)
    if plan.failure is None:
        _PLANS.keep(channel.rank, _facts(part, channel), name, plan)
    return part, plan


def capture(part: LivePart) -> HostTensors:
    """Return views of live tensors, which are valid until the next training step.

    Device tensors are read in pieces, through staging memory.
    """
    return {
        role: {name: view_of(weight.local_tensor) for name, weight in weights.items()}
        for role, weights in part.tensors.items()
    }


def write_and_commit(planned: PlannedSave, tensors: HostTensors, channel: Channel) -> SaveReport:
    """Write a finished checkpoint; see :func:`save_checkpoint` for the errors.

    Args:
        planned: the save.
        tensors: role -> name -> host memory of the tensors in the plan.
        channel: all ranks; every rank must call.
    """
    return run_parts(save_parts(planned, tensors, channel), channel)


def save_parts(planned: PlannedSave, tensors: HostTensors, channel: Channel) -> Parts[SaveReport]:
    """Return the work of :func:`write_and_commit` in parts."""
    timer = planned.timer
    with planned.removal:
        everyone, digests = yield Part("writing", partial(write, planned, tensors, channel.rank), WriteMessage, to=0)
        timer.end("agree")
        done = yield from commit(planned, everyone, digests, channel)
    timer.end("commit")
    phases = timer.phases(slowest_of("write", [one.seconds for one in everyone]) if everyone else None)
    set_aside = tuple(Path(os.fsdecode(path)) for path in done.set_aside)
    differing = tuple(done.differences), tuple(done.ties)
    return SaveReport(done.files, done.size, set_aside, planned.staged.disks, *differing, phases)


def write(planned: PlannedSave, tensors: HostTensors, rank: int) -> tuple[WriteMessage, ReplicaDigests]:
    """Write this rank's files into the staging directory, and hash replicas and copies of tied tensors.

    Args:
        planned: the save.
        tensors: as for :func:`write_and_commit`.
        rank: this rank.
    Returns:
        the message for the coordinator, and the digests of single replicas, which are sent only if replicas differ.
    """
    part, plan, timer = planned.part, planned.plan, planned.timer
    timer.end("capture")
    plan.raise_failures()
    if rank == 0:
        _check_configuration(planned)
    hashed = ReplicaDigests.of(tensors, plan.replicas if part.replicas != "off" else (), part.job.step)
    ties = hash_ties(tensors, plan.ties)
    checksums = _write_files(planned, tensors)
    return WriteMessage(checksums, hashed.of_groups(), ties, timer.end("write")), hashed


def commit(
    planned: PlannedSave, everyone: Sequence[WriteMessage], digests: ReplicaDigests, channel: Channel
) -> Parts[CommitResult]:
    """Compare copies, write the mapping, the index and the manifest, and rename the checkpoint to its target.

    Args:
        planned: the save.
        everyone: the messages of all ranks, on the coordinator.
        digests: the digests of this rank's replicas.
        channel: all ranks; every rank must call.
    """
    doing, work = "committing the checkpoint", partial(_compare_and_commit, planned, everyone)
    done: CommitResult = yield Part(doing, work, CommitResult, source=0)
    if done.suspects:
        find = partial(digests.by_name, done.suspects, channel.world_size)
        by_name, _ = yield Part("comparing replicas", lambda: (find(), None), dict[str, bytes], to=0)
        done = yield Part(doing, partial(work, differences(by_name)), CommitResult, source=0)
    if done.documents:
        sync = partial(planned.staged.sync_packed, done.documents, channel.rank)
        yield Part("syncing every disk", sync, type(None))
        # Not a part of its own, because a rename takes only milliseconds.
        aside = all_gather_checked(channel, "committing on every disk", planned.staged.rename, list[bytes])
        done.set_aside = [path for theirs in aside for path in theirs]
    return done


def _compare_and_commit(
    planned: PlannedSave, everyone: Sequence[WriteMessage], unequal: list[str] | None = None
) -> CommitResult:
    """Compare copies, and either commit or return the groups whose replicas differ. The coordinator calls.

    Args:
        planned: the save.
        everyone: the messages of all ranks.
        unequal: the differences between replicas, once they are known.
    """
    if unequal is None:
        suspects = unequal_keys(one.replicas for one in everyone)
        if suspects:
            return CommitResult(suspects=suspects)
        unequal = []
    ties = planned.plan.model_record().ties.diverged([one.ties for one in everyone])
    if planned.part.replicas == "refuse":
        check_replicas_equal([*unequal, *(line for tie in ties for line in tie.differences)])
    checksums = [one.checksums for one in everyone]
    manifest = _describe(planned, checksums, unequal, ties)
    return planned.staged.commit_or_pack(manifest, checksums, planned.part.files)


def _without_aliases(roles: Roles, model: ModelDescription) -> LiveRoles:
    """Return this rank's weights without aliases that share the memory of their owner, as tied parameters do.

    The optimizer has one state for such a pair, under the name that sorts first; it is saved under the owner's name. An
    alias with its own memory, on another pipeline stage, is saved under its own name and must be equal.
    """
    shared = {alias: owner for alias, owner, is_one in _ties(roles.get(MODEL_STATE, {}), model) if is_one}
    if not shared:
        return {role: dict(names) for role, names in roles.items()}
    kept: LiveRoles = {}
    for role, names in roles.items():
        for name, weight in names.items():
            state = split_state_name(role, name)
            owner = shared.get(state.parameter)
            if owner is None:
                kept.setdefault(role, {})[name] = weight
            elif role != MODEL_STATE:
                kept.setdefault(role, {})[owner + state.suffix] = weight
    return kept


def check_ties(weights: Mapping[str, Any], model: ModelDescription) -> None:
    """Check that a model ties the weights that its configuration ties, unless pipeline stages separate them.

    Args:
        weights: name -> live ``ShardedWeight`` of this rank.
        model: the description of the model.
    Raises:
        OptionError: lists the tied weights that this rank holds as two parameters.
    """
    faults = [f"{alias} and {owner} are two parameters" for alias, owner, is_one in _ties(weights, model) if not is_one]
    if faults:
        raise OptionError(
            "tie_word_embeddings is true, and the model trains the tied weights apart.",
            where=f"model_type: {model.model_type}",
            evidence=faults,
            next_step="Set tie_word_embeddings: false in the model's configuration, or call tie_weights() of the model "
            "before its optimizer and Trainer are built.",
        )


def _ties(weights: Mapping[str, Any], model: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    """Yield every alias and owner that this rank holds, and whether they share memory."""
    for alias, owner in model_ties(model).items():
        if alias in weights and owner in weights:
            addresses = [int(weights[name].local_tensor.data_ptr()) for name in (alias, owner)]
            yield alias, owner, addresses[0] == addresses[1]


def _facts(part: LivePart, channel: Channel) -> bytes:
    """Return the digest of this rank's input to a plan. It includes the world size, because threads share the cache."""
    return digest(part.facts, channel.world_size.to_bytes(8, "little"))


def _runs(part: LivePart) -> Sequence[str]:
    """Return the ids of the run and its ancestors."""
    return ("",) if part.job.run is None else part.job.run.ids


def _check_configuration(planned: PlannedSave) -> None:
    """Check that the configuration exists and that readers will accept it. The coordinator calls."""
    files = planned.part.files
    if CONFIG_NAME not in files:
        raise OptionError(f"{CONFIG_NAME} is missing from the files of the checkpoint.")
    faults = contradictions(parse_config(files[CONFIG_NAME], Path(CONFIG_NAME)), planned.plan.model_record().model)
    if faults:
        raise MappingError(
            f"{CONFIG_NAME} and {MAPPING_NAME} would describe different models. Nothing was saved.",
            where=CONFIG_NAME,
            evidence=faults,
            next_step="Give each of these keys one value in the model's configuration.",
        )


def _write_files(planned: PlannedSave, tensors: HostTensors) -> list[FileChecksum]:
    staging, files = planned.staged.path, planned.plan.files
    expect(sum(sum(file.layout.sizes) for file in files))
    # A file is synced while the next one is written.
    with ThreadPoolExecutor(1, "flex-sync") as syncing:
        complete = [syncing.submit(_write_tensors(staging, file, tensors[file.role]).close) for file in files]
    checksums = [one.result() for one in complete]
    small = sorted(planned.part.files.items())
    return [*checksums, *(write_file(staging / path, data, root=staging) for path, data in small)]


def _write_tensors(staging: Path, file: PlannedFile, tensors: Mapping[str, HostPieces]) -> TensorWriter:
    """Write the tensors of a file, and return its writer, which the caller must close."""
    writer = TensorWriter(RandomAccessWriter(staging / file.path, root=staging), file.layout)
    begin = 0
    try:
        copied = _one_ahead(tensors[piece.name](piece.start, piece.stop) for piece in file.pieces)
        for piece, parts, size in zip(file.pieces, copied, file.layout.sizes, strict=True):
            given = 0
            for part in parts:
                writer.write(begin + given, part)
                given += part.nbytes
            if given != size:
                raise FormatError(
                    f"{staging / file.path} cannot be written: {piece.name!r} was given {given} bytes, not {size}.",
                    where=piece.name,
                    next_step="Do not change the shape or dtype of a tensor while it is saved.",
                )
            begin += size
            advance(size)
    except BaseException:
        writer.abandon()
        raise
    return writer


def _one_ahead(begun: Iterator[_T]) -> Iterator[_T]:
    """Yield every element after creating its successor, so that the next tensor is copied while one is written."""
    current = next(begun, None)
    while current is not None:
        following = next(begun, None)
        yield current
        current = following


def _describe(
    planned: PlannedSave, written: Sequence[list[FileChecksum]], unequal: list[str], ties: Sequence[DivergedTie]
) -> Manifest:
    """Write the mapping and the index, and return the manifest. The coordinator calls."""
    staging, model, job = planned.staged.path, planned.plan.model_record(), planned.part.job
    mapping = write_file(staging / MAPPING_NAME, model.mapping, root=staging)
    checksums = [*(one for theirs in written for one in theirs), mapping]
    index = write_file(staging / INDEX_NAME, encode_index(model.shards, checksums), root=staging)
    return Manifest(
        written_by=f"paddleformers_fc {__version__}",
        step=job.step,
        consumed_samples=job.consumed_samples,
        world_size=len(written),
        parallel=dict(job.parallel),
        family=model.family,
        files=records_of([*checksums, index]),
        differences=unequal,
        ties=list(ties),
        saved_by=job.run or UNKNOWN_RUN,
        saved_at=SaveOrigin(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), socket.gethostname()),
    )
