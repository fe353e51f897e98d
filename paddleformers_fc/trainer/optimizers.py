"""Optimizer states as shards of their parameters, under every sharding stage.

The optimizer's declaration (:mod:`~paddleformers_fc.layout.roles`) and the shard of a parameter determine the shard of
each state. Undeclared optimizers are rejected before the first step and before a load.

Sharding stage 3 flattens each large parameter, pads it to equal slices and keeps this rank's slice as
``parameter.fw_storage``. A layer gathers a parameter for a pass and then releases it with a new slice tensor, so look
slices up after a pass. A slice is saved as a flattened shard without its padding, and no parameter is gathered.

Time and memory: one view and one description per parameter and state; no copies, no communication.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import paddle
from msgspec import structs
from paddle.base.framework import EagerParamBase
from paddle.distributed import ShardedWeight, fleet
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import TaskFlow
from paddle.optimizer import Optimizer

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.layout.roles import (
    MASTER,
    NUMBER_SHAPE,
    OPTIMIZER_STATE,
    OPTIMIZERS,
    OptimizerDescriptor,
    StateDescriptor,
    StateShape,
    declared_optimizer,
    qualified_name,
)
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer.conflicts import contradiction

_SLICE_PREFIX = "slice@"
"""Stage 3 names the slice of a parameter with this prefix."""

_GATHERED: dict[str, tuple[Any, Any]] = TaskFlow().full_param
"""Gathered parameters and their gather tasks, by static name. All models of the process share this dict, because it is
a mutable default argument in Paddle."""


class BufferRange(msgspec.Struct, frozen=True):
    """This rank's range of a parameter in a flat tensor: a buffer, a slice, or a state of one.

    Args:
        name: the parameter: its static name, or its name in the model.
        begin: index of the first element of the range, in the parameter.
        end: index after the last element of the range, in the parameter.
        start: index of the first element of the range, in the flat tensor.
    """

    name: str
    begin: int
    end: int
    start: int = 0

    def of(self, key: str, flat: Any, weight: Any) -> Any:
        """Return this range of a flat tensor as a ``ShardedWeight``, for the weight of the parameter."""
        # Not an ordinary slice: without strided kernels Paddle copies, and a load would not reach the tensor.
        return self.over(key, flat._slice(self.start, self.start + self.end - self.begin).detach(), weight)

    def over(self, key: str, own: Any, weight: Any) -> Any:
        """Return a tensor with the elements of this range alone as a ``ShardedWeight``."""
        flattened = slice(self.begin, self.end)
        return ShardedWeight(key, own, weight.local_shape, weight.global_shape, weight.global_offset, True, flattened)


def is_sliced(parameter: Any) -> bool:
    """Return whether stage 3 keeps this parameter as slices."""
    return hasattr(parameter, "fw_storage")


def any_sliced(weights: Mapping[str, Any]) -> bool:
    """Return whether stage 3 keeps any of these weights as slices."""
    return any(is_sliced(weight.local_tensor) for weight in weights.values())


def cut(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each parameter that stage 3 keeps as slices by this rank's slice.

    Args:
        weights: name -> ``ShardedWeight`` over the parameter.
    Returns:
        the weights, without parameters whose slice on this rank is all padding.
    """
    found: dict[str, Any] = {}
    for name, weight in weights.items():
        storage = getattr(weight.local_tensor, "fw_storage", None)
        own = weight if storage is None else _unpadded_slice(name, storage, weight)
        if own is not None:
            found[name] = own
    return found


def drop_prefetched(parameters: Iterable[Any]) -> None:
    """Drop prefetched parameters that no layer has used. Every rank must call.

    A backward pass prefetches by the order of the first forward pass and may leave parameters gathered. The next pass
    would use these old values instead of the slice, and cut its next slice from them.
    """
    for parameter in parameters:
        if getattr(parameter, "fw_storage", None) is not None:
            _, task = _GATHERED.pop(parameter.name, (None, None))
            if task is not None:
                task.wait()


