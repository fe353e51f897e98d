"""The table of patches, one row per fault.

:func:`apply_all` applies them in order. Importing this module, which :func:`paddleformers_fc.cpu_runtime.activate`
does, imports Paddle, and PaddleFormers if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..upstream import LIBRARY, is_installed
from ..upstream.hooks import PADDLENLP
from . import collectives, device, groups, half, mpu, p2p, sharding, stores


@dataclass(frozen=True)
class Patch:
    """A patch for one fault.

    Args:
        name: the name that :func:`paddleformers_fc.cpu_runtime.activate` returns.
        fault: the fault, in one sentence.
        package: the package with the fault: ``paddle`` or the library.
        apply: applies the patch; called once per process.
    """

    name: str
    fault: str
    package: str
    apply: Callable[[], None]


_PADDLE = (
    Patch("openmp", "OpenMP changes the environment while other threads read it.", "paddle", device.begin_openmp),
    Patch("stores", "Ranks sleep 3 s at the start and 40 ms at every request.", "paddle", stores.apply),
    Patch("groups", "Process groups read each other's addresses and hang.", "paddle", groups.apply),
    Patch("collectives", "Gloo lacks collectives, and its float16 sum is inf.", "paddle", collectives.apply),
    Patch("p2p", "Messages inside groups of more than two are not delivered.", "paddle", p2p.apply),
    Patch("mpu", "Tensor parallel operators have no CPU kernel.", "paddle", mpu.apply),
    Patch("bfloat16", "linear, matmul, c_embedding and adamw_ lack bfloat16.", "paddle", half.apply),
    Patch("tensor-cuda", "Tensor.cuda raises.", "paddle", device.tensor_cuda),
    Patch("synchronize", "paddle.device.synchronize raises.", "paddle", device.synchronize),
    Patch("device-id", "ParallelEnv has no device id.", "paddle", device.device_id),
    Patch("fused-buffers", "Tensor fusion does not support main memory.", "paddle", device.fused_buffers),
    Patch("inputs", "broadcast_input_data does not support main memory.", "paddle", mpu.input_data),
    Patch("sharding-v2", "clear_grad detaches gradients from their buffer.", "paddle", sharding.clear_in_place),
    Patch("sharding-2-3", "Stages 2 and 3 do not support main memory.", "paddle", sharding.stages_two_and_three),
)


def _library_patches() -> tuple[Patch, ...]:
    """Return the patches of the library with the Trainer; none if it is not installed."""
    if not is_installed(LIBRARY):
        return ()
    from . import formers

    package = LIBRARY
    split = Patch("split-fp32", "split_param is rejected in float32.", package, formers.split_parameters_in_float32)
    if package == PADDLENLP:
        return (split,)
    from . import ernie_moe

    return (
        Patch("clip-fp32", "Clipping in float32 fails on a missing _inner_opt.", package, formers.clipping_in_float32),
        split,
        Patch("lora-evaluation", "Adapters need a class of PaddleFleet.", package, formers.evaluation_of_adapters),
        Patch("ernie-experts", "The MoE block needs fused kernels.", package, ernie_moe.dense_experts),
        Patch("ernie-mtp", "Multi-token prediction misplaces arguments.", package, ernie_moe.prediction_positions),
        Patch("ernie-mtp-loss", "Multi-token prediction omits its logits.", package, ernie_moe.prediction_loss),
        Patch("expert-gradients", "Different experts are averaged.", package, ernie_moe.expert_gradients),
        Patch(
            "expert-groups",
            "Pipelines accept expert groups by name only.",
            package,
            ernie_moe.expert_groups_in_pipelines,
        ),
        Patch("expert-optimizer", "isinstance is called with None.", package, ernie_moe.expert_parallel_optimizer),
    )


PATCHES: tuple[Patch, ...] = _PADDLE + _library_patches()


def apply_all() -> tuple[str, ...]:
    """Apply all patches, and return their names in order."""
    for patch in PATCHES:
        patch.apply()
    return tuple(patch.name for patch in PATCHES)
