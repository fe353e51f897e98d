"""The language of declarations: layouts that no family here has, against PaddleFormers' own statements."""

from __future__ import annotations

from typing import Any

import pytest

from paddleformers_fc.aoa import parse, uncut
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import (
    Family,
    ModelDescription,
    ModelTensor,
    bind,
    enumerate_tensors,
    language as lang,
    prove_family,
)
from paddleformers_fc.families.models.qwen2_moe import SPARSE
from paddleformers_fc.families.names import family_keys, tied_names
from paddleformers_fc.mapping import Rule
from tests.aoa.spaces import normal
from tests.families import native


def is_linear(layer: int, layer_types: Any) -> bool:
    return bool(layer_types[layer] == "linear_attention")


LINEAR_ATTENTION = (
    lang.same("linear_attn.A_log", "linear_attn.dt_bias", shape=("linear_num_value_heads",)),
    lang.same(
        "linear_attn.conv1d.weight", shape=(("delta_keys", "delta_keys", "delta_values"), 1, "linear_conv_kernel_dim")
    ),
    lang.linear("linear_attn.in_proj_qkvz", outputs=("delta_keys", "delta_keys", "delta_values", "delta_values")),
    lang.linear("linear_attn.in_proj_ba", outputs=("linear_num_value_heads", "linear_num_value_heads")),
    lang.same("linear_attn.norm.weight", shape=("linear_value_head_dim",)),
    lang.linear("linear_attn.out_proj", inputs="delta_values"),
)
QKV = ("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED_ATTENTION = (
    lang.qkv(*QKV, parts=("gated_q", "kv", "kv")),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.same("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=("head",)),
)
NORMS = lang.same("input_layernorm.weight", "post_attention_layernorm.weight")
ATTENTION = (lang.when(is_linear, LINEAR_ATTENTION), lang.unless(is_linear, GATED_ATTENTION))
NEXT = lang.family(
    "next",
    lang.ends("model.embed_tokens", "model.norm", "lm_head"),
    lang.layer("model.layers.{layer}", NORMS, ATTENTION, SPARSE),
    lang.optional("mtp."),
    sizes={"gated_q": ("q", "q"), "shared_ffn": "shared_expert_intermediate_size"},
    tiny={"head_dim": 8, "num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
    | {"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
)

MERGER = (
    lang.same("norm.weight", "norm.bias", shape=("wide",)),
    lang.linear("linear_fc1", inputs="wide", outputs="wide", bias=True),
    lang.linear("linear_fc2", inputs="wide", outputs="out_hidden_size", bias=True),
)
VISION = lang.tower(
    "vision",
    lang.layer(
        "model.visual",
        lang.same("patch_embed.proj.weight", shape=("hidden", 3, 2, "patch_size", "patch_size")),
        lang.same("patch_embed.proj.bias"),
        lang.same("pos_embed.weight", shape=("num_position_embeddings", "hidden")),
        lang.layer("merger", MERGER),
        lang.layer("deepstack_merger_list.{merger}", MERGER),
        lang.layer(
            "blocks.{block}",
            lang.same("norm1.weight", "norm2.weight", "norm1.bias", "norm2.bias"),
            lang.linear("attn.qkv", outputs=("hidden", "hidden", "hidden"), bias=True),
            lang.linear("attn.proj", bias=True),
            lang.linear("mlp.linear_fc1", outputs="ffn", bias=True),
            lang.linear("mlp.linear_fc2", inputs="ffn", bias=True),
        ),
    ),
    sizes={
        "layers": "depth",
        "heads": "num_heads",
        "wide": ("hidden",) * 4,
        "mergers": lambda deepstack_visual_indexes: len(deepstack_visual_indexes),
    },
)
VISION_TINY = {"depth": 3, "hidden_size": 16, "num_heads": 4, "intermediate_size": 24, "patch_size": 2}
VISION_TINY |= {"num_position_embeddings": 9, "out_hidden_size": 32}
TEXT = (
    NORMS,
    lang.qkv(*QKV),
    lang.row("self_attn.o_proj", inputs="q"),
    lang.same("self_attn.q_norm.weight", "self_attn.k_norm.weight", shape=("head",)),
    lang.gate_up("mlp.up_gate_proj", "mlp.gate_proj", "mlp.up_proj"),
    lang.row("mlp.down_proj", inputs="ffn"),
)
TEXT_ENDS = lang.ends("model.language_model.embed_tokens", "model.language_model.norm", "lm_head")
SEEING = lang.family(
    "seeing",
    TEXT_ENDS,
    lang.layer("model.language_model.layers.{layer}", TEXT),
    key="text_config",
    towers=(VISION,),
    numbers=(lang.Numbers("merger", "vision.mergers"),),
    tiny={"vision_config": {**VISION_TINY, "deepstack_visual_indexes": [0, 2]}},
)


def differences(family: Family, statements: list[str], config: dict[str, Any]) -> Any:
    """The boxes that a family and statements do not agree on."""
    model = ModelDescription(config)
    mapping = bind(family, model, [one.under() for one in enumerate_tensors(family, model)]).mapping()
    left, right = (
        {name: uncut(spec.shape, spec.dtype) for name, spec in side.items()}
        for side in (mapping.sources, mapping.targets)
    )
    return normal(mapping) ^ normal(parse(statements, left, right))


def test_linear_attention_and_gated_queries_are_what_the_native_statements_mean() -> None:
    config = {**NEXT.tiny, "model_type": "next"}
    assert prove_family(NEXT) == 3 + 2 * (2 + 1 + 2 * 2 + 3) + 7 + 4
    assert differences(NEXT, native.statements("qwen3_next", config, inverse=False), config) == set()


def test_parts_that_do_not_fill_a_fused_layer_are_refused() -> None:
    config = {**NEXT.tiny, "model_type": "next"}
    wrong = [one.under() for one in enumerate_tensors(NEXT, ModelDescription(config)) if "qkv_proj.weight" in one.name]
    with pytest.raises(MappingError, match="cannot be mapped") as caught:
        bind(NEXT, ModelDescription({**config, "head_dim": 4}), wrong)
    assert "length 192 is not the 96" in caught.value.evidence[0]


def test_text_and_vision_of_nested_configurations_are_what_the_native_statements_mean() -> None:
    config = {**SEEING.tiny, "model_type": "seeing"}
    nested = {key: native.Config(**value) if isinstance(value, dict) else value for key, value in config.items()}
    conversion = {"^visual": "model.visual", "^model": "model.language_model"}
    statements = native.statements(
        "qwen3_vl", nested, inverse=False, _checkpoint_conversion_mapping=conversion, _tied_weights_keys={"a": "b"}
    )
    prove_family(SEEING)
    assert differences(SEEING, statements, config) == set()
    mergers = [one.name for one in enumerate_tensors(SEEING, ModelDescription(config)) if "list.1.norm" in one.name]
    assert len(mergers) == 2


def test_a_text_in_another_scope_ties_its_own_ends_in_both_classes() -> None:
    tied = {**SEEING.tiny, "model_type": "seeing", "tie_word_embeddings": True}
    assert tied_names(SEEING, ModelDescription(tied)) == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    fleet = lang.family("fleet", TEXT_ENDS, classes=(lang.FLEET,))
    assert tied_names(fleet, ModelDescription({"tie_word_embeddings": True}, True)) == {
        "model.language_model.lm_head.weight": "model.language_model.embedding.embed_tokens.weight"
    }
    assert "text_config.num_attention_heads" in family_keys(SEEING)


def test_a_layer_that_is_fused_in_files_is_interleaved_per_head_in_the_model() -> None:
    fused = lang.layer("model.layers.{layer}", lang.qkv("attn.qkv_proj", "attn.qkv"))
    ends = lang.ends("model.embed_tokens", "model.norm", "lm_head")
    heads = lang.family("heads", ends, fused, tiny={"num_key_value_heads": 8})
    config = {**heads.tiny, "model_type": "heads"}
    statements = [
        "model.layers.$LAYER_ID.attn.qkv.weight -> q.$LAYER_ID.a, k.$LAYER_ID.a, v.$LAYER_ID.a, axis=0",
        *(f"{part}.{layer}.a^T -> {part}.{layer}.a" for layer in range(2) for part in "qkv"),
        *(
            f"q.{layer}.a, k.{layer}.a, v.{layer}.a -> model.layers.{layer}.attn.qkv_proj.weight, fused_qkv, "
            "num_heads=8, num_key_value_groups=8"
            for layer in range(2)
        ),
    ]
    assert differences(heads, statements, config) == set()


def test_experts_of_two_sizes_follow_the_entries_of_a_list() -> None:
    def size(expert: int, moe_intermediate_size: Any, moe_num_experts: Any) -> Any:
        return moe_intermediate_size[0] if expert < moe_num_experts[0] else moe_intermediate_size[1]

    expert = (
        lang.gate_up("up_gate_proj", "gate_proj", "up_proj", size=size),
        lang.row("down_proj", inputs=size),
    )
    two = lang.family(
        "two",
        lang.uncut(lang.layer("model.layers.{layer}.mlp.experts.{expert}", expert)),
        sizes={"experts": lambda moe_num_experts: moe_num_experts[0] + moe_num_experts[1]},
        tiny={"moe_num_experts": [2, 1], "moe_intermediate_size": [8, 4]},
    )
    prove_family(two)
    shapes = {one.name: one.shape for one in enumerate_tensors(two, ModelDescription(dict(two.tiny)))}
    assert shapes["model.layers.1.mlp.experts.1.down_proj.weight"] == (8, 32)
    assert shapes["model.layers.1.mlp.experts.2.down_proj.weight"] == (4, 32)


def test_a_part_of_the_family_itself_is_refused_in_a_scope() -> None:
    with pytest.raises(TypeError, match="belongs to the family itself"):
        lang.layer("model", lang.ends("embed_tokens", "norm", "lm_head"))


def stack_rule(turned: bool) -> Rule:
    """The rule of a stack of three experts of shape [4, 6] that files stack as well."""
    probe = Family(
        "probe",
        lang.stack_of_files("model.weight1", file="experts.up", shape=("hidden", "ffn"), turned=turned),
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
    layers = lang.layer("model.layers.{layer}", NORMS)
    probe = lang.family("probe", TEXT_ENDS, layers, key="text_config", tiny={})
    flat = {"model_type": "probe", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    nested = {"model_type": "probe", "text_config": flat}
    assert list(enumerate_tensors(probe, ModelDescription(flat))) == list(
        enumerate_tensors(probe, ModelDescription(nested))
    )
