"""Device queries that a CPU build answers with an error, and the begin of its OpenMP runtime.

``Tensor.cuda`` and ``paddle.device.synchronize`` raise, ``ParallelEnv.device_id`` is never set, and the fusion of
tensors into one buffer has alignments for accelerators only. Each query returns the answer for a machine whose one
device is its memory.

Paddle's CPU build contains Intel's OpenMP. At its first use in a process, which is the first forward pass, it adds a
variable (``__KMP_REGISTERED_LIB_<process id>``). A new name may move the table of the environment, and other threads
read that table without a lock: Hugging Face's tokenizers read ``TOKENIZERS_PARALLELISM`` at each text, in the thread of
a data loader. Of 1,700 trainings by PaddleFormers' command line on a loaded machine, three ended there with a
segmentation fault. So a rank begins OpenMP before it has such threads.

Cost: under a millisecond for OpenMP, again in a forked process. ``Tensor.cuda`` copies, as on an accelerator: callers
overwrite what they have moved.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed import parallel
from paddle.distributed.fleet.utils import tensor_fusion_helper

# The alignment of a GPU, so that fused buffers have the layout they have there.
_ALIGNMENT_BYTES = 256
_OPENMP = Path(paddle.__file__).parent / "libs" / "libiomp5.so"


def tensor_cuda() -> None:
    """Let ``Tensor.cuda`` return a detached copy."""

    def cuda(self: Any, *_: Any, **__: Any) -> Any:
        return self.detach().clone()

    paddle.Tensor.cuda = cuda


def synchronize() -> None:
    """Let ``paddle.device.synchronize`` and its CUDA twin return at once on a CPU: no work is pending."""
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
    """Let the OpenMP runtime of this process register itself now; a build without it needs nothing."""
    if _OPENMP.exists():
        # The answer is of no interest: each question initialises the runtime.
        ctypes.CDLL(str(_OPENMP)).omp_get_max_threads()
