"""Load a checkpoint: a preflight on every rank, one agreed result, then each rank reads exactly what it needs.

The preflight proves both mappings, composes them, plans this rank's reads and checks coverage and ties, before the
model changes. The ranks exchange their reports once; if any rank reports a mismatch, all ranks raise the same error.
Otherwise every rank reads its ranges, without communication unless ranks read for each other (:mod:`.exchange`). A
last exchange ensures that no rank continues to train if another rank could not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
import xxhash
from msgspec import structs

from paddleformers_fc.distributed.channel import Bytes, Channel, all_gather_checked, gather_and_keep
from paddleformers_fc.distributed.consistency import ConsistencyCheck, comparable_config, software_versions
from paddleformers_fc.errors import MismatchError, PeerError
from paddleformers_fc.execute.exchange import ReadContext, SharedReads, compare_copies, read_redistributed, replicas_of
from paddleformers_fc.execute.memory import slots_of
from paddleformers_fc.execute.opening import compare_on_all, verify_metadata_blocks
from paddleformers_fc.execute.phases import Phases, PhaseTimer
from paddleformers_fc.execute.reading import Key, Slot
from paddleformers_fc.execute.save_plan import cuts_of, model_rules
from paddleformers_fc.families import ModelDescription, OptionalNames, family_for, is_known
from paddleformers_fc.families.changes import (
    OPTION,
    Change,
    check_adapters_on_both_sides,
    check_changes_allowed,
    check_keys_known,
    config_changes,
    of_adapters,
    without_patterns,
)
from paddleformers_fc.families.description import Adapters, shared_copies
from paddleformers_fc.families.names import Names, family_heads
from paddleformers_fc.families.stated import canonical_ties
from paddleformers_fc.formats import Catalog, OpenedCheckpoint
from paddleformers_fc.formats.index import IndexedFiles
from paddleformers_fc.layout.live import Roles, describe_roles, dtype_name
from paddleformers_fc.layout.roles import MODEL_STATE, NUMBER_SHAPE, OPTIMIZER_STATE, ROLES, parameter_of
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import Shape
from paddleformers_fc.plan.block_owners import MAX_SHARING_RANKS, NO_BLOCKS, BlockReads, RecordedBlocks
from paddleformers_fc.plan.build import plan_reads
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import OPEN_WEIGHTS, Report
from paddleformers_fc.plan.sources import huggingface_source, regrouped, resume_source
from paddleformers_fc.storage.checksum import is_document
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, ReadOptions
from paddleformers_fc.storage.export_checksums import restore_or_delete
from paddleformers_fc.storage.identities import Identities, same_bytes_key
from paddleformers_fc.storage.manifest import manifest_seal
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text

if TYPE_CHECKING:
    from paddleformers_fc.aoa import AoaTensor

ALLOW_CASTS = "flex_allow_casts"
"""The option that allows a different precision."""

Stored = tuple[str, str]
"""Role and name of a stored tensor."""


class LoadReport(msgspec.Struct, frozen=True):
    """The result of a load.

    Args:
        directory: the loaded directory.
        bytes_read: bytes that this rank read from storage.
        seconds: wall time, including the preflight.
        phases: seconds by phase, ``open, plan, agree, read, finish``; ``open`` only if the caller measures it.
        fresh: live tensors of this rank that are declared not to be stored, and that kept their values.
        dropped: stored tensors that no rank read, by declaration.
        bytes_received: bytes that this rank received from other ranks instead of reading them.
        bytes_hashed: bytes of blocks whose checksums this rank compared while reading.
        changes: differences between the model's configuration and the stored one.
        casts: the tensors of this rank that were cast or read from another role, one line per role.
    """

    directory: AnyPath
    bytes_read: int
    seconds: float
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    bytes_received: int = 0
    bytes_hashed: int = 0
    changes: tuple[Change, ...] = ()
    casts: tuple[str, ...] = ()
    phases: Phases = msgspec.field(default_factory=Phases)


class PreparedLoad(msgspec.Struct, frozen=True):
    """A load that has passed its preflight, before it changes anything.

    Args:
        plan: the reads of this rank.
        storage: the files that this rank reads.
        target: what the load fills.
        roles: role -> name -> live ``ShardedWeight`` of the tensors to fill.
        slots: their memory.
        wanted: the roles that any rank loads.
        compares: whether any rank has stored tensors to compare first.
        dropped: stored tensors that no rank reads, by declaration.
        changes: differences between the model's configuration and the stored one.
    """

    plan: LoadPlan
    storage: ReadContext
    target: LoadTarget
    roles: Roles
    slots: Mapping[Key, Slot]
    wanted: frozenset[str]
    compares: bool
    dropped: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def targets(self) -> set[Key]:
        """Role and name of every tensor that this rank fills."""
        return {(item.role, item.name) for item in self.plan.items}

    @property
    def identities(self) -> Identities:
        """The identities of the files to read; reading a replaced file raises an error."""
        return self.storage.identities

    def fill(self) -> LoadReport:
        """Fill the tensors; every rank must call.

        Raises:
            Corrupt: the same on every rank: blocks do not match their checksums. Tensors are undefined.
            FlexError: the same on every rank: reads failed. Tensors are undefined.
        """
        target, timer = self.target, self.target.timer
        traffic = read_redistributed(self.plan, self.storage, self.slots, target.channel, target.options, timer=timer)
        filled = self.targets
        fresh = tuple(name for role, names in self.roles.items() for name in names if (role, name) not in filled)
        casts = tuple(cast_lines(self.plan, self.roles))
        timer.end("finish")
        return LoadReport(
            self.storage.root,
            traffic.read,
            timer.elapsed,
            fresh,
            self.dropped,
            traffic.received,
            traffic.hashed,
            self.changes,
            casts,
            timer.phases(traffic.slowest),
        )


class LoadTarget(msgspec.Struct, frozen=True):
    """What a load fills.

    Args:
        roles: returns role -> name -> live ``ShardedWeight``.
        model: the description of the live model.
        channel: all ranks of the job.
        options: threads, staging memory, and how to read ranges that several ranks need.
        timer: measures the phases.
    """

    roles: Callable[[], Roles]
    model: ModelDescription
    channel: Channel
    options: ReadOptions
    timer: PhaseTimer


class LoadTerms(msgspec.Struct, frozen=True):
    """How a model may differ from the checkpoint that fills it.

    Args:
        aoa_config: statements that map stored tensors to tensors with different names or shapes.
        tensors: with statements, all tensors of the model on all ranks; else None.
        may_change: configuration keys that may differ although they change the meaning of the weights.
        may_cast: whether the precision may differ from the run that saved the checkpoint.
        facts: more facts that must be equal on all ranks.
    """

    aoa_config: Mapping[str, object] | None = None
    tensors: Mapping[str, AoaTensor] | None = None
    may_change: Collection[str] = ()
    may_cast: bool = False
    facts: Mapping[str, object] = msgspec.field(default_factory=dict)


SAME_TERMS = LoadTerms()
"""For a model that may not differ."""


class _Preflight(msgspec.Struct, frozen=True):
    """The result of one rank's preflight.

    Args:
        plan: its reads.
        report: the mismatches.
        may_stay_unread: parameters whose stored tensors no rank has to read.
        optional: for open weights, determines the tensors that no rank has to read; None for a flex checkpoint.
    """

    plan: LoadPlan
    report: Report
    may_stay_unread: Collection[str] = ()
    optional: OptionalNames | None = None

    def unexpected(self, untouched: Sequence[Stored], catalog: Catalog) -> list[str]:
        """Return the unread tensors that some rank should have read."""
        if self.optional is not None:
            return self.optional.missed([name for _, name in untouched], catalog.roles[MODEL_STATE])
        return [name for role, name in untouched if parameter_of(role, name) not in self.may_stay_unread]


class _PreflightMessage(msgspec.Struct, array_like=True):
    """Message with the result of one rank's preflight.

    Args:
        report: the mismatches.
        roles: the roles that this rank loads.
        compares: whether it has stored tensors to compare first.
        share: digests of the ranges that it could share with other ranks.
        blocks: the blocks that it reads if every rank reads for itself and checksums are compared. Empty with more than
            :data:`MAX_SHARING_RANKS` ranks, each of which compares everything that it reads.
    """

    report: list[tuple[str, str]]
    roles: list[str]
    compares: bool
    share: SharedReads
    blocks: BlockReads = BlockReads()


def load_checkpoint(
    checkpoint: OpenedCheckpoint,
    roles: Roles,
    model: ModelDescription,
    channel: Channel,
    options: ReadOptions = DEFAULT_OPTIONS,
    aoa_config: Mapping[str, object] | None = None,
    may_change: Collection[str] = (),
) -> LoadReport:
    """Fill live weights from a flex checkpoint of any layout; see :func:`prepare_load` for arguments and errors.

    If a read fails, or damage is found while tensors are filled, the tensors are undefined, and the job must not train
    them.
    """
    terms = LoadTerms(aoa_config, may_change=may_change)
    if aoa_config:
        consistency = load_consistency(checkpoint, model, terms)
        terms = structs.replace(terms, tensors=whole_model(model, lambda: roles, channel, consistency))
    return prepare_load(checkpoint, lambda: roles, model, channel, options, terms).fill()


def prepare_load(
    checkpoint: OpenedCheckpoint,
    roles: Callable[[], Roles],
    model: ModelDescription,
    channel: Channel,
    options: ReadOptions = DEFAULT_OPTIONS,
    terms: LoadTerms = SAME_TERMS,
    timer: PhaseTimer | None = None,
) -> PreparedLoad:
    """Run the preflight of a load, which changes no weight: plan, and compare the copies of tied tensors.

    Opening has compared the checksums of headers and metadata files. The blocks of an ``unread`` checkpoint are
    compared while tensors are filled; if damage is found then, the tensors are undefined.

    Args:
        checkpoint: the result of :func:`open_on_all_ranks`.
        roles: returns role -> name -> live ``ShardedWeight``. Stored roles that it omits are not loaded. If the call
            fails on one rank, all ranks raise the error.
        model: the description of the live model.
        channel: all ranks of the job; every rank must call.
        options: threads and staging memory.
        terms: how the model may differ.
        timer: a timer that has measured the phases so far; by default the load begins now.
    Raises:
        CheckpointError: the same on every rank: the checkpoint is damaged.
        FlexError: the same on every rank: the checkpoint does not match the model.
    """
    # Ranks that read shared ranges in different ways would wait for one another forever.
    facts = {**terms.facts, "flex_read": options.replicas}
    consistency = load_consistency(checkpoint, model, structs.replace(terms, facts=facts))
    files = {path: one for path, one in checkpoint.recorded.items() if not is_document(path)}
    recorded = RecordedBlocks(files) if checkpoint.unread else NO_BLOCKS
    target = LoadTarget(roles, model, channel, options, timer or PhaseTimer())
    plan = partial(_plan_checkpoint, checkpoint, target, terms)
    load, report = _agree(checkpoint.catalog, target, plan, recorded, consistency)
    changes = config_changes(checkpoint.known, model, complete=not checkpoint.known.partial)
    root = str(checkpoint.catalog.root)
    check_keys_known(terms.may_change, checkpoint.known, model)
    if report.lines:
        check_adapters_on_both_sides(checkpoint.known, model.adapters is not None, root)
        check_changes_allowed(of_adapters(changes), terms.may_change, root, fits=False)
        report.raise_error(root, _family_difference(checkpoint.known, model))
    check_changes_allowed(without_patterns(changes), terms.may_change, root)
    _compare_copies(load, checkpoint.catalog)
    return structs.replace(load, changes=tuple(changes))


def _plan_checkpoint(checkpoint: OpenedCheckpoint, target: LoadTarget, terms: LoadTerms, roles: Roles) -> _Preflight:
    """Plan this rank's reads of a checkpoint.

    Args:
        checkpoint: the opened checkpoint.
        target: what is filled.
        terms: how the model may differ.
        roles: the live tensors of this rank.
    """
    model, shards = target.model, describe_roles(roles)
    if roles.get(OPTIMIZER_STATE):
        checkpoint.check_states()
    if target.channel.rank == 0 and checkpoint.facts.copies:
        from paddleformers_fc.formats.stock_checkpoint import check_copies

        check_copies(checkpoint)
    aoa_config = terms.aoa_config
    if aoa_config:
        from paddleformers_fc.plan.statements import statements_source

        source, report = statements_source(checkpoint, model, aoa_config, terms.tensors or {}, terms.may_cast)
    else:
        source, report = resume_source(checkpoint, model_rules(model, shards[MODEL_STATE]), model)
    # Statements may omit the attention of all layers. Tensors that they keep or move must have the same heads as
    # before.
    if model.rules is None and (not aoa_config or _moves_heads(model, source.mapping.made)):
        for line in _head_count_difference(checkpoint.known, model):
            report.add("shape", line)
    for line in regrouped(source):
        report.add("shape", line)
    plan = plan_reads(structs.replace(source, may_cast=terms.may_cast), shards)
    may_stay_unread = source.mapping.dropped if aoa_config else checkpoint.rules.fresh
    return _Preflight(with_shared_numbers(plan, roles), plan.report.merge([report]), may_stay_unread)


def _family_difference(stored: ModelDescription, live: ModelDescription) -> list[str]:
    """Return a line if the families differ, which explains most other differences."""
    one, other = stored.model_type, live.model_type
    return [] if one == other else [f"the checkpoint is of family {one}, the model is {other}"]


def _types_apart(stored: ModelDescription, live: ModelDescription) -> list[str]:
    """Return a line if open weights belong to another family, whose tensors may have the same names and shapes."""
    if not is_known(stored.config):
        return []
    if is_known(live.config) and family_for(stored.config) is family_for(live.config):
        return []
    return [f"model_type: stored {stored.model_type}, expected {live.model_type}"]


def _head_count_difference(stored: ModelDescription, live: ModelDescription) -> list[str]:
    """Return differences in the number of attention heads, which may not show in the shapes of tensors."""
    if not (is_known(stored.config) and is_known(live.config)):
        return []
    before, after = (family_heads(family_for(model.config), model) for model in (stored, live))
    return [
        f"{key}: stored {before[key]}, expected {count}"
        for key, count in after.items()
        if before.get(key, count) != count
    ]


def _moves_heads(model: ModelDescription, names: Iterable[str]) -> bool:
    """Return whether any of these tensors has attention heads."""
    return any(map(Names(family_for(model.config), model).of_heads, names))


def load_consistency(checkpoint: OpenedCheckpoint, model: ModelDescription, terms: LoadTerms) -> ConsistencyCheck:
    """Return the facts of the load of a checkpoint that must be equal on all ranks."""
    recorded_run = checkpoint.has_run or checkpoint.format.canonical
    saved = manifest_seal(checkpoint.manifest) if recorded_run else _header_facts(checkpoint.catalog)
    facts: dict[str, object] = {"manifest": saved, "checks": checkpoint.unread}
    facts |= {"aoa_config": terms.aoa_config or {}, "flex_tied": checkpoint.tied, OPTION: sorted(terms.may_change)}
    facts |= {ALLOW_CASTS: terms.may_cast, **terms.facts}
    return _consistency_check(checkpoint.catalog.root, model, facts)


def _consistency_check(directory: AnyPath, model: ModelDescription, facts: Mapping[str, object]) -> ConsistencyCheck:
    """Return the facts of a load that must be equal on all ranks."""
    return ConsistencyCheck(
        f"loading {directory.name}", {"versions": software_versions(), "config": comparable_config(model), **facts}
    )


def aoa_tensors(model: ModelDescription, shards: Iterable[Shard]) -> dict[str, AoaTensor]:
    """Return the tensors of some shards in the form that statements use."""
    from paddleformers_fc.aoa import AoaTensor

    return {one.name: AoaTensor(one.global_shape, one.dtype, cuts_of(model, one)) for one in shards}


def whole_model(
    model: ModelDescription, roles: Callable[[], Roles], channel: Channel, consistency: ConsistencyCheck | None = None
) -> dict[str, AoaTensor]:
    """Gather all tensors of the model from all ranks, because statements describe the complete model."""
    from paddleformers_fc.aoa import AoaTensor

    def own_tensors() -> dict[str, AoaTensor]:
        return aoa_tensors(model, describe_roles({MODEL_STATE: roles()[MODEL_STATE]})[MODEL_STATE].values())

    everyone = all_gather_checked(channel, "describing the model", own_tensors, dict[str, AoaTensor], consistency)
    return {name: tensor for tensors in everyone for name, tensor in tensors.items()}


def prepare_weights(
    directory: AnyPath,
    roles: Roles,
    model: ModelDescription,
    channel: Channel,
    options: ReadOptions = DEFAULT_OPTIONS,
    verify: str = "full",
    timer: PhaseTimer | None = None,
) -> PreparedLoad:
    """Run the preflight of a load of open weights. Floating-point dtypes are cast to the model's dtype.

    If the directory has recorded checksums (``flex_checksums.json``), sizes and metadata files are compared on opening.
    Under ``full`` headers are compared as well, and all blocks that are read while tensors are filled.

    Args:
        directory: safetensors files in canonical names, with their index.
        roles: ``model_state`` -> name -> live ``ShardedWeight``.
        model: the description of the live model.
        channel: all ranks of the job; every rank must call.
        options: threads and staging memory.
        verify: ``full``, or ``size`` or ``off``, which compare no tensors.
        timer: as for :func:`prepare_load`.
    Raises:
        FlexError: the same on every rank, as in :func:`load_checkpoint`.
    """
    target = LoadTarget(lambda: roles, model, channel, options, timer or PhaseTimer())
    consistency = _consistency_check(directory, model, {"verify": verify, "flex_read": options.replicas})
    opened, recorded = _opened_weights(directory, channel, verify, model.adapters is not None, consistency)
    target.timer.end("open")
    checksums = {name: checksum.digest for name, checksum in opened.recorded.items()}
    facts = {"open_weights": _header_facts(opened.catalog), "checksums": checksums}
    seen = _consistency_check(directory, model, facts)
    load, report = _agree(opened.catalog, target, partial(_plan_weights, opened, target), recorded, seen)
    if model.adapters is not None:
        _check_same_adapters(opened, model.adapters)
    report.raise_error(str(directory), stored=OPEN_WEIGHTS)
    _compare_copies(load, opened.catalog)
    return load


def _plan_weights(opened: OpenedCheckpoint, target: LoadTarget, roles: Roles) -> _Preflight:
    """Plan this rank's reads of open weights."""
    from paddleformers_fc.formats.huggingface import check_orientation, linear_weights
    from paddleformers_fc.formats.quantized import in_float32

    model, shards, stored = target.model, describe_roles(roles), ModelDescription(opened.config)
    optional = OptionalNames(family_for(model.config), model) if model.rules is None else None
    aliases = canonical_ties(model)
    rules = model_rules(model, shards[MODEL_STATE])
    if opened.format.canonical:
        # Each part of a fused layer may store its own copy of the lora_A that the parts share.
        aliases |= shared_copies(rules)
        check_orientation(opened, linear_weights(rules))
        source, report = huggingface_source(in_float32(opened.catalog), rules, optional, aliases)
    else:
        source, report = resume_source(opened, rules)
    plan = plan_reads(source, shards)
    for line in [*_types_apart(stored, model), *_head_count_difference(stored, model)]:
        report.add("shape", line)
    return _Preflight(plan, plan.report.merge([report]), optional=optional)


