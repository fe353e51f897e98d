"""The live tensors of a run by role, which a save writes and a load fills.

Model and optimizer describe their shards (``sharded_state_dict``), and this module sorts them into roles. Paddle
creates optimizer states in the first step, so a load creates them first; its values overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import paddle
from paddle.distributed import ShardedWeight
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.layout.live import LiveRoles
from paddleformers_fc.layout.roles import MASTER, MODEL_STATE, OPTIMIZER_STATE, StateDescriptor
from paddleformers_fc.trainer import dist_tensors, fsdp_buffers, lora, optimizer_states, sharding_stage3, sonic_moe
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library_models import sharded_state_dict
from paddleformers_fc.trainer.optimizers import innermost

_HALF = (paddle.bfloat16, paddle.float16)


def model_roles(model: Any) -> LiveRoles:
    """Return the weights of a model: ``model_state`` -> name -> ``ShardedWeight`` over the live tensors.

    Args:
        model: the model as it was built, not its parallel wrapper.
    """
    if dist_tensors.is_semi_auto(model):
        return _semi_auto_roles(model, None)
    return {MODEL_STATE: sharding_stage3.cut(_parameters(model))}


def release_full_parameters(model: Any) -> None:
    """Release memory beside the slices and buffers that a rank holds, before these are filled. Every rank must call."""
    context = fsdp_buffers.context_of(model)
    if context is not None:
        fsdp_buffers.forget_gathered(context)
    # Also those that no checkpoint fills: the zeros would overwrite them.
    sharding_stage3.release(model.parameters())


def drop_gradients(model: Any, optimizer: Any) -> None:
    """Clear the gradients of an unfinished step.

    Args:
        model: the model as it was built, not its parallel wrapper.
        optimizer: the optimizer, with any wrappers of the Trainer.
    """
    weights = _parameters(model)
    if sharding_stage3.any_sliced(weights):
        sharding_stage3.drop_gradients(weights)  # Stage 3's own way fails where a parameter has none.
    else:
        optimizer.clear_grad()


def _parameters(model: Any) -> dict[str, Any]:
    """Return the model's tensors by name, described as whole even if stage 3 has released them.

    Those of a base under adapters are left out.
    """
    return lora.saved_weights(model, _sharded_weights(model))


def base_weights(model: Any) -> dict[str, Any]:
    """Return the weights of a model with adapters that its checkpoints leave out."""
    weights = _sharded_weights(model)
    saved = lora.saved_weights(model, weights)
    return {name: weight for name, weight in weights.items() if name not in saved}


def _sharded_weights(model: Any) -> dict[str, Any]:
    if dist_tensors.is_semi_auto(model):
        return {name: dist_tensors.Named(tensor) for name, tensor in model.state_dict().items()}
    found = {name: weight for name, weight in sharded_state_dict(model).items() if isinstance(weight, ShardedWeight)}
    return sonic_moe.described_rows(model, found)


def run_roles(model: Any, optimizer: Any) -> LiveRoles:
    """Return the weights of a model and the states of its optimizer by role.

    Args:
        model: the model as it was built, not its parallel wrapper.
        optimizer: the optimizer, with any wrappers of the Trainer.

    Raises:
        MismatchError: the optimizer has a state of no parameter of the model.
    """
    if dist_tensors.is_semi_auto(model):
        return _semi_auto_roles(model, optimizer)
    weights = _parameters(model)
    roles: LiveRoles = {MODEL_STATE: sharding_stage3.cut(weights)}
    try:
        states = _states(optimizer, _owners(model, weights))
    except KeyError as error:
        raise MismatchError(
            "The optimizer has a state of no parameter of the model.",
            where=type(optimizer).__name__,
            evidence=[f"{type(error).__name__}: {error}"],
            next_step="Use an optimizer over parameters of this model only.",
        ) from error
    roles[MASTER.role] = {name: state for name, state in states.items() if name.endswith(MASTER.suffix)}
    roles[OPTIMIZER_STATE] = {name: state for name, state in states.items() if not name.endswith(MASTER.suffix)}
    return {role: weights for role, weights in roles.items() if weights or role == MODEL_STATE}


def _semi_auto_roles(model: Any, optimizer: Any) -> LiveRoles:
    """Return the tensors of semi-automatic parallelism; without an optimizer the weights alone."""
    aliases = tied(model)
    weights, context = model.state_dict(), fsdp_buffers.context_of(model)
    if context is not None:
        return _buffered_roles(context, weights, optimizer, aliases)
    states: dict[str, Any] = {}
    if optimizer is not None:
        optimizer_states.refuse_unsaved_states(innermost(optimizer))
        # The state dict of the wrapper would create states by a step, which changes weights.
        states = innermost(optimizer).state_dict()
    return dist_tensors.roles_of({"model": weights, "optimizer": states}, aliases)


def _buffered_roles(context: Any, weights: dict[str, Any], optimizer: Any, aliases: Collection[str]) -> LiveRoles:
    states: dict[str, dict[StateDescriptor, Any]] = {}
    for kind, buffer, tensor in () if optimizer is None else optimizer_states.tensors(optimizer):
        states.setdefault(buffer, {})[kind] = tensor
    names = {weights[name].name: name for name in sorted(weights, reverse=True) if name not in aliases}
    buffered = fsdp_buffers.static_names(context)
    found = fsdp_buffers.roles_of(context, names, states)
    # Such as buffers of layers.
    others = dist_tensors.roles_of({name: one for name, one in weights.items() if one.name not in buffered})
    return {**found, MODEL_STATE: {**others[MODEL_STATE], **found.get(MODEL_STATE, {})}}


def _states(optimizer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    found = optimizer_states.sharded_states(optimizer, weights)
    if isinstance(optimizer, GroupShardedOptimizerStage2):
        own = _own_parameters(optimizer, weights)
        return {name: state for name, state in found.items() if parameter_of_state(name) in own}
    return found


def _own_parameters(optimizer: GroupShardedOptimizerStage2, weights: dict[str, Any]) -> set[str]:
    """Return the names of the parameters that this rank updates for all ranks in stage 2.

    If an adjacent parameter had no gradient, Paddle leaves a rank gradients of parameters of other ranks, and creates
    states for them. The broadcast of the owner overwrites their results, so these states are not saved.
    """
    own = {parameter.name for parameter in optimizer._segment_params()[optimizer._rank]}
    return {name for name, weight in weights.items() if weight.local_tensor.name in own}


def create_states(
    model: Any, optimizer: Any, stored: Collection[str], place_master: Callable[[Any], object] | None = None
) -> None:
    """Create optimizer states of those parameters of this rank that have stored states.

    Other parameters, which were frozen or never had a gradient, get none.

    Args:
        model: the model as it was built.
        optimizer: the optimizer with the Trainer's wrappers.
        stored: names of stored states in the model, such as ``model.norm.weight.moment1_0``.
        place_master: moves a master weight in place to where the run keeps it between steps.
    """
    context = fsdp_buffers.context_of(model)
    if context is not None:
        fsdp_buffers.create_states(context, optimizer, stored)
        return
    weights = _owners(model, _parameters(model))
    optimizer_states.create(optimizer, weights, set(map(parameter_of_state, stored)), place_master)


def trained_without_states(model: Any, stored: Collection[str]) -> list[str]:
    """Return the names of trained parameters of this rank that have no stored state.

    Args:
        model: the model as it was built.
        stored: as for :func:`create_states`.
    """
    parameters = set(map(parameter_of_state, stored))
    weights = _owners(model, _parameters(model))
    trained = [name for name, weight in weights.items() if not weight.local_tensor.stop_gradient]
    return [name for name in trained if name not in parameters]


def _owners(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights without aliases of tied ones, so that states are named after the owner.

    Paddle would name them after the name that sorts first.
    """
    aliases = {
        alias
        for alias, owner in tied(model).items()
        if alias in weights
        and owner in weights
        and weights[alias].local_tensor.name == weights[owner].local_tensor.name
    }
    return {name: weight for name, weight in weights.items() if name not in aliases}


def trained_in_half(model: Any, optimizer: Any) -> frozenset[str]:
    """Return the names of trained parameters of this rank for which the optimizer keeps master weights."""
    if not getattr(innermost(optimizer), "_multi_precision", False):
        return frozenset()
    return frozenset(
        name
        for name, weight in _parameters(model).items()
        if not weight.local_tensor.stop_gradient and weight.local_tensor.dtype in _HALF
    )


def tied(model: Any) -> dict[str, str]:
    """Return the owner of every alias of a model that is mapped if it ties its word embeddings."""
    return model_ties(describe_model(model)) if hasattr(model, "config") else {}


def parameter_of_state(state: str) -> str:
    """Return the name of the parameter of a state."""
    return state.rpartition(".")[0]
