"""Statements of adapters: derived for every family, proved, and equal to adapters of the canonical layers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from paddleformers_fc.errors import FormatError
from paddleformers_fc.families import Family, ModelDescription, ModelTensor, bind, enumerate_tensors
from paddleformers_fc.families.changes import config_changes, of_adapters
from paddleformers_fc.families.description import A, Adapters, B, Base, is_adapter, with_adapters
from paddleformers_fc.families.names import Names
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.families.stated import decode_mapping, encode_mapping
from paddleformers_fc.mapping import RuleSet, prove
from tests.families.spaces import BY_NAME
from tests.mapping.numbers import Arrays, moved

ADAPTERS = Adapters(r=4, alpha=8.0)
MODELS = [(family, model) for family in BY_NAME.values() for model in tiny_models(family)]


def tensors_of(family: Family, model: ModelDescription, tp: int) -> list[ModelTensor]:
    """Every tensor of a model whose linear layers all have adapters."""
    return [one.under(tp=tp) for one in enumerate_tensors(with_adapters(family, ADAPTERS), model)]


def canonical(family: Family, model: ModelDescription, tensors: list[ModelTensor], held: Arrays) -> Arrays:
    """The canonical tensors of the values of a model's tensors."""
    return moved(bind(family, model, tensors).mapping().reversed(), held)


def test_an_adapter_is_cut_where_its_layer_is() -> None:
    family = BY_NAME["llama"]
    cuts = {one.name.partition("self_attn.")[2]: one.cuts for one in tensors_of(family, tiny_models(family)[0], tp=2)}
    assert (cuts["o_proj.lora_A"], cuts["o_proj.lora_B"]) == ((2, 1), (1, 1))
    assert (cuts["q_proj.lora_A"], cuts["q_proj.lora_B"]) == ((1, 1), (1, 2))


@pytest.mark.parametrize(("family", "model"), MODELS, ids=lambda one: getattr(one, "name", ""))
def test_adapters_of_every_family_are_proved_and_their_product_is_that_of_their_canonical_parts(
    family: Family, model: ModelDescription
) -> None:
    """``lora_A @ lora_B`` as a weight of the model, taken apart, is ``lora_B @ lora_A`` of each canonical layer."""
    adapted = structs.replace(model, adapters=ADAPTERS)
    for tp in (1, 2, 4):
        tensors = tensors_of(family, model, tp)
        random = np.random.RandomState(5)
        held = {one.name: random.standard_normal(one.shape) for one in tensors if is_adapter(one.name)}
        assert len(held) > 8
        rules = bind(family, adapted, [one for one in tensors if one.name in held])
        prove(rules.mapping(), "Adapters")
        prove(rules.mapping().reversed(), "The reverse")
        modules = [name.removesuffix(f".{A}") for name in held if name.endswith(A)]
        products = {f"{module}.weight": held[f"{module}.{A}"] @ held[f"{module}.{B}"] for module in modules}
        weights = canonical(family, model, [one for one in tensors if one.name in products], products)
        parts = canonical(family, adapted, [one for one in tensors if one.name in held], held)
        assert compared(rules, parts, weights) == weights.keys()


def compared(rules: RuleSet, parts: Arrays, weights: Arrays) -> set[str]:
    """The names of the weights that are the products of the adapters of their layers."""
    a_of = {target: rule.sources[0] for rule in rules.rules for target in rule.targets}
    found = set()
    for rule in rules.rules:
        (target,) = rule.targets
        if target.endswith(f".{B}"):
            a = parts[a_of[target.removesuffix(B) + A]]
            for source in rule.sources:
                layer = source.removesuffix(f".{B}.weight")
                weight = layer if layer in weights else f"{layer}.weight"  # Some files name a layer for its weight.
                np.testing.assert_allclose(parts[source] @ a, weights[weight], atol=1e-12)
                found.add(weight)
    return found


def test_a_fused_layer_has_one_input_side_and_an_output_side_per_part() -> None:
    family, scope = BY_NAME["ernie4_5"], "model.layers.0.self_attn."
    model = tiny_models(family)[0]
    tensors = [one for one in tensors_of(family, model, 1) if one.name.startswith(f"{scope}qkv_proj.lora_")]
    rules = bind(family, structs.replace(model, adapters=ADAPTERS), tensors).rules
    assert {rule.targets[0]: rule.sources for rule in rules} == {
        f"{scope}qkv_proj.lora_A": (f"{scope}qkv_proj.lora_A.weight",),
        f"{scope}qkv_proj.lora_B": tuple(f"{scope}{part}_proj.lora_B.weight" for part in "qkv"),
    }


def test_tensors_that_training_changes_without_an_optimizer_are_known() -> None:
    family = BY_NAME["ernie4_5_moe"]
    names = ["model.layers.1.mlp.moe_statics.e_score_correction_bias", "model.layers.1.mlp.gate.weight"]
    index = Names(family, tiny_models(family)[0])
    assert list(map(index.trained, names)) == [False, True]


def test_a_mapping_contains_the_adapters_and_only_then_the_key() -> None:
    family = BY_NAME["llama"]
    model, base = tiny_models(family)[0], Base("/models/base", {"model.safetensors": "0" * 32})
    adapters = msgspec.structs.replace(ADAPTERS, target_modules=(".*q_proj",), base=base)
    plain, adapted = (structs.replace(model, adapters=one) for one in (None, adapters))
    tensors = [one for one in tensors_of(family, model, 2) if is_adapter(one.name)]
    rules = bind(family, adapted, tensors)
    assert decode_mapping(encode_mapping(adapted, rules), "here") == (adapted, rules)
    assert b"adapters" not in encode_mapping(plain, bind(family, plain, []))
    hostile = encode_mapping(adapted, rules).replace(b'"r": 4', b'"r": 0')
    with pytest.raises(FormatError, match="Invalid mapping"):
        decode_mapping(hostile, "here")


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"r": 8}, "lora.r"),
        ({"alpha": 16.0}, "lora.alpha"),
        ({"rslora": True}, "lora.rslora"),
        ({"target_modules": (".*k_proj",)}, "lora.target_modules"),
        ({"base": Base("/b", {"model.safetensors": "1"})}, "lora.base.model.safetensors"),
        ({"base": Base("/b", {"output_version.dtype": "1"})}, "lora.base.output_version.dtype"),
    ],
)
def test_other_adapters_are_a_change_that_is_refused(changed: dict[str, Any], key: str) -> None:
    model = ModelDescription({"model_type": "llama"}, adapters=msgspec.structs.replace(ADAPTERS, base=Base("/b")))
    other = structs.replace(model, adapters=msgspec.structs.replace(model.adapters, **changed))
    (found,) = of_adapters(config_changes(model, other, complete=True))
    assert (found.key, bool(found.because)) == (key, True)
    assert any(
        one.because for one in of_adapters(config_changes(structs.replace(model, adapters=None), model, complete=False))
    )


def test_a_moved_base_and_another_dropout_are_reported_only() -> None:
    model = ModelDescription({}, adapters=msgspec.structs.replace(ADAPTERS, base=Base("/here", {"a": "1"})))
    moved = msgspec.structs.replace(ADAPTERS, base=Base("/there", {"a": "1"}), dropout=0.1)
    found = of_adapters(config_changes(model, structs.replace(model, adapters=moved), complete=True))
    assert [(one.key, one.because) for one in found] == [("lora.dropout", ""), ("lora.location", "")]