def _check_same_adapters(opened: OpenedCheckpoint, expected: Adapters) -> None:
    """Check that stored adapters have the rank and scaling of the model's adapters.

    Raises:
        MismatchError: lists both values.
    """
    stored = opened.known.adapters or expected
    values = {"r": (stored.r, expected.r), "scaling": (stored.scaling, expected.scaling)}
    faults = [f"{key}: stored {one}, expected {other}" for key, (one, other) in values.items() if one != other]
    if faults:
        raise MismatchError(
            "The adapters do not match the adapters of the model. No weight was changed.",
            where=str(opened.catalog.root),
            evidence=faults,
            next_step="Create the model with the stored rank and scaling.",
        )


def _opened_weights(
    directory: AnyPath, channel: Channel, verify: str, adapters: bool, consistency: ConsistencyCheck
) -> tuple[OpenedCheckpoint, RecordedBlocks]:
    """Return the opened weights, and the recorded checksums that the ranks compare while they read."""
    from paddleformers_fc.formats.registry import open_weights

    def work() -> tuple[bool, OpenedCheckpoint]:
        opened = open_weights(directory, "size" if verify == "full" else verify, adapters)
        return bool(opened.recorded), opened

    recorded, weights = gather_and_keep(channel, f"opening {directory.name}", work, bool, consistency)
    # All ranks decide together, because a rank without checksums must also call the comparison.
    if not any(recorded) or verify != "full":
        return weights, NO_BLOCKS
    files, advice = list(weights.recorded.values()), restore_or_delete(directory)
    verify_metadata_blocks(weights.catalog, files, channel, advice)
    return weights, RecordedBlocks(weights.recorded, advice)


