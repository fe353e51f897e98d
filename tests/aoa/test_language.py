"""Every form of the language as people write it, read by us and by Paddle's AOAEngine: the same numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
from hypothesis import given

from paddleformers_fc.aoa import parse
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Shape, prove
from tests.aoa import stock
from tests.aoa.programs import Program, programs
from tests.aoa.spaces import side
from tests.harness.sampling import thorough
from tests.mapping.numbers import moved, numbered

logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.CRITICAL)

Shapes = Mapping[str, Shape]
HEADS = "num_heads=4, num_key_value_groups=2"

Form = tuple[list[str], Shapes, Shapes, Shapes, Shapes]


def form(
    statements: list[str],
    left: Shapes,
    right: Shapes,
    left_cuts: Shapes | None = None,
    right_cuts: Shapes | None = None,
) -> Form:
    """Statements, the shapes of both sides, and into how many parts their axes are cut."""
    return statements, left, right, left_cuts or {}, right_cuts or {}


FORMS: dict[str, Form] = {
    "equal names": form([], {"a": (2, 3)}, {"a": (2, 3)}),
    "permute nothing": form(['a -> b, permute = "[]"'], {"a": (2, 3)}, {"b": (3, 2)}),
    "split": form(["c -> a, b, axis=1"], {"c": (2, 4)}, {"a": (2, 2), "b": (2, 2)}),
    "array": form(
        ["c -> c[0:4], axis=0", "c[0:1] -> a", "c[1:4] -> b, axis=0"], {"c": (8, 2)}, {"a": (2, 2), "b": (6, 2)}
    ),
    "wildcard on the left": form(["e.*.w -> s, axis=0"], {f"e.{i}.w": (1, 2) for i in (2, 0, 10, 1)}, {"s": (4, 2)}),
    "wildcard on the right": form(["s -> e.*.w, axis=0"], {"s": (3, 2)}, {f"e.{i}.w": (1, 2) for i in (2, 0, 1)}),
    "layers": form(
        ["h.$LAYER_ID.w^T -> m.$LAYER_ID.w"],
        {f"h.{i}.w": (2, 3) for i in (0, 1, 10)},
        {f"m.{i}.w": (3, 2) for i in (0, 1, 10)},
    ),
    "experts": form(
        ["h.$LAYER_ID.e.$EXPERT_ID.w -> m.$EXPERT_ID.e.$LAYER_ID.w"],
        {f"h.{i}.e.{e}.w": (2,) for i in range(2) for e in range(3)},
        {f"m.{e}.e.{i}.w": (2,) for i in range(2) for e in range(3)},
    ),
    "experts of every layer, apart": form(
        ["h.$LAYER_ID.w -> m.$LAYER_ID.e.*.w, axis=0"],
        {"h.0.w": (4,), "h.3.w": (4,)},
        {f"m.{layer}.e.{e}.w": (2,) for layer in (0, 3) for e in range(2)},
    ),
    "layers that move down": form(
        ["h.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w, permute='[1,0]'"],
        {f"h.{i}.w": (2, 3) for i in (1, 2, 3)},
        {f"m.{i}.w": (3, 2) for i in (0, 1, 2)},
    ),
    "names in between": form(
        ["a -> t", "t -> u, v, axis=0", "u^T -> b", "v -> c"], {"a": (4, 2)}, {"b": (2, 2), "c": (2, 2)}
    ),
    "added and removed": form(["a -> _", "_ -> b"], {"a": (2,), "c": (1,)}, {"b": (3,), "c": (1,)}),
    "gate and up, through names in between": form(
        ["g, u -> t, fused_ffn", "t -> gu, permute='[1,0]'"],
        {"g": (3, 8), "u": (3, 8)},
        {"gu": (16, 3)},
        right_cuts={"gu": (4, 1)},
    ),
    "gate and up, through a name in between with three axes in another order": form(
        ["g, u -> t, fused_ffn", "t -> gu, permute='[2, 0, 1]'"],
        {"g": (3, 4, 5), "u": (3, 4, 5)},
        {"gu": (5, 3, 8)},
        right_cuts={"gu": (1, 1, 4)},
    ),
    "gate and up, read through names in between": form(
        ["gu^T -> t", "t -> g, u, fused_ffn, axis=0"],
        {"gu": (3, 16)},
        {"g": (8, 3), "u": (8, 3)},
        left_cuts={"gu": (1, 2)},
    ),
    "query, key and value": form(
        [f"q^T, k^T, v^T -> qkv, fused_qkv, {HEADS}"],
        {"q": (8, 3), "k": (4, 3), "v": (4, 3)},
        {"qkv": (3, 16)},
        right_cuts={"qkv": (1, 2)},
    ),
    "query, key and value, read": form(
        [f"qkv^T -> q, k, v, fused_qkv, {HEADS}, axis=0"],
        {"qkv": (3, 16)},
        {"q": (8, 3), "k": (4, 3), "v": (4, 3)},
        left_cuts={"qkv": (1, 4)},
    ),
}


# Forms that need the right side's tensors: for their shards, for a wildcard, or because nothing fills one of them.
_NEEDED = ("wildcard on the right", "experts of every layer, apart", "added and removed")
UNKNOWN_RIGHT = [form for form, case in FORMS.items() if not case[4] and form not in _NEEDED]


REVERSED_BY_PADDLE = ("split", "experts", "names in between", "added and removed")
REVERSED_BY_PADDLE += ("query, key and value", "query, key and value, read")


@pytest.mark.parametrize("form", FORMS)
def test_a_form_means_what_paddle_makes_of_it_and_its_reverse_where_paddles_own_is_right(form: str) -> None:
    statements, left_shapes, right_shapes, left_cuts, right_cuts = FORMS[form]
    left, right = side(left_shapes, left_cuts), side(right_shapes, right_cuts)
    mapping = parse(statements, left, right)
    prove(mapping)
    prove(mapping.reversed())
    arrays = numbered(mapping)
    ours, theirs = moved(mapping, arrays), stock.moved(stock.plan(statements, left, right), arrays, right)
    assert all((ours[name] == theirs[name]).all() for name in ours)
    back = moved(mapping.reversed(), ours)
    assert all((back[name] == arrays[name]).all() for name in arrays if name not in mapping.dropped)
    if form in REVERSED_BY_PADDLE:
        by_paddle = stock.moved(stock.plan(statements, right, left, reverse=True), ours, left)
        assert all((back[name] == by_paddle[name]).all() for name in back)


@pytest.mark.parametrize("form", UNKNOWN_RIGHT)
def test_the_right_side_follows_from_the_statements_where_it_is_not_known(form: str) -> None:
    statements, left_shapes, right_shapes, left_cuts, _ = FORMS[form]
    mapping = parse(statements, side(left_shapes, left_cuts), None)
    prove(mapping)
    assert {name: spec.shape for name, spec in mapping.targets.items()} == right_shapes


def test_a_cast_to_the_same_dtype_does_nothing() -> None:
    mapping = parse(["a -> b, dtype='float32'"], side({"a": (2,)}), side({"b": (2,)}))
    prove(mapping)
    assert [item.cast for item in mapping.correspondences] == [None]


@pytest.mark.parametrize(
    ("dtypes", "statement"),
    [
        (("float32", "bfloat16"), "a^T -> b, dtype='bfloat16'"),
        (("bfloat16", "float32"), "a -> b, src_dtype='bfloat16', dst_dtype=\"float32\""),
    ],
)
def test_a_cast_is_the_one_that_paddle_makes(dtypes: tuple[str, str], statement: str) -> None:
    left = {"a": stock.AoaTensor((2, 2), dtypes[0], (1, 1))}
    right = {"b": stock.AoaTensor((2, 2), dtypes[1], (1, 1))}
    mapping = parse([statement], left, right)
    prove(mapping)
    assert set(mapping.correspondences) == stock.correspondences(stock.plan([statement], left, right))
    (back,) = mapping.reversed().correspondences
    assert back.cast == dtypes[0]


def test_paddle_executes_every_proved_mapping_alike_or_raises() -> None:
    compared: list[Program] = []

    @thorough(250)
    @given(programs())
    def compare(program: Program) -> None:
        try:
            mapping = parse(program.statements, program.left, program.right)
            prove(mapping)
        except MappingError:
            return
        entries = planned(program)
        if entries is None:
            return
        arrays = numbered(mapping)
        ours, theirs = moved(mapping, arrays), stock.moved(entries, arrays, program.right)
        assert all((ours[name] == theirs[name]).all() for name in ours)
        back = moved(mapping.reversed(), ours)
        assert all((back[name] == arrays[name]).all() for name in arrays)
        compared.append(program)

    compare()
    assert sum(bool(program.statements) for program in compared) >= 10


def planned(program: Program) -> list[stock.ShardMappingEntry] | None:
    """Paddle's plan; None if names do not identify the shards: one name may have two meanings."""
    try:
        return stock.plan(program.statements, program.left, program.right)
    except AssertionError as refusal:
        if "resolve_mapping_chain" in str(refusal) or "Reference chain resolution failed" in str(refusal):
            return None
        raise
