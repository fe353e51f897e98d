"""Let the next optimizer update wait for reads of live tensors that run beside the passes.

Weights and states do not change between two updates of the optimizer. A thread may copy or average them while the next
passes run, and the next update waits for the rest. Copies from a device have to begin on the training thread. Another
thread requests them, and the training thread begins them between two passes of an accumulated step, at the latest when
it waits.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from paddleformers_fc.trainer.library import TrainerCallback

_T = TypeVar("_T")


def _nothing() -> None:
    """Do no part of a read, or end one wait for a call."""


class UpdateBarrier(TrainerCallback):
    """The reads that have begun since the last update.

    Args:
        passes_change_weights: returns whether a run changes tensors that are read already in the passes, as the
            overlapped broadcast of parameters does. Then every read is waited for at once.

    Attributes:
        passes_change_weights: the same.
        waited: seconds for which the training thread has waited.
    """

    def __init__(self, passes_change_weights: Callable[[], bool]) -> None:
        self.waited = 0.0
        self.passes_change_weights = passes_change_weights
        self._reads: list[tuple[Future[Any], Callable[[], None]]] = []
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def add(self, read: Future[Any], help: Callable[[], None] = _nothing) -> None:
        """Have the next update wait for a read of live tensors.

        Args:
            read: ends when live tensors are not read any more.
            help: does a part of the read on the training thread, instead of waiting.

        Raises:
            Exception: that of a read, where it is waited for at once.
        """
        read.add_done_callback(lambda _: self._calls.put(_nothing))
        self._reads.append((read, help))
        if self.passes_change_weights():
            self.finish()

    def call(self, work: Callable[[], _T]) -> _T:
        """Run work on the training thread, where it waits for a read of the calling thread.

        Raises:
            Exception: that of the work.
        """
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # The calling thread raises it.
                answer.set_exception(error)

        self._calls.put(run)
        return answer.result()

    def finish(self) -> None:
        """Wait until no read is under way.

        Raises:
            Exception: that of the first read that failed.
        """
        started = time.monotonic()
        for _, help in self._reads:
            help()
        while not all(read.done() for read, _ in self._reads):
            self._calls.get()()
        self._run_calls()
        reads, self._reads = self._reads, []
        self.waited += time.monotonic() - started
        for read, _ in reads:
            read.result()

    def _run_calls(self) -> None:
        """Run what is left, mostly the ends of reads that were not waited for."""
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the copies that reading threads have requested, so that they overlap the other passes of the step."""
        self._run_calls()

    def on_optimizer_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait before weights and states change."""
        self.finish()
