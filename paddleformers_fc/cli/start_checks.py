"""Check a training configuration before the ranks start, so that errors appear within seconds and once.

Only certain faults are errors: a name may be on a hub, and a user's registration file may add keys and stages and
replace the model. Keys and values are checked against the table of PaddleFormers' arguments (:mod:`.stock_keys`), whose
defaults later checks use for missing keys. Functions named ``*_faults`` yield one line per fault, and one error lists
the lines of several.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

from msgspec import structs

from paddleformers_fc import upstream
from paddleformers_fc.errors import EnvironmentMismatch, MappingError, MismatchError, NotACheckpoint, OptionError
from paddleformers_fc.families import ModelDescription, family_for, is_known
from paddleformers_fc.families.changes import (
    ABSENT,
    MODEL_TYPE,
    OPTION,
    check_adapters_on_both_sides,
    check_changes_allowed,
    config_changes,
)
from paddleformers_fc.families.declarations import DIVIDED
from paddleformers_fc.formats import flex
from paddleformers_fc.formats.registry import is_resumable, open_weights, read_config, require_config, saved_run
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan.forecast import plan_load
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.storage.files import check_writable, exists, is_directory, is_file, list_directory, similar_entry
from paddleformers_fc.storage.manifest import MANIFEST_NAME, candidates_in, read_manifest, verify_files
from paddleformers_fc.storage.paths import AnyPath, expand_user, parse_path
from paddleformers_fc.storage.remote_writes import check_remote_writable
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import conflicts, options, resume, tiers
from paddleformers_fc.trainer.stock_keys import StockTable, check_values, stock_table

Values = Mapping[str, Any]
"""The settings, with defaults for missing keys of PaddleFormers and of this package."""

_TENSOR, _STAGES, _EXPERTS = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
_VIRTUAL, _SHARDING = "virtual_pipeline_model_parallel_size", "sharding_parallel_size"
_PASSES, _BATCH, _SEGMENTS = "gradient_accumulation_steps", "per_device_train_batch_size", "pp_seg_method"
_PATH, _DATA, _RESUME = "model_name_or_path", ("train_dataset", "eval_dataset"), "resume_from_checkpoint"

_TEXT_STAGES, _PREFERENCE_STAGES = ("SFT", "PT", "DPO"), ("DPO", "VL-DPO")
_TRAINER_STAGES = (*_TEXT_STAGES, "VL-SFT", "VL-PT", "VL-DPO")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SIZES = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"}
)
"""Keys of a model's configuration that change shapes or names of tensors."""
_MOST_PLANNED = 10_000
"""Maximum number of tensors that are compared with a configuration, which takes less than a second."""


def check_paddleformers_installed(doing: str) -> None:
    """Check that PaddleFormers is installed.

    Args:
        doing: the operation that needs it, as the subject of a sentence.

    Raises:
        EnvironmentMismatch: it is not installed.
    """
    if not upstream.is_installed(upstream.FORMERS):
        raise EnvironmentMismatch(
            f"{doing} needs PaddleFormers, which is not installed.", where=sys.executable, next_step=upstream.INSTALL
        )


