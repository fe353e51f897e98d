"""What is bound is the live model: every declared family, through PaddleFormers' own configuration classes."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.families import (
    Family,
    ModelTensor,
    bind,
    described_by_file,
    enumerate_tensors,
    own_families,
)
from paddleformers_fc.families.changes import contradictions
from paddleformers_fc.families.description import IS_FLEET
from paddleformers_fc.families.names import family_keys
from paddleformers_fc.families.sizes import value_at
from paddleformers_fc.trainer import documents
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.documents import model_config
from tests.families.jobs import config_class
from tests.families.spaces import BY_NAME, model_of, settings

FLEET_ONLY = ("kimi_k2", "minimax_m2", "glm_moe_dsa", "deepseek_v32", "deepseek_v4", "qwen3_5", "qwen3_5_moe")
NAMES = [family.name for family in own_families()]
FLAT = "paddleocr_vl"  # PaddleFormers' class has no nested configuration of the text.
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "glm_ocr", "paddleocr_vl", "ernie4_5_moe_vl")


def config_of(name: str, **values: Any) -> Any:
    """A configuration of PaddleFormers."""
    config = config_class(name)(**values)
    # Some classes overwrite num_nextn_predict_layers with 0; a training sets it afterwards.
    if "num_nextn_predict_layers" in values:
        config.num_nextn_predict_layers = values["num_nextn_predict_layers"]
    return config


def live(config: Any, is_fleet: bool = False) -> Any:
    """A model of this configuration, as far as its description looks at one.

    A PaddleFleet class keeps PaddleFormers' configuration beside one of its own, which is another class.
    """
    if not is_fleet:
        return SimpleNamespace(config=config)
    keys = ("num_empty_layers_add_in_head", "moe_expert_fusion", "using_sonic_moe", "tie_word_embeddings")
    provider = SimpleNamespace(**{key: getattr(config, key) for key in keys})
    return SimpleNamespace(config=provider, config_to_save=config, is_fleet=True)


def classes_of(family: Family) -> list[bool]:
    """The classes that PaddleFormers has of a family: of PaddleFleet, its own."""
    both = IS_FLEET in family_keys(family)
    return [True, False] if both else [family.name in FLEET_ONLY]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_a_declaration_reads_reaches_the_binding_with_its_live_value(name: str) -> None:
    family = BY_NAME[name]
    for key in sorted(family_keys(family) - {IS_FLEET}):
        key = key.removeprefix("text_config.") if name == FLAT else key
        *outer, leaf = key.split(".")
        values = [getattr(_inside(config_of(name), outer), leaf, None), 1, 2, 3, False, True]
        if name == "glm4v_moe" and key == "tie_word_embeddings":
            key = f"text_config.{key}"  # The class hands it down, and the declaration reads it at either place.
        for value in values:
            try:
                config = config_of(name, **{outer[0]: {leaf: value}} if outer else {leaf: value})
            except Exception:
                continue  # PaddleFormers refuses such a configuration.
            found = value_at(describe_model(live(config)).config, key)
            assert found == getattr(_inside(config, outer), leaf, None), f"{key}={value!r}"


def _inside(config: Any, path: list[str]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("name", NAMES)
def test_a_family_binds_what_its_configuration_class_holds_as_declared(name: str) -> None:
    family = BY_NAME[name]
    for is_fleet in classes_of(family):
        chosen = {**tiny_values(name), "model_type": name, IS_FLEET: is_fleet}
        described = describe_model(live(config_of(name, **tiny_values(name)), is_fleet))
        assert described.is_fleet is is_fleet
        for tp in (1, 2):
            tensors = [one.under(tp=tp) for one in enumerate_tensors(family, model_of(chosen))]
            assert [one.under(tp=tp) for one in enumerate_tensors(family, described)] == tensors
            assert bind(family, described, tensors) == bind(family, model_of(chosen), tensors)


def test_the_defaults_of_a_family_are_those_of_its_configuration_class() -> None:
    found: dict[str, tuple[Any, Any]] = {}
    for name, family in BY_NAME.items():
        made = config_class(name)()
        towers = ((f"{one.key}.", one.defaults, getattr(made, one.key, made)) for one in family.towers)
        for prefix, defaults, config in (("", family.defaults, made), *towers):
            for key, value in defaults.items():
                if getattr(config, key, value) != value:
                    found[f"{name}: {prefix}{key}"] = value, getattr(config, key)
    # The class takes full_attention_interval, and keeps only what follows from it.
    kinds = config_class("qwen3_next")(num_hidden_layers=8).layer_types
    assert kinds.index("full_attention") + 1 == BY_NAME["qwen3_next"].defaults["full_attention_interval"]
    assert found == {
        "ernie4_5_moe: moe_layer_end_index": (-1, 2),
        "ernie4_5_moe_vl: moe_num_shared_experts": (2, 0),
        "ernie4_5_moe_vl: moe_layer_interval": (1, 2),
        "ernie4_5_moe_vl: moe_use_aux_free": (True, False),
        "glm_moe_dsa: first_k_dense_replace": (3, 1),
    }


def tiny_values(name: str, **changes: Any) -> dict[str, Any]:
    """The family's tiny configuration as arguments of the configuration class."""
    values = {key: one for key, one in settings(BY_NAME[name]).items() if key not in (IS_FLEET, "model_type")}
    if name == FLAT:
        values |= values.pop("text_config")
    return {"tie_word_embeddings": False, **values, **changes}


