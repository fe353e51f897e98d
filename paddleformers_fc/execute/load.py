"""Loading: a preflight on every rank, one agreed verdict, then each rank reads exactly what it needs.

The preflight opens the checkpoint, proves both mappings, composes them, plans this rank's reads and checks coverage and
ties, before the model changes. The ranks exchange their reports once. If any rank reports a fault, every rank raises
the same report. Otherwise every rank reads its ranges, without communication unless ranks read for each other
(:mod:`.exchange`), and a last exchange ensures that no rank continues to train if another could not read.
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

from paddleformers_fc.distributed.channel import (
    Bytes,
    Channel,
    ConsistencyFacts,
    all_gather_checked,
    gather_and_keep,
    group_by_value,
)
from paddleformers_fc.distributed.consistency import ConsistencyCheck, comparable_config, software_versions
from paddleformers_fc.errors import MismatchError, OptionError, PeerError
from paddleformers_fc.execute.exchange import (
    ReadContext,
    SharedReads,
    compare_redistributed,
    read_redistributed,
    replicas_of,
    shared_reads,
)
from paddleformers_fc.execute.memory import slots_of
from paddleformers_fc.execute.opening import verify_metadata_blocks, verify_parts
from paddleformers_fc.execute.phases import Phases, PhaseTimer
from paddleformers_fc.execute.reading import Key, Slot
from paddleformers_fc.execute.save_plan import cuts_of, model_rules
from paddleformers_fc.families import ModelDescription, OptionalNames, family_for, is_known
from paddleformers_fc.families.changes import (
    OPTION,
    Change,
    check_adapters_on_both_sides,
    check_changes_allowed,
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
from paddleformers_fc.plan.build import plan_reads, regrouped
from paddleformers_fc.plan.items import EqualCheck, LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.report import OPEN_WEIGHTS, Report
from paddleformers_fc.plan.sources import huggingface_source, resume_source
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
"""The option that lets the precision differ."""

Stored = tuple[str, str]
"""Role and name of a stored tensor."""


class LoadReport(msgspec.Struct, frozen=True):
    """The result of a load.

    Args:
        directory: the loaded directory.
        bytes_read: bytes this rank read from storage.
        seconds: wall time, preflight included.
        phases: the parts of it: ``open, plan, agree, read, finish``; ``open`` where the caller measures it.
        fresh: live tensors of this rank that the source did not hold, by declaration, and that kept their values.
        dropped: stored tensors that no rank wanted, by declaration.
        bytes_received: bytes this rank got from other ranks instead of reading them.
        bytes_hashed: bytes of blocks whose checksums this rank compared while it read.
        changes: where the configuration of the model differs from the stored one.
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
    """A load that fits, before it changes anything.

    Args:
        plan: the reads of this rank.
        storage: the files that it reads.
        target: how it fills the tensors.
        roles: role -> name -> live ``ShardedWeight`` of these tensors.
        slots: their memory.
        wanted: the roles that any rank loads.
        compares: whether any rank has stored tensors to compare first.
        dropped: stored tensors that no rank wants, by declaration.
        changes: where the configuration of the model differs from the stored one.
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
        """The identities of the files that are read; another file of the same name is refused."""
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
        options: threads, staging, and who reads what several ranks need.
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
        aoa_config: statements from stored names to the model's, for tensors that have other names or shapes now.
        tensors: with statements, all tensors of the model on all ranks; None without.
        may_change: keys of the configuration that may differ although they change what the weights mean.
        may_cast: whether the precision may differ from that of the run that saved the checkpoint.
        facts: further facts that must be equal on all ranks.
    """

    aoa_config: Mapping[str, object] | None = None
    tensors: Mapping[str, AoaTensor] | None = None
    may_change: Collection[str] = ()
    may_cast: bool = False
    facts: Mapping[str, object] = msgspec.field(default_factory=dict)


SAME_TERMS = LoadTerms()
"""For a load of a model that does not differ."""


class _Preflight(msgspec.Struct, frozen=True):
    """The result of one rank's preflight.

    Args:
        plan: its reads.
        report: the mismatches.
        may_stay_unread: parameters whose stored tensors no rank has to read.
        optional: decides which tensors of open weights no rank has to read; None if ``may_stay_unread`` does.
    """

    plan: LoadPlan
    report: Report
    may_stay_unread: Collection[str] = ()
    optional: OptionalNames | None = None

    def unexpected(self, untouched: Sequence[Stored], catalog: Catalog) -> list[str]:
        """Return the stored tensors that should have been read, of those that no rank reads."""
        if self.optional is not None:
            return self.optional.missed([name for _, name in untouched], catalog.roles[MODEL_STATE])
        return [name for role, name in untouched if parameter_of(role, name) not in self.may_stay_unread]


