"""The table of patches, and the tested versions that need them.

One row per fault: a name, the fault, and the package that has it. :func:`apply_all` applies the table in its order.
Importing this module imports Paddle, and PaddleFormers if it is installed;
:func:`paddleformers_fc.cpu_runtime.activate` imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..upstream import LIBRARY, is_installed
from ..upstream.hooks import PADDLENLP
from . import collectives, device, groups, half, mpu, p2p, sharding, stores


@dataclass(frozen=True)
class Patch:
    """A patch of one fault.

    Args:
        name: by which :func:`paddleformers_fc.cpu_runtime.activate` reports it.
        fault: in one sentence.
        package: whose it is: ``paddle`` or the library.
        apply: patches it; called once per process.
    """

    name: str
    fault: str
    package: str
    apply: Callable[[], None]


_PADDLE = (
    Patch("openmp", "OpenMP changes the environment while other threads read it.", "paddle", device.begin_openmp),
    Patch("stores", "Ranks sleep 3 s at the start and 40 ms at every question.", "paddle", stores.apply),
    Patch("groups", "Process groups read each other's addresses and hang.", "paddle", groups.apply),
    Patch("collectives", "Gloo lacks collectives, and its float16 sum is inf.", "paddle", collectives.apply),
    Patch("p2p", "Messages inside groups of more than two are not delivered.", "paddle", p2p.apply),
    Patch("mpu", "Tensor parallel operators have no CPU kernel.", "paddle", mpu.apply),
    Patch("bfloat16", "linear, matmul, c_embedding and adamw_ lack bfloat16.", "paddle", half.apply),
    Patch("tensor-cuda", "Tensor.cuda raises.", "paddle", device.tensor_cuda),
    Patch("synchronize", "paddle.device.synchronize raises.", "paddle", device.synchronize),
    Patch("device-id", "ParallelEnv has no device id.", "paddle", device.device_id),
    Patch("fused-buffers", "Tensor fusion refuses main memory.", "paddle", device.fused_buffers),
    Patch("inputs", "broadcast_input_data refuses main memory.", "paddle", mpu.input_data),
    Patch("sharding-v2", "clear_grad detaches gradients from their buffer.", "paddle", sharding.clear_in_place),
    Patch("sharding-2-3", "Sharding stages 2 and 3 refuse main memory.", "paddle", sharding.stages_two_and_three),
)


def _of_library() -> tuple[Patch, ...]:
    """Return the patches to the library; none when there is none."""
    if not is_installed(LIBRARY):
        return ()
    from . import formers

    package = LIBRARY
    split = Patch("split-fp32", "split_param is refused in float32.", package, formers.split_parameters_in_float32)
    if package == PADDLENLP:
        return (split,)
    from . import ernie_moe

    return (
        Patch("clip-fp32", "Clipping in float32 fails on a missing _inner_opt.", package, formers.clipping_in_float32),
        split,
        Patch("lora-evaluation", "Adapters need PaddleFleet's name.", package, formers.evaluation_of_adapters),
        Patch("ernie-experts", "The MoE block needs fused kernels.", package, ernie_moe.dense_experts),
        Patch("ernie-mtp", "Multi-token prediction misplaces arguments.", package, ernie_moe.prediction_positions),
        Patch("ernie-mtp-loss", "Multi-token prediction forgets its logits.", package, ernie_moe.prediction_loss),
        Patch("expert-gradients", "Different experts are averaged.", package, ernie_moe.expert_gradients),
        Patch(
            "expert-groups",
            "Pipelines refer to expert groups by name only.",
            package,
            ernie_moe.expert_groups_in_pipelines,
        ),
        Patch("expert-optimizer", "isinstance is asked about None.", package, ernie_moe.expert_parallel_optimizer),
    )


PATCHES: tuple[Patch, ...] = _PADDLE + _of_library()


def apply_all() -> tuple[str, ...]:
    """Apply the table and return the names in order."""
    for patch in PATCHES:
        patch.apply()
    return tuple(patch.name for patch in PATCHES)
