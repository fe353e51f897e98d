"""Save on a signal: all ranks save at the same step and end.

The signal handler only counts. A thread of every rank polls the count and a counter in the store of the job, so a
signal to one rank is enough. Then the threads agree on a step that all loops reach
(:mod:`~paddleformers_fc.distributed.step_agreement`). At the end of it, after all callbacks, the loop is directed to
save and to stop. When the loop has returned and saves are committed, the process ends with
:data:`~paddleformers_fc.cpu_runtime.ranks.SAVED_ON_SIGNAL`. The training thread makes no exchange.

If the ranks do not agree in time, training continues, and the next signal has its original effect.

Keep workers of data loaders alive when a signal is sent to the whole process group of a rank.

``paddle.distributed.launch``, Slurm and terminals signal process groups. A rank that saves on the signal still needs
the batches of its workers, and Paddle ends a rank whose worker was killed. Processes that :mod:`multiprocessing` forks
therefore block the signal, and a thread of each receives it. A signal of the parent process ends the worker, as in
Paddle's own handler. Any other is dropped while the parent is alive.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import util
from types import FrameType
from typing import Any

from paddleformers_fc.cpu_runtime.ranks import SAVED_ON_SIGNAL
from paddleformers_fc.distributed.liveness import KEY_PREFIX
from paddleformers_fc.distributed.step_agreement import StepAgreement, StepGate
from paddleformers_fc.distributed.store_client import StoreClient, job_store_address
from paddleformers_fc.errors import FlexError
from paddleformers_fc.trainer.job_state import channel_of, job_state_of
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.options import save_signal
from paddleformers_fc.trainer.rank_records import process_recorded


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


_LOOK_SECONDS = 0.25
_STORE_SECONDS = 5.0
_RETRY_SECONDS = 15.0
_WARN_SECONDS = 60.0
_JOIN_SECONDS = 2.0

_loops = itertools.count()
"""Every training loop of a job has keys of its own in the store; all ranks run the same loops."""


@contextmanager
def listening(trainer: Any) -> Iterator[SignalWatch | None]:
    """Return a block in which the signal is handled; None if ``flex_save_on_signal`` is off.

    A process whose loop does not run in the main thread gets no signal; it saves when other ranks get one.
    """
    name, loop, job_state = save_signal(trainer.args), next(_loops), job_state_of(trainer)
    if name is None:
        yield None
        return
    watch = SignalWatch(signal.Signals[name], job_state.gate, _connect_later(trainer.args, loop))
    if threading.current_thread() is not threading.main_thread():
        reason = "training does not run in the main thread of the process"
    elif not watch.is_reachable:
        reason = "the environment lacks the address of the job's store"
    else:
        reason = ""
        watch.listen()
    if reason:
        job_state.warn_once(trainer.args, f"{name} does not save: {reason}.")
    try:
        with process_recorded() if watch.listens else nullcontext(), watch.directing(trainer):
            yield watch
    finally:
        watch.end()


class _Alone:
    """The agreement of a single process."""

    poll_seconds = _LOOK_SECONDS

    def request(self) -> None:
        """Request a save of this process."""

    def is_requested(self) -> bool:
        return False

    def meet(self) -> None:
        """Wait for this process."""

    def highest(self, step: int) -> int:
        return step


class _Ranks:
    """The connection of one rank's thread to the agreement of a loop.

    Args:
        rank: this rank.
        world_size: number of ranks.
        prefix: of the keys of the loop.
        address: of the store; None if it is unknown.
    """

    def __init__(self, rank: int, world_size: int, prefix: str, address: tuple[str, int] | None) -> None:
        self._place = rank, world_size, prefix
        self._address = address
        self.is_reachable = world_size == 1 or address is not None

    def open(self) -> StepAgreement | _Alone:
        """Return the agreement over a connection of its own.

        Raises:
            PeerError: the store does not answer.
        """
        if self._address is None or self._place[1] == 1:
            return _Alone()
        return StepAgreement(StoreClient(self._address, _STORE_SECONDS, _STORE_SECONDS), *self._place)


def _connect_later(args: Any, loop: int) -> _Ranks:
    channel = channel_of(args)
    prefix = f"{KEY_PREFIX}-signal-{loop}"
    return _Ranks(channel.rank, channel.world_size, prefix, job_store_address())


class SignalWatch:
    """Follows a signal through one training loop.

    Args:
        number: the signal.
        gate: the ends of the steps of the loop.
        ranks: the connection to the other ranks.

    Attributes:
        is_reachable: whether this rank can agree with the others.
        listens: whether this process takes the signal.
    """

    def __init__(self, number: signal.Signals, gate: StepGate, ranks: _Ranks) -> None:
        self.is_reachable = ranks.is_reachable
        self._number = number
        self._gate = gate
        self._ranks = ranks
        self._process = os.getpid()
        self.listens = False
        self._former: Any = None
        self._shield: WorkerShield | None = None
        self._received = 0
        self._has_failed = False
        self._is_due = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="flex-signal", daemon=True)

    def listen(self) -> None:
        """Install the handler, on the main thread."""
        self._shield = WorkerShield(self._number)
        self._former = signal.signal(self._number, self._receive)
        self.listens = True

    @contextmanager
    def directing(self, trainer: Any) -> Iterator[None]:
        """Return a block in which the loop of a Trainer saves and stops at the agreed step."""
        handler = trainer.callback_handler
        call = handler.call_event

        def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control = call(event, args, state, control, **kwargs)
            if self._is_due:
                _direct(event, control)
            return control

        handler.call_event = call_event
        self._thread.start()
        try:
            yield
        finally:
            handler.call_event = call

    def end(self) -> None:
        """Restore the former handler when the loop has ended."""
        if signal.getsignal(self._number) == self._receive:
            signal.signal(self._number, signal.SIG_DFL if self._former is None else self._former)
        if self._shield is not None:
            self._shield.lower()
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)  # A thread that waits for other ranks is not joined.
        if self._received and not self._is_due:
            logger.warning(f"{self._number.name} has not saved: training ended before a step was agreed on.")

    def leave_if_saved(self, step: int) -> None:
        """End the process if the loop was stopped, and its saves are committed.

        Raises:
            SystemExit: with :data:`.SAVED_ON_SIGNAL`.
        """
        if self._is_due:
            logger.info(f"Saved step {step} after {self._number.name}; the process ends with code {SAVED_ON_SIGNAL}.")
            raise SystemExit(SAVED_ON_SIGNAL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: no lock and no log line, because the code that it interrupts may be in one."""
        if os.getpid() != self._process or self._has_failed:
            inherited = os.getpid() != self._process  # A forked process that is not shielded ends.
            signal.signal(number, signal.SIG_DFL if inherited or self._former is None else self._former)
            os.kill(os.getpid(), number)
            return
        self._received += 1

    def _follow(self) -> None:
        """Wait for a request and agree, on the thread."""
        try:
            agreement = self._wait_for_request()
            if agreement is None:
                return
            logger.warning(f"{self._number.name}: training is saved at the next step that all ranks reach, and ends.")
            agreement.meet()
            self._gate.agree(lambda step: [agreement.highest(step)], self._become_due)
        except (OSError, FlexError) as error:
            self._has_failed = True
            if not self._ended.is_set():
                logger.error(
                    f"{self._number.name} does not save: the ranks have not agreed on a step. Training continues, and "
                    f"the next {self._number.name} has its original effect."
                    + "".join(f"\n  - {line}" for line in getattr(error, "evidence", [str(error)]))
                )
            return
        self._log_further_signals()

    def _wait_for_request(self) -> StepAgreement | _Alone | None:
        """Return the agreement once a rank has requested it; None when the loop has ended.

        Raises:
            OSError: this rank has the signal, and the store does not answer.
            PeerError: likewise.
        """
        agreement: StepAgreement | _Alone | None = None
        answered, next_look, has_warned = time.monotonic(), 0.0, False
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if not self._received and now < next_look:
                continue
            try:
                agreement = agreement or self._ranks.open()
                next_look = now + agreement.poll_seconds
                if self._received:
                    agreement.request()
                if self._received or agreement.is_requested():
                    return agreement
                answered = now
            except (OSError, FlexError) as error:
                agreement, silent = None, time.monotonic() - answered
                if self._received and silent > _RETRY_SECONDS:
                    raise
                if silent > _WARN_SECONDS and not has_warned:
                    has_warned = True
                    logger.warning(f"{self._number.name} of other ranks is not noticed at present: {error}")
        return None

    def _log_further_signals(self) -> None:
        logged = max(1, self._received)
        while not self._ended.wait(_LOOK_SECONDS):
            if self._received > logged:
                logged = self._received
                logger.info(f"{self._number.name} again: training is already being saved, and ends then.")

    def _become_due(self) -> None:
        """Act at the agreed step; on the thread of the loop."""
        self._is_due = True


def _direct(event: str, control: Any) -> None:
    """Direct the loop: one save at the end of the step, and nothing else before it ends."""
    if event == "on_step_end":
        control.should_save = True
        control.should_training_stop = True
    elif event == "on_epoch_end":
        control.should_save = False
    else:
        return
    control.should_evaluate = False
    if hasattr(control, "should_save_hf"):
        control.should_save_hf = False
