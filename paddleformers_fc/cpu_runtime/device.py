"""Device queries that fail in a CPU build, and the initialization of its OpenMP runtime.

``Tensor.cuda`` and ``paddle.device.synchronize`` raise, ``ParallelEnv.device_id`` is never set, and tensor fusion has
alignments for accelerators only. Here each returns the answer for a machine whose only device is main memory.

Intel's OpenMP, which Paddle's CPU build contains, sets an environment variable at its first use in a process, the first
forward pass. This may move the environment while other threads read it without a lock, such as Hugging Face's
tokenizers in a data loader. Of 1,700 trainings on a loaded machine, three ended there with a segmentation fault. So a
rank initializes OpenMP before it has such threads.

Cost: under a millisecond for OpenMP, once per forked process. ``Tensor.cuda`` copies, because callers overwrite it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed import parallel
from paddle.distributed.fleet.utils import tensor_fusion_helper

# A GPU's alignment, so that fused buffers have the same layout.
_ALIGNMENT_BYTES = 256
_OPENMP = Path(paddle.__file__).parent / "libs" / "libiomp5.so"


def tensor_cuda() -> None:
    """Let ``Tensor.cuda`` return a detached copy."""

    def cuda(self: Any, *_: Any, **__: Any) -> Any:
        return self.detach().clone()

    paddle.Tensor.cuda = cuda


def synchronize() -> None:
    """Let ``paddle.device.synchronize`` and its CUDA variant return at once on a CPU."""
    wait = paddle.device.synchronize

    def wait_for_device(device: Any = None) -> None:
        if not paddle.device.get_device().startswith("cpu"):
            wait(device)

    paddle.device.synchronize = wait_for_device
    paddle.device.cuda.synchronize = wait_for_device


def device_id() -> None:
    """Set ``ParallelEnv.device_id`` to 0."""
    parallel.ParallelEnv._device_id = 0


def fused_buffers() -> None:
    """Allow tensors to be fused into one buffer in main memory."""
    tensor_fusion_helper.alignment["cpu"] = _ALIGNMENT_BYTES
    tensor_fusion_helper.__dict__["__current_device_type__"] = "cpu"


def begin_openmp() -> None:
    """Initialize the OpenMP runtime of this process, if this build of Paddle contains it."""
    if _OPENMP.exists():
        # Any query initializes the runtime.
        ctypes.CDLL(str(_OPENMP)).omp_get_max_threads()
