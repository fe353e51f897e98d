"""Boxes: tiling is decided exactly, and boxes are found by bisection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from paddleformers_fc.errors import MappingError
from paddleformers_fc.mapping.boxes import Box, BoxFinder, cover_faults, whole
from tests.harness.sampling import thorough
from tests.mapping.numbers import slices

BOUNDS = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)


@st.composite
def boxes(draw: st.DrawFn, rank: int) -> Box:
    pairs = [draw(BOUNDS) for _ in range(rank)]
    return Box(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


@thorough(300)
@given(st.integers(0, 3).flatmap(lambda rank: st.lists(boxes(rank), max_size=5).map(lambda b: (rank, b))))
def test_boxes_tile_exactly_when_every_element_is_counted_once(case: tuple[int, list[Box]]) -> None:
    rank, found = case
    outer = whole((5,) * rank)
    count = np.zeros(outer.shape, int)
    for box in found:
        count[slices(box)] += 1
    assert (not cover_faults(outer, found)) == bool((count == 1).all())


def test_the_faults_of_a_tensor_and_the_work_to_find_them_are_bounded() -> None:
    gaps = [Box((2 * i,), (2 * i + 1,)) for i in range(100)]
    assert [fault.where.lo for fault in cover_faults(whole((200,)), gaps)] == [(2 * i + 1,) for i in range(64)]

    def crossed(count: int) -> list[Box]:
        """As many rows as columns next to them: work that is quadratic in their number."""
        rows = [Box((0, i), (count, i + 1)) for i in range(count)]
        return [*rows, *(Box((i, count), (i + 1, 2 * count)) for i in range(count))]

    assert not cover_faults(whole((100, 200)), crossed(100))
    with pytest.raises(MappingError, match="The 600 boxes of a tensor overlap in more ways than in any layout"):
        cover_faults(whole((300, 600)), crossed(300))


@thorough(200)
@given(st.lists(boxes(2), max_size=6), boxes(2))
def test_the_finder_returns_every_box_that_touches(found: list[Box], probe: Box) -> None:
    near = set(BoxFinder(found).near(probe))
    assert near >= {i for i, box in enumerate(found) if box.intersect(probe) is not None}


def test_the_finder_looks_only_at_neighbours_in_a_row_of_boxes() -> None:
    row = [Box((4 * i, 0), (4 * i + 4, 8)) for i in range(100)]
    assert list(BoxFinder(row).near(Box((41, 0), (50, 8)))) == [10, 11, 12]


def test_the_finder_looks_only_at_neighbours_in_a_stack_of_rows() -> None:
    stack = [Box((e, 0, 4 * part), (e + 1, 8, 4 * part + 4)) for e in range(50) for part in range(6)]
    assert list(BoxFinder(stack).near(Box((20, 0, 5), (22, 8, 9)))) == [121, 122, 127, 128]
