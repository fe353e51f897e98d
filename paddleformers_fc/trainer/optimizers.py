"""Find the declaration of an optimizer, and refuse others before a step runs and before anything is loaded.

A checkpoint contains the states that :mod:`~paddleformers_fc.layout.roles` declares for the optimizer's class, by
parameter. An undeclared optimizer has states of other names or shapes, and would fail at the first save.

Sharding stage 3: every rank saves and loads its range of each parameter in place.

Stage 3 wraps the model: it flattens each parameter above a size, pads it to equal slices, and releases it. This rank's
slice remains as ``parameter.fw_storage``. The optimizer has states of slices named ``slice@`` and the parameter's name.
Layers gather a parameter when they need it and release it afterwards, with a new tensor as its slice: what is read or
written after a pass is looked up after it.

A slice is a flattened shard as under sharding stage 1, so no parameter is gathered. Padding is not stored: a rank whose
slice is all padding has no shard. Ranges are computed from the lengths of the tensors, because Paddle's description of
states includes the padding of parameters that are shorter than a slice.

Time and memory: a view and a description per parameter and state; no copy and no communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paddle.base.framework import EagerParamBase
from paddle.distributed import ShardedWeight, fleet
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import TaskFlow
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

PREFIX = "slice@"
"""The prefix of the names of slices."""

_GATHERED: dict[str, tuple[Any, Any]] = TaskFlow().full_param
"""Gathered parameters and the tasks that gather them, by static name. All models of the process share this dict, which
is the default of an argument of Paddle's."""


def is_sliced(parameter: Any) -> bool:
    """Return whether stage 3 has cut this parameter into slices."""
    return hasattr(parameter, "fw_storage")


def any_sliced(weights: Mapping[str, Any]) -> bool:
    """Return whether stage 3 has cut any of these live weights."""
    return any(is_sliced(weight.local_tensor) for weight in weights.values())


def cut(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each parameter that stage 3 has cut by this rank's slice.

    Args:
        weights: name -> ``ShardedWeight`` over the parameter.
    Returns:
        the weights without parameters of which this rank's slice is all padding.
    """
    found: dict[str, Any] = {}
    for name, weight in weights.items():
        range_ = getattr(weight.local_tensor, "fw_storage", None)
        own = weight if range_ is None else piece(name, range_, weight)
        if own is not None:
            found[name] = own
    return found


def drop_prefetched(parameters: Iterable[Any]) -> None:
    """Drop gathers that no layer has waited for. Every rank must call.

    Backward passes prefetch parameters of layers that come later in the order of the first forward pass and earlier in
    the backward pass. A later pass would use what was gathered in place of the slice, and cut its next slice from it.
    """
    for parameter in parameters:
        if getattr(parameter, "fw_storage", None) is not None:
            _, task = _GATHERED.pop(parameter.name, (None, None))
            if task is not None:
                task.wait()


def release(parameters: Iterable[Any]) -> None:
    """Reduce parameters to the slices that this rank holds. Every rank must call.

    A pass that fails leaves parameters gathered, and PaddleFormers allocates every parameter with zeros before it
    loads, and copies the range of this rank into its slice afterwards.
    """
    sliced = [one for one in parameters if is_sliced(one)]
    drop_prefetched(sliced)
    for parameter in sliced:
        if parameter.fw_storage is None:
            whole, _ = _GATHERED.pop(parameter.name)
            group = fleet.get_hybrid_communicate_group().get_sharding_parallel_group()
            length = int(whole.shape[0]) // group.nranks
            parameter.fw_storage = whole._slice(group.rank * length, (group.rank + 1) * length).detach().clone()
            parameter.status, parameter.use_count = "part", 0
        if parameter._is_initialized():
            parameter._clear_data()


def drop_gradients(weights: Mapping[str, Any]) -> None:
    """Clear the gradients of sliced and whole parameters."""
    for weight in weights.values():
        parameter = weight.local_tensor
        if is_sliced(parameter):
            parameter.fw_storage.clear_gradient(False)
            parameter.bw_storage = None
            continue
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if gradient is not None:
                gradient.zero_()


def updated(parameter: Any) -> Any:
    """Return a tensor with the name and shape that the optimizer receives from stage 3 in place of the parameter."""
    if not is_sliced(parameter):
        return parameter
    storage = parameter.fw_storage
    return EagerParamBase(shape=storage.shape, dtype=storage.dtype, name=PREFIX + parameter.name)


def piece(name: str, storage: Any, weight: Any) -> Any:
    """Return this rank's range of a parameter or state without padding; None if it is all padding."""
    size, length = math.prod(weight.local_shape), int(storage.shape[0])
    begin = min(size, length * fleet.get_hybrid_communicate_group().get_sharding_parallel_rank())
    end = min(size, begin + length)
    if begin == end:
        return None
    return ShardedWeight(
        name,
        storage._slice(0, end - begin).detach(),
        weight.local_shape,
        weight.global_shape,
        weight.global_offset,
        is_flattened=True,
        flattened_range=slice(begin, end),
    )


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
    elif any(is_sliced(parameter) for parameter in parameters):
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
