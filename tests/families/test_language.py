"""The language of declarations: layouts that no family here has, and what is refused."""

from __future__ import annotations

import pytest

from paddleformers_fc.aoa import parse
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import (
    Family,
    ModelDescription,
    ModelTensor,
    bind,
    enumerate_tensors,
    language as lang,
)
from paddleformers_fc.families.names import tied_names
from paddleformers_fc.mapping import Rule
from tests.aoa.spaces import normal, side_of
from tests.families.spaces import BY_NAME, model_of, settings, tensors

TEXT_ENDS = lang.ends("model.language_model.embed_tokens", "model.language_model.norm", "lm_head")


def test_parts_that_do_not_fill_a_fused_layer_are_refused() -> None:
    family, config = BY_NAME["qwen3_next"], settings(BY_NAME["qwen3_next"])
    wrong = [one for one in tensors(family, config) if "qkv_proj.weight" in one.name]
    with pytest.raises(MappingError, match="cannot be mapped") as caught:
        bind(family, model_of({**config, "head_dim": 4}), wrong)
    assert "length 192 is not the 96" in caught.value.evidence[0]


def test_a_text_in_another_scope_ties_its_own_ends_in_both_classes() -> None:
    tied = settings(BY_NAME["qwen2_5_vl"], tie_word_embeddings=True)
    ends = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    assert tied_names(BY_NAME["qwen2_5_vl"], model_of(tied)) == ends
    fleet = lang.family("fleet", TEXT_ENDS, classes=(lang.FLEET,))
    assert tied_names(fleet, ModelDescription({"tie_word_embeddings": True}, True)) == {
        "model.language_model.lm_head.weight": "model.language_model.embedding.embed_tokens.weight"
    }


def test_a_layer_that_is_fused_in_files_is_interleaved_per_head_in_the_model() -> None:
    fused = lang.layer("model.layers.{layer}", lang.qkv("attn.qkv_proj", "attn.qkv"))
    ends = lang.ends("model.embed_tokens", "model.norm", "lm_head")
    heads = lang.family("heads", ends, fused, tiny={"num_key_value_heads": 8})
    model = ModelDescription({**heads.tiny, "model_type": "heads"})
    mapping = bind(heads, model, [one.under() for one in enumerate_tensors(heads, model)]).mapping()
    statements = [
        "model.layers.$LAYER_ID.attn.qkv.weight -> q.$LAYER_ID.a, k.$LAYER_ID.a, v.$LAYER_ID.a, axis=0",
        *(f"{part}.{layer}.a^T -> {part}.{layer}.a" for layer in range(2) for part in "qkv"),
        *(
            f"q.{layer}.a, k.{layer}.a, v.{layer}.a -> model.layers.{layer}.attn.qkv_proj.weight, fused_qkv, "
            "num_heads=8, num_key_value_groups=8"
            for layer in range(2)
        ),
    ]
    assert normal(parse(statements, side_of(mapping.sources), side_of(mapping.targets))) == normal(mapping)


def test_a_part_of_the_family_itself_is_refused_in_a_scope() -> None:
    with pytest.raises(TypeError, match="belongs to the family itself"):
        lang.layer("model", lang.ends("embed_tokens", "norm", "lm_head"))


def stack_rule(transposed: bool) -> Rule:
    """The rule of a stack of three experts of shape [4, 6] that files stack as well."""
    probe = Family(
        "probe",
        lang.stack_of_files("model.weight1", file="experts.up", shape=("hidden", "ffn"), transposed=transposed),
    )
    tensor = ModelTensor("model.weight1", (3, 4, 6), "float32", (1, 1, 1))
    (rule,) = bind(probe, ModelDescription({"num_experts": 3}), [tensor]).rules
    return rule


def test_experts_that_files_stack_as_well_are_one_tensor_and_may_be_transposed() -> None:
    assert (stack_rule(False).sources, stack_rule(False).axes) == (("experts.up",), (0, 1, 2))
    assert stack_rule(True).axes == (0, 2, 1)
    assert stack_rule(True).source_shapes((3, 4, 6)) == [(3, 6, 4)]


def test_a_stack_with_other_axes_than_are_declared_is_refused() -> None:
    probe = Family("probe", lang.stack_of_files("model.weight1", shape=("hidden", "ffn")))
    with pytest.raises(MappingError) as caught:
        bind(probe, ModelDescription({"num_experts": 3}), [ModelTensor("model.weight1", (3, 4), "float32", (1, 1))])
    assert caught.value.evidence[0] == "model.weight1: 3 axes are declared, this tensor has 2"


def test_the_keys_of_a_text_are_read_outside_where_the_configuration_is_not_nested() -> None:
    layers = lang.layer("model.layers.{layer}", lang.same("input_layernorm.weight"))
    probe = lang.family("probe", TEXT_ENDS, layers, key="text_config", tiny={})
    flat = {"model_type": "probe", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    nested = {"model_type": "probe", "text_config": flat}
    assert list(enumerate_tensors(probe, ModelDescription(flat))) == list(
        enumerate_tensors(probe, ModelDescription(nested))
    )
