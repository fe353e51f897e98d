"""AOA text of models, in both directions."""

from __future__ import annotations

import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import Family, ModelDescription, bind, enumerate_tensors, family_for
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.formats.aoa_statements import aoa_text
from paddleformers_fc.mapping import RuleSet

LLAMA = family_for({"model_type": "llama"})


def tiny(family: Family, tp: int, **changes: object) -> tuple[ModelDescription, RuleSet]:
    """A family's tiny configuration and its rules under a tensor-parallel degree, with the cuts."""
    described = tiny_models(family)[0]
    described = structs.replace(described, config={**described.config, **changes})
    tensors = [tensor.under(tp=tp) for tensor in enumerate_tensors(family, described)]
    return described, structs.replace(
        bind(family, described, tensors), cuts={tensor.name: tensor.cuts for tensor in tensors}
    )


def test_a_model_of_many_layers_has_as_many_statements_as_one_of_few() -> None:
    def count(layers: int) -> int:
        model, _ = tiny(LLAMA, 1, num_hidden_layers=layers)
        return len(aoa_text(LLAMA, model, [one.under() for one in enumerate_tensors(LLAMA, model)]))

    assert count(2) == count(9) == 7


def test_a_tied_head_is_written_to_keep_its_owners_memory() -> None:
    model = ModelDescription({**LLAMA.tiny, "tie_word_embeddings": True})
    tensors = [tensor.under() for tensor in enumerate_tensors(LLAMA, model)]
    if not any(tensor.name == "lm_head.weight" for tensor in tensors):
        tensors.append(structs.replace(next(one for one in tensors if "embed" in one.name), name="lm_head.weight"))
    assert "_ -> lm_head.weight" in aoa_text(LLAMA, model, tensors)
    assert "lm_head.weight -> _" in aoa_text(LLAMA, model, tensors, reverse=True)


def test_a_tensor_that_the_family_does_not_declare_is_an_error() -> None:
    model = ModelDescription(LLAMA.tiny)
    tensors = [tensor.under() for tensor in enumerate_tensors(LLAMA, model)]
    with pytest.raises(MappingError, match="no statement of family llama declares"):
        aoa_text(LLAMA, model, [*tensors, structs.replace(tensors[0], name="model.strange")])
