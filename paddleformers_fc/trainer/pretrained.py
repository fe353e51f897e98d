"""Load open weights and adapters from safetensors files into a live model, under any layout.

:func:`load_open_weights` fills an existing model. The replacements of ``PretrainedModel.from_pretrained`` and
``LoRAModel.from_pretrained`` build the model as PaddleFormers does, with the same random numbers, and fill it in the
same way. Every rank reads the ranges of its own shards through the family's mapping, and casts floating dtypes to the
model's. No weight changes unless all weights fit.

PaddleFormers' own loader skips mismatches: it cuts or omits tensors of other shapes. So the replacement marks each
model that it lets PaddleFormers fill as unverified, and a Trainer with ``flex_checkpoint`` rejects such a model. The
mark is an attribute of the layer, so it survives a copy and nesting in another model.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import paddle
from paddle.nn import Layer

from paddleformers_fc.api_arguments import DIRECTORY, THREADS, Kind, require
from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.distributed.communicator import job_communicator
from paddleformers_fc.errors import MismatchError, NotACheckpoint, OptionError
from paddleformers_fc.execute.load import LoadReport, prepare_weights
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families.description import Adapters, B, is_adapter, layer_patterns
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.registry import open_weights
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.manifest import check_level
from paddleformers_fc.storage.paths import AnyPath, RemotePath, parse_path
from paddleformers_fc.text import count_text, fold
from paddleformers_fc.trainer import adapter_checks, documents, live_roles, own_statements, weight_sources
from paddleformers_fc.trainer.conflicts import contradiction
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library import LoRAConfig, LoRAModel, PretrainedConfig, logger, unwrap_model
from paddleformers_fc.trainer.options import FlexFields, reader_options
from paddleformers_fc.trainer.session import channel_of, read_options

_IGNORED = (
    "from_hf_hub",
    "from_aistudio",
    "convert_from_torch",
    "convert_from_hf",
    "load_via_cpu",
    "load_state_as_np",
    "low_cpu_mem_usage",
    "force_download",
    "flex_ckpt_comm_method",
)
"""Arguments of ``from_pretrained`` that only PaddleFormers' own loader uses."""

_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "state_dict": lambda given: given is not None,
    "ignore_mismatched_sizes": bool,
    "variant": lambda given: given is not None,
    "key_mapping": lambda given: given is not None,
    "use_safetensors": lambda given: given is False,
    "load_checkpoint_format": lambda given: given != "flex_checkpoint",
}
"""Arguments of ``from_pretrained`` that change which weights are loaded; the predicates select unsupported values."""

_READING = "reading the description of the model"
_MODEL = Kind("a model of PaddleFormers", lambda value: _is_model(unwrap_model(value)))


def load_open_weights(
    model: Any, directory: str | PathLike[str] | RemotePath, threads: int = 4, verify: str = "full"
) -> LoadReport:
    """Load the weights of a Hugging Face directory into a model. Every rank must call.

    Tensors that the family declares optional may be missing from the files, and then keep their initial values, or from
    the model. Either is logged once.

    Args:
        model: the model as it was built, before or after its parallel wrapper.
        directory: safetensors files with canonical names, and their index: a path, or a URL such as
            ``s3://bucket/model``.
        threads: how many tensors are filled at a time.
        verify: how thoroughly to check files that have a ``flex_checksums.json``, as exports do. ``full`` compares
            everything that this rank reads, ``size`` only sizes and metadata files.

    Raises:
        OptionError: an argument is invalid.
        FlexError: the same on every rank, before any weight has changed: files are missing or damaged, or names, shapes
            or dtypes do not fit.
    """
    require(_MODEL, model=model)
    require(DIRECTORY, directory=directory)
    require(THREADS, threads=threads)
    check_level(verify)
    return _fill(model, parse_path(directory), job_communicator(), ReadOptions(threads=threads), verify)


def _is_model(value: Any) -> bool:
    return isinstance(value, paddle.nn.Layer) and hasattr(value, "config")


