"""``save`` and ``load`` for a training loop without PaddleFormers' Trainer.

The model is any layer with ``sharded_state_dict``. Its tensors are mapped by a family (of its configuration or an
argument), by rules of the caller, or else by name. Every rank of the job must call, and all ranks raise the same error.
The parallel degrees are those of Paddle's fleet.

A *source* returns live tensors by role and name, as :class:`.layout.live.LocalTensor`. There are two: a model with its
optimizer (``sharded_state_dict``), and a state dict of tensors with a mesh and placements.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import msgspec
from msgspec import structs
from paddle import DataParallel
from paddle.distributed import fleet
from paddle.distributed.fleet.base.topology import EPHybridCommunicateGroup, HybridCommunicateGroup
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3

from paddleformers_fc.api_arguments import (
    COUNT_OR_ZERO,
    DEGREES,
    DIRECTORY,
    FLAG,
    THREADS,
    Kind,
    instance_of,
    require,
    require_or_none,
)
from paddleformers_fc.distributed.channel import (
    all_gather_checked,
    gather_and_keep,
    run_on_all,
)
from paddleformers_fc.distributed.communicator import job_communicator
from paddleformers_fc.distributed.consistency import ConsistencyCheck, comparable_config
from paddleformers_fc.distributed.store_client import hosts_of_ranks
from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.load import LoadReport, LoadTerms, aoa_tensors, prepare_load, prepare_weights
from paddleformers_fc.execute.opening import Sent, open_sent, read_metadata
from paddleformers_fc.execute.output_directory import check_no_checkpoint
from paddleformers_fc.execute.phases import PhaseTimer
from paddleformers_fc.execute.save import JobRecord, SaveReport, check_ties, config_bytes, save_checkpoint
from paddleformers_fc.families import Family, ModelDescription, ModelTensor, family_for, is_known, register
from paddleformers_fc.families.description import IS_FLEET
from paddleformers_fc.families.stated import bind_model, check_cut_alike, model_ties, rules_by_name, without_family
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, OpenedCheckpoint, StoredModel
from paddleformers_fc.layout.live import Roles, describe_roles
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE, ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import RuleSet, Tie
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.plan.sources import stored_tensors
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.files import check_not_file
from paddleformers_fc.storage.manifest import check_level
from paddleformers_fc.storage.paths import AnyPath, RemotePath, parse_named, parse_step, require_local
from paddleformers_fc.text import fold
from paddleformers_fc.trainer import (
    adapter_checks,
    description,
    live_roles,
    optimizers,
    own_statements,
    restore,
    weight_sources,
)
from paddleformers_fc.trainer.description import OWN_RULES, describe_model
from paddleformers_fc.trainer.dist_tensors import StateDict
from paddleformers_fc.trainer.library import is_a, unwrap_model
from paddleformers_fc.trainer.live_roles import LayoutSource


def fleet_degrees(world_size: int) -> dict[str, int]:
    """Return the degree of every parallel axis, as :func:`.resume.parallel_degrees`.

    Args:
        world_size: number of ranks.
    Returns:
        the degrees; empty if there are several ranks and fleet is not initialised, because the axes are unknown.
    """
    group = getattr(fleet.fleet, "_hcg", None)
    if not isinstance(group, HybridCommunicateGroup):
        return dict.fromkeys(("dp", "tp", "pp", "sharding", "ep", "sep", "cp"), 1) if world_size == 1 else {}
    has_experts = isinstance(group, EPHybridCommunicateGroup)
    return {
        "dp": group.get_data_parallel_world_size(),
        "tp": group.get_model_parallel_world_size(),
        "pp": group.get_pipe_parallel_world_size(),
        "sharding": group.get_sharding_parallel_world_size(),
        "ep": group.get_expert_parallel_world_size() if has_experts else 1,
        "sep": group.get_sep_parallel_world_size(),
        "cp": group.get_context_parallel_world_size() if has_experts else 1,
    }


_WRAPPERS = (DataParallel, MetaParallelBase, GroupShardedStage2, GroupShardedStage3)


def live_source(model: Any, optimizer: Any) -> LayoutSource:
    """Return the source of a model, which may be in a parallel wrapper of Paddle, and of its optimizer.

    Args:
        model: a layer or its wrapper, or a state dict.
        optimizer: the optimizer of a layer; None for the weights only.
    Raises:
        OptionError: the model does not describe its shards, an optimizer is passed with a state dict, or the optimizer
            is not supported.
    """
    if isinstance(model, Mapping):
        if optimizer is not None:
            raise OptionError(
                "A state dict and an optimizer cannot be passed together.",
                where="optimizer",
                next_step="Pass one state dict: {**model.state_dict(), **optimizer.state_dict()}.",
            )
        return StateDict(model)
    while isinstance(model, _WRAPPERS):
        model = getattr(model, "_layers", None) or model._layer
    if isinstance(model, type) or not hasattr(model, "sharded_state_dict"):
        raise OptionError(
            f"{type(model).__name__} has no sharded_state_dict.",
            where="model",
            next_step="Pass a paddle.nn.Layer, or an object whose sharded_state_dict() returns ShardedWeight by name.",
        )
    if optimizer is not None:
        optimizers.check_supported(optimizer)
    return live_roles.LiveModel(model, optimizer)


class RankTensors(msgspec.Struct):
    """The weights of one rank, for models whose tensors are mapped by name.

    Attributes:
        shards: shards by name.
        ties: pairs of names of the same parameter; the owner, which sorts first, gives Paddle's optimizer states their
            names.
    """

    shards: dict[str, Shard] = {}
    ties: list[Tie] = []


def rank_tensors(roles: Roles) -> RankTensors:
    """Return the weights of this rank in the form that ranks exchange."""
    weights = roles[MODEL_STATE]
    # Two parameters may have the same static name if they were created under separate unique_name.guard().
    names: dict[tuple[str, int], list[str]] = {}
    for name in sorted(weights):
        tensor = weights[name].local_tensor
        address = int(tensor.data_ptr()) if tensor._is_initialized() else 0
        names.setdefault((tensor.name, address), []).append(name)
    ties = [Tie(owner, alias) for owner, *aliases in names.values() for alias in aliases]
    return RankTensors(describe_roles({MODEL_STATE: weights})[MODEL_STATE], ties)


class _LoadRequest(msgspec.Struct):
    """What a rank sends at the start of a load.

    Attributes:
        tensors: its weights, if other ranks need them.
        sent: the checkpoint's metadata, on the coordinator.
    """

    tensors: RankTensors
    sent: Sent


def rules_of_ranks(everyone: Collection[RankTensors], is_global: bool) -> RuleSet:
    """Return rules that map the tensors of all ranks by name.

    The cuts of an axis are the number of different boxes along it, because boxes may have different lengths. Tensors
    with the layout of a single device have no cuts.

    Args:
        everyone: the weights of every rank.
        is_global: see :attr:`LayoutSource.is_global`.
    """
    boxes: dict[str, dict[Box, Shard]] = {}
    for model in everyone:
        for name, shard in model.shards.items():
            boxes.setdefault(name, {})[shard.box] = shard
    tensors = [_tensor(shards, is_global) for shards in boxes.values()]
    ties = dict.fromkeys(tie for model in everyone for tie in model.ties)
    return rules_by_name(tensors, ties)


def _tensor(shards: Mapping[Box, Shard], is_global: bool) -> ModelTensor:
    one = next(iter(shards.values()))
    axes = range(len(one.global_shape))
    cuts = (1 if is_global else len({(box.lo[axis], box.hi[axis]) for box in shards}) for axis in axes)
    return ModelTensor(one.name, one.global_shape, one.dtype, tuple(cuts))


Config: TypeAlias = Any
"""A model's configuration: the content of ``config.json``, or PaddleFormers' object."""

_STATES = (MASTER_WEIGHT, OPTIMIZER_STATE)
_OPTIMIZER = Kind(
    "an optimizer over the parameters of the model, or None",
    lambda value: callable(getattr(value, "step", None)) and not isinstance(value, type),
)
_FAMILY = instance_of((str, Family), "a family or its model_type")
_CONFIG = Kind(
    "the content of config.json, or a configuration of PaddleFormers",
    lambda value: isinstance(value, Mapping) or is_a("PretrainedConfig", value),
)
_RULES = instance_of(RuleSet, "a RuleSet of paddleformers_fc.mapping")


def save(
    directory: str | PathLike[str] | Mapping[str, Any],
    model: Any,
    optimizer: Any = None,
    *,
    step: int | None = None,
    consumed_samples: int = 0,
    parallel: Mapping[str, int] | None = None,
    family: str | Family | None = None,
    config: Config | None = None,
    mapping: RuleSet | None = None,
) -> SaveReport:
    """Save a model, and optionally its optimizer, as a flex checkpoint. Every rank must call.

    Args:
        directory: the checkpoint, usually ``checkpoint-N`` with the step as N. An older checkpoint is replaced only
            when the new one is complete.
        model: a layer with ``sharded_state_dict``, or its parallel wrapper; or a state dict of semi-automatic
            parallelism, which may be the first argument: ``save(state_dict, path)``.
        optimizer: a declared optimizer over the model's parameters; None saves only the weights. A state dict must
            contain the states instead: ``{**model.state_dict(), **optimizer.state_dict()}``.
        step: optimizer steps done. Default: N of a directory ``checkpoint-N``, otherwise 0.
        consumed_samples: number of training samples consumed.
        parallel: degree per parallel axis, for readers; loads do not need it. Default: the degrees of Paddle's fleet if
            it is initialised; for a state dict nothing, because its tensors have their own meshes.
        family: the model's family, or its ``model_type``. Default: the family of the configuration.
        config: the model's configuration. Default: ``model.config``.
        mapping: rules from canonical tensors to all tensors of the model, instead of a family's rules. Without rules,
            a declared family or AOA statements of the model's class, canonical names equal the model's names.
    Returns:
        number and size of the files, and the replicas that differ. Rank 0 warns of these.
    Raises:
        FlexError: the same on every rank; an older checkpoint stays unchanged.

    Example:
        >>> paddleformers_fc.save("out/checkpoint-3", model, optimizer, step=3)
    """
    channel = job_communicator()
    named, model = _path_first(directory, model)

    def check() -> Path:
        require(DIRECTORY, directory=named)
        require(COUNT_OR_ZERO, consumed_samples=consumed_samples)
        require_or_none(COUNT_OR_ZERO, step=step)
        require_or_none(DEGREES, parallel=parallel)
        require_or_none(_OPTIMIZER, optimizer=optimizer)
        found = require_local(parse_named(named), "A checkpoint that is saved")
        check_not_file(found)
        if channel.rank == 0:
            check_no_checkpoint(found.parent)  # Replacing it would delete the new one.
        return found

    target = run_on_all(channel, "checking the arguments of a save", check)
    if family is config is mapping is None:
        own_statements.adopt_statements(model, channel)
    adapter_checks.check_adapters(model, channel)
    live_roles.wait_for_weights()
    weight_sources.identify_base(model, channel)

    def prepare() -> tuple[RankTensors, _SaveInput]:
        source, described = described_source(model, optimizer, family, config, mapping)
        weight_sources.check_defined(source.model)
        weight_sources.check_base(source.model)
        roles = source.roles()
        if not isinstance(source, StateDict):  # A state dict may contain copies of tied tensors.
            check_ties(roles[MODEL_STATE], described)
        files = {CONFIG_NAME: _config_text(source.model, described, config)} if channel.rank == 0 else {}
        steps = parse_step(target) or 0 if step is None else step
        job = JobRecord(steps, consumed_samples, _degrees(parallel, source, channel.world_size))
        return rank_tensors_by_name(described, roles), _SaveInput(described, roles, files, job)

    everyone, prepared = gather_and_keep(channel, "preparing a checkpoint", prepare, RankTensors)
    description = prepared.description
    if mapping is not None or is_by_name(description):
        # The model_type may name a declared family, whose rules differ from the stored rules.
        description = structs.replace(with_rules(description, everyone), config=without_family(description.config))
    report = save_checkpoint(target, prepared.roles, description, prepared.files, prepared.job, channel)
    if channel.rank == 0:
        _warn_of_differences(target, report)
    return report


def load(
    directory: str | PathLike[str] | RemotePath | Mapping[str, Any],
    model: Any,
    optimizer: Any = None,
    *,
    verify: str = "full",
    threads: int = 4,
    family: str | Family | None = None,
    config: Config | None = None,
    mapping: RuleSet | None = None,
    aoa_config: Mapping[str, object] | None = None,
    allow_casts: bool = False,
) -> LoadReport:
    """Fill a model, and optionally its optimizer, from a checkpoint of any layout. Every rank must call.

    Args:
        directory: the checkpoint: a path or a URL.
        model: as for :func:`save`. A state dict of semi-automatic parallelism is filled in place; without ``family``
            and ``config`` it has the family of the checkpoint.
        optimizer: gets the stored states; None loads only the weights. A checkpoint without optimizer states requires
            None, unless ``allow_casts`` creates master weights from its weights.
        verify: what to verify: ``off``, ``size`` (file sizes and metadata files) or ``full`` (also all tensors that are
            read).
        threads: number of read threads of this rank.
        family: as for :func:`save`; also applies to a checkpoint that was saved without a family.
        config: as for :func:`save`; also applies to a checkpoint of another format without a configuration.
        mapping: as for :func:`save`; in a checkpoint without a family, canonical names are the names of its tensors.
        aoa_config: AOA statements from stored names to the model's, for tensors whose name or layout has changed.
        allow_casts: whether the model may be float32 where the checkpoint is bfloat16, or the reverse. The ``casts`` of
            the report list the cast tensors.
    Raises:
        Corrupt: a checksum does not match; the same on every rank. Headers and metadata files are verified before
            anything changes, tensors while they are filled. If the error says that tensors are undefined, ``save`` and
            the Trainer reject the model until a load succeeds.
        MismatchError: tensors are mapped by name and the tensor-parallel degree differs, or the checkpoint has no
            states for the optimizer; the same on every rank, before any weight changes.
        FlexError: the checkpoint does not match; the same on every rank, before any weight changes.

    Example:
        >>> paddleformers_fc.load("out/checkpoint-3", model, optimizer)
    """
    channel, timer = job_communicator(), PhaseTimer()
    named, model = _path_first(directory, model)
    live_roles.wait_for_weights()
    if family is config is mapping is None:
        own_statements.adopt_statements(model, channel)

    def begin() -> tuple[_LoadRequest, tuple[AnyPath, LayoutSource, ModelDescription]]:
        require(DIRECTORY, directory=named)
        require(THREADS, threads=threads)
        require_or_none(_OPTIMIZER, optimizer=optimizer)
        require(FLAG, allow_casts=allow_casts)
        check_level(verify)
        if aoa_config is not None:
            from paddleformers_fc.aoa import read_config

            read_config(aoa_config)
        path = parse_named(named)
        source, described = described_source(model, optimizer, family, config, mapping)
        # A state dict may have the family of the checkpoint, so it is described after the checkpoint is opened.
        is_described = not isinstance(source, StateDict) and (bool(aoa_config) or is_by_name(described))
        tensors = rank_tensors(source.weights()) if is_described else RankTensors()
        return _LoadRequest(tensors, read_metadata(path) if channel.rank == 0 else Sent()), (path, source, described)

    everyone, (path, source, described) = gather_and_keep(channel, "beginning a load", begin, _LoadRequest)
    sent, tensors = everyone[0].sent, [one.tensors for one in everyone]
    facts = {"verify": verify, "allow_casts": allow_casts, "aoa_config": aoa_config or {}}
    consistency = ConsistencyCheck(f"loading {path.name}", {**facts, "config": comparable_config(described)})
    fallback = described.config if is_known(described.config) else {}
    opened = open_sent(path, channel, sent, verify, lambda: fallback, consistency).checkpoint
    timer.end("open")
    adapter_checks.check_adapters(model, channel)
    weight_sources.identify_base(model, channel)
    if isinstance(source, StateDict):
        source, described = _with_stored_family(source, described, opened)
        if aoa_config or is_by_name(described):
            weights_of = source.weights
            tensors = all_gather_checked(
                channel, "describing the model", lambda: rank_tensors(weights_of()), RankTensors
            )
    options = ReadOptions(threads=threads, replicas="auto", hosts=hosts_of_ranks())
    if opened.format.canonical and isinstance(source, StateDict):
        weights = run_on_all(channel, "describing the model", partial(_weights_only, source, path))
        with weight_sources.mark_undefined_until_loaded(source.model, path):
            return prepare_weights(path, weights, described, channel, options, verify, timer).fill()
    # The same on all ranks, because open_sent has compared their descriptions.
    checkpoint, described = _aligned(opened, with_rules(described, tensors), is_by_name(described), aoa_config)
    shards = (shard for one in tensors for shard in one.shards.values())
    terms = LoadTerms(aoa_config, aoa_tensors(described, shards) if aoa_config else None, may_cast=allow_casts)
    targets = ROLES if source.has_states else (MODEL_STATE,)

    def roles() -> Roles:
        return restore.to_fill(source, checkpoint, described, terms, targets)[0]

    load = prepare_load(checkpoint, roles, described, channel, options, terms, timer)
    if optimizer is not None and optimizers.has_states(optimizer) and not load.wanted & {*_STATES}:
        raise _missing_states(path, optimizer)
    with weight_sources.mark_undefined_until_loaded(source.model, path):
        return load.fill()


def _warn_of_differences(directory: Path, report: SaveReport) -> None:
    """Warn that a checkpoint contains one of several versions of a tensor."""
    ties = [line for tie in report.diverged_ties for line in tie.differences]
    for problem, lines in (
        (f"Replicas differ: {directory} contains one version of each part of a tensor.", report.differences),
        (f"Copies of tied tensors differ: {directory} cannot be loaded.", ties),
    ):
        if lines:
            warnings.warn("".join([problem, *(f"\n  - {line}" for line in fold(lines))]), stacklevel=3)


def _degrees(parallel: Mapping[str, int] | None, source: LayoutSource, world_size: int) -> dict[str, int]:
    """Return the parallel degrees to record, which are the caller's or the fleet's."""
    if parallel is not None:
        return {axis: int(degree) for axis, degree in parallel.items()}
    return {} if source.is_global else fleet_degrees(world_size)


def _path_first(directory: Any, model: Any) -> tuple[Any, Any]:
    """Return path and model; a state dict may come first, as in Paddle's functions."""
    return (model, directory) if isinstance(directory, Mapping) else (directory, model)


