"""Reads of live tensors that run beside the forward and backward passes.

Between two updates of the optimizer nothing changes weights and states. So a thread may copy or average them while the
next passes run, and the next update waits for what is not done yet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from paddleformers_fc.trainer.host import TrainerCallback


class BetweenSteps(TrainerCallback):
    """The reads that have begun since the last update.

    Args:
        passes_change_weights: whether a run changes tensors that are read already in the passes, as the overlapped
            broadcast of parameters does. Then every read is waited for at once.
    """

    def __init__(self, passes_change_weights: Callable[[], bool]) -> None:
        self._passes_change_weights = passes_change_weights
        self._reads: list[Future[Any]] = []

    def add(self, read: Future[Any]) -> None:
        """Have the next update wait for a read of live tensors.

        Raises:
            Exception: that of a read, where it is waited for at once.
        """
        self._reads.append(read)
        if self._passes_change_weights():
            self.finish()

    def finish(self) -> None:
        """Wait until no read is under way.

        Raises:
            Exception: that of the first read that failed.
        """
        reads, self._reads = self._reads, []
        for read in reads:
            read.exception()  # All of them end before an error is raised.
        for read in reads:
            read.result()

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait before weights and states change."""
        self.finish()
