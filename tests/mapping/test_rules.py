"""The algebra: what a rule denotes, its reverse, and composition."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from msgspec import structs

from paddleformers_fc.errors import FormatError, MappingError
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSpec, Tie, prove
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.mapping.rules import Slab, decode_rules, encode_rules
from tests.harness.sampling import thorough
from tests.mapping.numbers import moved, numbered
from tests.mapping.strategies import rule_sets


def rule_set(*rules: Rule, **targets: tuple[int, ...]) -> RuleSet:
    return RuleSet({name: TensorSpec(shape, "float32") for name, shape in targets.items()}, rules)


def test_a_transpose_swaps_the_axes() -> None:
    mapping = rule_set(Rule(("a",), ("b",), (3,), 1, (1, 0)), b=(2, 3)).mapping()
    source = np.arange(6.0).reshape(3, 2)
    assert (moved(mapping, {"a": source})["b"] == source.T).all()


def test_a_permutation_of_three_axes_is_numpys() -> None:
    mapping = rule_set(Rule(("a",), ("b",), (4,), 2, (2, 0, 1)), b=(2, 3, 4)).mapping()
    source = np.arange(24.0).reshape(3, 4, 2)
    assert (moved(mapping, {"a": source})["b"] == source.transpose(2, 0, 1)).all()


def test_an_uneven_concat_keeps_the_order_of_its_sources() -> None:
    mapping = rule_set(Rule(("a", "b"), ("c",), (2, 5), 0, (0, 1)), c=(7, 3)).mapping()
    one, two = np.arange(6.0).reshape(2, 3), 10 + np.arange(15.0).reshape(5, 3)
    assert (moved(mapping, {"a": one, "b": two})["c"] == np.concatenate([one, two])).all()


def test_an_uneven_split_is_the_reverse_of_an_uneven_concat() -> None:
    mapping = rule_set(Rule(("c",), ("a", "b"), (2, 5), 0, (0, 1)), a=(2, 3), b=(5, 3)).mapping()
    source = np.arange(21.0).reshape(7, 3)
    out = moved(mapping, {"c": source})
    assert (out["a"] == source[:2]).all()
    assert (out["b"] == source[2:]).all()


def test_a_fused_ffn_lays_gate_beside_up_for_every_tensor_parallel_rank() -> None:
    mapping = rule_set(Rule(("g", "u"), ("gu",), (4, 4), 1, (1, 0), target_blocks=2), gu=(3, 8)).mapping()
    gate, up = np.arange(12.0).reshape(4, 3), 100 + np.arange(12.0).reshape(4, 3)
    expected = np.concatenate([gate.T[:, :2], up.T[:, :2], gate.T[:, 2:], up.T[:, 2:]], axis=1)
    assert (moved(mapping, {"g": gate, "u": up})["gu"] == expected).all()


def test_a_fused_qkv_lays_query_key_and_value_beside_each_other_for_every_kv_head() -> None:
    mapping = rule_set(Rule(("q", "k", "v"), ("qkv",), (8, 4, 4), 1, (1, 0), target_blocks=2), qkv=(3, 16)).mapping()
    q, k, v = (base + np.arange(rows * 3.0).reshape(rows, 3) for base, rows in ((0, 8), (100, 4), (200, 4)))
    pieces = [q.T[:, :4], k.T[:, :2], v.T[:, :2], q.T[:, 4:], k.T[:, 2:], v.T[:, 2:]]
    assert (moved(mapping, {"q": q, "k": k, "v": v})["qkv"] == np.concatenate(pieces, axis=1)).all()


def test_a_source_that_holds_queries_and_gates_by_head_is_taken_apart_for_every_kv_head() -> None:
    rule = Rule(("qg", "k", "v"), ("qkv",), ((8, 8), 4, 4), 1, (1, 0), source_blocks=4, target_blocks=2)
    mapping = rule_set(rule, qkv=(3, 24)).mapping()
    arrays = numbered(mapping)
    prove(mapping)
    prove(mapping.reversed())
    heads, (k, v) = arrays["qg"].T.reshape(3, 4, 2, 2), (arrays[name].T for name in "kv")
    query, gate = heads[:, :, 0].reshape(3, 8), heads[:, :, 1].reshape(3, 8)
    groups = [
        part[:, n * size : (n + 1) * size] for n in (0, 1) for part, size in ((query, 4), (gate, 4), (k, 2), (v, 2))
    ]
    assert (moved(mapping, arrays)["qkv"] == np.concatenate(groups, axis=1)).all()
    back = moved(mapping.reversed(), moved(mapping, arrays))
    assert all((back[name] == arrays[name]).all() for name in arrays)


def test_a_source_that_holds_several_parts_gives_every_rank_its_share_of_each() -> None:
    mapping = rule_set(
        Rule(("qkv", "z"), ("in",), ((2, 2, 4), 6), 0, (0, 1), target_blocks=2), **{"in": (14, 3)}
    ).mapping()
    arrays = numbered(mapping)
    mixed, z = arrays["qkv"], arrays["z"]
    parts = [mixed[:1], mixed[2:3], mixed[4:6], z[:3], mixed[1:2], mixed[3:4], mixed[6:], z[3:]]
    assert (moved(mapping, arrays)["in"] == np.concatenate(parts)).all()


def test_rules_without_shared_sources_have_the_bytes_of_earlier_versions() -> None:
    rules = rule_set(Rule(("g", "u"), ("gu",), (4, 4), 1, (1, 0), target_blocks=2), gu=(3, 8))
    assert b'"parts": [\n    4,\n    4\n   ]' in encode_rules(rules)
    assert rules.digest == "22b85300860f19c68cdd6e219dc7227e"


@pytest.mark.parametrize(
    ("parts", "blocks", "message"),
    [
        (((8, ()), 4), 1, "invalid"),
        (((), 12), 1, "invalid rule"),
        (((8, 4),), 3, "cannot be interleaved in 3 equal groups"),
        (((6, 2), 4), 4, "cannot be interleaved in 4 equal groups"),
    ],
)
def test_parts_that_a_source_cannot_hold_are_refused(parts: Any, blocks: int, message: str) -> None:
    names = tuple(f"s{n}" for n in range(len(parts)))
    if message == "invalid":
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"sources": names, "targets": ["t"], "parts": parts, "axis": 0, "axes": [0]}, Rule)
        return
    with pytest.raises(MappingError) as caught:
        rule_set(Rule(names, ("t",), parts, 0, (0,), source_blocks=blocks), t=(12,)).mapping()
    assert any(message in line for line in caught.value.evidence)


def test_experts_are_stacked_on_a_new_axis() -> None:
    experts = tuple(f"experts.{i}" for i in range(3))
    mapping = rule_set(Rule(experts, ("stack",), (1, 1, 1), 0, (-1, 0, 1)), stack=(3, 2, 4)).mapping()
    arrays = numbered(mapping)
    prove(mapping)
    prove(mapping.reversed())
    assert (moved(mapping, arrays)["stack"] == np.stack([arrays[name] for name in experts])).all()
    back = moved(mapping.reversed(), moved(mapping, arrays))
    assert all((back[name] == arrays[name]).all() for name in experts)


def fused_stack(axes: tuple[int, ...], rows: int, experts: int = 3) -> tuple[Rule, ...]:
    """A rule per expert: gate and up side by side on the last axis, experts along the first."""
    sources = [(f"{expert}.gate", f"{expert}.up") for expert in range(experts)]
    last = len(axes) - 1
    return tuple(
        Rule(names, ("stack",), (4, 4), last, axes, slab=Slab(0, expert * rows, (expert + 1) * rows))
        for expert, names in enumerate(sources)
    )


@pytest.mark.parametrize(
    ("axes", "rows", "shape"), [((1, 0), 2, (6, 8)), ((-1, 1, 0), 1, (3, 2, 8))], ids=["along an axis", "on a new axis"]
)
def test_fused_experts_are_stacked_slab_by_slab(axes: tuple[int, ...], rows: int, shape: tuple[int, ...]) -> None:
    mapping = RuleSet({"stack": TensorSpec(shape, "float32")}, fused_stack(axes, rows)).mapping()
    prove(mapping)
    prove(mapping.reversed())
    arrays = numbered(mapping)
    assert {spec.shape for spec in mapping.sources.values()} == {(4, 2)}
    fused = [np.concatenate([arrays[f"{e}.gate"].T, arrays[f"{e}.up"].T], axis=1) for e in range(3)]
    assert (moved(mapping, arrays)["stack"] == np.stack(fused).reshape(shape)).all()
    back = moved(mapping.reversed(), moved(mapping, arrays))
    assert all((back[name] == arrays[name]).all() for name in arrays)


def test_a_slab_that_is_left_out_is_a_gap_and_one_outside_does_not_fit() -> None:
    stack = {"stack": TensorSpec((6, 8), "float32")}
    with pytest.raises(MappingError, match=r"stack: \[2:4, 0:8\] is not written"):
        prove(RuleSet(stack, (fused_stack((1, 0), 2)[0], fused_stack((1, 0), 2)[2])).mapping())
    with pytest.raises(MappingError, match=r"shape \[6, 8\] has no stretch 6:8 on axis 0"):
        RuleSet(stack, fused_stack((1, 0), 2, experts=4)).mapping()


def test_a_slab_survives_the_way_through_json() -> None:
    rules = RuleSet({"stack": TensorSpec((6, 8), "float32")}, fused_stack((1, 0), 2))
    assert decode_rules(encode_rules(rules), "mapping.json") == rules


@thorough(150)
@given(rule_sets())
def test_forward_then_reverse_restores_every_number(rules: RuleSet) -> None:
    mapping = rules.mapping()
    prove(mapping)
    prove(mapping.reversed())
    arrays = numbered(mapping)
    back = moved(mapping.reversed(), moved(mapping, arrays))
    assert all((back[name] == arrays[name]).all() for name in arrays)


@thorough(50)
@given(rule_sets())
def test_a_mapping_composed_with_its_reverse_is_the_identity(rules: RuleSet) -> None:
    mapping = rules.mapping()
    both = mapping.then(mapping.reversed())
    prove(both)
    arrays = numbered(mapping)
    out = moved(both, arrays)
    assert all((out[name] == arrays[name]).all() for name in arrays)


@pytest.mark.parametrize("source_tp", [1, 2, 4])
@pytest.mark.parametrize("target_tp", [1, 2, 4])
def test_composing_two_tensor_parallel_degrees_equals_going_through_the_canonical_space(
    source_tp: int, target_tp: int
) -> None:
    def fused(tp: int) -> RuleSet:
        ffn = Rule(("g", "u"), ("gu",), (8, 8), 1, (1, 0), target_blocks=tp)
        qkv = Rule(("q", "k", "v"), ("qkv",), (16, 8, 8), 1, (1, 0), target_blocks=4)
        specs = {"gu": TensorSpec((3, 16), "float32"), "qkv": TensorSpec((5, 32), "float32")}
        return RuleSet(specs, (ffn, qkv))

    before, after = fused(source_tp).mapping(), fused(target_tp).mapping()
    composed = before.reversed().then(after)
    prove(composed)
    arrays = numbered(before)
    stored = moved(before, arrays)
    expected = moved(after, arrays)
    out = moved(composed, stored)
    assert all((out[name] == expected[name]).all() for name in expected)


def test_equal_layouts_compose_to_whole_tensors() -> None:
    rule = Rule(("q", "k", "v"), ("qkv",), (16, 8, 8), 1, (1, 0), target_blocks=4)
    mapping = rule_set(rule, qkv=(5, 32)).mapping()
    (item,) = mapping.reversed().then(mapping).correspondences
    assert item.source_box == item.target_box
    assert item.source_box.shape == (5, 32)


@pytest.mark.parametrize("blocks", [1, 2])
def test_equal_stacks_of_experts_compose_to_whole_tensors(blocks: int) -> None:
    rules = [
        Rule((f"{e}.g", f"{e}.u"), ("stack",), (4, 4), 2, (-1, 1, 0), target_blocks=blocks, slab=Slab(0, e, e + 1))
        for e in range(5)
    ]
    mapping = rule_set(*rules, stack=(5, 3, 8)).mapping()
    composed = mapping.reversed().then(mapping)
    prove(composed)
    (item,) = composed.correspondences
    assert (item.source, item.target, item.axes) == ("stack", "stack", (0, 1, 2))
    assert item.source_box == item.target_box == whole((5, 3, 8))


def test_stacks_in_another_order_are_not_taken_for_whole_tensors() -> None:
    def stacked(order: list[int]) -> TensorMapping:
        rules = [Rule((f"{e}",), ("stack",), (4,), 1, (-1, 0), slab=Slab(0, at, at + 1)) for at, e in enumerate(order)]
        return rule_set(*rules, stack=(3, 4)).mapping()

    before, after = stacked([0, 1, 2]), stacked([0, 2, 1])
    composed = before.reversed().then(after)
    prove(composed)
    arrays = numbered(before)
    assert (moved(composed, moved(before, arrays))["stack"] == moved(after, arrays)["stack"]).all()


def test_rules_survive_json() -> None:
    rules = RuleSet(
        {name: TensorSpec((2, 3), "bfloat16") for name in ("b", "c", "fresh")},
        (Rule(("a",), ("b",), (3,), 1, (1, 0), cast="bfloat16"),),
        (Tie("b", "c"),),
        ("fresh",),
        ("dropped",),
    )
    assert decode_rules(encode_rules(rules), "here") == rules


def test_equal_texts_are_read_once_and_no_other_is_taken_for_them() -> None:
    rules = RuleSet({"b": TensorSpec((2,), "float32")}, (Rule(("a",), ("b",), (2,), 0, (0,)),))
    other = structs.replace(rules, fresh=("b",))
    first = decode_rules(encode_rules(rules), "here")
    assert decode_rules(encode_rules(rules), "there") is first
    found = decode_rules(encode_rules(other), "here")
    assert (found, found.digest) == (other, other.digest)
    assert found.digest != first.digest
    for _ in range(2):
        with pytest.raises(FormatError, match="Invalid mapping of the checkpoint"):
            decode_rules(encode_rules(rules)[:-2], "here")
    assert encode_rules(first) == encode_rules(rules), "what is remembered of rules is not written"


def test_a_rule_that_does_not_fit_is_named_with_the_numbers() -> None:
    rules = rule_set(Rule(("g", "u"), ("gu",), (4, 4), 1, (1, 0), target_blocks=3), gu=(3, 10))
    with pytest.raises(MappingError) as caught:
        rules.mapping()
    assert "cannot be interleaved in 3 equal groups" in str(caught.value)
    assert "length 10" in str(caught.value)


PRIME = 2**61 - 1
"""Multiples of it have one hash as integers."""


def test_shapes_and_parts_of_one_hash_are_refused() -> None:
    shapes = rule_set(Rule(("a",), ("b",), (PRIME,), 1, (0, 1)), b=(0, PRIME), c=(PRIME, 0), d=(0, 0))
    assert len({hash(spec.shape) for spec in shapes.targets.values()}) == 1
    with pytest.raises(FormatError, match="chosen to be slow to read"):
        decode_rules(encode_rules(shapes), "here")
    parts = rule_set(*(Rule(("a",), ("b",), (PRIME * digit,), 0, (0,)) for digit in range(3)), b=(0,))
    with pytest.raises(MappingError, match="chosen to be slow to read"):
        parts.mapping()
