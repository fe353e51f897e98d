"""Begin Intel's OpenMP runtime before a rank has threads that read the environment.

Paddle's CPU build contains it. At its first use in a process, which is the first forward pass, it adds a variable
(``__KMP_REGISTERED_LIB_<process id>``). A new name may move the table of the environment, and other threads read that
table without a lock: Hugging Face's tokenizers read ``TOKENIZERS_PARALLELISM`` at each text, in the thread of a data
loader. Of 1,700 trainings by PaddleFormers' command line on a loaded machine, three ended there with a segmentation
fault.

Cost: under a millisecond per process. A forked process begins it again.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import paddle

_LIBRARY = Path(paddle.__file__).parent / "libs" / "libiomp5.so"


def begin() -> None:
    """Let the OpenMP runtime of this process register itself now; a build without it needs nothing."""
    if _LIBRARY.exists():
        # The answer is of no interest: each question initialises the runtime.
        ctypes.CDLL(str(_LIBRARY)).omp_get_max_threads()
