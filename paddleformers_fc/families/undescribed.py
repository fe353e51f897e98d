"""Complete the description of a model from its tensors, if its configuration lacks keys that its rules depend on.

PaddleFormers omits keys in ``config.json``, and no key contains the class of the model. For stock checkpoints, names
and shapes show the class and the fusion of experts, and the smallest layer number shows empty layers. An ambiguous
description is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.bind import ModelTensor, bind
from paddleformers_fc.families.declarations import Family
from paddleformers_fc.families.description import IS_FLEET, ModelDescription
from paddleformers_fc.families.names import Names, family_keys
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.prove import invalid_mapping

EMPTY_LAYERS = "num_empty_layers_add_in_head"
_OPEN: Mapping[str, Sequence[object]] = {
    IS_FLEET: (True, False),
    "moe_expert_fusion": (False, True),
    "using_sonic_moe": (False, True),
}
"""Keys that a serialized configuration always lacks, and their possible values."""

STRIPPED = frozenset({EMPTY_LAYERS, *_OPEN})
"""All keys that rules depend on and that a serialized configuration lacks."""

_LAYER = "layer"


def completed(
    family: Family, model: ModelDescription, tensors: Sequence[ModelTensor]
) -> tuple[ModelDescription, RuleSet]:
    """Complete a description and bind the tensors with it.

    Args:
        family: the model's family.
        model: the incomplete description; its keys are kept.
        tensors: every tensor of the model.
    Returns:
        a description that matches the tensors, and its rules. All matching descriptions have the same rules.
    Raises:
        MappingError: no description matches the tensors, or matching descriptions have different rules.
    """
    found: list[tuple[ModelDescription, RuleSet]] = []
    contradicted: list[MappingError] = []
    unbound: list[MappingError] = []
    cuts = {tensor.name: tensor.cuts for tensor in tensors if any(cut > 1 for cut in tensor.cuts)}
    for candidate in _candidates(family, model, tensors):
        errors = contradicted
        try:
            _check_no_contradictions(family, candidate, tensors)
            errors = unbound
            found.append((candidate, structs.replace(bind(family, candidate, tensors), cuts=cuts)))
        except MappingError as error:
            errors.append(error)
    if not found:
        raise min(unbound or contradicted, key=lambda error: len(error.evidence))
    if any(rules != found[0][1] for _, rules in found):
        raise MappingError(
            "The tensors fit several descriptions of the model, which give different mappings.",
            where=f"family {family.name}",
            evidence=[_added_keys(candidate, model) for candidate, _ in found],
            next_step="Set one of these keys in the configuration.",
        )
    return found[0]


def _candidates(family: Family, model: ModelDescription, tensors: Sequence[ModelTensor]) -> Iterator[ModelDescription]:
    """Yield every description that contains the known keys."""
    keys = family_keys(family)
    config = dict(model.config)
    if EMPTY_LAYERS in keys and config.get(EMPTY_LAYERS) is None:
        config[EMPTY_LAYERS] = _first_layer(family, model, tensors)
    known = {**config, IS_FLEET: model.is_fleet}
    choices = {key: values for key, values in _OPEN.items() if key in keys and known.get(key) is None}
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        is_fleet = chosen.pop(IS_FLEET, model.is_fleet)
        known_class = None if is_fleet is None else bool(is_fleet)
        yield structs.replace(model, config={**config, **chosen}, is_fleet=known_class)


def _first_layer(family: Family, model: ModelDescription, tensors: Sequence[ModelTensor]) -> int:
    """Return the number of the first layer of a complete model: the number of empty layers before it."""
    index = Names(family, model)
    found = (numbers for tensor in tensors for _, numbers in index.declared(tensor.name))
    return min((numbers[_LAYER] for numbers in found if _LAYER in numbers), default=0)


def _check_no_contradictions(family: Family, model: ModelDescription, tensors: Sequence[ModelTensor]) -> None:
    """Check that a model with this description has these tensors, by the conditions on open keys.

    Binding ignores conditions, because a real model has its tensors. Here, however, the description is a guess.
    """
    index = Names(family, model)
    faults = []
    for tensor in tensors:
        kinds, _ = index.find(tensor.name)
        is_open = (kind.sizes.holds(tuple(one for one in kind.statement.where if one[0] in STRIPPED)) for kind in kinds)
        if kinds and not any(is_open):
            faults.append(f"{tensor.name}: a model of this class and configuration has no such tensor")
    if faults:
        next_step = "Compare the class and the configuration of the model with its tensors."
        what = "Tensors contradict the description of the model"
        raise invalid_mapping(what, faults, next_step, f"family {family.name}")


def _added_keys(candidate: ModelDescription, model: ModelDescription) -> str:
    added = {key: value for key, value in candidate.config.items() if model.config.get(key) != value}
    if candidate.is_fleet != model.is_fleet:
        added[IS_FLEET] = candidate.is_fleet
    return ", ".join(f"{key}={str(value).lower()}" for key, value in added.items())
