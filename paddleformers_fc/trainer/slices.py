"""Sharding stage 3: every rank saves and loads its range of each parameter in place.

Stage 3 wraps the model: it flattens each parameter above a size, pads it to equal slices, and releases it. This rank's
slice remains as ``parameter.fw_storage``. The optimizer has states of slices named ``slice@`` and the parameter's name.
Layers gather a parameter when they need it and release it afterwards.

A slice is a flattened shard as under sharding stage 1, so no parameter is gathered. Padding is not stored: a rank whose
slice is all padding has no shard. Ranges are computed from the lengths of the tensors, because Paddle's description of
states includes the padding of parameters that are shorter than a slice.

Time and memory: a view and a description per parameter and state; no copy and no communication.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import paddle
from paddle.base.framework import EagerParamBase
from paddle.distributed import ShardedWeight, fleet

from paddleformers_fc.layout.roles import MASTER, OPTIMIZER_STATE, STATES, split_state_name

_PREFIX = "slice@"
_MASTER = "_fp32_master_0"


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
        held = getattr(weight.local_tensor, "fw_storage", None)
        piece = weight if held is None else _piece(name, held, weight)
        if piece is not None:
            found[name] = piece
    return found


def release(weights: Mapping[str, Any]) -> None:
    """Release the memory of parameters whose slices this rank holds.

    PaddleFormers allocates every parameter with zeros before it loads, and copies this rank's range into the slice
    afterwards. A load of this package fills the slices, which the zeros must not overwrite.
    """
    for weight in weights.values():
        parameter = weight.local_tensor
        if getattr(parameter, "fw_storage", None) is not None and parameter._is_initialized():
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


def states(optimizer: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer states of these parameters by name, as ``ShardedWeight``.

    Args:
        optimizer: the optimizer under stage 3.
        weights: name -> ``ShardedWeight`` over the parameter, each parameter under one name.
    Returns:
        the states of parameters of which this rank has a shard.
    Raises:
        KeyError: a state of a parameter that is not among the weights.
        ValueError: an unknown state.
    """
    names = {weight.local_tensor.name: name for name, weight in weights.items()}
    held = cut(weights)
    found: dict[str, Any] = {}
    for state, parameter, tensor in _tensors(optimizer, names):
        if names[parameter] in held:
            found[state] = _state(state, tensor, weights[names[parameter]])
    return found


def in_place(states: Mapping[str, Any], optimizer: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return states of sharding stage 1 as views of the optimizer's tensors.

    Paddle describes the states of a padded parameter by a slice without padding. Without strided kernels
    (``FLAGS_use_stride_kernel=0``) the slice is a copy, and a load into it would be lost.

    Args:
        states: the states as the optimizer describes them.
        optimizer: the optimizer.
        weights: name -> ``ShardedWeight`` over the parameter.
    """
    flat = {name for name, state in states.items() if state.is_flattened}
    if not flat:
        return dict(states)
    names: dict[str, str] = {}
    for name in sorted(weights):
        names.setdefault(weights[name].local_tensor.name, name)
    for name, _, tensor in _tensors(optimizer, names):
        if name in flat and tensor.data_ptr() != states[name].local_tensor.data_ptr():
            length = math.prod(states[name].local_tensor.shape)
            states[name].local_tensor = tensor._slice(0, length).detach()
    return dict(states)


def _state(name: str, tensor: Any, weight: Any) -> Any:
    if split_state_name(OPTIMIZER_STATE, name).scalar:
        return ShardedWeight(name, tensor, (1,), (1,), (0,))
    if is_sliced(weight.local_tensor):
        return _piece(name, tensor, weight)
    return ShardedWeight(name, tensor, weight.local_shape, weight.global_shape, weight.global_offset)


def create_states(optimizer: Any, weights: Mapping[str, Any], parameters: Collection[str]) -> None:
    """Create optimizer states of these parameters, in slices.

    Args:
        optimizer: the optimizer under stage 3.
        weights: name -> ``ShardedWeight`` over the parameter.
        parameters: names of the parameters that get states.
    """
    chosen = [weight.local_tensor for name, weight in weights.items() if name in parameters]
    stand_ins = [_stand_in(parameter) if is_sliced(parameter) else parameter for parameter in chosen]
    optimizer._create_accumulators(paddle.base.framework.default_main_program().global_block(), stand_ins)


def _stand_in(parameter: Any) -> Any:
    """Return a tensor with the name and shape that the optimizer receives from stage 3 in place of the parameter."""
    storage = parameter.fw_storage
    return EagerParamBase(shape=storage.shape, dtype=storage.dtype, name=_PREFIX + parameter.name)


def _tensors(optimizer: Any, names: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """Yield state name, static name of the parameter, and tensor of every state."""
    held = dict(optimizer.state_dict())
    held.pop("LR_Scheduler", None)
    for static, tensor in held.pop("master_weights", {}).items():
        parameter = static.removeprefix(_PREFIX)
        yield names[parameter] + MASTER.suffix, parameter, tensor
    for static, tensor in held.items():
        parameter, suffix = _split(static.removeprefix(_PREFIX))
        yield names[parameter] + suffix, parameter, tensor


def _split(static: str) -> tuple[str, str]:
    """Return ``linear_0.w_0`` and ``.moment1_0`` of ``linear_0.w_0_moment1_0``, or of its master weight's moment."""
    for state in STATES:
        ending = "_" + state.suffix[1:]
        if state.role == OPTIMIZER_STATE and static.endswith(ending):
            return static[: -len(ending)].removesuffix(_MASTER), state.suffix
    raise ValueError(f"{static}: unknown optimizer state")


def _piece(name: str, storage: Any, weight: Any) -> Any:
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
