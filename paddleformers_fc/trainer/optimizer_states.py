"""Optimizer states as shards, derived from the shards of their parameters, and their creation before a load.

Paddle describes the states of AdamW alone (``sharded_state_dict``), and of others only under ``split_param``. The
declaration of an optimizer (:mod:`~paddleformers_fc.layout.roles`) and the parameter's shard determine the shard of
every state, so all optimizers are described here, in one way. Views are made of padded tensors only; nothing is copied.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle
from paddle.distributed import ShardedWeight
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.optimizer import Optimizer

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.layout.roles import (
    MASTER,
    NUMBER_SHAPE,
    OPTIMIZER_STATE,
    OptimizerDescriptor,
    StateDescriptor,
    StateShape,
    qualified_name,
)
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import optimizers
from paddleformers_fc.trainer.optimizers import (
    descriptor_of,
    has_fused_states,
    innermost,
    sharding_with_ranges,
    unwrapped,
)

_MASTER_NAME = re.compile(r"_fp32_master_\d+$")
"""The suffix of master weights in the keys of their accumulators."""

_OF_PADDLE = ("LR_Scheduler", "master_weights")
"""Entries of ``state_dict`` that are no accumulators. They are saved in another way."""

_CONTAINERS_OF_PADDLE = frozenset(
    {
        *("_accumulators_holder", "_auxiliary_vars", "_default_dict", "_learning_rate_map"),
        *("_master_grads", "_param_dict", "_param_groups", "_parameter_list"),
    }
)
"""Containers of Paddle's optimizers whose tensors are no states, or are refused by themselves."""

_MOST_NAMED = 8


@dataclass(frozen=True)
class ExpectedTensor:
    """A state that the first step will create.

    Args:
        shape: its shape.
        dtype: numpy name of the element type.
        place: where Paddle will create it.
    """

    shape: tuple[int, ...]
    dtype: str
    place: Any

    def is_dist(self) -> bool:
        """Return that it is no tensor of the semi-automatic mode; ``ShardedWeight`` asks."""
        return False

    def _slice(self, start: int, stop: int) -> ExpectedTensor:
        return replace(self, shape=(stop - start,))

    def detach(self) -> ExpectedTensor:
        """Return this tensor."""
        return self


def sharded_states(optimizer: Any, weights: Mapping[str, Any], may_expect: bool = False) -> dict[str, Any]:
    """Return the states of these parameters by name, as ``ShardedWeight`` over the optimizer's tensors.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
        weights: name -> ``ShardedWeight`` over the parameter.
        may_expect: whether states that an optimizer without any will have are described by :class:`ExpectedTensor`.
    Returns:
        the states of parameters of which this rank has a shard.
    Raises:
        KeyError: a state of a parameter that is not among the weights.
        OptionError: the optimizer or a state of it is not declared.
        MismatchError: states wait for the first step.
    """
    names = _names(weights)
    fused = _fused(optimizer)
    own, ranges = optimizers.cut(weights), _ranges(optimizer, fused)
    # A stack of experts is described as a matrix, and is a tensor of three axes.
    shapes = {one.name: tuple(one.shape) for one in _listed(innermost(optimizer))}
    found: dict[str, Any] = {}
    expects = may_expect and not any(innermost(optimizer)._accumulators.values())
    for state, buffer, whole in _expected(optimizer, weights, fused) if expects else tensors(optimizer):
        for static, tensor in _parts(state, buffer, whole, fused):
            parameter = names[static]
            if parameter not in own:
                continue
            weight = weights[parameter]
            shape = shapes.get(static, tuple(weight.local_shape))
            shard = _shard(parameter + state.suffix, state, tensor, weight, ranges.get(static), shape)
            if shard is not None:
                found[shard.key] = shard
    return dict(sorted(found.items()))  # The order in which Paddle creates states depends on the first step.


def create(
    optimizer: Any,
    weights: Mapping[str, Any],
    parameters: Collection[str],
    place_master: Callable[[Any], object] | None = None,
) -> None:
    """Create the states of these parameters, as the first step would. Existing states stay.

    They are created one parameter after the other, so that an offloaded optimizer has those of one on the device.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
        weights: name -> ``ShardedWeight`` over the parameter.
        parameters: names of the parameters that get states.
        place_master: moves a master weight in place to where the run keeps it between steps.
    """
    names, fused = _names(weights), _fused(optimizer)
    inner = optimizer._optim if isinstance(optimizer, GroupShardedOptimizerStage2) else optimizer
    block = paddle.base.framework.default_main_program().global_block()
    for one in _updated(optimizer, weights):
        static = _static(one.name)
        if any(names.get(own.name) in parameters for own in fused.get(static, ())) or names.get(static) in parameters:
            # Paddle would look in the states that set_state_dict has set, by names that may be others now.
            innermost(optimizer)._accumulators_holder = {}
            inner._create_accumulators(block, [one])
            master = None if place_master is None else getattr(inner, "_master_weights", {}).get(one.name)
            if place_master is not None and master is not None:
                place_master(master)


