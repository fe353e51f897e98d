"""Checks of a training configuration before a rank starts, where an error takes seconds and one line.

Only certain faults are refused. PaddleFormers resolves names that may be on a hub.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
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
from paddleformers_fc.storage.names import parse_step
from paddleformers_fc.storage.paths import expand_user, parse_path
from paddleformers_fc.storage.remote_writes import check_remote_writable
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer.options import FIELD_NAMES, unknown_keys, upload_url
from paddleformers_fc.trainer.resume import refuse_no_checkpoint
from paddleformers_fc.trainer.stock_keys import Words, stock_keys, stock_words

_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sep_parallel_size",
    "sharding_parallel_size",
)
_COUNTS = (
    *_DEGREES,
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "max_steps",
)
"""Whole numbers. PaddleFormers silently uses the default for any other text."""

_VALUES = {
    "stage": Words(
        ("SFT", "PT", "DPO", "VL-SFT", "VL-PT", "VL-DPO", "dsv3_pretrain", "ernie_pretrain", "auto-parallel")
    ),
    "fine_tuning": Words(("LoRA", "full"), any_case=True),
    "compute_type": Words(("bf16", "fp16", "float32", "wint8", "wint4", "wint4/8", "nf4")),
}
"""The values of keys without an enumeration. PaddleFormers trains without adapters for any other ``fine_tuning``."""

_STEPS = "steps"
_STRATEGIES = {"evaluation": "no", "save": _STEPS, "logging": _STEPS}
"""PaddleFormers' defaults."""

_USUAL = 500
"""PaddleFormers' ``save_steps`` and ``logging_steps``."""

_RANK = "lora_rank"
_POSITIVE = ("gradient_accumulation_steps", "per_device_train_batch_size", _RANK)

_PATH = "model_name_or_path"
_RESUMING_STAGES = ("SFT", "PT", "VL-SFT", "VL-PT")
"""The stages that use ``resume_from_checkpoint``; preference training takes the newest of ``output_dir``."""

_TEXT_STAGES = ("SFT", "PT", "DPO")
_PREFERENCE_STAGES = ("DPO", "VL-DPO")
_SHARDED = "stage1"
"""PaddleFormers' ``sharding`` of a configuration without this key."""

_VIRTUAL = "virtual_pipeline_model_parallel_size"
_SEGMENTS = "pp_seg_method"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OWN_EXPERTS = ("expert_model_parallel_size", "use_expert_parallel")
_LISTS_OF_PATHS = {"train_dataset_path": "train_dataset_prob", "eval_dataset_path": "eval_dataset_prob"}
"""Lists of files, each with an optional ``#`` and number of samples, and of their probabilities."""


def require_paddleformers(doing: str) -> None:
    """Refuse an operation that needs PaddleFormers if it is not installed.

    Args:
        doing: the operation, as the subject of a sentence.

    Raises:
        EnvironmentMismatch: it is not installed.
    """
    if importlib.util.find_spec("paddleformers") is None:
        raise EnvironmentMismatch(
            f"{doing} needs PaddleFormers, which is not installed.", where=sys.executable, next_step=upstream.INSTALL
        )


def refuse_unknown_keys(settings: Mapping[str, Any], may_be_more: bool) -> None:
    """Refuse keys that are unknown to PaddleFormers and this package.

    Args:
        settings: the configuration with its overrides.
        may_be_more: whether a registration file of the user may add keys; then only keys with the prefix of this
            package are checked.

    Raises:
        OptionError: all unknown keys, each with a similar known key.
    """
    # A dot or a bracket in an override reaches into the value of a key.
    names = sorted({re.split(r"[.\[]", str(key))[0] for key in settings} - set(FIELD_NAMES))
    stock = None if may_be_more else stock_keys()
    if stock is None:
        # PaddleFormers has keys of its own that begin with flex_ckpt.
        unknown = [name for name in names if name.startswith("flex_") and not name.startswith("flex_ckpt")]
    else:
        unknown = [name for name in names if name not in stock]
    if unknown:
        raise unknown_keys(unknown, stock or ())


def refuse_unknown_values(settings: Mapping[str, Any]) -> None:
    """Refuse values that PaddleFormers refuses in every rank after its imports, or reads as another one.

    Raises:
        OptionError: with all such keys.
    """
    faults = [
        f"{key}: {'null' if settings[key] is None else repr(settings[key])} is none of {', '.join(words.known)}"
        for key, words in {**_VALUES, **stock_words()}.items()
        if key in settings and not words.admits(settings[key])
    ]
    if faults:
        raise OptionError(
            "Unknown value in the configuration.",
            where="training arguments",
            evidence=faults,
            next_step='Write one of the listed values; "no" needs quotes, without which YAML reads false. sharding: "" '
            "means none.",
        )


