"""What is refused, in bounded time, and how it is shown: the user's text, the place, the cause, all statements."""

from __future__ import annotations

import logging
import time

import pytest

from paddleformers_fc.aoa import AoaTensor, evaluate, parse, read_config
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Shape, Tie, prove
from tests.aoa import stock
from tests.aoa.spaces import side
from tests.harness.work import calls

Shapes = dict[str, Shape]
logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.ERROR)

LEFT = {
    "a": (4, 6),
    "b": (4, 6),
    "x.1.w": (2, 2),
    "x.2.w": (2, 2),
    "e.0.w": (2,),
    "e.1.w": (2,),
    "r.0.0": (2,),
    "r.1.1": (2,),
    "s": (),
}
RIGHT = {"c": (4, 6), "d": (8, 6), "y.1.w": (2, 2), "y.2.w": (2, 2)}


def refusal(*statements: str, left: object = None, right: object = None) -> MappingError:
    with pytest.raises(MappingError) as caught:
        parse(statements, side(left or LEFT), side(right or RIGHT))  # type: ignore[arg-type]
    return caught.value


REFUSED = {
    "a -> c, axi=0": "Unknown attribute `axi`. Accepted: axis",
    "a - c": "Invalid character `-` in a name or number",
    "a -> c # renamed": "The language has no comments",
    "a -> c\na -> c": "A statement has more than one line",
    "a -> c, permute='[1,0]": "The quote is not closed",
    "a => c": "`>` is valid only in `->`",
    "a": "Expected `->`, found the end of the statement",
    "a -> c c": "Expected the end of the statement, found `c`",
    "0a -> c": "A name begins with a letter or `_`, not with a digit",
    "$LAYER_ID.a -> c": "A name begins with a letter or `_`; a placeholder is inside a name",
    "a/b -> c": "Invalid character '/'",
    "a -> c^T": "`^T` is not supported on the right side",
    "a^T^T -> c": "`^` is valid only in `^T` at the end of a name",
    "a -> axis": "The keyword `axis` is not a valid name",
    "a -> c, axis=0, axis=1": "Duplicate attribute axis",
    "a -> c, axis=99999999999": "Number of 11 digits; no tensor is as large",
    "a -> c, axis='0'": "Expected a number, found `0`",
    "a -> c[2:2]": "Empty array of names",
    "a -> c[0]": "Expected `:`, found `]`",
    "a^T[0:2] -> c": "`^T` is not supported for an array of names",
    "_[0:2] -> c": "`_` is not a tensor and has no axes or parts",
    "_ -> _": "`_` must be the only name on its side, with one name on the other",
    "a -> _, axis=0": "A statement with `_` has no attributes",
    "x.$LAYER_ID.w -> _": "`_` requires the complete name of one tensor",
    "a, b -> d": "The axis of the names is missing",
    "a, b -> c, d, axis=0": "Several names on both sides",
    "a, b -> d, axis=0, dtype='float16'": "dtype is not supported in a statement of several names",
    "a -> c, permute='[0,0]'": "[0, 0] does not contain every axis once",
    "a -> c, permute='(1,0)'": "Invalid list of axes",
    "a -> c, permute='[1,0,2]'": "permute=[1, 0, 2] has 3 axes, the tensor has shape [4, 6]",
    "a -> c, dtype='int8'": "Unknown dtype 'int8'. Accepted: float16, float32, bfloat16",
    "a -> c, dst_dtype='float16', src_dtype='float32'": "Unsupported attributes of a statement",
    "a -> c, src_dtype='float16', dst_dtype='float32'": "src_dtype is float16, the dtype of the source is float32",
    "a -> c, num_heads=2": "one name to one name: num_heads",
    "a, b -> c, fused_ffn, fused_qkv": "A statement has one fused layout",
    "a, b, b -> c, fused_ffn": "fused_ffn does not go from 3 to 1 names",
    "a -> c, fused_qkv, num_heads=2, num_key_value_groups=1": "fused_qkv does not go from 1 to 1 names",
    "a, b, b -> c, fused_qkv, num_heads=2": "fused_qkv requires num_key_value_groups, at least 1",
    "a, b, b -> c, fused_qkv, num_heads=3, num_key_value_groups=2": "num_heads=3 is not divisible by",
    "a -> c, fused_ffn, axis=2": "Shape [4, 6] has no axis 2. Accepted: axis=1",
    "s^T, s -> c, axis=0": "Shape [] has no axis 0. Accepted: a tensor with axes",
    "a, e.0.w -> d, axis=0": "Shapes [4, 6] and [2] differ on axes other than 0",
    "a -> p, q, r, axis=0": "Length 4 on axis 0 is not divisible into 3 equal lengths",
    "a, b, b -> c, fused_qkv, num_heads=5, num_key_value_groups=1": "Length 6 on axis 1 is not divisible into 5 heads",
    "a, b, b -> c, fused_qkv_old, num_heads=6, num_key_value_groups=3": "are not 6, 3 and 3 heads of one size",
    "a -> c, c, axis=0": "The statement writes c twice",
    "aa -> c": "`aa` is not a tensor of the left side, and no earlier statement assigns it. Accepted: `a`",
    "x.7.w -> c": "Accepted: `x.1.w` or another of 2 such names",
    "a -> cc": "`cc` is not a tensor of the right side, and no later statement reads it. Accepted: `c`",
    "_ -> zz": "`zz` is not a tensor of the right side",
    "x.$LAYER.w -> y.$LAYER.w": "Unknown placeholder in `x.$LAYER.w`",
    "x.$LAYER_ID.w -> y.1.w": "`y.1.w` and the first name have different placeholders",
    "x.$LAYER_ID.$LAYER_ID -> y.$LAYER_ID.w": "Duplicate placeholder in `x.$LAYER_ID.$LAYER_ID`",
    "x.1$LAYER_ID.w -> y.$LAYER_ID.w": "The end of a number in `x.1$LAYER_ID.w` is ambiguous",
    "r.$LAYER_ID.$EXPERT_ID -> y.$LAYER_ID.$EXPERT_ID": "have 2 x 2 combinations, and only 2 of these tensors exist",
    "e.$LAYER_ID_OFFSET.w -> y.$LAYER_ID_OFFSET.w": "$LAYER_ID_OFFSET maps N to N - 1, and a tensor has N = 0",
    "x.*.*.w -> c, axis=0": "More than one `*` in a name",
    "x.*.v -> c, axis=0": "`x.*.v` matches no tensor of its side",
    "x.*.w^T -> c, axis=0": "`^T` is not supported for a name with `*`",
    "a -> d": "`d` has shape [8, 6], its value has shape [4, 6]",
    "a -> p[0:900000000], axis=0": "The statements expand to more than 200832 names and boxes",
    "a, b, b -> c, fused_qkv, num_heads=900000000, num_key_value_groups=900000000": "into 900000000 heads",
    "a -> c ; _ -> c": "`c` keeps its initial values here and is assigned by statement 1",
    "a -> t, dtype='float16' ; t -> c, dtype='bfloat16'": "The value is already converted to float16",
    "a, b -> t, axis=0 ; t -> d, fused_ffn, axis=0": "The source consists of a, b: the shards are ambiguous",
    "a -> t, fused_ffn ; t -> p, q, axis=0": "t is split later: the shards are ambiguous",
}
"""Statements, separated by semicolons, and the cause."""