def _weights_only(source: StateDict, directory: AnyPath) -> Roles:
    """Return the tensors that open weights fill.

    Raises:
        OptionError: the state dict has optimizer states, which open weights do not contain.
    """
    if source.has_states:
        raise OptionError(
            f"{directory} contains only weights, and the state dict has optimizer states.",
            where=str(directory),
            next_step="Pass only model.state_dict().",
        )
    return source.weights()


def _missing_states(directory: AnyPath, optimizer: Any) -> MismatchError:
    return MismatchError(
        f"{directory} contains only weights, but an optimizer was passed. No weight was changed.",
        where=str(directory),
        evidence=[f"missing: {OPTIMIZER_STATE} of {type(optimizers.innermost(optimizer)).__name__}"],
        next_step="Load a checkpoint that was saved with its optimizer. To load only the weights, pass no optimizer.",
    )


class _SaveInput(msgspec.Struct, frozen=True):
    """The input of a save on this rank."""

    description: ModelDescription
    roles: Roles
    files: dict[str, bytes]
    job: JobRecord


def described_source(
    model: Any,
    optimizer: Any,
    family: str | Family | None,
    config: Config | None,
    mapping: RuleSet | None,
) -> tuple[LayoutSource, ModelDescription]:
    """Return the live tensors and their description."""
    source = live_source(model, optimizer)
    described = structs.replace(_description(source.model, family, config, mapping), is_global=source.is_global)
    if isinstance(source, StateDict):
        source = structs.replace(source, aliases=frozenset(model_ties(described)))
    return source, described


