"""The live tensors of a run by role, which saves write and loads fill.

Model and optimizer describe their shards (``sharded_state_dict``), and this module sorts them into roles. Paddle
creates optimizer states in the first step, so a load creates them before it fills them.

In semi-automatic mode PaddleFormers' Trainer uses Paddle's ``fully_shard``, which moves the parameters into padded
buffers and gives each rank along the axis ``dp`` an equal range. The optimizer updates the buffers, so its states have
the names and lengths of buffers. Here a parameter or state is a range of a buffer, like a flattened shard under
sharding stage 1.

:class:`UpdateBarrier` lets updates and loads wait for threads that read live tensors.

Time and memory: a view and a description per parameter and state; no copies and no communication.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import cached_property
from typing import Any, TypeAlias
from weakref import WeakSet

import paddle
import paddle.distributed as dist
from paddle.distributed import ShardedWeight
from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.layout.live import LiveRoles
from paddleformers_fc.layout.roles import MASTER, MODEL_STATE, OPTIMIZER_STATE, StateDescriptor, StateShape
from paddleformers_fc.trainer import description, optimizers
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.dist_tensors import Named, StateDict, roles_of
from paddleformers_fc.trainer.library import sharded_state_dict
from paddleformers_fc.trainer.optimizers import BufferRange, innermost


def context_of(model: Any) -> Any:
    """Return the ``fully_shard`` context of a model; None if it has no buffers."""
    found = get_fsdp_context()
    return found if found is not None and found.model is model else None


def buffers(context: Any, names: Mapping[str, str]) -> Iterator[tuple[Any, list[tuple[BufferRange, Any]]]]:
    """Yield this rank's part of every buffer, with its ranges of parameters and ``ShardedWeight`` of their shapes.

    Args:
        context: see :func:`context_of`.
        names: static name -> name of the parameter in the model.
    Raises:
        OptionError: the mesh has other axes than ``dp``.
    """
    mesh = context.mesh
    if len(mesh.process_ids) != context.buffer_manager._fsdp_group.nranks:
        raise OptionError(
            "flex_checkpoint: true does not support tensor parallelism of the semi-automatic mode.",
            where="enable_auto_parallel: true",
            evidence=[f"mesh {mesh.dim_names} of shape {mesh.shape}: Paddle 3.3.1 shards buffers along dp only"],
            next_step="Set tensor_model_parallel_size: 1, or remove enable_auto_parallel.",
        )
    rank = mesh.process_ids.index(dist.get_rank())
    for group in context.buffer_manager.buffer_groups:
        buffer = group.params_buffer
        yield buffer.data_buffer, list(_ranges(group.params, buffer.data_buffer, buffer.param_offsets, names, rank))


def _ranges(
    parameters: Collection[Any], buffer: Any, offsets: Mapping[str, int], names: Mapping[str, str], rank: int
) -> Iterator[tuple[BufferRange, Any]]:
    length = int(buffer.shape[0])
    first = rank * length
    for parameter in parameters:
        shape, offset = tuple(int(one) for one in parameter.shape), int(offsets[parameter.name])
        begin, end = max(first, offset), min(first + length, offset + math.prod(shape))
        if begin < end:
            own = BufferRange(names[parameter.name], begin - offset, end - offset, begin - first)
            yield own, ShardedWeight(own.name, buffer, shape, shape, (0,) * len(shape))


def _roles_in_buffers(
    context: Any, names: Mapping[str, str], states: Mapping[str, Mapping[StateDescriptor, Any]]
) -> dict[str, dict[str, Any]]:
    """Return this rank's weights and states: role -> name -> ``ShardedWeight``.

    Args:
        context: see :func:`context_of`.
        names: as for :func:`buffers`.
        states: states by buffer name.
    """
    found: dict[str, dict[str, Any]] = {}
    for buffer, ranges in buffers(context, names):
        for one, weight in ranges:
            found.setdefault(MODEL_STATE, {})[one.name] = one.of(one.name, buffer, weight)
            for state, tensor in states.get(buffer.name, {}).items():
                key = one.name + state.suffix
                number = state.shape is StateShape.NUMBER
                found.setdefault(state.role, {})[key] = (
                    ShardedWeight(key, tensor, (1,), (1,), (0,)) if number else one.of(key, tensor, weight)
                )
    return found


def create_buffer_states(context: Any, optimizer: Any, stored: Collection[str]) -> None:
    """Create the states of all trained buffers, as the first step would.

    Args:
        context: see :func:`context_of`.
        optimizer: the optimizer with the Trainer's wrappers.
        stored: names of the stored states; if empty, nothing is created.
    """
    block = paddle.base.framework.default_main_program().global_block()
    innermost(optimizer)._accumulators_holder = {}
    for group in context.buffer_manager.buffer_groups if stored else ():
        if not group.params_buffer.data_buffer.stop_gradient:
            optimizer._create_accumulators(block, [group.params_buffer.data_buffer])


_HALF = (paddle.bfloat16, paddle.float16)


_OVERLAPPING = ("stage1_broadcast_overlap", "stage1_allgather_overlap", "stage2_overlap")
"""Training arguments under which updated weights are received during the next forward pass."""


def receives_in_passes(args: Any) -> bool:
    """Return whether ranks receive updated weights during the next forward pass.

    Args:
        args: training arguments; PaddleNLP's have the options as words of one string.
    """
    words = str(getattr(args, "sharding_parallel_config", "")).replace(",", " ").split()
    return any(getattr(args, name, False) or f"enable_{name}" in words for name in _OVERLAPPING)


def wait_for_weights(args: Any = None) -> None:
    """Wait for all work that may write to live tensors, before they are read or filled outside of passes.

    Waiting for the compute stream is not enough: an overlapped broadcast has its own stream, and synchronizes with the
    compute stream only when a layer is next used. On CPUs only such broadcasts run asynchronously.

    Args:
        args: training arguments; None in a loop without a Trainer.
    """
    if receives_in_passes(args) or not paddle.device.get_device().startswith("cpu"):
        paddle.device.synchronize()


_BARRIERS: WeakSet[UpdateBarrier] = WeakSet()
"""The barriers of all Trainers of this process."""


def finish_reads() -> None:
    """Wait for all threads that read live tensors, before a load fills these outside of an update."""
    for barrier in tuple(_BARRIERS):
        barrier.finish()


class UpdateBarrier:
    """Lets the next optimizer update wait for the reads of live tensors that have begun since the last update.

    Args:
        passes_change_weights: returns whether forward passes change tensors that are read, as the overlapped broadcast
            of parameters does. If so, :meth:`add` waits for each read.

    Attributes:
        waited: seconds for which the training thread has waited.
    """

    def __init__(self, passes_change_weights: Callable[[], bool]) -> None:
        self.waited = 0.0
        self._passes_change_weights = passes_change_weights
        self._reads: list[Future[Any]] = []
        _BARRIERS.add(self)

    def add(self, read: Future[Any]) -> None:
        """Let the next update wait for a read of live tensors.

        Args:
            read: a future that is done when the live tensors have been read; its exception is ignored here.
        """
        self._reads.append(read)
        if self._passes_change_weights():
            self.finish()

    def finish(self) -> None:
        """Wait for all reads."""
        started = time.monotonic()
        wait(self._reads)
        self._reads.clear()
        self.waited += time.monotonic() - started


def model_roles(model: Any) -> LiveRoles:
    """Return the weights of a model: ``model_state`` -> name -> ``ShardedWeight`` over the live tensors.

    Args:
        model: the model as it was built, not its parallel wrapper.
    """
    return LiveModel(model).weights()


def release_full_parameters(model: Any) -> None:
    """Release gathered parameters before this rank's slices and buffers are filled. Every rank must call."""
    context = context_of(model)
    if context is not None:
        context.comm_manager.reset_params_buffer_status()  # They are gathered again after the buffers are filled.
    # Also parameters that no checkpoint fills: the zeros that PaddleFormers allocates would overwrite their slices.
    optimizers.release(model.parameters())