class _PreflightMessage(msgspec.Struct, array_like=True):
    """One rank's preflight on its way to the others.

    Args:
        report: the mismatches.
        roles: that this rank loads.
        way: how it reads ranges that other ranks need as well.
        compares: whether it has stored tensors to compare first.
        share: what it can read together with other ranks.
        blocks: the blocks that it reads if every rank reads for itself, and their checksums are compared; of more than
            :data:`MAX_SHARING_RANKS` ranks, each compares all that it reads, and none is sent.
    """

    report: list[tuple[str, str]]
    roles: list[str]
    way: str
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
    """Fill live weights from a flex checkpoint of any layout.

    Arguments and errors are those of :func:`prepare_load`. An error of a read, and damage that is found while tensors
    are filled, leave tensors undefined, and the job must not train them.
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
    """Do everything of a load that changes no weight: plan, and compare the copies of tied tensors.

    The checksums of headers and documents were compared on opening. Those of the tensors of an ``unread`` checkpoint
    are compared while tensors are filled; damage found then leaves them undefined.

    Args:
        checkpoint: the result of :func:`open_on_all_ranks`.
        roles: returns role -> name -> live ``ShardedWeight``; a stored role that is not wanted here is left alone. An
            error of this call on one rank is raised on all.
        model: the description of the live model.
        channel: all ranks of the job; every rank must call.
        options: threads and staging.
        terms: how the model may differ.
        timer: has measured the phases before; their seconds count. By default the load begins now.
    Raises:
        CheckpointError: the same on every rank: the checkpoint is damaged.
        FlexError: the same on every rank: the checkpoint does not fit the model.
    """
    consistency = load_consistency(checkpoint, model, terms)
    files = {path: one for path, one in checkpoint.recorded.items() if not is_document(path)}
    recorded = RecordedBlocks(files) if checkpoint.unread else NO_BLOCKS
    target = LoadTarget(roles, model, channel, options, timer or PhaseTimer())
    plan = partial(_plan_checkpoint, checkpoint, target, terms)
    load, report = _agree(checkpoint.catalog, target, plan, recorded, consistency)
    changes = config_changes(checkpoint.known, model, complete=not checkpoint.known.partial)
    root = str(checkpoint.catalog.root)
    if report.lines:
        check_adapters_on_both_sides(checkpoint.known, model, root)
        check_changes_allowed(of_adapters(changes), terms.may_change, root, fits=False)
        report.raise_error(root, _family_difference(checkpoint.known, model))
    check_changes_allowed(without_patterns(changes), terms.may_change, root)
    _compare_copies(load, checkpoint.catalog)
    return structs.replace(load, changes=tuple(changes))


def _plan_checkpoint(
    checkpoint: OpenedCheckpoint,
    target: LoadTarget,
    terms: LoadTerms,
    roles: Roles,
) -> _Preflight:
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
    # Statements may leave out the attention of all layers; tensors that they keep or move have the same heads
    # as before.
    if model.rules is None and (not aoa_config or _moves_heads(model, source.mapping.made)):
        for line in _head_count_difference(checkpoint.known, model):
            report.add("shape", line)
    for line in regrouped(source):
        report.add("shape", line)
    plan = plan_reads(structs.replace(source, may_cast=terms.may_cast), shards)
    may_stay_unread = source.mapping.dropped if aoa_config else checkpoint.rules.fresh
    return _Preflight(with_shared_numbers(plan, roles), plan.report.merge([report]), may_stay_unread)


def _family_difference(stored: ModelDescription, wanted: ModelDescription) -> list[str]:
    """Return the difference of families, which explains most other differences."""
    one, other = stored.model_type, wanted.model_type
    return [] if one == other else [f"the checkpoint is of family {one}, the model is {other}"]


def _types_apart(stored: ModelDescription, wanted: ModelDescription) -> list[str]:
    """Return a line if open weights are of another family, whose tensors may have the same names and shapes."""
    if not is_known(stored.config):
        return []
    if is_known(wanted.config) and family_for(stored.config) is family_for(wanted.config):
        return []
    return [f"model_type: stored {stored.model_type}, wanted {wanted.model_type}"]


def _head_count_difference(stored: ModelDescription, wanted: ModelDescription) -> list[str]:
    """Return differences in the number of attention heads, which shapes of tensors need not show."""
    if not (is_known(stored.config) and is_known(wanted.config)):
        return []
    before, after = (family_heads(family_for(model.config), model) for model in (stored, wanted))
    return [
        f"{key}: stored {before[key]}, wanted {count}"
        for key, count in after.items()
        if before.get(key, count) != count
    ]


def _moves_heads(model: ModelDescription, names: Iterable[str]) -> bool:
    """Return whether elements of one of these tensors are assigned to heads of attention."""
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
    """Return the tensors of some shards as statements know them."""
    from paddleformers_fc.aoa import AoaTensor

    return {one.name: AoaTensor(one.global_shape, one.dtype, cuts_of(model, one)) for one in shards}


def whole_model(
    model: ModelDescription, roles: Callable[[], Roles], channel: Channel, consistency: ConsistencyFacts | None = None
) -> dict[str, AoaTensor]:
    """Return every tensor of the model on all ranks: statements describe the model, and a rank holds a part of it."""
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
    """Do everything of a load of open weights that changes no weight; stored floating dtypes are cast to the model's.

    If the directory has recorded checksums (``flex_checksums.json``), sizes and documents are compared on opening.
    Under ``full`` headers are compared as well, and all blocks that are read while tensors are filled.

    Args:
        directory: safetensors files in canonical names, with their index.
        roles: ``model_state`` -> name -> live ``ShardedWeight``.
        model: the description of the live model.
        channel: all ranks of the job; every rank must call.
        options: threads and staging.
        verify: ``full``, or ``size`` or ``off``, which compare no tensor.
        timer: as for :func:`prepare_load`.
    Raises:
        FlexError: the same on every rank, as in :func:`load_checkpoint`.
    """
    target = LoadTarget(lambda: roles, model, channel, options, timer or PhaseTimer())
    consistency = _consistency_check(directory, model, {"verify": verify})
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

    model, shards, beside = target.model, describe_roles(roles), ModelDescription(opened.config)
    optional = OptionalNames(family_for(model.config), model) if model.rules is None else None
    aliases = canonical_ties(model)
    rules = model_rules(model, shards[MODEL_STATE])
    if opened.format.canonical:
        # Each part of a fused layer may have a copy of the inputs that the layer's adapter shares.
        aliases |= shared_copies(rules)
        check_orientation(opened, linear_weights(rules))
        source, report = huggingface_source(in_float32(opened.catalog), rules, optional, aliases)
    else:
        source, report = resume_source(opened, rules)
    plan = plan_reads(source, shards)
    for line in [*_types_apart(beside, model), *_head_count_difference(beside, model)]:
        report.add("shape", line)
    return _Preflight(plan, plan.report.merge([report]), optional=optional)


def _check_same_adapters(opened: OpenedCheckpoint, wanted: Adapters) -> None:
    """Refuse adapters of another rank or scaling than those of the model.

    Raises:
        MismatchError: with both values.
    """
    stored = opened.known.adapters or wanted
    values = {"r": (stored.r, wanted.r), "scaling": (stored.scaling, wanted.scaling)}
    faults = [f"{key}: stored {one}, wanted {other}" for key, (one, other) in values.items() if one != other]
    if faults:
        raise MismatchError(
            "The adapters are not those of the model. No weight was changed.",
            where=str(opened.catalog.root),
            evidence=faults,
            next_step="Give the model adapters of the stored rank and scaling.",
        )


def _opened_weights(
    directory: AnyPath, channel: Channel, verify: str, adapters: bool, consistency: ConsistencyFacts
) -> tuple[OpenedCheckpoint, RecordedBlocks]:
    """Return the opened weights, and the recorded checksums that the ranks compare while they read."""
    from paddleformers_fc.formats.registry import open_weights

    def work() -> tuple[bool, OpenedCheckpoint]:
        opened = open_weights(directory, "size" if verify == "full" else verify, adapters)
        return bool(opened.recorded), opened

    recorded, weights = gather_and_keep(channel, f"opening {directory.name}", work, bool, consistency)
    # Decided by all ranks: a rank without checksums still has to call the comparison.
    if not any(recorded) or verify != "full":
        return weights, NO_BLOCKS
    files, advice = list(weights.recorded.values()), restore_or_delete(directory)
    verify_metadata_blocks(directory, files, weights.catalog.identities, channel, advice)
    return weights, RecordedBlocks(weights.recorded, advice)


def _header_facts(catalog: Catalog) -> dict[str, str]:
    """Digest the headers of open weights by file, for ranks to compare: open weights have no manifest."""
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
    consistency: ConsistencyFacts,
) -> tuple[PreparedLoad, Report]:
    """Plan on every rank, and exchange what all ranks need to know of it, once. Every rank must call.

    Args:
        catalog: the stored tensors.
        target: what is filled.
        plan: plans the reads of this rank, whose live tensors it gets.
        recorded: the checksums that are compared while tensors are read.
        consistency: facts that must be equal on all ranks.
    Returns:
        the load, which fits if the report is empty, and the mismatches of all ranks.
    Raises:
        FlexError: the same on every rank: planning failed on some, or facts differ.
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
            share, parts = shared_reads(own.plan, roles, options)
        message = _PreflightMessage(own.report.to_wire(), list(roles), options.replicas, bool(own.plan.checks), share)
        if channel.world_size <= MAX_SHARING_RANKS:
            message.blocks = blocks
        target.timer.end("plan")
        return message, (own, roles, slots, blocks, parts)

    marks = np.zeros(catalog.count, np.uint8)
    everyone, (own, roles, slots, blocks, parts) = gather_and_keep(
        channel, "planning", planned, _PreflightMessage, consistency, marks=marks
    )
    _check_same_way(everyone)
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
    """Compare the headers of the files of a flex checkpoint that a rank may read with the index."""
    identities, visible_to = catalog.identities, catalog.visible_to
    if isinstance(identities, IndexedFiles):
        sides = (side for check in plan.checks for side in (check.left, check.right))
        files = {part.file for part in (*(item.stored for item in plan.items), *sides)}
        # A rank reads files of its disk for ranks without it.
        files |= visible_to.keys() & identities.index.files.keys()
        identities.check(file for file in sorted(files) if rank in visible_to.get(file, (rank,)))


