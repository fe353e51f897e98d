"""A family of two towers, Qwen 2.5 VL: nested configurations, layers and sizes of their own, literal digits."""

from __future__ import annotations

import pytest
from msgspec import structs

from paddleformers_fc.errors import Corrupt, MappingError
from paddleformers_fc.families import ModelDescription, enumerate_tensors
from paddleformers_fc.families.names import family_heads, family_keys, tied_names
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.plan.sources import resume_source
from tests.families.spaces import BY_NAME, model_of, settings
from tests.plan.stored import checkpoint_of

FAMILY = BY_NAME["qwen2_5_vl"]
CONFIG = settings(FAMILY)
MODEL = model_of(CONFIG)


def test_a_tower_is_on_the_first_stage_of_a_pipeline_and_layers_are_on_their_own() -> None:
    model = declared_model(FAMILY, MODEL, parse_grid("pp=2"))
    first, last = model.weights(0), model.weights(1)
    assert {name for name in model.rules.targets if name.startswith("model.visual.")} <= first.keys()
    assert not [name for name in last if ".visual." in name or ".layers.0." in name]
    assert [name for name in last if ".layers.1." in name]


def test_a_missing_key_of_a_nested_configuration_is_not_taken_from_another_tower() -> None:
    vision = {key: value for key, value in CONFIG["vision_config"].items() if key != "depth"}
    with pytest.raises(MappingError, match="depth"):
        list(enumerate_tensors(FAMILY, ModelDescription({**CONFIG, "vision_config": vision, "depth": 2})))
    joined = {**CONFIG["vision_config"], **CONFIG["text_config"]}
    with pytest.raises(MappingError, match="hidden"):
        list(enumerate_tensors(FAMILY, ModelDescription(joined)))


def test_keys_and_heads_of_nested_configurations_are_identified_by_their_paths() -> None:
    assert {"vision_config.depth", "text_config.intermediate_size"} <= family_keys(FAMILY)
    assert family_heads(FAMILY, MODEL) == {
        "text_config.num_attention_heads": 8,
        "text_config.num_key_value_heads": 4,
        "vision_config.num_attention_heads": 4,
        "vision_config.num_key_value_heads": 4,
    }


def test_a_nested_key_that_differs_between_config_json_and_the_stored_model_is_refused() -> None:
    model = SimulatedModel(FAMILY, MODEL, parse_grid("tp=2"), enumerate_tensors(FAMILY, MODEL))
    checkpoint = checkpoint_of(model)
    resume_source(checkpoint, model.rules)
    other = {**checkpoint.config, "vision_config": {**CONFIG["vision_config"], "num_heads": 2}}
    with pytest.raises(Corrupt) as caught:
        resume_source(structs.replace(checkpoint, config=other), model.rules)
    assert caught.value.evidence == ("vision_config.num_heads: 2 in config.json, 4 in mapping.json",)


def test_a_tie_of_the_text_model_is_read_and_that_of_the_outer_model_takes_precedence() -> None:
    text = {"text_config": {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "tie_word_embeddings": True}}
    for outer, tied in (({}, True), ({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False)):
        assert bool(tied_names(FAMILY, ModelDescription({**outer, **text}))) is tied
