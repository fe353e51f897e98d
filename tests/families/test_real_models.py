"""The tensors that a family declares for a configuration, against real models of PaddleFormers on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelTensor, bind, enumerate_tensors
from paddleformers_fc.mapping import prove
from tests.families.spaces import BY_NAME, model_of, settings
from verification.forkserver import ForkServer

LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {**LAYERS, "num_experts": 4}
MODELS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}],
    "ernie4_5": [{}, {"use_bias": False, "tie_word_embeddings": False}, {"mlp_bias": True, "lm_head_bias": True}],
    "phi3": [{"pad_token_id": 0}, {"pad_token_id": 0, "tie_word_embeddings": True}],
    "gpt_oss": [EXPERTS, {**EXPERTS, "attention_bias": False}],
    "gemma3_text": [LAYERS, {**LAYERS, "tie_word_embeddings": False, "attention_bias": True}],
    "ernie4_5_moe": [
        {},
        {"num_nextn_predict_layers": 0, "use_bias": False},
        {"num_nextn_predict_layers": 1, "moe_layer_start_index": 0, "tie_word_embeddings": False},
        {"moe_num_shared_experts": 0, "moe_use_aux_free": False},
        {"moe_layer_interval": 2, "moe_num_shared_experts": 1},
        {"moe_layer_end_index": 1, "mlp_bias": True},
        {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_layer_end_index": 2, "lm_head_bias": True},
    ],
}
# Under tensor parallelism these models describe a tensor wrongly; each has a test below.
MISDESCRIBED = {"gpt_oss": "sinks", "gemma3_text": "lm_head.weight"}


def real(ranks: ForkServer, name: str, tp: int, dtype: str) -> list[list[ModelTensor]]:
    """The tensors of a family's real models, as their first rank describes them."""
    configs = [settings(BY_NAME[name], **changes) for changes in MODELS[name]]
    result = ranks.run("tests.families.jobs:describe_model", tp, {"models": configs, "tp": tp, "dtype": dtype})
    assert result.ok, result.logs[0].read_text()
    return [
        [
            ModelTensor(key, tuple(whole), kind, tuple(n // m for n, m in zip(whole, local, strict=True)))
            for key, (whole, local, kind) in model.items()
        ]
        for model in result.values[0]
    ]


@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "float32")])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_lists_the_tensors_of_a_real_model(ranks: ForkServer, name: str, tp: int, dtype: str) -> None:
    family = BY_NAME[name]
    for changes, model in zip(MODELS[name], real(ranks, name, tp, dtype), strict=True):
        config = settings(family, **changes)
        declared = {one.name: one.under(tp) for one in enumerate_tensors(family, model_of(config), dtype)}
        held = {one.name: one for one in model}
        for key in [key for key in held if tp > 1 and key.endswith(MISDESCRIBED.get(name, "\0"))]:
            del held[key], declared[key]
        assert declared == held
        rules = bind(family, model_of(config), held.values())
        prove(rules.mapping())
        prove(rules.mapping().reversed())


def test_gpt_oss_under_tensor_parallelism_is_refused_because_each_rank_calls_its_sinks_whole(
    ranks: ForkServer,
) -> None:
    # Saved like that, the sinks of one rank would stand for those of all.
    family = BY_NAME["gpt_oss"]
    model = real(ranks, "gpt_oss", 2, "float32")[0]
    sinks = next(one for one in model if one.name.endswith("sinks"))
    assert (sinks.shape, sinks.cuts) == ((4,), (1,))
    with pytest.raises(MappingError) as caught:
        bind(family, model_of(settings(family, **EXPERTS)), model)
    (line,) = caught.value.evidence
    assert line.startswith("model.layers.{0...1}.self_attn.sinks: is described as whole with shape [4], the")
    assert "gives length 8 on axis 0" in line


def test_a_tied_gemma3_under_tensor_parallelism_calls_its_whole_head_a_shard_and_is_bound_all_the_same(
    ranks: ForkServer,
) -> None:
    # The embedding is whole on every rank; the head that shares its memory says it is one of two halves.
    family = BY_NAME["gemma3_text"]
    model = real(ranks, "gemma3_text", 2, "float32")[0]
    head = next(one for one in model if one.name == "lm_head.weight")
    assert (head.shape, head.cuts) == ((128, 32), (2, 1))
    rules = bind(family, model_of(settings(family, **LAYERS)), model)
    prove(rules.mapping())
    assert rules.mapping().sources["model.embed_tokens.weight"].shape == (64, 32)
