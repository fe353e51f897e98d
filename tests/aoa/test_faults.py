"""What is refused, and how the report shows it: the user's own text, the place, the cause, all statements at once."""

from __future__ import annotations

import pytest

from paddleformers_fc.aoa import AoaTensor, parse, parse_config, statements_of
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import Tie, prove
from tests.aoa.spaces import side

LEFT = {
    "a": (4, 6),
    "b": (4, 6),
    "x.1.w": (2, 2),
    "x.2.w": (2, 2),
    "e.0.w": (2,),
    "e.1.w": (2,),
    "r.0.0": (2,),
    "r.1.1": (2,),
}
RIGHT = {"c": (4, 6), "d": (8, 6), "y.1.w": (2, 2), "y.2.w": (2, 2)}


def refusal(*statements: str, left: object = None, right: object = None) -> MappingError:
    with pytest.raises(MappingError) as caught:
        parse(statements, side(left or LEFT), side(right or RIGHT))  # type: ignore[arg-type]
    return caught.value


ALONE = {
    "a -> c, axi=0": "`axi` is no attribute. Accepted: axis",
    "a - c": "`-` belongs to neither names nor numbers",
    "a -> c, axis=-1": "`-` belongs to neither names nor numbers",
    "a -> c # renamed": "The language has no comments",
    "a -> c\na -> c": "A statement is one line",
    "a -> c, permute='[1,0]": "The quote is not closed",
    "a => c": "`>` stands only in `->`",
    "a": "`->` is expected here, not the end of the statement",
    "-> c": "a name is expected here, not `->`",
    "a -> c c": "the end of the statement is expected here, not `c`",
    "a -> c,": "a name is expected here, not the end",
    "0.a -> c": "A name begins with a letter or `_`",
    "0a -> c": "A name begins with a letter or `_`, not with a digit",
    "a = c": "`->` is expected here, not `=`",
    "$LAYER_ID.a -> c": "a placeholder stands inside a name",
    "a/b -> c": "'/' is no character of the language",
    "a -> c^T": "nothing can be written to it",
    "a^T^T -> c": "`^` stands only in `^T`",
    "a^Tb -> c": "`^` stands only in `^T`",
    "a -> axis": "`axis` is a keyword and cannot name a tensor",
    "a -> c, axis=0, axis=1": "axis is given twice",
    "a -> c, axis=99999999999": "A number of 11 digits is larger than any tensor",
    "a -> c, axis='0'": "a number is expected here",
    "a -> c[2:2]": "The array is empty",
    "a -> c[0]": "`:` is expected here, not `]`",
    "a^T[0:2] -> c": "An array of names is not transposed as a whole",
    "_[0:2] -> c": "`_` stands for nothing",
    "_ -> _": "`_` stands alone on its side",
    "a, _ -> c, axis=0": "`_` stands alone on its side",
    "a -> _, axis=0": "What is added or removed has no attributes",
    "x.$LAYER_ID.w -> _": "Beside `_` stands one tensor's whole name",
    "a, b -> d": "Along which axis the names lie is not said",
    "a, b -> c, d, axis=0": "Several names on both sides",
    "a, b -> d, axis=0, dtype='float16'": "dtype cannot stand in a statement of several names",
    "a -> c, permute='[0,0]'": "[0, 0] does not name every axis once",
    "a -> c, permute='(1,0)'": "This is no list of axes",
    "a -> c, permute='[1,0,2]'": "orders 3 axes, the tensor has shape [4, 6]",
    "a -> c, dtype='int8'": "'int8' is no dtype of the language. Accepted: float16, float32, bfloat16",
    "a -> c, dst_dtype='float16', src_dtype='float32'": "more than one statement from one name to one name can do",
    "a -> c, permute='[1,0]', dtype='float16'": "more than one statement from one name to one name can do",
    "a -> c, src_dtype='float16', dst_dtype='float32'": "src_dtype is float16, and what is read is float32",
    "a -> c, num_heads=2": "num_heads is more than one statement",
    "a, b -> c, fused_ffn, fused_qkv": "A statement has one fused layout",
    "a, b, b -> c, fused_ffn": "fused_ffn is not from 3 to 1 names",
    "a -> c, fused_qkv, num_heads=2, num_key_value_groups=1": "fused_qkv is not from 1 to 1 names",
    "a, b, b -> c, fused_qkv, num_heads=2": "fused_qkv needs num_key_value_groups, at least 1",
    "a, b, b -> c, fused_qkv, num_heads=3, num_key_value_groups=2": "3 query heads are not shared evenly by 2 kv heads",
    "a, b -> c, fused_ffn, dtype='float16'": "dtype cannot stand in a statement of fused_ffn",
    "a -> c, fused_ffn, axis=2": "There is no axis 2 in shape [4, 6]. Accepted: axis=1",
    "a, e.0.w -> d, axis=0": "Shapes [4, 6] and [2] differ on another axis than 0",
    "a -> p, q, r, axis=0": "Length 4 on axis 0 is not 3 equal lengths",
    "a, e.0.w -> c, fused_ffn, axis=0": "Gate and up have lengths [4, 2] on axis 0",
    "a, b, b -> c, fused_qkv, num_heads=5, num_key_value_groups=1": "Length 6 on axis 1 is not 5 heads",
    "a, b, b -> c, fused_qkv_old, num_heads=6, num_key_value_groups=3": "are not 6, 3 and 3 equal heads",
    "a -> c, c, axis=0": "c is written twice by one statement",
    "aa -> c": "`aa` is no tensor of the left side, and no statement before this one assigns it. Accepted: `a`",
    "x.7.w -> c": "Accepted: `x.1.w` or another of 2 such names",
    "a -> cc": "`cc` is no tensor of the right side, and no later statement reads it. Accepted: `c`",
    "zz -> _": "`zz` is no tensor of the left side",
    "_ -> zz": "`zz` is no tensor of the right side",
    "x.$LAYER_ID.v -> y.$LAYER_ID.w": "`x.$LAYER_ID.v` matches no tensor on the left side",
    "x.$LAYER.w -> y.$LAYER.w": "`x.$LAYER.w` holds a placeholder that is not known",
    "x.$LAYER_ID.w -> y.1.w": "`y.1.w` does not hold the same placeholders as the first name",
    "x.$LAYER_ID.$LAYER_ID -> y.$LAYER_ID.w": "holds a placeholder twice",
    "x.1$LAYER_ID.w -> y.$LAYER_ID.w": "it is not clear where a number ends",
    "r.$LAYER_ID.$EXPERT_ID -> y.$LAYER_ID.$EXPERT_ID": "are multiplied (2 x 2), and only 2 of these tensors exist",
    "x.$LAYER_ID_OFFSET.w^T -> y.$LAYER_ID_OFFSET.w": "stands alone in a name, and the name is not transposed",
    "e.$LAYER_ID_OFFSET.w -> y.$LAYER_ID_OFFSET.w": "leads from N to N - 1, and there is a tensor with N = 0",
    "x.*.*.w -> c, axis=0": "A name holds one `*`",
    "x.*.v -> c, axis=0": "`x.*.v` matches no tensor of its side",
    "x.*.w^T -> c, axis=0": "What `*` stands for is not transposed as a whole",
    "x.$LAYER_ID.*.w -> y.$LAYER_ID.w": "The first name with a placeholder tells the numbers",
    "a -> d": "`d` would have shape [4, 6], it has [8, 6]",
    "a -> p[0:900000000], axis=0": "far more than these tensors need",
    "a, b, b -> c, fused_qkv, num_heads=900000000, num_key_value_groups=900000000": "is not 900000000 heads",
}


