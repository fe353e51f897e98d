"""Every family against Paddle's own AOAEngine: the same text, the same slices, the same numbers."""

from __future__ import annotations

import pytest

from paddleformers_fc.aoa import Hints, parse, render
from paddleformers_fc.errors import OptionError
from paddleformers_fc.formats.aoa_statements import aoa_statements, aoa_text
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, prove
from tests.aoa import stock
from tests.aoa.spaces import DEGREES, NAMES, Model, model, normal, side_of
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
    statements = render(rules_between(before, after, mapping), hints_between(before, after))
    agree(statements, mapping, side_of(mapping.sources, before.cuts), side_of(mapping.targets, after.cuts))


def rules_between(before: Model, after: Model, mapping: TensorMapping) -> RuleSet:
    """The rules of the composition: fused tensors interleave their parts in other groups, and all others are equal."""
    rules: dict[str, Rule] = {}
    for one, other in zip(before.rules.rules, after.rules.rules, strict=True):
        groups = (one.target_blocks, other.target_blocks)
        if groups[0] != groups[1]:
            (name,) = other.targets
            rules[name] = Rule((name,), (name,), other.parts, other.axis, tuple(range(len(other.axes))), *groups)
            continue
        for name in other.targets:
            shape = mapping.targets[name].shape
            rules[name] = Rule((name,), (name,), shape[:1], 0, tuple(range(len(shape))))
    fresh, dropped = tuple(mapping.fresh), tuple(mapping.dropped)
    return RuleSet(mapping.targets, tuple(rules.values()), fresh=fresh, dropped=dropped, cuts=after.cuts)


def hints_between(before: Model, after: Model) -> Hints:
    """Shards of the first model, and the heads that distinguish query and key."""
    heads, groups = after.described.config.get("num_attention_heads"), after.described.config.get("num_key_value_heads")
    known = isinstance(heads, int) and isinstance(groups, int)
    return Hints(heads=(heads, groups) if known else None, left=before.cuts)  # type: ignore[arg-type]


PER_RANK = ("qwen3_5", "qwen3_5_moe")
"""Each rank holds several parts of one file side by side, which AOA cannot state without their number."""


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_printed_text_holds_on_any_number_of_ranks_or_needs_their_number(name: str, reverse: bool) -> None:
    models = {degree: model(name, degree) for degree in DEGREES}
    texts = {
        degree: aoa_text(one.family, one.described, one.tensors, reverse=reverse) for degree, one in models.items()
    }
    for degree in DEGREES:
        assert aoa_statements(name, reverse=reverse, toy=True, tp=degree).aoa_statements == texts[degree]
    if name not in PER_RANK:
        assert texts[1] == texts[2] == texts[4] == aoa_statements(name, reverse=reverse, toy=True).aoa_statements
        return
    with pytest.raises(OptionError, match="depend on the degree of tensor parallelism") as caught:
        aoa_statements(name, reverse=reverse, toy=True)
    assert "--tp 2" in caught.value.next_step
    # Paddle reads the text of one rank as another mapping of two.
    two = models[2]
    left, right = side_of(two.mapping.sources), side_of(two.mapping.targets, two.cuts)
    sides, wanted = ((right, left), two.mapping.reversed()) if reverse else ((left, right), two.mapping)
    assert stock.correspondences(stock.plan(texts[1], *sides)) != normal(wanted)


def test_the_text_of_llama_is_what_a_person_writes() -> None:
    layer = "model.layers.$LAYER_ID"
    linear = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    expected = {f"{layer}.{name}_proj.weight^T -> {layer}.{name}_proj.weight" for name in linear}
    for reverse in (False, True):
        assert set(aoa_statements("llama", reverse=reverse, toy=True).aoa_statements) == expected
