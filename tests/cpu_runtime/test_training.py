"""Every layout trains like one process.

The bound: a loss is of the order of 5, where neighbouring float32 numbers are 4.8e-7 apart. Layouts add the same
numbers in another order; a sum of n of them is off by at most log2(n) half steps when added as a tree, 17 for the 1e5
products behind one loss, which is 4e-6. Three optimizer steps have been seen to add less than that again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
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
            output_dir = tmp_path_factory.mktemp("run")
            job = {"model_type": model_type, "layout": layout, "output_dir": output_dir, "model": changes}
            found[model, layout] = run_on_ranks(ranks, layout.nproc, tiny.train, **job)
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