@pytest.mark.parametrize("statements", REFUSED)
def test_statements_are_refused_with_the_cause(statements: str) -> None:
    error = refusal(*statements.split(" ; "))
    assert error.where == "aoa_statements"
    assert REFUSED[statements] in " ".join(" ".join(line.split()) for line in error.evidence)


def test_a_number_that_placeholders_do_not_write_is_not_matched_by_them() -> None:
    error = refusal("m.$LAYER_ID.w -> n.$LAYER_ID.w", left={"m.007.w": (2,)}, right={"n.7.w": (2,)})
    assert "`m.$LAYER_ID.w` matches no tensor of the left side" in str(error)


HEADS_OF_SIX = "q, k, v -> c, fused_qkv_old, num_heads=6, num_key_value_groups=6, axis=0"
DOWN = "h.$LAYER_ID_OFFSET.w^T -> m.$LAYER_ID_OFFSET.w"
SILENT: list[tuple[list[str], Shapes, Shapes, Shapes, str]] = [
    (["h.$LAYER_ID.q -> m.$LAYER_ID.w"], {"m.0.w": (2,)}, {"m.0.w": (2,)}, {}, "matches no tensor of the left side"),
    (
        ["m.$LAYER_ID.*.w -> m.$LAYER_ID.w, axis=0"],
        {"m.0.w": (2,), "m.0.0.w": (1,)},
        {"m.0.w": (2,)},
        {},
        "The first name with a placeholder contains",
    ),
    ([DOWN], {"h.1.w": (2, 2), "m.0.w": (2, 2)}, {"m.0.w": (2, 2)}, {}, "is not supported with other placeholders"),
    (["a -> c", "b -> c"], {"a": (2,), "b": (2,)}, {"c": (2,)}, {}, "no statement has read it since"),
    (["g, u -> c, fused_ffn, axis=0"], {"g": (2,), "u": (6,)}, {"c": (8,)}, {"c": (2,)}, "have different lengths"),
    (["g, u -> c, fused_ffn"], {"g": (2, 4), "u": (2, 4)}, {"c": (2, 8)}, {"c": (2, 1)}, "cuts c on axis 0"),
    ([HEADS_OF_SIX], {"q": (6,), "k": (6,), "v": (6,)}, {"c": (18,)}, {"c": (4,)}, "not divisible among 4 ranks"),
    (
        ["g, u -> c, fused_ffn, axis=0, dtype='float16'"],
        {"g": (4,), "u": (4,)},
        {"c": (8,)},
        {},
        "dtype is not supported in a statement of fused_ffn",
    ),
    (["a -> b", "c -> x"], {"a": (2,), "c": (2,)}, {"b": (2,)}, {}, "no later statement"),
    (["a -> b", "a -> _"], {"a": (2,)}, {"b": (2,)}, {}, "is removed here and read by statement 1"),
]
"""Statements, the tensors of both sides, cuts of the right one, and why they are refused."""


