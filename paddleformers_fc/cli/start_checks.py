"""Checks of a training configuration before a rank starts, where an error takes seconds and one line.

Only certain faults are refused. PaddleFormers resolves names that may be on a hub.

A check of settings yields a line per fault. One error lists the faults of all checks, with the advice of each.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path, PurePath
from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.errors import EnvironmentMismatch, NotACheckpoint, OptionError
from paddleformers_fc.families import ModelDescription, family_for, is_known
from paddleformers_fc.families.declarations import DIVIDED
from paddleformers_fc.formats.registry import is_resumable, read_config, saved_run
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan.simulate import declared_model
from paddleformers_fc.storage.files import exists, is_directory, list_directory
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest, verify_files
from paddleformers_fc.storage.paths import expand_user, parse_path, parse_step
from paddleformers_fc.storage.remote_writes import check_remote_writable
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer.options import FIELD_NAMES, unknown_keys, upload_url
from paddleformers_fc.trainer.resume import refuse_no_checkpoint
from paddleformers_fc.trainer.stock_keys import TEXT_ADVICE, Words, stock_arguments, text_faults

Settings = Mapping[str, Any]
"""The keys of a configuration with its overrides."""

_TENSOR, _STAGES, _EXPERTS = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
_VIRTUAL, _SHARDING = "virtual_pipeline_model_parallel_size", "sharding_parallel_size"
_DEGREES = (_TENSOR, _STAGES, "sep_parallel_size", _SHARDING)
_PASSES, _BATCH, _RANK = "gradient_accumulation_steps", "per_device_train_batch_size", "lora_rank"
_COUNTS = (*_DEGREES, _VIRTUAL, _EXPERTS, "context_parallel_size", _PASSES, _BATCH, "max_steps")
"""Whole numbers. PaddleFormers silently uses the default for any other text."""

_VALUES = {
    "stage": Words(
        ("SFT", "PT", "DPO", "VL-SFT", "VL-PT", "VL-DPO", "dsv3_pretrain", "ernie_pretrain", "auto-parallel")
    ),
    "fine_tuning": Words(("LoRA", "full"), any_case=True),
    "compute_type": Words(("bf16", "fp16", "float32", "wint8", "wint4", "wint4/8", "nf4")),
}
"""The values of keys without an enumeration. PaddleFormers trains without adapters for any other ``fine_tuning``."""

_DEFAULTS: dict[str, Any] = {
    "stage": "SFT",
    "sharding": "stage1",
    "evaluation_strategy": "no",
    "save_strategy": "steps",
    "logging_strategy": "steps",
    "save_steps": 500,
    "logging_steps": 500,
}
"""PaddleFormers' values of missing keys."""

_RESUMING_STAGES = ("SFT", "PT", "VL-SFT", "VL-PT")
"""The stages that use ``resume_from_checkpoint``; preference training takes the newest of ``output_dir``."""

_TEXT_STAGES = ("SFT", "PT", "DPO")
_PREFERENCE_STAGES = ("DPO", "VL-DPO")

_PATH = "model_name_or_path"
_SEGMENTS = "pp_seg_method"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LISTS_OF_PATHS = {"train_dataset_path": "train_dataset_prob", "eval_dataset_path": "eval_dataset_prob"}
"""Lists of files, each with an optional ``#`` and number of samples, and of their probabilities."""

_CHANGE = "Change the listed keys."


def require_paddleformers(doing: str) -> None:
    """Refuse an operation that needs PaddleFormers if it is not installed.

    Args:
        doing: the operation, as the subject of a sentence.

    Raises:
        EnvironmentMismatch: it is not installed.
    """
    if not upstream.is_installed("paddleformers"):
        raise EnvironmentMismatch(
            f"{doing} needs PaddleFormers, which is not installed.", where=sys.executable, next_step=upstream.INSTALL
        )


