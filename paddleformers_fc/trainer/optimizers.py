"""Find the declaration of an optimizer, and refuse others before a step runs and before anything is loaded.

A checkpoint contains the states that :mod:`~paddleformers_fc.layout.roles` declares for the optimizer's class, by
parameter. An undeclared optimizer has states of other names or shapes, and would fail at the first save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.optimizer import Optimizer

from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.roles import (
    OPTIMIZER_STATE,
    OPTIMIZERS,
    OptimizerDescriptor,
    StateShape,
    declared_optimizer,
    qualified_name,
)
from paddleformers_fc.trainer import sharding_stage3

_WRAPPED = ("_inner_opt", "_optim")
"""The attributes in which Paddle's wrappers keep the inner optimizer."""

_CREATING = frozenset({"_create_accumulators", "_add_moments_pows", "_add_accumulator"})
"""Methods that decide which states an optimizer has."""


def refuse_unsupported(optimizer: Any) -> None:
    """Refuse an optimizer whose states cannot be saved and loaded by parameter.

    Args:
        optimizer: the optimizer, with any wrappers of the Trainer; None if there is none yet.

    Raises:
        OptionError: its class is not declared, it contains another optimizer, or sharding fuses or divides parameters
            in a way that its states do not allow.
    """
    if optimizer is None:
        return
    descriptor = descriptor_of(optimizer)
    _refuse_contained(innermost(optimizer))
    if any(state.shape is StateShape.SHARD_NUMBER for state in descriptor.states):
        _refuse_ranges(optimizer, descriptor)


def descriptor_of(optimizer: Any) -> OptimizerDescriptor:
    """Return the declaration of an optimizer's class, or of the base class that decides which states it has.

    Raises:
        OptionError: there is none, or Paddle does not have the optimizer yet.
    """
    kind = type(innermost(optimizer))
    for one in kind.__mro__:
        found = declared_optimizer(one)
        if found is not None and not found.unavailable:
            return found
        if not _CREATING.isdisjoint(vars(one)):
            break
    raise _undeclared(kind)


def has_states(optimizer: Any) -> bool:
    """Return whether a supported optimizer has states other than master weights."""
    return any(state.role == OPTIMIZER_STATE for state in descriptor_of(optimizer).states)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer without its wrappers."""
    *_, last = unwrapped(optimizer)
    return last


def unwrapped(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer, the one that it wraps, and so on.

    Wrappers delegate missing attributes, so only their own are read; and an optimizer of stage 3 names itself as the
    wrapped one.
    """
    yield optimizer
    own = vars(optimizer)
    wrapped = next((own[name] for name in _WRAPPED if own.get(name) is not None), optimizer)
    if wrapped is not optimizer:
        yield from unwrapped(wrapped)


def has_fused_states(sharding: DygraphShardingOptimizer) -> bool:
    """Return whether the optimizer within sharding stage 1 updates fused buffers (``stage1_tensor_fusion``)."""
    # Where only communication is fused, Paddle steps with the parameters themselves.
    return bool(sharding.tensor_fusion and sharding.fuse_optimizer)


def sharding_with_ranges(optimizer: Any) -> Any:
    """Return the wrapper of sharding stage 1 with ``split_param``; None if there is none."""
    return next((one for one in unwrapped(optimizer) if isinstance(one, DygraphShardingOptimizerV2)), None)


def _undeclared(kind: type) -> OptionError:
    names = sorted({value for one in kind.__mro__ for key, value in vars(one).items() if key.endswith("_acc_str")})
    declared = [one.short_name for one in OPTIMIZERS if not one.unavailable]
    accumulators = f"its class names the accumulators {', '.join(names)}" if names else "its class names no accumulator"
    return OptionError(
        f"flex_checkpoint: true does not support the optimizer {kind.__name__}, which is not declared.",
        where=qualified_name(kind),
        evidence=[f"declared are {', '.join(declared)} and the optimizers of register_optimizer", accumulators],
        next_step=f"If every state has the shape of its parameter or is one number, declare them at the start of the "
        f"script: paddleformers_fc.register_optimizer({kind.__name__}, like_parameter=[...], numbers=[...]); see "
        "docs/optimizers.md. Or train with AdamW; or set ignore_save_lr_and_optim: true to save weights alone.",
    )


def _refuse_contained(optimizer: Any) -> None:
    """Refuse an optimizer that keeps another one, such as ``LookAhead``: the states of that one would not be saved."""
    own = vars(optimizer).items()
    found = [(name, value) for name, value in own if isinstance(value, Optimizer) and value is not optimizer]
    if found:
        raise OptionError(
            f"flex_checkpoint: true does not support the optimizer {type(optimizer).__name__}, which contains another.",
            where=qualified_name(type(optimizer)),
            evidence=[f"{name}: {qualified_name(type(value))}" for name, value in found],
            next_step="Train with one optimizer; or set ignore_save_lr_and_optim: true to save weights alone.",
        )


def _refuse_ranges(optimizer: Any, descriptor: OptimizerDescriptor) -> None:
    """Refuse sharding that cuts or fuses parameters: one number of such a part cannot be restored for another one."""
    parameters: Iterable[Any] = getattr(innermost(optimizer), "_parameter_list", None) or ()
    if sharding_with_ranges(optimizer) is not None:
        key = "split_param: true"
    elif any(sharding_stage3.is_sliced(parameter) for parameter in parameters):
        key = "sharding: stage3"
    elif any(isinstance(one, DygraphShardingOptimizer) and has_fused_states(one) for one in unwrapped(optimizer)):
        key = "stage1_tensor_fusion: true"
    else:
        return
    states = [state.paddle_name for state in descriptor.states if state.shape is StateShape.SHARD_NUMBER]
    raise OptionError(
        "flex_checkpoint: true contradicts another option.",
        where="training arguments",
        evidence=[
            f"flex_checkpoint: true and {key} with {descriptor.short_name}: its {', '.join(states)} is one number per "
            "local tensor, here of elements that belong together under this layout alone"
        ],
        next_step="Use sharding stage 1 without these keys, or stage 2; or another optimizer.",
    )