def drop_gradients(model: Any, optimizer: Any) -> None:
    """Clear the gradients of an aborted step.

    Args:
        model: the model as it was built, not its parallel wrapper.
        optimizer: the optimizer, with any wrappers of the Trainer.
    """
    weights = description.saved_weights(model, sharded_weights(model))
    if optimizers.any_sliced(weights):
        optimizers.drop_gradients(weights)  # Stage 3's clear_grad fails if a parameter has no gradient.
    else:
        optimizer.clear_grad()


def base_weights(model: Any) -> dict[str, Any]:
    """Return the weights of a model with adapters that its checkpoints do not contain."""
    weights = sharded_weights(model)
    saved = description.saved_weights(model, weights)
    return {name: weight for name, weight in weights.items() if name not in saved}


def sharded_weights(model: Any) -> dict[str, Any]:
    if description.is_semi_auto(model):
        return {name: Named(tensor) for name, tensor in model.state_dict().items()}
    found = {name: weight for name, weight in sharded_state_dict(model).items() if isinstance(weight, ShardedWeight)}
    return description.described_rows(model, found)


class LiveModel:
    """A model and its optimizer as a source of live tensors. The description of the parameters is cached.

    Args:
        model: any layer with ``sharded_state_dict`` as it was built, not its parallel wrapper.
        optimizer: the optimizer over its parameters, with all wrappers; None for the weights only.
        described: the description of the model; created on demand by default.
        place_master: moves a master weight in place to where the run keeps it between steps, such as host memory.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        described: ModelDescription | None = None,
        place_master: Callable[[Any], object] | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._described, self._place_master = described, place_master

    @property
    def has_states(self) -> bool:
        """Return whether there is an optimizer."""
        return self.optimizer is not None

    @cached_property
    def is_global(self) -> bool:
        """Return whether the model uses semi-automatic parallelism."""
        return description.is_semi_auto(self.model)

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        """The tensors that a checkpoint contains, by name, with their full shapes even if stage 3 has released them."""
        return description.saved_weights(self.model, sharded_weights(self.model))

    @cached_property
    def owners(self) -> dict[str, Any]:
        """The parameters without aliases of tied parameters, so that states are named after the owner.

        Paddle would name them after the name that sorts first.
        """
        aliases = {
            alias
            for alias, owner in tied(self.model, self._described).items()
            if alias in self._parameters
            and owner in self._parameters
            and self._parameters[alias].local_tensor.name == self._parameters[owner].local_tensor.name
        }
        return {name: weight for name, weight in self._parameters.items() if name not in aliases}

    def weights(self) -> LiveRoles:
        """Return the tensors of ``model_state``."""
        if self.is_global:
            return _semi_auto_roles(self.model, None, tied(self.model, self._described))
        return {MODEL_STATE: optimizers.cut(self._parameters)}

    def roles(self, may_expect: bool = False) -> LiveRoles:
        """Return the weights of the model and the states of its optimizer by role.

        Args:
            may_expect: as for :func:`.optimizers.sharded_states`.

        Raises:
            MismatchError: the optimizer has a state for a parameter that is not in the model.
        """
        if self.is_global:
            return _semi_auto_roles(self.model, self.optimizer, tied(self.model, self._described))
        roles = self.weights()
        if self.optimizer is None:
            return roles
        try:
            states = _states(self.optimizer, self.owners, may_expect)
        except KeyError as error:
            raise MismatchError(
                "The optimizer has a state for a parameter that is not in the model.",
                where=type(self.optimizer).__name__,
                evidence=[f"{type(error).__name__}: {error}"],
                next_step="Use an optimizer over parameters of this model only.",
            ) from error
        roles[MASTER.role] = {name: state for name, state in states.items() if name.endswith(MASTER.suffix)}
        roles[OPTIMIZER_STATE] = {name: state for name, state in states.items() if not name.endswith(MASTER.suffix)}
        return {role: weights for role, weights in roles.items() if weights or role == MODEL_STATE}

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of this rank's trained 16-bit parameters, if the optimizer keeps master weights."""
        if self.optimizer is None or not getattr(innermost(self.optimizer), "_multi_precision", False):
            return frozenset()
        return frozenset(
            name
            for name, weight in self._parameters.items()
            if not weight.local_tensor.stop_gradient and weight.local_tensor.dtype in _HALF
        )

    def prepare(self, stored: Collection[str]) -> None:
        """Release gathered parameters, and create the states of this rank's parameters that have stored states.

        Other parameters, which were frozen or never had a gradient, get no states.

        Args:
            stored: names of stored states in the model, such as ``model.norm.weight.moment1_0``.
        """
        release_full_parameters(self.model)
        if self.optimizer is None:
            return
        context = context_of(self.model)
        if context is not None:
            create_buffer_states(context, self.optimizer, stored)
            return
        optimizers.create(self.optimizer, self.owners, set(map(parameter_of_state, stored)), self._place_master)


