"""Fused buffers of Paddle's ``fully_shard``, which PaddleFormers' Trainer uses in its semi-automatic mode.

``fully_shard`` copies the parameters into padded buffers, of which each rank along the axis ``dp`` has an equal range,
and clears them between uses. The optimizer updates the buffers: its states have their names and lengths. A parameter
and its states are here ranges of the buffers, as flattened shards under sharding stage 1 are.

Time and memory: a view and a description per parameter and state; no copy and no communication.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import ShardedWeight
from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context

from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.roles import MODEL_STATE, StateDescriptor, StateShape
from paddleformers_fc.trainer.optimizers import innermost


@dataclass(frozen=True)
class BufferRange:
    """This rank's range of a parameter in a buffer.

    Args:
        name: of the parameter in the model.
        shape: of the parameter.
        begin: index of its first element on this rank, in the parameter.
        end: index behind the last.
        start: index of the first element in this rank's part of the buffer.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    start: int

    def of(self, key: str, buffer: Any) -> Any:
        """Return the range of a tensor of the buffer's length as a ``ShardedWeight``."""
        own = buffer._slice(self.start, self.start + self.end - self.begin).detach()
        return ShardedWeight(
            key, own, self.shape, self.shape, (0,) * len(self.shape), True, slice(self.begin, self.end)
        )


def context_of(model: Any) -> Any:
    """Return the buffers of a model; None if it has none."""
    found = get_fsdp_context()
    return found if found is not None and found.model is model else None


def buffers(context: Any, names: Mapping[str, str]) -> Iterator[tuple[Any, list[BufferRange]]]:
    """Yield the part of this rank of every buffer, and its ranges of parameters.

    Args:
        context: see :func:`context_of`.
        names: names of the parameters in the model by their static names.
    Raises:
        OptionError: the buffers are divided among other ranks than those along ``dp``.
    """
    mesh = context.mesh
    if len(mesh.process_ids) != context.buffer_manager._fsdp_group.nranks:
        raise OptionError(
            "flex_checkpoint: true does not support tensor parallelism of the semi-automatic mode.",
            where="enable_auto_parallel: true",
            evidence=[f"mesh {mesh.dim_names} of shape {mesh.shape}: Paddle 3.3.1 divides buffers by the ranks of dp"],
            next_step="Set tensor_model_parallel_size: 1, or remove enable_auto_parallel.",
        )
    rank = mesh.process_ids.index(dist.get_rank())
    for group in context.buffer_manager.buffer_groups:
        buffer = group.params_buffer
        length = int(buffer.data_buffer.shape[0])
        yield buffer.data_buffer, list(_ranges(group.params, buffer.param_offsets, names, length, rank * length))


def _ranges(
    parameters: Collection[Any], offsets: Mapping[str, int], names: Mapping[str, str], length: int, first: int
) -> Iterator[BufferRange]:
    for parameter in parameters:
        shape, offset = tuple(int(one) for one in parameter.shape), int(offsets[parameter.name])
        begin, end = max(first, offset), min(first + length, offset + math.prod(shape))
        if begin < end:
            yield BufferRange(names[parameter.name], shape, begin - offset, end - offset, begin - first)


def roles_of(
    context: Any, names: Mapping[str, str], states: Mapping[str, Mapping[StateDescriptor, Any]]
) -> dict[str, dict[str, Any]]:
    """Return this rank's weights and states: role -> name -> ``ShardedWeight``.

    Args:
        context: see :func:`context_of`.
        names: as for :func:`buffers`.
        states: states by the name of their buffer.
    """
    found: dict[str, dict[str, Any]] = {}
    for buffer, ranges in buffers(context, names):
        for one in ranges:
            found.setdefault(MODEL_STATE, {})[one.name] = one.of(one.name, buffer)
            for state, tensor in states.get(buffer.name, {}).items():
                key = one.name + state.suffix
                number = state.shape is StateShape.NUMBER
                found.setdefault(state.role, {})[key] = (
                    ShardedWeight(key, tensor, (1,), (1,), (0,)) if number else one.of(key, tensor)
                )
    return found


def static_names(context: Any) -> set[str]:
    """Return the static names of the parameters in buffers."""
    return set(context.buffer_manager.param_to_buffer_id)


def forget_gathered(context: Any) -> None:
    """Let the next use of every parameter gather it again, after its buffer is filled."""
    context.comm_manager.reset_params_buffer_status()


def create_states(context: Any, optimizer: Any, stored: Collection[str]) -> None:
    """Create the states of all trained buffers, as the first step would. Existing states stay.

    Args:
        context: see :func:`context_of`.
        optimizer: the optimizer with the Trainer's wrappers.
        stored: names of the stored states; without any, none is created.
    """
    block = paddle.base.framework.default_main_program().global_block()
    innermost(optimizer)._accumulators_holder = {}
    for group in context.buffer_manager.buffer_groups if stored else ():
        if not group.params_buffer.data_buffer.stop_gradient:
            optimizer._create_accumulators(block, [group.params_buffer.data_buffer])
