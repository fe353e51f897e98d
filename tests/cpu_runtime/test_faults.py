"""Each patch is still needed: without it, the fault that it mends is there.

Each test takes one patch back where the CPU runtime is active, and trains. It fails on the day on which a new version
no longer has the fault; the patch can then go.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest

from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import MatrixLayout
from verification.forkserver import ForkServer

_FORMERS = "paddleformers"
_SHARDING = "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer"
PATCHED = {
    "clip-fp32": (f"{_FORMERS}.trainer", "Trainer._wrap_distributed_optimizer"),
    "split-fp32": (f"{_FORMERS}.trainer", "TrainingArguments.__post_init__"),
    "sharding-v2": (_SHARDING, "DygraphShardingOptimizerV2.clear_grad"),
    "ernie-experts": (f"{_FORMERS}.transformers.ernie4_5_moe.modeling", "Ernie4_5_MoeSparseMoeBlock.forward"),
    "ernie-mtp": (f"{_FORMERS}.transformers.ernie4_5_moe.modeling", "Ernie4_5_MoeDecoderLayer.forward"),
    "ernie-mtp-loss": (f"{_FORMERS}.transformers.ernie4_5_moe.modeling", "Ernie4_5_MoeForCausalLM.forward"),
    "expert-gradients": (f"{_FORMERS}.nn.moe.moe_alltoall_layer", "MOEAlltoAllLayer.__init__"),
    "expert-groups": (f"{_FORMERS}.nn.pp_model", "_parse_moe_group"),
    "expert-optimizer": (f"{_FORMERS}.utils.moe_hybrid_parallel_optimizer", "MuonShardingOptimizer"),
}
"""The module and the function of each patch."""


def take_back(patch: str) -> None:
    """Put the original back."""
    module, path = PATCHED[patch]
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for one in owners:
        owner = getattr(owner, one)
    # All the way: PaddleFormers wraps a model's forward once more when it is assigned.
    setattr(owner, name, None if patch == "expert-optimizer" else inspect.unwrap(getattr(owner, name)))


def train_without(
    patch: str, model_type: str, layout: MatrixLayout, output_dir: Path, model: dict[str, Any]
) -> list[Any]:
    """Train with one patch taken back: the losses, and the error."""
    take_back(patch)
    try:
        return [tiny.train(model_type, layout.to_json(), str(output_dir), model=model), ""]
    except Exception as error:
        return [[], f"{type(error).__name__}: {error}"]


PREDICTION = {"num_nextn_predict_layers": 1}
STOPS: dict[str, tuple[str, MatrixLayout, dict[str, Any], str]] = {
    "clip-fp32": ("llama", tiny.TP2, {}, "'AdamW' object has no attribute '_inner_opt'"),
    "split-fp32": ("llama", tiny.SD2V2, {}, "Currently sharding stage1 v2 only support amp_master_grad"),
    "ernie-experts": ("ernie4_5_moe", tiny.SINGLE, {}, "kernel `expand_modality_expert_id` is not registered"),
    "expert-groups": ("ernie4_5_moe", tiny.TP2EP2PP2, {}, "'Group' object has no attribute 'lower'"),
    "expert-optimizer": ("ernie4_5_moe", tiny.EP2, {}, "isinstance() arg 2 must be a type"),
    "ernie-mtp": ("ernie4_5_moe", tiny.SINGLE, PREDICTION, "TypeError: cannot unpack non-iterable bool object"),
    "ernie-mtp-loss": ("ernie4_5_moe", tiny.SINGLE, PREDICTION, "TypeError: 'NoneType' object is not subscriptable"),
}
"""The model and the layout whose training stops with an error without a patch."""


@pytest.mark.parametrize("patch", STOPS)
def test_without_its_patch_training_stops(ranks: ForkServer, tmp_path: Path, patch: str) -> None:
    model_type, layout, model, error = STOPS[patch]
    given = {"patch": patch, "model_type": model_type, "layout": layout, "output_dir": tmp_path, "model": model}
    for _, seen in run_on_ranks(ranks, layout.nproc, train_without, **given):
        assert error in seen


WRONG = {"sharding-v2": ("llama", tiny.SD2V2), "expert-gradients": ("ernie4_5_moe", tiny.EP2)}


@pytest.mark.parametrize("patch", WRONG)
def test_without_its_patch_training_is_silently_wrong(ranks: ForkServer, tmp_path: Path, patch: str) -> None:
    model_type, layout = WRONG[patch]
    kwargs = {"model_type": model_type, "layout": tiny.SINGLE.to_json(), "output_dir": str(tmp_path)}
    (right,) = ranks.run("tests.harness.tiny:train", 1, kwargs).values
    given = {"patch": patch, "model_type": model_type, "layout": layout, "output_dir": tmp_path, "model": {}}
    for losses, error in run_on_ranks(ranks, layout.nproc, train_without, **given):
        assert error == ""
        assert losses[0] == pytest.approx(right[0], abs=1e-5)
        assert abs(losses[2] - right[2]) > 1e-3


def missing(call: Callable[[], object]) -> str:
    """The error of a call."""
    with pytest.raises(Exception) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}"


@on_ranks(1, server="bare_ranks")
def test_paddle_still_lacks_what_is_patched() -> None:
    operators, one = paddle._C_ops, paddle.ones([2, 2])
    half = one.astype("bfloat16")
    for error, call in {
        "Do not support c_identity for cpu kernel": lambda: operators.c_identity(one, 0, True, True),
        "Do not support c_concat for cpu kernel": lambda: operators.c_concat(one, 0, 1, 0, True, True),
        "Do not support c_split for cpu kernel": lambda: operators.c_split(one, 0, 1, 0, True),
        "TypeError": paddle.device.synchronize,
        "AttributeError": lambda: paddle.distributed.ParallelEnv().device_id,
    }.items():
        assert error in missing(call)
    assert missing(one.cuda)
    for call in (lambda: operators.linear(half, half, None), lambda: operators.matmul(half, half)):
        assert "bfloat16" in missing(call)