def with_shared_numbers(plan: LoadPlan, roles: Roles) -> LoadPlan:
    """Add checks that stored numbers are equal if they fill the same memory.

    Parameters that an optimizer updates as one buffer share their powers of beta.

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
        plan: the plan of a flex checkpoint, whose files lie in directories of their roles.
        roles: the live tensors.
    """
    found: dict[tuple[str, str, str, str], set[str]] = {}
    for item in plan.items:
        wanted, stored = dtype_name(roles[item.role][item.name].local_tensor), item.stored
        source = stored.file.partition("/")[0]
        if stored.dtype != wanted or (source in ROLES and source != item.role):
            found.setdefault((item.role, source, stored.dtype, wanted), set()).add(item.name)
    for (role, source, stored_dtype, wanted), names in sorted(found.items()):
        origin = f" from {source}" if source in ROLES and source != role else ""
        yield f"{role}{origin} {stored_dtype} to {wanted}: {count_text(len(names), 'tensor')}"


def _compare_copies(load: PreparedLoad, catalog: Catalog) -> None:
    """Compare what is stored several times; if it differs, damage may explain it. Every rank must call.

    Raises:
        Corrupt: the same on every rank: the copies are damaged.
        MismatchError: the same on every rank: they were saved with different values.
    """
    checks, storage, target = load.plan.checks, load.storage, load.target
    try:
        if load.compares:
            compare_redistributed(checks, storage, target.channel, target.options)
    except (MismatchError, PeerError):
        if storage.recorded.files:
            sides = (side for check in checks for side in (check.left, check.right))
            seen = [side for side in sides if storage.can_read(target.channel.rank, side.file)]
            verify_parts(catalog, storage.recorded, seen, target.channel)
        raise
    target.timer.end("agree")


def _check_same_way(everyone: Sequence[_PreflightMessage]) -> None:
    """Refuse ranks that read shared ranges in different ways: those that share reads would wait for the others."""
    if len({one.way for one in everyone}) > 1:
        raise OptionError(
            "The ranks read what several of them need in different ways.",
            evidence=[f"flex_read: {group_by_value([one.way for one in everyone])}"],
            next_step="Give every rank the same options.",
        )


def _mark(marks: Bytes, catalog: Catalog, plan: LoadPlan) -> None:
    """Set the marks of the stored tensors that this rank reads, of which there is one per tensor of the catalog."""
    wanted = (name in plan.touched.get(role, ()) for role, names in catalog.sorted_names.items() for name in names)
    marks[:] = np.fromiter(wanted, bool, marks.size)


def _untouched(catalog: Catalog, marks: Bytes, wanted: Collection[str]) -> list[Stored]:
    """Role and name of the stored tensors of a wanted role that no rank reads."""
    stored = ((role, name) for role, names in catalog.sorted_names.items() for name in names)
    return sorted(one for one, is_read in zip(stored, marks, strict=True) if not is_read and one[0] in wanted)
