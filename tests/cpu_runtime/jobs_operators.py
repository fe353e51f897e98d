"""Jobs for ranks: operators of tensor parallelism and of bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import _C_ops
from paddle.distributed.fleet.layers.mpu import mp_ops


def _numbers(seed: int, *shape: int) -> Any:
    return paddle.to_tensor(np.random.RandomState(seed).standard_normal(shape).astype("float32"))


def _leaf(tensor: Any) -> Any:
    leaf = tensor.clone().detach()
    leaf.stop_gradient = False
    return leaf


def _group() -> Any:
    dist.init_parallel_env()
    return dist.collective._get_default_group()


def identity_concat_split() -> dict[str, Any]:
    """Forward and gradient of the three, with rank-dependent inputs and output gradients."""
    group = _group()
    rank = group.rank
    result: dict[str, Any] = {}
    cases = {
        "identity": (mp_ops._c_identity, [2, 2], [2, 2]),
        "concat": (mp_ops._c_concat, [2, 2], [2, 4]),
        "split": (mp_ops._c_split, [2, 4], [2, 2]),
    }
    for name, (operator, shape, out_shape) in cases.items():
        tensor = _leaf(_numbers(rank, *shape))
        out = operator(tensor, group=group)
        (out * _numbers(10 + rank, *out_shape)).sum().backward()
        result[name] = [out.tolist(), tensor.grad.tolist()]
    return result


def cross_entropy(ignore_index: int) -> list[float]:
    """Largest differences of loss and gradient between a split and a whole vocabulary, and the largest gradient."""
    group = _group()
    whole = _leaf(_numbers(1, 5, 3, 8) * 4)
    label = paddle.to_tensor(np.random.RandomState(2).randint(0, 8, (5, 3)))
    label[0, 0] = ignore_index
    weight = _numbers(3, 5, 3)
    expected = F.cross_entropy(whole, label, reduction="none", ignore_index=ignore_index)
    (expected.squeeze(-1) * weight).sum().backward() if expected.ndim > 2 else (expected * weight).sum().backward()

    part = _leaf(paddle.split(whole.detach(), group.nranks, axis=-1)[group.rank])
    loss = mp_ops._c_softmax_with_cross_entropy(part, label, group=group, ignore_index=ignore_index)
    (loss.squeeze(-1) * weight).sum().backward()
    gradient = paddle.split(whole.grad, group.nranks, axis=-1)[group.rank]
    return [
        float((loss.reshape([-1]) - expected.reshape([-1])).abs().max()),
        float((part.grad - gradient).abs().max()),
        float(gradient.abs().max()),
    ]


def half_precision_linear() -> dict[str, Any]:
    """A bfloat16 linear against the float32 linear of the same rounded numbers."""
    x, weight = _numbers(1, 4, 8).astype("bfloat16"), _numbers(2, 8, 3).astype("bfloat16")
    x.stop_gradient = weight.stop_gradient = False
    out = F.linear(x, weight)
    out.sum().backward()
    expected = paddle.matmul(x.astype("float32"), weight.astype("float32"))
    return {
        "dtypes": [str(out.dtype), str(weight.grad.dtype)],
        "difference": float((out - expected).abs().max()),
        "gradient": float((weight.grad.astype("float32") - x.astype("float32").sum(0, keepdim=True).T).abs().max()),
    }


def half_precision_adamw(steps: int) -> dict[str, Any]:
    """AdamW on a bfloat16 parameter with a master weight, and on a float32 parameter with the same gradients."""

    def trained(dtype: str) -> tuple[Any, Any]:
        parameter = paddle.create_parameter([4, 4], dtype, default_initializer=paddle.nn.initializer.Constant(0.0))
        parameter.set_value(_numbers(1, 4, 4).astype("bfloat16").astype(dtype))
        optimizer = paddle.optimizer.AdamW(0.1, parameters=[parameter], weight_decay=0.1, multi_precision=True)
        for step in range(steps):
            (
                parameter.astype("float32") * _numbers(10 + step, 4, 4).astype("bfloat16").astype("float32")
            ).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        return parameter, optimizer._master_weights.get(parameter.name)

    half, master = trained("bfloat16")
    single, _ = trained("float32")
    return {
        "master_difference": float((master - single).abs().max()),
        "rounded": bool((half.astype("float32") == master.astype("bfloat16").astype("float32")).all()),
        "moved": float((single - _numbers(1, 4, 4)).abs().max()),
        "dtypes": [str(half.dtype), str(master.dtype)],
    }


def answers_about_the_device() -> dict[str, Any]:
    """What the CPU build is asked about its device."""
    tensor = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    moved = tensor.cuda()
    moved[0] = 7.0
    return {
        "original": tensor.tolist(),
        "copy": moved.tolist(),
        "detached": moved.stop_gradient,
        "synchronize": paddle.device.synchronize(),
        "device_id": dist.ParallelEnv().device_id,
        "kernel": hasattr(_C_ops, "c_identity"),
    }
