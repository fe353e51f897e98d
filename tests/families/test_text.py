"""AOA text of models: what the manifest carries, and what the language cannot say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import FAMILIES, Family, bind, enumerate_tensors, family_for
from paddleformers_fc.families.text import aoa_text, aoa_texts, tiny_aoa_text, with_ties
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.aoa import AoaTensor, normal, parse, uncut

LLAMA = family_for({"model_type": "llama"})


def tiny(family: Family, tp: int, **changes: object) -> tuple[dict[str, object], RuleSet]:
    """A family's tiny configuration and its rules under a tensor-parallel degree, with the cuts."""
    config = {**family.defaults, **family.tiny, **changes}
    tensors = [tensor.under(tp=tp) for tensor in enumerate_tensors(family, config)]
    return config, replace(bind(family, config, tensors), cuts={tensor.name: tensor.cuts for tensor in tensors})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_texts_of_the_manifest_are_read_back_as_the_mapping(family: Family) -> None:
    config, rules = tiny(family, tp=2)
    texts = aoa_texts(family, config, rules)
    mapping = with_ties(rules)
    canonical = {name: uncut(spec.shape, spec.dtype) for name, spec in mapping.sources.items()}
    model = {
        name: AoaTensor(spec.shape, spec.dtype, rules.cuts.get(name, (1,) * len(spec.shape)))
        for name, spec in mapping.targets.items()
    }
    assert normal(parse(texts["forward"], canonical, model)) == normal(mapping)
    assert normal(parse(texts["reverse"], model, canonical)) == normal(mapping.reversed())
    assert texts == {
        "forward": tiny_aoa_text(family, tp=2),
        "reverse": tiny_aoa_text(family, tp=2, reverse=True),
    }


def test_a_model_of_many_layers_has_as_many_statements_as_one_of_few() -> None:
    def count(layers: int) -> int:
        config, rules = tiny(LLAMA, 1, num_hidden_layers=layers)
        return len(aoa_texts(LLAMA, config, rules)["forward"])

    assert count(2) == count(9) == 7


def test_a_tied_head_is_said_to_keep_its_owners_memory() -> None:
    config = {**LLAMA.tiny, "tie_word_embeddings": True}
    tensors = [tensor.under() for tensor in enumerate_tensors(LLAMA, config)]
    if not any(tensor.name == "lm_head.weight" for tensor in tensors):
        tensors.append(structs.replace(next(one for one in tensors if "embed" in one.name), name="lm_head.weight"))
    assert "_ -> lm_head.weight" in aoa_text(LLAMA, config, tensors)
    assert "lm_head.weight -> _" in aoa_text(LLAMA, config, tensors, reverse=True)


def test_a_direction_that_the_language_cannot_say_is_empty_in_the_manifest_and_an_error_elsewhere() -> None:
    config, rules = tiny(LLAMA, tp=1)
    rule = rules.rules[0]
    strange = replace(
        rules,
        rules=(structs.replace(rule, sources=tuple(f"{name}-old" for name in rule.sources)), *rules.rules[1:]),
    )
    assert aoa_texts(LLAMA, config, strange) == {"forward": [], "reverse": []}
    assert aoa_texts(LLAMA, config, rules)["forward"]


def test_a_tensor_that_the_family_does_not_declare_is_an_error() -> None:
    config = dict(LLAMA.tiny)
    tensors = [tensor.under() for tensor in enumerate_tensors(LLAMA, config)]
    with pytest.raises(MappingError, match="no statement of family llama declares"):
        aoa_text(LLAMA, config, [*tensors, structs.replace(tensors[0], name="model.strange")])