def refuse_settings(settings: Settings, is_extended: bool) -> None:
    """Refuse keys and values that every rank would refuse after its imports, or read as others.

    Args:
        settings: the configuration with its overrides.
        is_extended: whether a registration file of the user runs, which may add keys and stages.
    Raises:
        OptionError: all unknown keys, each with a similar known key; or all other faults.
        StorageError: the operating system refused to look at a path.
    """
    _refuse_unknown_keys(settings, is_extended)
    found = [
        (_wrong_types(settings), TEXT_ADVICE),
        (
            _missing_paths(settings),
            "Relative paths begin in the working directory; `make demo` in the repository creates demo_out.",
        ),
    ]
    if not is_extended:
        words = (
            'Write one of the listed words; "no" needs quotes, without which YAML reads false. sharding: "" is none.'
        )
        found += [
            (_unknown_words(settings), words),
            (_schedule_faults(settings), _CHANGE),
            (_pipeline_faults(settings), _CHANGE),
        ]
    _refuse(found)


def refuse_layout(settings: Settings, ranks: int, is_extended: bool) -> None:
    """Refuse a layout that does not fit the number of ranks on a CPU, and a model that a CPU cannot train.

    Args:
        settings: the configuration with its overrides.
        ranks: of all nodes.
        is_extended: as for :func:`refuse_settings`; such a file may replace the model.
    Raises:
        OptionError: with all faults.
    """
    found = [
        (_indivisible(settings, ranks), "Start another number of ranks with --nproc, or change a degree."),
        (_expert_faults(settings, ranks), _CHANGE),
    ]
    if not is_extended:
        found.append((_fused_norm(settings), 'Add "fuse_rms_norm": false to this config.json.'))
    _refuse(found)


def _refuse(found: Iterable[tuple[Iterable[str], str]]) -> None:
    """Raise one error with the faults of several checks, and the advice of those that found some.

    Raises:
        OptionError: there are faults.
    """
    refused = [(lines, advice) for faults, advice in found if (lines := list(faults))]
    if refused:
        raise OptionError(
            "Training cannot start with these settings.",
            where=f"training arguments; working directory {Path.cwd()}",
            evidence=[line for lines, _ in refused for line in lines],
            next_step=" ".join(dict.fromkeys(advice for _, advice in refused)),
        )


def _refuse_unknown_keys(settings: Settings, is_extended: bool) -> None:
    # A dot or a bracket in an override reaches into the value of a key.
    names = sorted({re.split(r"[.\[]", str(key))[0] for key in settings} - set(FIELD_NAMES))
    stock = () if is_extended else stock_arguments().keys
    # PaddleFormers has keys of its own that begin with flex_ckpt.
    unknown = [
        name
        for name in names
        if name not in stock and (stock or (name.startswith("flex_") and not name.startswith("flex_ckpt")))
    ]
    if unknown:
        raise unknown_keys(unknown, stock)


def _wrong_types(settings: Settings) -> Iterator[str]:
    texts = text_faults(settings)
    yield from texts.values()
    yield from (
        f"{key}: {settings[key]!r} is not a whole number, which has no decimal point"
        for key in _COUNTS
        if key not in texts and not _is_count(settings.get(key))
    )


def _is_count(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"\s*[-+]?[0-9]+\s*", value) is not None
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _unknown_words(settings: Settings) -> Iterator[str]:
    """Find words that PaddleFormers refuses in every rank, or reads as others."""
    for key, words in {**_VALUES, **stock_arguments().words}.items():
        if key in settings and not words.admits(settings[key]):
            given = "null" if settings[key] is None else repr(settings[key])
            yield f"{key}: {given} is none of {', '.join(words.known)}"


def _missing_paths(settings: Settings) -> Iterator[str]:
    """Find missing local models and data, and a missing output directory."""
    if not isinstance(settings.get("output_dir"), str):
        yield "output_dir is missing: the directory for checkpoints and logs"
    named = [(_PATH, str(settings.get(_PATH) or ""))]
    for key, probabilities in _LISTS_OF_PATHS.items():
        paths, chances = _listed(settings.get(key)), _listed(settings.get(probabilities))
        if len(paths) == len(chances):
            # PaddleFormers does not look at data that is never drawn.
            paths = [path for path, chance in zip(paths, chances, strict=True) if not _is_nothing(chance)]
        named.extend((key, path.partition("#")[0]) for path in paths)
    output_dir = PurePath(str(settings.get("output_dir") or ""))
    for key, path in named:
        if _is_local(path, output_dir) and not exists(Path(expand_user(path))):
            yield f"{key}: {path} does not exist"


