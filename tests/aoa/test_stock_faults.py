"""Where Paddle 3.3.1 moves wrong numbers without a word: each fault reproduced, and ours right or refused.

The first group is reproduced through ``load_state_dict`` itself, the rest through the plan that it follows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.distributed import load_state_dict, save_state_dict
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from paddleformers_fc.aoa import AoaTensor, Hints, parse, parse_config, render
from paddleformers_fc.errors import MappingError
from paddleformers_fc.formats.catalog import Catalog, StoredFragment
from paddleformers_fc.layout import Shard
from paddleformers_fc.layout.roles import MASTER_WEIGHT
from paddleformers_fc.mapping import Tie, prove
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan import ReadSource, plan_reads
from tests.aoa import stock
from tests.aoa.spaces import side
from tests.mapping.numbers import Arrays, moved, numbered
from tests.plan.stored import stored_tensor

logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.ERROR)

Values = dict[str, tuple[np.ndarray, str]]


def loaded(directory: Path, statements: Sequence[str], stored: Values, wanted: Values) -> dict[str, list[float]]:
    """What Paddle's own load leaves in tensors that held the values of ``wanted``."""

    def weights(values: Values) -> dict[str, ShardedWeight]:
        tensors = {name: paddle.to_tensor(array, place="cpu").astype(dtype) for name, (array, dtype) in values.items()}
        return {
            name: ShardedWeight(name, tensor, tuple(tensor.shape), tuple(tensor.shape), (0,) * tensor.ndim)
            for name, tensor in tensors.items()
        }

    save_state_dict(weights(stored), str(directory))
    live = weights(wanted)
    load_state_dict(live, str(directory), aoa_config={"aoa_statements": list(statements), "enable_traceback": False})
    return {name: weight.local_tensor.astype("float32").flatten().tolist() for name, weight in live.items()}


def ascending(*shape: int, dtype: str = "float32") -> tuple[np.ndarray, str]:
    return np.arange(1, 1 + np.prod(shape), dtype="float32").reshape(shape), dtype


def initial(*shape: int, dtype: str = "float32") -> tuple[np.ndarray, str]:
    return np.full(shape, -1, dtype="float32"), dtype


def test_one_source_for_two_targets_leaves_one_of_them_unloaded_and_is_refused(tmp_path: Path) -> None:
    left, right, statements = side({"embed": (4,)}), side({"embed": (4,), "head": (4,)}), ["embed -> head"]
    theirs = loaded(tmp_path, statements, {"embed": ascending(4)}, {"embed": initial(4), "head": initial(4)})
    assert theirs == {"embed": [-1, -1, -1, -1], "head": [1, 2, 3, 4]}
    with pytest.raises(MappingError, match="`embed` is read more than once"):
        parse(statements, left, right)
    prove(parse(statements, left, right, [Tie("embed", "head")]))


def test_a_tensor_of_another_shape_is_filled_in_part_and_is_refused(tmp_path: Path) -> None:
    statements = ["a -> b"]
    larger = loaded(tmp_path / "larger", statements, {"a": ascending(4, 4)}, {"b": initial(6, 4)})
    assert larger["b"][-8:] == [-1] * 8
    smaller = loaded(tmp_path / "smaller", statements, {"a": ascending(4, 4)}, {"b": initial(2, 4)})
    assert smaller["b"] == list(range(1, 9))
    for shape in ((6, 4), (2, 4)):
        with pytest.raises(MappingError, match="would have shape"):
            parse(statements, side({"a": (4, 4)}), side({"b": shape}))


def test_a_cast_of_the_model_reaches_its_master_weight_and_ours_does_not(tmp_path: Path) -> None:
    statements = ["a -> a, dtype='bfloat16'"]
    stored, wanted = (
        {"a": ascending(4), "a.w_0": ascending(4)},
        {"a": initial(4, dtype="bfloat16"), "a.w_0": initial(4)},
    )
    theirs = loaded(tmp_path, statements, stored, wanted)
    assert theirs["a"] == [1, 2, 3, 4]
    assert theirs["a.w_0"] != [1, 2, 3, 4]
    left, right = {"a": AoaTensor((4,), "float32", (1,))}, {"a": AoaTensor((4,), "bfloat16", (1,))}
    (entry,) = stock.plan(statements, left, {"a": AoaTensor((4,), "float32", (1,))}, suffix=".w_0")
    assert entry.postprocess_list == ["bfloat16"]

    mapping = parse(statements, left, right)
    prove(mapping)
    stored_weight = stored_tensor("a.w_0", "float32", (4,), (StoredFragment("file", 0, whole((4,))),))
    source = ReadSource(Catalog(tmp_path, {MASTER_WEIGHT: {"a.w_0": stored_weight}}), mapping)
    plan = plan_reads(source, {MASTER_WEIGHT: {"a.w_0": Shard("a.w_0", "float32", (4,), whole((4,)))}})
    assert plan.report.empty
    assert [item.stored.dtype for item in plan.items] == ["float32"]
    narrow = plan_reads(source, {MASTER_WEIGHT: {"a.w_0": Shard("a.w_0", "bfloat16", (4,), whole((4,)))}})
    assert narrow.report.lines["dtype"] == {"a.w_0: stored float32, wanted bfloat16"}


def test_a_cast_to_a_dtype_whose_name_holds_the_wanted_one_is_taken_for_it_and_is_refused(tmp_path: Path) -> None:
    statements = ["a -> b, dtype='bfloat16'"]
    theirs = loaded(tmp_path, statements, {"a": ascending(4)}, {"b": initial(4, dtype="float16")})
    assert theirs["b"] != [1, 2, 3, 4]
    with pytest.raises(MappingError, match="`b` is float16, what fills it is bfloat16"):
        parse(statements, side({"a": (4,)}), {"b": AoaTensor((4,), "float16", (1,))})