def plain_values(name: str, **changes: Any) -> dict[str, Any]:
    """The family's tiny configuration as arguments for the class that PaddleFormers builds itself."""
    values = tiny_values(name, **({} if name in VISION else {"num_nextn_predict_layers": 0}), **changes)
    if name == "deepseek_v3":
        values["rope_scaling"] = {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}
    if name == "qwen3_vl_moe":  # PaddleFormers' class cannot be built with a dense layer.
        values["text_config"] = {**values["text_config"], "mlp_only_layers": []}
    if name == "ernie4_5_moe_vl":
        values |= {"moe_k": 2, "pixel_hidden_size": 16}
    return {**values, "fuse_rms_norm": False, "moe_group": "dummy"}


@pytest.mark.parametrize("name", ["glm4_moe", "kimi_k2", "minimax_m2"])
@pytest.mark.parametrize("empty", [0, 1, 3])
def test_every_canonical_layer_is_bound_behind_the_empty_ones_that_a_class_of_paddlefleet_has(
    name: str, empty: int
) -> None:
    values = tiny_values(name, num_hidden_layers=3, num_nextn_predict_layers=1, num_empty_layers_add_in_head=empty)
    family = BY_NAME[name]
    for is_fleet in classes_of(family):
        described = describe_model(live(config_of(name, **values), is_fleet))
        rules = bind(family, described, [one.under() for one in enumerate_tensors(family, described)]).rules
        sources, shift = {rule.targets[0]: rule.sources for rule in rules}, empty * is_fleet
        for layer in range(3):
            held = f"model.layers.{layer + shift}.input_layernorm.weight"
            assert sources[held] == (f"model.layers.{layer}.input_layernorm.weight",)
        if is_fleet:
            assert sources[f"model.layers.{3 + shift}.enorm.weight"] == ("model.layers.3.enorm.weight",)


@pytest.mark.parametrize("name", ["minimax_m2", "glm4_moe", "qwen2_moe", "qwen3_moe", "kimi_k2"])
@pytest.mark.parametrize(
    ("switches", "turned"),
    [({"moe_expert_fusion": True}, True), ({"moe_expert_fusion": True, "using_sonic_moe": True}, False)],
)
def test_fused_experts_are_transposed_by_the_live_configuration_though_they_are_square(
    name: str, switches: dict[str, bool], turned: bool
) -> None:
    # MiniMax M2 at its own sizes, and the others with as many numbers on both axes of an expert's first layer.
    square = {} if name == "minimax_m2" else tiny_values(name, hidden_size=32, moe_intermediate_size=16)
    small = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
    counts = {"n_routed_experts": 4, "num_experts": 4, "num_empty_layers_add_in_head": 0}
    config = config_of(name, **{**square, **small, **counts, **switches})
    described = describe_model(live(config, is_fleet=True))
    hidden, width = config.hidden_size, 2 * config.moe_intermediate_size
    assert hidden == width
    stack = ModelTensor("model.layers.0.mlp.grouped_gemm_experts.weight1", (4 * hidden, width), "float32", (1, 1))
    for rule in bind(BY_NAME[name], described, [stack]).rules:
        assert (rule.axes == (1, 0)) is turned


