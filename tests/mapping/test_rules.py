"""The algebra: what a rule denotes, its reverse, and composition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from msgspec import structs

from paddleformers_fc.errors import FormatError, MappingError
from paddleformers_fc.mapping import Rule, RuleSet, TensorMapping, TensorSpec, Tie, prove
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, whole
from paddleformers_fc.mapping.rules import Slab, decode_rules, encode_rules
from tests.harness.sampling import thorough
from tests.mapping.numbers import moved, numbered
from tests.mapping.strategies import rule_sets


def rule_set(*rules: Rule, **targets: tuple[int, ...]) -> RuleSet:
    return RuleSet({name: TensorSpec(shape, "float32") for name, shape in targets.items()}, rules)


def test_rules_without_shared_sources_have_the_bytes_of_earlier_versions() -> None:
    rules = rule_set(Rule(("g", "u"), ("gu",), (4, 4), 1, (1, 0), target_blocks=2), gu=(3, 8))
    assert b'"parts": [\n    4,\n    4\n   ]' in encode_rules(rules)
    assert rules.digest == "22b85300860f19c68cdd6e219dc7227e"


def test_a_list_of_parts_is_not_parts_of_one_tensor() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"sources": "ab", "targets": ["t"], "parts": ((8, ()), 4), "axis": 0, "axes": [0]}, Rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(("a", "b"), ("t",), ((), 12), 0, (0,)), "invalid rule: 2 sources, 1 targets"),
        (Rule((), ("t",), (12,), 0, (0,)), "invalid rule: 0 sources, 1 targets"),
        (Rule(("a", "b"), ("t",), (13, -1), 0, (0,)), "invalid rule: 2 sources, 1 targets"),
        (Rule(("a",), ("t",), (12,), 1, (0,)), "invalid order of axes [0] with parts along axis 1"),
        (Rule(("a",), ("t",), (12,), 0, (1,)), "invalid order of axes [1] with parts along axis 0"),
        (Rule(("a",), ("t",), (12,), 0, (0, 1)), "t has 1 axes, the rule is for 2"),
        (Rule(("a", "b"), ("t",), (4, 4, 4), 0, (0,)), "2 sources for 3 parts"),
        (Rule(("a", "b"), ("t",), (6, 6), 0, (0,), source_blocks=2), "2 sources cannot be interleaved in 2 groups"),
        (Rule(("a",), ("t",), ((8, 4),), 0, (0,), source_blocks=3), "cannot be interleaved in 3 equal groups"),
        (Rule(("a",), ("t",), (8, 4), 0, (0,), source_blocks=0), "cannot be interleaved in 0 equal groups"),
        (Rule(("a", "b"), ("t",), ((6, 2), 4), 0, (0,), source_blocks=4), "cannot be interleaved in 4 equal groups"),
        (Rule(("a", "b"), ("t",), (8, 8), 0, (0,)), "length 12 on axis 0, the parts sum to 16"),
        (Rule(("a",), ("t", "u"), (6, 6), 0, (0,)), "u: the target of the rule is not a tensor of the model"),
    ],
)
def test_a_rule_that_does_not_match_its_tensors_is_refused(rule: Rule, message: str) -> None:
    with pytest.raises(MappingError) as caught:
        rule_set(rule, t=(12,)).mapping()
    assert any(message in line for line in caught.value.evidence)


def test_more_stretches_than_the_bound_are_refused_in_one_rule_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddleformers_fc.mapping.rules.MAX_STRETCHES", 4)
    halves = [Rule((f"{name}0", f"{name}1"), (name,), (6, 6), 0, (0,)) for name in "tuv"]
    shapes = dict.fromkeys("tuv", (12,))
    rule_set(*halves[:2], **shapes).mapping()
    with pytest.raises(MappingError, match="v: more than 4 stretches up to this rule"):
        rule_set(*halves, **shapes).mapping()
    with pytest.raises(MappingError, match="1 and 1 groups are more than 4 stretches"):
        rule_set(Rule(("a", "b", "c"), ("t",), (4, 4, 4), 0, (0,)), t=(12,)).mapping()


SHAPED = rule_set(most=(1,) * MAX_AXES, longest=(MAX_LENGTH, 2), none=(0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": {"t": TensorSpec((1,) * (MAX_AXES + 1), "float32")}}, "t: invalid shape"),
        ({"targets": {"t": TensorSpec((MAX_LENGTH + 1,), "float32")}}, "t: invalid shape"),
        ({"targets": {"t": TensorSpec((-1,), "float32")}}, "t: invalid shape"),
        ({"cuts": {"absent": (1,)}}, "absent: invalid cuts"),
        ({"cuts": {"longest": (1,)}}, "longest: invalid cuts"),
        ({"cuts": {"longest": (0, 1)}}, "longest: invalid cuts"),
        ({"cuts": {"longest": (1, MAX_LENGTH + 1)}}, "longest: invalid cuts"),
        ({"ties": (Tie("longest", "most"),)}, "most: is tied to longest, which differs in shape or dtype"),
        ({"ties": (Tie("most", "most"),)}, "most: is tied to most, which differs in shape or dtype"),
        ({"ties": (Tie("gone", "absent"),)}, "gone: is tied and not a tensor of the model"),
        ({"fresh": ("absent",)}, "absent: is declared uninitialised and not a tensor of the model"),
    ],
)
def test_stored_rules_with_tensors_that_no_model_has_are_refused(changes: dict[str, Any], message: str) -> None:
    targets = {**SHAPED.targets, "same": SHAPED.targets["longest"]}
    stored = structs.replace(SHAPED, targets=targets, cuts={"longest": (MAX_LENGTH, 1)}, ties=(Tie("longest", "same"),))
    assert decode_rules(encode_rules(stored), "here") == stored
    with pytest.raises(FormatError) as caught:
        decode_rules(encode_rules(structs.replace(stored, **changes)), "here")
    assert any(message in line for line in caught.value.evidence)


def fused_stack(experts: int = 3) -> tuple[Rule, ...]:
    """A rule per expert: gate and up side by side, experts along the rows."""
    return tuple(
        Rule((f"{n}.gate", f"{n}.up"), ("stack",), (4, 4), 1, (1, 0), slab=Slab(0, 2 * n, 2 * n + 2))
        for n in range(experts)
    )


def test_a_slab_that_is_left_out_is_a_gap_and_one_outside_does_not_fit() -> None:
    stack = {"stack": TensorSpec((6, 8), "float32")}
    with pytest.raises(MappingError, match=r"stack: \[2:4, 0:8\] is not written"):
        prove(RuleSet(stack, (fused_stack()[0], fused_stack()[2])).mapping())
    with pytest.raises(MappingError, match=r"shape \[6, 8\] has no stretch 6:8 on axis 0"):
        RuleSet(stack, fused_stack(experts=4)).mapping()


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


def test_stacks_in_another_order_are_not_composed_to_complete_tensors() -> None:
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
        {name: TensorSpec((6, 8), "bfloat16") for name in ("b", "c", "fresh", "stack")},
        (Rule(("a",), ("b",), (8,), 1, (1, 0), cast="bfloat16"), *fused_stack()),
        (Tie("b", "c"),),
        ("fresh",),
        ("dropped",),
    )
    assert decode_rules(encode_rules(rules), "here") == rules


def test_equal_rule_texts_are_parsed_once_and_different_ones_separately() -> None:
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


PRIME = 2**61 - 1
"""Multiples of it have one hash as integers."""


def test_shapes_and_parts_of_one_hash_are_refused() -> None:
    shapes = rule_set(Rule(("a",), ("b",), (PRIME,), 1, (0, 1)), b=(0, PRIME), c=(PRIME, 0), d=(0, 0))
    assert len({hash(spec.shape) for spec in shapes.targets.values()}) == 1
    with pytest.raises(FormatError, match="colliding hash"):
        decode_rules(encode_rules(shapes), "here")
    parts = rule_set(*(Rule(("a",), ("b",), (PRIME * digit,), 0, (0,)) for digit in range(3)), b=(0,))
    with pytest.raises(MappingError, match="colliding hash"):
        parts.mapping()