def check(settings: Mapping[str, Any], is_extended: bool, nodes: int, places: Mapping[str, str]) -> SimpleNamespace:
    """Check settings for everything that ranks would reject after their imports, or misread.

    Args:
        settings: the configuration with its overrides.
        is_extended: whether a user's registration file runs.
        nodes: number of nodes of the job. If there are several, this one may not see all files of a checkpoint.
        places: file and line of the settings that have one, by key.
    Returns:
        the settings, with defaults for missing keys.
    Raises:
        OptionError: checked in this order: conflicting keys; unknown keys, with similar known ones; invalid values;
            missing paths and combinations that PaddleFormers does not support.
        CheckpointError: the checkpoint to resume is missing or damaged, or the model has no weights or damaged ones.
        MismatchError: the checkpoint to resume contains another model, or the weights do not fit their configuration.
        MappingError: the configuration of the model lacks a size, or contradicts itself.
        EnvironmentMismatch: the class of the model needs PaddleFleet.
        StorageError: a path cannot be read, or ``flex_local_dir`` or the store of ``flex_upload`` cannot be written.
    """
    stock = stock_table()
    options.check_settings(settings)
    _check_keys_known(settings, {} if is_extended else stock.keys, places)
    check_values(settings, stock.keys, is_extended)
    defaults = {key: one.default for key, one in stock.keys.items()}
    checked = SimpleNamespace(**{_RESUME: None, **defaults, **vars(options.FlexFields()), **settings})
    options.check_options(checked)
    values, is_stock = vars(checked), bool(stock.keys) and not is_extended
    faults = [*_missing_paths(settings)]
    if is_stock:
        faults += [*_schedule_faults(values), *_pipeline_faults(values)]
    _raise_faults(faults, "Correct the listed keys. Relative paths begin in the working directory.")
    if not checked.flex_checkpoint:
        _check_no_native_resume(values)
    elif (url := options.upload_url(checked)) is not None:
        check_remote_writable(url)
    _check_local_tier(checked, nodes)
    found = checkpoint_to_resume(values, nodes) if checked.flex_checkpoint else None
    if is_stock:
        given = {key: value for key, value in settings.items() if value is not None}
        _check_model(given, values, stock)
        if found is None:
            _check_weights(given, values)
        else:
            _check_same_kind(values, found)
            _check_same_model(given, values, found)
    return checked


def check_ranks(values: Values, ranks: int, is_extended: bool) -> None:
    """Check that a layout fits the number of ranks on CPUs, and that a CPU can train the model.

    Args:
        values: the result of :func:`check`.
        ranks: number of ranks on all nodes.
        is_extended: as for :func:`check`.
    Raises:
        OptionError: with all faults.
    """
    if stock_table().keys:
        faults = [*_rank_faults(values, ranks), *(() if is_extended else _fused_norm_faults(values))]
        _raise_faults(faults, "Change the listed keys, or start another number of ranks with --nproc.")


def _raise_faults(faults: Sequence[str], next_step: str) -> None:
    if faults:
        raise OptionError(
            "Training cannot start with these settings.",
            where=f"training arguments; working directory {Path.cwd()}",
            evidence=faults,
            next_step=next_step,
        )