def _header_facts(catalog: Catalog) -> dict[str, str]:
    """Return a digest of each header of open weights, which ranks compare because there is no manifest."""
    tensors: dict[str, list[tuple[str, str, Shape, int]]] = {}
    for name in catalog.sorted_names[MODEL_STATE]:
        tensor = catalog.roles[MODEL_STATE][name]
        for file, begin in tensor.offsets:
            tensors.setdefault(file, []).append((name, tensor.dtype, tensor.shape, begin))
    return {
        file: f"{count_text(len(own), 'tensor')}, xxh3_128 {xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(own))}"
        for file, own in tensors.items()
    }


_Planned: TypeAlias = tuple[_Preflight, Roles, dict[Key, Slot], BlockReads, Sequence[StoredPart]]


def _agree(
    catalog: Catalog,
    target: LoadTarget,
    plan: Callable[[Roles], _Preflight],
    recorded: RecordedBlocks,
    consistency: ConsistencyCheck,
) -> tuple[PreparedLoad, Report]:
    """Plan on every rank, and exchange the results once. Every rank must call.

    Args:
        catalog: the stored tensors.
        target: what is filled.
        plan: plans the reads of this rank, given its live tensors.
        recorded: the checksums to compare while tensors are read.
        consistency: facts that must be equal on all ranks.
    Returns:
        the load, which is valid only if the report is empty, and the mismatches of all ranks.
    Raises:
        FlexError: the same on every rank: planning failed on a rank, or facts differ.
    """
    channel, options = target.channel, target.options

    def planned() -> tuple[_PreflightMessage, _Planned]:
        roles = target.roles()
        own, slots = plan(roles), slots_of(roles, options.host_copy_bytes)
        _compare_headers(catalog, own.plan, channel.rank)
        _mark(marks, catalog, own.plan)
        blocks = BlockReads()
        if recorded.files and not catalog.visible_to:
            blocks = recorded.reads((item.stored for item in own.plan.items), same_bytes_key(catalog.identities))
        share, parts = SharedReads(), tuple[StoredPart, ...]()
        if not catalog.visible_to:
            share, parts = SharedReads.of(own.plan, roles, options)
        message = _PreflightMessage(own.report.to_wire(), list(roles), bool(own.plan.checks), share)
        if channel.world_size <= MAX_SHARING_RANKS:
            message.blocks = blocks
        target.timer.end("plan")
        return message, (own, roles, slots, blocks, parts)

    marks = np.zeros(catalog.count, np.uint8)
    everyone, (own, roles, slots, blocks, parts) = gather_and_keep(
        channel, "planning", planned, _PreflightMessage, consistency, marks=marks
    )
    merged = Report({line for one in everyone for line in one.report})
    wanted = frozenset(role for one in everyone for role in one.roles)
    untouched = _untouched(catalog, marks, wanted)
    for name in own.unexpected(untouched, catalog):
        merged.add("unexpected", name)
    block_reads = [one.blocks for one in everyone]
    block_reads[channel.rank] = blocks
    replicas = replicas_of([one.share for one in everyone], channel.rank, options, parts)
    storage = ReadContext(catalog.root, catalog.identities, catalog.visible_to, recorded, block_reads, replicas)
    compares, dropped = any(one.compares for one in everyone), tuple(name for _, name in untouched)
    return PreparedLoad(own.plan, storage, target, roles, slots, wanted, compares, dropped), merged


