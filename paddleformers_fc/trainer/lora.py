"""A live model with LoRA adapters: its description, the tensors that a checkpoint contains of it, and what is refused.

PaddleFormers wraps the model in a ``LoRAModel`` and replaces linear layers by layers with ``lora_A`` and ``lora_B``. It
freezes all other tensors, except for ``trainable_modules`` and biases that its configuration names. A checkpoint
contains adapters, trained tensors, and tensors that training changes without an optimizer. The rest is the base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.families.adapters import A, Adapters, Base, changed_outside, is_adapter
from paddleformers_fc.trainer.host_models import (
    LoRAConv2D,
    LoRAModel,
    LoRAMoeExperts,
    QuantizationLoRABaseLinear,
    unwrap_model,
)

_BASE = "_flex_base"
_MARKS_OF_EXPERTS = ("expert", "no_sync", "color")


def base_model(model: Any) -> Any:
    """Return a model without its wrappers, a ``LoRAModel`` among them."""
    model = unwrap_model(model)
    return model.model if isinstance(model, LoRAModel) else model


def describe_adapters(model: Any) -> Adapters | None:
    """Describe the adapters of a model, or of a wrapper of it; None if it has none."""
    model = unwrap_model(model)
    if not isinstance(model, LoRAModel):
        return None
    config = model.lora_config
    return Adapters(
        r=config.r,
        alpha=float(config.lora_alpha),
        rslora=bool(config.rslora),
        target_modules=_patterns(config.target_modules),
        trainable_modules=_patterns(config.trainable_modules),
        trainable_bias=config.trainable_bias or None,
        dropout=float(config.lora_dropout),
        plus_scale=float(config.lora_plus_scale),
        base=getattr(model, _BASE, Base()),
    )


def has_base(model: LoRAModel) -> bool:
    """Return whether the fingerprint of the base is known."""
    return hasattr(model, _BASE)


def set_base(model: LoRAModel, base: Base) -> None:
    """Keep the fingerprint of the base with a model."""
    setattr(model, _BASE, base)


def saved_weights(model: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that a checkpoint contains; all of a model without adapters.

    Args:
        model: the model as it was built.
        weights: name -> ``ShardedWeight`` of all its tensors.
    """
    if not isinstance(model, LoRAModel):
        return dict(weights)
    config = {"model_type": getattr(type(model.config), "model_type", "")}
    changed = changed_outside(family_for(config), weights) if is_known(config) else frozenset[str]()
    return {
        name: weight
        for name, weight in weights.items()
        if is_adapter(name) or name in changed or not weight.local_tensor.stop_gradient
    }


def refuse_unsupported(model: LoRAModel) -> None:
    """Refuse adapters that cannot be saved or loaded.

    Raises:
        OptionError: with every option and layer of PaddleFormers that is not supported, and the reason.
    """
    faults = list(_faults(model))
    if faults:
        raise OptionError(
            "flex_checkpoint: true does not support these adapters.",
            where="LoRA",
            evidence=faults,
            next_step="Change the configuration of the adapters, or remove flex_checkpoint.",
        )


def _faults(model: LoRAModel) -> Iterator[str]:
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
        names = [name for name, layer in layers if isinstance(layer, kind)]
        if names:
            yield f"{kind.__name__} ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}"
    foreign = [name for name, layer in layers if _is_averaged(layer)]
    if foreign:
        yield (
            f"expert parallelism: PaddleFormers does not mark adapters of experts ({foreign[0]}, ...) as parameters of "
            "one rank, and averages those of different experts; leave experts out of target_modules"
        )
    if all(parameter.stop_gradient for parameter in model.parameters()):
        yield "target_modules and trainable_modules: no tensor of the model is trained"
    merged = [name for name, layer in layers if getattr(layer, "merged", False)]
    if merged:
        yield f"{merged[0]} is merged into its base; call unmerge() of the model"


_LAYERS: Mapping[type, str] = {
    QuantizationLoRABaseLinear: "its base is quantized",
    LoRAConv2D: "no family declares a convolution with adapters",
    LoRAMoeExperts: "PaddleFormers does not describe the shards of adapters of stacked experts",
}


def _is_averaged(layer: Any) -> bool:
    """Return whether the weight of a layer belongs to the experts of this rank, and its adapter to all ranks."""
    adapter, weight = getattr(layer, A, None), getattr(layer, "weight", None)
    if adapter is None or weight is None:
        return False
    return any(bool(getattr(weight, mark, None)) != bool(getattr(adapter, mark, None)) for mark in _MARKS_OF_EXPERTS)


def _patterns(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())
