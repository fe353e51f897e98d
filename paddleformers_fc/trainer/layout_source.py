"""Sources of live tensors with their layouts, for ``save`` and ``load``.

A source returns live tensors by role and name; the fields of :class:`.layout.live.LocalTensor` are all that a save or a
load reads of them. There are two sources: the ``sharded_state_dict`` of a model and of its optimizer, and a state dict
of tensors with a mesh and placements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from paddle import DataParallel
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import ModelTensor
from paddleformers_fc.families.stated import rules_by_name
from paddleformers_fc.layout.live import Roles, describe_roles
from paddleformers_fc.layout.roles import MASTER, MODEL_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import RuleSet, Tie
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.trainer import dist_tensors, live_roles, optimizers

_WRAPPERS = (DataParallel, MetaParallelBase, GroupShardedStage2, GroupShardedStage3)


class LayoutSource(Protocol):
    """The live tensors of one rank.

    Attributes:
        model: the layer or the state dict that has them.
        has_states: whether the states of an optimizer are among them.
        is_global: whether they have the layout of one device, however ranks divide them.
    """

    @property
    def model(self) -> Any:
        """The layer or state dict."""

    @property
    def has_states(self) -> bool:
        """Return whether states of an optimizer are wanted."""

    @property
    def is_global(self) -> bool:
        """Return whether fused tensors have the layout of one device."""

    def weights(self) -> Roles:
        """Return the tensors of ``model_state``."""

    def roles(self) -> Roles:
        """Return the tensors of every role."""

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of trained parameters for which the optimizer keeps master weights."""

    def prepare(self, stored: Collection[str]) -> None:
        """Make room for a load.

        Args:
            stored: names of the stored optimizer states; those of this rank's parameters are created.
        """


@dataclass(frozen=True)
class ShardedStateDicts:
    """A model, and its optimizer, that describe their own shards.

    Args:
        model: any layer with ``sharded_state_dict``, without its parallel wrapper.
        optimizer: the optimizer over its parameters, with all wrappers; None for the weights alone.
    """

    model: Any
    optimizer: Any = None

    @property
    def has_states(self) -> bool:
        """Return whether there is an optimizer."""
        return self.optimizer is not None

    @property
    def is_global(self) -> bool:
        """Return whether the parameters are those of semi-automatic parallelism."""
        return dist_tensors.is_semi_auto(self.model)

    def weights(self) -> Roles:
        """Return the tensors of ``model_state``."""
        return live_roles.model_roles(self.model)

    def roles(self) -> Roles:
        """Return the tensors of every role."""
        if self.optimizer is None:
            return live_roles.model_roles(self.model)
        optimizers.refuse_unsupported(self.optimizer)
        return live_roles.run_roles(self.model, self.optimizer)

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of trained parameters for which the optimizer keeps master weights."""
        return frozenset() if self.optimizer is None else live_roles.trained_in_half(self.model, self.optimizer)

    def prepare(self, stored: Collection[str]) -> None:
        """Release gathered parameters, and create the optimizer's states."""
        live_roles.release_full_parameters(self.model)
        if self.optimizer is not None:
            optimizers.refuse_unsupported(self.optimizer)
            live_roles.create_states(self.model, self.optimizer, stored)


@dataclass(frozen=True)
class StateDict:
    """A state dict of tensors with a mesh and placements.

    Args:
        model: the state dict; see :func:`.dist_tensors.roles_of`.
        aliases: names of tied weights whose states have the name of the owner.
    """

    model: Mapping[str, Any]
    aliases: frozenset[str] = frozenset()

    @property
    def is_global(self) -> bool:
        """True: the shape of every tensor is that of the whole one."""
        return True

    @property
    def has_states(self) -> bool:
        """Return whether the state dict has states of an optimizer."""
        return len(self.roles()) > 1

    def weights(self) -> Roles:
        """Return the tensors of ``model_state``."""
        return {MODEL_STATE: self.roles()[MODEL_STATE]}

    def roles(self) -> Roles:
        """Return the tensors of every role."""
        return dist_tensors.roles_of(self.model, self.aliases)

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of weights that have a master weight in the state dict."""
        return frozenset(name.removesuffix(MASTER.suffix) for name in self.roles().get(MASTER.role, ()))

    def prepare(self, stored: Collection[str]) -> None:
        """Do nothing: ``Optimizer.state_dict`` of semi-automatic parallelism has created the states."""


def live_source(model: Any, optimizer: Any) -> LayoutSource:
    """Return the source of a model, which may be in a parallel wrapper of Paddle, and of its optimizer.

    Args:
        model: a layer or its wrapper, or a state dict.
        optimizer: the optimizer of a layer; None for the weights alone.
    Raises:
        OptionError: the model does not describe its shards, or there is an optimizer beside a state dict.
    """
    if isinstance(model, Mapping):
        if optimizer is not None:
            raise OptionError(
                "A state dict and an optimizer are passed together.",
                where="optimizer",
                next_step="Pass one state dict: {**model.state_dict(), **optimizer.state_dict()}.",
            )
        return StateDict(model)
    while isinstance(model, _WRAPPERS):
        model = getattr(model, "_layers", None) or model._layer
    if isinstance(model, type) or not hasattr(model, "sharded_state_dict"):
        raise OptionError(
            f"{type(model).__name__} has no sharded_state_dict.",
            where="model",
            next_step="Pass a paddle.nn.Layer, or an object whose sharded_state_dict() returns ShardedWeight by name.",
        )
    return ShardedStateDicts(model, optimizer)


class RankTensors(msgspec.Struct):
    """The weights of one rank, for models whose tensors are mapped by name.

    Attributes:
        shards: by name.
        ties: names of one parameter; the owner is the first in order, after which Paddle names optimizer states.
    """

    shards: dict[str, Shard] = {}
    ties: list[Tie] = []


def rank_tensors(roles: Roles) -> RankTensors:
    """Return the weights of this rank as other ranks need them."""
    weights = roles[MODEL_STATE]
    names: dict[str, list[str]] = {}
    for name in sorted(weights):
        names.setdefault(weights[name].local_tensor.name, []).append(name)
    ties = [Tie(owner, alias) for owner, *aliases in names.values() for alias in aliases]
    return RankTensors(describe_roles({MODEL_STATE: weights})[MODEL_STATE], ties)


def rules_of_all(everyone: Collection[RankTensors], is_global: bool) -> RuleSet:
    """Return the rules by name of the model that all ranks hold together.

    A cut is counted in boxes instead of by their length: boxes may be unequal. Tensors with the layout of one device
    are not cut.

    Args:
        everyone: the weights of every rank.
        is_global: see :attr:`LayoutSource.is_global`.
    """
    boxes: dict[str, dict[Box, Shard]] = {}
    for model in everyone:
        for name, shard in model.shards.items():
            boxes.setdefault(name, {})[shard.box] = shard
    tensors = [_tensor(shards, is_global) for shards in boxes.values()]
    ties = dict.fromkeys(tie for model in everyone for tie in model.ties)
    return rules_by_name(tensors, ties)


def _tensor(shards: Mapping[Box, Shard], is_global: bool) -> ModelTensor:
    one = next(iter(shards.values()))
    axes = range(len(one.global_shape))
    cuts = (1 if is_global else len({(box.lo[axis], box.hi[axis]) for box in shards}) for axis in axes)
    return ModelTensor(one.name, one.global_shape, one.dtype, tuple(cuts))