def _compare_headers(catalog: Catalog, plan: LoadPlan, rank: int) -> None:
    """Compare with the index the headers of the files of a flex checkpoint that a rank may read."""
    identities, visible_to = catalog.identities, catalog.visible_to
    if isinstance(identities, IndexedFiles):
        sides = (side for check in plan.checks for side in (check.left, check.right))
        files = {part.file for part in (*(item.stored for item in plan.items), *sides)}
        # A rank reads files of its disk for ranks without it.
        files |= visible_to.keys() & identities.index.files.keys()
        identities.check(file for file in sorted(files) if rank in visible_to.get(file, (rank,)))


def with_shared_numbers(plan: LoadPlan, roles: Roles) -> LoadPlan:
    """Add checks that stored numbers are equal if they fill the same memory.

    Parameters in one fused buffer of an optimizer share their powers of beta.

    Args:
        plan: the plan.
        roles: the live tensors.
    """
    shared: dict[int, list[ReadItem]] = {}
    for item in plan.items:
        if item.role != MODEL_STATE and item.shape == NUMBER_SHAPE:
            tensor = roles[item.role][item.name].local_tensor
            if math.prod(tensor.shape) == 1:
                shared.setdefault(int(tensor.data_ptr()), []).append(item)
    checks = (
        EqualCheck(f"{other.name} = {first.name}", first.stored, other.stored)
        for first, *others in shared.values()
        for other in others
    )
    return structs.replace(plan, checks=(*plan.checks, *checks))


