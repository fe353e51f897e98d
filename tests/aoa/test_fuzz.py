"""Text that means harm or nothing: a MappingError or a mapping, never another exception, in bounded time."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, strategies as st

from paddleformers_fc.aoa import AoaTensor, parse
from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping import prove
from tests.aoa.spaces import side
from tests.harness.sampling import thorough
from tests.harness.work import calls

LEFT = side({"a": (4, 6), "b": (4, 6), "m.0.w": (2, 4), "m.1.w": (2, 4), "m.0.e.0.x": (8,), "m.0.e.1.x": (8,), "s": ()})
RIGHT = side(
    {"a": (4, 6), "c": (6, 4), "m.0.v": (4, 2), "m.1.v": (4, 2), "m.0.y": (16,), "s": (), "r": (2, 2, 6)},
    {"m.0.y": (2,)},
)

NAMES = [*LEFT, *RIGHT, "t", "_", "m.$LAYER_ID.w", "m.$LAYER_ID.v", "m.$LAYER_ID.e.$EXPERT_ID.x", "m.0.e.*.x"]
NAMES += ["m.$LAYER_ID_OFFSET.w", "$LAYER_ID", "m.$FOO", "t[0:2]", "m.*.w", "a^T", "t^T", "*", "m.0.w^T", "axis"]
WORDS = [*NAMES, "->", "->", ",", ",", "=", ":", "[", "]", "0", "1", "2", "99999999", "'[1,0]'", "'[]'", "'bfloat16'"]
WORDS += ["axis=0", "axis=1", "fused_ffn", "fused_qkv", "fused_qkv_old", "num_heads=2", "num_key_value_groups=1"]
WORDS += [
    "reshape='[2, 2, 6]'",
    'reshape="[1,4,2,3]"',
    "permute='[1,0]'",
    'permute="[]"',
    "dtype='float16'",
    "src_dtype='float32'",
    "dst_dtype='bfloat16'",
]

sides = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(", ".join)
attributes = st.lists(st.sampled_from(WORDS[-16:]), max_size=3).map(
    lambda words: "".join(f", {word}" for word in words)
)
likely = st.builds(lambda left, right, rest: f"{left} -> {right}{rest}", sides, sides, attributes)
shuffled = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)
lines = st.one_of(likely, likely, shuffled, st.text(max_size=40))


@thorough(600)
@given(st.lists(lines, max_size=5), st.sampled_from([RIGHT, None]))
@example(["s -> s, axis=0"], RIGHT)
@example(["s^T, s -> c, axis=0"], RIGHT)
@example(["a -> a, permute='[]'", "a -> c"], RIGHT)
def test_any_text_is_a_mapping_or_a_mapping_error(text: list[str], right: dict[str, AoaTensor] | None) -> None:
    try:
        mapping = parse(text, LEFT, right)
        prove(mapping)
    except MappingError:
        return
    prove(mapping.reversed())


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
    with pytest.raises(MappingError) as caught:
        parse([HOSTILE[kind]], LEFT, RIGHT)
    assert time.process_time() - began < 10
    assert all(len(line) < 3_000 for line in caught.value.evidence)


def test_twice_the_tensors_take_about_twice_the_work() -> None:
    def work(layers: int) -> int:
        left = side({f"m.{index}.{part}": (2, 2) for index in range(layers) for part in "gu"})
        right = side({f"m.{index}.gu": (2, 4) for index in range(layers)})
        statement = "m.$LAYER_ID.g^T, m.$LAYER_ID.u^T -> m.$LAYER_ID.gu, fused_ffn"
        return calls(lambda: parse([statement], left, right))

    assert work(4_000) < 8 * work(500) * 1.1
