"""Operators that the CPU build lacks, against what they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from verification.forkserver import ForkServer

JOBS = "tests.cpu_runtime.jobs_operators"


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype("float32")


def test_identity_concat_and_split_are_each_others_gradients(ranks: ForkServer) -> None:
    first, second = ranks.run(f"{JOBS}:identity_concat_split", 2).values
    small, small_gradient = [numbers(rank, 2, 2) for rank in (0, 1)], [numbers(10 + rank, 2, 2) for rank in (0, 1)]
    wide, wide_gradient = [numbers(rank, 2, 4) for rank in (0, 1)], [numbers(10 + rank, 2, 4) for rank in (0, 1)]
    for rank, result in enumerate((first, second)):
        columns = slice(2 * rank, 2 * rank + 2)
        expected = {
            "identity": (small[rank], small_gradient[0] + small_gradient[1]),
            "concat": (np.concatenate(small, axis=-1), wide_gradient[rank][:, columns]),
            "split": (wide[rank][:, columns], np.concatenate(small_gradient, axis=-1)),
        }
        for name, (out, gradient) in expected.items():
            np.testing.assert_allclose(result[name][0], out, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(result[name][1], gradient, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_cross_entropy_does_not_see_how_the_vocabulary_is_split(ranks: ForkServer, ignore_index: int) -> None:
    for loss, gradient, scale in ranks.run(f"{JOBS}:cross_entropy", 2, {"ignore_index": ignore_index}).values:
        # A loss is of the order of 10, so 4 units in its last place; gradients are below their weights.
        assert loss < 4e-6
        assert gradient < 1e-6 * max(scale, 1)
        assert scale > 0.1


def test_bfloat16_operands_are_multiplied_in_float32(ranks: ForkServer) -> None:
    (result,) = ranks.run(f"{JOBS}:half_precision_linear", 1).values
    assert result["dtypes"] == ["paddle.float32", "paddle.bfloat16"]
    assert result["difference"] == 0
    # A gradient of the order of 4 is rounded to bfloat16 once: 2 ** -9 of it.
    assert result["gradient"] < 8 * 2**-9


def test_adamw_moves_the_master_weight_and_rounds_it(ranks: ForkServer) -> None:
    (result,) = ranks.run(f"{JOBS}:half_precision_adamw", 1, {"steps": 3}).values
    assert result["dtypes"] == ["paddle.bfloat16", "paddle.float32"]
    assert result["master_difference"] < 1e-6
    assert result["rounded"]
    assert result["moved"] > 0.1


def test_questions_about_the_device_have_answers(ranks: ForkServer) -> None:
    (result,) = ranks.run(f"{JOBS}:answers_about_the_device", 1).values
    assert result == {
        "original": [1.0, 2.0],
        "copy": [7.0, 2.0],
        "detached": True,
        "synchronize": None,
        "device_id": 0,
        "kernel": True,
    }
