"""The load of vision-language and hybrid families against PaddleFormers' statements, and mutants of the declarations.

A mutant that a proof and the shapes do not refuse moves numbers to places where stock's load does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, bind
from paddleformers_fc.families.declarations import Geometry
from paddleformers_fc.mapping import prove
from tests.families import native
from tests.families.spaces import BY_NAME, described, differing, gathered, model_of, settings, spaces, tensors
from tests.mapping.numbers import Arrays, moved
from verification.forkserver import ForkServer

DEGREES = (1, 2)
FLEET, PLAIN = {"is_fleet": True}, {"is_fleet": False}
TIED, FULL_FIRST = {"tie_word_embeddings": True}, ["full_attention", "linear_attention"]
# Stock cuts the channels of a delta net into heads of one size. Of a dense model it leaves out the prediction layers.
EQUAL_HEADS = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "layer_types": FULL_FIRST[::-1]}
NO_PREDICTION = {**EQUAL_HEADS, "mtp_num_hidden_layers": 0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_5_vl", {}),
    ("qwen2_5_vl", {"tie_word_embeddings": True}),
    ("qwen3_vl", FLEET),
    ("qwen3_vl", PLAIN),
    ("qwen3_next", {}),
    ("glm4v_moe", {}),
    ("glm_ocr", {}),
    ("paddleocr_vl", {}),
    ("qwen3_5", {"text_config": NO_PREDICTION}),
    ("qwen3_5", {"text_config": {**NO_PREDICTION, "attn_output_gate": False}, **TIED}),
    ("qwen3_5", {"text_config": {**NO_PREDICTION, "linear_num_key_heads": 8, "num_key_value_heads": 8}}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": EQUAL_HEADS}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": {**EQUAL_HEADS, "attn_output_gate": False}}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": {**EQUAL_HEADS, "layer_types": FULL_FIRST}, **TIED}),
]
ALL_SPARSE = {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": []}
MOE = [("qwen3_vl_moe", {**one, "text_config": ALL_SPARSE, "moe_expert_fusion": True}) for one in (FLEET, PLAIN)]


def config_of(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The tiny configuration with changes; that of a text is completed."""
    family = BY_NAME[name]
    tiny = settings(family)
    nested = {"text_config": {**tiny["text_config"], **changes["text_config"]}} if "text_config" in changes else {}
    return {"attention_bias": False, **tiny, **changes, **nested}


def stock_load(ranks: ForkServer, name: str, config: dict[str, Any], tp: int) -> Arrays:
    """The model by PaddleFormers' statements."""
    rules, canonical, _ = spaces(BY_NAME[name], config, tp)
    live = described(rules.targets, {tensor.name: tensor.cuts for tensor in tensors(BY_NAME[name], config, tp)})
    run = {
        "statements": native.statements(name, config, inverse=False, fleet=bool(config.get("is_fleet"))),
        "sources": described(rules.mapping().sources),
        "targets": live,
    }
    (found,) = ranks.run("tests.families.jobs:stock_outputs", 1, run).values
    return gathered(found["outputs"], canonical)


@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize(("name", "changes"), [*CASES, *MOE], ids=str)
def test_the_load_is_that_of_stock(ranks: ForkServer, name: str, changes: dict[str, Any], tp: int) -> None:
    config = config_of(name, changes)
    _, _, model = spaces(BY_NAME[name], config, tp)
    assert differing(model, stock_load(ranks, name, config, tp)) == []


def mutants(family: Family) -> Iterator[tuple[str, Family]]:
    """The family with one statement changed: parts swapped, a transpose more or less, another fused layout."""
    for index, one in enumerate(family.statements):
        changed = []
        if len(one.sources) > 1:
            changed += [structs.replace(one, sources=one.sources[::-1])]
            changed += [structs.replace(one, sources=(one.sources[0], *one.sources[:0:-1]))]
        if one.groups:
            changed += [structs.replace(one, groups="")]
        if one.geometry in (Geometry.LINEAR, Geometry.SAME):
            other = Geometry.SAME if one.geometry is Geometry.LINEAR else Geometry.LINEAR
            changed += [structs.replace(one, geometry=other)]
        if one.geometry is Geometry.FUSED_QKV:
            changed += [structs.replace(one, geometry=Geometry.FUSED_QKV_PER_RANK)]
        if one.geometry is Geometry.FUSED_FFN and len(one.sources) == 1:
            changed += [structs.replace(one, geometry=Geometry.LINEAR)]
        for mutant in changed:
            statements = (*family.statements[:index], mutant, *family.statements[index + 1 :])
            yield one.target, structs.replace(family, statements=statements)


def model_by(family: Family, config: dict[str, Any], canonical: Arrays, tp: int) -> Arrays | None:
    """The model by a family; None where it is refused, by its proof or by the shapes of the files."""
    try:
        rules = bind(family, model_of(config), tensors(family, config, tp))
        mapping = rules.mapping()
        prove(mapping)
    except MappingError:
        return None
    shapes = {name: spec.shape for name, spec in mapping.sources.items()}
    if shapes != {name: array.shape for name, array in canonical.items()}:
        return None
    model = moved(mapping, canonical)
    return model | {tie.alias: model[tie.owner] for tie in rules.ties}


@pytest.mark.parametrize(("name", "changes"), [*CASES, MOE[0]], ids=str)
def test_every_mutant_of_a_declaration_that_changes_a_number_is_refused_or_differs_from_stock(
    ranks: ForkServer, name: str, changes: dict[str, Any]
) -> None:
    family, config = BY_NAME[name], config_of(name, changes)
    _, canonical, declared = spaces(family, config, 2)
    theirs = stock_load(ranks, name, config, 2)
    refused = differ = 0
    for target, mutant in mutants(family):
        found = model_by(mutant, config, canonical, 2)
        if found is None:
            refused += 1
        elif differing(declared, found):
            assert differing(theirs, found), target
            differ += 1
    assert refused
    assert differ
