"""Every layout trains like one process.

The bound: a loss is of the order of 5, where neighbouring float32 numbers are 4.8e-7 apart. Layouts add the same
numbers in another order; a sum of n of them is off by at most log2(n) half steps when added as a tree, 17 for the 1e5
products behind one loss, which is 4e-6. Three optimizer steps have been seen to add less than that again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from tests.harness import tiny
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import MatrixLayout
from verification.forkserver import ForkServer

BOUND = 1e-5
# Gradients of bfloat16 weights are rounded to eight bits before they are added up, per rank and micro-batch.
HALF_BOUND = 2e-2
MODELS = {
    "llama": ("llama", {}),
    "eight layers": ("llama", {"num_hidden_layers": 8}),
    "experts": ("ernie4_5_moe", {}),
    "experts by tensor parallel ranks": ("ernie4_5_moe", {"moe_group": "mp"}),
    "prediction": ("ernie4_5_moe", {"num_nextn_predict_layers": 1}),
}
LAYOUTS = (tiny.DP2, tiny.TP2, tiny.PP2, tiny.SD2V1, tiny.SD2V2, tiny.SD2S2, tiny.SD2S3, tiny.TP2SD2V2)
CASES = [
    *(("llama", layout) for layout in LAYOUTS),
    ("eight layers", tiny.PP4VPP2),
    *(("experts", layout) for layout in (tiny.TP2, tiny.EP2)),
    ("experts by tensor parallel ranks", tiny.TP2),
    ("prediction", tiny.DP2),
    *(("llama", replace(layout, bf16=True)) for layout in (tiny.SINGLE, tiny.DP2, tiny.TP2, tiny.SD2V2)),
]
Losses = Callable[[str, MatrixLayout], tuple[list[float], ...]]


@pytest.fixture(scope="module")
def losses(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of three steps of a model under a layout, by rank; each is trained once."""
    found: dict[tuple[str, MatrixLayout], tuple[list[float], ...]] = {}

    def train(model: str, layout: MatrixLayout) -> tuple[list[float], ...]:
        if (model, layout) not in found:
            model_type, changes = MODELS[model]
            output_dir = str(tmp_path_factory.mktemp("run"))
            job = {"model_type": model_type, "layout": layout.to_json(), "output_dir": output_dir, "model": changes}
            found[model, layout] = ranks.run("tests.harness.tiny:train", layout.nproc, job).values
        return found[model, layout]

    return train


@pytest.mark.parametrize(
    ("model", "layout"), CASES, ids=lambda value: getattr(value, "name", value) + "-bf16" * getattr(value, "bf16", 0)
)
def test_every_layout_trains_like_one_process(losses: Losses, model: str, layout: MatrixLayout) -> None:
    (expected,) = losses("experts" if "experts" in model else model, tiny.SINGLE)
    assert len(expected) == 3
    assert max(expected) - min(expected) > 0.05, "a model that does not move shows nothing"
    for rank, values in enumerate(losses(model, layout)):
        assert values == pytest.approx(expected, abs=HALF_BOUND if layout.bf16 else BOUND, rel=0), f"rank {rank}"


@pytest.mark.parametrize(
    ("layout", "optimizer"), [(tiny.SD2V1, "DygraphShardingOptimizer"), (tiny.SD2V2, "DygraphShardingOptimizerV2")]
)
@on_ranks(2)
def test_float32_is_sharded_by_the_requested_version(tmp_path: Path, layout: MatrixLayout, optimizer: str) -> None:
    args = tiny.training_arguments(layout, str(tmp_path), max_steps=1)
    run = tiny.trainer(tiny.build("llama", layout, args), args)
    run.train()
    assert (type(run.optimizer._inner_opt).__name__, args.split_param) == (optimizer, layout.split_param)


@pytest.mark.parametrize("correction", [None, [0.0, 5.0, 0.0, 5.0]])
@on_ranks(1)
def test_a_dense_block_weighs_the_chosen_experts(correction: list[float] | None) -> None:
    from paddleformers_fc.cpu_runtime import ernie_moe

    random = np.random.RandomState(0)
    tokens, gate = random.standard_normal((5, 3)).astype("float32"), random.standard_normal((3, 4)).astype("float32")
    block = SimpleNamespace(
        gate=SimpleNamespace(weight=paddle.to_tensor(gate)),
        moe_statics=correction and SimpleNamespace(e_score_correction_bias=paddle.to_tensor([correction])),
        k=2,
        config=SimpleNamespace(moe_group=None, router_aux_loss_coef=0.5),
        experts=[lambda x, scale=scale: x * scale for scale in (1.0, 2.0, 3.0, 4.0)],
        shared_experts=lambda x: x * 100.0,
    )
    out, _, balance, router = ernie_moe.dense_forward(block, paddle.to_tensor(tokens).reshape([1, 5, 3]))
    logits = tokens.astype("float64") @ gate
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = []
    for token, probability in zip(tokens, probabilities, strict=True):
        # The correction moves the choice and leaves the weights alone.
        chosen = np.argsort(probability + (correction or 0.0))[-2:]
        weight = probability[chosen] / probability[chosen].sum()
        expected.append(token * (weight @ (chosen + 1.0)) + token * 100)
    np.testing.assert_allclose(out.numpy()[0], expected, rtol=1e-5)
    np.testing.assert_allclose(router.numpy(), logits, rtol=1e-5, atol=1e-6)
    assert float(balance) == pytest.approx(0.5 * (probabilities.mean(0) ** 2).sum(), rel=1e-5)
