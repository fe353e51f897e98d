"""Boxes from meshes and placements: examples by hand, and tilings of any tensor."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given, strategies as st

from paddleformers_fc.layout.shards import AxisShard, coordinate_of, placed_box
from paddleformers_fc.mapping.boxes import Box, cover_faults, whole


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
