"""Adapters as PaddleFormers stores them: ``peft_model-*.safetensors``, their index, and ``lora_config.json``.

Names and orientation are those of the model on one rank: ``lora_A`` [in, r] and ``lora_B`` [r, out], with fused layers.
The order of the outputs of a fused feed-forward layer depends on the degree of tensor parallelism that saved them.
``lora_config.json`` contains it. PaddleFormers reads such a directory with ``lora_path``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import Corrupt, FormatError, OptionError
from paddleformers_fc.families import ModelTensor, family_for
from paddleformers_fc.families.bind import bind
from paddleformers_fc.families.description import Adapters, Base, ModelDescription
from paddleformers_fc.families.enumerate import recognised_tensors
from paddleformers_fc.families.undescribed import completed
from paddleformers_fc.formats.catalog import Catalog, gather_shards
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    CheckList,
    ExportWriter,
    Format,
    OpenedCheckpoint,
    OutputFile,
    StoredModel,
    StoredShard,
    stored_boxes,
)
from paddleformers_fc.formats.huggingface import (
    FETCH_AGAIN,
    HUGGINGFACE,
    indexed_files,
    model_documents,
    refuse_unindexed,
)
from paddleformers_fc.formats.peft import (
    CORRECT_ADAPTERS,
    converted,
    parse_json_object,
    require_adapters,
)
from paddleformers_fc.formats.stock_checkpoint import model_description
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import RuleSet, TensorSpec
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.storage.dtypes import from_safetensors, item_size, to_safetensors
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, FileChecksums, read_checksums, verify_export
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.ranges import identities_of
from paddleformers_fc.storage.safetensors import FileLayout, layout_file, read_header
from paddleformers_fc.text import count_text, natural

LORA_CONFIG_NAME = "lora_config.json"
LORA_INDEX_NAME = "peft_model.safetensors.index.json"
_FILE = "peft_model-00001-of-00001.safetensors"
_UNSUPPORTED = ("loraga", "do_qat", "pissa", "use_mora", "lora_use_mixer", "enable_lora_list")
"""Keys of variants that change the base or the meaning of the stored tensors."""
_ROUNDED = (1 - 1e-6, 1 + 1e-6)
"""By what factors a stored scaling may differ from that of the other values."""


def open_paddleformers_lora(directory: AnyPath, verify: str = "size") -> OpenedCheckpoint:
    """Open adapters that PaddleFormers or an export wrote.

    Args:
        directory: with ``lora_config.json``, the index, and the ``config.json`` of the model.
        verify: how files are compared with ``flex_checksums.json``, as for open weights.
    Raises:
        OptionError: adapters that cannot be read, such as those of LoRA-GA.
        FormatError, Corrupt: a file is missing, malformed or damaged.
    """
    checksums = read_checksums(directory)
    files = _indexed(directory, checksums)
    if checksums is not None and verify != "off":
        verify_export(directory, checksums, verify, needed=[*files, LORA_INDEX_NAME, LORA_CONFIG_NAME])
    adapters, degree = _adapters(parse_json_object(directory, LORA_CONFIG_NAME), directory)
    identities = identities_of(directory / name for name in files)
    headers = {name: read_header(directory / name) for name in files}
    refuse_unindexed(directory / LORA_INDEX_NAME, files, headers)
    shards = [
        (Shard(tensor, from_safetensors(entry.dtype), entry.shape, whole(entry.shape)), name, entry.begin, width)
        for name, header in headers.items()
        for tensor, entry in header.tensors.items()
        for width in [item_size(entry.dtype)]
    ]
    tensors, contradictions = gather_shards(shards)
    if contradictions:
        raise Corrupt(
            "Files contradict each other.", where=str(directory), evidence=contradictions, next_step=FETCH_AGAIN
        )
    recorded = {name: checksums[name] for name in files if name in checksums} if checksums is not None else {}
    config = HUGGINGFACE.read_config(directory)
    catalog = Catalog(directory, {MODEL_STATE: tensors}, identities)

    def describe(config: dict[str, Any]) -> StoredModel:
        specs = {name: TensorSpec(one.shape, one.dtype) for name, one in tensors.items()}
        model = replace(model_description(directory, config), adapters=adapters, partial=False)
        model, rules = _bound(model, specs, degree)
        return StoredModel(rules, model)

    return OpenedCheckpoint(
        PADDLEFORMERS_LORA,
        catalog,
        config,
        lambda: describe(config),
        recorded,
        find_unrecorded=lambda: model_documents(directory, checksums),
        describe_as=describe,
    )


def _indexed(directory: AnyPath, checksums: FileChecksums | None) -> dict[str, list[str]]:
    """Return the tensors of every file of the index."""
    files = indexed_files(directory / LORA_INDEX_NAME, checksums)
    if not files:
        raise FormatError(
            "The index lists no tensors.", where=str(directory / LORA_INDEX_NAME), next_step="Save the adapters again."
        )
    return files


def _adapters(values: Mapping[str, Any], directory: AnyPath) -> tuple[Adapters, int]:
    """Return the adapters, and the degree of tensor parallelism that saved them."""
    found = [f"{key}: {values[key]!r}"[:200] for key in _UNSUPPORTED if values.get(key)]
    if found:
        raise OptionError(
            "These adapters are not supported.",
            where=str(directory / LORA_CONFIG_NAME),
            evidence=found,
            next_step="Use plain LoRA or rsLoRA.",
        )
    targets = values.get("target_modules")
    given = {
        "r": values.get("r"),
        "alpha": values.get("lora_alpha"),
        "rslora": values.get("rslora") or False,
        "target_modules": [targets] if isinstance(targets, str) else targets or [],
        "trainable_modules": values.get("trainable_modules") or [],
        "trainable_bias": values.get("trainable_bias"),
        "dropout": values.get("lora_dropout") or 0.0,
        "plus_scale": values.get("lora_plus_scale") or 1.0,
        "base": Base(str(values.get("base_model_name_or_path") or "")),
    }
    where = str(directory / LORA_CONFIG_NAME)
    adapters = converted(given, where)
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
        raise FormatError(
            "Invalid configuration of adapters.", where=where, evidence=faults, next_step=CORRECT_ADAPTERS
        )
    return adapters, max(degree, 1)


def _bound(model: ModelDescription, specs: Mapping[str, TensorSpec], degree: int) -> tuple[ModelDescription, RuleSet]:
    """Return the rules of adapters of a model under a degree of tensor parallelism, in whose order they are stored."""
    family = family_for(model.config)
    declared = recognised_tensors(family, model, specs)
    under: list[ModelTensor] = [one.under(tp=degree) for one in declared]
    if model.is_fleet is not None:
        return model, bind(family, model, under)
    return completed(family, model, under)


class PaddleFormersLoraWriter(ExportWriter):
    """The files of adapters for PaddleFormers: one file with its index, and the configuration."""

    marks = (LORA_INDEX_NAME, LORA_CONFIG_NAME)

    def rules(self, checkpoint: OpenedCheckpoint) -> RuleSet:
        """Return the rules of the model on one rank.

        Raises:
            OptionError: the checkpoint contains no adapters.
        """
        require_adapters(checkpoint)
        return _bound(checkpoint.known, checkpoint.rules.targets, 1)[1]

    def files(self, checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
        """Return one file of any size: adapters are small."""
        weights = layout.get(MODEL_STATE, {})
        tensors = tuple(weights[name] for name in sorted(weights, key=natural))
        return (OutputFile(_FILE, MODEL_STATE, tensors),)

    def names(self, role: str, rank: int, count: int) -> list[str]:
        """Return the name of the file."""
        return [_FILE]

    def header(self, path: Path, shards: Sequence[Shard]) -> FileLayout:
        """Return the header of the file."""
        entries = [(one.name, to_safetensors(one.dtype), one.global_shape) for one in shards]
        return layout_file(path, entries, {"format": "np"})

    def documents(self, checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
        """Return the index and the configuration."""
        adapters = require_adapters(checkpoint)
        index = {
            "metadata": {"total_size": sum(shard_bytes(one) for file in files for one in file.tensors)},
            "weight_map": {one.name: file.path for file in files for one in file.tensors},
        }
        alpha = int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha
        config = {
            "r": adapters.r,
            "lora_alpha": alpha,
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
        documents = {LORA_INDEX_NAME: index, LORA_CONFIG_NAME: config}
        return {
            name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in documents.items()
        }

    def owns(self, path: str) -> bool:
        """Return whether a file belongs to an older export."""
        numbered = path.startswith("peft_model-") and path.endswith(".safetensors")
        return numbered or path in (*self.marks, CHECKSUMS_NAME)


class PaddleFormersLoraFormat(Format):
    """Adapters of PaddleFormers."""

    name = "paddleformers-lora"
    title = "adapters (PaddleFormers)"
    predicate = "holds adapters of PaddleFormers"
    roles = (MODEL_STATE,)
    canonical = False
    loadable = False
    advice = "Start from them: lora_path in the YAML, or load_open_weights(model, directory) of a model with adapters."
    checks = ("tensors",)
    writer = PaddleFormersLoraWriter()

    def recognises(self, directory: AnyPath) -> bool:
        """Return whether there is an index of adapters and their configuration."""
        return exists(directory / LORA_INDEX_NAME) and exists(directory / LORA_CONFIG_NAME)

    def open(self, directory: AnyPath, verify: str) -> OpenedCheckpoint:
        """As :func:`open_paddleformers_lora`."""
        return open_paddleformers_lora(directory, verify)

    def read_config(self, directory: AnyPath) -> dict[str, Any]:
        """Return the ``config.json`` of the model."""
        return HUGGINGFACE.read_config(directory) if exists(directory / CONFIG_NAME) else {}

    def verify(self, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
        """Check the recorded checksums of an export, and that files contain what the index names."""
        if not exists(directory / CHECKSUMS_NAME):
            checks.not_compared(f"there is no {CHECKSUMS_NAME}, which exports of this package have")
        return checks.check(
            "tensors",
            lambda: open_paddleformers_lora(directory, level),
            lambda found: f"{count_text(found.catalog.count, 'tensor')} of adapters",
        )

    def shards(self, checkpoint: OpenedCheckpoint, role: str, names: Collection[str]) -> Iterator[StoredShard]:
        """Yield whole tensors."""
        return stored_boxes(checkpoint.catalog, role, names)


PADDLEFORMERS_LORA = PaddleFormersLoraFormat()
