"""The metadata files of a checkpoint: the description of the model, and the state of the Trainer.

====================================  ================================================================================
``config.json`` and others            the model's configuration, generation settings and tokenizer, as in an export
``trainer/state.json``                PaddleFormers' ``TrainerState``: step, epoch, best metric, ...
``trainer/scheduler.json``            the learning-rate scheduler
``trainer/optimizer_scheduler.json``  the optimizer's own learning-rate scheduler, if it has one
``trainer/scaler.json``               the loss scaler of float16 runs
``trainer/data.json``                 the position of the run in its data (:mod:`.position`)
``trainer/reference.json``            the reference model of preference training (:mod:`.reference`)
``trainer/ema.json``                  the moving average of the weights (:mod:`.ema`)
``trainer/arguments.json``            the training arguments, for readers
``trainer/rng-00000.json``            the random generators of one process (:mod:`.rng`)
====================================  ================================================================================

All except the tokenizer are small: random generators take about 30 kB, other files a few kilobytes. Files that other
libraries write go through a temporary directory, so that they are checksummed and committed like all others.

PaddleFormers drops and overwrites keys of ``config.json`` and does not read generation settings for flex checkpoints.
A model therefore keeps the ``config.json`` and ``generation_config.json`` of the weights that it started or resumed
from (:class:`Inherited`), and every checkpoint and export contains them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from paddle.optimizer.lr import LRScheduler

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.errors import FlexError, FormatError, MismatchError
from paddleformers_fc.execute.opening import hold_documents, own_document
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.families.exported import OVERWRITTEN, exported_config, with_older_keys, with_read_keys
from paddleformers_fc.formats.checkpoint import (
    AVERAGE as AVERAGE,
    CONFIG_NAME,
    DATA as DATA,
    STATE as STATE,
    OpenedCheckpoint,
    check_no_contradictions,
    parse_config,
)
from paddleformers_fc.formats.huggingface import read_description
from paddleformers_fc.layout.roles import OPTIMIZER_STATE, qualified_name
from paddleformers_fc.storage import state_json
from paddleformers_fc.storage.files import files_within, read_file
from paddleformers_fc.storage.json_io import parse_json
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.paths import AnyPath, mask_credentials
from paddleformers_fc.trainer import description
from paddleformers_fc.trainer.description import base_model, config_of, describe_config, describe_model
from paddleformers_fc.trainer.library import (
    GenerationConfig,
    LlmMetaConfig,
    PretrainedConfig,
    TrainerState,
    get_parameter_dtype,
    unwrap_model,
)
from paddleformers_fc.trainer.optimizers import has_states, innermost
from paddleformers_fc.trainer.options import FlexFields

_T = TypeVar("_T")

GENERATION = "generation_config.json"

_INHERITED = "_flex_inherited"
_RUN_KEYS = frozenset(
    {"_from_model_config", "paddleformers_version", "paddlefleet_version", "paddlenlp_version", "use_cache"}
)


@dataclass(frozen=True)
class Inherited:
    """The metadata files of the weights that a model started from.

    Args:
        config: the content of ``config.json``, merged with the files of earlier loads; for new weights, the keys of
            the model's configuration that the Trainer overwrites.
        read: the description of a model that PaddleFormers builds from ``config``; None for new weights. Live values
            that differ from it were changed after loading.
        generation: the bytes of ``generation_config.json``; None if there is none, or if the user set other settings.
        settings: the live generation settings after loading this file. If they differ now, the user changed them.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Any] | None = None
    generation: bytes | None = None
    settings: Mapping[str, Any] | None = None


def of(model: Any) -> Inherited:
    """Return the inherited metadata files of a model."""
    inherited: Inherited = getattr(base_model(model), _INHERITED, Inherited())
    return inherited


def keep_use_cache(model: Any) -> None:
    """Remember ``use_cache`` of a model with new weights, before a Trainer switches it off for training."""
    if not of(model).config and hasattr(config_of(model), "use_cache"):
        _set(model, replace(of(model), config={**of(model).config, "use_cache": config_of(model).use_cache}))