def _with_stored_family(
    source: StateDict, described: ModelDescription, stored: OpenedCheckpoint
) -> tuple[StateDict, ModelDescription]:
    """Return a state dict and its description, with the family of the checkpoint unless an argument sets a family."""
    known = ModelDescription(stored.config) if stored.format.canonical else stored.known
    if not is_by_name(described) or not is_known(known.config):
        return source, described
    described = structs.replace(known, is_global=source.is_global)
    return structs.replace(source, aliases=frozenset(model_ties(described))), described


def _description(
    model: Any,
    family: str | Family | None,
    config: Config | None,
    mapping: RuleSet | None,
) -> ModelDescription:
    """Describe a model by its configuration and the arguments; without a family or rules, with an empty rule set."""
    require_or_none(_FAMILY, family=family)
    require_or_none(_CONFIG, config=config)
    require_or_none(_RULES, mapping=mapping)
    if mapping is not None and family is not None:
        raise OptionError("family and mapping both define the rules of a model.", next_step="Pass only one of them.")
    given = getattr(model, "config", None) if config is None else config
    described = structs.replace(_resolved(model, given), adapters=description.describe_adapters(model))
    if isinstance(family, Family):
        register(family)
        family = family.name
    if family is not None:
        described = structs.replace(described, config={**described.config, "model_type": family}, rules=None)
    if mapping is not None:
        return structs.replace(described, rules=structs.replace(mapping, cuts={}))
    if family is None and config is None and not is_known(described.config):
        return described if described.rules is not None else structs.replace(described, rules=rules_by_name(()))
    family_for(described.config)
    return described


