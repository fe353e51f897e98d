"""A family written from what was derived is the family that was written by hand, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paddleformers_fc.aoa import normal
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, bind
from paddleformers_fc.families.declarations import Geometry
from paddleformers_fc.families.registry import prove_family
from paddleformers_fc.verification.derivation.codegen import family_of, source_text
from tests.families.derivation import Case, cases, derived

FUSED = {
    "phi3": {"qkv_proj": Geometry.FUSED_QKV_PER_RANK, "gate_up_proj": Geometry.FUSED_FFN},
    "gpt_oss": {"gate_up_proj": Geometry.SAME},
    "glm_ocr": {"gate_up_proj": Geometry.FUSED_FFN, "qkv": Geometry.LINEAR},
    **{name: {"qkv": Geometry.LINEAR} for name in ("glm4v_moe", "qwen2_5_vl", "qwen3_vl", "ernie4_5_moe_vl")},
    "qwen3_vl_moe": {"gate_up_proj": Geometry.SAME, "qkv": Geometry.LINEAR},
}
REFUSED = {
    # Prediction layers have other names in files, and upstream's statements are invalid.
    "deepseek_v4": "is not determined",
    "qwen3_5": "is not determined",
    "qwen3_5_moe": "is not determined",
    # Layers of a sequence have one template and several shapes.
    "ernie4_5_moe_vl": "does not express the derived rules",
    "qwen2_5_vl": "does not express the derived rules",
    # Names of the fused layers of their towers are those of the text as well.
    "qwen3_vl (fleet)": "The geometry of layers that are fused in files as well is missing",
    "qwen3_vl_moe (fleet)": "The geometry of layers that are fused in files as well is missing",
}


def written(case: Case) -> Family:
    found = derived(case, hint=case.hint)
    found.refuse_questions()
    return family_of(case.family.name, found.rules, case.tensors(), case.config, FUSED.get(case.family.name, {}))


@pytest.mark.parametrize("case", [pytest.param(one, id=one.name) for one in cases(1) if one.name not in REFUSED])
def test_a_family_that_was_derived_binds_as_the_written_one_under_every_degree(case: Case) -> None:
    family = written(case)
    scope: dict[str, Any] = {}
    exec(source_text(family), scope)
    assert scope["FAMILY"] == family
    prove_family(family)
    for tp in (1, 2, 4):
        tensors = Case(case.family, case.fleet, tp).tensors()
        wanted = bind(case.family, case.model, tensors)
        made = bind(family, case.model, tensors)
        assert normal(made.mapping()) == normal(wanted.mapping())
        assert set(made.ties) == set(wanted.ties)


@pytest.mark.parametrize("case", [pytest.param(one, id=one.name) for one in cases(1) if one.name in REFUSED])
def test_a_family_that_the_language_of_drafts_does_not_express_is_refused(case: Case) -> None:
    with pytest.raises(MappingError, match=REFUSED[case.name]):
        written(case)


@pytest.mark.parametrize("name", ["phi3", "gpt_oss"])
def test_how_a_layer_is_cut_that_is_fused_in_files_too_is_not_guessed(name: str) -> None:
    case = next(one for one in cases(1) if one.family.name == name)
    found = derived(case, hint=case.hint)
    with pytest.raises(MappingError, match="gate_up_proj=same"):
        family_of(name, found.rules, case.tensors(), case.config)


def test_lengths_take_the_name_that_alone_fits() -> None:
    case = next(one for one in cases(1) if one.family.name == "qwen3" and one.fleet)
    shapes = {one.target: one.shape for one in written(case).statements}
    assert shapes["model.layers.{layer}.self_attn.q_layernorm.weight"] == ("head",)
    # 64 are the vocabulary, the queries and the feed-forward: a name would be a guess.
    assert shapes["model.layers.{layer}.self_attn.o_proj.weight"] == ("64", "32")


def test_layers_that_differ_become_conditions() -> None:
    case = next(one for one in cases(1) if one.family.name == "qwen3_moe" and one.fleet)
    conditions = {one.target: one.where for one in written(case).statements}
    assert conditions["model.layers.{layer}.mlp.up_gate_proj.weight"] == "layer <= 0"
    assert conditions["model.layers.{layer}.mlp.experts.{expert}.up_gate_proj.weight"] == "layer >= 1"
    assert conditions["model.layers.{layer}.input_layernorm.weight"] == ""


def test_lengths_of_queries_with_gates_are_written_and_those_of_heads_of_one_size_are_not() -> None:
    found = {one.family.name: written(one) for one in cases(1) if one.family.name in ("qwen3_next", "ernie4_5")}
    parts = {
        name: {one.parts for one in family.statements if "qkv_proj" in one.target} for name, family in found.items()
    }
    assert parts == {"qwen3_next": {("128", "32", "32")}, "ernie4_5": {()}}
