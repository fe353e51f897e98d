"""Sharding stage 3: every rank saves and loads its range of each parameter in place.

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
from collections.abc import Iterable, Mapping
from typing import Any

from paddle.base.framework import EagerParamBase
from paddle.distributed import ShardedWeight, fleet
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import TaskFlow

from paddleformers_fc.trainer.library import TrainerCallback

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


class DropPrefetched(TrainerCallback):
    """Drop gathered parameters before an update, after which Paddle would use them in place of the updated ones.

    Args:
        model: the model as it was built.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop them; their weights are about to change."""
        drop_prefetched(self._model.parameters())


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
