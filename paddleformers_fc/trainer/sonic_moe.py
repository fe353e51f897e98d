"""Expert stacks under ``using_sonic_moe``, whose rows of gate and up alternate during training.

PaddleFormers 1.2.0 loads gate above up, and interleaves their rows at the start of training unless ``output_dir``
contains a checkpoint. So it interleaves twice if a run resumes from another directory, and never if a new run starts
next to older checkpoints. :class:`.callback.AlternateOnce` replaces this: it interleaves weights that do not come from
a checkpoint.

PaddleFleet's callback :data:`SWITCH` interleaves rows from the beginning of each step to its update. Checkpoints then
contain the stacks of a model without the option, so this module does nothing. Asynchronous saves finish reading before
the passes (:mod:`.startup`).

A row of gate and the next row of up are described as one row of twice the length, without copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.distributed import ShardedWeight

from paddleformers_fc.errors import EnvironmentMismatch, MismatchError, OptionError
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.families.description import ALTERNATES, STACK_OF_FFN
from paddleformers_fc.families.names import family_keys
from paddleformers_fc.trainer import library
from paddleformers_fc.trainer.library import has_adapters, unwrap_model
from paddleformers_fc.upstream import uses

_OPTION = "using_sonic_moe"
_NATIVE = "InterleaveGateUpCallback"
SWITCH = "SonicMoELayoutSwitchCallback"
_INTERLEAVED = "_flex_experts_alternate"
BETWEEN_STEPS = {_OPTION: False, "moe_expert_fusion": True}
"""The configuration between steps of a model whose rows are interleaved in every step."""


def is_switched() -> bool:
    """Return whether the library's Trainer interleaves rows in every step, instead of once."""
    return uses(library.Trainer.train, SWITCH)


def alternates(model: Any) -> bool:
    """Return whether rows of gate and up alternate in the stacks of a live model."""
    return bool(getattr(unwrap_model(model), _INTERLEAVED, False))


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
            next_step=f"Remove {_OPTION}, or train with PaddleFormers 1.2.0 and PaddleFleet 0.3.0.",
        )
    local_shape, global_shape, offset = ((rows // 2, 2 * width) for rows, width in ranges)
    return ShardedWeight(name, weight.local_tensor, local_shape, global_shape, offset)


@contextmanager
def filled_from_run(trainer: Any) -> Iterator[None]:
    """Context manager around a load from a checkpoint of a run, in which rows alternate."""
    model = unwrap_model(trainer.model)
    before = alternates(model)
    if getattr(trainer.args, _OPTION, False) and not is_switched():
        setattr(model, _INTERLEAVED, True)
    try:
        yield
    except BaseException:
        setattr(model, _INTERLEAVED, before)
        raise


def check_supported(trainer: Any, config: dict[str, Any]) -> None:
    """Check that the model supports ``using_sonic_moe``, if its rows would alternate.

    Args:
        trainer: the Trainer, with its model.
        config: the described configuration of the model.
    Raises:
        OptionError: the model has adapters, was built without the option, or its family does not declare alternating
            rows.
    """
    if (
        not getattr(trainer.args, _OPTION, False)
        or is_switched()
        or not any(map(_is_stack, trainer.model.state_dict()))
    ):
        return
    if has_adapters(trainer.model):
        why = "adapters are not supported with it"
    elif not config.get(_OPTION):
        why = "the model was built without it"
    elif not is_known(config) or ALTERNATES not in family_keys(family_for(config)):
        why = f"family {config['model_type']} declares no experts whose rows alternate"
    else:
        return
    raise OptionError(
        f"{_OPTION}: true is not supported for this model.",
        where=type(trainer.model).__name__,
        evidence=[why],
        next_step=f"Remove {_OPTION}.",
    )


def alternate_before_training(trainer: Any) -> None:
    """Interleave rows of gate and up once, and disable PaddleFormers' own callback for it.

    Raises:
        EnvironmentMismatch: this PaddleFormers has no such callback.
    """
    found = [one for one in trainer.callback_handler.callbacks if type(one).__name__ == _NATIVE]
    if not found and not is_switched():
        raise EnvironmentMismatch(
            f"{_OPTION} is true, and the Trainer has no {_NATIVE}: the order of rows in experts is unknown.",
            where="on_train_begin",
            next_step=f"Remove {_OPTION}, or use PaddleFormers 1.2.0.",
        )
    model = unwrap_model(trainer.model)
    if found and not alternates(model):
        for name, tensor in model.state_dict().items():
            if _is_stack(name):
                found[-1].interleave_gate_up_proj(tensor)
        setattr(model, _INTERLEAVED, True)
    for native in found:
        native.resume_from_checkpoint = _INTERLEAVED  # Any value other than None disables it.


def _is_stack(name: str) -> bool:
    return name.endswith(STACK_OF_FFN)
