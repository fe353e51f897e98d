"""Collectives over gloo, against numpy."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.cpu_runtime.forkserver import ForkServer

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


def assert_on_all(results: tuple[dict[str, Any], ...], name: str, expected: list[Any]) -> None:
    for rank, want in enumerate(expected):
        np.testing.assert_array_equal(np.array(results[rank][name]), np.array(want), err_msg=f"{name} on rank {rank}")


def test_all_reduce_sums_on_every_rank(results: tuple[dict[str, Any], ...]) -> None:
    assert_on_all(results, "all_reduce", [SUM] * SIZE)


def test_all_reduce_takes_the_largest(results: tuple[dict[str, Any], ...]) -> None:
    assert_on_all(results, "all_reduce_max", [ALL[-1]] * SIZE)


def test_reduce_sums_on_the_rank_that_asked(results: tuple[dict[str, Any], ...]) -> None:
    np.testing.assert_array_equal(np.array(results[1]["reduce"]), SUM)


def test_broadcast_gives_the_source_to_all(results: tuple[dict[str, Any], ...]) -> None:
    assert_on_all(results, "broadcast", [ALL[2]] * SIZE)


def test_all_gather_keeps_the_order_of_ranks(results: tuple[dict[str, Any], ...]) -> None:
    assert_on_all(results, "all_gather", [np.stack(ALL)] * SIZE)
    assert_on_all(results, "all_gather_into_tensor", [np.concatenate(ALL)] * SIZE)


def test_reduce_scatter_leaves_each_rank_its_part_of_the_sum(results: tuple[dict[str, Any], ...]) -> None:
    assert_on_all(results, "reduce_scatter_tensor", np.split(SUM, SIZE))
    assert_on_all(results, "reduce_scatter", np.split(SUM, SIZE))


def test_all_to_all_transposes_ranks_and_parts(results: tuple[dict[str, Any], ...]) -> None:
    parts = [np.split(array, SIZE) for array in ALL]
    received = [[parts[source][rank] for source in range(SIZE)] for rank in range(SIZE)]
    assert_on_all(results, "all_to_all", received)
    assert_on_all(results, "all_to_all_tensor", [np.concatenate(part) for part in received])


def test_all_to_all_takes_uneven_parts(results: tuple[dict[str, Any], ...]) -> None:
    cuts = [np.split(array, [rank + 1, rank + 2]) for rank, array in enumerate(ALL)]
    expected = [np.concatenate([cuts[source][rank] for source in range(SIZE)]) for rank in range(SIZE)]
    assert_on_all(results, "all_to_all_single", expected)


def test_scatter_hands_out_the_parts_of_the_source(results: tuple[dict[str, Any], ...]) -> None:
    assert_on_all(results, "scatter", np.split(ALL[0], SIZE))


def test_sums_of_halves_are_rounded_once(ranks: ForkServer) -> None:
    values = ranks.run("tests.cpu_runtime.jobs_collectives:a_half_sum_beyond_its_range_in_between", SIZE).values
    # 257 needs nine bits: float16 holds it, bfloat16 rounds it to the even 256 once.
    assert values == ([257.0, 256.0],) * SIZE