def release(parameters: Iterable[Any]) -> None:
    """Release gathered parameters, so that only the slices of this rank remain. Every rank must call.

    A failed pass leaves parameters gathered. PaddleFormers itself allocates every parameter with zeros before a load.
    """
    sliced = [one for one in parameters if is_sliced(one)]
    drop_prefetched(sliced)
    for parameter in sliced:
        if parameter.fw_storage is None:
            full, _ = _GATHERED.pop(parameter.name)
            group = fleet.get_hybrid_communicate_group().get_sharding_parallel_group()
            length = int(full.shape[0]) // group.nranks
            parameter.fw_storage = full._slice(group.rank * length, (group.rank + 1) * length).detach().clone()
            parameter.status, parameter.use_count = "part", 0
        if parameter._is_initialized():
            parameter._clear_data()


def drop_gradients(weights: Mapping[str, Any]) -> None:
    """Clear the gradients of all parameters, sliced or not."""
    for weight in weights.values():
        parameter = weight.local_tensor
        if is_sliced(parameter):
            parameter.fw_storage.clear_gradient(False)
            parameter.bw_storage = None
            continue
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if gradient is not None:
                gradient.zero_()


def _optimizer_parameter(parameter: Any) -> Any:
    """Return a tensor with the name and shape that the optimizer updates; under stage 3 those of the slice."""
    if not is_sliced(parameter):
        return parameter
    storage = parameter.fw_storage
    return EagerParamBase(shape=storage.shape, dtype=storage.dtype, name=_SLICE_PREFIX + parameter.name)


def _unpadded_slice(name: str, storage: Any, weight: Any) -> Any:
    """Return this rank's slice of a parameter or state without padding; None if it is all padding."""
    size, length = math.prod(weight.local_shape), int(storage.shape[0])
    begin = min(size, length * fleet.get_hybrid_communicate_group().get_sharding_parallel_rank())
    end = min(size, begin + length)
    return None if begin == end else BufferRange(name, begin, end).of(name, storage, weight)


_INNER_ATTRIBUTES = ("_inner_opt", "_optim")
"""The attributes in which Paddle's wrappers keep the inner optimizer."""

_CREATE_METHODS = frozenset({"_create_accumulators", "_add_moments_pows", "_add_accumulator"})
"""Methods that decide which states an optimizer has."""


def check_supported(optimizer: Any) -> None:
    """Check that the states of an optimizer can be saved and loaded by parameter.

    Args:
        optimizer: the optimizer, with any wrappers of the Trainer; None if there is none yet.

    Raises:
        OptionError: its class is not declared, it contains another optimizer, or its states do not allow how sharding
            fuses or divides parameters.
    """
    if optimizer is None:
        return
    descriptor = descriptor_of(optimizer)
    _check_not_nested(innermost(optimizer))
    if any(state.shape is StateShape.SHARD_NUMBER for state in descriptor.states):
        _check_unsplit_parameters(optimizer, descriptor)


def descriptor_of(optimizer: Any) -> OptimizerDescriptor:
    """Return the declaration of an optimizer's class, or of the base class that decides which states it has.

    Raises:
        OptionError: there is none, or the installed Paddle does not have the optimizer.
    """
    kind = type(innermost(optimizer))
    for one in kind.__mro__:
        found = declared_optimizer(one)
        if found is not None and not found.unavailable:
            return found
        if not _CREATE_METHODS.isdisjoint(vars(one)):
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
    """Yield the optimizer and, level by level, the optimizers inside its wrappers."""
    yield optimizer
    # Wrappers delegate missing attributes, so read only their own. A stage 3 optimizer refers to itself here.
    own = vars(optimizer)
    wrapped = next((own[name] for name in _INNER_ATTRIBUTES if own.get(name) is not None), optimizer)
    if wrapped is not optimizer:
        yield from unwrapped(wrapped)


def has_fused_states(sharding: DygraphShardingOptimizer) -> bool:
    """Return whether the optimizer inside sharding stage 1 updates fused buffers (``stage1_tensor_fusion``)."""
    # If only communication is fused, the optimizer still updates the parameters themselves.
    return bool(sharding.tensor_fusion and sharding.fuse_optimizer)


def sharding_with_ranges(optimizer: Any) -> Any:
    """Return the sharding stage 1 wrapper with ``split_param``; None if there is none."""
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
        "docs/optimizers.md. Or train with AdamW; or set ignore_save_lr_and_optim: true (optimizer=None of save) to "
        "save weights alone.",
    )