@pytest.mark.parametrize("statement", ALONE)
def test_a_statement_is_refused_with_its_cause(statement: str) -> None:
    error = refusal(statement)
    assert error.where == "aoa_statements"
    assert ALONE[statement] in " ".join(" ".join(line.split()) for line in error.evidence)


def test_a_number_that_placeholders_do_not_write_is_not_matched_by_them() -> None:
    error = refusal("m.$LAYER_ID.w -> n.$LAYER_ID.w", left={"m.007.w": (2,)}, right={"n.7.w": (2,)})
    assert "`m.$LAYER_ID.w` matches no tensor on the left side" in str(error)


TOGETHER = [
    (["a -> c", "b -> c"], "`c` was assigned by statement 1 and would be lost"),
    (["a -> c", "a -> _"], "`a` is removed here and read by statement 1"),
    (["a -> c", "_ -> c"], "`c` keeps its initial values here and is assigned by statement 1"),
    (["a -> t, dtype='float16'", "t -> c, dtype='bfloat16'"], "The numbers were converted to float16 before"),
    (["a, b -> t, axis=0", "t -> d, fused_ffn, axis=0"], "This is made of a, b: whose shards are meant is not said"),
    (["a -> t, fused_ffn", "t -> p, q, axis=0"], "t is split later: whose shards are meant is not said"),
]


