"""Check that LoRA adapters can be saved and loaded, and report every reason why not.

A Trainer checks its adapters when it is constructed; ``save``, ``load`` and ``LoRAModel.from_pretrained`` check them
before they read or write. All ranks raise the same error.

Time: one pass over the layers of the model and one exchange. No tensor is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.errors import OptionError
from paddleformers_fc.families.description import A
from paddleformers_fc.trainer import live_roles
from paddleformers_fc.trainer.library import has_adapters, unwrap_model

_EXPERT_ATTRIBUTES = ("expert", "no_sync", "color")


def check_adapters(model: Any, channel: Channel) -> None:
    """Check that the adapters of a model can be saved and loaded. Every rank must call.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        OptionError: the same on every rank; it lists every unsupported option and layer with the reason.
    """
    if has_adapters(unwrap_model(model)):
        run_on_all(channel, "checking the adapters", partial(check_own_adapters, model))


def check_own_adapters(model: Any) -> None:
    """Check that the adapters of a model on this rank, if it has any, can be saved and loaded."""
    model = unwrap_model(model)
    _raise_faults(list(_faults(model)) if has_adapters(model) else [])


def check_trained(model: Any, channel: Channel) -> None:
    """Check that at least one rank trains a tensor of a model with adapters. Every rank must call.

    A single pipeline stage may have no trained tensor.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        OptionError: the same on every rank.
    """
    model = unwrap_model(model)
    if not has_adapters(model):
        return
    trained = all_gather_checked(
        channel,
        "counting the trained tensors",
        lambda: sum(not parameter.stop_gradient for parameter in model.parameters()),
        int,
    )
    _raise_faults([] if any(trained) else ["target_modules and trainable_modules: no tensor of the model is trained"])


def _raise_faults(faults: Sequence[str]) -> None:
    if faults:
        raise OptionError(
            "flex_checkpoint: true does not support these adapters.",
            where="LoRA",
            evidence=faults,
            next_step="Change the configuration of the adapters, or remove flex_checkpoint.",
        )


def _faults(model: Any) -> Iterator[str]:
    config = model.lora_config
    quantization = getattr(model.config, "quantization_config", None)
    layers = [(name, layer) for name, layer in model.model.named_sublayers()]
    if model.quantized or (quantization is not None and quantization.is_weight_quantize()):
        yield "a quantized base: PaddleFormers stores its weights and scales in kernel-specific layouts"
    if config.loraga:
        yield "loraga: PaddleFormers changes the base when it initialises the adapters, and no file contains the result"
    if config.do_qat:
        yield "do_qat: the quantization scales are not parameters of a declared layer"
    for kind, reason in _LAYERS.items():
        names = [name for name, layer in layers if _is_of(layer, (kind,))]
        if names:
            yield f"{kind} ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}"
    unknown = [(name, layer) for name, layer in layers if _is_unknown(layer)]
    if unknown:
        name, layer = unknown[0]
        more = ", ..." if len(unknown) > 1 else ""
        yield f"{type(layer).__name__} ({name}{more}): unknown class of adapters; known are {', '.join(_SUPPORTED)}"
    averaged = [name for name, layer in layers if _is_averaged(layer)]
    if averaged:
        yield (
            f"expert parallelism: PaddleFormers does not mark adapters of experts ({averaged[0]}, ...) as parameters "
            "of one rank, and averages adapters of different experts; leave experts out of target_modules"
        )
    yield from _split_ties(model)
    scaling = config.lora_alpha / (math.sqrt(config.r) if config.rslora else config.r)
    for name, layer in layers:
        if _is_of(layer, _SUPPORTED) and not math.isclose(getattr(layer, "scaling", scaling), scaling):
            yield f"{name}: its scaling is {layer.scaling}, but lora_alpha and r give {scaling}"
            break
    merged = [name for name, layer in layers if getattr(layer, "merged", False)]
    if merged:
        yield f"{merged[0]} is merged into its base; call unmerge() of the model"


_LAYERS: Mapping[str, str] = {
    "QuantizationLoRABaseLinear": "its base is quantized",
    "LoRAConv2D": "no model family declares a convolution with adapters",
    "LoRAMoeExperts": "PaddleFormers does not describe the shards of adapters of stacked experts",
    "FleetLoRAMoeExperts": "it needs PaddleFleet's grouped experts, and PaddleFleet is on no public index",
}

# PaddleFleet's subclasses have the same parameters.
_SUPPORTED = (
    "LoRALinear",
    "ColumnParallelLoRALinear",
    "ColumnSequenceParallelLoRALinear",
    "RowParallelLoRALinear",
    "RowSequenceParallelLoRALinear",
)


def _is_unknown(layer: Any) -> bool:
    """Return whether a layer has adapter parameters and its class is in neither table."""
    if _is_of(layer, (*_LAYERS, *_SUPPORTED)):
        return False
    return any("lora_" in name for name, _ in layer.named_parameters(include_sublayers=False))


def _is_of(layer: Any, classes: Sequence[str]) -> bool:
    return any(kind.__name__ in classes for kind in type(layer).__mro__)


def _split_ties(model: Any) -> Iterator[str]:
    """Yield tied tensors that a pipeline, which copies them, trains under only one of their names."""
    patterns = model.lora_config.trainable_modules or ()
    if getattr(model.config, "pipeline_model_parallel_size", 1) <= 1 or not patterns:
        return
    for alias, owner in live_roles.tied(model).items():
        matched = [name for name in (owner, alias) if any(re.fullmatch(text, name) for text in patterns)]
        if len(matched) == 1:
            yield (
                f"trainable_modules: {matched[0]} is trained, and {owner} and {alias} are tied: under pipeline "
                "parallelism they are copies, and the other copy would not change; name both"
            )


def _is_averaged(layer: Any) -> bool:
    """Return whether PaddleFormers averages an adapter over ranks although its weight is an expert of this rank."""
    adapter, weight = getattr(layer, A, None), getattr(layer, "weight", None)
    if adapter is None or weight is None:
        return False
    return any(bool(getattr(weight, name, None)) != bool(getattr(adapter, name, None)) for name in _EXPERT_ATTRIBUTES)