def _check_not_nested(optimizer: Any) -> None:
    """Check that an optimizer contains no other one, as ``LookAhead`` does; the inner states would not be saved."""
    own = vars(optimizer).items()
    found = [(name, value) for name, value in own if isinstance(value, Optimizer) and value is not optimizer]
    if found:
        raise OptionError(
            f"flex_checkpoint: true does not support the optimizer {type(optimizer).__name__}, which contains another.",
            where=qualified_name(type(optimizer)),
            evidence=[f"{name}: {qualified_name(type(value))}" for name, value in found],
            next_step="Train with one optimizer; or set ignore_save_lr_and_optim: true (optimizer=None of save) to "
            "save weights alone.",
        )


def _check_unsplit_parameters(optimizer: Any, descriptor: OptimizerDescriptor) -> None:
    """Check that sharding neither splits nor fuses parameters: a number per local tensor could not be resharded."""
    if sharding_with_ranges(optimizer) is not None:
        key = "split_param: true"
    elif any(is_sliced(parameter) for parameter in _parameter_list(innermost(optimizer)) or ()):
        key = "sharding: stage3"
    elif any(isinstance(one, DygraphShardingOptimizer) and has_fused_states(one) for one in unwrapped(optimizer)):
        key = "stage1_tensor_fusion: true"
    else:
        return
    states = [state.paddle_name for state in descriptor.states if state.shape is StateShape.SHARD_NUMBER]
    raise contradiction(
        [
            f"flex_checkpoint: true and {key} with {descriptor.short_name}: its {', '.join(states)} is one number per "
            "local tensor, here of elements that belong together under this layout alone"
        ],
        "Use sharding stage 1 without these keys, or stage 2; or another optimizer.",
    )


# ---- States as shards, and their creation.

_MASTER_NAME = re.compile(r"_fp32_master_\d+$")
"""The suffix of master weights in the keys of their accumulators."""

_OTHER_ENTRIES = ("LR_Scheduler", "master_weights")
"""Entries of ``state_dict`` that are not accumulators and are saved separately."""

_PADDLE_CONTAINERS = frozenset(
    {
        *("_accumulators_holder", "_auxiliary_vars", "_default_dict", "_learning_rate_map"),
        *("_master_grads", "_param_dict", "_param_groups", "_parameter_list"),
    }
)
"""Containers of Paddle's optimizers whose tensors are not states, or that have checks of their own."""

_MOST_NAMED = 8


class ExpectedTensor(msgspec.Struct, frozen=True):
    """A state that the first step will create.

    Args:
        shape: its shape.
        dtype: numpy name of the element type.
        place: the Paddle place in which it will be created.
    """

    shape: tuple[int, ...]
    dtype: str
    place: Any

    def is_dist(self) -> bool:
        """Return False: it is not a ``DistTensor``. ``ShardedWeight`` calls this."""
        return False

    def _slice(self, start: int, stop: int) -> ExpectedTensor:
        return structs.replace(self, shape=(stop - start,))

    def detach(self) -> ExpectedTensor:
        """Return this tensor."""
        return self


def sharded_states(optimizer: Any, weights: Mapping[str, Any], may_expect: bool = False) -> dict[str, Any]:
    """Return the states of these parameters by name, as ``ShardedWeight`` over the optimizer's tensors.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
        weights: name -> ``ShardedWeight`` over the parameter.
        may_expect: if the optimizer has no states yet, describe those of its first step by :class:`ExpectedTensor`.
    Returns:
        the states of parameters of which this rank has a shard.
    Raises:
        KeyError: the parameter of a state is not among the weights.
        OptionError: the optimizer or one of its states is not declared.
        MismatchError: states wait for the first step.
    """
    names, own, ranges = _names(weights), cut(weights), _ranges(optimizer)
    # Paddle describes a stack of experts, which has three axes, as a matrix.
    shapes = {one.name: tuple(one.shape) for one in _parameter_list(innermost(optimizer))}
    found: dict[str, Any] = {}
    expects = may_expect and not any(innermost(optimizer)._accumulators.values())
    for state, static, tensor in _expected(optimizer, weights, ranges) if expects else tensors(optimizer):
        for one in ranges.get(static, [None]):
            parameter = names[static if one is None else one.name]
            if parameter not in own:
                continue
            weight = weights[parameter]
            shape = shapes.get(static, tuple(weight.local_shape))
            shard = _shard(parameter + state.suffix, state, tensor, weight, one, shape)
            if shard is not None:
                found[shard.key] = shard
    return dict(sorted(found.items()))  # Paddle's order of creation depends on the first step.


