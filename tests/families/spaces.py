"""The two spaces of a family under one configuration, with numbers in them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from paddleformers_fc.families import Family, ModelDescription, ModelTensor, bind, enumerate_tensors, own_families
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.mapping import RuleSet
from tests.mapping.numbers import Arrays, moved, numbered

BY_NAME = {family.name: family for family in own_families()}


def settings(family: Family, **changes: Any) -> dict[str, Any]:
    """The family's tiny configuration with some changes; ``is_fleet`` among them is the model's class."""
    tiny = tiny_models(family)[0]
    return {**tiny.config, **({} if tiny.is_fleet is None else {"is_fleet": True}), **changes}


def model_of(config: Mapping[str, Any]) -> ModelDescription:
    """The model that such settings describe."""
    return ModelDescription({key: config[key] for key in config if key != "is_fleet"}, config.get("is_fleet"))


def tensors(family: Family, config: Mapping[str, Any], tp: int = 1, ep: int = 1) -> list[ModelTensor]:
    """What a model under these degrees of parallelism would describe."""
    return [tensor.under(tp, ep) for tensor in enumerate_tensors(family, model_of(config))]


def spaces(family: Family, config: Mapping[str, Any], tp: int = 1) -> tuple[RuleSet, Arrays, Arrays]:
    """The rules, canonical tensors whose every element has a value of its own, and the model's by our mapping."""
    rules = bind(family, model_of(config), tensors(family, config, tp))
    mapping = rules.mapping()
    canonical = numbered(mapping)
    model = moved(mapping, canonical)
    for tie in rules.ties:
        model[tie.alias] = model[tie.owner]
    return rules, canonical, model


def live_weights(
    rules: RuleSet, value: float = 0, dtype: str = "float32", integers: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The whole weights of a live model, each of one value; names with these ends are integers."""
    import paddle

    return {
        key: SimpleNamespace(
            key=key,
            local_tensor=paddle.full(spec.shape, value, "int64" if key.endswith(integers) else dtype),
            local_shape=spec.shape,
            global_shape=spec.shape,
            global_offset=(0,) * len(spec.shape),
            is_flattened=False,
            flattened_range=None,
        )
        for key, spec in rules.targets.items()
    }


def differing(wanted: Arrays, found: Arrays) -> list[str]:
    """Names that are not found, or found with other numbers."""
    return sorted(name for name in wanted if name not in found or not np.array_equal(wanted[name], found[name]))
