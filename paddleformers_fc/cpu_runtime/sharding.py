"""Sharding of optimizer states, gradients and parameters in main memory.

Stage 1 version 2 keeps gradients as views of one fused buffer. On a CPU, ``Tensor.clear_gradient(True)`` marks a
gradient as empty instead of zeroing it, and the next backward puts a new tensor in its place: from the second step
on backward does not write to the buffer, and training is silently wrong. Zeroing in place keeps the views.

Stages 2 and 3 work on a CPU once three answers change: whether Paddle was built for an accelerator (asserted), the
device number (parsed out of its name), and whether parameters must first be moved off the accelerator. The dispatcher
``group_sharded_parallel`` is replaced, because its first line refuses the device.
"""

from __future__ import annotations

import functools
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
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_utils import GroupShardedScaler

from .. import errors
from ._replace import ModuleView, replace_everywhere

_segment_size = 2**20


def slice_above(elements: int) -> None:
    """Let stage 3 slice parameters of more than so many elements, from now on and in this process.

    PaddleFormers has no option for it, and Paddle's 2**20 leaves every parameter of a small model whole.
    """
    global _segment_size
    _segment_size = elements


def clear_in_place() -> None:
    """``DygraphShardingOptimizerV2.clear_grad`` zeroes gradients where they are."""
    original = DygraphShardingOptimizerV2.clear_grad

    @functools.wraps(original)
    def clear_grad(self: Any, set_to_zero: bool = True) -> None:
        if self.sd_release_grads:
            original(self, set_to_zero)  # Gradients are dropped, not kept: there is no view to lose.
            return
        for parameter in self._parameter_list:
            gradient = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
            if gradient is not None:
                gradient.zero_()

    DygraphShardingOptimizerV2.clear_grad = clear_grad


def stages_two_and_three() -> None:
    """Let stages 2 and 3 take main memory for the device."""
    accelerated = ModuleView(core, is_compiled_with_cuda=lambda: True)
    numbered = ModuleView(paddle, get_device=lambda: "cpu:0")
    for module in (group_sharded_optimizer_stage2, group_sharded_stage3):
        module.core = accelerated
        module.paddle = numbered

    original = group_sharded_storage.ParamStorage.add_rank_params

    @functools.wraps(original)
    def add_rank_params(self: Any, trainable_params: Any, param2align: Any, convert_gpu: bool = True) -> None:
        # The buffer is in its place; False means that it need not be moved.
        original(self, trainable_params, param2align, False)

    group_sharded_storage.ParamStorage.add_rank_params = add_rank_params
    replace_everywhere(sharding.group_sharded_parallel, group_sharded_parallel)


def group_sharded_parallel(
    model: Any,
    optimizer: Any,
    level: str,
    scaler: Any = None,
    group: Any = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int | None = None,
    sync_comm: bool = False,
    dp_group: Any = None,
    exclude_layer: Any = None,
) -> tuple[Any, Any, Any]:
    """Wrap a model and its optimizer for sharding stage 2 or 3, as ``paddle.distributed.sharding`` does.

    Args:
        level: ``os`` or ``os_g`` for stage 2, ``p_g_os`` for stage 3.
        segment_size: parameters with more elements are sliced in stage 3; by default the value of :func:`slice_above`.

    Raises:
        OptionError: another level.
    """
    if level in ("os", "os_g"):
        optimizer = GroupShardedOptimizerStage2(
            params=optimizer._parameter_list,
            optim=optimizer,
            group=group,
            offload=offload,
            dp_group=dp_group,
            device="cpu",
        )
        model = GroupShardedStage2(
            model,
            optimizer,
            group=group,
            sync_buffers=sync_buffers,
            buffer_max_size=buffer_max_size,
            dp_group=dp_group,
            device="cpu",
        )
    elif level == "p_g_os":
        model = GroupShardedStage3(
            model,
            optimizer=optimizer,
            group=group,
            sync_buffers=sync_buffers,
            segment_size=_segment_size if segment_size is None else segment_size,
            offload=offload,
            sync_comm=sync_comm,
            dp_group=dp_group,
            exclude_layer=exclude_layer,
            device="cpu",
        )
    else:
        raise errors.OptionError(
            f"Sharding level {level!r} does not exist.", next_step="Use one of 'os', 'os_g', 'p_g_os'."
        )
    if isinstance(scaler, paddle.amp.GradScaler):
        scaler = GroupShardedScaler(scaler)
    return model, optimizer, scaler
