"""Save on a signal: all ranks save at the same step and end.

The signal handler only counts. At step ends the training threads agree whether any rank has got a signal
(:mod:`~paddleformers_fc.distributed.step_agreement`), so a signal to one rank is enough. At the end of the step at
which they know, after all callbacks, the loop is directed to save and to stop. When the loop has returned and saves are
committed, the process ends with :data:`~paddleformers_fc.cpu_runtime.ranks.SAVED_ON_SIGNAL`.

Keep workers of data loaders alive when a signal is sent to the whole process group of a rank.

``paddle.distributed.launch``, Slurm and terminals signal process groups. A rank that saves on the signal still needs
the batches of its workers, and Paddle ends a rank whose worker was killed. Processes that :mod:`multiprocessing` forks
therefore block the signal, and a thread of each receives it. A signal of the parent process ends the worker, as in
Paddle's own handler. Any other is dropped while the parent is alive.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from types import FrameType
from typing import Any

from paddleformers_fc.cpu_runtime.ranks import SAVED_ON_SIGNAL
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.options import save_signal
from paddleformers_fc.trainer.rank_records import update_record
from paddleformers_fc.trainer.session import Session


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


@contextmanager
def listening(session: Session) -> Iterator[None]:
    """Context manager around the training loop, in which the signal is handled unless ``flex_save_on_signal`` is off.

    A process whose loop does not run in the main thread gets no signal; it saves when other ranks get one. When the
    loop has returned, and its saves are committed, the process ends if the loop was stopped.

    Raises:
        SystemExit: with :data:`.SAVED_ON_SIGNAL`.
    """
    name = save_signal(session.args)
    if name is None:
        yield
        return
    watch = session.signals = SignalWatch(signal.Signals[name])
    if threading.current_thread() is threading.main_thread():
        watch.listen()
    else:
        session.warn_once(f"{name} does not save: training does not run in the main thread of the process.")
    update_record(listens=watch.listens)
    try:
        yield
    finally:
        update_record(listens=False)
        session.signals = None
        watch.end()
    watch.leave_if_saved(session.trainer.state.global_step)


class SignalWatch:
    """Follows a signal through one training loop.

    Args:
        number: the signal.

    Attributes:
        listens: whether this process takes the signal.
        received: how often it has got it.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._process = os.getpid()
        self.listens = False
        self.received = 0
        self._former: Any = None
        self._shield: WorkerShield | None = None
        self._is_due = False

    def listen(self) -> None:
        """Install the handler, on the main thread."""
        self._shield = WorkerShield(self._number)
        self._former = signal.signal(self._number, self._receive)
        self.listens = True

    def direct(self, event: str, control: Any) -> None:
        """Direct a loop that has to stop: one save at the end of the step, and nothing else before it ends.

        Args:
            event: of the loop, after all callbacks.
            control: of the Trainer.
        """
        if not self._is_due or event not in ("on_step_end", "on_epoch_end"):
            return
        control.should_save = event == "on_step_end"
        if event == "on_step_end":
            control.should_training_stop = True
        control.should_evaluate = False
        if hasattr(control, "should_save_hf"):
            control.should_save_hf = False

    def end(self) -> None:
        """Restore the former handler when the loop has ended."""
        if signal.getsignal(self._number) == self._receive:
            signal.signal(self._number, signal.SIG_DFL if self._former is None else self._former)
        if self._shield is not None:
            self._shield.lower()
        if self.received and not self._is_due:
            logger.warning(f"{self._number.name} has not saved: training ended before a step was agreed on.")

    def leave_if_saved(self, step: int) -> None:
        """End the process if the loop was stopped, and its saves are committed.

        Raises:
            SystemExit: with :data:`.SAVED_ON_SIGNAL`.
        """
        if self._is_due:
            logger.info(f"Saved step {step} after {self._number.name}; the process ends with code {SAVED_ON_SIGNAL}.")
            raise SystemExit(SAVED_ON_SIGNAL)

    def become_due(self) -> None:
        """Have the loop save and stop at the end of this step: any rank has got the signal."""
        if not self._is_due:
            logger.warning(f"{self._number.name}: training is saved at the end of this step, and ends.")
        self._is_due = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: no lock and no log line, because the code that it interrupts may be in one."""
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)  # A forked process that is not shielded ends.
            os.kill(os.getpid(), number)
            return
        self.received += 1
