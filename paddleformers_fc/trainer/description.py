"""Describe a live model: its class, its resolved configuration, its LoRA adapters, and the order of rows of experts.

PaddleFormers serialises a configuration without default values and without keys that training arguments may set, some
of which determine names and layouts of tensors. All values are therefore read from the live object, not from a file.

For LoRA, PaddleFormers wraps the model in a ``LoRAModel``, replaces linear layers by layers with ``lora_A`` and
``lora_B``, and freezes all other tensors except ``trainable_modules`` and the configured biases. A checkpoint contains
adapters, trained tensors, and tensors that training changes without an optimizer. The other tensors are the base.

Under ``using_sonic_moe`` rows of gate and up alternate in expert stacks during training. PaddleFormers 1.2.0 loads gate
above up, and interleaves their rows at the start of training unless ``output_dir`` contains a checkpoint. So it
interleaves twice if a run resumes from another directory, and never if a new run starts next to older checkpoints.
:func:`alternate_before_training` replaces this: it interleaves weights that do not come from a checkpoint. A row of
gate and the next row of up are described as one row of twice the length, without copying.

PaddleFleet's callback :data:`SWITCH` interleaves rows from the beginning of each step to its update. Checkpoints then
contain the stacks of a model without the option, so nothing is done here. Asynchronous saves finish reading before the
passes (:mod:`.startup`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from paddle.distributed import ShardedWeight
from paddle.nn import Layer

from paddleformers_fc.errors import EnvironmentMismatch, MismatchError, OptionError
from paddleformers_fc.families import ModelDescription, family_for, is_known
from paddleformers_fc.families.description import ALTERNATES, IS_FLEET, STACK_OF_FFN, Adapters, Base, is_adapter
from paddleformers_fc.families.names import Names, family_keys
from paddleformers_fc.families.undescribed import STRIPPED
from paddleformers_fc.trainer import library
from paddleformers_fc.trainer.library import IS_PADDLENLP, has_adapters, is_a, unwrap_model
from paddleformers_fc.upstream import uses

FINGERPRINT = "_flex_base"
"""Attribute of a model with the fingerprint of its base."""


def base_model(model: Any) -> Any:
    """Return a model without parallel wrappers and without its ``LoRAModel``."""
    model = unwrap_model(model)
    return model.model if has_adapters(model) else model


def describe_adapters(model: Any) -> Adapters | None:
    """Describe the adapters of a model, or of a wrapper of it; None if it has none."""
    model = unwrap_model(model)
    if not has_adapters(model):
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
            base=getattr(model, FINGERPRINT, Base()),
        )
    except ValueError as error:
        raise OptionError(
            "Invalid configuration of adapters.",
            where="LoRA",
            evidence=[str(error)],
            next_step="Correct lora_alpha.",
        ) from error


def saved_weights(model: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that a checkpoint contains: all of them unless the model has adapters.

    Args:
        model: the model as it was built.
        weights: name -> ``ShardedWeight`` of all tensors.
    """
    if not has_adapters(model):
        return dict(weights)
    config = {"model_type": getattr(type(model.config), "model_type", "")}
    # Training changes some tensors without an optimizer, such as the biases of a router.
    index = Names(family_for(config), ModelDescription(config)) if is_known(config) else None
    changed = [name for name in weights if index is not None and not index.trained(name)]
    return {
        name: weight
        for name, weight in weights.items()
        if is_adapter(name) or name in changed or not weight.local_tensor.stop_gradient
    }


