"""A family of two towers: nested configurations, layers and sizes of their own, literal digits, names in two scopes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paddleformers_fc.errors import Corrupt, MappingError
from paddleformers_fc.families import (
    ModelDescription,
    ModelTensor,
    bind,
    enumerate_tensors,
    prove_family,
    register,
    registry,
)
from paddleformers_fc.families.language import (
    FLEET,
    FORMERS,
    OneOf,
    column,
    ends,
    experts,
    family,
    gate_up,
    layer,
    qkv,
    router,
    row,
    same,
    tower,
)
from paddleformers_fc.families.names import family_heads, family_keys, tied_names
from paddleformers_fc.formats.aoa_statements import aoa_text
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.plan.sources import resume_source
from tests.families.spaces import differing, spaces
from tests.mapping.numbers import moved
from tests.plan.stored import checkpoint_of

VISION = tower(
    "vision",
    layer(
        "model.visual",
        same("patch_embed.proj.weight", shape=("hidden", "patch")),
        column("merger.mlp.0", outputs=("hidden", "hidden"), bias=True),
        row("merger.mlp.2", inputs=("hidden", "hidden"), outputs="text.hidden", bias=True),
        layer(
            "blocks.{block}",
            same("norm1.weight", "norm2.weight", "norm1.bias", "norm2.bias"),
            qkv("attn.qkv", "attn.qkv", bias=True, per_rank=True),
            row("attn.proj", bias=True),
        ),
        file="visual",
    ),
    sizes={
        "hidden": OneOf(("embed_dim", "hidden_size")),
        "layers": "depth",
        "heads": "num_heads",
        "patch": lambda patch_size: 3 * patch_size * patch_size,
    },
    defaults={"patch_size": 2},
)
TEXT = tower(
    "text",
    layer(
        "model.language_model",
        same("embed_tokens.weight", shape=("vocab", "hidden"), cut=0),
        layer(
            "layers.{layer}",
            same("input_layernorm.weight"),
            qkv("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            row("self_attn.o_proj", inputs="q"),
            gate_up("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj"),
            row("mlp.down_proj", inputs="ffn"),
        ),
    ),
    number="layer",
)
TINY: dict[str, Any] = {
    "vision_config": {"embed_dim": 16, "depth": 3, "num_heads": 4},
    "text_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 24,
        "vocab_size": 64,
    },
}
NORM = layer("model.layers.{layer}", same("norm.weight"))
ENDS = ends("model.embed_tokens", "model.norm", "lm_head")
TOY = family("toy_vl", classes=(FORMERS,), towers=(VISION, TEXT), sizes={"layers": "text.layers"}, tiny=TINY)
MODEL = ModelDescription({"model_type": "toy_vl", **TINY})


def test_both_towers_are_enumerated_with_their_own_layers_and_sizes() -> None:
    found = {one.name: one.shape for one in enumerate_tensors(TOY, MODEL)}
    assert len(found) == 3 * 8 + 5 + 2 * 5 + 1
    assert found["model.visual.blocks.2.attn.qkv.weight"] == (16, 48)
    assert found["model.visual.merger.mlp.2.weight"] == (32, 32)
    assert found["model.visual.patch_embed.proj.weight"] == (16, 12)
    assert found["model.language_model.layers.1.self_attn.qkv_proj.weight"] == (32, 64)


def test_two_towers_are_proved_forward_and_reversed() -> None:
    assert prove_family(TOY) == 40


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_numbers_of_both_towers_come_back_and_fused_layers_use_the_heads_of_their_tower(tp: int) -> None:
    rules, canonical, model = spaces(TOY, MODEL.config, tp)
    assert differing(canonical, moved(rules.mapping().reversed(), model)) == []
    query, key, value = np.split(canonical["visual.blocks.0.attn.qkv.weight"].T, 3, axis=1)
    parts = zip(*(np.split(part, tp, axis=1) for part in (query, key, value)), strict=True)
    per_rank = np.concatenate([np.concatenate(part, axis=1) for part in parts], axis=1)
    assert np.array_equal(model["model.visual.blocks.0.attn.qkv.weight"], per_rank)
    of_text = {rule.targets[0]: rule.target_blocks for rule in rules.rules}
    assert of_text["model.language_model.layers.0.self_attn.qkv_proj.weight"] == 4


@pytest.mark.parametrize("reverse", [False, True])
def test_statements_of_two_towers_are_rendered(reverse: bool) -> None:
    tensors = [one.under(tp=2) for one in enumerate_tensors(TOY, MODEL)]
    assert any("visual.merger.mlp." in line for line in aoa_text(TOY, MODEL, tensors, reverse=reverse))


def test_a_tower_is_on_the_first_stage_of_a_pipeline_and_layers_are_on_their_own() -> None:
    model = declared_model(TOY, MODEL, parse_grid("pp=2"))
    first, last = model.weights(0), model.weights(1)
    assert {name for name in model.rules.targets if name.startswith("model.visual.")} <= first.keys()
    assert not [name for name in last if not name.startswith("model.language_model.layers.1.")]


def test_a_literal_number_is_no_other_number() -> None:
    with pytest.raises(MappingError, match="no statement of family toy_vl declares this tensor"):
        bind(TOY, MODEL, [ModelTensor("model.visual.merger.mlp.1.weight", (16, 32), "float32", (1, 1))])


def test_a_layer_beyond_those_of_its_own_tower_is_refused() -> None:
    tensor = ModelTensor("model.visual.blocks.3.norm1.weight", (16,), "float32", (1,))
    with pytest.raises(MappingError) as caught:
        bind(TOY, MODEL, [tensor])
    assert "its block 3 is the canonical 3, and the configuration has 0 to 2" in caught.value.evidence[0]


def test_a_missing_key_of_a_nested_configuration_is_not_taken_from_another_tower() -> None:
    config = {**TINY, "vision_config": {"embed_dim": 16, "num_heads": 4}, "depth": 3}
    with pytest.raises(MappingError, match="depth"):
        list(enumerate_tensors(TOY, ModelDescription(config)))


def test_names_of_one_nested_key_with_different_values_are_refused() -> None:
    config = {**TINY, "vision_config": {**TINY["vision_config"], "hidden_size": 8}}
    with pytest.raises(MappingError, match="embed_dim and hidden_size are names of one key"):
        list(enumerate_tensors(TOY, ModelDescription(config)))


def test_keys_and_heads_of_nested_configurations_are_identified_by_their_paths() -> None:
    keys = family_keys(TOY)
    assert {"vision_config.num_heads", "vision_config.depth", "text_config.intermediate_size"} <= keys
    assert "hidden_size" not in keys
    assert family_heads(TOY, MODEL) == {
        "text_config.num_attention_heads": 8,
        "text_config.num_key_value_heads": 4,
        "vision_config.num_attention_heads": 4,
        "vision_config.num_key_value_heads": 4,
    }


def test_a_size_is_read_from_a_nested_configuration_by_its_path() -> None:
    nested = family(
        "nested",
        ENDS,
        layer("model.layers.{layer}", same("norm.weight")),
        classes=(FORMERS,),
        sizes={"hidden": OneOf(("text_config.hidden_size", "hidden_size")), "layers": "text_config.num_hidden_layers"},
        tiny={"text_config": {"hidden_size": 32, "num_hidden_layers": 1}},
    )
    assert prove_family(nested) == 4
    assert {"text_config.hidden_size", "hidden_size"} <= family_keys(nested)


def test_a_tower_has_the_statements_of_the_classes_that_the_family_has() -> None:
    expert = gate_up("up_gate_proj", "gate_proj", "up_proj", size="expert_ffn"), row("down_proj", inputs="expert_ffn")
    routed = layer("model.layers.{layer}", router("mlp.gate"), experts("mlp.experts.{expert}", expert))
    part = tower("text", routed, number="layer")
    config = {"text_config": {"hidden_size": 8, "moe_intermediate_size": 4, "num_experts": 2, "num_hidden_layers": 1}}
    both = family("both", classes=(FLEET, FORMERS), towers=(part,), sizes={"experts": "text.experts"}, tiny=config)
    gate = {
        is_fleet: next(iter(enumerate_tensors(both, ModelDescription(config, is_fleet)))).shape
        for is_fleet in (True, False)
    }
    assert gate == {True: (2, 8), False: (8, 2)}
    assert prove_family(both) == 2 * 5
    assert "is_fleet" in family_keys(both)


def test_one_class_leaves_no_condition_on_the_class() -> None:
    formers, fleet = (family("one", ENDS, NORM, classes=(one,)) for one in (FORMERS, FLEET))
    assert "is_fleet" not in family_keys(formers) | family_keys(fleet)
    names = {statement.target for statement in fleet.statements}
    assert "model.lm_head.weight" in names
    assert "lm_head.weight" not in names


def test_a_nested_key_that_differs_between_config_json_and_the_stored_model_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register(TOY)
    model = SimulatedModel(TOY, MODEL, parse_grid("tp=2"), enumerate_tensors(TOY, MODEL))
    checkpoint = checkpoint_of(model)
    resume_source(checkpoint, model.rules)
    other = {**checkpoint.config, "vision_config": {**TINY["vision_config"], "num_heads": 2}}
    with pytest.raises(Corrupt) as caught:
        resume_source(structs.replace(checkpoint, config=other), model.rules)
    assert caught.value.evidence == ("vision_config.num_heads: 2 in config.json, 4 in mapping.json",)


@pytest.mark.parametrize("outer", [True, False])
def test_a_tie_is_read_where_a_class_hands_it_down_to_the_text_and_that_of_the_whole_model_precedes(
    outer: bool,
) -> None:
    probe = family("tied", ENDS, NORM, classes=(FORMERS,), key="text_config", tiny={})
    text = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "tie_word_embeddings": True}
    assert list(tied_names(probe, ModelDescription({"text_config": text}))) == ["lm_head.weight"]
    both = {"tie_word_embeddings": outer, "text_config": text}
    assert bool(tied_names(probe, ModelDescription(both))) is outer