def test_the_class_of_a_model_is_that_of_the_model_where_no_shape_shows_it() -> None:
    router = ModelTensor("model.layers.0.mlp.gate.weight", (16, 16), "float32", (1, 1))
    values = tiny_values("qwen2_moe", hidden_size=16, num_experts=16)
    for is_fleet, axes, name in ((True, (0, 1), "Qwen2Moe"), (False, (1, 0), "Qwen2MoeDeprecated")):
        described = describe_model(live(config_of("qwen2_moe", **values), is_fleet))
        for model in (described, described_by_file({**described.config, "architectures": [name]})):
            (rule,) = bind(BY_NAME["qwen2_moe"], model, [router]).rules
            assert rule.axes == axes


def test_the_live_configuration_of_a_paddlefleet_model_takes_precedence_over_the_saved_one() -> None:
    config = config_of("glm4_moe", **tiny_values("glm4_moe"))
    model = live(config, is_fleet=True)
    model.config.num_empty_layers_add_in_head = 2
    assert describe_model(model).config["num_empty_layers_add_in_head"] == 2
    model.config.num_empty_layers_add_in_head = None
    assert describe_model(model).config["num_empty_layers_add_in_head"] == 1


def test_a_description_holds_defaults_and_nested_values_and_nothing_of_a_layout() -> None:
    from paddleformers.transformers.configuration_utils import PretrainedConfig

    config = config_of("llama", tensor_model_parallel_size=2, rope_scaling={"rope_type": "linear", "factor": 2.0})
    config.vision_config = PretrainedConfig(tensor_parallel_rank=1, depth=3)
    config.moe_group = object()
    found = describe_model(live(config)).config
    assert found["rms_norm_eps"] == 1e-6
    assert found["rope_parameters"]["factor"] == 2.0
    assert found["vision_config"]["depth"] == 3
    assert found["num_empty_layers_add_in_head"] == 0
    left_out = {"tensor_model_parallel_size", "tensor_parallel_rank", "moe_group", "sequence_parallel", "dtype"}
    assert left_out.isdisjoint(found)
    assert left_out.isdisjoint(found["vision_config"])


@pytest.mark.parametrize("name", NAMES)
def test_config_json_of_a_save_agrees_with_the_stored_model_description(name: str) -> None:
    ties = [{}, *({"tie_word_embeddings": tie, "max_position_embeddings": 77 + tie} for tie in (False, True))]
    text = tiny_values(name).get("text_config")
    for is_fleet, outer, inner, depth, kept in itertools.product(
        classes_of(BY_NAME[name]), ties, ties if text else [{}], (0, 1), (False, True)
    ):
        values = {**tiny_values(name), "num_nextn_predict_layers": depth}
        del values["tie_word_embeddings"]
        source = {**values, **outer, **({"text_config": {**text, **inner}} if text else {})}
        model = live(config_of(name, **copy.deepcopy(source)), is_fleet)
        model.parameters, model._layers = list, None
        if kept:
            documents.take_over(model, {**source, "model_type": name}, None)
        written = model_config(model)
        assert contradictions(written, describe_model(model)) == [], (is_fleet, outer, inner, depth, kept)
        if name == "glm_ocr":  # Whose class never ties.
            parts = (written, written["text_config"])
            assert {one["tie_word_embeddings"] for one in parts if "tie_word_embeddings" in one} == {False}