def create(
    optimizer: Any,
    weights: Mapping[str, Any],
    parameters: Collection[str],
    place_master: Callable[[Any], object] | None = None,
) -> None:
    """Create the states of these parameters, as the first step would. Existing states stay.

    Create them one parameter at a time: an offloaded optimizer then has one parameter's states on the device.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
        weights: name -> ``ShardedWeight`` over the parameter.
        parameters: names of the parameters that get states.
        place_master: moves a master weight in place to where the run keeps it between steps.
    """
    names, ranges = _names(weights), _ranges(optimizer)
    inner = optimizer._optim if isinstance(optimizer, GroupShardedOptimizerStage2) else optimizer
    block = paddle.base.framework.default_main_program().global_block()
    for one in _optimizer_parameters(optimizer, weights):
        static = _static(one.name)
        if any(names.get(own) in parameters for own in (static, *(part.name for part in ranges.get(static, ())))):
            # Otherwise Paddle would take states from an earlier set_state_dict, whose names may no longer match.
            innermost(optimizer)._accumulators_holder = {}
            inner._create_accumulators(block, [one])
            master = None if place_master is None else getattr(inner, "_master_weights", {}).get(one.name)
            if place_master is not None and master is not None:
                place_master(master)


def build_buffers(model: Any, optimizer: Any) -> None:
    """Build the fused buffers of ``split_param`` that an overlapped pipeline builds in its first step.

    Without these buffers, the optimizer's states cannot be created before the first step.

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
    """Map static names to structured names (first wins on ties)."""
    return {weights[name].local_tensor.name: name for name in sorted(weights, reverse=True)}


def _static(name: str) -> str:
    return name.removeprefix(_SLICE_PREFIX)


def _optimizer_parameters(optimizer: Any, weights: Mapping[str, Any]) -> Any:
    """Return the tensors that this rank's optimizer updates, under the names of their parameters."""
    if any_sliced(weights):
        parameters = [weight.local_tensor for weight in weights.values()]
        return [_optimizer_parameter(one) for one in parameters if not one.stop_gradient]
    if isinstance(optimizer, GroupShardedOptimizerStage2):
        return optimizer._segment_params()[optimizer._rank]
    ranges = sharding_with_ranges(optimizer)
    if ranges is not None:
        return _buffer_slices(ranges)
    for wrapper in unwrapped(optimizer):
        if isinstance(wrapper, DygraphShardingOptimizer):
            own = wrapper._rank2fused if has_fused_states(wrapper) else wrapper._rank2params
            return own[wrapper._sharding_rank]
    return _parameter_list(optimizer)


def _parameter_list(optimizer: Any) -> Any:
    """Return the parameters with which an optimizer was constructed."""
    groups = getattr(optimizer, "_param_groups", None) or ()
    if any(isinstance(group, dict) for group in groups):
        return itertools.chain.from_iterable(group["params"] for group in groups)
    return optimizer._parameter_list


def _buffer_slices(optimizer: Any) -> Iterator[Any]:
    """Yield this rank's range of each parameter under ``split_param``, with padding."""
    for buffer in optimizer._comm_buffer_list:
        for static, view in buffer._sharding_param_grad_view.items():
            begin, end = view._param_begin, view._param_end
            if 0 <= begin < end:
                part = paddle.slice(view._param_buffer, axes=[0], starts=[begin], ends=[end])
                part.name = static
                yield part