def take_over(model: Any, config: Mapping[str, Any], generation: bytes | None) -> None:
    """Store the metadata files of the directory that a model was filled from with the model.

    Args:
        model: the model, or a wrapper of it. It gets the generation settings of the file, unless a user set others.
        config: the content of ``config.json``; empty if there is none.
        generation: the bytes of ``generation_config.json``; None if there is none.
    """
    # Configurations that PaddleFormers wrote may also contain keys of a run.
    run_keys = LlmMetaConfig._get_unsavable_keys() - OVERWRITTEN
    kept = {key: value for key, value in with_older_keys(config).items() if key not in run_keys}
    now = replace(of(model), config={**of(model).config, **kept})
    if kept:
        known = _read(type(config_of(model)), with_read_keys(now.config))
        # Without a known description, every live value counts as changed.
        now = replace(now, read={} if known is None else describe_config(known))
    if generation is not None and _settings(model) in (None, _initial_settings(model), now.settings):
        _adopt(base_model(model), generation)
        now = replace(now, generation=generation, settings=_settings(model))
    _set(model, now)


def read_documents(directory: AnyPath) -> tuple[dict[str, Any], bytes | None]:
    """Read ``config.json`` and ``generation_config.json`` of open weights, for :func:`take_over`.

    Raises:
        Corrupt: a file does not match its recorded checksum.
        FormatError: ``config.json`` is not a JSON object.
        StorageError: a file cannot be read.
    """
    raw = read_description(directory, CONFIG_NAME)
    config = {} if raw is None else parse_config(raw, directory / CONFIG_NAME)
    return config, read_description(directory, GENERATION)


def generation_file(model: Any) -> dict[str, bytes]:
    """Return the name and content of the ``generation_config.json`` to save; empty if the model has no settings."""
    kept, live = of(model), getattr(base_model(model), "generation_config", None)
    if kept.generation is not None and _settings(model) == kept.settings:
        return {GENERATION: kept.generation}
    return {} if live is None else {GENERATION: live.to_json_string().encode()}


def correct(config: Any, source: Mapping[str, Any]) -> list[str]:
    """Set the values of a ``config.json`` that PaddleFormers' configuration class fails to read.

    Args:
        config: the configuration of a model, before the model is built. Values that were changed after reading stay.
        source: the ``config.json`` of the weights.
    Returns:
        one line per corrected key, with both values.
    """
    complete, corrected = with_read_keys(source), list[str]()
    if complete == source:
        return corrected
    right, wrong = (_read(type(config), one) for one in (complete, source))
    for name in ("", "text_config"):
        parts = [getattr(one, name, None) if name else one for one in (config, right, wrong)]
        if all(isinstance(part, PretrainedConfig) for part in parts):
            own, expected, misread = map(vars, parts)
            for key, value in expected.items():
                if not isinstance(value, PretrainedConfig) and value != misread.get(key) == own.get(key):
                    corrected.append(f"{key}: {value} in config.json, {own.get(key)} in the model")
                    setattr(parts[0], key, value)
    return corrected


def check_positions(model: Any, source: Mapping[str, Any]) -> None:
    """Check that PaddleFormers has built a model with the rotary embedding that ``config.json`` describes.

    Raises:
        MismatchError: the configuration class does not read the keys of the file.
    """
    misread = [line for line in correct(copy.deepcopy(config_of(model)), source) if line.startswith("rope_parameters")]
    if misread:
        raise MismatchError(
            f"{type(config_of(model)).__name__} of PaddleFormers does not read the rotary embedding of config.json.",
            where=CONFIG_NAME,
            evidence=misread,
            next_step="Set the value in the configuration before the model is built, or build the model with "
            "from_pretrained after paddleformers_fc.install().",
        )


