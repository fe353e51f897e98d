"""Figures of a difference: absolute, in representable numbers, and where it begins."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from paddleformers_fc.execute import diff_checkpoints
from paddleformers_fc.execute.diff_checkpoints import Deviation, DeviationSum

FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def compared(one: object, other: object, pieces: int = 1) -> Deviation:
    """The figures of two arrays, added in pieces."""
    left, right = np.asarray(one), np.asarray(other)
    comparison = DeviationSum(left.shape)
    for a, b in zip(np.array_split(left.ravel(), pieces), np.array_split(right.ravel(), pieces), strict=True):
        comparison.add(a, b)
    return comparison.result()


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: np.dtype(kind).name)
def test_neighbours_are_one_ulp_apart_over_the_whole_range(kind: type) -> None:
    width = np.dtype(kind).itemsize
    bits = np.unique(np.random.default_rng(3).integers(0, 1 << (8 * width - 1), 2000, f"u{width}"))
    pairs = np.stack([bits[:-1], bits[:-1] + bits.dtype.type(1)])
    one, other = pairs.view(np.dtype(kind))
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(one.astype(np.float64)) & np.isfinite(other.astype(np.float64))
    for sign in (1, -1):
        found = compared(one[finite] * sign, other[finite] * sign)
        assert (found.ulp, found.elements) == (1, int(finite.sum()))


def test_ulps_are_counted_across_zero() -> None:
    tiny = np.float32(1e-45)
    assert compared(np.array([tiny]), np.array([-tiny])).ulp == 3
    assert compared(np.array([np.float32(0)]), np.array([-np.float32(0)])).ulp == 1


def test_the_largest_of_all_pieces_and_the_first_index_of_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_checkpoints, "_CHUNK", 7)
    one = np.arange(60, dtype=np.float32).reshape(5, 12)
    other = one.copy()
    other[1, 3] += 0.5
    other[4, 2] -= 3
    for pieces in (1, 2, 9):
        found = compared(one, other, pieces)
        assert (found.elements, found.absolute, found.first) == (2, 3.0, (1, 3))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_difference_with_a_number_that_is_not_finite_has_no_absolute_value(number: float) -> None:
    found = compared(np.array([1.0, 2.0], np.float32), np.array([1.5, number], np.float32))
    assert found.absolute is None
    assert found.elements == 2


def test_equal_nans_are_no_difference() -> None:
    found = compared(np.array([np.nan, 1.0]), np.array([np.nan, 2.0]))
    assert (found.elements, found.absolute, found.first) == (1, 1.0, (1,))


def test_whole_numbers_and_scalars_have_an_absolute_difference_alone() -> None:
    found = compared(np.array(7, np.int64), np.array(3, np.int64))
    assert found == Deviation(1, 4.0, None, ())