def _ranges(optimizer: Any) -> dict[str, list[BufferRange]]:
    """Return this rank's ranges of parameters in flat states, by the static names of the states.

    Under ``split_param`` that is the name of the parameter, and under ``stage1_tensor_fusion`` the name of a buffer.
    """
    found: dict[str, list[BufferRange]] = {}
    sharding = sharding_with_ranges(optimizer)
    for buffer in () if sharding is None else sharding._comm_buffer_list:
        for static, view in buffer._sharding_param_grad_view.items():
            first, size = view._index, math.prod(view._param.shape)
            begin = view._param_begin - first
            found[static] = [BufferRange(static, begin, max(min(size, view._param_end - first), begin))]
    for wrapper in unwrapped(optimizer):
        if isinstance(wrapper, DygraphShardingOptimizer) and has_fused_states(wrapper):
            own = wrapper._rank2params[wrapper._sharding_rank]
            for buffer in wrapper._rank2fused[wrapper._sharding_rank]:
                for one in _parameters_in(buffer, own):
                    found.setdefault(buffer.name, []).append(one)
    return found


def _parameters_in(buffer: Any, parameters: Iterable[Any]) -> Iterator[BufferRange]:
    """Yield the parameters of a fused buffer. Paddle has no list of them, but they share the memory of the buffer."""
    width, total = buffer.element_size(), math.prod(buffer.shape)
    for parameter in parameters:
        begin, rest = divmod(parameter.data_ptr() - buffer.data_ptr(), width)
        if 0 <= begin < total and not rest and parameter.dtype == buffer.dtype:
            yield BufferRange(parameter.name, 0, math.prod(parameter.shape), begin)


def tensors(optimizer: Any) -> Iterator[tuple[StateDescriptor, str, Any]]:
    """Yield every state as its declaration, the static name of its parameter or buffer, and its tensor.

    Args:
        optimizer: the optimizer with the Trainer's wrappers.
    """
    descriptor, inner = descriptor_of(optimizer), innermost(optimizer)
    for static, tensor in getattr(inner, "_master_weights", {}).items():
        yield MASTER, _static(static), tensor
    check_states_saved(inner)
    prefix = "" if inner._name is None else f"{inner._name}_"
    for accumulator, tensors in inner._accumulators.items():
        # Do not rely on tensor names: a tensor that was moved to page-locked memory has a new name.
        state = _declaration(accumulator.removeprefix(prefix), descriptor) if tensors else MASTER
        for static, tensor in tensors.items():
            yield state, _MASTER_NAME.sub("", _static(static)), tensor


def _expected(
    optimizer: Any, weights: Mapping[str, Any], ranges: Mapping[str, Sequence[BufferRange]]
) -> Iterator[tuple[StateDescriptor, str, Any]]:
    """Yield what :func:`tensors` will yield after the first step if every trained parameter gets a gradient.

    States that an optimizer has only sometimes are omitted.
    """
    inner, place = innermost(optimizer), paddle.empty([0]).place
    trained = {one.local_tensor.name for one in weights.values() if not one.local_tensor.stop_gradient}
    updated = [
        (_static(one.name), tuple(one.shape), str(one.dtype).rpartition(".")[2])
        for one in _optimizer_parameters(optimizer, weights)
        if _static(one.name) in trained or any(part.name in trained for part in ranges.get(one.name, ()))
    ]
    has_masters = bool(getattr(inner, "_multi_precision", False))
    for state in descriptor_of(optimizer).states:
        for static, shape, dtype in () if state.sometimes else updated:
            with_master = has_masters and dtype in ("bfloat16", "float16")
            if with_master or not state.half_only:
                own = shape if state.shape is StateShape.PARAMETER else NUMBER_SHAPE
                expected = state.dtype or ("float32" if with_master else dtype)
                yield state, static, ExpectedTensor(own, expected, place)


def check_states_saved(optimizer: Any) -> None:
    """Check that all states of an optimizer are accumulators, because only these are saved.

    Args:
        optimizer: the optimizer without wrappers.
    """
    _check_no_pending_states(optimizer)
    _check_no_custom_states(optimizer)
    _check_no_tensors_in_containers(optimizer)


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


def _check_no_pending_states(optimizer: Any) -> None:
    """Check that no states of ``set_state_dict`` wait for the first step, which copies them to the accumulators."""
    # Paddle keeps these states even after the copy.
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


