"""Derive the mapping of the model of a directory of open weights, and optionally write it as a family.

The model's class is PaddleFormers'. Its layers are built without memory for their numbers, on one rank. Of the
weights only the headers are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.aoa import render
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.families import ModelTensor
from paddleformers_fc.families.aoa_text import with_ties
from paddleformers_fc.families.declarations import Geometry
from paddleformers_fc.formats.checkpoint import CONFIG_NAME
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.formats.registry import require_config
from paddleformers_fc.layout import Shard
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping import TensorSpec
from paddleformers_fc.verification.derivation.codegen import family_of, source_text
from paddleformers_fc.verification.derivation.derive import derive_rules
from paddleformers_fc.verification.derivation.layer_kinds import LayeredTensor, layer_kinds

_ARCHITECTURE = "ForCausalLM"
"""The architecture of a configuration that names none."""


class DerivedModel(msgspec.Struct, frozen=True):
    """The report of a derivation.

    Attributes:
        path: the directory as it was named.
        tensors: how many tensors the model has.
        statements: AOA text from the open weights to the model, on one rank; equal names are omitted.
        reasons: number of tensors by the reason that decides their mapping.
        notes: evidence that was not used.
        family: the file that was written, if any.
    """

    path: str
    tensors: int
    statements: list[str]
    reasons: dict[str, int]
    notes: list[str]
    family: str | None


def derive_model(
    directory: Path, settled: Sequence[str], native: bool, target: Path | None, fused: Sequence[str]
) -> DerivedModel:
    """Derive, prove and, if requested, write a family.

    Args:
        directory: open weights and ``config.json``.
        settled: AOA statements that answer questions.
        native: whether the statements of the model's class are used as a hint.
        target: where to write the family, if anywhere.
        fused: ``LAYER=GEOMETRY`` for layers that are fused in files too.
    Raises:
        FlexError: the model cannot be built, or its mapping is not determined.
    """
    given = dict(_fused_layer(text) for text in fused)
    if target is not None and target.exists():
        raise OptionError(f"{target} exists.", next_step="Name another file for the family, or remove this one.")
    stored = open_huggingface(directory).catalog.roles[MODEL_STATE]
    canonical = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in stored.items()}
    config = require_config(directory)
    tensors, hint = _model(directory, native)
    found = derive_rules(tensors, canonical, config, hint=hint, settled=settled)
    found.refuse_questions()
    if target is not None:
        family = family_of(str(config["model_type"]), found.rules, [one.tensor for one in tensors], config, given)
        target.write_text(source_text(family), encoding="utf-8")
    reasons: dict[str, int] = {}
    for reason in found.reasons.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    statements = render(with_ties(found.rules))
    family_path = None if target is None else str(target)
    return DerivedModel(str(directory), len(tensors), statements, reasons, list(found.notes), family_path)


def _fused_layer(text: str) -> tuple[str, Geometry]:
    layer, _, value = text.partition("=")
    known = [one.value for one in Geometry]
    if value not in known:
        raise OptionError(
            f"--fused {text} names no geometry.", evidence=[f"known: {', '.join(known)}"], next_step="LAYER=GEOMETRY"
        )
    return layer, Geometry(value)


def _model(directory: Path, native: bool) -> tuple[list[LayeredTensor], list[str]]:
    """Return the tensors of the model that PaddleFormers builds of a configuration, and its own statements."""
    import paddle
    from paddleformers.transformers import AutoConfig
    from paddleformers.transformers.auto import modeling

    try:
        config = AutoConfig.from_pretrained(str(directory))
        # A nested configuration of the text hides the architecture from the configuration's class, not from the file.
        (architecture,) = require_config(directory).get("architectures") or [_ARCHITECTURE]
        kind = getattr(modeling, modeling.get_task_name(architecture) or "AutoModel")
        model_class: Any = kind._get_model_class_from_config(str(directory), str(directory / CONFIG_NAME))
        with paddle.LazyGuard():
            model: Any = model_class._from_config(config)
        shards = describe_roles({MODEL_STATE: model.sharded_state_dict()})[MODEL_STATE]
        kinds = layer_kinds(model)
        hint = list(model._gen_aoa_config(model.config)["aoa_statements"]) if native else []
    except Exception as error:  # The code of a model's class may fail in any way.
        raise FlexError(
            "PaddleFormers cannot build this model.",
            where=str(directory / CONFIG_NAME),
            evidence=[f"{type(error).__name__}: {error}"],
            next_step="Without --native its AOA statements are not used; otherwise correct config.json or the class.",
        ) from error
    return [LayeredTensor(_tensor(shard), kinds[name]) for name, shard in shards.items()], hint


def _tensor(shard: Shard) -> ModelTensor:
    return ModelTensor(shard.name, shard.global_shape, shard.dtype, shard.cuts)
