"""The optimizer states that a load creates: their names in the live model, which may differ from the stored ones.

Paddle creates optimizer states by the names of the live model. A checkpoint of another class of models has other names
and fuses other parameters, and statements of a user (``aoa_config``) rename tensors. States have the names of the live
parameters that are read from the parameters of the stored states. States of a tied parameter may be stored under any of
its names, and are created under whichever name the live model gives them.
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
    """The names of stored states in a live model.

    Args:
        sources: live parameter -> the stored parameters that it is read from; None if all names are equal.
        owners: stored alias of a tied parameter -> the name of its owner.
        ties: the same of the live model.
    """

    sources: Mapping[str, Names] | None = None
    owners: Mapping[str, str] = msgspec.field(default_factory=dict)
    ties: Mapping[str, str] = msgspec.field(default_factory=dict)

    def of(self, stored: Names) -> set[str]:
        """Return names of states in the live model.

        Args:
            stored: names of states in the checkpoint.
        Returns:
            a live parameter has the states of all stored parameters that it is read from, under all its names.
        """
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
    """Return the names of a checkpoint's states in a live model.

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
    """Return the tensors of a model that contain a part of each canonical tensor."""
    found: dict[str, set[str]] = {}
    for rule in rules.rules:
        for source in rule.sources:
            found.setdefault(source, set()).update(rule.targets)
    return found


class Creation(msgspec.Struct, frozen=True):
    """The states that a load creates.

    Args:
        stored: live names of stored states.
        masters: live names of master weights that are read from stored weights. The other states of their parameters
            are not stored, and start at their initial values.
    """

    stored: frozenset[str]
    masters: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names of states of all parameters that get states."""
        return self.stored | self.masters

    def filled(self, live: Roles, before: Roles) -> LiveRoles:
        """Return the tensors without states that start at their initial values.

        Args:
            live: all tensors after the states were created.
            before: all tensors before. States of trained steps would be of other weights, so they are not left out.
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

    def prepare(self, stored: Names) -> None:
        """Make room for a load.

        Args:
            stored: names of the stored optimizer states; those of this rank's parameters are created.
        """


def to_fill(
    live: LayoutSource,
    checkpoint: OpenedCheckpoint,
    model: ModelDescription,
    terms: LoadTerms,
    wanted: Names,
) -> tuple[LiveRoles, LiveNames]:
    """Create the optimizer states that a checkpoint fills.

    Master weights of trained parameters, whose precision may differ from the stored one, are read from weights if they
    are not stored.

    Args:
        live: the tensors of this rank.
        checkpoint: an opened checkpoint.
        model: the description of the model.
        terms: how it may differ, and with statements all its tensors on all ranks.
        wanted: the roles that are filled. Without ``optimizer_state`` no states but master weights are loaded.
    Returns:
        all live tensors that it may fill, and the names of its states in the model.
    Raises:
        FlexError: the model cannot be mapped, a statement is invalid, or the states cannot be created.
    """
    names = _live_names(checkpoint, model, live.weights(), terms)
    stored = checkpoint.catalog.roles
    masters, states = stored.get(MASTER_WEIGHT, {}), stored.get(OPTIMIZER_STATE, {})
    half = live.trained_in_half() if terms.may_cast else frozenset[str]()
    weights = {name + MASTER.suffix for name in stored[MODEL_STATE]} if half else set()
    created = Creation(
        frozenset(names.of({*masters, *(states if OPTIMIZER_STATE in wanted else {})})),
        frozenset(name for name in names.of(weights) if parameter_of_state(name) in half),
    )
    before = live.roles() if created.masters else {}
    live.prepare(created.names)
    found = created.filled(live.roles(), before)
    # A stored role of which this rank holds nothing is named too: a load ignores roles that no rank names.
    return {role: found.get(role, {}) for role in wanted if role in found or stored.get(role)}, names