def build_buffers(model: Any, optimizer: Any) -> None:
    """Build the fused buffers of ``split_param`` that an overlapped pipeline builds in its first step.

    Without them the optimizer has no ranges, and no states can be created before the first step.

    Args:
        model: the model with its parallel wrappers.
        optimizer: the optimizer with the Trainer's wrappers.
    """
    sharding = sharding_with_ranges(optimizer)
    if sharding is None or not sharding.pp_overlap or sharding._comm_buffer_list:
        return
    model.register_sharding_comm_overlap_hook(optimizer)
    sharding._collect_comm_buffers()


def _names(weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of parameters by Paddle's static names; of several names the first in order."""
    return {weights[name].local_tensor.name: name for name in sorted(weights, reverse=True)}


def _static(name: str) -> str:
    return name.removeprefix(optimizers.PREFIX)


def _updated(optimizer: Any, weights: Mapping[str, Any]) -> Any:
    """Return the tensors that this rank's optimizer updates, under the names of their parameters."""
    if optimizers.any_sliced(weights):
        return [optimizers.updated(weight.local_tensor) for weight in weights.values()]
    if isinstance(optimizer, GroupShardedOptimizerStage2):
        return optimizer._segment_params()[optimizer._rank]
    ranges = sharding_with_ranges(optimizer)
    if ranges is not None:
        return _slices_of_buffers(ranges)
    for wrapper in unwrapped(optimizer):
        if isinstance(wrapper, DygraphShardingOptimizer):
            own = wrapper._rank2fused if has_fused_states(wrapper) else wrapper._rank2params
            return own[wrapper._sharding_rank]
    return _listed(optimizer)


def _listed(optimizer: Any) -> Any:
    """Return the parameters that an optimizer was made with."""
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


@dataclass(frozen=True)
class _FusedParameter:
    """A parameter in a buffer that the optimizer updates as one parameter (``stage1_tensor_fusion``).

    Args:
        name: its static name.
        begin: index of its first element in the buffer.
        size: number of its elements.
    """

    name: str
    begin: int
    size: int


def _fused(optimizer: Any) -> dict[str, list[_FusedParameter]]:
    """Return the parameters of every fused buffer of this rank, by the buffer's static name.

    Paddle keeps no list of them, but parameters share the memory of their buffer.
    """
    found: dict[str, list[_FusedParameter]] = {}
    for wrapper in unwrapped(optimizer):
        if not isinstance(wrapper, DygraphShardingOptimizer) or not has_fused_states(wrapper):
            continue
        for buffer in wrapper._rank2fused[wrapper._sharding_rank]:
            width, total = buffer.element_size(), math.prod(buffer.shape)
            for parameter in wrapper._rank2params[wrapper._sharding_rank]:
                begin, rest = divmod(parameter.data_ptr() - buffer.data_ptr(), width)
                if 0 <= begin < total and not rest and parameter.dtype == buffer.dtype:
                    size = math.prod(parameter.shape)
                    found.setdefault(buffer.name, []).append(_FusedParameter(parameter.name, begin, size))
    return found


def _parts(
    state: StateDescriptor, static: str, tensor: Any, fused: Mapping[str, Sequence[_FusedParameter]]
) -> Iterator[tuple[str, Any]]:
    """Yield static names of parameters and their parts of a state; the parameters of a buffer share its numbers."""
    if static not in fused:
        yield static, tensor
    for one in fused.get(static, ()):
        number = state.shape is StateShape.NUMBER
        yield one.name, tensor if number else tensor._slice(one.begin, one.begin + one.size).detach()


def _ranges(optimizer: Any, fused: Mapping[str, Sequence[_FusedParameter]]) -> dict[str, slice]:
    """Return this rank's range of each parameter in a fused buffer without padding, by static name."""
    sharding = sharding_with_ranges(optimizer)
    found = {one.name: slice(0, one.size) for parameters in fused.values() for one in parameters}
    for buffer in () if sharding is None else sharding._comm_buffer_list:
        for static, view in buffer._sharding_param_grad_view.items():
            first, size = view._index, math.prod(view._param.shape)
            begin = view._param_begin - first
            found[static] = slice(begin, max(min(size, view._param_end - first), begin))
    return found


def tensors(optimizer: Any) -> Iterator[tuple[StateDescriptor, str, Any]]:
    """Yield declaration, static name of the parameter or buffer, and tensor of every state.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
    """
    descriptor, inner = descriptor_of(optimizer), innermost(optimizer)
    for static, tensor in getattr(inner, "_master_weights", {}).items():
        yield MASTER, _static(static), tensor
    refuse_unsaved_states(inner)
    prefix = "" if inner._name is None else f"{inner._name}_"
    for accumulator, tensors in inner._accumulators.items():
        # A tensor's own name is no help: one that was moved to page-locked memory has another one.
        state = _declaration(accumulator.removeprefix(prefix), descriptor) if tensors else MASTER
        for static, tensor in tensors.items():
            yield state, _MASTER_NAME.sub("", _static(static)), tensor


def _expected(
    optimizer: Any, weights: Mapping[str, Any], fused: Mapping[str, Sequence[_FusedParameter]]
) -> Iterator[tuple[StateDescriptor, str, Any]]:
    """Yield what :func:`tensors` will yield after the first step if every trained parameter gets a gradient.

    Left out are states that an optimizer has only sometimes.
    """
    inner, place = innermost(optimizer), paddle.empty([0]).place
    trained = {one.local_tensor.name for one in weights.values() if not one.local_tensor.stop_gradient}
    updated = [
        (_static(one.name), tuple(one.shape), str(one.dtype).rpartition(".")[2])
        for one in _updated(optimizer, weights)
        if _static(one.name) in trained or any(part.name in trained for part in fused.get(one.name, ()))
    ]
    has_masters = bool(getattr(inner, "_multi_precision", False))
    for state in descriptor_of(optimizer).states:
        for static, shape, dtype in () if state.sometimes else updated:
            with_master = has_masters and dtype in ("bfloat16", "float16")
            if with_master or not state.half_only:
                own = shape if state.shape is StateShape.PARAMETER else NUMBER_SHAPE
                expected = state.dtype or ("float32" if with_master else dtype)
                yield state, static, ExpectedTensor(own, expected, place)


def refuse_unsaved_states(optimizer: Any) -> None:
    """Refuse an optimizer with states that are no accumulators.

    Args:
        optimizer: the optimizer without wrappers.
    """
    _refuse_pending_states(optimizer)
    _refuse_custom_states(optimizer)
    _refuse_tensors_in_containers(optimizer)


def _declaration(accumulator: str, descriptor: OptimizerDescriptor) -> StateDescriptor:
    for state in descriptor.states:
        if state.role == OPTIMIZER_STATE and state.paddle_name == accumulator:
            return state
    declared = [one.paddle_name for one in descriptor.states if one is not MASTER]
    raise OptionError(
        f"The optimizer has states that are not declared: {accumulator}.",
        where=descriptor.name,
        evidence=[f"declared: {', '.join(declared) or 'none'}"],
        next_step="Declare all accumulators of the optimizer with paddleformers_fc.register_optimizer.",
    )


def _refuse_pending_states(optimizer: Any) -> None:
    """Refuse states that ``set_state_dict`` has set and the first step will give to the accumulators."""
    # Paddle's holder keeps the given states even after the accumulators have them.
    given = {tensor.name for tensors in optimizer._accumulators.values() for tensor in tensors.values()}
    waiting = sorted({*optimizer._accumulators_holder} - given)
    if not waiting:
        return
    raise MismatchError(
        f"{count_text(len(waiting), 'state')} of the optimizer wait for the first step.",
        where=f"{type(optimizer).__name__}.set_state_dict",
        evidence=waiting,
        next_step="Save after a step, or load with paddleformers_fc.load.",
    )


def _refuse_custom_states(optimizer: Any) -> None:
    """Refuse states that a class adds in its own ``state_dict``, without an accumulator."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    known = {id(tensor) for tensors in optimizer._accumulators.values() for tensor in tensors.values()}
    states = optimizer.state_dict().items()
    others = sorted(name for name, value in states if name not in _OF_PADDLE and id(value) not in known)
    if others:
        raise OptionError(
            f"{count_text(len(others), 'state')} of the optimizer would not be saved: only accumulators are.",
            where=f"{qualified_name(type(optimizer))}.state_dict",
            evidence=others,
            next_step="Create them with _add_accumulator, and declare them with paddleformers_fc.register_optimizer.",
        )


def _refuse_tensors_in_containers(optimizer: Any) -> None:
    """Refuse tensors of the shapes of parameters, or by their names, in containers of a class's own."""
    parameters = list(_parameters(optimizer))
    known = {id(parameter) for parameter in parameters}
    accumulators = getattr(optimizer, "_accumulators", {}).values()
    known |= {id(tensor) for tensors in accumulators for tensor in tensors.values()}
    known |= {id(tensor) for tensor in getattr(optimizer, "_master_weights", {}).values()}
    shapes = {tuple(parameter.shape) for parameter in parameters}
    keys = {parameter.name for parameter in parameters}
    found = [
        f"{attribute}: {list(tensor.shape)}"
        for attribute, value in vars(optimizer).items()
        if attribute not in _CONTAINERS_OF_PADDLE and isinstance(value, dict | list | tuple)
        for key, tensor in _tensors_in(value)
        if id(tensor) not in known and (tuple(tensor.shape) in shapes or key in keys)
    ]
    if found:
        raise OptionError(
            f"{count_text(len(found), 'tensor')} of the optimizer would not be saved: only accumulators are.",
            where=qualified_name(type(optimizer)),
            evidence=found[:_MOST_NAMED],
            next_step="Create them with _add_accumulator, and declare them with paddleformers_fc.register_optimizer.",
        )


def _parameters(optimizer: Any) -> Iterator[Any]:
    for name in ("_param_groups", "_parameter_list"):
        for group in getattr(optimizer, name, None) or ():
            yield from group["params"] if isinstance(group, dict) else [group]


def _tensors_in(value: Any, key: object = None, depth: int = 3) -> Iterator[tuple[object, Any]]:
    """Yield the tensors in nested containers with the outermost key."""
    if isinstance(value, paddle.Tensor):
        yield key, value
    elif depth and isinstance(value, dict):
        for own, one in value.items():
            yield from _tensors_in(one, own if key is None else key, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one, key, depth - 1)


def _shard(
    name: str, state: StateDescriptor, tensor: Any, weight: Any, range_: slice | None, shape: tuple[int, ...]
) -> Any:
    """Return one state as a shard; None if this rank's part of the parameter is all padding."""
    if range_ is not None and range_.stop == range_.start:
        return None
    if state.shape is StateShape.NUMBER:
        _refuse_shape(name, state, tensor, math.prod(tensor.shape) == 1)
        return ShardedWeight(name, tensor, NUMBER_SHAPE, NUMBER_SHAPE, (0,))
    if state.shape is StateShape.SHARD_NUMBER:
        return _number_of_shard(name, tensor, weight)
    if optimizers.is_sliced(weight.local_tensor):
        return optimizers.piece(name, tensor, weight)
    if range_ is not None:
        length = range_.stop - range_.start
        _refuse_shape(name, state, tensor, len(tensor.shape) == 1 and tensor.shape[0] >= length)
        # Without strided kernels Paddle's slices are copies, into which a load would be lost.
        own = tensor if math.prod(tensor.shape) == length else tensor._slice(0, length).detach()
        return ShardedWeight(name, own, weight.local_shape, weight.global_shape, weight.global_offset, True, range_)
    _refuse_shape(name, state, tensor, tuple(tensor.shape) == shape)
    return ShardedWeight(name, tensor, weight.local_shape, weight.global_shape, weight.global_offset)


def _refuse_shape(name: str, state: StateDescriptor, tensor: Any, fits: bool) -> None:
    """Refuse a state that does not have the declared shape, such as one with an axis more than its parameter."""
    if not fits:
        raise OptionError(
            f"A state of the optimizer does not have the declared shape: {state.paddle_name}.",
            where=name,
            evidence=[f"shape {list(tensor.shape)}, declared: {state.shape.value}"],
            next_step="Correct the line paddleformers_fc.register_optimizer. States of other shapes than that of their "
            "parameter or one number are not supported: train with another optimizer, or set "
            "ignore_save_lr_and_optim: true to save weights alone.",
        )


def _number_of_shard(name: str, tensor: Any, weight: Any) -> Any:
    """Return a state that is one number per shard as an element of a tensor of such numbers, cut as its parameter."""
    lengths = list(zip(weight.global_shape, weight.local_shape, weight.global_offset, strict=True))
    counts = tuple(whole // part if part else 1 for whole, part, _ in lengths)
    place = tuple(offset // part if part else 0 for _, part, offset in lengths)
    return ShardedWeight(name, tensor, (1,) * len(counts), counts, place)