def _from_pretrained(cls: Any, named: Any, options: FlexFields, keywords: dict[str, Any]) -> Any:
    """Build a model and fill it with open weights, in place of ``PretrainedModel.from_pretrained``.

    Args:
        cls: the class of the model.
        named: a directory, its URL, or the name of a model on a hub that PaddleFormers supports.
        options: how to read the weights, and how long ranks wait for each other.
        keywords: the keyword arguments of ``from_pretrained``.

    Returns:
        the model. Weights that are not in the files are reported, and the family declares them optional.

    Raises:
        OptionError: an argument is not supported.
        MappingError: no family declares the model, and its class has no statements.
        MismatchError: the directory contains another type of model.
        FlexError: as :func:`load_open_weights`.
    """
    _check_arguments(cls, keywords)
    given = {name: value for name, value in keywords.items() if name not in (*_IGNORED, *_UNSUPPORTED)}
    source = {name: given.pop(name, None) for name in ("cache_dir", "download_hub", "subfolder")}
    dtype = given.pop("dtype", None)
    config, given = _configuration(cls, named, given, source)
    _check_type(cls, config, named)
    own_statements.check_mapped(cls, config.model_type)
    _check_not_quantized(config)
    channel = channel_of(options)
    directory = run_on_all(channel, f"finding {named}", lambda: _directory(cls, str(named), config, source))
    described = run_on_all(channel, _READING, lambda: documents.read_documents(directory))
    documents.correct(config, described[0])
    config.dtype = dtype or config.dtype or paddle.get_default_dtype()
    model = cls._from_config(config, dtype=config.dtype, **given)
    _fill(model, directory, channel, read_options(options), _verify_level(options), described)
    return model


def _verify_level(options: FlexFields) -> str:
    """Return how to check open weights: their checksums, if there are any, unless verification is off."""
    return "off" if options.flex_verify == "off" else "full"


def _fill(
    model: Any,
    source: AnyPath,
    channel: Channel,
    options: ReadOptions,
    verify: str,
    described: tuple[dict[str, Any], bytes | None] | None = None,
) -> LoadReport:
    if isinstance(unwrap_model(model), LoRAModel):
        return _fill_adapters(unwrap_model(model), source, channel, options, verify)
    own_statements.adopt_statements(model, channel)
    described = described or run_on_all(channel, _READING, lambda: _read_description(model, source))
    load = prepare_weights(source, live_roles.model_roles(model), describe_model(model), channel, options, verify)
    with weight_sources.mark_undefined_until_loaded(model, source):
        report = load.fill()
    documents.take_over(model, *described)
    kept = all_gather_checked(channel, "reporting what was loaded", lambda: list(report.fresh), list[str])
    weight_sources.note_verified(model, completely=not report.fresh)
    if not any(kept):
        weight_sources.remember(model, source, load.identities)
    if channel.rank == 0:
        for name in fold(sorted({name for names in kept for name in names})):
            logger.warning(f"{name} is not in {source} and keeps its initial values.")
        for name in fold(report.dropped):
            logger.warning(f"{name} is in {source} and the model has no place for it.")
    return report


def _read_description(model: Any, source: AnyPath) -> tuple[dict[str, Any], bytes | None]:
    described = documents.read_documents(source)
    documents.check_positions(model, described[0])
    return described


def _fill_adapters(
    model: LoRAModel, source: AnyPath, channel: Channel, options: ReadOptions, verify: str
) -> LoadReport:
    """Fill the adapters of a model. The base, its configuration and its mapping stay."""
    adapter_checks.check_adapters(model, channel)
    load = prepare_weights(source, live_roles.model_roles(model), describe_model(model), channel, options, verify)
    with weight_sources.mark_undefined_until_loaded(model, source):
        return load.fill()


def _check_arguments(cls: Any, keywords: dict[str, Any]) -> None:
    unsupported = [name for name, rejects in _UNSUPPORTED.items() if name in keywords and rejects(keywords[name])]
    if unsupported:
        raise OptionError(
            "flex_checkpoint: true contradicts an argument of from_pretrained.",
            where=f"{cls.__name__}.from_pretrained",
            evidence=[
                f"{name}: not supported by the reader of open weights"
                if name == "state_dict"
                else f"{name}={keywords[name]!r}: not supported by the reader of open weights"
                for name in unsupported
            ],
            next_step="Remove the argument; or build the model from its configuration, and assign its weights.",
        )