def _check_keys_known(settings: Mapping[str, Any], stock: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Check for unknown keys; without a table of PaddleFormers' keys, only among keys that begin with ``flex_``.

    Raises:
        OptionError: with all unknown keys.
    """
    # Overrides may address a part of a value with a dot or a bracket.
    names = {re.split(r"[.\[]", str(key))[0] for key in settings} - {*options.FIELD_NAMES, *stock}
    # PaddleFormers also has keys that begin with flex_ckpt.
    unknown = [name for name in names if stock or (name.startswith("flex_") and not name.startswith("flex_ckpt"))]
    if unknown:
        raise options.unknown_keys(unknown, stock, places)


def _check_local_tier(checked: SimpleNamespace, nodes: int) -> None:
    """Check that the local tier is writable and, as far as this node sees, does not belong to another run.

    Raises:
        StorageError: it cannot be written or read.
        OptionError: see :func:`.tiers.check_own`.
    """
    local = options.local_dir(checked)
    if local is not None:
        check_writable(local)
    if local is not None and nodes == 1:
        record = tiers.read_record(Path(expand_user(checked.output_dir)))
        tiers.check_own(local, "" if record is None else record.id)


def _missing_paths(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield faults of paths: missing models, data and registration files, and a missing output_dir."""
    output_dir, own = settings.get("output_dir"), settings.get("custom_register_path")
    if output_dir is None:
        yield "output_dir is missing: the directory for checkpoints and logs"
    elif not isinstance(output_dir, str):
        text = conflicts.spelled(output_dir)
        yield f"output_dir: {text} is not text; a name that YAML reads as something else needs quotes"
    if own is not None and not is_file(Path(str(own))):
        yield f"custom_register_path: {own} does not exist; without this key the command registers the package"
    named = [(_PATH, str(settings.get(_PATH) or ""))]
    for kind in _DATA:
        paths, chances = _listed(settings.get(f"{kind}_path")), _listed(settings.get(f"{kind}_prob"))
        if len(paths) == len(chances):
            # PaddleFormers does not open data with probability 0.
            paths = [path for path, chance in zip(paths, chances, strict=True) if not _is_zero(chance)]
        named.extend((f"{kind}_path", path.partition("#")[0]) for path in paths)
    for key, text in named:
        path = Path(expand_user(text))
        if not text or exists(path):
            continue
        similar = similar_entry(path)
        # Models on a hub have a name in two parts.
        is_misspelt = key == _PATH and "/" not in text and bool(similar)
        if is_misspelt or _is_local(text, PurePath(str(output_dir))):
            yield f"{key}: {text} does not exist" + "".join(f" in {path.parent}; {line}" for line in similar)


def _listed(value: Any) -> list[str]:
    """Split a comma-separated list as PaddleFormers does: without spaces and empty entries."""
    return [entry for entry in str("" if value is None else value).replace(" ", "").split(",") if entry]


def _is_zero(chance: str) -> bool:
    try:
        return float(chance) <= 0
    except ValueError:
        return False


def _is_local(path: str, output_dir: PurePath) -> bool:
    """Return whether a text can only be a local path.

    ``owner/name`` may be on a hub, unless ``owner`` is a directory here or the first part of ``output_dir``.
    """
    first, slash, _ = path.partition("/")
    return bool(slash) and (
        _HUB_NAME.fullmatch(path) is None or is_directory(Path(first)) or first in output_dir.parts[:1]
    )


def _schedule_faults(values: Values) -> Iterator[str]:
    """Yield numbers and strategies that ranks would reject after their imports or after they have built the model."""
    counted = (_PASSES, _BATCH) if values["fine_tuning"].lower() == "full" else (_PASSES, _BATCH, "lora_rank")
    yield from (f"{key}: {values[key]} is less than 1" for key in counted if values[key] < 1)
    if values["logging_strategy"] == "steps" and not values["logging_steps"]:
        yield "logging_steps: 0 with logging_strategy: steps"
    if values["max_steps"] <= 0 >= values["num_train_epochs"]:
        yield f"max_steps: {values['max_steps']} and num_train_epochs: {values['num_train_epochs']}"
    stages = [word for word in str(values["sharding"]).split() if word != "offload"]
    if len(stages) > 1:
        yield f"sharding: {values['sharding']} names {len(stages)} stages instead of one"
    if not values["sharding"] and values[_SHARDING] > 1:
        yield f'{_SHARDING}: {values[_SHARDING]} with sharding: "": these ranks would train independently'
    evaluates, saves = values["evaluation_strategy"], values["save_strategy"]
    if values["do_eval"] and evaluates == "no":
        yield "do_eval: true with evaluation_strategy: no, its default"
    if not values["load_best_model_at_end"]:
        return
    every = values["eval_steps"] or values["logging_steps"] or 1
    if evaluates != saves:
        strategies = f"evaluation_strategy: {evaluates} and save_strategy: {saves}"
        yield f"load_best_model_at_end: true with {strategies}, which must be equal"
    elif saves == "steps" and values["save_steps"] % every:
        steps = f"save_steps: {values['save_steps']}, which is not a multiple of eval_steps: {every}"
        yield f"load_best_model_at_end: true with {steps}"


def _pipeline_faults(values: Values) -> Iterator[str]:
    """Yield faults of a pipeline that ranks would reject after their imports or after they have built the model.

    Paddle's schedules of virtual stages need more than two pipeline stages, and as many forward passes per step as
    there are pipeline stages, or at least twice as many. PaddleFleet's schedules are not checked.
    """
    stage, stages, virtual, passes = values["stage"], values[_STAGES], values[_VIRTUAL], values[_PASSES]
    if stages <= 1 or stage not in _TRAINER_STAGES:
        return
    if stage in _PREFERENCE_STAGES:
        if not values["clear_every_step_cache"]:
            yield f"clear_every_step_cache: not true, which stage: {stage} needs in a pipeline"
        if values["sequence_parallel"] and values["partial_send_recv"]:
            yield f"partial_send_recv: not false, which stage: {stage} needs with sequence_parallel: true"
    if virtual <= 1 or upstream.is_installed("paddlefleet"):
        return
    needs = f"{_VIRTUAL}: {virtual} needs"
    if stages == 2:
        yield f"{needs} more than 2 pipeline stages"
    least = stages if values["best_unbalanced_scheduler"] else 2 * stages
    if passes < least and passes != stages:
        yield f"{needs} {_PASSES}: {stages}, or {2 * stages} or more, instead of {passes}"
    if not str(values[_SEGMENTS]).startswith("layer:"):
        yield f"{needs} {_SEGMENTS}: layer:DecoderLayer|EmptyLayer instead of {values[_SEGMENTS]}"


def _rank_faults(values: Values, ranks: int) -> Iterator[str]:
    """Yield parallel degrees that do not divide the ranks, or that PaddleFormers would ignore."""
    sharding = values[_SHARDING] if values["sharding"] else 1
    sizes = {key: max(values[key], 1) for key in (_TENSOR, _STAGES, "sep_parallel_size")}
    used = {key: size for key, size in {**sizes, _SHARDING: sharding}.items() if size > 1}
    groups = prod(used.values())
    if ranks % groups:
        degrees = ", ".join(f"{key}: {degree}" for key, degree in used.items())
        yield f"{degrees}: {count_text(ranks, 'rank')} cannot be divided into groups of {groups}"
    experts, stages, others = values[_EXPERTS], sizes[_STAGES], prod(sizes.values())
    if experts <= 1:
        return
    shards = sharding if sharding > 0 else max(ranks // others, 1)
    data, outer = ranks // (others * shards), ranks // (stages * experts)
    what = f"{_EXPERTS}: {experts} on {count_text(ranks, 'rank')}"
    if values["use_expert_parallel"] is not True:
        yield f"{what}: use_expert_parallel is not true"
    if ranks % (stages * experts):
        yield f"{what}: {ranks} ranks in {count_text(stages, 'pipeline stage')} are not a multiple of it"
    elif data > 1:
        yield f"{what}: data parallel degree {data}: experts need sharding instead, such as sharding: stage1"
    elif shards > 1 and outer > 1 and shards % outer:
        yield f"{what}: {_SHARDING} {shards} is not a multiple of {outer}, the number of ranks with the same expert"


def _fused_norm_faults(values: Values) -> Iterator[str]:
    """Yield a fault if a model has fused norms, PaddleFormers' default, for which Paddle has no CPU kernel."""
    config = _config_of(values) if values["stage"] in _TEXT_STAGES else {}
    if is_known(config) and config.get("fuse_rms_norm", True):
        written = "fuse_rms_norm: true" if "fuse_rms_norm" in config else "no fuse_rms_norm, which means true"
        kernel = "and Paddle has no CPU kernel for a fused norm; set it to false"
        yield f"{values[_PATH]}/config.json: {written}, {kernel}"


def _config_of(values: Values) -> dict[str, Any]:
    """Return the configuration of a model on this machine; empty for a model on a hub."""
    model = values.get(_PATH)
    directory = Path(expand_user(model or ""))
    return require_config(directory) if model and is_directory(directory) else {}


def checkpoint_to_resume(values: Values, nodes: int) -> AnyPath | None:
    """Return the checkpoint that the run resumes, as far as this node sees.

    Raises:
        OptionError: the named directory does not exist.
        NotACheckpoint: it is not a checkpoint; or a resume is requested, and ``output_dir`` has no checkpoint.
        Corrupt: a file is missing or has the wrong size; not checked if ``flex_verify`` is off.
    """
    named = values[_RESUME]
    if isinstance(named, str) and named:
        return _checked_checkpoint(parse_path(expand_user(named)), values, nodes)
    is_automatic = named is None and values.get("do_train") and not values.get("overwrite_output_dir")
    if nodes > 1 or not (named is True or is_automatic):
        return None
    output_dir, local = Path(expand_user(values["output_dir"])), options.local_dir(SimpleNamespace(**values))
    newest, skipped = resume.newest_without_changes(output_dir, local)
    if newest is None and named is True:
        raise resume.no_checkpoint(output_dir, skipped)
    return newest


def _checked_checkpoint(found: AnyPath, values: Values, nodes: int) -> AnyPath | None:
    if not isinstance(found, Path):
        resume.check_is_checkpoint(found)
        return found
    if nodes > 1:
        return None  # Files may be on disks of other nodes; the ranks check together.
    try:
        resume.check_is_checkpoint(found)
    except NotACheckpoint as error:
        if exists(found):
            raise
        # A path that does not exist is invalid usage, and has its exit code.
        raise OptionError(error.what, where=error.where, evidence=error.evidence, next_step=error.next_step) from None
    if is_resumable(found):
        saved_run(found)
    elif values.get("flex_verify", "size") not in ("off", False):
        verify_files(found, read_manifest(found), "size")
    return found


def _check_no_native_resume(values: Values) -> None:
    """Check that PaddleFormers itself does not resume a flex checkpoint, which it cannot read.

    Raises:
        OptionError: ``flex_checkpoint`` is not true, and PaddleFormers would resume a flex checkpoint.
    """
    named, found = values[_RESUME], list[AnyPath]()
    if not values.get("do_train") or values.get("stage") not in _TRAINER_STAGES:
        return
    if isinstance(named, str) and named and values["stage"] not in _PREFERENCE_STAGES:
        found = [parse_path(expand_user(named))]
    elif named is True or (named is not False and not values.get("overwrite_output_dir")):
        found.extend(candidates_in(Path(expand_user(values["output_dir"])))[:1])
    if any(exists(path / MANIFEST_NAME) for path in found):
        raise OptionError(
            f"{found[0]} is a flex checkpoint, and without flex_checkpoint: true PaddleFormers would resume from it.",
            where="flex_checkpoint",
            evidence=[f"PaddleFormers resumes from {_RESUME}, or from the newest checkpoint in output_dir"],
            next_step="Set flex_checkpoint: true. To start a new run instead, set another output_dir without "
            f"{_RESUME}, or set overwrite_output_dir: true.",
        )


def _check_model(given: Mapping[str, Any], values: Values, stock: StockTable) -> None:
    """Check a model on this machine for faults that every rank would reject.

    The tensor-parallel degree must divide the sizes that the class of the family checks; the error lists all such
    sizes, as ``plan`` does. Virtual pipeline stages must divide the layers. Other checks are left to PaddleFormers.

    Raises:
        EnvironmentMismatch: the class of the model needs PaddleFleet, which is not installed.
        CheckpointError: the directory has no weights to start from.
        FormatError: the configuration is not a JSON object.
        MappingError: the configuration lacks model_type or a size, or contradicts itself.
        OptionError: the directory has no config.json, or a degree does not divide the model.
    """
    config = _config_of(values) if values["stage"] in _TRAINER_STAGES else {}
    if config.get("model_type") in stock.without_fleet:
        raise EnvironmentMismatch(
            f"PaddleFormers' class of {config['model_type']} needs PaddleFleet, which is not installed.",
            where=sys.executable,
            evidence=[f"{_PATH}: {values[_PATH]}"],
            next_step="Install the packages paddlefleet and paddlefleet_ops that fit the installed Paddle.",
        )
    if not config or not values.get("flex_checkpoint"):
        return  # The model is on a hub, or PaddleFormers reads it itself.
    directory = Path(expand_user(values[_PATH]))
    if _reads_weights(values) and not any(path.suffix == ".safetensors" for path in list_directory(directory)):
        open_weights(directory, "off", adapters=False)  # Raises an error that describes the directory.
    if values["stage"] not in _TEXT_STAGES or ("model_type" in config and not is_known(config)):
        return  # The class of another model may have its own statements.
    family = family_for(config)
    # Settings may override the sizes that the tensor-parallel degree divides.
    experts = values[_EXPERTS] > 1 or values["use_expert_parallel"]
    sizes_are_known = not experts and given.keys().isdisjoint(DIVIDED.values())
    by_default = stock.keys[_SEGMENTS].default == values[_SEGMENTS]
    is_checked = min(values[_STAGES], values[_VIRTUAL]) > 1 and by_default and not upstream.is_installed("paddlefleet")
    stages, virtual = (values[_STAGES], values[_VIRTUAL]) if is_checked else (1, 1)
    try:
        grid = ParallelGrid(tp=max(values[_TENSOR], 1) if sizes_are_known else 1, pp=stages, vpp=virtual)
        # If PaddleFleet also has a class of the family, PaddleFormers' commands build PaddleFleet's.
        declared_model(family, ModelDescription({**config, **given}, is_fleet=True), grid)
    except OptionError as error:
        checked = tuple(f"{DIVIDED[size]}=" for size in family.divided)
        if any(line.startswith(checked) or "layers, empty ones included" in line for line in error.evidence):
            raise


def _reads_weights(values: Values) -> bool:
    """Return whether the model is built from open weights, and not from random numbers."""
    return bool(values["continue_training"]) and not values["autotuner_benchmark"]


def _check_weights(given: Mapping[str, Any], values: Values) -> None:
    """Check that open weights on this machine fit their configuration, by their headers, as ranks do.

    Settings and PaddleFormers' defaults replace some keys of the configuration. Weights that fit with or without them
    are accepted, and so are large models whose files are complete.

    Raises:
        CheckpointError: a file is damaged or missing.
        MismatchError: names or shapes of tensors differ from the configuration.
    """
    config = _config_of(values) if values["stage"] in _TEXT_STAGES and values.get("flex_checkpoint") else {}
    if not is_known(config) or not _reads_weights(values):
        return
    level = "off" if values["flex_verify"] in (options.OFF, False) else "size"
    opened = open_weights(Path(expand_user(values[_PATH])), level, adapters=False)
    if opened.catalog.count > _MOST_PLANNED:
        return
    replaced = {key: value for key, value in values.items() if value is not None}
    faults: list[MismatchError] = []
    for changes in ({}, given, replaced):
        try:
            plan_load(structs.replace(opened, config={**opened.config, **changes}), "dp=1").plan()
            return
        except (MappingError, OptionError):
            return  # The headers alone do not show whether the class of the model can read them.
        except MismatchError as error:
            faults.append(error)
    raise faults[0]


def _check_same_kind(values: Values, checkpoint: AnyPath) -> None:
    """Check that the run and the flex checkpoint to resume both train adapters, or both a complete model.

    Raises:
        MismatchError: only one of them trains adapters.
    """
    is_resumed = values["do_train"] and values["stage"] in _TRAINER_STAGES and values.get("aoa_config") is None
    if not is_resumed or not flex.FLEX.recognises(checkpoint):
        return
    trains_adapters = values["fine_tuning"].lower() == "lora"
    try:
        check_adapters_on_both_sides(flex.read_description(checkpoint), trains_adapters, str(checkpoint))
    except MismatchError as error:
        raise error if isinstance(values[_RESUME], str) else resume.with_new_run_advice(error) from None


def _check_same_model(given: Mapping[str, Any], values: Values, checkpoint: AnyPath) -> None:
    """Check that the checkpoint to resume contains the model of the settings, if that is on this machine.

    Only keys in both configurations are compared, without keys for which PaddleFormers substitutes its own defaults and
    keys that a save corrects.

    Raises:
        MismatchError: keys differ that change the shapes, names or meaning of tensors.
    """
    config = _config_of(values)
    if not config:
        return
    stored, live = read_config(checkpoint), {**config, **given}
    replaced = {key for key, value in values.items() if value is not None and key not in given}
    corrected = family_for(stored).exported.keys() if is_known(stored) else ()
    both = (stored.keys() & live.keys()).difference(replaced, corrected)
    old, new = (ModelDescription({key: config[key] for key in both}) for config in (stored, live))
    changes = [one for one in config_changes(old, new, True) if {ABSENT, "null"}.isdisjoint((one.saved, one.now))]
    unfit = [one for one in changes if any(key.rpartition(".")[2] in _SIZES for key in one.keys)]
    allowed = values.get(OPTION) or ()
    try:
        check_changes_allowed([one for one in changes if one.key == MODEL_TYPE], allowed, str(checkpoint))
        unfit = [structs.replace(one, because="tensors have other shapes or names") for one in unfit]
        check_changes_allowed(unfit, (), str(checkpoint), fits=False)
        check_changes_allowed(changes, allowed, str(checkpoint))
    except MismatchError as error:
        raise error if isinstance(values[_RESUME], str) else resume.with_new_run_advice(error) from None
