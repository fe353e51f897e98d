"""Every family against Paddle's own AOAEngine: the same text, the same slices, the same numbers."""

from __future__ import annotations

import pytest

from paddleformers_fc.aoa import Hints, normal, parse, render
from paddleformers_fc.families.aoa_text import aoa_text, tiny_aoa_text
from paddleformers_fc.mapping import TensorMapping, prove
from tests.aoa import stock
from tests.aoa.spaces import DEGREES, NAMES, Model, model, side_of
from tests.mapping.numbers import moved, numbered


def agree(statements: list[str], mapping: TensorMapping, left: stock.Tensors, right: stock.Tensors) -> None:
    """Paddle's slices, our reading of the text, and the mapping are one; and they move the same numbers."""
    entries = stock.plan(statements, left, right)
    assert stock.correspondences(entries) == normal(mapping)
    assert normal(parse(statements, left, right)) == normal(mapping)
    arrays = numbered(mapping)
    ours, theirs = moved(mapping, arrays), stock.moved(entries, arrays, right)
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert all((ours[name] >= 0).all() for name in ours if name not in mapping.fresh)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", NAMES)
def test_paddle_reads_the_text_of_a_family_as_the_family_means_it(name: str, degree: int) -> None:
    one = model(name, degree)
    prove(one.mapping)
    agree(
        aoa_text(one.family, one.described, one.tensors),
        one.mapping,
        side_of(one.mapping.sources),
        side_of(one.mapping.targets, one.cuts),
    )


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", NAMES)
def test_paddle_reads_the_reversed_text_of_a_family_as_the_reverse(name: str, degree: int) -> None:
    one = model(name, degree)
    agree(
        aoa_text(one.family, one.described, one.tensors, reverse=True),
        one.mapping.reversed(),
        side_of(one.mapping.targets, one.cuts),
        side_of(one.mapping.sources),
    )


@pytest.mark.parametrize("target", DEGREES)
@pytest.mark.parametrize("source", DEGREES)
@pytest.mark.parametrize("name", NAMES)
def test_paddle_reads_the_text_from_one_degree_to_another_as_the_composition(
    name: str, source: int, target: int
) -> None:
    before, after = model(name, source), model(name, target)
    mapping = before.mapping.reversed().then(after.mapping)
    statements = render(mapping, hints_between(before, after))
    agree(statements, mapping, side_of(mapping.sources, before.cuts), side_of(mapping.targets, after.cuts))


def hints_between(before: Model, after: Model) -> Hints:
    """Shards of both models, and the heads that distinguish query and key."""
    heads, groups = after.described.config.get("num_attention_heads"), after.described.config.get("num_key_value_heads")
    known = isinstance(heads, int) and isinstance(groups, int)
    return Hints(before.cuts, after.cuts, heads=(heads, groups) if known else None)  # type: ignore[arg-type]


PER_RANK = ("qwen3_5", "qwen3_5_moe")
"""Each rank holds several parts of one file side by side, which AOA cannot state without their number."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PER_RANK])
def test_the_text_of_a_family_is_the_same_on_any_number_of_ranks(name: str) -> None:
    one, *others = (model(name, degree) for degree in DEGREES)
    for reverse in (False, True):
        text = aoa_text(one.family, one.described, one.tensors, reverse=reverse)
        assert text
        for other in others:
            assert aoa_text(other.family, other.described, other.tensors, reverse=reverse) == text


def test_the_text_of_llama_is_what_a_person_writes() -> None:
    layer = "model.layers.$LAYER_ID"
    linear = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    expected = {f"{layer}.{name}_proj.weight^T -> {layer}.{name}_proj.weight" for name in linear}
    for reverse in (False, True):
        assert set(tiny_aoa_text(model("llama", 1).family, reverse=reverse)) == expected
