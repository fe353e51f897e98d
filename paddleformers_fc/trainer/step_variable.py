"""Set PaddleFormers' variable of the step before batches are made.

PaddleFormers 1.2.0 sets ``TRAINER_GLOBAL_STEP`` in each step of its training loop, for the first time while the thread
of the data loader makes batches. A new name may move the table of the environment, and that thread reads the table
without a lock: Hugging Face's tokenizers read ``TOKENIZERS_PARALLELISM`` at each text. Rarely, that is a segmentation
fault. A new value of a known name moves nothing.
"""

from __future__ import annotations

import os

NAME = "TRAINER_GLOBAL_STEP"


def begin(step: int) -> None:
    """Set the variable, before a data loader has threads.

    Args:
        step: number of finished steps.
    """
    os.environ[NAME] = str(step)