def _semi_auto_roles(model: Any, optimizer: Any, aliases: Collection[str]) -> LiveRoles:
    """Return the tensors of semi-automatic parallelism; without an optimizer only the weights."""
    weights, context = model.state_dict(), context_of(model)
    if context is not None:
        return _buffered_roles(context, weights, optimizer, aliases)
    states: dict[str, Any] = {}
    if optimizer is not None:
        optimizers.check_states_saved(innermost(optimizer))
        # The wrapper's state_dict would create states with a step, which changes weights.
        states = innermost(optimizer).state_dict()
    return roles_of({"model": weights, "optimizer": states}, aliases)


def _buffered_roles(context: Any, weights: dict[str, Any], optimizer: Any, aliases: Collection[str]) -> LiveRoles:
    states: dict[str, dict[StateDescriptor, Any]] = {}
    for kind, buffer, tensor in () if optimizer is None else optimizers.tensors(optimizer):
        states.setdefault(buffer, {})[kind] = tensor
    names = {weights[name].name: name for name in sorted(weights, reverse=True) if name not in aliases}
    buffered = set(context.buffer_manager.param_to_buffer_id)
    found = _roles_in_buffers(context, names, states)
    # The rest, such as layer buffers, is not in fused buffers.
    others = roles_of({name: one for name, one in weights.items() if one.name not in buffered})
    return {**found, MODEL_STATE: {**others[MODEL_STATE], **found.get(MODEL_STATE, {})}}