def refuse_missing_paths(settings: Mapping[str, Any]) -> None:
    """Refuse missing local models and data.

    Raises:
        OptionError: with all missing paths.
        StorageError: the operating system refused to look at one.
    """
    named = [(_PATH, str(settings.get(_PATH) or ""))]
    for key, probabilities in _LISTS_OF_PATHS.items():
        paths, chances = _listed(settings.get(key)), _listed(settings.get(probabilities))
        if len(paths) == len(chances):
            # PaddleFormers does not look at data that is never drawn.
            paths = [path for path, chance in zip(paths, chances, strict=True) if not _is_nothing(chance)]
        named.extend((key, path.partition("#")[0]) for path in paths)
    output_dir = PurePath(str(settings.get("output_dir") or ""))
    missing = [
        f"{key}: {path}" for key, path in named if _is_local(path, output_dir) and not exists(Path(expand_user(path)))
    ]
    if missing:
        raise OptionError(
            "The configuration names missing files or directories.",
            where=str(Path.cwd()),
            evidence=missing,
            next_step="Relative paths begin in the working directory above. `make demo` in the repository creates the "
            "files of demo_out.",
        )


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


def refuse_layout(settings: Mapping[str, Any], ranks: int) -> None:
    """Refuse parallel degrees that do not divide the number of ranks.

    Raises:
        OptionError: one is not a whole number, or their product does not divide it.
    """
    other = [f"{key}: {settings[key]!r}" for key in _COUNTS if not _is_count(settings.get(key))]
    if other:
        raise OptionError(
            "A degree or a number of steps is not a whole number.",
            where="training arguments",
            evidence=other,
            next_step="Write a number such as 2, or remove the key to use its default.",
        )
    used = {key: settings[key] for key in _DEGREES if isinstance(settings.get(key), int) and settings[key] > 1}
    if not settings.get("sharding"):
        used.pop("sharding_parallel_size", None)
    product = 1
    for degree in used.values():
        product *= degree
    if ranks % product:
        raise OptionError(
            f"{count_text(ranks, 'rank')} cannot be divided into groups of {product}.",
            where="--nproc",
            evidence=[f"{key}: {degree}" for key, degree in used.items()],
            next_step=f"Start {product} ranks or a multiple with --nproc, or lower a degree.",
        )


def _is_count(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"\s*[-+]?[0-9]+\s*", value) is not None
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


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


def refuse_schedule(settings: Mapping[str, Any]) -> None:
    """Refuse numbers and strategies that every rank would refuse after its imports, or after it has built the model.

    Raises:
        OptionError: with every such key.
    """

    def number(key: str, default: float) -> float:
        value = settings.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    evaluates, saves, logs = (str(settings.get(f"{key}_strategy", default)) for key, default in _STRATEGIES.items())
    counts = [key for key in _POSITIVE if key != _RANK or str(settings.get("fine_tuning")).lower() != "full"]
    faults = [f"{key}: {settings[key]} is less than 1" for key in counts if number(key, 1) < 1]
    if not number("logging_steps", 1) and logs == _STEPS:
        faults.append("logging_steps: 0 with logging_strategy: steps")
    if number("max_steps", -1) <= 0 >= number("num_train_epochs", 1):
        faults.append(
            f"max_steps: {settings.get('max_steps', -1)} and num_train_epochs: {settings['num_train_epochs']}"
        )
    if settings.get("do_eval") is True and evaluates == "no":
        faults.append("do_eval: true with evaluation_strategy: no, its default")
    if settings.get("load_best_model_at_end") is True:
        every = number("eval_steps", 0) or number("logging_steps", _USUAL) or 1
        if evaluates != saves:
            strategies = f"evaluation_strategy: {evaluates} and save_strategy: {saves}"
            faults.append(f"load_best_model_at_end: true with {strategies}, which must be equal")
        elif saves == _STEPS and number("save_steps", _USUAL) % every:
            steps = f"save_steps: {number('save_steps', _USUAL)}"
            faults.append(f"load_best_model_at_end: true with {steps}, which is no multiple of eval_steps: {every}")
    if faults:
        raise OptionError(
            "Training cannot start with these settings.",
            where="training arguments",
            evidence=faults,
            next_step="Change the listed keys.",
        )


