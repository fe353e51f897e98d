"""Every layout trains like one process.

The bound: a loss is of the order of 5, where neighbouring float32 numbers are 4.8e-7 apart. Layouts add the same
numbers in another order; a sum of n of them is off by at most log2(n) half steps when added as a tree, 17 for the 1e5
products behind one loss, which is 4e-6. Three optimizer steps have been seen to add less than that again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import tiny
from tests.harness.tiny import MatrixLayout
from verification.forkserver import ForkServer

BOUND = 1e-5
# Gradients of bfloat16 weights are rounded to eight bits before they are added up, per rank and micro-batch.
HALF_BOUND = 2e-2


def losses(
    ranks: ForkServer, model_type: str, layout: MatrixLayout, directory: Path, **model: Any
) -> tuple[list[float], ...]:
    """By rank: the loss of each of three steps."""
    kwargs = {"model_type": model_type, "layout": layout.to_json(), "output_dir": str(directory), "model": model}
    return ranks.run("tests.harness.tiny:train", layout.nproc, kwargs).values


def assert_like(seen: tuple[list[float], ...], expected: list[float], bound: float) -> None:
    assert len(expected) == 3
    assert max(expected) - min(expected) > 0.05, "a model that does not move shows nothing"
    for rank, values in enumerate(seen):
        assert values == pytest.approx(expected, abs=bound, rel=0), f"rank {rank}"


@pytest.fixture(scope="module")
def single(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of one process, by model."""
    directory = tmp_path_factory.mktemp("single")
    return {
        "llama": losses(ranks, "llama", tiny.SINGLE, directory)[0],
        "llama8": losses(ranks, "llama", tiny.SINGLE, directory, num_hidden_layers=8)[0],
        "ernie4_5_moe": losses(ranks, "ernie4_5_moe", tiny.SINGLE, directory)[0],
        "mtp": losses(ranks, "ernie4_5_moe", tiny.SINGLE, directory, num_nextn_predict_layers=1)[0],
    }


@pytest.mark.parametrize(
    "layout",
    [tiny.DP2, tiny.TP2, tiny.PP2, tiny.SD2V1, tiny.SD2V2, tiny.SD2S2, tiny.SD2S3, tiny.TP2SD2V2],
    ids=lambda layout: layout.name,
)
def test_llama_trains_like_one_process(
    ranks: ForkServer, single: dict[str, list[float]], tmp_path: Path, layout: MatrixLayout
) -> None:
    assert_like(losses(ranks, "llama", layout, tmp_path), single["llama"], BOUND)


def test_interleaved_stages_train_like_one_process(
    ranks: ForkServer, single: dict[str, list[float]], tmp_path: Path
) -> None:
    seen = losses(ranks, "llama", tiny.PP4VPP2, tmp_path, num_hidden_layers=8)
    assert_like(seen, single["llama8"], BOUND)


@pytest.mark.parametrize(
    ("layout", "optimizer"), [(tiny.SD2V1, "DygraphShardingOptimizer"), (tiny.SD2V2, "DygraphShardingOptimizerV2")]
)
def test_float32_is_sharded_by_the_requested_version(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, optimizer: str
) -> None:
    kwargs = {"layout": layout.to_json(), "output_dir": str(tmp_path)}
    assert (
        ranks.run("tests.cpu_runtime.jobs_training:optimizer_of", 2, kwargs).values
        == ([optimizer, layout.split_param],) * 2
    )


@pytest.mark.parametrize("correction", [None, [0.0, 5.0, 0.0, 5.0]])
def test_a_dense_block_weighs_the_chosen_experts(ranks: ForkServer, correction: list[float] | None) -> None:
    (seen,) = ranks.run("tests.cpu_runtime.jobs_training:routed", 1, {"correction": correction}).values
    tokens, logits = np.array(seen["tokens"]), np.array(seen["tokens"]) @ np.array(seen["gate"])
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = []
    for token, probability in zip(tokens, probabilities, strict=True):
        # The correction moves the choice and leaves the weights alone.
        chosen = np.argsort(probability + (correction or 0.0))[-2:]
        weight = probability[chosen] / probability[chosen].sum()
        expected.append(token * (weight @ (chosen + 1.0)) + token * 100)
    np.testing.assert_allclose(np.array(seen["out"])[0], expected, rtol=1e-5)
    np.testing.assert_allclose(seen["logits"], logits, rtol=1e-5, atol=1e-6)
    assert seen["balance"] == pytest.approx(0.5 * (probabilities.mean(0) ** 2).sum(), rel=1e-5)


@pytest.mark.parametrize("layout", [tiny.TP2, tiny.EP2], ids=lambda layout: layout.name)
def test_a_mixture_of_experts_trains_like_one_process(
    ranks: ForkServer, single: dict[str, list[float]], tmp_path: Path, layout: MatrixLayout
) -> None:
    assert_like(losses(ranks, "ernie4_5_moe", layout, tmp_path), single["ernie4_5_moe"], BOUND)


def test_experts_spread_over_tensor_parallel_ranks_train_like_one_process(
    ranks: ForkServer, single: dict[str, list[float]], tmp_path: Path
) -> None:
    seen = losses(ranks, "ernie4_5_moe", tiny.TP2, tmp_path, moe_group="mp")
    assert_like(seen, single["ernie4_5_moe"], BOUND)


def test_multi_token_prediction_trains_like_one_process(
    ranks: ForkServer, single: dict[str, list[float]], tmp_path: Path
) -> None:
    seen = losses(ranks, "ernie4_5_moe", tiny.DP2, tmp_path, num_nextn_predict_layers=1)
    assert_like(seen, single["mtp"], BOUND)


@pytest.mark.parametrize("layout", [tiny.SINGLE, tiny.DP2, tiny.TP2, tiny.SD2V2], ids=lambda layout: layout.name)
def test_bfloat16_with_master_weights_trains_like_float32(
    ranks: ForkServer, single: dict[str, list[float]], tmp_path: Path, layout: MatrixLayout
) -> None:
    half = MatrixLayout(**{**layout.to_json(), "bf16": True})
    assert_like(losses(ranks, "llama", half, tmp_path), single["llama"], HALF_BOUND)
