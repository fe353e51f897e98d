"""Descriptions of models that follow from tensors, where a configuration lacks keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, ModelDescription, ModelTensor, enumerate_tensors
from paddleformers_fc.families.language import same, transposed, unless, when
from paddleformers_fc.families.undescribed import STRIPPED, completed
from tests.families.spaces import BY_NAME, settings, tensors


def incomplete(name: str, **changes: Any) -> tuple[ModelDescription, list[ModelTensor]]:
    """A description without the keys that a file lacks, and the tensors of the model that was built with them."""
    config = settings(BY_NAME[name], **changes)
    known = {key: value for key, value in config.items() if key not in STRIPPED}
    return ModelDescription(json.loads(json.dumps(known))), tensors(BY_NAME[name], config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("glm4_moe", {"is_fleet": True, "num_empty_layers_add_in_head": 1}),
        ("glm4_moe", {"is_fleet": True, "num_empty_layers_add_in_head": 0, "moe_expert_fusion": True}),
        ("qwen2_moe", {"is_fleet": False}),
        # The router is square: its shape does not show whether it is transposed, and names show the class.
        ("qwen2_moe", {"is_fleet": False, "num_experts": 32}),
        # Square experts are recognised by another layer that is not square.
        ("minimax_m2", {"moe_expert_fusion": True, "moe_intermediate_size": 32}),
        ("minimax_m2", {"using_sonic_moe": True, "moe_intermediate_size": 32}),
    ],
    ids=str,
)
def test_absent_keys_follow_from_names_shapes_and_numbers(name: str, changes: dict[str, Any]) -> None:
    description, model = incomplete(name, **changes)
    found, rules = completed(BY_NAME[name], description, model)
    wanted = {key: value for key, value in changes.items() if key in STRIPPED}
    assert {key: found.config.get(key, found.is_fleet) for key in wanted} == wanted
    assert set(rules.targets) == {one.name for one in model}


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"num_empty_layers_add_in_head": 0}, "is the canonical"),
        ({"moe_expert_fusion": True}, "has no such tensor"),
    ],
)
def test_a_value_that_contradicts_the_tensors_is_refused(known: dict[str, Any], message: str) -> None:
    description, model = incomplete("glm4_moe", is_fleet=True, num_empty_layers_add_in_head=1)
    given = ModelDescription({**description.config, **known}, description.is_fleet)
    with pytest.raises(MappingError) as raised:
        completed(BY_NAME["glm4_moe"], given, model)
    assert message in raised.value.render()


def test_tensors_that_leave_a_key_open_are_refused_with_the_values_that_would_settle_it() -> None:
    weight = "model.weight"
    family = Family(
        "probe",
        (
            *when("moe_expert_fusion", transposed(weight, shape=("hidden", "hidden"))),
            *unless("moe_expert_fusion", same(weight, shape=("hidden", "hidden"))),
        ),
    )
    (tensor,) = (one.under() for one in enumerate_tensors(family, ModelDescription({"hidden_size": 4})))
    with pytest.raises(MappingError) as raised:
        completed(family, ModelDescription({"hidden_size": 4}), [tensor])
    assert raised.value.evidence == ("moe_expert_fusion=false", "moe_expert_fusion=true")
    known = ModelDescription({"hidden_size": 4, "moe_expert_fusion": True})
    assert completed(family, known, [tensor])[1].rules[0].axes == (1, 0)