def _states(optimizer: Any, weights: dict[str, Any], may_expect: bool) -> dict[str, Any]:
    found = optimizers.sharded_states(optimizer, weights, may_expect)
    if isinstance(optimizer, GroupShardedOptimizerStage2):
        own = _own_parameters(optimizer, weights)
        return {name: state for name, state in found.items() if parameter_of_state(name) in own}
    return found


def _own_parameters(optimizer: GroupShardedOptimizerStage2, weights: dict[str, Any]) -> set[str]:
    """Return the names of the parameters that this rank updates for all ranks in stage 2.

    If an adjacent parameter had no gradient, Paddle leaves gradients of other ranks' parameters on a rank and creates
    states for them. The owner's broadcast overwrites the results, so these states are not saved.
    """
    own = {parameter.name for parameter in optimizer._segment_params()[optimizer._rank]}
    return {name for name, weight in weights.items() if weight.local_tensor.name in own}


def trained_without_states(live: LiveModel, stored: Collection[str]) -> list[str]:
    """Return the names of trained parameters of this rank that have no stored state.

    Args:
        live: the live model.
        stored: as for :meth:`LiveModel.prepare`.
    """
    parameters = set(map(parameter_of_state, stored))
    trained = [name for name, weight in live.owners.items() if not weight.local_tensor.stop_gradient]
    return [name for name in trained if name not in parameters]


def tied(model: Any, described: ModelDescription | None = None) -> dict[str, str]:
    """Return alias -> owner of the tied tensors of a model; empty for a model without a configuration."""
    return model_ties(described or describe_model(model)) if hasattr(model, "config") else {}


def parameter_of_state(state: str) -> str:
    return state.rpartition(".")[0]


LayoutSource: TypeAlias = LiveModel | StateDict
"""The live tensors of one rank, whose optimizer states a load creates."""
