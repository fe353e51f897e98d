"""The live tensors of a run by role, which saves write and loads fill.

Model and optimizer describe their shards (``sharded_state_dict``), and this module sorts them into roles. Paddle
creates optimizer states in the first step, so a load creates them before it fills them.

In semi-automatic mode PaddleFormers' Trainer uses Paddle's ``fully_shard``, which moves the parameters into padded
buffers and gives each rank along the axis ``dp`` an equal range. The optimizer updates the buffers, so its states have
the names and lengths of buffers. Here a parameter or state is a range of a buffer, like a flattened shard under
sharding stage 1.

Time and memory: a view and a description per parameter and state; no copies and no communication.

Without a Trainer, a state dict of ``DistTensor``s is a source too. Such a tensor has a mesh, placements and a local
value, and mesh and placements determine this rank's box. Saves read the local value, and loads fill it in place. Other
tensors are complete on every rank. ``AdamW.sharded_state_dict`` is not used, because it describes every optimizer state
as complete. Whatever its placements, such a tensor has the layout of a single device: a fused layer is not interleaved
by tensor-parallel ranks (``ModelDescription.is_global``).

The checkpoint may have other names than the live model: another class of models names and fuses parameters
differently, and a user's statements (``aoa_config``) rename tensors. A load gives a live parameter the states of all
stored parameters that it is read from (:func:`to_fill`). States of a tied parameter may be stored under any of its
names, and are created under the name that the live model uses.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
import paddle
import paddle.distributed as dist
from paddle.distributed import ShardedWeight
from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.load import LoadTerms
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.live import LiveRoles, Roles, describe_roles
from paddleformers_fc.layout.roles import MASTER, MODEL_STATE, OPTIMIZER_STATE, STATES, StateDescriptor, StateShape
from paddleformers_fc.layout.shards import AxisShard, Placements, coordinate_of, placed_box
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.text import fold
from paddleformers_fc.trainer import description, optimizers
from paddleformers_fc.trainer.description import describe_model
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


def run_roles(model: Any, optimizer: Any, may_expect: bool = False) -> LiveRoles:
    """Return the weights of a model and the states of its optimizer; see :meth:`LiveModel.roles`."""
    return LiveModel(model, optimizer).roles(may_expect)


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


_MASTERS, _SCHEDULER = "master_weights", "LR_Scheduler"
"""Entries of ``Optimizer.state_dict`` that are not accumulators. The scheduler has no tensors and is not read."""

_BY_SUFFIX = {one.suffix: one for one in STATES if one.suffix and one.shape is not StateShape.SHARD_NUMBER}
_ACCUMULATORS = {one.paddle_name: one for one in _BY_SUFFIX.values() if one.role == OPTIMIZER_STATE}
_SHARD = re.compile(r"Shard\(dim=(?P<axis>\d+)(, shard_order=(?P<order>\d+))?\)")
"""The text of a placement, which alone describes an axis that several mesh axes divide."""

_STATE = re.compile(rf"(?P<parameter>.+?)(_fp32_master_\d+)?_(?P<accumulator>{'|'.join(_ACCUMULATORS)})_\d+")
"""A key of ``Optimizer.state_dict``: the static name of the parameter and the name of the accumulator."""


def shard_of_rank(name: str, tensor: Any) -> Any:
    """Return this rank's shard of a tensor as a ``ShardedWeight``; None if this rank has no element of it.

    Args:
        name: the key of the shard.
        tensor: a ``DistTensor``, or a tensor that is complete on every rank.
    Raises:
        MismatchError: a placement is not supported.
    """
    shape = tuple(int(length) for length in tensor.shape)
    if not tensor.is_dist():
        if getattr(tensor, "is_distributed", False):
            raise MismatchError(
                f"{name} is a shard of a tensor-parallel layer, and a state dict does not contain its position.",
                where="state_dict",
                evidence=[f"{name}: local shape {list(shape)}, no mesh and no placements"],
                next_step="Pass the layer instead of its state dict.",
            )
        return ShardedWeight(name, tensor, shape, shape, (0,) * len(shape))
    mesh = tensor.process_mesh
    lengths = tuple(int(length) for length in mesh.shape)
    coordinate = coordinate_of(dist.get_rank(), lengths, mesh.process_ids)
    placements = _placements(name, tensor)
    if coordinate is None:
        return None
    box = placed_box(shape, lengths, placements, coordinate)
    if 0 not in shape and not box.volume:
        return None
    if not tensor._is_initialized() or tuple(tensor._local_value().shape) != box.shape:
        raise MismatchError(
            f"The local value of {name} does not match its placements.",
            where="the state dict of this rank",
            evidence=[f"placements {tensor.placements} of shape {list(shape)}: expected shape {list(box.shape)}"],
            next_step="Initialise the tensor, and shard it with paddle.distributed.shard_tensor.",
        )
    return ShardedWeight(name, tensor, box.shape, shape, box.lo)


def _placements(name: str, tensor: Any) -> Placements:
    """Return the placements of a tensor.

    Raises:
        MismatchError: the local value is not a box of the tensor.
    """
    found: list[AxisShard | None] = []
    for one in tensor.placements:
        if one.is_partial():
            raise _unsupported(
                name,
                tensor,
                "under Partial the tensor is the sum of the local values of all ranks",
                "Reshard it to Replicate or Shard with paddle.distributed.reshard, which adds the local values.",
            )
        shard = _SHARD.fullmatch(str(one))
        if shard is None and not one.is_replicated():
            raise _unsupported(
                name,
                tensor,
                "the shard of a rank is not one box, as with a split_factor",
                "Reshard it to Shard without a split factor, or to Replicate.",
            )
        found.append(None if shard is None else AxisShard(int(shard["axis"]), int(shard["order"] or 0)))
    return found


def _unsupported(name: str, tensor: Any, reason: str, next_step: str) -> MismatchError:
    return MismatchError(
        f"The placement of {name} is not supported.",
        where="the state dict of this rank",
        evidence=[f"{name}: placements {tensor.placements}: {reason}"],
        next_step=next_step,
    )


class Named(msgspec.Struct, frozen=True):
    """A parameter in place of its shard, for callers that read only names; this rank may have no element of it."""

    local_tensor: Any


def leaves(state_dict: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield group, key and value of every tensor in a state dict, which may be nested.

    Args:
        state_dict: such as ``{"model": layer.state_dict(), "optimizer": optimizer.state_dict()}``.
        group: the key of this state dict in its parent.
    Raises:
        MismatchError: a value is not a tensor, or its key is not a string.
    """
    for key, value in state_dict.items():
        if key == _SCHEDULER:
            continue
        if isinstance(value, Mapping):
            yield from leaves(value, key)
        elif isinstance(value, paddle.Tensor) and isinstance(key, str):
            yield group, key, value
        else:
            raise MismatchError(
                f"Invalid entry {key!r} of a state dict.",
                where="state_dict",
                evidence=[
                    f"type {type(value).__name__} under a key of type {type(key).__name__}; supported are tensors "
                    "under string keys, and nested state dicts of tensors"
                ],
                next_step="Remove the entry from the state dict.",
            )