def refuse_expert_layout(settings: Mapping[str, Any], ranks: int) -> None:
    """Refuse a degree of expert parallelism that PaddleFormers would refuse, or leave unused, in every rank.

    Raises:
        OptionError: with the key and the degrees that it does not fit.
    """
    experts = settings.get("expert_model_parallel_size")
    if isinstance(experts, bool) or not isinstance(experts, int) or experts < 2:
        return
    tensor, stages, segments, sharding = (_degree(settings, key) for key in _DEGREES)
    if not settings.get("sharding", _SHARDED):
        sharding = 1
    elif settings.get("sharding_parallel_size") in (None, -1):
        sharding = max(ranks // (tensor * stages * segments), 1)
    data, outer = ranks // (tensor * stages * segments * sharding), ranks // (stages * experts)
    faults = []
    if settings.get("use_expert_parallel") is not True:
        faults.append("use_expert_parallel is not true")
    if ranks % (stages * experts):
        faults.append(f"{ranks} ranks in {count_text(stages, 'pipeline stage')} are no multiple of it")
    elif data > 1:
        faults.append(f"data parallel degree {data}: experts need sharding in its place, such as sharding: stage1")
    elif sharding > 1 and outer > 1 and sharding % outer:
        faults.append(f"sharding_parallel_size {sharding} is no multiple of {outer}, the ranks that hold one expert")
    if faults:
        raise OptionError(
            "A degree of expert parallelism does not fit.",
            where="expert_model_parallel_size",
            evidence=[f"expert_model_parallel_size: {experts} on {count_text(ranks, 'rank')}: {one}" for one in faults],
            next_step="Change this degree, the number of ranks, or the other degrees.",
        )


def refuse_pipeline(settings: Mapping[str, Any]) -> None:
    """Refuse a pipeline that every rank would refuse after its imports, or after it has built the model.

    Paddle schedules virtual stages on more than two pipeline stages alone, and needs as many forward passes per step as
    there are pipeline stages, or at least twice as many. PaddleFleet's schedules are not checked.

    Raises:
        OptionError: with every key that does not fit.
    """
    stage, stages, virtual = _stage(settings), _degree(settings, _DEGREES[1]), _degree(settings, _VIRTUAL)
    if stages == 1 or stage not in (*_RESUMING_STAGES, *_PREFERENCE_STAGES):
        return
    faults = []
    if stage in _PREFERENCE_STAGES and not settings.get("clear_every_step_cache"):
        faults.append(f"clear_every_step_cache: not true, which stage: {stage} needs in a pipeline")
    if stage in _PREFERENCE_STAGES and settings.get("sequence_parallel") and settings.get("partial_send_recv", True):
        faults.append(f"partial_send_recv: not false, which stage: {stage} needs with sequence_parallel: true")
    if virtual > 1 and importlib.util.find_spec("paddlefleet") is None:
        faults += [f"{_VIRTUAL}: {virtual} needs {fault}" for fault in _virtual_faults(settings, stages)]
    if faults:
        raise OptionError(
            "A pipeline cannot be trained with these settings.",
            where=f"{_DEGREES[1]}: {stages}",
            evidence=faults,
            next_step="Change the listed keys, or the degrees of the pipeline.",
        )


def _virtual_faults(settings: Mapping[str, Any], stages: int) -> Iterator[str]:
    if stages == 2:
        yield "more than 2 pipeline stages"
    passes = settings.get("gradient_accumulation_steps", 1)
    if isinstance(passes, int) and passes > 0 and not _schedulable(passes, stages, settings):
        yield f"gradient_accumulation_steps: {stages}, or {2 * stages} or more, instead of {passes}"
    method = settings.get(_SEGMENTS)
    if method is not None and not str(method).startswith("layer:"):
        yield f"{_SEGMENTS}: layer:DecoderLayer|EmptyLayer instead of {method}"


def _schedulable(passes: int, stages: int, settings: Mapping[str, Any]) -> bool:
    if settings.get("best_unbalanced_scheduler"):
        return passes >= stages
    return passes == stages or passes >= 2 * stages


def _degree(settings: Mapping[str, Any], key: str) -> int:
    value = settings.get(key)
    return max(value, 1) if isinstance(value, int) else 1


def refuse_fused_norm(settings: Mapping[str, Any]) -> None:
    """Refuse a fused norm on a CPU, for which Paddle has no kernel; it is PaddleFormers' default.

    Raises:
        OptionError: the configuration of the model, if it is on this machine, does not switch it off.
    """
    model = settings.get(_PATH)
    if not isinstance(model, str) or not model or _stage(settings) not in _TEXT_STAGES:
        return
    config = read_config(Path(expand_user(model)))
    if is_known(config) and config.get("fuse_rms_norm", True):
        written = "fuse_rms_norm: true" if "fuse_rms_norm" in config else "no fuse_rms_norm, which means true"
        raise OptionError(
            "The model has a fused norm, and Paddle has no kernel for it on a CPU.",
            where=f"{model}/config.json",
            evidence=[written],
            next_step='Add "fuse_rms_norm": false to this config.json.',
        )


def refuse_resume(settings: Mapping[str, Any], several_nodes: bool = False) -> None:
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


def refuse_resume_without_the_key(settings: Mapping[str, Any]) -> None:
    """Refuse a resume by PaddleFormers itself of a flex checkpoint, which it cannot read.

    Raises:
        OptionError: ``flex_checkpoint`` is not true, and PaddleFormers would resume a flex checkpoint.
    """
    if settings.get("flex_checkpoint"):
        return
    found = _resumed_by_stock(settings)
    if found is not None and exists(found / MANIFEST_NAME):
        raise OptionError(
            f"{found} is a flex checkpoint, and without flex_checkpoint: true PaddleFormers would resume from it.",
            where="flex_checkpoint",
            evidence=["PaddleFormers resumes from resume_from_checkpoint, or from the newest checkpoint in output_dir"],
            next_step="Set flex_checkpoint: true; or to start a new run, set another output_dir and nothing to resume, "
            "or set overwrite_output_dir: true.",
        )


def _resumed_by_stock(settings: Mapping[str, Any]) -> Path | None:
    """Return the directory that PaddleFormers would resume without this package; None if uncertain."""
    named, stage = settings.get("resume_from_checkpoint"), _stage(settings)
    if settings.get("do_train") is not True or stage not in (*_RESUMING_STAGES, "DPO"):
        return None
    if stage in _RESUMING_STAGES and isinstance(named, str) and named:
        place_named = parse_path(expand_user(named))
        return place_named if isinstance(place_named, Path) else None
    is_default = not settings.get("overwrite_output_dir") and (named is None or stage == "DPO")
    output_dir = settings.get("output_dir")
    # On that platform PaddleFormers considers marked checkpoints only.
    if (
        not (is_default or named is True)
        or not (isinstance(output_dir, str) and output_dir)
        or os.environ.get("FLAG_LLM_PDC")
    ):
        return None
    steps = {parse_step(path): path for path in list_directory(Path(expand_user(output_dir))) if is_directory(path)}
    return max(((step, path) for step, path in steps.items() if step is not None), default=(None, None))[1]


def _stage(settings: Mapping[str, Any]) -> str:
    return str(settings.get("stage", "SFT"))


def refuse_model(settings: Mapping[str, Any]) -> None:
    """Refuse a model that every rank would refuse: its configuration, or its tensor parallel degree.

    The ``config.json`` must be on this machine. A degree is refused if it does not divide a size that the class of the
    family checks. The error then lists all such sizes, as ``plan`` does. Virtual pipeline stages that do not divide the
    layers are refused; other checks are left to PaddleFormers.

    Raises:
        FormatError: the configuration is not a JSON object.
        MappingError: the configuration lacks model_type or a size, or contradicts itself.
        OptionError: the degree does not divide the model; with the numbers.
    """
    model = settings.get(_PATH)
    if not settings.get("flex_checkpoint") or _stage(settings) not in _TEXT_STAGES or not isinstance(model, str):
        return
    config = read_config(Path(expand_user(model))) if model else {}
    if not config or ("model_type" in config and not is_known(config)):
        return  # A name of a hub, or a model whose class may have statements of its own.
    family = family_for(config)
    # PaddleFormers takes keys of the model from the same file.
    given = {key: value for key, value in settings.items() if value is not None}
    try:
        # Where PaddleFleet has a class of the family as well, PaddleFormers' commands build that one.
        described = ModelDescription({**config, **given}, is_fleet=True)
        stages, virtual = _checked_pipeline(settings)
        declared_model(family, described, ParallelGrid(tp=_checked_degree(settings), pp=stages, vpp=virtual))
    except OptionError as error:
        checked = (*(f"{DIVIDED[size]}=" for size in family.divided), "num_hidden_layers=")
        if any(line.startswith(checked) or "layers, empty ones included" in line for line in error.evidence):
            raise


def _checked_pipeline(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the degrees of a pipeline with virtual stages, which must divide the layers; 1 and 1 for another one."""
    stages, virtual = _degree(settings, _DEGREES[1]), _degree(settings, _VIRTUAL)
    by_default = settings.get(_SEGMENTS) is None and importlib.util.find_spec("paddlefleet") is None
    return (stages, virtual) if stages > 1 and virtual > 1 and by_default else (1, 1)


def _checked_degree(settings: Mapping[str, Any]) -> int:
    """Return the tensor parallel degree, or 1 if other keys decide the sizes that it divides."""
    degree = settings.get(_DEGREES[0])
    changed = any(settings.get(key) not in (None, False, 1) for key in _OWN_EXPERTS)
    known = not changed and settings.keys().isdisjoint(DIVIDED.values())
    return max(degree, 1) if known and isinstance(degree, int) else 1
