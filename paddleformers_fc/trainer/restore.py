"""Create the optimizer states that a load fills, under their names in the live model.

Paddle creates optimizer states per live parameter. The checkpoint may have other names: another class of models names
and fuses parameters differently, and a user's statements (``aoa_config``) rename tensors. A live parameter gets the
states of all stored parameters that it is read from. States of a tied parameter may be stored under any of its names,
and are created under the name that the live model uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import msgspec

from paddleformers_fc.execute.load import LoadTerms
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.live import LiveRoles, Roles, describe_roles
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.trainer.live_roles import parameter_of_state

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


class Creation(msgspec.Struct, frozen=True):
    """The states that a load creates.

    Args:
        stored: live names of stored states.
        masters: live names of master weights that are read from stored weights. Other states of these parameters are
            not stored and keep their initial values.
    """

    stored: frozenset[str]
    masters: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The names of all states to create."""
        return self.stored | self.masters

    def filled(self, live: Roles, before: Roles) -> LiveRoles:
        """Return the tensors that the load fills: all except states that keep their initial values.

        Args:
            live: all tensors after the states were created.
            before: all tensors before. Existing states are filled too: after a load they would belong to other weights.
        """
        found = {role: dict(tensors) for role, tensors in live.items()}
        if not self.masters:
            return found
        stored = {parameter_of_state(name) for name in self.stored}
        former = before.get(OPTIMIZER_STATE, {})
        states = found.get(OPTIMIZER_STATE, {}).items()
        kept = {name: one for name, one in states if name in former or parameter_of_state(name) in stored}
        return {**found, OPTIMIZER_STATE: kept}


class LayoutSource(Protocol):
    """The live tensors of one rank, whose optimizer states a load creates.

    Attributes:
        model: the layer or the state dict that contains them.
        has_states: whether they include the states of an optimizer.
        is_global: whether fused tensors have the layout of one device, however ranks divide them.
    """

    @property
    def model(self) -> Any:
        """The layer or state dict."""

    @property
    def has_states(self) -> bool:
        """Return whether the tensors include states of an optimizer."""

    @property
    def is_global(self) -> bool:
        """Return whether fused tensors have the layout of one device."""

    def weights(self) -> Roles:
        """Return the tensors of ``model_state``."""

    def roles(self) -> Roles:
        """Return the tensors of every role."""

    def trained_in_half(self) -> frozenset[str]:
        """Return the names of trained parameters for which the optimizer keeps master weights."""

    def prepare(self, stored: Names) -> None:
        """Prepare the tensors for a load.

        Args:
            stored: names of optimizer states; create the states of this rank's parameters.
        """


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
    masters, states = stored.get(MASTER_WEIGHT, {}), stored.get(OPTIMIZER_STATE, {})
    half = live.trained_in_half() if terms.may_cast else frozenset[str]()
    weights = {name + MASTER.suffix for name in stored[MODEL_STATE]} if half else set()
    created = Creation(
        frozenset(names.of({*masters, *(states if OPTIMIZER_STATE in roles else {})})),
        frozenset(name for name in names.of(weights) if parameter_of_state(name) in half),
    )
    before = live.roles() if created.masters else {}
    live.prepare(created.names)
    found = created.filled(live.roles(), before)
    # Name stored roles also if this rank has no shard of them: a load ignores roles that no rank names.
    return {role: found.get(role, {}) for role in roles if role in found or stored.get(role)}, names