def roles_of(state_dict: Mapping[str, Any], aliases: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return this rank's shards of the tensors in a state dict: role -> name -> ``ShardedWeight``.

    Args:
        state_dict: weights, and states of an optimizer under the keys of ``Optimizer.state_dict`` or of a checkpoint.
        aliases: names of tied weights whose states are named after the owner.
    Raises:
        MismatchError: a placement is not supported, two entries are the same tensor, or a state belongs to no weight.
    """
    entries = list(leaves(state_dict))
    keys = {key for group, key, _ in entries if group != _MASTERS}
    split = [(_state_of(group, key, keys), key, tensor) for group, key, tensor in entries]
    weights = {key: tensor for state, key, tensor in split if state is None}
    owners = {weights[key].name: key for key in sorted(weights, reverse=True) if key not in aliases}
    owners |= {key: key for key in weights}
    orphans = [key for state, key, _ in split if state is not None and state[0] not in owners]
    _raise_faults(f"{key}: the state dict has no weight for this state" for key in orphans)
    named = [
        (MODEL_STATE, key, tensor) if state is None else (state[1].role, owners[state[0]] + state[1].suffix, tensor)
        for state, key, tensor in split
    ]
    counts = Counter((role, name) for role, name, _ in named)
    _raise_faults(f"{name}: {count} entries" for (_, name), count in counts.items() if count > 1)
    found: dict[str, dict[str, Any]] = {MODEL_STATE: {}}
    for role, name, tensor in named:
        shard = shard_of_rank(name, tensor)
        if shard is not None:
            found.setdefault(role, {})[name] = shard
    return found


def _raise_faults(faults: Iterable[str]) -> None:
    found = fold(sorted(faults))
    if found:
        raise MismatchError(
            "The state dict has ambiguous or orphaned entries.",
            where="state_dict",
            evidence=found,
            next_step="Pass the weights with the states of one optimizer, such as {**model.state_dict(), "
            "**optimizer.state_dict()}.",
        )


def _state_of(group: str, key: str, keys: Collection[str]) -> tuple[str, StateDescriptor] | None:
    """Return the parameter (static name or key) and the descriptor of a state; None for a weight.

    Args:
        group: see :func:`leaves`.
        key: such as ``linear_0.w_0.dist_moment1_0``, or a state's name in a checkpoint.
        keys: all keys of the state dict.
    """
    if group == _MASTERS:
        return key, MASTER
    found = _STATE.fullmatch(key)
    if found is not None:
        return found["parameter"], _ACCUMULATORS[found["accumulator"]]
    parameter, dot, last = key.rpartition(".")
    state = _BY_SUFFIX.get(dot + last)
    return None if state is None or parameter not in keys else (parameter, state)


Names = Collection[str]


class LiveNames(msgspec.Struct, frozen=True):
    """Maps names of stored states to names in the live model.

    Args:
        sources: live parameter -> the stored parameters that it is read from; None if all names are equal.
        owners: stored alias of a tied parameter -> the name of its owner.
        ties: the same for the live model.
    """

    sources: Mapping[str, Names] | None = None
    owners: Mapping[str, str] = msgspec.field(default_factory=dict)
    ties: Mapping[str, str] = msgspec.field(default_factory=dict)

    def of(self, stored: Names) -> set[str]:
        """Map names of states in the checkpoint to names in the live model, including all names of tied parameters."""
        suffixes: dict[str, set[str]] = {}
        for name in stored:
            parameter, _, suffix = name.rpartition(".")
            suffixes.setdefault(self.owners.get(parameter, parameter), set()).add(suffix)
        same = {name: (name,) for name in suffixes}
        aliases: dict[str, list[str]] = {}
        for alias, owner in self.ties.items():
            aliases.setdefault(owner, []).append(alias)
        return {
            f"{name}.{suffix}"
            for owner, parameters in (same if self.sources is None else self.sources).items()
            for name in (owner, *aliases.get(owner, ()))
            for parameter in parameters
            for suffix in suffixes.get(parameter, ())
        }


def _live_names(checkpoint: OpenedCheckpoint, model: ModelDescription, weights: Roles, terms: LoadTerms) -> LiveNames:
    """Derive the names of a checkpoint's states in a live model.

    Raises:
        FlexError: the model cannot be mapped, or a statement is invalid.
    """
    if terms.aoa_config:
        from paddleformers_fc.plan.statements import statements_source

        source, _ = statements_source(checkpoint, model, terms.aoa_config, terms.tensors or {}, terms.may_cast)
        sources: Mapping[str, Names] | None = {name: made.names for name, made in source.mapping.made.items()}
    else:
        sources = _derived_sources(checkpoint, model, weights)
    return LiveNames(sources, checkpoint.rules.aliases, model_ties(model))


def _derived_sources(
    checkpoint: OpenedCheckpoint, model: ModelDescription, weights: Roles
) -> Mapping[str, Names] | None:
    """Return the sources of live parameters through canonical tensors; None if the checkpoint has all their names."""
    if weights[MODEL_STATE].keys() <= checkpoint.rules.targets.keys():
        return None
    live = model_rules(model, describe_roles(weights)[MODEL_STATE])
    stored = _targets(checkpoint.rules)
    found: dict[str, Names] = {name: (name,) for name in live.fresh}  # Without a canonical form on either side.
    for rule in live.rules:
        sources = {name for source in rule.sources for name in stored.get(source, ())}
        found |= dict.fromkeys(rule.targets, sources)
    return found


def _targets(rules: RuleSet) -> dict[str, set[str]]:
    """Return for each canonical tensor the tensors of a model that contain a part of it."""
    found: dict[str, set[str]] = {}
    for rule in rules.rules:
        for source in rule.sources:
            found.setdefault(source, set()).update(rule.targets)
    return found


class StateDict(msgspec.Struct, frozen=True):
    """A source of live tensors: a state dict of tensors with a mesh and placements.

    Args:
        model: the state dict; see :func:`roles_of`.
        aliases: names of tied weights whose states are named after the owner.
    """

    model: Mapping[str, Any]
    aliases: frozenset[str] = frozenset()

    @property
    def is_global(self) -> bool:
        """True: every tensor has the layout of a single device."""
        return True

    @property
    def has_states(self) -> bool:
        """Return whether the state dict has optimizer states."""
        return len(self.roles()) > 1

    def weights(self) -> Roles:
        """Return the tensors of ``model_state``."""
        return {MODEL_STATE: self.roles()[MODEL_STATE]}

    def roles(self) -> Roles:
        """Return the tensors of every role."""
        return roles_of(self.model, self.aliases)

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of weights that have a master weight in the state dict."""
        return frozenset(name.removesuffix(MASTER.suffix) for name in self.roles().get(MASTER.role, ()))

    def prepare(self, stored: Collection[str]) -> None:
        """Do nothing: under semi-automatic parallelism ``Optimizer.state_dict`` creates the states."""


LayoutSource: TypeAlias = LiveModel | StateDict
"""The live tensors of one rank, whose optimizer states a load creates."""


def to_fill(
    live: LayoutSource,
    checkpoint: OpenedCheckpoint,
    model: ModelDescription,
    terms: LoadTerms,
    roles: Names,
) -> tuple[LiveRoles, LiveNames]:
    """Create the optimizer states that a checkpoint fills.

    If the precision may differ and master weights are not stored, they are read from the stored weights.

    Args:
        live: the tensors of this rank.
        checkpoint: an opened checkpoint.
        model: the description of the model.
        terms: allowed differences, and with statements all tensors of the model on all ranks.
        roles: the roles to load. Without ``optimizer_state``, master weights are the only states that are loaded.
    Returns:
        the live tensors to load, and the mapping from stored to live names of states.
    Raises:
        FlexError: the model cannot be mapped, a statement is invalid, or the states cannot be created.
    """
    names = _live_names(checkpoint, model, live.weights(), terms)
    stored = checkpoint.catalog.roles
    masters, states = stored.get(MASTER.role, {}), stored.get(OPTIMIZER_STATE, {})
    half = live.trained_in_half() if terms.may_cast else frozenset[str]()
    weights = {name + MASTER.suffix for name in stored[MODEL_STATE]} if half else set()
    created = frozenset(names.of({*masters, *(states if OPTIMIZER_STATE in roles else {})}))
    from_weights = frozenset(name for name in names.of(weights) if parameter_of_state(name) in half)
    former = live.roles().get(OPTIMIZER_STATE, {}) if from_weights else {}
    live.prepare(created | from_weights)
    found = {role: dict(tensors) for role, tensors in live.roles().items()}
    if from_weights:
        # Other states of these parameters are not stored and keep their initial values, except those that were there
        # before: after the load they would belong to other weights.
        parameters = {parameter_of_state(name) for name in created}
        found[OPTIMIZER_STATE] = {
            name: state
            for name, state in found.get(OPTIMIZER_STATE, {}).items()
            if name in former or parameter_of_state(name) in parameters
        }
    # Name stored roles also if this rank has no shard of them: a load ignores roles that no rank names.
    return {role: found.get(role, {}) for role in roles if role in found or stored.get(role)}, names
