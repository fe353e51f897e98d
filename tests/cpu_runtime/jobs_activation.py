"""Jobs for ranks in which the CPU runtime is not active yet: how it is activated, or refuses."""

from __future__ import annotations

import logging
from typing import Any

import paddle

from paddleformers_fc import cpu_runtime
from paddleformers_fc.errors import EnvironmentMismatch


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _logged() -> _Lines:
    handler = _Lines()
    logging.getLogger("paddleformers_fc").addHandler(handler)
    return handler


def twice() -> dict[str, Any]:
    """Activate twice: what both calls return, what was logged, and how often ``Tensor.cuda`` was replaced."""
    from paddleformers_fc.cpu_runtime import patches

    log = _logged()
    before = paddle.Tensor.cuda
    first = cpu_runtime.activate()
    between = paddle.Tensor.cuda
    second = cpu_runtime.activate()
    return {
        "first": first,
        "second": second,
        "table": [patch.name for patch in patches.PATCHES],
        "log": log.lines,
        "replaced": [between is not before, paddle.Tensor.cuda is not between],
    }


def _refusal() -> dict[str, Any]:
    before = paddle.Tensor.cuda
    log = _logged()
    try:
        cpu_runtime.activate()
    except EnvironmentMismatch as error:
        return {"error": str(error), "touched": paddle.Tensor.cuda is not before, "log": log.lines}
    return {"error": "", "touched": paddle.Tensor.cuda is not before, "log": log.lines}


def with_a_renamed_hook() -> dict[str, Any]:
    """Activate under a Paddle in which a method that is patched has another name."""
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
        DygraphShardingOptimizerV2,
    )

    del DygraphShardingOptimizerV2.clear_grad
    return _refusal()


def with_another_paddle() -> dict[str, Any]:
    """Activate under an unknown version of Paddle."""
    paddle.__version__ = "3.9.0"
    return _refusal()


def on_an_accelerator() -> dict[str, Any]:
    """Activate in a process that seems to compute on a GPU."""
    paddle.device.get_device = lambda: "gpu:0"
    before = paddle.Tensor.cuda
    log = _logged()
    return {"names": cpu_runtime.activate(), "touched": paddle.Tensor.cuda is not before, "log": log.lines}