def _patterns(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


OWN_RULES = "_flex_rules"
"""The attribute for the rules of a class's AOA statements, on models that no family declares."""

_EMPTY_LAYERS = frozenset({"num_empty_layers_add_in_head", "num_empty_layers_add_in_tail"})
"""Parallel settings that determine which layers a model has."""
_WRITTEN_BY_MODELS = frozenset(
    {
        *("moe_group", "moe_group_origin", "moe_rank", "moe_world_size", "disable_ffn_model_parallel"),
        *("tensor_model_parallel_rank", "dtype", "torch_dtype"),
    }
)
"""Keys that models write into their configuration while they are built, and keys that differ between ranks."""


@functools.cache
def layout_keys() -> frozenset[str]:
    """Return the configuration keys that describe a parallel layout or differ between ranks."""
    settings = library.LlmMetaConfig
    attributes = (*settings.hybrid_parallel_attributes, *settings.recompute_attributes)
    return frozenset(name for name, *_ in attributes) - _EMPTY_LAYERS | _WRITTEN_BY_MODELS


def describe_model(model: Any) -> ModelDescription:
    """Describe a live model.

    Args:
        model: the model as it was built, or a wrapper of it.
    Returns:
        its class, its adapters, the rules of its own statements, and every configuration key that JSON can represent,
        except keys of a parallel layout.
    """
    model = unwrap_model(model)
    adapters = describe_adapters(model)
    # PaddleFleet builds a model from a configuration derived from the one that PaddleFormers saves.
    built_with = {key: getattr(model.config, key, None) for key in STRIPPED - {IS_FLEET}}
    as_built = {key: value for key, value in built_with.items() if isinstance(value, int)}
    config = {**describe_config(config_of(model)), **as_built}
    if config.get("using_sonic_moe") and is_switched():
        config |= BETWEEN_STEPS
    if alternates(model):
        config[ALTERNATES] = True
    return ModelDescription(
        config,
        bool(getattr(model, IS_FLEET, False)),
        getattr(model, OWN_RULES, None) if adapters is None else None,
        adapters,
        is_global=is_semi_auto(model),
    )


def is_semi_auto(model: Any) -> bool:
    """Return whether any parameter of a layer is a ``DistTensor``."""
    return isinstance(model, Layer) and any(parameter.is_dist() for parameter in model.parameters())


def config_of(model: Any) -> Any:
    """Return the configuration that describes a model; for PaddleFleet it is not ``model.config``."""
    model = base_model(model)
    return getattr(model, "config_to_save", model.config)


def describe_config(config: Any) -> dict[str, Any]:
    """Return the values of a configuration that describe a model."""
    if not IS_PADDLENLP:
        return _resolved(config)
    from paddleformers_fc.trainer.nlp_models import described_values

    return _resolved(config) | described_values(config)


def _resolved(config: Any) -> dict[str, Any]:
    """Return every public value of a configuration, also under the names in ``attribute_map``."""
    names = {"model_type", *vars(config), *getattr(config, "attribute_map", {})} - layout_keys()
    values = {name: _plain(getattr(config, name, _NO_JSON)) for name in names if not name.startswith("_")}
    # The class determines the model, not the file that was read; config.json names the class as well.
    values["model_type"] = getattr(type(config), "model_type", "") or values["model_type"]
    return {name: values[name] for name in sorted(values) if values[name] is not _NO_JSON}


_NO_JSON = object()


def _plain(value: Any) -> Any:
    """Return a value as JSON; :data:`_NO_JSON` if JSON cannot represent it, such as a process group or a function."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if is_a("PretrainedConfig", value):
        return _resolved(value)
    if is_a("QuantizationConfig", value):
        return _plain(value.to_dict())
    if isinstance(value, Mapping):
        found = {str(key): _plain(one) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not _NO_JSON}
    if isinstance(value, list | tuple):
        items = [_plain(one) for one in value]
        return _NO_JSON if any(one is _NO_JSON for one in items) else items
    return _NO_JSON


_SONIC_MOE = "using_sonic_moe"
_NATIVE_INTERLEAVING = "InterleaveGateUpCallback"
SWITCH = "SonicMoELayoutSwitchCallback"
_ALTERNATING = "_flex_experts_alternate"
BETWEEN_STEPS = {_SONIC_MOE: False, "moe_expert_fusion": True}
"""The configuration between steps of a model whose rows are interleaved in every step."""


def is_switched() -> bool:
    """Return whether the library's Trainer interleaves rows in every step, instead of once."""
    return uses(library.Trainer.train, SWITCH)


def alternates(model: Any) -> bool:
    """Return whether rows of gate and up alternate in the stacks of a live model."""
    return bool(getattr(unwrap_model(model), _ALTERNATING, False))


def described_rows(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Describe pairs of alternating rows in expert stacks as one row; other weights are returned unchanged.

    Args:
        model: the model as it was built, or a wrapper of it.
        weights: its ``ShardedWeight`` by name.
    Raises:
        MismatchError: a stack contains only a part of an expert.
    """
    if not alternates(model):
        return weights
    return {name: _paired(name, one) if _is_stack(name) else one for name, one in weights.items()}


def _paired(name: str, weight: Any) -> Any:
    ranges = weight.local_shape, weight.global_shape, weight.global_offset
    if any(len(one) != 2 or one[0] % 2 for one in ranges) or weight.local_shape[1] != weight.global_shape[1]:
        raise MismatchError(
            "Rows of gate and up of an expert are on different ranks.",
            where=name,
            evidence=[f"shape {list(weight.local_shape)} of {list(weight.global_shape)}"],
            next_step=f"Remove {_SONIC_MOE}, or train with PaddleFormers 1.2.0 and PaddleFleet 0.3.0.",
        )
    local_shape, global_shape, offset = ((rows // 2, 2 * width) for rows, width in ranges)
    return ShardedWeight(name, weight.local_tensor, local_shape, global_shape, offset)


@contextmanager
def filled_from_run(trainer: Any) -> Iterator[None]:
    """Context manager around a load from a checkpoint of a run, in which rows alternate."""
    model = unwrap_model(trainer.model)
    before = alternates(model)
    if getattr(trainer.args, _SONIC_MOE, False) and not is_switched():
        setattr(model, _ALTERNATING, True)
    try:
        yield
    except BaseException:
        setattr(model, _ALTERNATING, before)
        raise


def check_sonic_moe(trainer: Any, config: dict[str, Any]) -> None:
    """Check that the model supports ``using_sonic_moe``, if its rows would alternate.

    Args:
        trainer: the Trainer, with its model.
        config: the described configuration of the model.
    Raises:
        OptionError: the model has adapters, was built without the option, or its family does not declare alternating
            rows.
    """
    if (
        not getattr(trainer.args, _SONIC_MOE, False)
        or is_switched()
        or not any(map(_is_stack, trainer.model.state_dict()))
    ):
        return
    if has_adapters(trainer.model):
        why = "adapters are not supported with it"
    elif not config.get(_SONIC_MOE):
        why = "the model was built without it"
    elif not is_known(config) or ALTERNATES not in family_keys(family_for(config)):
        why = f"family {config['model_type']} declares no experts whose rows alternate"
    else:
        return
    raise OptionError(
        f"{_SONIC_MOE}: true is not supported for this model.",
        where=type(trainer.model).__name__,
        evidence=[why],
        next_step=f"Remove {_SONIC_MOE}.",
    )


def alternate_before_training(trainer: Any) -> None:
    """Interleave rows of gate and up once, and disable PaddleFormers' own callback for it.

    Raises:
        EnvironmentMismatch: this PaddleFormers has no such callback.
    """
    found = [one for one in trainer.callback_handler.callbacks if type(one).__name__ == _NATIVE_INTERLEAVING]
    if not found and not is_switched():
        raise EnvironmentMismatch(
            f"{_SONIC_MOE} is true, and the Trainer has no {_NATIVE_INTERLEAVING}: the order of rows in experts is "
            "unknown.",
            where="on_train_begin",
            next_step=f"Remove {_SONIC_MOE}, or use PaddleFormers 1.2.0.",
        )
    model = unwrap_model(trainer.model)
    if found and not alternates(model):
        for name, tensor in model.state_dict().items():
            if _is_stack(name):
                found[-1].interleave_gate_up_proj(tensor)
        setattr(model, _ALTERNATING, True)
    for native in found:
        native.resume_from_checkpoint = _ALTERNATING  # Any value other than None disables it.


def _is_stack(name: str) -> bool:
    return name.endswith(STACK_OF_FFN)
