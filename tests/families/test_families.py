"""Families: declarations become rules of real tensors, proved, with AOA text."""

from __future__ import annotations

import pytest

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelDescription, ModelTensor, bind, family_for
from paddleformers_fc.families.text import aoa_text
from paddleformers_fc.mapping import Tie, prove

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}


def tensor(name: str, *shape: int, cuts: tuple[int, ...] | None = None) -> ModelTensor:
    return ModelTensor(name, shape, "float32", cuts or (1,) * len(shape))


def model(model_type: str, **changes: object) -> ModelDescription:
    return ModelDescription(config(model_type, **changes))


def config(model_type: str, **changes: object) -> dict[str, object]:
    return {**CONFIG, "model_type": model_type, **changes}


def ernie_moe(tp: int, mtp: bool = True) -> list[ModelTensor]:
    layer = "model.layers.1"
    found = [
        tensor("model.embed_tokens.weight", 32, 16, cuts=(tp, 1)),
        tensor("lm_head.weight", 32, 16, cuts=(tp, 1)),
        tensor(f"{layer}.self_attn.qkv_proj.weight", 16, 32, cuts=(1, tp)),
        tensor(f"{layer}.self_attn.o_proj.weight", 16, 16, cuts=(tp, 1)),
        tensor(f"{layer}.mlp.gate.weight", 16, 4),
        tensor(f"{layer}.mlp.moe_statics.e_score_correction_bias", 1, 4),
        tensor(f"{layer}.mlp.shared_experts.up_gate_proj.weight", 16, 16, cuts=(1, tp)),
        *(tensor(f"{layer}.mlp.experts.{e}.up_gate_proj.weight", 16, 16) for e in range(4)),
        *(tensor(f"{layer}.mlp.experts.{e}.down_proj.weight", 8, 16) for e in range(4)),
    ]
    if mtp:
        found += [
            tensor("model.mtp_block.0.mlp.up_gate_proj.weight", 16, 48, cuts=(1, tp)),
            tensor("model.mtp_emb_norm.0.weight", 16),
            tensor("model.mtp_linear_proj.0.weight", 32, 16),
        ]
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ernie_moe_is_proved_forward_and_reversed(tp: int) -> None:
    rules = bind(family_for(config("ernie4_5_moe")), model("ernie4_5_moe"), ernie_moe(tp))
    prove(rules.mapping())
    prove(rules.mapping().reversed())
    assert rules.mapping().sources["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (8, 16)


def test_routed_experts_are_fused_in_one_round_and_shared_ones_per_tensor_parallel_rank() -> None:
    rules = bind(family_for(config("ernie4_5_moe")), model("ernie4_5_moe"), ernie_moe(2))
    blocks = {rule.targets[0]: rule.target_blocks for rule in rules.rules}
    assert blocks["model.layers.1.mlp.experts.0.up_gate_proj.weight"] == 1
    assert blocks["model.layers.1.mlp.shared_experts.up_gate_proj.weight"] == 2
    assert blocks["model.layers.1.self_attn.qkv_proj.weight"] == CONFIG["num_key_value_heads"]


def test_a_tied_head_is_an_alias_of_the_embedding_and_an_untied_one_is_itself() -> None:
    names = [tensor("model.embed_tokens.weight", 32, 16), tensor("lm_head.weight", 32, 16)]
    tied = bind(family_for(config("llama")), model("llama", tie_word_embeddings=True), names)
    assert set(tied.mapping().sources) == {"model.embed_tokens.weight"}
    assert tied.ties == (Tie("model.embed_tokens.weight", "lm_head.weight"),)
    untied = bind(family_for(config("llama")), model("llama"), names)
    assert set(untied.mapping().sources) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_all_tensors_that_no_statement_declares_are_named() -> None:
    names = [tensor(f"model.layers.{i}.mlp.strange.weight", 2, 2) for i in range(3)]
    with pytest.raises(MappingError) as caught:
        bind(family_for(config("llama")), model("llama"), names)
    (line,) = caught.value.evidence
    assert line.startswith("model.layers.{0...2}.mlp.strange.weight: no statement of family llama")


def test_wrong_head_counts_are_refused_with_the_numbers() -> None:
    names = [tensor("model.layers.0.self_attn.qkv_proj.weight", 16, 33)]
    with pytest.raises(MappingError, match="length 33 does not hold 4 query and 2 x 2"):
        bind(family_for(config("ernie4_5")), model("ernie4_5"), names)


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(MappingError, match="ernie4_5, ernie4_5_moe, gemma3_text"):
        family_for({"model_type": "unheard_of"})


def test_the_aoa_text_is_what_a_person_writes_for_stock() -> None:
    statements = aoa_text(family_for(config("ernie4_5_moe")), model("ernie4_5_moe"), ernie_moe(2))
    layer = "model.layers.$LAYER_ID"
    assert f"{layer}.self_attn.o_proj.weight^T -> {layer}.self_attn.o_proj.weight" in statements
    expert = f"{layer}.mlp.experts.$EXPERT_ID"
    assert (
        f"{expert}.gate_proj.weight^T, {expert}.up_proj.weight^T -> {expert}.up_gate_proj.weight, fused_ffn"
        in statements
    )
    attention = f"{layer}.self_attn"
    assert (
        f"{attention}.q_proj.weight^T, {attention}.k_proj.weight^T, {attention}.v_proj.weight^T -> "
        f"{attention}.qkv_proj.weight, fused_qkv, num_heads=4, num_key_value_groups=2" in statements
    )