@pytest.mark.parametrize("case", SILENT, ids=[" ; ".join(case[0]) for case in SILENT])
def test_statements_that_paddle_silently_ignores_are_rejected(
    case: tuple[list[str], Shapes, Shapes, Shapes, str],
) -> None:
    statements, left_shapes, right_shapes, cuts, cause = case
    left, right = side(left_shapes), side(right_shapes, cuts)
    stock.plan(statements, left, right)
    with pytest.raises(MappingError, match=cause):
        parse(statements, left, right)


def test_the_report_shows_the_statement_its_number_and_the_place() -> None:
    error = refusal("a -> c", "a,  b -> d, axi=0")
    lines = str(error).splitlines()
    shown = next(index for index, line in enumerate(lines) if "statement 2" in line)
    assert lines[shown] == "  - statement 2: a,  b -> d, axi=0"
    assert lines[shown + 1].index("^") == lines[shown].index("axi")
    assert lines[shown + 1].count("^") == 3


def test_the_place_is_shown_in_a_window_of_a_long_statement() -> None:
    names = ", ".join(f"n{index}" for index in range(500))
    error = refusal(f"{names}, b? -> d, axis=0")
    shown, carets, _ = error.evidence[0].splitlines()
    assert len(shown) < 150
    assert shown[carets.index("^") - 4] == "?"


def test_all_statements_are_reported_in_their_order_and_repetitions_are_counted() -> None:
    error = refusal("x.$LAYER_ID.w -> y.$LAYER_ID.w, permute='[0]'", "a c", "q -> c", "a -> c, axis=")
    assert [line.split(":")[0] for line in error.evidence] == [f"statement {number}" for number in (1, 2, 3, 4)]
    assert "(2 times, for different numbers)" in error.evidence[0]


def test_a_target_of_a_faulty_statement_is_not_reported_as_missing() -> None:
    error = refusal("a -> t.0, axi=1", "t.0 -> c", "u.0 -> c")
    assert len(error.evidence) == 2
    assert "`u.0` is not a tensor" in error.evidence[1]


def test_faults_beyond_the_first_forty_are_counted() -> None:
    error = refusal(*(f"a{'b' * index} c" for index in range(60)))
    assert len(error.evidence) == 41
    assert error.evidence[-1] == "and 20 more"


def test_a_source_that_feeds_two_targets_is_named_with_both() -> None:
    error = refusal("a -> c", left={"a": (4, 6)}, right={"a": (4, 6), "c": (4, 6)})
    assert "`a` is read more than once: it becomes `a` (equal names), `c` (statement 1)" in str(error)


