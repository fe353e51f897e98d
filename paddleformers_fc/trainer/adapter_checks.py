"""The refusal of adapters that cannot be saved or loaded, with every reason.

A Trainer checks them when it is constructed; functions for scripts and readers of adapters check them before they read
or write. All ranks raise the same error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.errors import OptionError
from paddleformers_fc.families.description import A
from paddleformers_fc.trainer import live_roles
from paddleformers_fc.trainer.library import has_adapters, unwrap_model

_MARKS_OF_EXPERTS = ("expert", "no_sync", "color")


def check_supported(model: Any, channel: Channel) -> None:
    """Refuse adapters that cannot be saved or loaded. Every rank must call.

    Args:
        model: any model, or a wrapper of it.
        channel: all ranks of the job.
    Raises:
        OptionError: the same on every rank: with every option and layer of PaddleFormers that is not supported, and
            the reason.
    """
    model = unwrap_model(model)
    if has_adapters(model):
        run_on_all(channel, "checking the adapters", lambda: _raise_faults(list(_faults(model))))


def check_trained(model: Any, channel: Channel) -> None:
    """Refuse adapters none of whose tensors is trained on any rank. Every rank must call.

    A stage of a pipeline may have no trained tensor.

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
        yield "a quantized base: PaddleFormers stores its weights and scales in layouts of their kernels"
    if config.loraga:
        yield "loraga: PaddleFormers changes the base when it initialises the adapters, so that no file contains it"
    if config.do_qat:
        yield "do_qat: the scales of quantization are no parameters of a declared layer"
    for kind, reason in _LAYERS.items():
        names = [name for name, layer in layers if _is_of(layer, (kind,))]
        if names:
            yield f"{kind} ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}"
    other = [(name, layer) for name, layer in layers if _is_unknown(layer)]
    if other:
        name, layer = other[0]
        more = ", ..." if len(other) > 1 else ""
        yield f"{type(layer).__name__} ({name}{more}): unknown class of adapters; known are {', '.join(_SUPPORTED)}"
    foreign = [name for name, layer in layers if _is_averaged(layer)]
    if foreign:
        yield (
            f"expert parallelism: PaddleFormers does not mark adapters of experts ({foreign[0]}, ...) as parameters of "
            "one rank, and averages those of different experts; leave experts out of target_modules"
        )
    yield from _split_ties(model)
    merged = [name for name, layer in layers if getattr(layer, "merged", False)]
    if merged:
        yield f"{merged[0]} is merged into its base; call unmerge() of the model"


_LAYERS: Mapping[str, str] = {
    "QuantizationLoRABaseLinear": "its base is quantized",
    "LoRAConv2D": "no family declares a convolution with adapters",
    "LoRAMoeExperts": "PaddleFormers does not describe the shards of adapters of stacked experts",
    "FleetLoRAMoeExperts": "it needs PaddleFleet's grouped experts, and PaddleFleet is on no public index",
}

# Their subclasses for PaddleFleet have the same parameters.
_SUPPORTED = (
    "LoRALinear",
    "ColumnParallelLoRALinear",
    "ColumnSequenceParallelLoRALinear",
    "RowParallelLoRALinear",
    "RowSequenceParallelLoRALinear",
)


def _is_unknown(layer: Any) -> bool:
    """Return whether a layer has parameters of adapters, and is neither supported nor refused with a reason."""
    if _is_of(layer, (*_LAYERS, *_SUPPORTED)):
        return False
    return any("lora_" in name for name, _ in layer.named_parameters(include_sublayers=False))


def _is_of(layer: Any, classes: Sequence[str]) -> bool:
    return any(kind.__name__ in classes for kind in type(layer).__mro__)


def _split_ties(model: Any) -> Iterator[str]:
    """Yield tied tensors that are trained under one of their names only, in a pipeline, where each name has a copy."""
    patterns = model.lora_config.trainable_modules or ()
    if getattr(model.config, "pipeline_model_parallel_size", 1) <= 1 or not patterns:
        return
    for alias, owner in live_roles.tied(model).items():
        matched = [name for name in (owner, alias) if any(re.fullmatch(text, name) for text in patterns)]
        if len(matched) == 1:
            yield (
                f"trainable_modules: {matched[0]} is trained, and {owner} and {alias} are tied: under pipeline "
                "parallelism they are copies, and the other one would not change; name both"
            )


def _is_averaged(layer: Any) -> bool:
    """Return whether the weight of a layer belongs to the experts of this rank, and its adapter to all ranks."""
    adapter, weight = getattr(layer, A, None), getattr(layer, "weight", None)
    if adapter is None or weight is None:
        return False
    return any(bool(getattr(weight, mark, None)) != bool(getattr(adapter, mark, None)) for mark in _MARKS_OF_EXPERTS)