def cast_lines(plan: LoadPlan, roles: Roles) -> Iterator[str]:
    """Yield a line per role and kind of cast, such as ``master_weight from model_state: 39 tensors``.

    Args:
        plan: the plan of a flex checkpoint, whose files are in directories of their roles.
        roles: the live tensors.
    """
    found: dict[tuple[str, str, str, str], set[str]] = {}
    for item in plan.items:
        dtype, stored = dtype_name(roles[item.role][item.name].local_tensor), item.stored
        source = stored.file.partition("/")[0]
        if stored.dtype != dtype or (source in ROLES and source != item.role):
            found.setdefault((item.role, source, stored.dtype, dtype), set()).add(item.name)
    for (role, source, stored_dtype, dtype), names in sorted(found.items()):
        origin = f" from {source}" if source in ROLES and source != role else ""
        yield f"{role}{origin} {stored_dtype} to {dtype}: {count_text(len(names), 'tensor')}"


def _compare_copies(load: PreparedLoad, catalog: Catalog) -> None:
    """Compare tensors that are stored several times; if they differ, check for damage. Every rank must call.

    Raises:
        Corrupt: the same on every rank: the copies are damaged.
        MismatchError: the same on every rank: the copies were saved with different values.
    """
    checks, storage, target = load.plan.checks, load.storage, load.target
    try:
        if load.compares:
            compare_copies(checks, storage, target.channel, target.options)
    except (MismatchError, PeerError):
        if storage.recorded.files:
            sides = (side for check in checks for side in (check.left, check.right))
            seen = [side for side in sides if storage.can_read(target.channel.rank, side.file)]
            requests, advice = storage.recorded.requests(seen), storage.recorded.next_step
            compare_on_all(catalog.root, requests, catalog.identities, target.channel, advice)
        raise
    target.timer.end("agree")


def _mark(marks: Bytes, catalog: Catalog, plan: LoadPlan) -> None:
    """Set the marks, one per stored tensor, of the tensors that this rank reads."""
    is_read = (name in plan.touched.get(role, ()) for role, names in catalog.sorted_names.items() for name in names)
    marks[:] = np.fromiter(is_read, bool, marks.size)


def _untouched(catalog: Catalog, marks: Bytes, loaded: Collection[str]) -> list[Stored]:
    """Return role and name of the stored tensors of loaded roles that no rank reads."""
    stored = ((role, name) for role, names in catalog.sorted_names.items() for name in names)
    return sorted(one for one, is_read in zip(stored, marks, strict=True) if not is_read and one[0] in loaded)
