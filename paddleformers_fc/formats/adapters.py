"""Files of LoRA adapters in the formats of Hugging Face PEFT and of PaddleFormers.

PEFT's ``adapter_model.safetensors`` contains canonical tensors, with the prefix ``base_model.model.``. The canonical
``lora_A`` of a fused layer is written once per part. The copies must be equal when they are read, because separately
trained adapters do not fit into a fused layer. Unsupported variants of LoRA (such as DoRA), initializations that change
the base (such as PiSSA) and unknown keys with a value are rejected.

PaddleFormers' ``peft_model-*.safetensors`` contain the tensors of the model on one rank, ``lora_A`` [in, r] and
``lora_B`` [r, out], with fused layers. The order inside fused feed-forward layers depends on the tensor-parallel degree
in ``lora_config.json``.
"""

from __future__ import annotations

import os.path
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from paddleformers_fc.errors import FormatError, MappingError, NotACheckpoint, OptionError
from paddleformers_fc.families import ModelTensor, bind, family_for
from paddleformers_fc.families.description import A, Adapters, B, Base, ModelDescription, is_adapter, shared_inputs
from paddleformers_fc.families.enumerate import enumerate_tensors, recognised_tensors
from paddleformers_fc.families.names import Names
from paddleformers_fc.families.stated import canonical_ties
from paddleformers_fc.families.undescribed import completed
from paddleformers_fc.formats.built_model import built_model
from paddleformers_fc.formats.catalog import damaged, malformed
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    CheckList,
    Config,
    ExportWriter,
    FileFacts,
    Format,
    OpenedCheckpoint,
    OutputFile,
    StoredModel,
    config_bytes,
    grouped_by_size,
    parse_config,
    tensor_header,
)
from paddleformers_fc.formats.huggingface import OF_PADDLE, indexed_files, read_config, read_files, weight_index
from paddleformers_fc.formats.stock_checkpoint import model_description
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard, ShardsByRole
from paddleformers_fc.mapping import Rule, RuleSet, TensorSpec, Tie
from paddleformers_fc.mapping.rules import moving
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, FileChecksums, read_checksums, read_exported
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.json_io import MAX_DOCUMENT_BYTES
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text

WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
_CORRECT = "Correct the file, or save the adapters again."

_PREFIX, _BASE, _WEIGHT = "base_model.model.", ".base_layer.", ".weight"
_BIASES = {None: "none", "lora": "lora_only", "all": "all"}
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication", "megatron_config"),
    *("alora_invocation_tokens", "trainable_token_indices", "target_parameters", "arrow_config", "velora_config"),
    *("monteclora_config", "use_bdlora"),
)
"""Keys of variants that change the meaning of the stored tensors, and that PaddleFormers does not support."""

_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "bias", "lora_dropout"),
    *("base_model_name_or_path", "init_lora_weights"),
)
_NEUTRAL = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "exclude_modules", "fan_in_fan_out"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
)
"""Keys of PEFT that do not change the meaning of the stored tensors, including settings of initializations."""

_KEEPS_BASE = ("gaussian", "eva", "orthogonal")
"""Initializations that keep the base; others, such as pissa and loftq, change its weights."""

LORA_CONFIG_NAME = "lora_config.json"
LORA_INDEX_NAME = "peft_model.safetensors.index.json"
_UNSUPPORTED_LORA = ("loraga", "do_qat", "pissa", "use_mora", "lora_use_mixer", "enable_lora_list")
"""Keys of variants that change the base or the meaning of the stored tensors."""
_ROUNDED = (1 - 1e-6, 1 + 1e-6)
"""Range of the stored scaling, relative to the scaling that the other values give."""


def _number(value: float) -> float:
    """Return an integral number as an int, as configurations write it."""
    return int(value) if value == int(value) else value


def _unpaired(names: Collection[str]) -> Iterator[str]:
    """Yield the adapter tensors whose counterpart, ``lora_A`` or ``lora_B``, is missing."""
    for name in names:
        module = name.removesuffix(_WEIGHT)
        layer, _, end = module.rpartition(".")
        other = f"{layer}.{B if end == A else A}{name.removeprefix(module)}"
        if is_adapter(name) and other not in names:
            yield f"{name}: {other} is missing"


