"""Families: declarations become rules of real tensors, proved, with AOA text."""

from __future__ import annotations

import pytest

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelDescription, ModelTensor, bind, family_for
from paddleformers_fc.mapping import Tie

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}


def tensor(name: str, *shape: int, cuts: tuple[int, ...] | None = None) -> ModelTensor:
    return ModelTensor(name, shape, "float32", cuts or (1,) * len(shape))


def model(model_type: str, **changes: object) -> ModelDescription:
    return ModelDescription(config(model_type, **changes))


def config(model_type: str, **changes: object) -> dict[str, object]:
    return {**CONFIG, "model_type": model_type, **changes}


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