def _read(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a ``config.json`` as a configuration object; None if its class cannot read the file."""
    try:
        return kind.from_dict(copy.deepcopy(dict(config)))
    except Exception:  # PaddleFormers' classes raise any type, such as AssertionError.
        return None


def _set(model: Any, inherited: Inherited) -> None:
    setattr(base_model(model), _INHERITED, inherited)


def _adopt(model: Any, generation: bytes) -> None:
    """Give a model the generation settings of a file, if PaddleFormers can represent them."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_dict(parse_json(generation))
    except (FlexError, TypeError, ValueError, AttributeError):
        return  # PaddleFormers supports fewer settings than other libraries. The file is kept unchanged.


def _settings(model: Any) -> dict[str, Any] | None:
    live = getattr(base_model(model), "generation_config", None)
    return None if live is None else _plain(live)


def _initial_settings(model: Any) -> dict[str, Any] | None:
    """Return the generation settings that PaddleFormers gives a model of this configuration when it is built."""
    if not base_model(model).can_generate():
        return None
    return _plain(GenerationConfig.from_model_config(config_of(model)))


def _plain(settings: Any) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in vars(settings).items() if key not in _RUN_KEYS}


SCHEDULER = "trainer/scheduler.json"
OWN_SCHEDULER = "trainer/optimizer_scheduler.json"
SCALER = "trainer/scaler.json"
REFERENCE = "trainer/reference.json"
ARGUMENTS = "trainer/arguments.json"

_EXPORT_FLAGS = ("_save_to_hf", "_save_safetensors")
# Keys that PaddleFormers' pipeline and expert-parallel models add to their configuration, and keys that are set below
# only for PaddleFormers' export code.
_LAYOUT_KEYS = frozenset(
    {
        *("moe_group_origin", "moe_rank", "moe_world_size", "disable_ffn_model_parallel"),
        *(*_EXPORT_FLAGS, "tensor_model_parallel_size"),
    }
)
_MOST_STEPS = 1 << 53
_DATA_ARGUMENTS = "_flex_data_arguments"
_DATASET = "train_dataset_path"
_BACKEND_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "padding", "truncation")
_CLASS_KEYS = ("processor_class", "image_processor_type", "video_processor_type", "tokenizer_class")
_TOKENS, _OLDER_TOKENS = "extra_special_tokens", "additional_special_tokens"
_SECRET_ENDINGS = ("_token", "_api_key", "password", "secret")


def rng_name(rank: int) -> str:
    """Return the path of a rank's random state inside a checkpoint."""
    return f"trainer/rng-{rank:05d}.json"


def model_config(model: Any) -> dict[str, Any]:
    """Return the content of ``config.json``: the model's configuration without keys of a parallel layout.

    Args:
        model: the model as it was built, or a wrapper of it.

    Raises:
        MappingError: the configuration contradicts itself.
    """
    return _capture_config(model)()


def _capture_config(model: Any) -> Callable[[], dict[str, Any]]:
    """Capture the configuration of a model, and return a function that returns its :func:`model_config`."""
    model = description.base_model(model)
    config = copy.deepcopy(config_of(model))
    if not config.architectures:
        config.architectures = [type(model).__name__.removesuffix("Pipe")]
    dtype = get_parameter_dtype(model)
    if dtype is not None:
        config.dtype = str(dtype).rpartition(".")[2]
    config.tensor_model_parallel_size = 1
    for key in _EXPORT_FLAGS:
        setattr(config, key, True)
    described, inherited = describe_model(model), of(model)

    def values() -> dict[str, Any]:
        written = json.loads(config.to_json_string(use_diff=True, saving_file=True))
        family = family_for(written) if is_known(written) else None
        found = exported_config(family, written, described, inherited.config, inherited.read)
        return {key: value for key, value in found.items() if key not in _LAYOUT_KEYS}

    return values


def config_text(model: Any, **changes: Any) -> str:
    """Return the text of ``config.json``, with some values changed."""
    return _config_text({**model_config(model), **changes})


