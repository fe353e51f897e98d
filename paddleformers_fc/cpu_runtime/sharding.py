"""Sharding of optimizer states, gradients and parameters in main memory.

Stage 1 version 2 keeps gradients as views of one fused buffer. On a CPU, ``Tensor.clear_gradient(True)`` marks a
gradient as empty instead of zeroing it, and the next backward replaces it with a new tensor. So from the second step on
gradients do not reach the buffer, and training is silently wrong. Zeroing in place keeps the views.

Stages 2 and 3 only need four values to work on a CPU: the flag of a build for accelerators, which they assert, the
device number, which they parse from the device name, the flag that moves parameters to the GPU, and the list of custom
devices, in which ``group_sharded_parallel`` looks up the device.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import paddle
import paddle.distributed.sharding as sharding
from paddle.base import core
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding import (
    group_sharded_optimizer_stage2,
    group_sharded_stage3,
    group_sharded_storage,
)
from paddle.distributed.sharding import group_sharded

from ..upstream import replace_everywhere

_segment_size = 2**20


class ModuleView(ModuleType):
    """A proxy of a module with different values for some attributes.

    Assign it to the global name of an importing module::

        group_sharded_stage3.paddle = ModuleView(paddle, get_device=lambda: "cpu:0")

    Args:
        module: the real module, which is not changed. All other attributes are looked up in it at each use.
        changes: the attributes that differ, by name.
    """

    def __init__(self, module: ModuleType, **changes: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(changes)
        self.__dict__["_viewed"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed"], name)


def slice_above(elements: int) -> None:
    """Let stage 3 slice parameters with more elements than this, from now on in this process.

    PaddleFormers has no option for it, and with Paddle's 2**20 no parameter of a small model is sliced.
    """
    global _segment_size
    _segment_size = elements


def clear_in_place() -> None:
    """Let ``DygraphShardingOptimizerV2.clear_grad`` zero gradients in place."""
    original = DygraphShardingOptimizerV2.clear_grad

    @functools.wraps(original)
    def clear_grad(self: Any, set_to_zero: bool = True) -> None:
        if self.sd_release_grads:
            original(self, set_to_zero)  # It releases gradients, so there are no views to keep.
            return
        for parameter in self._parameter_list:
            gradient = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
            if gradient is not None:
                gradient.zero_()

    DygraphShardingOptimizerV2.clear_grad = clear_grad


def stages_two_and_three() -> None:
    """Let stages 2 and 3 use main memory as the device."""
    accelerated = ModuleView(core, is_compiled_with_cuda=lambda: True)
    numbered = ModuleView(paddle, get_device=lambda: "cpu:0")
    for module in (group_sharded_optimizer_stage2, group_sharded_stage3):
        module.core = accelerated
        module.paddle = numbered

    original = group_sharded_storage.ParamStorage.add_rank_params

    @functools.wraps(original)
    def add_rank_params(self: Any, trainable_params: Any, param2align: Any, convert_gpu: bool = True) -> None:
        # Do not move the buffer: it is in main memory already.
        original(self, trainable_params, param2align, False)

    group_sharded_storage.ParamStorage.add_rank_params = add_rank_params
    # List the CPU as a custom device, which the dispatcher supports.
    devices = ModuleView(paddle.device, get_all_custom_device_type=lambda: ["cpu"])
    group_sharded.paddle = ModuleView(paddle, get_device=lambda: "cpu:0", device=devices)
    dispatch = sharding.group_sharded_parallel

    @functools.wraps(dispatch)
    def group_sharded_parallel(*arguments: Any, **named: Any) -> Any:
        return dispatch(*arguments, **{"segment_size": _segment_size, **named})

    replace_everywhere(dispatch, group_sharded_parallel)
