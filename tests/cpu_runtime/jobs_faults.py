"""Jobs for ranks: take one patch back, and show what it mends.

Each job runs where the CPU runtime is active, puts one original back, and trains. It fails to show the fault on the
day on which a new version no longer has it; the patch can then go.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import dygraph_sharding_optimizer
from paddleformers.nn import pp_model
from paddleformers.nn.moe import moe_alltoall_layer
from paddleformers.trainer import Trainer, TrainingArguments
from paddleformers.transformers.ernie4_5_moe import modeling
from paddleformers.utils import moe_hybrid_parallel_optimizer

from tests.harness import tiny


def _take_back(owner: Any, name: str) -> None:
    # All the way: PaddleFormers wraps a model's forward once more when it is assigned.
    setattr(owner, name, inspect.unwrap(getattr(owner, name)))


def _no_muon() -> None:
    moe_hybrid_parallel_optimizer.MuonShardingOptimizer = None


WITHOUT: dict[str, Callable[[], None]] = {
    "clip-fp32": lambda: _take_back(Trainer, "_wrap_distributed_optimizer"),
    "split-fp32": lambda: _take_back(TrainingArguments, "__post_init__"),
    "sharding-v2": lambda: _take_back(dygraph_sharding_optimizer.DygraphShardingOptimizerV2, "clear_grad"),
    "ernie-experts": lambda: _take_back(modeling.Ernie4_5_MoeSparseMoeBlock, "forward"),
    "ernie-mtp": lambda: _take_back(modeling.Ernie4_5_MoeDecoderLayer, "forward"),
    "ernie-mtp-loss": lambda: _take_back(modeling.Ernie4_5_MoeForCausalLM, "forward"),
    "expert-gradients": lambda: _take_back(moe_alltoall_layer.MOEAlltoAllLayer, "__init__"),
    "expert-groups": lambda: _take_back(pp_model, "_parse_moe_group"),
    "expert-optimizer": _no_muon,
}


def train_without(
    patch: str, model_type: str, layout: dict[str, Any], output_dir: str, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train with one patch taken back: the losses, or the error."""
    WITHOUT[patch]()
    try:
        return {"losses": tiny.train(model_type, layout, output_dir, model=model), "error": ""}
    except Exception as error:
        return {"losses": [], "error": f"{type(error).__name__}: {error}"}


def unmended_paddle() -> dict[str, str]:
    """The error of each call in Paddle's CPU build without the runtime."""
    tensor = paddle.ones([2, 2])
    half = tensor.astype("bfloat16")
    calls: dict[str, Callable[[], Any]] = {
        "c_identity": lambda: paddle._C_ops.c_identity(tensor, 0, True, True),
        "c_concat": lambda: paddle._C_ops.c_concat(tensor, 0, 1, 0, True, True),
        "c_split": lambda: paddle._C_ops.c_split(tensor, 0, 1, 0, True),
        "synchronize": paddle.device.synchronize,
        "cuda": tensor.cuda,
        "device_id": lambda: paddle.distributed.ParallelEnv().device_id,
        "linear": lambda: paddle._C_ops.linear(half, half, None),
        "matmul": lambda: paddle._C_ops.matmul(half, half),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors
