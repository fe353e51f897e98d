"""Optimizer states as shards, derived from the shards of their parameters, and their creation before a load.

Paddle describes the states of AdamW alone (``sharded_state_dict``), and of others only under ``split_param``. The
declaration of an optimizer (:mod:`~paddleformers_fc.layout.roles`) and the parameter's shard determine the shard of
every state, so all optimizers are described here, in one way. Views are made of padded tensors only; nothing is copied.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import paddle
from paddle.distributed import ShardedWeight
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.layout.roles import (
    MASTER,
    NUMBER_SHAPE,
    OPTIMIZER_STATE,
    OptimizerDescriptor,
    StateDescriptor,
    StateShape,
)
from paddleformers_fc.trainer import slices
from paddleformers_fc.trainer.optimizers import descriptor_of, sharding_with_ranges, unwrapped

_MASTER = "_fp32_master_0"
_COUNTER = re.compile(r"_\d+$")


def describe(optimizer: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of these parameters by name, as ``ShardedWeight`` over the optimizer's tensors.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
        weights: name -> ``ShardedWeight`` over the parameter.
    Returns:
        the states of parameters of which this rank has a shard.
    Raises:
        KeyError: a state of a parameter that is not among the weights.
        OptionError: the optimizer is not declared.
        MismatchError: a state is not declared.
    """
    names = _names(weights)
    held, ranges = slices.cut(weights), _ranges(optimizer)
    found: dict[str, Any] = {}
    for state, static, tensor in _tensors(optimizer):
        parameter = names[static]
        if parameter not in held:
            continue
        shard = _shard(parameter + state.suffix, state, tensor, weights[parameter], ranges.get(static))
        if shard is not None:
            found[shard.key] = shard
    return found


def create(optimizer: Any, weights: Mapping[str, Any], parameters: Collection[str]) -> None:
    """Create the states of these parameters, as the first step would. Existing states stay.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
        weights: name -> ``ShardedWeight`` over the parameter.
        parameters: names of the parameters that get states.
    """
    names = _names(weights)
    chosen = [one for one in _updated(optimizer, weights) if names.get(_static(one.name)) in parameters]
    inner = optimizer._optim if isinstance(optimizer, GroupShardedOptimizerStage2) else optimizer
    inner._create_accumulators(paddle.base.framework.default_main_program().global_block(), chosen)


def _names(weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of parameters by Paddle's static names; of several names the first in order."""
    return {weights[name].local_tensor.name: name for name in sorted(weights, reverse=True)}


def _static(name: str) -> str:
    return name.removeprefix(slices.PREFIX)


def _updated(optimizer: Any, weights: Mapping[str, Any]) -> Any:
    """Return the tensors that this rank's optimizer updates, under the names of their parameters."""
    if slices.any_sliced(weights):
        return [slices.updated(weight.local_tensor) for weight in weights.values()]
    if isinstance(optimizer, GroupShardedOptimizerStage2):
        return optimizer._segment_params()[optimizer._rank]
    ranges = sharding_with_ranges(optimizer)
    if ranges is not None:
        return _slices_of_buffers(ranges)
    for wrapper in unwrapped(optimizer):
        if isinstance(wrapper, DygraphShardingOptimizer):
            return wrapper._rank2params[wrapper._sharding_rank]
    groups = getattr(optimizer, "_param_groups", None) or ()
    if any(isinstance(group, dict) for group in groups):
        return itertools.chain.from_iterable(group["params"] for group in groups)
    return optimizer._parameter_list


def _slices_of_buffers(optimizer: Any) -> Iterator[Any]:
    """Yield this rank's range of each parameter under ``split_param``, with its padding."""
    for buffer in optimizer._comm_buffer_list:
        for static, view in buffer._sharding_param_grad_view.items():
            begin, end = view._param_begin, view._param_end
            if 0 <= begin < end:
                part = paddle.slice(view._param_buffer, axes=[0], starts=[begin], ends=[end])
                part.name = static
                yield part


def _ranges(optimizer: Any) -> dict[str, slice]:
    """Return this rank's range of each parameter under ``split_param`` without padding, by static name."""
    sharding = sharding_with_ranges(optimizer)
    found: dict[str, slice] = {}
    for buffer in () if sharding is None else sharding._comm_buffer_list:
        for static, view in buffer._sharding_param_grad_view.items():
            first, size = view._index, math.prod(view._param.shape)
            begin = view._param_begin - first
            found[static] = slice(begin, max(min(size, view._param_end - first), begin))
    return found


def _tensors(optimizer: Any) -> Iterator[tuple[StateDescriptor, str, Any]]:
    """Yield declaration, static name of the parameter, and tensor of every state."""
    descriptor = descriptor_of(optimizer)
    held = dict(optimizer.state_dict())
    held.pop("LR_Scheduler", None)
    for static, tensor in held.pop("master_weights", {}).items():
        yield MASTER, _static(static), tensor
    for static, tensor in held.items():
        state, parameter = _split(_static(static), descriptor)
        yield state, parameter, tensor


def _split(static: str, descriptor: OptimizerDescriptor) -> tuple[StateDescriptor, str]:
    """Return the state and ``linear_0.w_0`` of ``linear_0.w_0_moment1_0``, or of its master weight's moment."""
    name = _COUNTER.sub("", static)
    for state in descriptor.states:
        if state.role == OPTIMIZER_STATE and name.endswith("_" + state.paddle_name):
            return state, name[: -len(state.paddle_name) - 1].removesuffix(_MASTER)
    raise MismatchError(
        f"The optimizer has a state that is not declared: {static}.",
        where=descriptor.name,
        evidence=[f"declared are {', '.join(one.paddle_name for one in descriptor.states if one is not MASTER)}"],
        next_step="Declare all accumulators of the optimizer with paddleformers_fc.register_optimizer.",
    )


def _shard(name: str, state: StateDescriptor, tensor: Any, weight: Any, range_: slice | None) -> Any:
    """Return one state as a shard; None if this rank's part of the parameter is all padding."""
    if range_ is not None and range_.stop == range_.start:
        return None
    if state.shape is StateShape.NUMBER:
        return ShardedWeight(name, tensor, NUMBER_SHAPE, NUMBER_SHAPE, (0,))
    if state.shape is StateShape.SHARD_NUMBER:
        return _number_of_shard(name, tensor, weight)
    if slices.is_sliced(weight.local_tensor):
        return slices.piece(name, tensor, weight)
    if range_ is not None:
        length = range_.stop - range_.start
        # Without strided kernels Paddle's slices are copies, into which a load would be lost.
        own = tensor if math.prod(tensor.shape) == length else tensor._slice(0, length).detach()
        return ShardedWeight(name, own, weight.local_shape, weight.global_shape, weight.global_offset, True, range_)
    return ShardedWeight(name, tensor, weight.local_shape, weight.global_shape, weight.global_offset)


def _number_of_shard(name: str, tensor: Any, weight: Any) -> Any:
    """Return a state that is one number per shard as an element of a tensor of such numbers, cut as its parameter."""
    lengths = list(zip(weight.global_shape, weight.local_shape, weight.global_offset, strict=True))
    counts = tuple(whole // part if part else 1 for whole, part, _ in lengths)
    place = tuple(offset // part if part else 0 for _, part, offset in lengths)
    return ShardedWeight(name, tensor, (1,) * len(counts), counts, place)
