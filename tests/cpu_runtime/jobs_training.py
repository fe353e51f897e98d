"""Jobs for ranks: look at what a training is made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from tests.harness import tiny


def optimizer_of(layout: dict[str, Any], output_dir: str) -> list[Any]:
    """The class of the optimizer that shards, after one step, and whether the arguments enable ``split_param``."""
    args = tiny.training_arguments(layout, output_dir, max_steps=1)
    run = tiny.trainer(tiny.build("llama", layout, args), args)
    run.train()
    return [type(run.optimizer._inner_opt).__name__, args.split_param]


def routed(correction: list[float] | None) -> dict[str, Any]:
    """Output and router weights of a block of four linear experts, two per token, with a correction of the choice."""
    from paddleformers_fc.cpu_runtime import ernie_moe

    random = np.random.RandomState(0)
    tokens, gate = random.standard_normal((5, 3)).astype("float32"), random.standard_normal((3, 4)).astype("float32")
    scales = [1.0, 2.0, 3.0, 4.0]
    statics = correction and SimpleNamespace(e_score_correction_bias=paddle.to_tensor([correction]))
    block = SimpleNamespace(
        gate=SimpleNamespace(weight=paddle.to_tensor(gate)),
        moe_statics=statics,
        k=2,
        config=SimpleNamespace(moe_group=None, router_aux_loss_coef=0.5),
        experts=[lambda x, scale=scale: x * scale for scale in scales],
        shared_experts=lambda x: x * 100.0,
    )
    out, _, balance, logits = ernie_moe.dense_forward(block, paddle.to_tensor(tokens).reshape([1, 5, 3]))
    return {
        "tokens": tokens.tolist(),
        "gate": gate.tolist(),
        "out": out.tolist(),
        "balance": float(balance),
        "logits": logits.tolist(),
    }