def _resolved(model: Any, config: Any) -> ModelDescription:
    is_fleet, own = bool(getattr(model, IS_FLEET, False)), config is getattr(model, "config", None)
    if is_a("PretrainedConfig", config):
        return describe_model(model if own else SimpleNamespace(config=config, is_fleet=is_fleet))
    rules = getattr(unwrap_model(model), OWN_RULES, None) if own else None
    return ModelDescription(dict(config) if isinstance(config, Mapping) else {}, is_fleet, rules)


def _config_text(model: Any, described: ModelDescription, config: object) -> bytes:
    """Return ``config.json`` as bytes: the given configuration, or the model's as PaddleFormers writes it."""
    if config is not None or not is_a("PretrainedConfig", getattr(model, "config", None)):
        return config_bytes(described.config)
    # Imported here because it imports PaddleFormers, which other models do not need.
    from paddleformers_fc.trainer import documents

    return documents.config_text(model, model_type=described.config.get("model_type")).encode()


def is_by_name(model: ModelDescription) -> bool:
    """Return whether the tensors of a model are mapped by name."""
    return model.rules is not None and not model.rules.targets


def rank_tensors_by_name(model: ModelDescription, roles: Roles) -> RankTensors:
    """Return the weights of this rank if the model is mapped by name; else nothing, because no rank needs them."""
    return rank_tensors(roles) if is_by_name(model) else RankTensors()


