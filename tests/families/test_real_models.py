"""The tensors that a family declares for a configuration, against real models of PaddleFormers on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelTensor, bind, enumerate_tensors
from paddleformers_fc.mapping import RuleSet, prove
from tests.families.jobs import CONFIGS, stem_of
from tests.families.spaces import BY_NAME, model_of, settings
from tests.harness.on_ranks import on_ranks

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
# Under tensor parallelism these models describe a tensor wrongly; the test shows what happens to it.
MISDESCRIBED = {"gpt_oss": "sinks", "gemma3_text": "lm_head.weight"}


def real(name: str, changes: dict[str, Any], tp: int = 1) -> dict[str, ModelTensor]:
    """The tensors of a real model, as this rank describes them."""
    more = {"fuse_rms_norm": False, "sequence_parallel": False, "use_flash_attention": False}
    values = {**more, "tensor_model_parallel_size": tp, **settings(BY_NAME[name], **changes)}
    del values["model_type"]
    if name == "ernie4_5_moe":
        values["moe_group"] = "dummy"
    package = f"paddleformers.transformers.{name}"
    config = getattr(importlib.import_module(f"{package}.configuration"), CONFIGS[name])(**values)
    kind = getattr(importlib.import_module(f"{package}.modeling"), f"{stem_of(name)}ForCausalLM")
    found = {}
    for key, shard in kind(config).sharded_state_dict().items():
        shape = tuple(shard.global_shape)
        cuts = tuple(n // m for n, m in zip(shape, shard.local_shape, strict=True))
        found[key] = ModelTensor(key, shape, str(shard.local_tensor.dtype).split(".")[-1], cuts)
    return found


def bound(name: str, changes: dict[str, Any], held: dict[str, ModelTensor]) -> RuleSet:
    """The proved rules of the tensors of a model."""
    rules = bind(BY_NAME[name], model_of(settings(BY_NAME[name], **changes)), held.values())
    prove(rules.mapping())
    prove(rules.mapping().reversed())
    return rules


def declared(name: str, changes: dict[str, Any], tp: int, dtype: str) -> dict[str, ModelTensor]:
    model = model_of(settings(BY_NAME[name], **changes))
    return {one.name: one.under(tp) for one in enumerate_tensors(BY_NAME[name], model, dtype)}


@on_ranks(1)
def test_a_family_lists_the_tensors_of_a_real_model() -> None:
    import paddle

    for dtype in ("float32", "bfloat16"):
        paddle.set_default_dtype(dtype)
        for name, changes in ((name, one) for name, changed in MODELS.items() for one in changed):
            held = real(name, changes)
            assert declared(name, changes, 1, dtype) == held, (name, changes)
            bound(name, changes, held)


@on_ranks(2)
def test_a_family_lists_the_tensors_of_a_real_model_under_tensor_parallelism() -> None:
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1, "sharding_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    for name, changes in ((name, one) for name, changed in MODELS.items() for one in changed):
        held, expected = real(name, changes, 2), declared(name, changes, 2, "float32")
        for key in [key for key in held if key.endswith(MISDESCRIBED.get(name, "\0"))]:
            del held[key], expected[key]
        assert expected == held, (name, changes)
        bound(name, changes, held)
    # Saved like that, the sinks of one rank of GPT-OSS would stand for those of all.
    gpt_oss = real("gpt_oss", EXPERTS, 2)
    sinks = next(one for name, one in gpt_oss.items() if name.endswith("sinks"))
    assert (sinks.shape, sinks.cuts) == ((4,), (1,))
    with pytest.raises(MappingError) as caught:
        bound("gpt_oss", EXPERTS, gpt_oss)
    (line,) = caught.value.evidence
    assert line.startswith("model.layers.{0...1}.self_attn.sinks: is described as unsharded with shape [4], the")
    assert "gives length 8 on axis 0" in line
    # The embedding of Gemma 3 is whole on every rank; the head that shares its memory says it is one of two halves.
    gemma = real("gemma3_text", LAYERS, 2)
    assert (gemma["lm_head.weight"].shape, gemma["lm_head.weight"].cuts) == ((128, 32), (2, 1))
    assert bound("gemma3_text", LAYERS, gemma).mapping().sources["model.embed_tokens.weight"].shape == (64, 32)
