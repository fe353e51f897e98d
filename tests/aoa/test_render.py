"""Text from mappings: compact where that is exact, read back as what it was written from, and read so by Paddle."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from paddleformers_fc.aoa import Hints, normal, parse, render, rendering
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Box, Correspondence, Rule, RuleSet, Shape, TensorMapping, TensorSpec, prove
from paddleformers_fc.mapping.rules import Slab
from tests.aoa import stock
from tests.aoa.spaces import side_of
from tests.harness.sampling import thorough
from tests.mapping.numbers import moved, numbered
from tests.mapping.strategies import rule_sets

logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.ERROR)


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def is_exact(mapping: TensorMapping, hints: Hints, text: list[str]) -> bool:
    """Whether Paddle and we read the text as the mapping."""
    left, right = side_of(mapping.sources, dict(hints.left)), side_of(mapping.targets, dict(hints.right))
    assert normal(parse(text, left, right)) == normal(mapping)
    arrays = numbered(mapping)
    ours, theirs = moved(mapping, arrays), stock.moved(stock.plan(text, left, right), arrays, right)
    return all((ours[name] == theirs[name]).all() for name in ours)


def rendered(mapping: TensorMapping, hints: Hints | None = None, *, reverse: bool = False) -> list[str]:
    """The text, once it is known to be exact."""
    prove(mapping)
    hints = hints or Hints()
    text = render(mapping, hints, reverse=reverse)
    turned = replace(hints, left=hints.right, right=hints.left) if reverse else hints
    assert is_exact(mapping.reversed() if reverse else mapping, turned, text)
    return text


def layers(count: int, rank: int = 2) -> TensorMapping:
    rules = tuple(Rule((f"h.{i}.w",), (f"m.{i}.w",), (3,), 1, (1, 0)) for i in range(count))
    return RuleSet({f"m.{i}.w": spec(2, 3) for i in range(count)}, rules).mapping()


def test_layers_become_one_statement() -> None:
    assert rendered(layers(3)) == ["h.$LAYER_ID.w^T -> m.$LAYER_ID.w"]
    assert rendered(layers(3), reverse=True) == ["m.$LAYER_ID.w^T -> h.$LAYER_ID.w"]


def test_layers_of_two_kinds_under_one_name_are_spelled_out() -> None:
    mapping = layers(3)
    odd = RuleSet({"n.3.w": spec(2, 3)}, (Rule(("h.3.w",), ("n.3.w",), (3,), 1, (1, 0)),)).mapping()
    both = TensorMapping.of(
        mapping.sources | odd.sources, mapping.targets | odd.targets, mapping.correspondences + odd.correspondences
    )
    assert len(rendered(both)) == 4


def test_experts_of_layers_of_two_kinds_are_compact_layer_by_layer() -> None:
    names = [f"{{}}.{layer}.experts.{expert}.w" for layer in range(2) for expert in range(3)]
    rules = tuple(Rule((name.format("h"),), (name.format("mn"[name[3] == "1"]),), (3,), 1, (1, 0)) for name in names)
    mapping = RuleSet({rule.targets[0]: spec(2, 3) for rule in rules}, rules).mapping()
    assert rendered(mapping) == [
        "h.0.experts.$EXPERT_ID.w^T -> m.0.experts.$EXPERT_ID.w",
        "h.1.experts.$EXPERT_ID.w^T -> n.1.experts.$EXPERT_ID.w",
    ]


def test_layers_with_unequal_numbers_of_experts_are_compact_layer_by_layer() -> None:
    names = [f"{{}}.{layer}.experts.{expert}.w" for layer in range(2) for expert in range(2 + layer)]
    rules = tuple(Rule((name.format("h"),), (name.format("m"),), (3,), 1, (1, 0)) for name in names)
    mapping = RuleSet({rule.targets[0]: spec(2, 3) for rule in rules}, rules).mapping()
    assert rendered(mapping) == [
        "h.0.experts.$EXPERT_ID.w^T -> m.0.experts.$EXPERT_ID.w",
        "h.1.experts.$EXPERT_ID.w^T -> m.1.experts.$EXPERT_ID.w",
    ]


def test_equal_names_without_a_change_are_not_written() -> None:
    rule = Rule(("a",), ("a",), (3,), 1, (0, 1))
    assert rendered(RuleSet({"a": spec(2, 3)}, (rule,)).mapping()) == []


def test_uninitialised_and_dropped_tensors_are_written_in_both_directions() -> None:
    mapping = replace(
        layers(1),
        sources={**layers(1).sources, "old": spec(1)},
        targets={**layers(1).targets, "new": spec(1)},
        dropped=frozenset({"old"}),
        fresh=frozenset({"new"}),
    )
    assert rendered(mapping)[:2] == ["old -> _", "_ -> new"]
    assert rendered(mapping, reverse=True)[:2] == ["new -> _", "_ -> old"]


def test_an_uneven_concat_is_one_statement_and_its_reverse_goes_by_equal_parts() -> None:
    rule = Rule(("h.0.a", "h.0.b"), ("m.0.c",), (2, 4), 0, (0, 1))
    mapping = RuleSet({"m.0.c": spec(6, 3)}, (rule,)).mapping()
    assert rendered(mapping) == ["h.$LAYER_ID.a, h.$LAYER_ID.b -> m.$LAYER_ID.c, axis=0"]
    assert rendered(mapping, reverse=True) == [
        "m.$LAYER_ID.c -> m.$LAYER_ID.c[0:3], axis=0",
        "m.$LAYER_ID.c[0:1] -> h.$LAYER_ID.a",
        "m.$LAYER_ID.c[1:3] -> h.$LAYER_ID.b, axis=0",
    ]


def test_an_uneven_split_that_needs_too_many_equal_parts_is_refused() -> None:
    rule = Rule(("a", "b"), ("c",), (4999, 5003), 0, (0, 1))
    mapping = RuleSet({"c": spec(10002, 1)}, (rule,)).mapping()
    assert len(render(mapping)) == 1
    with pytest.raises(MappingError, match="has equal splits only, and this one has 10002 parts"):
        render(mapping, reverse=True)


def test_gate_and_up_are_written_per_rank_where_shards_and_groups_are_equally_many() -> None:
    rule = Rule(("g", "u"), ("gu",), (4, 4), 1, (1, 0), target_blocks=2)
    mapping = RuleSet({"gu": spec(3, 8)}, (rule,)).mapping()
    assert rendered(mapping, Hints(right={"gu": (1, 2)})) == ["g^T, u^T -> gu, fused_ffn"]
    assert rendered(mapping, Hints(right={"gu": (1, 2)}), reverse=True) == [
        "gu^T -> gu",
        "gu -> g, u, fused_ffn, axis=0",
    ]
    assert rendered(mapping, Hints(right={"gu": (1, 4)})) == [
        "g^T -> g[0:2], axis=1",
        "u^T -> u[0:2], axis=1",
        "g[0:1], u[0:1], g[1:2], u[1:2] -> gu, axis=1",
    ]


def test_a_join_that_does_not_follow_the_shards_is_not_written_per_rank() -> None:
    rule = Rule(("k", "v"), ("kv",), (4, 4), 1, (1, 0))
    mapping = RuleSet({"kv": spec(4, 8)}, (rule,)).mapping()
    assert rendered(mapping, Hints(right={"kv": (1, 2)})) == ["k^T, v^T -> kv, axis=1"]
    assert rendered(mapping, Hints(right={"kv": (2, 1)}, per_rank={"kv": "fused_ffn"})) == ["k^T, v^T -> kv, axis=1"]


def test_query_key_and_value_are_written_per_kv_head() -> None:
    rule = Rule(("q", "k", "v"), ("qkv",), (16, 8, 8), 1, (1, 0), target_blocks=2)
    mapping = RuleSet({"qkv": spec(3, 32)}, (rule,)).mapping()
    text = ["q^T, k^T, v^T -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2"]
    assert rendered(mapping, Hints(right={"qkv": (1, 2)})) == text
    assert rendered(mapping, reverse=True) == [
        "qkv^T -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0"
    ]


def test_names_that_a_statement_would_make_up_are_left_to_the_tensors_that_bear_them() -> None:
    rule = Rule(("q", "k", "v"), ("qkv",), (16, 8, 8), 1, (1, 0), target_blocks=2)
    other = Rule(("q1",), ("other",), (3,), 0, (0,))
    mapping = RuleSet({"qkv": spec(3, 32), "other": spec(3)}, (rule, other)).mapping()
    text = rendered(mapping)
    assert not any("fused_qkv" in line for line in text)
    taken = RuleSet({"qkv": spec(3, 32), "q_1": spec(3)}, (rule, structs.replace(other, targets=("q_1",)))).mapping()
    with pytest.raises(MappingError, match="its parts would have the names q_0 and so on, and such tensors exist"):
        render(taken)


def test_a_tensor_whose_parts_are_read_in_two_orders_of_axes_cannot_be_expressed() -> None:
    items = (
        Correspondence("a", Box((0, 0), (2, 2)), "b", Box((0, 0), (2, 2)), (0, 1)),
        Correspondence("a", Box((2, 0), (4, 2)), "c", Box((0, 0), (2, 2)), (1, 0)),
    )
    mapping = TensorMapping.of({"a": spec(4, 2)}, {"b": spec(2, 2), "c": spec(2, 2)}, items)
    prove(mapping)
    with pytest.raises(MappingError, match="a is read in two orders of its axes"):
        render(mapping)


def test_a_stack_of_unequal_slabs_cannot_be_taken_apart() -> None:
    rules = tuple(
        Rule((f"e{e}.gate", f"e{e}.up"), ("stack",), (4, 5), 1, (1, 0), slab=Slab(0, start, stop))
        for e, (start, stop) in enumerate([(0, 2), (2, 6)])
    )
    mapping = RuleSet({"stack": spec(6, 9)}, rules).mapping()
    assert len(rendered(mapping)) == 3
    with pytest.raises(
        MappingError, match="stack: the language has equal splits only, and its slabs have several lengths"
    ):
        render(mapping, reverse=True)


def test_another_number_of_ranks_is_one_statement_per_fused_tensor() -> None:
    def rules(degree: int) -> TensorMapping:
        ffn = Rule(("g", "u"), ("gu",), (8, 8), 1, (1, 0), target_blocks=degree)
        qkv = Rule(("q", "k", "v"), ("qkv",), (16, 8, 8), 1, (1, 0), target_blocks=degree)
        return RuleSet({"gu": spec(3, 16), "qkv": spec(3, 32)}, (ffn, qkv)).mapping()

    def cuts(degree: int) -> dict[str, tuple[int, ...]]:
        return {"gu": (1, degree), "qkv": (1, degree)}

    mapping = rules(4).reversed().then(rules(2))
    assert rendered(mapping, Hints(cuts(4), cuts(2), heads=(8, 4))) == [
        "gu -> gu, fused_ffn",
        "qkv -> qkv, fused_qkv_old, num_heads=8, num_key_value_groups=4",
    ]


def test_experts_stacked_along_an_axis_that_they_have_are_joined_slab_by_slab() -> None:
    rules = tuple(
        Rule((f"{e}.gate", f"{e}.up"), ("stack",), (4, 4), 1, (1, 0), slab=Slab(0, 2 * e, 2 * e + 2)) for e in range(3)
    )
    named = [structs.replace(rule, sources=tuple(f"e.{name}" for name in rule.sources)) for rule in rules]
    mapping = RuleSet({"stack": spec(6, 8)}, tuple(named)).mapping()
    assert rendered(mapping) == [
        *(f"e.{e}.gate^T, e.{e}.up^T -> stack_{e}, axis=1" for e in range(3)),
        "stack[0:3] -> stack, axis=0",
    ]
    assert rendered(mapping, reverse=True)[0].startswith("stack^T -> stack[0:")


def test_experts_stacked_on_an_axis_of_their_own_cannot_be_expressed() -> None:
    rule = Rule(("e.0", "e.1"), ("stack",), (1, 1), 0, (-1, 0, 1))
    mapping = RuleSet({"stack": spec(2, 3, 4)}, (rule,)).mapping()
    for reverse in (False, True):
        with pytest.raises(MappingError, match="the language neither adds nor removes an axis"):
            render(mapping, reverse=reverse)


@pytest.mark.parametrize("name", ["a-b", "0.w", "axis", "_", "a$b"])
def test_names_that_the_language_does_not_express_are_refused(name: str) -> None:
    mapping = RuleSet({"t": spec(2)}, (Rule((name,), ("t",), (2,), 0, (0,)),)).mapping()
    with pytest.raises(MappingError, match=r"names consist of letters|is a keyword of the language"):
        render(mapping)


def test_all_that_cannot_be_expressed_is_in_one_report_with_indices_folded() -> None:
    rules = tuple(Rule((f"h.{i}.a-b",), (f"m.{i}.x",), (2,), 0, (0,)) for i in range(3))
    rules += (Rule(("e.0", "e.1"), ("stack",), (1, 1), 0, (-1, 0)),)
    specs = {f"m.{i}.x": spec(2) for i in range(3)} | {"stack": spec(2, 3)}
    with pytest.raises(MappingError) as caught:
        render(RuleSet(specs, rules).mapping())
    assert len(caught.value.evidence) == 2
    assert any("h.{0...2}.a-b" in line for line in caught.value.evidence)


def test_casts_are_written_with_both_dtypes_and_reversed() -> None:
    rules = RuleSet(
        {"b": spec(3, 2, dtype="bfloat16"), "c": spec(4, dtype="bfloat16")},
        (
            Rule(("a",), ("b",), (2,), 1, (1, 0), cast="bfloat16"),
            Rule(("p", "q"), ("c",), (2, 2), 0, (0,), cast="bfloat16"),
        ),
    )
    mapping = rules.mapping({"a": "float32", "p": "float32", "q": "float32"})
    assert rendered(mapping) == [
        "a^T -> b, src_dtype='float32', dst_dtype='bfloat16'",
        "p -> p, src_dtype='float32', dst_dtype='bfloat16'",
        "q -> q, src_dtype='float32', dst_dtype='bfloat16'",
        "p, q -> c, axis=0",
    ]
    assert "b^T -> a, src_dtype='bfloat16', dst_dtype='float32'" in rendered(mapping, reverse=True)


def test_layers_that_move_up_by_one_are_written_from_the_last() -> None:
    rules = tuple(Rule((f"m.{i}.w",), (f"m.{i + 1}.w",), (3,), 1, (1, 0)) for i in range(3))
    mapping = RuleSet({f"m.{i}.w": spec(2, 3) for i in range(1, 4)}, rules).mapping()
    assert rendered(mapping) == [f"m.{i}.w^T -> m.{i + 1}.w" for i in (2, 1, 0)]


def test_names_that_change_places_go_through_copies() -> None:
    rules = (Rule(("a",), ("b",), (3,), 1, (1, 0)), Rule(("b",), ("a",), (2,), 1, (1, 0)))
    mapping = RuleSet({"a": spec(3, 2), "b": spec(2, 3)}, rules).mapping()
    assert rendered(mapping) == ["a^T -> a_kept", "b^T -> b_kept", "a_kept -> b", "b_kept -> a"]


def test_a_cast_that_the_language_cannot_make_is_refused_also_where_copies_are_made() -> None:
    rules = (
        Rule(("a",), ("b",), (3,), 1, (1, 0), cast="float64"),
        Rule(("b",), ("a",), (2,), 1, (1, 0), cast="float64"),
    )
    specs = {"a": spec(3, 2, dtype="float64"), "b": spec(2, 3, dtype="float64")}
    with pytest.raises(MappingError, match="a cast with float64: the language has float16, float32, bfloat16"):
        render(RuleSet(specs, rules).mapping({"a": "float32", "b": "float32"}))


def test_text_that_would_be_read_as_another_mapping_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "compacted", lambda blocks, index: ["h.$LAYER_ID.w -> m.$LAYER_ID.w"])
    with pytest.raises(MappingError, match="is evaluated to another mapping"):
        render(layers(2))
    monkeypatch.setattr(rendering, "compacted", lambda blocks, index: [])
    with pytest.raises(MappingError, match="is evaluated to another mapping"):
        render(layers(2))


@st.composite
def cases(draw: st.DrawFn) -> tuple[TensorMapping, Hints]:
    """Random rules; tensors of the right side bear names of the left side or their own, and are cut or not."""
    rules = draw(rule_sets())
    mapping = rules.mapping()
    free = draw(st.permutations([*mapping.sources, *mapping.targets]))
    names = dict(zip(mapping.targets, free, strict=False))
    renamed = TensorMapping.of(
        mapping.sources,
        {names[name]: spec for name, spec in mapping.targets.items()},
        tuple(replace(item, target=names[item.target]) for item in mapping.correspondences),
    )
    left: dict[str, Shape] = {}
    right: dict[str, Shape] = {}
    for rule in rules.rules:
        if draw(st.booleans()):
            left[rule.sources[0]] = cut(len(rule.axes), rule.axes[rule.axis], rule.source_blocks)
            right[names[rule.targets[0]]] = cut(len(rule.axes), rule.axis, rule.target_blocks)
    return renamed, Hints(left, right)


def cut(rank: int, axis: int, count: int) -> Shape:
    return tuple(count if index == axis else 1 for index in range(rank))


@thorough(150)
@given(cases(), st.booleans())
def test_random_rules_are_written_and_read_as_such_by_paddle(case: tuple[TensorMapping, Hints], reverse: bool) -> None:
    mapping, hints = case
    rendered(mapping, hints, reverse=reverse)
