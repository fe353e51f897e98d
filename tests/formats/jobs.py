"""What ranks do in the tests of this room."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def save(directory: Path, options: dict[str, Any], added: int = 0) -> None:
    """Save tensors of every kind with Paddle's own FlexCheckpoint, two columns of each on each of two ranks.

    Args:
        directory: where they are saved.
        options: arguments of ``save_state_dict``.
        added: a number that is added to every element.
    """
    import numpy as np
    import paddle
    from paddle.distributed import ShardedWeight, save_state_dict

    rank, ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    if ranks > 1:
        paddle.distributed.init_parallel_env()
    weights: dict[str, Any] = {}
    for name, values in ((name, values + values.dtype.type(added)) for name, values in arrays().items()):
        if name.startswith("flat"):
            share = values.size // ranks
            part = slice(rank * share, (rank + 1) * share)
            local = paddle.to_tensor(np.ascontiguousarray(values.ravel()[part]))
            weights[name] = ShardedWeight(name, local, values.shape, values.shape, (0, 0), True, part)
            continue
        cut = name.startswith("cut")
        width = values.shape[1] // ranks if cut else 0
        offset = (0, width * rank) if cut else (0,) * values.ndim
        held = np.ascontiguousarray(values[:, offset[1] : offset[1] + width]) if cut else values
        tensor = paddle.to_tensor(held)
        tensor = tensor.astype("bfloat16") if name.endswith("bfloat16") else tensor
        weights[name] = ShardedWeight(name, tensor, tuple(held.shape), tuple(values.shape), offset)
    save_state_dict(weights, str(directory), **options)


def arrays() -> dict[str, Any]:
    """What is saved, whole; what ends in bfloat16 is cast to it, which changes none of these numbers."""
    import numpy as np

    def counted(*shape: int, dtype: str = "float32") -> Any:
        return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)

    return {
        "cut.float32": counted(6, 8),
        "cut.bfloat16": counted(4, 4),
        "cut.large": counted(300, 400),
        "flat.float32": counted(6, 10) + 1,
        "whole.float16": counted(3, 5, dtype="float16"),
        "whole.int64": counted(7, dtype="int64"),
        "whole.one": counted(1),
    }


def train(**arguments: Any) -> dict[str, Any]:
    """Train as :func:`tests.corruption.jobs.train`, under stage 3 as well.

    Paddle gathers slices for a save into a buffer, copies it to the host and releases it. On a CPU that copy shares the
    buffer; here it is one of its own.
    """
    from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3

    from tests.corruption import jobs

    group_sharded_stage3._device2cpu = lambda tensor, convert_dtype=False: tensor.clone()
    return jobs.train(**arguments)


def train_with_average(**arguments: Any) -> dict[str, Any]:
    """Train as :func:`train` with PaddleFormers' own moving average, which is on a device or in pinned memory."""
    import paddle
    from paddleformers.trainer.utils import zero_cost_checkpoint

    def copied(tensor: Any, *_: Any) -> Any:
        made = tensor.detach().clone()
        made.name = tensor.name
        return made

    def of_float32(self: Any) -> dict[str, Any]:
        return {name: one for name, one in self.model.state_dict().items() if one.dtype == paddle.float32}

    os.environ["FLAGS_selected_gpus"] = os.environ["PADDLE_TRAINER_ID"]  # noqa: SIM112
    paddle.Tensor.cuda = paddle.Tensor.pin_memory = copied
    # It also averages weights in bfloat16, which a CPU cannot add, and does not save them.
    zero_cost_checkpoint.EMABufferFcBased._get_model_state = of_float32
    return train(**arguments)