def _config_text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def capture_model_files(trainer: Any, tokenizer: Mapping[str, bytes]) -> Callable[[], dict[str, bytes]]:
    """Capture the files that describe a Trainer's model, and return a function that encodes them.

    Args:
        trainer: the Trainer.
        tokenizer: the files of its tokenizer and processor.
    Returns:
        a function that returns content by path relative to the weights: configuration, generation settings,
        tokenizer, processor and custom files.
    """
    model = unwrap_model(trainer.model)
    config, generation = _capture_config(model), generation_file(model)
    has_custom = getattr(trainer.args, "copy_custom_file_list", None)
    custom = [_with_own_arguments(trainer).copy_custom_files] if has_custom else []
    return lambda: {
        **tokenizer,
        **_files_written_by(custom),
        **generation,
        CONFIG_NAME: _config_text(config()).encode(),
    }


def _with_own_arguments(trainer: Any) -> Any:
    """Return a copy of a Trainer with a copy of its arguments, which a script may change during the save."""
    captured = copy.copy(trainer)
    captured.args = copy.copy(trainer.args)
    return captured


def tokenizer_files(trainer: Any) -> dict[str, bytes]:
    """Return the files of a Trainer's tokenizer and processor, by path relative to the weights."""
    own = trainer.tokenizer if trainer.args.save_tokenizer else None
    files: dict[str, bytes] = {}
    for one in (own, trainer.processing_class):
        if one is not None:
            directory = str(getattr(getattr(one, "tokenizer", one), "name_or_path", ""))
            for name, content in _files_written_by([one.save_pretrained]).items():
                source = Path(directory, name)
                known = bool(directory) and name.endswith("config.json") and source.is_file()
                files[name] = _with_source_keys(content, json.loads(source.read_bytes())) if known else content
    return files