def _configuration(cls: Any, named: Any, given: dict[str, Any], source: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model's configuration, and the remaining arguments for its class, as PaddleFormers does."""
    config = given.pop("config", None)
    if isinstance(config, PretrainedConfig):
        return config, given
    path = named if config is None else config
    config, left = cls.config_class.from_pretrained(
        path, return_unused_kwargs=True, **{**source, "subfolder": source["subfolder"] or ""}, **given
    )
    return config, {name: value for name, value in left.items() if name not in source}


def _check_type(cls: Any, config: Any, named: Any) -> None:
    """Check that a directory contains the type of model that the class builds; PaddleFormers only warns."""
    kind = getattr(type(config), "model_type", config.model_type)
    if config.model_type != kind:
        raise MismatchError(
            f"{cls.__name__} builds models of type {kind}, and the weights belong to a model of another type.",
            where=str(named),
            evidence=[f"model_type: stored {config.model_type}, expected {kind}"],
            next_step="Use AutoModelForCausalLM, which chooses the class by config.json, or name another directory.",
        )


def _check_not_quantized(config: Any) -> None:
    quantization = config.quantization_config
    if quantization.is_weight_quantize():
        key = f"weight_quantize_algo: {quantization.weight_quantize_algo}"
        raise contradiction([f"flex_checkpoint: true and {key}: quantized weights are not supported"])


def _directory(cls: Any, named: str, config: Any, source: dict[str, Any]) -> AnyPath:
    """Return the directory of a model: a local one, a URL, or PaddleFormers' download from a hub."""
    subfolder = source["subfolder"] or ""
    found = parse_path(named)
    if isinstance(found, RemotePath) or os.path.isdir(named):
        return found / subfolder if subfolder else found
    if os.path.isfile(named):
        raise NotACheckpoint(
            "Open weights must be a directory, and this is a file.",
            where=named,
            next_step=f"Name the directory, {os.path.dirname(named) or '.'}.",
        )
    try:
        file, files, _, sharded = cls._resolve_model_file_path(
            named, **{**source, "subfolder": subfolder}, config=config, use_safetensors=True
        )
        return Path(os.path.commonpath([os.path.dirname(one) for one in (files if sharded else [file])]))
    except Exception as error:  # The clients of four hubs raise errors of many types.
        raise NotACheckpoint(
            f"{named} is neither a directory nor a model on a hub with safetensors files.",
            where=named,
            evidence=[f"{type(error).__name__}: {error}"],
            next_step="Correct model_name_or_path, or download the model and name its directory.",
        ) from error


# ---- Adapters, and the replaced methods.

_WEIGHT = ".weight"


def read_adapters(cls: Any, model: Any, lora_path: Any, options: FlexFields, keywords: dict[str, Any]) -> Any:
    """Return a model with the adapters of a directory.

    Args:
        cls: ``LoRAModel``, or a subclass of it.
        model: the base.
        lora_path: the directory, in the format of PEFT or of PaddleFormers.
        options: how to read it.
        keywords: arguments of ``LoRAModel.from_pretrained``; ``lora_config`` replaces the directory's configuration.
    Raises:
        FlexError: the same on every rank: the adapters cannot be read, or do not fit the model.
    """
    channel, directory = channel_of(options), parse_path(str(lora_path))
    config = keywords.get("lora_config") or _config(model, directory, channel)
    config.dtype = config.dtype or paddle.get_default_dtype()
    adapted = cls(model, config)
    _fill_adapters(adapted, directory, channel, read_options(options), _verify_level(options))
    return adapted


def _config(model: Any, directory: AnyPath, channel: Channel) -> LoRAConfig:
    """Return the configuration of adapters: ``lora_config.json``, or one derived from PEFT's files.

    PEFT names canonical layers, and PaddleFormers' patterns name layers of the model. Match them by the rules of the
    model and by the last part of a name, because pipelines number layers differently.
    """

    def adapted_layers() -> tuple[dict[str, set[bool]], list[str], list[str]]:
        opened = open_weights(directory, "size", adapters=True)
        return _layers(opened, _rules(model)) if opened.format.canonical else ({}, [], [])

    everyone = all_gather_checked(
        channel,
        "looking for the layers of the adapters",
        adapted_layers,
        tuple[dict[str, set[bool]], list[str], list[str]],
    )
    opened = open_weights(directory, "size", adapters=True)
    if not opened.format.canonical:
        if isinstance(directory, RemotePath):
            raise OptionError(
                "PaddleFormers reads lora_config.json from this machine only.",
                where=str(directory),
                next_step="Copy the adapters to a local directory, and name it in lora_path.",
            )
        return LoRAConfig.from_pretrained(str(directory))
    leaves: dict[str, set[bool]] = {}
    for found, _, _ in everyone:
        for leaf, states in found.items():
            leaves.setdefault(leaf, set()).update(states)
    mixed = [f"{leaf}: some layers of this name have adapters" for leaf, states in leaves.items() if len(states) > 1]
    faults = sorted({fault for _, _, theirs in everyone for fault in theirs}) + mixed
    if faults:
        raise MismatchError(
            "No patterns of PaddleFormers select exactly the layers of these adapters.",
            where=str(directory),
            evidence=fold(faults),
            next_step="Create LoRAModel(model, LoRAConfig(...)) in a script, and call load_open_weights.",
        )
    stored, trained = opened.known.adapters, sorted({name for _, names, _ in everyone for name in names})
    if stored is None:
        raise OptionError(
            "The directory contains no adapters.", where=str(directory), next_step="Name a directory of adapters."
        )
    unlisted = [name for name in trained if not _is_listed(name, stored)]
    if unlisted and channel.rank == 0:
        logger.warning(
            f"{directory} also contains tensors of the base that modules_to_save and bias do not list, such as an "
            f"embedding that PEFT has saved. This run reads and trains them: {'; '.join(fold(unlisted))}."
        )
    return LoRAConfig(
        r=stored.r,
        lora_alpha=stored.alpha,
        rslora=stored.rslora,
        lora_dropout=stored.dropout,
        target_modules=layer_patterns(leaf for leaf, states in leaves.items() if True in states),
        trainable_modules=[re.escape(name) for name in trained] or None,
        base_model_name_or_path=stored.base.location or None,
    )


def _is_listed(name: str, adapters: Adapters) -> bool:
    """Return whether the configuration of adapters lists a tensor of the base as trained."""
    module, _, last = name.rpartition(".")
    listed = any(f".{module}".endswith(f".{one}") for one in adapters.trainable_modules)
    return listed or (last == "bias" and adapters.trainable_bias is not None)


def _rules(model: Any) -> RuleSet:
    return model_rules(describe_model(model), describe_roles(live_roles.model_roles(model))[MODEL_STATE])


def _layers(opened: OpenedCheckpoint, rules: RuleSet) -> tuple[dict[str, set[bool]], list[str], list[str]]:
    """Return whether layers have adapters, by the last part of their names; names of trained tensors; and faults."""
    stored = opened.catalog.roles[MODEL_STATE]
    adapted = {name.removesuffix(f".{B}{_WEIGHT}") for name in stored if name.endswith(f".{B}{_WEIGHT}")}
    trained = {name for name in stored if not is_adapter(name)}
    leaves: dict[str, set[bool]] = {}
    names: list[str] = []
    faults: list[str] = []
    for rule in rules.rules:
        (target, *_) = rule.targets
        if trained.intersection(rule.sources):
            names.append(target)
        parts = {source.removesuffix(_WEIGHT) in adapted for source in rule.sources}
        if target.endswith(_WEIGHT):
            layer = target.removesuffix(_WEIGHT)
            leaves.setdefault(layer.rpartition(".")[2], set()).update(parts)
            if len(parts) > 1:
                faults.append(f"{layer}: some of its parts have adapters, and the model fuses them")
    return leaves, names, faults


def replaced_from_pretrained(owner: Any) -> Any:
    """Return the replacement for ``PretrainedModel.from_pretrained``."""
    original = vars(owner)["from_pretrained"].__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        given = reader_options()
        if given is not None:
            if args:
                raise OptionError(
                    "from_pretrained with flex_checkpoint: true does not support positional arguments of the model.",
                    where=f"{cls.__name__}.from_pretrained",
                    evidence=[f"{count_text(len(args), 'argument')} after the path"],
                    next_step="Pass them as keyword arguments.",
                )
            return _from_pretrained(cls, pretrained_model_name_or_path, given, kwargs)
        model = original(cls, pretrained_model_name_or_path, *args, **kwargs)
        if isinstance(model, Layer):
            weight_sources.note_unverified(
                model, f"{cls.__name__}.from_pretrained({str(pretrained_model_name_or_path)!r})"
            )
        return model

    return classmethod(from_pretrained)


def replaced_from_adapters(owner: Any) -> Any:
    """Return the replacement for ``LoRAModel.from_pretrained``."""
    original = vars(owner)["from_pretrained"].__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, model: Any, lora_path: Any, **kwargs: Any) -> Any:
        given = reader_options()
        if given is None:
            return original(cls, model, lora_path, **kwargs)
        return read_adapters(cls, model, lora_path, given, kwargs)

    return classmethod(from_pretrained)  # type: ignore[arg-type]