def with_rules(model: ModelDescription, everyone: Sequence[RankTensors]) -> ModelDescription:
    """Return a description with the rules by name of all ranks' tensors, if the model is mapped by name."""
    return structs.replace(model, rules=rules_of_ranks(everyone, model.is_global)) if is_by_name(model) else model


def _aligned(
    checkpoint: OpenedCheckpoint, model: ModelDescription, by_name: bool, aoa_config: Mapping[str, object] | None
) -> tuple[OpenedCheckpoint, ModelDescription]:
    """Return checkpoint and model with rules into the same canonical names, and with comparable configurations.

    A checkpoint without a family gets the model's family. If the model is mapped by name, the canonical names are its
    own names. Keys that only one of the two configurations has are not compared.
    """
    stored = checkpoint.known
    if model.rules is None:
        if "model_type" in stored.config:
            return checkpoint, model
        described = structs.replace(model, config={**model.config, **stored.config})
        rules = structs.replace(bind_model(described, stored_tensors(checkpoint.rules)), cuts=checkpoint.rules.cuts)
        return structs.replace(checkpoint, config={}, model=StoredModel(rules, described)), model
    if not by_name:
        if "model_type" in stored.config and not is_known(model.config):
            return checkpoint, model  # Both have rules from AOA statements of the model's class.
        return checkpoint, structs.replace(model, config={**without_family(model.config), **stored.config})
    named = rules_by_name(stored_tensors(checkpoint.rules), checkpoint.rules.ties)
    assigned = _assigned_names(aoa_config, named, model.rules) if aoa_config else ()
    check_cut_alike(named, model.rules, assigned, str(checkpoint.catalog.root))
    before, now = ({**one.config, **other.config} for one, other in ((model, stored), (stored, model)))
    known = StoredModel(named, ModelDescription(without_family(before)))
    return structs.replace(checkpoint, model=known), structs.replace(model, config=without_family(now))


def _assigned_names(aoa_config: Mapping[str, object], stored: RuleSet, model: RuleSet) -> Collection[str]:
    """Return the names of the model's tensors that AOA statements assign."""
    from paddleformers_fc.aoa import AoaTensor, assigned_names, read_config

    sides = (
        {one.name: AoaTensor(one.shape, one.dtype, one.cuts) for one in stored_tensors(rules)}
        for rules in (stored, model)
    )
    return assigned_names(read_config(aoa_config), *sides)