def both(statements: list[str], left: stock.Tensors, right: stock.Tensors, *, reverse: bool) -> tuple[Arrays, Arrays]:
    """What Paddle and what we move, and that ours is proved."""
    config = {"aoa_statements": statements, "aoa_config_reverse": reverse}
    mapping = parse_config(config, left, right)
    prove(mapping)
    arrays = numbered(mapping)
    return stock.moved(stock.plan(statements, left, right, reverse=reverse), arrays, right), moved(mapping, arrays)


def test_the_reverse_of_a_fused_ffn_loses_the_ranks_and_ours_keeps_them() -> None:
    left, right = side({"gu": (3, 8)}, {"gu": (1, 2)}), side({"g": (3, 4), "u": (3, 4)})
    theirs, ours = both(["g, u -> gu, fused_ffn"], left, right, reverse=True)
    fused = np.arange(24).reshape(3, 8)
    assert (ours["g"] == fused[:, [0, 1, 4, 5]]).all()
    assert (theirs["g"] != ours["g"]).any()


def test_the_reverse_of_a_fused_qkv_per_rank_loses_the_ranks_and_ours_keeps_them() -> None:
    left, right = side({"qkv": (3, 12)}, {"qkv": (1, 2)}), side({"q": (3, 4), "k": (3, 4), "v": (3, 4)})
    statement = "q, k, v -> qkv, fused_qkv_old, num_heads=2, num_key_value_groups=2"
    theirs, ours = both([statement], left, right, reverse=True)
    fused = np.arange(36).reshape(3, 12)
    assert (ours["k"] == fused[:, [2, 3, 8, 9]]).all()
    assert (theirs["k"] != ours["k"]).any()


def test_the_reverse_of_an_uneven_concat_is_split_evenly_and_ours_where_it_was_joined() -> None:
    left, right = side({"c": (6, 2)}), side({"a": (2, 2), "b": (4, 2)})
    theirs, ours = both(["a, b -> c, axis=0"], left, right, reverse=True)
    joined = np.arange(12).reshape(6, 2)
    assert (ours["b"] == joined[2:]).all()
    assert (theirs["b"] == -1).any()


def test_a_transposed_source_of_a_fused_ffn_loses_its_ranks_and_ours_keeps_them() -> None:
    left, right = side({"gu": (3, 8)}, {"gu": (1, 2)}), side({"g": (4, 3), "u": (4, 3)})
    theirs, ours = both(["gu^T -> g, u, fused_ffn, axis=0"], left, right, reverse=False)
    fused = np.arange(24).reshape(3, 8)
    assert (ours["u"] == fused.T[[2, 3, 6, 7]]).all()
    assert (theirs["u"] != ours["u"]).any()


def test_what_is_written_for_the_reverse_avoids_the_faults_of_paddles_own() -> None:
    left, right = side({"g": (4, 3), "u": (4, 3)}), side({"gu": (3, 8)}, {"gu": (1, 2)})
    forward = parse(["g^T, u^T -> gu, fused_ffn"], left, right)
    text = render(forward, Hints(right={"gu": (1, 2)}), reverse=True)
    theirs, ours = both(text, right, left, reverse=False)
    assert all((theirs[name] == ours[name]).all() for name in ours)


QUIET = {
    "a pattern that matches nothing": (
        ["h.$LAYER_ID.q -> m.$LAYER_ID.w"],
        {"m.0.w": (2,)},
        {"m.0.w": (2,)},
        {},
        "matches no tensor on the left side",
    ),
    "experts of every layer by a wildcard": (
        ["m.$LAYER_ID.*.w -> m.$LAYER_ID.w, axis=0"],
        {"m.0.w": (2,), "m.0.0.w": (1,)},
        {"m.0.w": (2,)},
        {},
        "The first name with a placeholder tells the numbers",
    ),
    "layers that move down, transposed": (
        ["h.$LAYER_ID_OFFSET.w^T -> m.$LAYER_ID_OFFSET.w"],
        {"h.1.w": (2, 2), "m.0.w": (2, 2)},
        {"m.0.w": (2, 2)},
        {},
        "the name is not transposed",
    ),
    "a target that is assigned twice": (["a -> c", "b -> c"], {"a": (2,), "b": (2,)}, {"c": (2,)}, {}, "would be lost"),
    "gate and up of unequal lengths": (
        ["g, u -> gu, fused_ffn, axis=0"],
        {"g": (2,), "u": (6,)},
        {"gu": (8,)},
        {"gu": (2,)},
        "they are not equal",
    ),
    "parts along an axis that is not the one that is cut": (
        ["g, u -> gu, fused_ffn"],
        {"g": (2, 4), "u": (2, 4)},
        {"gu": (2, 8)},
        {"gu": (2, 1)},
        "parts and shards do not follow each other",
    ),
    "heads that the ranks do not share": (
        ["q, k, v -> c, fused_qkv_old, num_heads=6, num_key_value_groups=6, axis=0"],
        {"q": (6,), "k": (6,), "v": (6,)},
        {"c": (18,)},
        {"c": (4,)},
        "are not shared evenly by 4 ranks",
    ),
    "an attribute that a fused layout does not have": (
        ["g, u -> gu, fused_ffn, axis=0, dtype='float16'"],
        {"g": (4,), "u": (4,)},
        {"gu": (8,)},
        {},
        "dtype cannot stand in a statement of fused_ffn",
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