def _listed(value: Any) -> list[str]:
    """Return the entries of a list as PaddleFormers reads it: without spaces and empty entries."""
    return [entry for entry in str("" if value is None else value).replace(" ", "").split(",") if entry]


def _is_nothing(chance: str) -> bool:
    try:
        return float(chance) <= 0
    except ValueError:
        return False


def _is_local(path: str, output_dir: PurePath) -> bool:
    """Return whether this can only be a path.

    ``owner/name`` may be on a hub, unless the working directory or the path of the output contains ``owner``.
    """
    first, slash, _ = path.partition("/")
    return bool(slash) and (
        _HUB_NAME.fullmatch(path) is None or is_directory(Path(first)) or first in output_dir.parts[:1]
    )


def _schedule_faults(settings: Settings) -> Iterator[str]:
    """Find numbers and strategies that every rank would refuse after its imports, or after it has built the model."""

    def number(key: str, default: float) -> float:
        value = settings.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    evaluates, saves, logs = (_text(settings, f"{kind}_strategy") for kind in ("evaluation", "save", "logging"))
    save_steps, logging_steps = (number(key, _DEFAULTS[key]) for key in ("save_steps", "logging_steps"))
    for key in (_PASSES, _BATCH, _RANK):
        is_used = key != _RANK or _text(settings, "fine_tuning").lower() != "full"
        if is_used and number(key, 1) < 1:
            yield f"{key}: {settings[key]} is less than 1"
    if not logging_steps and logs == "steps":
        yield "logging_steps: 0 with logging_strategy: steps"
    if number("max_steps", -1) <= 0 >= number("num_train_epochs", 1):
        yield f"max_steps: {settings.get('max_steps', -1)} and num_train_epochs: {settings['num_train_epochs']}"
    if settings.get("do_eval") is True and evaluates == "no":
        yield "do_eval: true with evaluation_strategy: no, its default"
    if settings.get("load_best_model_at_end") is not True:
        return
    every = number("eval_steps", 0) or logging_steps or 1
    if evaluates != saves:
        strategies = f"evaluation_strategy: {evaluates} and save_strategy: {saves}"
        yield f"load_best_model_at_end: true with {strategies}, which must be equal"
    elif saves == "steps" and save_steps % every:
        yield f"load_best_model_at_end: true with save_steps: {save_steps}, which is no multiple of eval_steps: {every}"


def _pipeline_faults(settings: Settings) -> Iterator[str]:
    """Find faults of a pipeline that every rank would refuse after its imports, or after it has built the model.

    Paddle schedules virtual stages on more than two pipeline stages alone, and needs as many forward passes per step as
    there are pipeline stages, or at least twice as many. PaddleFleet's schedules are not checked.
    """
    stage, stages, virtual = _text(settings, "stage"), _degree(settings, _STAGES), _degree(settings, _VIRTUAL)
    if stages == 1 or stage not in (*_RESUMING_STAGES, *_PREFERENCE_STAGES):
        return
    if stage in _PREFERENCE_STAGES:
        if not settings.get("clear_every_step_cache"):
            yield f"clear_every_step_cache: not true, which stage: {stage} needs in a pipeline"
        if settings.get("sequence_parallel") and settings.get("partial_send_recv", True):
            yield f"partial_send_recv: not false, which stage: {stage} needs with sequence_parallel: true"
    if virtual == 1 or upstream.is_installed("paddlefleet"):
        return
    needs = f"{_VIRTUAL}: {virtual} needs"
    if stages == 2:
        yield f"{needs} more than 2 pipeline stages"
    passes = settings.get(_PASSES, 1)
    least = stages if settings.get("best_unbalanced_scheduler") else 2 * stages
    if isinstance(passes, int) and 0 < passes < least and passes != stages:
        yield f"{needs} {_PASSES}: {stages}, or {2 * stages} or more, instead of {passes}"
    method = settings.get(_SEGMENTS)
    if method is not None and not str(method).startswith("layer:"):
        yield f"{needs} {_SEGMENTS}: layer:DecoderLayer|EmptyLayer instead of {method}"


