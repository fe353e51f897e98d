"""Shards: flattened ranges are boxes, live weights are described by their fields, and placements give boxes."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import MismatchError
from paddleformers_fc.layout.live import describe_roles, facts_of
from paddleformers_fc.layout.roles import split_state_name
from paddleformers_fc.layout.shards import AxisShard, Shard, coordinate_of, placed_box
from paddleformers_fc.mapping.boxes import Box, cover_faults, shifted, whole
from tests.harness.sampling import thorough


@thorough(300)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_the_fragments_of_a_range_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    shard = Shard("x", "float32", tuple(shape), whole(tuple(shape)), (begin, end))
    values = np.arange(size).reshape(shape)
    out = np.full(end - begin, -1)
    for fragment in shard.fragments:
        part = values[tuple(slice(a, b) for a, b in zip(fragment.box.lo, fragment.box.hi, strict=True))].ravel()
        out[fragment.start : fragment.start + part.size] = part
    assert (out == np.arange(begin, end)).all()
    assert len(shard.fragments) <= max(1, 2 * len(shape) - 1)


def test_the_fragments_of_a_range_of_a_tensor_parallel_shard_are_in_global_coordinates() -> None:
    shard = Shard("x", "float32", (4, 8), shifted((4, 4), (0, 4)), (2, 10))
    assert [str(fragment.box) for fragment in shard.fragments] == ["[0:1, 6:8]", "[1:2, 4:8]", "[2:3, 4:6]"]


def test_cuts_determine_the_tensor_parallel_degree() -> None:
    assert Shard("x", "float32", (4, 8), shifted((4, 2), (0, 6))).cuts == (1, 4)


def test_states_are_split_from_their_parameters() -> None:
    state = split_state_name("optimizer_state", "model.w.weight.moment1_0")
    assert (state.parameter, state.suffix, state.scalar) == ("model.w.weight", ".moment1_0", False)
    assert split_state_name("optimizer_state", "w.beta2_pow_acc_0").scalar
    assert split_state_name("model_state", "strange.w_0").parameter == "strange.w_0"


def weight(shape: tuple[int, ...], **fields: object) -> SimpleNamespace:
    made = SimpleNamespace(
        key="w",
        local_tensor=SimpleNamespace(shape=list(shape), dtype="paddle.float32"),
        local_shape=shape,
        global_shape=shape,
        global_offset=(0,) * len(shape),
        is_flattened=False,
        flattened_range=None,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_live_weight_is_described_by_its_fields() -> None:
    live = weight((2, 4), global_shape=(4, 4), global_offset=(2, 0))
    shard = describe_roles({"model_state": {"w": live}})["model_state"]["w"]
    assert shard == Shard("w", "float32", (4, 4), Box((2, 0), (4, 4)))


def test_a_state_that_has_not_its_parameters_shape_is_refused() -> None:
    roles = {"model_state": {"w": weight((2, 4))}, "optimizer_state": {"w.moment1_0": weight((1,))}}
    with pytest.raises(MismatchError, match=r"w.moment1_0: shape \[1\] is not its parameter's \[2, 4\]"):
        describe_roles(roles)


def test_weights_with_the_same_impossible_description_are_all_named() -> None:
    alike = {name: weight((2, 4), local_shape=(4, 4), global_shape=(4, 4)) for name in ("v", "w")}
    sound = {name: weight((4, 4), global_shape=(8, 4), global_offset=(4, 0)) for name in ("x", "y")}
    with pytest.raises(MismatchError) as caught:
        describe_roles({"model_state": {**alike, **sound}})
    assert caught.value.evidence == tuple(f"{name}: the tensor has 8 elements, its shard 16" for name in "vw")
    shards = describe_roles({"model_state": sound})["model_state"]
    assert shards == {name: Shard(name, "float32", (8, 4), Box((4, 0), (8, 4))) for name in ("x", "y")}


UNLIKE: dict[str, dict[str, object]] = {
    "a shard at another place": {"global_offset": (2, 0)},
    "a shard of another shape": {"local_shape": (4, 2)},
    "a shard of a larger tensor": {"global_shape": (8, 4)},
    "a range": {"is_flattened": True, "flattened_range": slice(0, 8)},
    "the next range": {"local_shape": (4, 4), "is_flattened": True, "flattened_range": slice(8, 16)},
}


def test_each_of_several_weights_is_described_as_itself() -> None:
    usual = weight((2, 4), global_shape=(4, 4))
    weights = {"usual": usual, **{name: SimpleNamespace(**{**vars(usual), **one}) for name, one in UNLIKE.items()}}
    assert describe_roles({"model_state": weights})["model_state"] == {
        name: describe_roles({"model_state": {name: one}})["model_state"][name] for name, one in weights.items()
    }


def test_the_facts_of_weights_differ_where_their_roles_names_or_shards_do() -> None:
    usual = weight((2, 4), global_shape=(4, 4))
    weights = [usual, *(SimpleNamespace(**{**vars(usual), **one}) for one in UNLIKE.values())]
    found = [
        facts_of({role: {name: one}}) for one in weights for role in ("model_state", "master_weight") for name in "vw"
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("box", "flat", "message"),
    [
        (Box((0, 0), (4, 8)), (0, 32), None),
        (Box((0, 0), (4, 8)), (32, 32), None),
        (Box((0, 0), (4, 8)), (0, 33), "range 0:33 is outside its 32 elements"),
        (Box((0, 0), (4, 8)), (-1, 3), "range -1:3 is outside its 32 elements"),
        (Box((0, 0), (4, 8)), (5, 4), "range 5:4 is outside its 32 elements"),
        (Box((2, 0), (4, 8)), (0, 17), "range 0:17 is outside its 16 elements"),
        (Box((0, 0), (4, 9)), None, "box [0:4, 0:9] is outside shape [4, 8]"),
        (Box((0, 0), (5, 8)), None, "box [0:5, 0:8] is outside shape [4, 8]"),
        (Box((0,), (4,)), None, "box [0:4] is outside shape [4, 8]"),
    ],
)
def test_a_shard_that_is_larger_than_its_tensor_by_one_is_impossible(
    box: Box, flat: tuple[int, int] | None, message: str | None
) -> None:
    assert list(Shard("w", "float32", (4, 8), box, flat).faults()) == ([] if message is None else [f"w: {message}"])


# ---- Boxes from meshes and placements.


def test_all_parts_but_the_last_are_equally_long() -> None:
    rows = [placed_box((7, 2), (3,), [AxisShard(0)], (place,)) for place in range(3)]
    assert rows == [Box((0, 0), (3, 2)), Box((3, 0), (6, 2)), Box((6, 0), (7, 2))]
    assert [placed_box((6,), (4,), [AxisShard(0)], (place,)).shape for place in range(4)] == [(2,), (2,), (2,), (0,)]


def test_a_rank_beyond_the_length_has_an_empty_box() -> None:
    assert placed_box((2,), (4,), [AxisShard(0)], (3,)) == Box((2,), (2,))


def test_axes_of_a_mesh_divide_one_axis_in_turn() -> None:
    both = [AxisShard(0), AxisShard(0)]
    assert [placed_box((5,), (2, 2), both, place).shape for place in product(range(2), repeat=2)] == [
        (2,),
        (1,),
        (1,),
        (1,),
    ]
    reversed_order = [AxisShard(0, order=1), AxisShard(0)]
    assert placed_box((8,), (2, 2), reversed_order, (0, 1)) == Box((4,), (6,))
    assert placed_box((8,), (2, 2), both, (0, 1)) == Box((2,), (4,))


def test_ranks_have_row_major_coordinates() -> None:
    assert coordinate_of(7, (2, 3), [2, 3, 5, 7, 11, 13]) == (1, 0)
    assert coordinate_of(4, (2, 3), [2, 3, 5, 7, 11, 13]) is None
    assert coordinate_of(0, (), [0]) == ()


@given(st.data())
def test_boxes_of_all_ranks_tile_a_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes = st.none() | st.builds(AxisShard, st.integers(0, len(shape) - 1), st.integers(0, 2))
    placements = data.draw(st.lists(axes, min_size=len(mesh), max_size=len(mesh)))
    # Replicas have the boxes of the first rank along their axis.
    held = [range(length if one else 1) for length, one in zip(mesh, placements, strict=True)]
    boxes = [placed_box(shape, mesh, placements, place) for place in product(*held)]
    found = [box for box in boxes if box.volume]
    assert not cover_faults(whole(shape), found)
    assert sum(box.volume for box in found) == math.prod(shape)
    for axis, one in enumerate(placements):
        if one is None and mesh[axis] > 1:
            last = tuple(mesh[axis] - 1 if index == axis else 0 for index in range(len(mesh)))
            first = (0,) * len(mesh)
            assert placed_box(shape, mesh, placements, last) == placed_box(shape, mesh, placements, first)
