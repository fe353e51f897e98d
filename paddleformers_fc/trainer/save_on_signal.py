"""Save on a signal: all ranks save at the same step and end.

The signal handler only counts. At step ends the ranks agree whether any of them has received the signal
(:mod:`~paddleformers_fc.distributed.step_agreement`), so a signal to one rank is enough. The loop then saves and stops
at the end of the step. After all saves are committed, the process ends with
:data:`~paddleformers_fc.cpu_runtime.ranks.SAVED_ON_SIGNAL`.

Launchers and terminals send a signal to the process group, including data loader workers. The rank still needs their
batches, and Paddle ends a rank whose worker was killed. So forked workers block the signal, and a thread in each
handles it: a signal from the parent ends the worker, others are dropped while the parent is alive.
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
    """Protects forked workers from a signal.

    Args:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._is_active = True
        util.register_after_fork(self, WorkerShield._shield)  # A weak reference: it ends with this object.

    def deactivate(self) -> None:
        """Protect no further workers."""
        self._is_active = False

    def _shield(self) -> None:
        """Run in a worker, before its own code."""
        if not self._is_active:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, {self._number})
        inherited = signal.getsignal(self._number)
        threading.Thread(target=_wait_for_end, args=(self._number, inherited), name="flex-shield", daemon=True).start()


def _wait_for_end(number: signal.Signals, inherited: int | Callable[..., object] | None) -> None:
    """End the worker at a signal from its parent, or at any after the end of its parent."""
    parent = os.getppid()
    while signal.sigwaitinfo({number}).si_pid != parent == os.getppid():
        pass
    if signal.getsignal(number) == inherited:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # The worker has its own handler: run it.
    os.kill(os.getpid(), number)


@contextmanager
def listening(session: Session) -> Iterator[None]:
    """Context manager around the training loop that handles the signal of ``flex_save_on_signal``.

    If the loop does not run in the main thread, this process cannot handle signals, but saves when another rank
    receives one.

    Raises:
        SystemExit: with :data:`.SAVED_ON_SIGNAL`, after a signal has stopped the loop and all saves are committed.
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
    """Handles a signal during one training loop.

    Args:
        number: the signal.

    Attributes:
        listens: whether this process handles the signal.
        received: how often it has received the signal.
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
        """Install the handler. Call it on the main thread."""
        self._shield = WorkerShield(self._number)
        self._former = signal.signal(self._number, self._receive)
        self.listens = True

    def direct(self, event: str, control: Any) -> None:
        """If a signal is due, let the loop save at the end of the step and then stop, without any evaluation.

        Args:
            event: the event of the loop, after all callbacks have run.
            control: the Trainer's control, which is changed.
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
        """Restore the former handler."""
        if signal.getsignal(self._number) == self._receive:
            signal.signal(self._number, signal.SIG_DFL if self._former is None else self._former)
        if self._shield is not None:
            self._shield.deactivate()
        if self.received and not self._is_due:
            logger.warning(f"No save on {self._number.name}: training ended before the ranks agreed on a step.")

    def leave_if_saved(self, step: int) -> None:
        """End the process if the signal has stopped the loop.

        Raises:
            SystemExit: with :data:`.SAVED_ON_SIGNAL`.
        """
        if self._is_due:
            logger.info(f"Saved step {step} after {self._number.name}; the process ends with code {SAVED_ON_SIGNAL}.")
            raise SystemExit(SAVED_ON_SIGNAL)

    def become_due(self) -> None:
        """Let the loop save and stop at the end of this step: some rank has received the signal."""
        if not self._is_due:
            logger.warning(f"{self._number.name}: training saves at the end of this step, and ends.")
        self._is_due = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Count the signal. Take no lock and log nothing: the interrupted code may hold the lock."""
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)  # An unprotected forked process: end it.
            os.kill(os.getpid(), number)
            return
        self.received += 1
