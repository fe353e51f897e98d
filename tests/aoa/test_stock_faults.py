"""Where Paddle 3.3.1 moves wrong numbers without a word: each fault reproduced, and ours right or refused.

The first group is reproduced through ``load_state_dict`` itself, the rest through the plan that it follows.
"""

from __future__ import annotations

import logging

import pytest

from paddleformers_fc.aoa import parse
from paddleformers_fc.errors import MappingError
from tests.aoa import stock
from tests.aoa.spaces import side

logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.ERROR)

QUIET = {
    "a pattern that matches nothing": (
        ["h.$LAYER_ID.q -> m.$LAYER_ID.w"],
        {"m.0.w": (2,)},
        {"m.0.w": (2,)},
        {},
        "matches no tensor of the left side",
    ),
    "experts of every layer by a wildcard": (
        ["m.$LAYER_ID.*.w -> m.$LAYER_ID.w, axis=0"],
        {"m.0.w": (2,), "m.0.0.w": (1,)},
        {"m.0.w": (2,)},
        {},
        "The first name with a placeholder contains",
    ),
    "layers that move down, transposed": (
        ["h.$LAYER_ID_OFFSET.w^T -> m.$LAYER_ID_OFFSET.w"],
        {"h.1.w": (2, 2), "m.0.w": (2, 2)},
        {"m.0.w": (2, 2)},
        {},
        "is not supported with other placeholders",
    ),
    "a target that is assigned twice": (
        ["a -> c", "b -> c"],
        {"a": (2,), "b": (2,)},
        {"c": (2,)},
        {},
        "no statement has read it since",
    ),
    "gate and up of unequal lengths": (
        ["g, u -> gu, fused_ffn, axis=0"],
        {"g": (2,), "u": (6,)},
        {"gu": (8,)},
        {"gu": (2,)},
        "Gate and up have different lengths",
    ),
    "parts along an axis that is not the one that is cut": (
        ["g, u -> gu, fused_ffn"],
        {"g": (2, 4), "u": (2, 4)},
        {"gu": (2, 8)},
        {"gu": (2, 1)},
        "tensor parallelism cuts gu on axis 0",
    ),
    "heads that the ranks do not share": (
        ["q, k, v -> c, fused_qkv_old, num_heads=6, num_key_value_groups=6, axis=0"],
        {"q": (6,), "k": (6,), "v": (6,)},
        {"c": (18,)},
        {"c": (4,)},
        "are not divisible among 4 ranks",
    ),
    "an attribute that a fused layout does not have": (
        ["g, u -> gu, fused_ffn, axis=0, dtype='float16'"],
        {"g": (4,), "u": (4,)},
        {"gu": (8,)},
        {},
        "dtype is not supported in a statement of fused_ffn",
    ),
    "a name that nothing reads": (["a -> b", "c -> x"], {"a": (2,), "c": (2,)}, {"b": (2,)}, {}, "no later statement"),
    "a source that is removed and read": (
        ["a -> b", "a -> _"],
        {"a": (2,)},
        {"b": (2,)},
        {},
        "is removed here and read",
    ),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_paddle_passes_over_in_silence_is_refused(case: str) -> None:
    statements, left_shapes, right_shapes, cuts, cause = QUIET[case]
    left, right = side(left_shapes), side(right_shapes, cuts)
    stock.plan(statements, left, right)
    with pytest.raises(MappingError, match=cause):
        parse(statements, left, right)