def _check_no_custom_states(optimizer: Any) -> None:
    """Check that a class adds no states in its own ``state_dict`` without an accumulator."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    known = {id(tensor) for tensors in optimizer._accumulators.values() for tensor in tensors.values()}
    states = optimizer.state_dict().items()
    others = sorted(name for name, value in states if name not in _OTHER_ENTRIES and id(value) not in known)
    if others:
        raise OptionError(
            f"{count_text(len(others), 'state')} of the optimizer would not be saved: only accumulators are.",
            where=f"{qualified_name(type(optimizer))}.state_dict",
            evidence=others,
            next_step="Create them with _add_accumulator, and declare them with paddleformers_fc.register_optimizer.",
        )


def _check_no_tensors_in_containers(optimizer: Any) -> None:
    """Check that a subclass keeps no states in its containers: tensors shaped like a parameter or keyed by its name."""
    parameters = list(_parameter_list(optimizer))
    known = {id(parameter) for parameter in parameters}
    accumulators = getattr(optimizer, "_accumulators", {}).values()
    known |= {id(tensor) for tensors in accumulators for tensor in tensors.values()}
    known |= {id(tensor) for tensor in getattr(optimizer, "_master_weights", {}).values()}
    shapes = {tuple(parameter.shape) for parameter in parameters}
    keys = {parameter.name for parameter in parameters}
    found = [
        f"{attribute}: {list(tensor.shape)}"
        for attribute, value in vars(optimizer).items()
        if attribute not in _PADDLE_CONTAINERS and isinstance(value, dict | list | tuple)
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


def _tensors_in(value: Any, key: object = None, depth: int = 3) -> Iterator[tuple[object, Any]]:
    """Yield the tensors in nested containers, each with its outermost key."""
    if isinstance(value, paddle.Tensor):
        yield key, value
    elif depth and isinstance(value, dict):
        for own, one in value.items():
            yield from _tensors_in(one, own if key is None else key, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one, key, depth - 1)


def _shard(
    name: str, state: StateDescriptor, tensor: Any, weight: Any, range_: BufferRange | None, shape: tuple[int, ...]
) -> Any:
    """Return a state as a shard; None if this rank's part of the parameter is all padding."""
    if range_ is not None and range_.begin == range_.end:
        return None
    if state.shape is StateShape.NUMBER:
        _check_shape(name, state, tensor, math.prod(tensor.shape) == 1)
        return ShardedWeight(name, tensor, NUMBER_SHAPE, NUMBER_SHAPE, (0,))
    if state.shape is StateShape.SHARD_NUMBER:
        return _shard_number(name, tensor, weight)
    if is_sliced(weight.local_tensor):
        return _unpadded_slice(name, tensor, weight)
    if range_ is not None:
        size = range_.end - range_.begin
        _check_shape(name, state, tensor, len(tensor.shape) == 1 and tensor.shape[0] >= range_.start + size)
        if tensor.shape[0] == size:  # Not a slice, which would keep the old memory of a state that is offloaded.
            return range_.over(name, tensor, weight)
        return range_.of(name, tensor, weight)
    _check_shape(name, state, tensor, tuple(tensor.shape) == shape)
    return ShardedWeight(name, tensor, weight.local_shape, weight.global_shape, weight.global_offset)


def _check_shape(name: str, state: StateDescriptor, tensor: Any, is_declared: bool) -> None:
    if not is_declared:
        raise OptionError(
            f"A state of the optimizer does not have the declared shape: {state.paddle_name}.",
            where=name,
            evidence=[f"shape {list(tensor.shape)}, declared: {state.shape.value}"],
            next_step="Correct the call of paddleformers_fc.register_optimizer. A state must have the shape of its "
            "parameter or be one number: otherwise train with another optimizer, or set "
            "ignore_save_lr_and_optim: true (optimizer=None of save) to save weights alone.",
        )


def _shard_number(name: str, tensor: Any, weight: Any) -> Any:
    """Return a state with one number per shard as one element of a tensor that has an element for every shard."""
    lengths = list(zip(weight.global_shape, weight.local_shape, weight.global_offset, strict=True))
    counts = tuple(full // local if local else 1 for full, local, _ in lengths)
    offsets = tuple(offset // local if local else 0 for _, local, offset in lengths)
    return ShardedWeight(name, tensor, (1,) * len(counts), counts, offsets)
