"""A live model with LoRA adapters: its description, and the tensors that a checkpoint contains of it.

PaddleFormers wraps the model in a ``LoRAModel`` and replaces linear layers by layers with ``lora_A`` and ``lora_B``. It
freezes all other tensors, except for ``trainable_modules`` and biases that its configuration names. A checkpoint
contains adapters, trained tensors, and tensors that training changes without an optimizer. The rest is the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.families.adapters import Adapters, Base, changed_outside, is_adapter
from paddleformers_fc.trainer.library_models import LoRAModel, unwrap_model

_BASE = "_flex_base"


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
    try:
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
    except ValueError as error:
        raise OptionError(
            "Invalid configuration of adapters.",
            where="LoRA",
            evidence=[str(error)],
            next_step="Correct lora_alpha.",
        ) from error


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


def _patterns(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())