def test_equal_names_of_unequal_shape_or_dtype_are_named() -> None:
    left = {"a": AoaTensor((2,), "float32", (1,)), "b": AoaTensor((2,), "float32", (1,))}
    right = {"a": AoaTensor((3,), "float32", (1,)), "b": AoaTensor((2,), "bfloat16", (1,))}
    with pytest.raises(MappingError) as caught:
        parse([], left, right)
    assert "equal names: `a` has shape [3], its value has shape [2]." in str(caught.value)
    assert "src_dtype='float32', dst_dtype='bfloat16'" in str(caught.value)


def test_unfilled_targets_and_unread_sources_are_left_to_the_proof() -> None:
    mapping = parse(["a -> c"], side({"a": (2,), "b": (2,)}), side({"c": (2,), "d": (2,)}))
    with pytest.raises(MappingError) as caught:
        prove(mapping)
    assert set(caught.value.evidence) == {"b: [0:2] is not read", "d: [0:2] is not written"}


EMBEDDING = side({"embed": (4, 2)})
TIED = side({"embed": (4, 2), "head": (4, 2)})


def test_a_tie_needs_no_statement_and_bears_one_that_copies_the_owner() -> None:
    for statements in ([], ["embed -> head"], ["_ -> head"]):
        mapping = parse(statements, EMBEDDING, TIED, [Tie("embed", "head")])
        prove(mapping)
        assert set(mapping.targets) == {"embed"}


def test_an_alias_that_is_made_of_something_else_is_refused() -> None:
    left = {**EMBEDDING, **side({"other": (4, 2)})}
    with pytest.raises(MappingError, match="`head` is tied to `embed`, and its value differs"):
        parse(["other -> head"], left, TIED, [Tie("embed", "head")])


def test_a_reversed_configuration_is_the_reverse_of_its_statements() -> None:
    stored, wanted = side({"gu": (3, 8)}, {"gu": (1, 2)}), side({"g": (4, 3), "u": (4, 3)})
    config = {"aoa_statements": ["g^T, u^T -> gu, fused_ffn"], "aoa_config_reverse": True}
    forward = parse(["g^T, u^T -> gu, fused_ffn"], wanted, stored)
    assert evaluate(read_config(config), stored, wanted).correspondences == forward.reversed().correspondences
    again = evaluate(read_config({**config, "aoa_config_reverse": False}), wanted, stored)
    assert again.correspondences == forward.correspondences
    with pytest.raises(MappingError, match="requires the tensors of both sides"):
        evaluate(read_config(config), stored, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"aoa_statement": []}, "has an invalid entry 'aoa_statement'"),
        ({"aoa_statements": "a -> b"}, "has an invalid entry 'aoa_statements'"),
        ({"aoa_statements": [], "aoa_config_reverse": 1}, "has an invalid entry 'aoa_config_reverse'"),
        (["a -> b"], "aoa_config is not a mapping"),
    ],
)
def test_a_configuration_with_a_key_or_value_that_is_not_known_is_refused(config: object, message: str) -> None:
    with pytest.raises(MappingError, match=message):
        read_config(config)


HOSTILE = {
    "a long name": "a" * 1_000_000,
    "many names": ", ".join(f"n{index}" for index in range(20_000)) + " -> c, axis=0",
    "many placeholders": "m." + "$LAYER_ID" * 20_000 + " -> c",
    "many stars": "*".join(["m"] * 50_000) + " -> c",
    "a deep permutation": "a -> c, permute='[" + "1, " * 100_000 + "]'",
    "spaces": "a" + " " * 500_000 + "-> c" + "\t" * 500_000,
    "digits": "a -> c, axis=" + "9" * 500_000,
    "lines": "\n" * 500_000 + "a -> c",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_is_refused_in_bounded_time(kind: str) -> None:
    began = time.process_time()
    error = refusal(HOSTILE[kind], right={"c": (6, 4)})
    assert time.process_time() - began < 10
    assert all(len(line) < 3_000 for line in error.evidence)


def test_twice_the_tensors_take_about_twice_the_work() -> None:
    def work(layers: int) -> int:
        left = side({f"m.{index}.{part}": (2, 2) for index in range(layers) for part in "gu"})
        right = side({f"m.{index}.gu": (2, 4) for index in range(layers)})
        statement = "m.$LAYER_ID.g^T, m.$LAYER_ID.u^T -> m.$LAYER_ID.gu, fused_ffn"
        return calls(lambda: parse([statement], left, right))

    assert work(4_000) < 8 * work(500) * 1.1