def _shape_faults(model: ModelDescription, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Yield the adapter tensors whose shape does not match their rank and layer."""
    names = Names(family_for(model.config), model)
    for name, spec in specs.items():
        shapes = [kind.shape(numbers) for kind, numbers in names.declared(name)] if is_adapter(name) else []
        expected = " or ".join(str([*one]) for one in shapes if one is not None)
        if expected and spec.shape not in shapes:
            yield f"{name}: stored {list(spec.shape)}, expected {expected}"


def _read_config(directory: AnyPath, name: str, checksums: FileChecksums | None) -> dict[str, Any]:
    """Return the configuration of adapters after comparing it with its checksum, if one is recorded."""
    raw = read_exported(directory, checksums, name, MAX_DOCUMENT_BYTES)
    return parse_config(raw, directory / name, _CORRECT)


def _adapters(values: Mapping[str, Any], directory: AnyPath) -> Adapters:
    kind = str(values.get("peft_type"))
    found = [f"peft_type: {kind}"] if kind.upper() != "LORA" else []
    texts = {key: f"{key}: {value!r}"[:200] for key, value in values.items() if value}
    found += [texts[key] for key in _UNSUPPORTED if key in texts]
    found += [f"{text}: unknown" for key, text in texts.items() if key not in (*_READ, *_NEUTRAL, *_UNSUPPORTED)]
    bias, biases = str(values.get("bias") or "none"), {text: ours for ours, text in _BIASES.items()}
    found += [] if bias in biases else [f"bias: {bias!r}: unknown"[:200]]
    initial = values.get("init_lora_weights")
    if initial not in (None, True, False) and str(initial).lower() not in _KEEPS_BASE:
        found.append(f"init_lora_weights: {initial!r}: changes the base, and the files contain no base"[:200])
    if found:
        raise OptionError(
            "PaddleFormers does not support these adapters.",
            where=str(directory / ADAPTER_CONFIG_NAME),
            evidence=found,
            next_step="Use adapters of peft_type LORA with one rank and one scaling for all layers, on their own base.",
        )
    given = {
        "rslora": values.get("use_rslora") or False,
        "trainable_modules": values.get("modules_to_save") or [],
        "trainable_bias": biases[bias],
    }
    return _converted(values, given, str(directory / ADAPTER_CONFIG_NAME))


def _converted(values: Mapping[str, Any], own: Mapping[str, Any], where: str) -> Adapters:
    """Convert the content of a configuration file to adapters.

    Args:
        values: the content of the file.
        own: fields that the two formats have under different keys.
        where: the file.
    Raises:
        FormatError: a value has the wrong type or is out of range.
    """
    targets = values.get("target_modules")
    given = {
        "r": values.get("r"),
        "alpha": values.get("lora_alpha"),
        "target_modules": [targets] if isinstance(targets, str) else targets or [],
        "dropout": values.get("lora_dropout") or 0.0,
        "base": Base(str(values.get("base_model_name_or_path") or "")),
        **own,
    }
    try:
        return msgspec.convert(given, Adapters)
    except msgspec.ValidationError as error:
        raise FormatError(
            "Invalid configuration of adapters.", where=where, evidence=[str(error)], next_step=_CORRECT
        ) from error


def _is_of_variant(name: str) -> bool:
    """Return whether a tensor belongs to a variant of LoRA: a magnitude, an embedding, or a bias of an adapter."""
    return "lora_" in name and not name.endswith((f".{A}{_WEIGHT}", f".{B}{_WEIGHT}"))


def canonical_name(name: str) -> str:
    """Return the canonical name of a PEFT tensor."""
    return name.removeprefix(_PREFIX).replace(_BASE, ".")


def _peft_name(name: str, adapted: Collection[str]) -> str:
    """Return PEFT's name of a canonical tensor. Tensors of a layer with an adapter are in ``base_layer``."""
    module, _, last = name.rpartition(".")
    inside = not is_adapter(name) and module in adapted
    return f"{_PREFIX}{module}{_BASE}{last}" if inside else f"{_PREFIX}{name}"


def _one_file(name: str, weights: Mapping[str, Shard]) -> tuple[OutputFile, ...]:
    """Return a single file for all adapters; it has no size limit, because adapters are small."""
    return tuple(OutputFile(name, MODEL_STATE, group) for group in grouped_by_size(weights, sys.maxsize))


def _peft_rules(checkpoint: OpenedCheckpoint) -> RuleSet:
    """Return the rules of PEFT's tensors: canonical tensors, with one copy per layer of shared tensors.

    Raises:
        OptionError: the checkpoint contains no adapters.
    """
    require_adapters(checkpoint)
    shared, sources = shared_inputs(checkpoint.rules), checkpoint.rules.mapping().sources
    adapted = _adapted(name for rule in checkpoint.rules.rules for name in rule.sources)
    shared |= {name: (name, *copies) for name, copies in _tied_copies(checkpoint.known).items()}
    targets: dict[str, TensorSpec] = {}
    rules: list[Rule] = []
    ties: list[Tie] = []
    for name, spec in sources.items():
        owner, *copies = (_peft_name(copy, adapted) for copy in shared.get(name, (name,)))
        targets |= dict.fromkeys((owner, *copies), spec)
        rules.append(moving(name, owner, spec.shape))
        ties.extend(Tie(owner, copy) for copy in copies)
    return RuleSet(targets, tuple(rules), tuple(ties))


def _peft_files(checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
    """Return the single file, with the copies that PEFT stores."""
    weights = dict(layout.get(MODEL_STATE, {}))
    for tie in _peft_rules(checkpoint).ties:
        weights[tie.alias] = msgspec.structs.replace(weights[tie.owner], name=tie.alias)
    return _one_file(WEIGHTS_NAME, weights)


def _peft_documents(checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the configuration of the adapters."""
    names = [canonical_name(one.name) for file in files for one in file.tensors]
    values = _configuration(require_adapters(checkpoint), names, _layers(checkpoint))
    return {ADAPTER_CONFIG_NAME: config_bytes(values)}


PEFT_WRITER = ExportWriter(
    marks=(ADAPTER_CONFIG_NAME, WEIGHTS_NAME),
    rules=_peft_rules,
    files=_peft_files,
    header=partial(tensor_header, {"format": "pt"}),
    documents=_peft_documents,
)


def require_adapters(checkpoint: OpenedCheckpoint) -> Adapters:
    """Return the adapters of a checkpoint.

    Raises:
        OptionError: it contains none.
    """
    adapters = checkpoint.known.adapters
    if adapters is None:
        raise OptionError(
            "The checkpoint contains a complete model and no adapters.",
            where=str(checkpoint.catalog.root),
            next_step="Export it as a model.",
        )
    return adapters


def check_rewritable(checkpoint: OpenedCheckpoint) -> None:
    """Check that a checkpoint can be exported, or converted to another format than a flex checkpoint.

    Raises:
        OptionError: it contains adapters in PEFT's format.
    """
    if checkpoint.format is PEFT:
        root = str(checkpoint.catalog.root)
        raise OptionError(
            f"{root} contains adapters in PEFT's format, which can only be converted to a flex checkpoint.",
            where=root,
            evidence=[_base_line(checkpoint)],
            next_step=f"Convert them: {_conversion(root)}. FLEX can be exported in other formats, and merged with "
            f"--base BASE --accept-base. To train with the adapters as they are, set `lora_path: {root}` in the YAML.",
        )


def config_of_base(checkpoint: OpenedCheckpoint) -> dict[str, Any]:
    """Return the configuration of a checkpoint. Adapters in PEFT's format may lack it; then it is read from their base.

    Raises:
        OptionError: the base is not a directory on this machine with a configuration.
        FlexError: the configuration is malformed or damaged.
    """
    if checkpoint.config or checkpoint.format is not PEFT:
        return checkpoint.config
    location, root = require_adapters(checkpoint).base.location, str(checkpoint.catalog.root)
    found = read_config(Path(location)) if location and os.path.isdir(location) else {}
    if not found:
        raise OptionError(
            f"{root} contains adapters in PEFT's format without the {CONFIG_NAME} of their base.",
            where=root,
            evidence=[_base_line(checkpoint), f"this machine has no directory of this name with a {CONFIG_NAME}"],
            next_step=f"Name a directory with it: {_conversion(root)}. To train with the adapters as they are, set "
            f"`lora_path: {root}` in the YAML.",
        )
    return found


def _conversion(root: str) -> str:
    return f"paddleformers-fc convert {shlex.quote(root)} FLEX --config BASE"


def _base_line(checkpoint: OpenedCheckpoint) -> str:
    return f"the base: {require_adapters(checkpoint).base.location or 'not named'}"


def _adapted(names: Iterable[str]) -> set[str]:
    """Return the canonical layers with adapters, from the names of all tensors."""
    ending = f".{B}{_WEIGHT}"
    return {name.removesuffix(ending) for name in names if name.endswith(ending)}


def _by_module(names: Iterable[str]) -> dict[str, set[str]]:
    """Group the last parts of names by module."""
    found: dict[str, set[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        found.setdefault(module, set()).add(last)
    return found


def _tied_copies(model: ModelDescription) -> dict[str, tuple[str, ...]]:
    """Return the canonical tensors with aliases, and their aliases. PEFT trains a copy of a tied module."""
    ties = canonical_ties(model)
    return {owner: tuple(alias for alias, other in ties.items() if other == owner) for owner in ties.values()}


def _layers(checkpoint: OpenedCheckpoint) -> dict[str, set[str]]:
    """Return the canonical tensors of the complete model by module; empty if the configuration lacks a size."""
    model = checkpoint.known
    try:
        family = family_for(model.config)
        tensors = [one.under(tp=1) for one in enumerate_tensors(family, model)]
        names = {*bind(family, model, tensors).mapping().sources, *canonical_ties(model)}
    except MappingError:
        return {}
    return _by_module(names)


def _configuration(adapters: Adapters, names: Collection[str], layers: Mapping[str, set[str]]) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``."""
    adapted, others = _adapted(names), _by_module(name for name in names if not is_adapter(name))
    # PEFT stores trained modules only as a whole, with all of their tensors.
    saved = sorted(module for module in others.keys() - adapted if others[module] == layers.get(module))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base.location or None,
        "inference_mode": True,
        "r": adapters.r,
        "lora_alpha": _number(adapters.alpha),
        "lora_dropout": adapters.dropout,
        "use_rslora": adapters.rslora,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "bias": _BIASES.get(adapters.trainable_bias, "none"),
        "target_modules": sorted(_targets(adapted, layers)),
        "modules_to_save": saved or None,
    }


def _targets(adapted: set[str], layers: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the names by which PEFT finds layers: only the last part if all layers with it have adapters."""
    by_leaf: dict[str, set[str]] = {}
    for module in adapted:
        by_leaf.setdefault(module.rpartition(".")[2], set()).add(module)
    for leaf, modules in by_leaf.items():
        every = {module for module in layers if module.rpartition(".")[2] == leaf}
        yield from [leaf] if every == modules else sorted(modules)


def _verify(format: Format, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
    """Check the recorded checksums of an export, and the names of the tensors."""
    if not exists(directory / CHECKSUMS_NAME):
        checks.not_compared(f"there is no {CHECKSUMS_NAME}, which exports of this package have")
    with checks.required("tensors"):
        opened = format.open(directory, level)
    checks.passed("tensors", f"{count_text(opened.catalog.count, 'tensor')} of adapters")
    return opened


def _is_peft(directory: AnyPath) -> bool:
    """Return whether there is a configuration of adapters."""
    return exists(directory / ADAPTER_CONFIG_NAME)


def _open_peft(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    """Open adapters in PEFT's format, with their tensors in canonical names.

    Args:
        format: :data:`PEFT`.
        directory: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        verify: how files are compared with ``flex_checksums.json``, as for open weights.
        config: not used.
    Raises:
        NotACheckpoint: a file is missing.
        OptionError: a variant of LoRA that PaddleFormers does not have.
        FormatError, Corrupt: a file is malformed or damaged.
    """
    if not exists(directory / WEIGHTS_NAME):
        raise NotACheckpoint(
            f"{directory} has {ADAPTER_CONFIG_NAME} and no {WEIGHTS_NAME}.",
            where=str(directory),
            next_step="Save the adapters again with PEFT, in safetensors format.",
        )
    checksums = read_checksums(directory)
    read = read_files(directory / WEIGHTS_NAME, {WEIGHTS_NAME: []}, checksums, verify, [ADAPTER_CONFIG_NAME])
    adapters = _adapters(_read_config(directory, ADAPTER_CONFIG_NAME, checksums), directory)
    names = read.headers[WEIGHTS_NAME].tensors
    faults = [name for name in names if not name.startswith(_PREFIX) or _is_of_variant(name)]
    if faults:
        what = f"{count_text(len(faults), 'tensor')} of {WEIGHTS_NAME} are not of LoRA adapters."
        next_step = "Use adapters of peft_type LORA, without magnitudes, embeddings or adapter biases."
        raise malformed(directory / WEIGHTS_NAME, what, faults[:8], next_step)
    shards = (
        (msgspec.structs.replace(shard, name=canonical_name(shard.name)), file, begin, width)
        for shard, file, begin, width in read.shards({WEIGHTS_NAME: names})
    )
    opened = read.opened(
        format, shards, read_config(directory, checksums or {}), FileFacts(checksums, adapters=adapters)
    )
    faults = [*opened.catalog.faults(), *_unpaired(opened.catalog.roles[MODEL_STATE])]
    if faults or not names:
        what = f"{WEIGHTS_NAME} does not contain complete adapters."
        evidence = faults or ["it contains no tensor"]
        raise damaged(directory / WEIGHTS_NAME, what, evidence, "Save the adapters again with PEFT.")
    return opened


def _describe_peft(checkpoint: OpenedCheckpoint) -> StoredModel:
    """Describe the model by its configuration and adapters; stored names are canonical, so there are no rules."""
    model = ModelDescription(checkpoint.config, adapters=checkpoint.facts.adapters)
    return StoredModel(RuleSet({}, ()), model)


def _build_peft(checkpoint: OpenedCheckpoint) -> StoredModel:
    """Return the model with adapters that has the stored tensors."""
    return built_model(checkpoint, require_adapters(checkpoint))


_ADVICE = "Start from them: set lora_path in the YAML, or call load_open_weights(model, directory) with adapters."

PEFT = Format(
    name="peft",
    title="adapters (Hugging Face PEFT)",
    predicate="contains adapters",
    advice=_ADVICE,
    checks=("tensors",),
    recognises=_is_peft,
    opener=_open_peft,
    verifier=_verify,
    describe=_describe_peft,
    build=_build_peft,
    canonical=True,
    loadable=False,
)


def _adapters_of_lora(values: Mapping[str, Any], directory: AnyPath) -> tuple[Adapters, int]:
    """Return the adapters, and the tensor-parallel degree that saved them."""
    found = [f"{key}: {values[key]!r}"[:200] for key in _UNSUPPORTED_LORA if values.get(key)]
    if found:
        raise OptionError(
            "These adapters are not supported.",
            where=str(directory / LORA_CONFIG_NAME),
            evidence=found,
            next_step="Use plain LoRA or rsLoRA.",
        )
    given = {
        "rslora": values.get("rslora") or False,
        "trainable_modules": values.get("trainable_modules") or [],
        "trainable_bias": values.get("trainable_bias"),
        "plus_scale": values.get("lora_plus_scale") or 1.0,
    }
    where = str(directory / LORA_CONFIG_NAME)
    adapters = _converted(values, given, where)
    scaling = adapters.scaling
    stored = scaling if values.get("scaling") is None else values["scaling"]
    degree = values.get("tensor_model_parallel_size") or 1
    faults = []
    low, high = sorted(scaling * factor for factor in _ROUNDED)
    if not isinstance(stored, int | float) or not low <= stored <= high:
        faults.append(f"scaling: {stored!r}"[:200] + f"; r, lora_alpha and rslora give {scaling}")
    if not isinstance(degree, int):
        faults.append(f"tensor_model_parallel_size: {degree!r}")
    if faults:
        raise FormatError("Invalid configuration of adapters.", where=where, evidence=faults, next_step=_CORRECT)
    return adapters, max(degree, 1)


def _bound(model: ModelDescription, specs: Mapping[str, TensorSpec], degree: int) -> tuple[ModelDescription, RuleSet]:
    """Return the rules of adapters that were saved under this tensor-parallel degree."""
    family = family_for(model.config)
    declared = recognised_tensors(family, model, specs)
    under: list[ModelTensor] = [one.under(tp=degree) for one in declared]
    if model.is_fleet is not None:
        return model, bind(family, model, under)
    return completed(family, model, under)


def _lora_rules(checkpoint: OpenedCheckpoint) -> RuleSet:
    """Return the rules of the model on one rank.

    Raises:
        OptionError: the checkpoint contains no adapters.
    """
    require_adapters(checkpoint)
    return _bound(checkpoint.known, checkpoint.rules.targets, 1)[1]


def _lora_files(checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
    return _one_file("peft_model-00001-of-00001.safetensors", layout.get(MODEL_STATE, {}))


def _lora_documents(checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the index and the configuration."""
    adapters = require_adapters(checkpoint)
    config = {
        "r": adapters.r,
        "lora_alpha": _number(adapters.alpha),
        "scaling": adapters.scaling,
        "rslora": adapters.rslora,
        "target_modules": list(adapters.target_modules),
        "trainable_modules": list(adapters.trainable_modules) or None,
        "trainable_bias": adapters.trainable_bias,
        "lora_dropout": adapters.dropout,
        "lora_plus_scale": adapters.plus_scale,
        "tensor_model_parallel_size": 1,
        "base_model_name_or_path": adapters.base.location or None,
    }
    return {LORA_INDEX_NAME: config_bytes(weight_index(files)), LORA_CONFIG_NAME: config_bytes(config)}


PADDLEFORMERS_LORA_WRITER = ExportWriter(
    marks=(LORA_INDEX_NAME, LORA_CONFIG_NAME),
    rules=_lora_rules,
    files=_lora_files,
    header=partial(tensor_header, {"format": OF_PADDLE[0]}),
    documents=_lora_documents,
    numbered=r"peft_model-.*\.safetensors",
)


def _is_lora(directory: AnyPath) -> bool:
    """Return whether there is an index of adapters and their configuration."""
    return exists(directory / LORA_INDEX_NAME) and exists(directory / LORA_CONFIG_NAME)


def _open_lora(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    """Open adapters that PaddleFormers or an export wrote.

    Args:
        format: :data:`PADDLEFORMERS_LORA`.
        directory: with ``lora_config.json``, the index, and the ``config.json`` of the model.
        verify: how files are compared with ``flex_checksums.json``, as for open weights.
        config: not used.
    Raises:
        OptionError: the adapters are not supported, such as LoRA-GA.
        FormatError, Corrupt: a file is missing, malformed or damaged.
    """
    checksums = read_checksums(directory)
    index = directory / LORA_INDEX_NAME
    files = indexed_files(index, checksums)
    if not files:
        raise malformed(index, "The index lists no tensors.", (), "Save the adapters again.")
    read = read_files(index, files, checksums, verify, [LORA_INDEX_NAME, LORA_CONFIG_NAME])
    adapters, degree = _adapters_of_lora(_read_config(directory, LORA_CONFIG_NAME, checksums), directory)
    shards = read.shards({name: header.tensors for name, header in read.headers.items()})
    facts = FileFacts(checksums, adapters=adapters, degree=degree)
    return read.opened(format, shards, read_config(directory, checksums or {}), facts)


def _describe_lora(checkpoint: OpenedCheckpoint) -> StoredModel:
    """Return the rules between the stored tensors and canonical adapters."""
    catalog, facts = checkpoint.catalog, checkpoint.facts
    specs = {name: TensorSpec(one.shape, one.dtype) for name, one in catalog.roles[MODEL_STATE].items()}
    model = model_description(catalog.root, checkpoint.config)
    model = structs.replace(model, adapters=facts.adapters, partial=False)
    model, rules = _bound(model, specs, facts.degree)
    faults = [*_unpaired(specs), *_shape_faults(model, specs)]
    if faults:
        what = f"{catalog.root} does not contain complete adapters for {LORA_CONFIG_NAME} and {CONFIG_NAME}."
        raise damaged(catalog.root, what, faults, "Save the adapters again.")
    return StoredModel(rules, model)


PADDLEFORMERS_LORA = Format(
    name="paddleformers-lora",
    title="adapters (PaddleFormers)",
    predicate="contains adapters of PaddleFormers",
    advice=_ADVICE,
    checks=("tensors",),
    recognises=_is_lora,
    opener=_open_lora,
    verifier=_verify,
    describe=_describe_lora,
    loadable=False,
)
