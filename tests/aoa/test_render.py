"""Text from mappings: compact where that is exact, read back as what it was written from, and read so by Paddle."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given, reject, strategies as st
from msgspec import structs

from paddleformers_fc.aoa import Hints, parse, render, rendering, with_ties
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Rule, RuleSet, Shape, TensorMapping, TensorSpec, prove
from paddleformers_fc.mapping.rules import Slab
from tests.aoa import stock
from tests.aoa.spaces import normal, side_of
from tests.harness.sampling import thorough
from tests.mapping.numbers import moved, numbered
from tests.mapping.strategies import rule_sets

logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.ERROR)


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def is_exact(mapping: TensorMapping, cuts: tuple[rendering.Cuts, rendering.Cuts], text: list[str]) -> bool:
    """Whether Paddle and we read the text as the mapping."""
    left, right = side_of(mapping.sources, cuts[0]), side_of(mapping.targets, cuts[1])
    assert normal(parse(text, left, right)) == normal(mapping)
    arrays = numbered(mapping)
    ours, theirs = moved(mapping, arrays), stock.moved(stock.plan(text, left, right), arrays, right)
    return all((ours[name] == theirs[name]).all() for name in ours)


def rendered(rules: RuleSet, hints: Hints | None = None, *, reverse: bool = False) -> list[str]:
    """The text, once it is known to be exact."""
    mapping, hints = with_ties(rules), hints or Hints()
    prove(mapping)
    text = render(rules, hints, reverse=reverse)
    cuts = (hints.left, rules.cuts)
    assert is_exact(*((mapping.reversed(), cuts[::-1]) if reverse else (mapping, cuts)), text)
    return text


def layers(count: int, rank: int = 2) -> RuleSet:
    rules = tuple(Rule((f"h.{i}.w",), (f"m.{i}.w",), (3,), 1, (1, 0)) for i in range(count))
    return RuleSet({f"m.{i}.w": spec(2, 3) for i in range(count)}, rules)


def test_equal_names_without_a_change_are_not_written() -> None:
    rule = Rule(("a",), ("a",), (3,), 1, (0, 1))
    assert rendered(RuleSet({"a": spec(2, 3)}, (rule,))) == []


def test_an_uneven_concat_is_one_statement_and_its_reverse_goes_by_equal_parts() -> None:
    rules = RuleSet({"m.0.c": spec(6, 3)}, (Rule(("h.0.a", "h.0.b"), ("m.0.c",), (2, 4), 0, (0, 1)),))
    assert rendered(rules) == ["h.$LAYER_ID.a, h.$LAYER_ID.b -> m.$LAYER_ID.c, axis=0"]
    assert rendered(rules, reverse=True) == [
        "m.$LAYER_ID.c -> m.$LAYER_ID.c[0:3], axis=0",
        "m.$LAYER_ID.c[0:1] -> h.$LAYER_ID.a",
        "m.$LAYER_ID.c[1:3] -> h.$LAYER_ID.b, axis=0",
    ]


def test_an_uneven_split_that_needs_too_many_equal_parts_is_refused() -> None:
    rules = RuleSet({"c": spec(10002, 1)}, (Rule(("a", "b"), ("c",), (4999, 5003), 0, (0, 1)),))
    assert len(render(rules)) == 1
    with pytest.raises(MappingError, match="has equal splits only, and this one has 10002 parts"):
        render(rules, reverse=True)


def test_gate_and_up_are_written_per_rank_where_shards_and_groups_are_equally_many() -> None:
    rule = Rule(("g", "u"), ("gu",), (4, 4), 1, (1, 0), target_blocks=2)
    two, four = (RuleSet({"gu": spec(3, 8)}, (rule,), cuts={"gu": (1, shards)}) for shards in (2, 4))
    assert rendered(two) == ["g^T, u^T -> gu, fused_ffn"]
    assert rendered(two, reverse=True) == ["gu^T -> gu", "gu -> g, u, fused_ffn, axis=0"]
    assert rendered(four) == [
        "g^T -> g[0:2], axis=1",
        "u^T -> u[0:2], axis=1",
        "g[0:1], u[0:1], g[1:2], u[1:2] -> gu, axis=1",
    ]


def test_names_that_a_statement_would_make_up_are_left_to_the_tensors_that_bear_them() -> None:
    rule = Rule(("q", "k", "v"), ("qkv",), (16, 8, 8), 1, (1, 0), target_blocks=2)
    other = Rule(("q1",), ("other",), (3,), 0, (0,))
    text = rendered(RuleSet({"qkv": spec(3, 32), "other": spec(3)}, (rule, other)))
    assert not any("fused_qkv" in line for line in text)


def test_a_rule_of_several_names_on_both_sides_is_refused() -> None:
    rule = Rule(("a", "b"), ("c", "d"), (2, 2), 0, (0, 1))
    with pytest.raises(MappingError, match="c: one rule has several names on both sides"):
        render(RuleSet({"c": spec(2, 3), "d": spec(2, 3)}, (rule,)))


def stacked(*lengths: int) -> RuleSet:
    """Gate and up of experts with these numbers of rows, in one tensor."""
    ends = [sum(lengths[: expert + 1]) for expert in range(len(lengths))]
    rules = tuple(
        Rule((f"e.{expert}.gate", f"e.{expert}.up"), ("stack",), (4, 5), 1, (1, 0), slab=Slab(0, end - length, end))
        for expert, (end, length) in enumerate(zip(ends, lengths, strict=True))
    )
    return RuleSet({"stack": spec(sum(lengths), 9)}, rules)


def test_experts_stacked_along_an_axis_that_they_have_are_joined_part_by_part() -> None:
    assert rendered(stacked(2, 2, 2)) == [
        "e.0.gate^T, e.1.gate^T, e.2.gate^T -> stack_0, axis=0",
        "e.0.up^T, e.1.up^T, e.2.up^T -> stack_1, axis=0",
        "stack_0, stack_1 -> stack, axis=1",
    ]
    assert rendered(stacked(2, 2, 2), reverse=True) == [
        "stack -> stack[0:9], axis=1",
        "stack[0:4] -> stack_0, axis=1",
        "stack[4:9] -> stack_1, axis=1",
        "stack_1^T -> e.0.up, e.1.up, e.2.up, axis=1",
        "stack_0^T -> e.0.gate, e.1.gate, e.2.gate, axis=1",
    ]
    assert len(rendered(stacked(2, 4))) == 3
    assert rendered(stacked(2, 4), reverse=True)


@pytest.mark.parametrize("name", ["a-b", "0.w", "axis", "_", "a$b"])
def test_names_that_the_language_does_not_express_are_refused(name: str) -> None:
    with pytest.raises(MappingError, match=r"cannot express this mapping|evaluate to a different mapping"):
        render(RuleSet({"t": spec(2)}, (Rule((name,), ("t",), (2,), 0, (0,)),)))


def test_all_that_cannot_be_expressed_is_in_one_report_with_indices_folded() -> None:
    rules = [Rule((f"h.{i}.e.0", f"h.{i}.e.1"), (f"m.{i}.x",), (1, 1), 0, (-1, 0)) for i in range(3)]
    rules.append(Rule(("a",), ("b",), (3,), 0, (0,), cast="bfloat16"))
    with pytest.raises(MappingError) as caught:
        render(RuleSet({**{f"m.{i}.x": spec(2, 3) for i in range(3)}, "b": spec(3, dtype="bfloat16")}, tuple(rules)))
    assert caught.value.evidence == (
        "m.{0...2}.x: the language adds an axis only in front of two, and removes none",
        "b: conversions of dtypes are not written",
    )


def test_names_that_change_places_are_refused() -> None:
    rules = (Rule(("a",), ("b",), (3,), 1, (1, 0)), Rule(("b",), ("a",), (2,), 1, (1, 0)))
    with pytest.raises(MappingError, match=r"names change places: a, b, a|names change places: b, a, b"):
        render(RuleSet({"a": spec(3, 2), "b": spec(2, 3)}, rules))


@pytest.mark.parametrize("wrong", [["h.$LAYER_ID.w -> m.$LAYER_ID.w"], [], ["h.$LAYER_ID.w^T -> m.$LAYER_ID.x"]])
def test_text_that_would_be_read_as_another_mapping_is_never_returned(
    monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    monkeypatch.setattr(rendering, "_in_order", lambda components, index: wrong)
    with pytest.raises(MappingError, match=r"evaluate to a different mapping|cannot express this mapping"):
        render(structs.replace(layers(2), targets={name: spec(3, 3) for name in layers(2).targets}))


@st.composite
def cases(draw: st.DrawFn) -> tuple[RuleSet, Hints]:
    """Random rules; tensors of the right side bear names of the left side or their own, and are cut or not."""
    rules = draw(rule_sets())
    mapping = rules.mapping()
    free = draw(st.permutations([*mapping.sources, *mapping.targets]))
    names = dict(zip(mapping.targets, free, strict=False))
    left: dict[str, Shape] = {}
    right: dict[str, Shape] = {}
    for rule in rules.rules:
        if draw(st.booleans()):
            left[rule.sources[0]] = cut(len(rule.axes), rule.axes[rule.axis], rule.source_blocks)
            right[names[rule.targets[0]]] = cut(len(rule.axes), rule.axis, rule.target_blocks)
    named = [structs.replace(rule, targets=tuple(map(names.__getitem__, rule.targets))) for rule in rules.rules]
    targets = {names[name]: one for name, one in rules.targets.items()}
    return RuleSet(targets, tuple(named), cuts=right), Hints(left=left)


def cut(rank: int, axis: int, count: int) -> Shape:
    return tuple(count if index == axis else 1 for index in range(rank))


@thorough(150)
@given(cases(), st.booleans())
def test_random_rules_are_written_and_read_as_such_by_paddle(case: tuple[RuleSet, Hints], reverse: bool) -> None:
    rules, hints = case
    try:
        rendered(rules, hints, reverse=reverse)
    except MappingError as error:
        if not re.search("names change places|several names on both sides", str(error)):
            raise
        reject()
