"""Create the optimizer states that a load fills, under their names in the live model.

Paddle creates optimizer states per live parameter. The checkpoint may have other names: another class of models names
and fuses parameters differently, and a user's statements (``aoa_config``) rename tensors. A live parameter gets the
states of all stored parameters that it is read from. States of a tied parameter may be stored under any of its names,
and are created under the name that the live model uses.

Memory: the created states, which the first step would create too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from paddleformers_fc.execute.load import LoadTerms
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.live import LiveRoles, Roles, describe_roles
from paddleformers_fc.layout.roles import MASTER, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.trainer.live_roles import LayoutSource, parameter_of_state

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
