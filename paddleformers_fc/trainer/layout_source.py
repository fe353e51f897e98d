"""Sources of live tensors with their layouts, for ``save`` and ``load``.

A source returns live tensors by role and name; the fields of :class:`.layout.live.LocalTensor` are all that a save or a
load reads of them. Today there is one source: the ``sharded_state_dict`` of a model and of its optimizer.
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
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import RuleSet, Tie
from paddleformers_fc.mapping.boxes import Box
from paddleformers_fc.trainer import optimizers, state

_WRAPPERS = (DataParallel, MetaParallelBase, GroupShardedStage2, GroupShardedStage3)


class LayoutSource(Protocol):
    """The live tensors of one rank."""

    def roles(self) -> Roles:
        """Return the tensors of every role."""

    def prepare(self, stored: Collection[str]) -> None:
        """Make room for a load.

        Args:
            stored: names of the stored optimizer states; those of this rank's parameters are created.
        """


@dataclass(frozen=True)
class ShardedStateDicts(LayoutSource):
    """A model, and its optimizer, that describe their own shards.

    Args:
        model: any layer with ``sharded_state_dict``, without its parallel wrapper.
        optimizer: the optimizer over its parameters, with all wrappers; None for the weights alone.
    """

    model: Any
    optimizer: Any = None

    def roles(self) -> Roles:
        """Return the tensors of every role."""
        if self.optimizer is None:
            return state.model_roles(self.model)
        optimizers.refuse_unsupported(self.optimizer)
        return state.run_roles(self.model, self.optimizer)

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of trained parameters for which the optimizer keeps master weights."""
        return frozenset() if self.optimizer is None else state.trained_in_half(self.model, self.optimizer)

    def prepare(self, stored: Collection[str]) -> None:
        """Release gathered parameters, and create the optimizer's states."""
        state.make_room(self.model)
        if self.optimizer is not None:
            optimizers.refuse_unsupported(self.optimizer)
            state.create_states(self.model, self.optimizer, stored)


def sharded_state_dicts(model: Any, optimizer: Any) -> ShardedStateDicts:
    """Return the source of a model, which may be in a parallel wrapper of Paddle, and of its optimizer.

    Raises:
        OptionError: the model does not describe its shards.
    """
    while isinstance(model, _WRAPPERS):
        model = getattr(model, "_layers", None) or model._layer
    if not hasattr(model, "sharded_state_dict"):
        raise OptionError(
            f"{type(model).__name__} has no sharded_state_dict.",
            where="model",
            next_step="Pass a paddle.nn.Layer, or an object whose sharded_state_dict() returns ShardedWeight by name.",
        )
    return ShardedStateDicts(model, optimizer)


class HeldTensors(msgspec.Struct):
    """The weights of one rank, for models whose tensors are mapped by name.

    Attributes:
        shards: by name.
        ties: names of one parameter; the owner is the first in order, after which Paddle names optimizer states.
    """

    shards: dict[str, Shard] = {}
    ties: list[Tie] = []


def held_tensors(roles: Roles) -> HeldTensors:
    """Return the weights of this rank as other ranks need them."""
    weights = roles[MODEL_STATE]
    names: dict[str, list[str]] = {}
    for name in sorted(weights):
        names.setdefault(weights[name].local_tensor.name, []).append(name)
    ties = [Tie(owner, alias) for owner, *aliases in names.values() for alias in aliases]
    return HeldTensors(describe_roles({MODEL_STATE: weights})[MODEL_STATE], ties)


def rules_of_all(everyone: Collection[HeldTensors]) -> RuleSet:
    """Return the rules by name of the model that all ranks hold together.

    A cut is counted in boxes instead of by their length: boxes may be unequal.
    """
    boxes: dict[str, dict[Box, Shard]] = {}
    for held in everyone:
        for name, shard in held.shards.items():
            boxes.setdefault(name, {})[shard.box] = shard
    tensors = [_tensor(shards) for shards in boxes.values()]
    ties = dict.fromkeys(tie for held in everyone for tie in held.ties)
    return rules_by_name(tensors, ties)


def _tensor(shards: Mapping[Box, Shard]) -> ModelTensor:
    one = next(iter(shards.values()))
    cuts = (len({(box.lo[axis], box.hi[axis]) for box in shards}) for axis in range(len(one.global_shape)))
    return ModelTensor(one.name, one.global_shape, one.dtype, tuple(cuts))
