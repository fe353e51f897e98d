"""Collectives over gloo, against numpy."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

from verification.forkserver import ForkServer

SIZE = 3
DTYPES = ("float32", "float16", "bfloat16", "int64")


def own(rank: int) -> np.ndarray[Any, Any]:
    """What rank ``rank`` contributes: a copy of the jobs' formula, which imports Paddle."""
    return (np.arange(12).reshape(6, 2) + 10 * rank).astype("float32")


@pytest.fixture(scope="module", params=DTYPES)
def results(request: pytest.FixtureRequest, ranks: ForkServer) -> tuple[dict[str, Any], ...]:
    """By rank: the result of each collective."""
    return ranks.run("tests.cpu_runtime.jobs_collectives:collectives", SIZE, {"dtype": request.param}).values


ALL = [own(rank) for rank in range(SIZE)]
SUM = reduce(np.add, ALL)


PARTS = [np.split(array, SIZE) for array in ALL]
RECEIVED = [[PARTS[source][rank] for source in range(SIZE)] for rank in range(SIZE)]
CUTS = [np.split(array, [rank + 1, rank + 2]) for rank, array in enumerate(ALL)]
EXPECTED = {
    "all_reduce": [SUM] * SIZE,
    "all_reduce_max": [ALL[-1]] * SIZE,
    "broadcast": [ALL[2]] * SIZE,
    "all_gather": [np.stack(ALL)] * SIZE,
    "all_gather_into_tensor": [np.concatenate(ALL)] * SIZE,
    "reduce_scatter_tensor": np.split(SUM, SIZE),
    "reduce_scatter": np.split(SUM, SIZE),
    "all_to_all": RECEIVED,
    "all_to_all_tensor": [np.concatenate(parts) for parts in RECEIVED],
    "all_to_all_single": [np.concatenate([CUTS[source][rank] for source in range(SIZE)]) for rank in range(SIZE)],
    "scatter": np.split(ALL[0], SIZE),
}
"""What every rank gets of each collective; ``reduce`` leaves its sum on rank 1 alone."""


@pytest.mark.parametrize("name", EXPECTED)
def test_a_collective_gives_every_rank_what_numpy_does(results: tuple[dict[str, Any], ...], name: str) -> None:
    for rank, expected in enumerate(EXPECTED[name]):
        np.testing.assert_array_equal(np.array(results[rank][name]), np.array(expected), err_msg=f"on rank {rank}")


def test_reduce_sums_on_the_requesting_rank(results: tuple[dict[str, Any], ...]) -> None:
    np.testing.assert_array_equal(np.array(results[1]["reduce"]), SUM)


def test_sums_of_halves_are_rounded_once(ranks: ForkServer) -> None:
    values = ranks.run("tests.cpu_runtime.jobs_collectives:a_half_sum_beyond_its_range_in_between", SIZE).values
    # 257 needs nine bits: float16 holds it, bfloat16 rounds it to the even 256 once.
    assert values == ([257.0, 256.0],) * SIZE