def _indivisible(settings: Settings, ranks: int) -> Iterator[str]:
    """Find degrees whose product does not divide the number of ranks."""
    used = {key: degree for key in _DEGREES if (degree := _degree(settings, key)) > 1}
    if not settings.get("sharding"):
        used.pop(_SHARDING, None)
    groups = prod(used.values())
    if ranks % groups:
        degrees = ", ".join(f"{key}: {degree}" for key, degree in used.items())
        yield f"{degrees}: {count_text(ranks, 'rank')} cannot be divided into groups of {groups}"


def _expert_faults(settings: Settings, ranks: int) -> Iterator[str]:
    """Find faults of a degree of expert parallelism that PaddleFormers would refuse, or leave unused, in every rank."""
    experts = _degree(settings, _EXPERTS)
    if experts == 1:
        return
    tensor, stages, segments, sharding = (_degree(settings, key) for key in _DEGREES)
    if not settings.get("sharding", _DEFAULTS["sharding"]):
        sharding = 1
    elif settings.get(_SHARDING) in (None, -1):
        sharding = max(ranks // (tensor * stages * segments), 1)
    data, outer = ranks // (tensor * stages * segments * sharding), ranks // (stages * experts)
    what = f"{_EXPERTS}: {experts} on {count_text(ranks, 'rank')}"
    if settings.get("use_expert_parallel") is not True:
        yield f"{what}: use_expert_parallel is not true"
    if ranks % (stages * experts):
        yield f"{what}: {ranks} ranks in {count_text(stages, 'pipeline stage')} are no multiple of it"
    elif data > 1:
        yield f"{what}: data parallel degree {data}: experts need sharding in its place, such as sharding: stage1"
    elif sharding > 1 and outer > 1 and sharding % outer:
        yield f"{what}: {_SHARDING} {sharding} is no multiple of {outer}, the ranks that hold one expert"


def _fused_norm(settings: Settings) -> Iterator[str]:
    """Find a fused norm on a CPU, for which Paddle has no kernel; it is PaddleFormers' default."""
    config = _model_config(settings)
    if is_known(config) and config.get("fuse_rms_norm", True):
        written = "fuse_rms_norm: true" if "fuse_rms_norm" in config else "no fuse_rms_norm, which means true"
        yield f"{settings[_PATH]}/config.json: {written}, and Paddle has no kernel for a fused norm on a CPU"


def _degree(settings: Settings, key: str) -> int:
    value = settings.get(key)
    return max(value, 1) if isinstance(value, int) else 1


def _text(settings: Settings, key: str) -> str:
    return str(settings.get(key, _DEFAULTS.get(key)))


def _model_config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of a text model that is on this machine; else an empty one."""
    model = settings.get(_PATH)
    if not isinstance(model, str) or not model or _text(settings, "stage") not in _TEXT_STAGES:
        return {}
    return read_config(Path(expand_user(model)))


def refuse_upload(options: Any) -> None:
    """Write to the store of ``flex_upload``, as every job does before it trains.

    Args:
        options: the checked options of a configuration.
    Raises:
        OptionError: there is no backend for the URL.
        StorageError: the store refused.
    """
    url = upload_url(options) if options.flex_checkpoint else None
    if url is not None:
        check_remote_writable(url)


def refuse_resume(settings: Settings, several_nodes: bool = False) -> None:
    """Refuse to resume a directory that is not a flex checkpoint, or that lacks files.

    Args:
        settings: the configuration with its overrides.
        several_nodes: whether the job has other nodes.

    Raises:
        OptionError: the directory does not exist.
        NotACheckpoint: the directory is not a flex checkpoint.
        Corrupt: a file is missing or has another size; not checked if ``flex_verify`` is off.
    """
    named = settings.get("resume_from_checkpoint")
    if not (settings.get("flex_checkpoint") and isinstance(named, str) and named):
        return
    found = parse_path(expand_user(named))
    if not isinstance(found, Path):
        refuse_no_checkpoint(found)
        return
    if several_nodes:
        return  # Files may be on disks of other nodes; the ranks check together.
    try:
        refuse_no_checkpoint(found)
    except NotACheckpoint as error:
        if exists(found):
            raise
        # Like any other argument that names nothing: the exit code is that of invalid usage.
        raise OptionError(error.what, where=error.where, evidence=error.evidence, next_step=error.next_step) from None
    if is_resumable(found):
        saved_run(found)
    elif settings.get("flex_verify", "size") not in ("off", False):
        verify_files(found, read_manifest(found), "size")


def refuse_resume_without_the_key(settings: Settings) -> None:
    """Refuse a resume by PaddleFormers itself of a flex checkpoint, which it cannot read.

    Raises:
        OptionError: ``flex_checkpoint`` is not true, and PaddleFormers would resume a flex checkpoint.
    """
    found = None if settings.get("flex_checkpoint") else _resumed_by_stock(settings)
    if found is not None and exists(found / MANIFEST_NAME):
        raise OptionError(
            f"{found} is a flex checkpoint, and without flex_checkpoint: true PaddleFormers would resume from it.",
            where="flex_checkpoint",
            evidence=["PaddleFormers resumes from resume_from_checkpoint, or from the newest checkpoint in output_dir"],
            next_step="Set flex_checkpoint: true; or to start a new run, set another output_dir and nothing to resume, "
            "or set overwrite_output_dir: true.",
        )


def _resumed_by_stock(settings: Settings) -> Path | None:
    """Return the directory that PaddleFormers would resume without this package; None if uncertain."""
    named, stage = settings.get("resume_from_checkpoint"), _text(settings, "stage")
    if settings.get("do_train") is not True or stage not in (*_RESUMING_STAGES, "DPO"):
        return None
    if stage in _RESUMING_STAGES and isinstance(named, str) and named:
        path = parse_path(expand_user(named))
        return path if isinstance(path, Path) else None
    is_default = not settings.get("overwrite_output_dir") and (named is None or stage == "DPO")
    output_dir = settings.get("output_dir")
    # On that platform PaddleFormers considers marked checkpoints only.
    is_newest = (is_default or named is True) and not os.environ.get("FLAG_LLM_PDC")
    if not (is_newest and isinstance(output_dir, str) and output_dir):
        return None
    steps = {parse_step(path): path for path in list_directory(Path(expand_user(output_dir))) if is_directory(path)}
    return max(((step, path) for step, path in steps.items() if step is not None), default=(None, None))[1]


def refuse_model(settings: Settings) -> None:
    """Refuse a model that every rank would refuse: its configuration, or its tensor parallel degree.

    The ``config.json`` must be on this machine. A degree is refused if it does not divide a size that the class of the
    family checks. The error then lists all such sizes, as ``plan`` does. Virtual pipeline stages that do not divide the
    layers are refused; other checks are left to PaddleFormers.

    Raises:
        FormatError: the configuration is not a JSON object.
        MappingError: the configuration lacks model_type or a size, or contradicts itself.
        OptionError: the degree does not divide the model; with the numbers.
    """
    config = _model_config(settings) if settings.get("flex_checkpoint") else {}
    if not config or ("model_type" in config and not is_known(config)):
        return  # A name of a hub, or a model whose class may have statements of its own.
    family = family_for(config)
    # PaddleFormers takes keys of the model from the same file.
    given = {key: value for key, value in settings.items() if value is not None}
    # Other keys may decide the sizes that the tensor-parallel degree divides, or the layers of a stage.
    experts = any(settings.get(key) not in (None, False, 1) for key in (_EXPERTS, "use_expert_parallel"))
    sizes_are_known = not experts and settings.keys().isdisjoint(DIVIDED.values())
    stages, virtual = _degree(settings, _STAGES), _degree(settings, _VIRTUAL)
    by_default = settings.get(_SEGMENTS) is None and not upstream.is_installed("paddlefleet")
    if stages == 1 or virtual == 1 or not by_default:
        stages, virtual = 1, 1
    try:
        grid = ParallelGrid(tp=_degree(settings, _TENSOR) if sizes_are_known else 1, pp=stages, vpp=virtual)
        # Where PaddleFleet has a class of the family as well, PaddleFormers' commands build that one.
        declared_model(family, ModelDescription({**config, **given}, is_fleet=True), grid)
    except OptionError as error:
        checked = (*(f"{DIVIDED[size]}=" for size in family.divided), "num_hidden_layers=")
        if any(line.startswith(checked) or "layers, empty ones included" in line for line in error.evidence):
            raise
