"""``reshape``, which Paddle has after 3.3: grouped experts with and without an axis of their own, by NumPy's reshape.

The statements and shapes of the first tests are those of Paddle's own tests of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.aoa import evaluate, parse, read_config, render, with_ties
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Rule, RuleSet, Shape, TensorSpec, prove
from paddleformers_fc.mapping.rules import Slab
from tests.aoa.spaces import side
from tests.harness.sampling import thorough
from tests.mapping.numbers import moved, numbered

CANONICAL, FLAT = (2, 3, 2, 2), (6, 4)
RESHAPE = "reshape = '[2, 3, 2, 2]'"


def made(statements: Sequence[str], left: dict[str, Shape], right: dict[str, Shape] | None) -> dict[str, Any]:
    """The right tensors, from numbers that the mapping of the statements moves, there and back."""
    mapping = parse(statements, side(left), None if right is None else side(right))
    prove(mapping)
    prove(mapping.reversed())
    arrays = numbered(mapping)
    found = moved(mapping, arrays)
    assert all((array == arrays[name]).all() for name, array in moved(mapping.reversed(), found).items())
    return found


def count_up(*shape: int, start: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + prod(shape), dtype=float).reshape(shape)


def test_a_name_that_is_no_right_tensor_has_the_shape_in_the_text() -> None:
    statements = [f"s0 -> t, {RESHAPE}", "t -> d, permute='[2, 1, 0, 3]'"]
    found = made(statements, {"s0": FLAT}, {"d": (2, 3, 2, 2)})
    assert (found["d"] == count_up(*CANONICAL).transpose(2, 1, 0, 3)).all()
    for source in (FLAT, CANONICAL):
        assert made([f"s0 -> d, {RESHAPE}"], {"s0": source}, None)["d"].shape == CANONICAL


def test_a_statement_that_is_written_for_the_opposite_direction_is_the_reverse() -> None:
    config = {"aoa_statements": [f"s0 -> d, {RESHAPE}"], "aoa_config_reverse": True}
    mapping = evaluate(read_config(config), side({"d": FLAT}), side({"s0": CANONICAL}))
    arrays = numbered(mapping)
    assert (moved(mapping, arrays)["s0"] == arrays["d"].reshape(CANONICAL)).all()


@thorough(100)
@given(st.lists(st.integers(1, 4), min_size=3, max_size=5), st.data())
def test_any_shape_is_reshaped_as_numpy_does(blocks: list[int], data: st.DataObject) -> None:
    shape, rows = tuple(blocks), (blocks[0] * blocks[1], prod(blocks[2:]))
    found = made([f"a^T -> b, reshape='{blocks}'"], {"a": shape[::-1]}, {"b": rows})
    assert (found["b"] == count_up(*shape[::-1]).T.reshape(rows)).all()
    order = data.draw(st.permutations(range(len(blocks))))
    statements = [f"a^T -> b, reshape='{blocks}'", f"b -> c, permute='{order}'"]
    found = made(statements, {"a": rows[::-1]}, {"c": tuple(shape[axis] for axis in order)})
    assert (found["c"] == count_up(*rows[::-1]).T.reshape(shape).transpose(order)).all()


REFUSED = {
    "s0 -> d, reshape = '[6, 4]'": "[6, 4] is not a shape of blocks with at least three axes",
    "s0 -> d, reshape = '[0, 3, 4]'": "[0, 3, 4] is not a shape of blocks",
    "s0 -> d, reshape = '[2, -1, 4]'": "Invalid list of lengths",
    "s0 -> d, reshape = '[2, 3, 4], axis=0'": "Invalid list of lengths",
    "s0 -> d, reshape = '[2, 3, 4]', axis=0": "Unsupported attributes of a statement",
    "s0, s0 -> d, reshape = '[2, 3, 4]'": "reshape is not supported in a statement of several names",
    "s0 -> d, reshape = '[3, 2, 2]'": "reshape goes between [6, 2] and [3, 2, 2], not from [6, 4] to [2, 3, 4]",
    "s0 -> d, reshape = '[99999999, 9, 9]'": "reshape goes between [899999991, 9]",
    "s0 -> d, reshape = 3": "Expected a quoted string",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_a_reshape_is_refused_with_its_cause(statement: str) -> None:
    with pytest.raises(MappingError) as caught:
        parse([statement], side({"s0": (6, 4)}), side({"d": (2, 3, 4)}))
    assert REFUSED[statement] in " ".join(" ".join(line.split()) for line in caught.value.evidence)


def test_more_blocks_than_tensors_have_are_refused_before_they_are_made() -> None:
    shape = (99_999_999, 9, 9)
    with pytest.raises(MappingError, match="expand to more than"):
        parse([f"a -> b, reshape='{list(shape)}'"], side({"a": (shape[0] * 9, 9)}), side({"b": shape}))


def test_layouts_per_shard_are_not_followed_through_a_reshape() -> None:
    experts = side({"d": (2, 3, 8)}, {"d": (1, 1, 2)})
    with pytest.raises(MappingError, match="t is reshaped later: the shards are ambiguous"):
        parse(["g, u -> t, fused_ffn", "t -> d, reshape='[2, 3, 8]'"], side({"g": (6, 4), "u": (6, 4)}), experts)
    with pytest.raises(MappingError, match="tensor parallelism cuts d on axis 2"):
        parse(["d -> t, reshape='[2, 3, 8]'", "t -> p, q, fused_ffn"], experts, side({"p": (2, 2, 8), "q": (2, 2, 8)}))


def expert_rules(axes: Shape, *shape: int, axis: int) -> RuleSet:
    """Gate and up of three experts, in a stack on a new axis."""
    part = shape[axis - 1] // 2
    rules = (
        Rule((f"e.{e}.gate", f"e.{e}.up"), ("stack",), (part, part), axis, axes, slab=Slab(0, e, e + 1))
        for e in range(3)
    )
    return RuleSet({"stack": TensorSpec((3, *shape), "float32")}, tuple(rules))


STACKS = {
    "gate beside up": (
        expert_rules((-1, 1, 0), 5, 8, axis=2),
        [
            "e.0.gate^T, e.1.gate^T, e.2.gate^T -> stack_rows_0, axis=0",
            "e.0.up^T, e.1.up^T, e.2.up^T -> stack_rows_1, axis=0",
            "stack_rows_0, stack_rows_1 -> stack_rows, axis=1",
            'stack_rows -> stack, reshape="[3, 5, 8]"',
        ],
    ),
    "gate above up": (
        expert_rules((-1, 0, 1), 8, 5, axis=1),
        [
            "e.0.gate, e.0.up, e.1.gate, e.1.up, e.2.gate, e.2.up -> stack_rows, axis=0",
            'stack_rows -> stack, reshape="[3, 8, 5]"',
        ],
    ),
}


@pytest.mark.parametrize("case", STACKS)
def test_experts_are_written_one_below_the_other_and_reshaped(case: str) -> None:
    rules, text = STACKS[case]
    assert render(rules) == text
    mapping = with_ties(rules)
    sources = {name: spec.shape for name, spec in mapping.sources.items()}
    found = made(text, sources, {"stack": rules.targets["stack"].shape})
    assert (found["stack"] == moved(mapping, numbered(mapping))["stack"]).all()
    with pytest.raises(MappingError, match="stack: the language adds an axis only in front of two, and removes none"):
        render(rules, reverse=True)
