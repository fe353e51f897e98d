"""Keep workers of data loaders alive when a signal is sent to the whole process group of a rank.

``paddle.distributed.launch``, Slurm and terminals signal process groups. A rank that saves on the signal still needs
the batches of its workers, and Paddle ends a rank whose worker was killed. Processes that :mod:`multiprocessing` forks
therefore block the signal, and a thread of each receives it. A signal of the parent process ends the worker, as in
Paddle's own handler. Any other is dropped while the parent is alive.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import util


class WorkerShield:
    """Shields the workers that are forked while it is up.

    Args:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._is_up = True
        util.register_after_fork(self, WorkerShield._shield)  # Python drops it with this object.

    def lower(self) -> None:
        """Shield no further workers."""
        self._is_up = False

    def _shield(self) -> None:
        """Run in a worker, before its own code."""
        if not self._is_up:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, {self._number})
        inherited = signal.getsignal(self._number)
        threading.Thread(target=_take, args=(self._number, inherited), name="flex-shield", daemon=True).start()


def _take(number: signal.Signals, inherited: int | Callable[..., object] | None) -> None:
    """Take the signals of a worker, on a thread."""
    parent = os.getppid()
    while signal.sigwaitinfo({number}).si_pid != parent == os.getppid():
        pass
    if signal.getsignal(number) == inherited:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # The worker has a handler of its own, which runs now.
    os.kill(os.getpid(), number)