def _with_source_keys(written: bytes, source: Mapping[str, Any]) -> bytes:
    """Return a tokenizer or processor configuration with the keys and classes of the file that it was loaded from.

    Transformers 5 writes classes and keys that version 4 does not know, drops the processor class and adds None for
    every absent key.
    """
    values = {key: value for key, value in json.loads(written).items() if key in source or value is not None}
    if isinstance(values.get(_TOKENS), list) and _TOKENS not in source:
        values[_OLDER_TOKENS] = values.pop(_TOKENS)
    kinds = {key: source[key] for key in _CLASS_KEYS if key in source}
    return (json.dumps(values | kinds, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


class TokenizerFiles:
    """Caches the files of a Trainer's tokenizer and processor until these change."""

    def __init__(self) -> None:
        self._cached_for: tuple[tuple[Any, str], ...] = ()
        self._files: dict[str, bytes] = {}

    def of(self, trainer: Any) -> dict[str, bytes]:
        """Return the files by path relative to the weights."""
        own = trainer.tokenizer if trainer.args.save_tokenizer else None
        current = tuple((one, _content_text(one)) for one in (own, trainer.processing_class))
        if [(id(one), text) for one, text in current] != [(id(one), text) for one, text in self._cached_for]:
            self._files, self._cached_for = tokenizer_files(trainer), current
        return self._files


def _content_text(one: Any) -> str:
    """Return a text that changes with a tokenizer or processor; of the vocabulary, only size and added tokens count."""
    fast = getattr(one, "backend_tokenizer", None)
    own = {
        name: _content_text(value) if hasattr(value, "save_pretrained") else value
        for name, value in getattr(one, "__dict__", {}).items()
        if value is not fast
    }
    return f"{one!r} {own} {[getattr(fast, part, None) for part in _BACKEND_PARTS]}"


def copied_state(state: TrainerState) -> TrainerState:
    """Return a deep copy of the Trainer's state that shares the log entries, which never change."""
    return copy.deepcopy(state, {id(state.log_history): list(state.log_history)})


def capture_progress(trainer: Any, data: dict[str, Any]) -> dict[str, Callable[[], bytes]]:
    """Capture the Trainer's state at this step, and return functions that encode it.

    Args:
        trainer: the Trainer.
        data: the position in the data, see :mod:`.position`.

    Returns:
        encoding functions by path; they raise a FormatError if a scheduler or callback has a value that JSON cannot
        represent exactly.
    """
    state = copied_state(trainer.state)
    files: dict[str, Callable[[], bytes]] = {
        STATE: lambda: state_json.encode(dataclasses.asdict(state), "trainer state"),
        DATA: partial(state_json.encode, data, "data position"),
    }
    if not trainer.args.ignore_save_lr_and_optim:
        scheduler = copy.deepcopy(trainer.lr_scheduler.state_dict())
        files[SCHEDULER] = partial(state_json.encode, scheduler, "learning-rate scheduler")
        own = own_scheduler(trainer)
        if own is not None:
            state_dict = copy.deepcopy(own.state_dict())
            files[OWN_SCHEDULER] = partial(state_json.encode, state_dict, "learning-rate scheduler of the optimizer")
        if trainer.do_grad_scaling:
            files[SCALER] = partial(state_json.encode, copy.deepcopy(trainer.scaler.state_dict()), "loss scaler")
    return files


def own_scheduler(trainer: Any) -> Any | None:
    """Return the scheduler of a script's optimizer; None if it has the Trainer's scheduler or a constant rate."""
    scheduler = innermost(trainer.optimizer)._learning_rate
    return scheduler if isinstance(scheduler, LRScheduler) and scheduler is not trainer.lr_scheduler else None


def capture_arguments(args: Any, optimizer: Any = None) -> Callable[[], bytes]:
    """Capture the training arguments, and return a function that returns them as JSON for readers, without secrets.

    Args:
        args: the training arguments.
        optimizer: the Trainer's optimizer; its class is added, because the arguments of a script may not name it.
    """
    chosen = {} if optimizer is None else {"optimizer": qualified_name(type(innermost(optimizer)))}
    return partial(_arguments_document, {**copy.deepcopy(_data_arguments(args)), **chosen, **args.to_dict()})


def _arguments_document(captured: Mapping[str, Any]) -> bytes:
    values = state_json.readable(captured)
    hidden = {name for name, value in values.items() if value is not None and name.endswith(_SECRET_ENDINGS)}
    shown = {name: mask_credentials(value) if isinstance(value, str) else value for name, value in values.items()}
    return state_json.encode({**shown, **dict.fromkeys(hidden, "<not saved>")}, "training arguments")


def remember_data_arguments(parsed: Iterable[Any]) -> None:
    """Attach the data arguments to the training arguments, because the command line parses them separately.

    Args:
        parsed: all objects that the command line has parsed.
    """
    parsed = list(parsed)
    for data in (one for one in parsed if dataclasses.is_dataclass(one) and hasattr(one, _DATASET)):
        for arguments in (one for one in parsed if isinstance(one, FlexFields)):
            setattr(arguments, _DATA_ARGUMENTS, data)


def _data_arguments(args: Any) -> dict[str, Any]:
    """Return the data arguments and the sizes of the data files; empty for a script with its own dataset."""
    data_arguments = getattr(args, _DATA_ARGUMENTS, None)
    if data_arguments is None:
        return {}
    values = {one.name: getattr(data_arguments, one.name) for one in dataclasses.fields(data_arguments)}
    paths = [Path(name.strip()) for name in str(values[_DATASET] or "").split(",")]
    return {**values, "train_dataset_sizes": [path.stat().st_size for path in paths if path.is_file()]}


def own_arguments(args: Any, optimizer: Any) -> dict[str, Any]:
    """Return the training arguments of this run in the form of :func:`read_arguments`."""
    return state_json.decode_object(capture_arguments(args, optimizer)(), "training arguments")


_PROGRESS_FILES = (STATE, SCHEDULER, OWN_SCHEDULER, DATA, SCALER, REFERENCE, AVERAGE)

RESUME_FILES = (*_PROGRESS_FILES, GENERATION, ARGUMENTS)
"""The metadata files that every rank of a resume reads. Each rank also reads its own random generators."""


def hold_for_resume(checkpoint: OpenedCheckpoint, channel: Channel, is_continued: bool) -> OpenedCheckpoint:
    """Return a checkpoint with the metadata files of a resume in memory, see :func:`.opening.hold_documents`.

    Args:
        checkpoint: an opened checkpoint.
        channel: all ranks of the job; every rank must call.
        is_continued: whether the run is continued; if not, only its weights are loaded.
    """
    return hold_documents(checkpoint, channel, (GENERATION, *(_PROGRESS_FILES if is_continued else ())))


def read_arguments(checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    """Return the training arguments of a checkpoint; empty if they are missing or unreadable."""
    with suppress(FlexError):
        return state_json.decode_object(checkpoint.held[ARGUMENTS], ARGUMENTS) if ARGUMENTS in checkpoint.held else {}
    return {}


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """The state of a Trainer in a checkpoint.

    Args:
        state: PaddleFormers' ``TrainerState``.
        scheduler: state of the learning-rate scheduler.
        scaler: state of the loss scaler; None if the saved run had none.
        data: the position in the data, see :mod:`.position`.
        reference: metadata of the reference model, see :mod:`.reference`; None if the saved run had none.
        average: the moving average's metadata, see :mod:`.ema`; None if the checkpoint has none.
        own_scheduler: state of the optimizer's own scheduler; None if the checkpoint has none.
        arguments: the training arguments; empty if they are unknown.
    """

    state: TrainerState
    scheduler: dict[str, Any]
    scaler: dict[str, Any] | None
    data: dict[str, Any]
    reference: dict[str, Any] | None = None
    average: dict[str, Any] | None = None
    own_scheduler: dict[str, Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def read_progress(checkpoint: OpenedCheckpoint, optimizer: Any) -> TrainingProgress:
    """Read the Trainer's state, which is the same on every rank.

    Args:
        checkpoint: the result of :func:`hold_for_resume`.
        optimizer: the optimizer of this run.

    Raises:
        MismatchError: the state of the Trainer, the scheduler or the optimizer is missing.
        Corrupt: a file contradicts the manifest.
        FormatError: a file is damaged.
    """
    directory, held = checkpoint.catalog.root, checkpoint.held
    missing = sorted({STATE, SCHEDULER, DATA} - held.keys())
    # Runs of this package record their optimizer, which may have no states.
    recorded = ARGUMENTS in checkpoint.documents
    if not checkpoint.catalog.roles.get(OPTIMIZER_STATE) and not recorded and has_states(optimizer):
        missing.append(OPTIMIZER_STATE)
    advice = "Set ignore_load_lr_and_optim: true to start a new run from its weights"
    if not {STATE, SCHEDULER, DATA} & held.keys():
        # A script saved it, such as one for semi-automatic parallelism.
        advice += ", with new optimizer states. paddleformers_fc.load also loads optimizer states, without a Trainer"
    if missing:
        raise MismatchError(
            f"{directory} does not contain the complete state of its run.",
            where=str(directory),
            evidence=[f"missing: {name}" for name in missing],
            next_step=f"{advice}. Or use a checkpoint that a Trainer saved with its optimizer.",
        )
    documents = {
        name: state_json.decode_object(held[name], str(directory / name)) for name in _PROGRESS_FILES if name in held
    }
    check_no_contradictions(checkpoint, documents)
    return TrainingProgress(
        state=_trainer_state(documents[STATE], directory / STATE),
        scheduler=documents[SCHEDULER],
        scaler=documents.get(SCALER),
        data=documents[DATA],
        reference=documents.get(REFERENCE),
        average=documents.get(AVERAGE),
        own_scheduler=documents.get(OWN_SCHEDULER),
        arguments=read_arguments(checkpoint),
    )


def read_generators(checkpoint: OpenedCheckpoint, rank: int, handed: bytes | None) -> bytes | None:
    """Read the random generators of a rank; None if the checkpoint does not contain them.

    Args:
        checkpoint: an opened checkpoint.
        rank: the rank.
        handed: the result of :func:`.opening.own_file`.

    Raises:
        Corrupt: the file was altered or contradicts the manifest.
        FormatError: the file is damaged.
    """
    name = rng_name(rank)
    raw = own_document(checkpoint, name, handed)
    if raw is not None:
        check_no_contradictions(checkpoint, {name: state_json.decode_object(raw, name)})
    return raw


_COUNT = Annotated[int, msgspec.Meta(ge=0)]
_STATE_TYPES: dict[str, Any] = {
    "epoch": float | None,
    "global_step": _COUNT,
    "consumed_samples": _COUNT,
    "max_steps": int,
    "num_train_epochs": int,
    "total_flos": float,
    "log_history": list[dict[str, Any]],
    "best_metric": float | None,
    "best_model_checkpoint": str | None,
    "is_local_process_zero": bool,
    "is_world_process_zero": bool,
    "trial_name": str | None,
    "trial_params": dict[str, Any] | None,
}
"""The field types of a ``TrainerState``, stricter than its own declaration."""


def _type_faults(values: dict[str, Any]) -> Iterator[str]:
    if "global_step" not in values:
        yield "global_step is missing"
    for name, value in values.items():
        try:
            msgspec.convert(value, type=_STATE_TYPES.get(name, Any))
        except ValueError as error:
            yield f"{name}: {error}"


def check_alike(saved: dict[str, Any], current: dict[str, Any], where: AnyPath) -> None:
    """Check that the saved state of a scheduler or loss scaler matches the live state.

    Args:
        saved: the state in the checkpoint.
        current: the live state.
        where: the file.

    Raises:
        FormatError: a value is missing, has another type, or is an invalid step count.
    """
    faults = [
        f"{name}: {type(saved.get(name)).__name__} in place of {type(value).__name__}"
        for name, value in current.items()
        if name not in saved or not _is_alike(saved[name], value)
    ]
    # Integers in these states are step counts, which determine the learning rate.
    faults += [
        f"{name}: invalid number of steps"
        for name, value in current.items()
        if type(value) is int and _kind_of(saved.get(name)) is float and not -1 <= saved[name] < _MOST_STEPS
    ]
    if faults:
        raise FormatError(
            "The saved state does not match the scheduler or loss scaler of this run.",
            where=str(where),
            evidence=faults,
            next_step="Resume with the same scheduler and precision, or from another checkpoint.",
        )


def _is_alike(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return type(other) is not int  # A number of steps is never None.
    return _kind_of(one) is _kind_of(other)


def _kind_of(value: Any) -> type:
    """Return the type of a value; float for every number, and list for every array."""
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return float
    return list if isinstance(value, np.ndarray) else type(value)


def typed(values: Mapping[str, Any], kind: type[_T], what: str, where: AnyPath | str) -> _T:
    """Return a decoded document as a value of its type.

    Args:
        values: the document.
        kind: the type.
        what: the problem of an invalid document, for the error.
        where: the file.

    Raises:
        FormatError: the document does not have this type.
    """
    try:
        return msgspec.convert(values, type=kind)
    except ValueError as error:
        raise FormatError(what, where=str(where), evidence=[str(error)], next_step=RESTORE) from error


def _trainer_state(values: dict[str, Any], path: AnyPath) -> TrainerState:
    known = {one.name for one in dataclasses.fields(TrainerState)}
    faults = [f"unknown: {name}" for name in sorted(values.keys() - known)]
    faults.extend(f"invalid: {fault}" for fault in _type_faults(values))
    if faults:
        raise FormatError(
            "The trainer state was saved by another version of PaddleFormers.",
            where=str(path),
            evidence=faults,
            next_step="Resume with the version of PaddleFormers that saved it.",
        )
    return TrainerState(**values)


def _files_written_by(writers: Iterable[Callable[[str], Any]]) -> dict[str, bytes]:
    """Return the files that functions write into a temporary directory."""
    writers = list(writers)
    if not writers:
        return {}
    with tempfile.TemporaryDirectory(prefix="paddleformers-fc-") as name:
        for write in writers:
            write(name)
        return {path.relative_to(name).as_posix(): read_file(path) for path in files_within(Path(name))}