@pytest.mark.parametrize(("statements", "cause"), TOGETHER, ids=[" ; ".join(case[0]) for case in TOGETHER])
def test_statements_that_contradict_each_other_are_named(statements: list[str], cause: str) -> None:
    assert cause in str(refusal(*statements))


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


def test_a_name_that_a_faulty_statement_may_have_meant_to_assign_is_passed_over() -> None:
    error = refusal("a -> t.0, axi=1", "t.0 -> c", "u.0 -> c")
    assert len(error.evidence) == 2
    assert "`u.0` is no tensor" in error.evidence[1]


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
    assert "equal names: `a` would have shape [2], it has [3]." in str(caught.value)
    assert "src_dtype='float32', dst_dtype='bfloat16'" in str(caught.value)


def test_a_dtype_that_no_statement_changes_is_named_with_the_statement() -> None:
    left, right = {"a": AoaTensor((2,), "float32", (1,))}, {"b": AoaTensor((2,), "bfloat16", (1,))}
    with pytest.raises(MappingError, match="statement 1: a -> b") as caught:
        parse(["a -> b"], left, right)
    assert "`b` is bfloat16, what fills it is float32" in str(caught.value)


def test_what_nothing_fills_and_what_nothing_reads_is_left_to_the_proof() -> None:
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
    with pytest.raises(MappingError, match="`head` is tied to `embed`, and is made of something else"):
        parse(["other -> head"], left, TIED, [Tie("embed", "head")])


def test_a_reversed_configuration_is_the_reverse_of_its_statements() -> None:
    stored, wanted = side({"gu": (3, 8)}, {"gu": (1, 2)}), side({"g": (4, 3), "u": (4, 3)})
    config = {"aoa_statements": ["g^T, u^T -> gu, fused_ffn"], "aoa_config_reverse": True}
    forward = parse(["g^T, u^T -> gu, fused_ffn"], wanted, stored)
    assert parse_config(config, stored, wanted) == forward.reversed()
    assert parse_config({**config, "aoa_config_reverse": False}, wanted, stored) == forward
    with pytest.raises(MappingError, match="reversed only where both sides are known"):
        parse_config(config, stored, None)


@pytest.mark.parametrize(
    ("config", "entry"),
    [
        ({"aoa_statement": []}, "aoa_statement"),
        ({"aoa_statements": "a -> b"}, "aoa_statements"),
        ({"aoa_statements": [], "aoa_config_reverse": 1}, "aoa_config_reverse"),
    ],
)
def test_a_configuration_with_a_key_or_value_that_is_not_known_is_refused(
    config: dict[str, object], entry: str
) -> None:
    with pytest.raises(MappingError, match=f"has an entry '{entry}'"):
        parse_config(config, {}, {})
    with pytest.raises(MappingError, match=f"has an entry '{entry}'"):
        statements_of(config)


@pytest.mark.parametrize("config", ["a -> b", ["a -> b"], 3])
def test_a_configuration_that_is_no_mapping_is_refused(config: object) -> None:
    with pytest.raises(MappingError, match="no mapping of keys to values"):
        statements_of(config)
