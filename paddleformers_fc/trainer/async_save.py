"""Saves beside training, under ``flex_async_save``.

At the step that is saved the training thread describes its tensors and captures the Trainer's state. From then on and
during the next passes, threads copy what this rank writes into a kept buffer
(:mod:`~paddleformers_fc.execute.async_snapshot`), and the next update waits for the copy (:mod:`.ema`).
After that a thread writes, commits and deletes old checkpoints. Its exchanges are those of a save in a step, over a
communicator of its own, so the training thread makes none.

When all ranks have finished a save, they agree on a step (:mod:`~paddleformers_fc.distributed.step_agreement`). At the
end of that step every training thread reports the save: reporters and ``on_save`` receive the state of the saved step,
or the error of the save is raised. The end of the loop, and an error in it, wait for every save.

One save may be under way, with a thread, a communicator and a buffer. A further save waits for it.

Memory: what this rank writes, and the parts of replicas that it hashes.

The end of every step of a Trainer, at which its loop does what background threads have agreed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from paddleformers_fc.distributed.channel import Channel, run_on_all
from paddleformers_fc.distributed.step_agreement import StepGate
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy, on_device
from paddleformers_fc.execute.memory import HostTensors
from paddleformers_fc.execute.replicas import ranges_of
from paddleformers_fc.execute.save import Capture, LivePart, SaveReport, expected_plan, snapshot, write_and_commit
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.text import size_text
from paddleformers_fc.trainer.documents import copied_state
from paddleformers_fc.trainer.job_state import background_communicator, channel_of, job_state_of
from paddleformers_fc.trainer.library import TrainerCallback, logger
from paddleformers_fc.trainer.save_job import (
    Encode,
    PreparedSave,
    capture_files,
    prepare,
    report_save,
    rotate,
    upload,
)

_NUMBER_BYTES = 8


@dataclass(frozen=True)
class _Begun:
    """A copy that has begun on the training thread, under the plan that is expected."""

    plan: SavePlan
    copy: SnapshotCopy


@dataclass(eq=False)
class _Save:
    """A save that is under way.

    Args:
        prepared: the save.
        encode: encodes the small files.
        state: the Trainer's state at its step.
        transfers: its copies between host and devices.
        waited: seconds that the training thread had waited for reads when it had begun.
        blocked: seconds that the training thread took to begin it.
        captured: ends when live tensors are not read any more.
        done: ends with the thread's work.
        report: reports the result on the training thread.
        is_event_deferred: whether ``on_save`` is called when the save is committed.
    """

    prepared: PreparedSave
    encode: Encode
    state: Any
    transfers: TransferFigures
    waited: float
    blocked: float
    captured: Future[None]
    done: Future[None]
    report: Callable[[], None]
    is_event_deferred: bool = False


@dataclass(frozen=True)
class _Workers:
    """The means of the saves: a communicator, a buffer, a thread that saves and one that helps to copy."""

    channel: Channel
    buffer: SnapshotBuffer
    thread: ThreadPoolExecutor
    helper: ThreadPoolExecutor


class AsyncSaves:
    """The saves of one Trainer, one at a time; every method is called on the training thread."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._workers: _Workers | None = None
        self._save: _Save | None = None
        self._in_loop = False

    def save(self, trainer: Any, metrics: dict[str, float] | None) -> None:
        """Begin to save the present step, as :class:`.job_state.Saver`."""
        started = time.monotonic()
        trainer.runtime_timer.start("checkpoint saving time")
        update_barrier = job_state_of(trainer).update_barrier
        workers = self._open(trainer.args)
        self._wait(trainer, f"before step {trainer.state.global_step} can be saved")
        measuring = ExitStack()
        prepared = prepare(trainer, metrics)
        transfers = measuring.enter_context(measured_transfers())
        begun = _begin_copy(workers, prepared)
        if begun is not None and update_barrier.passes_change_weights():
            # Training will wait for the whole copy, which continues while the files are captured.
            workers.helper.submit(begun.copy.help)
        encode, state = capture_files(trainer), copied_state(trainer.state)
        save = self._save = _Save(prepared, encode, state, transfers, 0.0, 0.0, Future(), Future(), lambda: None)
        save.done = workers.thread.submit(self._run, trainer, workers, save, begun, measuring)
        update_barrier.add(save.captured, *([] if begun is None else [begun.copy.help]))
        save.waited, save.blocked = update_barrier.waited, time.monotonic() - started
        trainer.runtime_timer.stop()
        if not self._in_loop:
            self.finish(trainer)

    @contextmanager
    def followed(self, trainer: Any) -> Iterator[None]:
        """Return a block in which the training loop runs; at its end every save is committed."""
        self._open(trainer.args)
        handler = trainer.callback_handler
        call = handler.call_event

        def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if event == "on_train_end":
                self.finish(trainer)
            if event == "on_save" and self._holds_event(state.global_step):
                return control
            return call(event, args, state, control, **kwargs)

        handler.call_event = call_event
        self._in_loop = True
        try:
            yield
            self.finish(trainer)
        except BaseException:
            self._finish_after_error(trainer)
            raise
        finally:
            self._in_loop = False
            handler.call_event = call

    def finish(self, trainer: Any) -> None:
        """Wait until the save under way is committed.

        Raises:
            FlexError: that of the save, the same on every rank.
        """
        self._wait(trainer, "before training can end")

    def _finish_after_error(self, trainer: Any) -> None:
        """Wait for the save under way after an error of training, which takes precedence."""
        try:
            self.finish(trainer)
        except Exception as error:  # The error of training is raised.
            logger.warning(f"A save failed after an error of training: {error}")

    def _open(self, args: Any) -> _Workers:
        """Open the communicator at the first use, which is at the same time on every rank."""

        def opened() -> _Workers:
            channel = background_communicator(args.flex_timeout)
            pools = (ThreadPoolExecutor(1, name) for name in ("flex-save", "flex-copy"))
            return _Workers(channel, SnapshotBuffer(), *pools)

        if self._workers is None:
            self._workers = run_on_all(channel_of(args), "opening a channel for saves beside training", opened)
        return self._workers

    def _holds_event(self, step: int) -> bool:
        """Return whether ``on_save`` of a step is called later, when its save is committed."""
        if self._save is None or self._save.prepared.step != step:
            return False
        self._save.is_event_deferred = True
        return True

    def _wait(self, trainer: Any, why: str) -> None:
        """Wait for the save under way and report it; every rank does so at the same step."""
        save = self._save
        if save is None:
            return
        if not save.done.done():
            started = time.monotonic()
            job_state_of(trainer).update_barrier.finish()
            wait([save.done])
            if trainer.args.should_log:
                seconds = time.monotonic() - started
                logger.info(f"Waited {seconds:.2f} s for the save of step {save.prepared.step}, {why}.")
        self._gate.run_now(save.report)

    def _run(self, trainer: Any, workers: _Workers, save: _Save, begun: _Begun | None, measuring: ExitStack) -> None:
        """Save, on the thread of the saves."""
        prepared, args, channel = save.prepared, trainer.args, workers.channel
        try:
            with measuring:
                try:
                    part = prepared.encoded(save.encode)  # Meanwhile other threads copy.
                    if begun is not None:
                        begun.copy.help()  # Before the ranks exchange anything.
                    taken = snapshot(part, _capture(trainer, workers, begun), channel, prepared.consistency)
                finally:
                    if begun is not None:
                        begun.copy.drop()
                    save.captured.set_result(None)
                report = write_and_commit(taken, prepared.directory, channel)
            # The state of the run names the former best checkpoint for a step more, which may be deleted here.
            upload(trainer, prepared, report)
            uploads = job_state_of(trainer).uploads
            rotate(args, prepared.directory, prepared.best, report.disks, channel, args.output_dir, uploads)
            save.report = partial(self._report_success, trainer, save, report)
        except Exception as error:  # Raised on the training thread.
            save.report = partial(self._report_failure, error)
        self._agree(channel, save.report)

    def _agree(self, channel: Channel, report: Callable[[], None]) -> None:
        """Have every training thread report a save at the same step."""

        def gather(step: int) -> list[int]:
            steps = channel.gather("agreeing on a step", step.to_bytes(_NUMBER_BYTES, "little")) or ()
            return [int.from_bytes(one, "little") for one in steps]

        try:
            channel.gather("ending a save", b"")  # Training is held for the second exchange alone.
            self._gate.agree(gather, report)
        except Exception as error:  # The save is reported in any case.
            logger.warning(f"The ranks have not agreed on a step at which a save is reported.\n{error}")
            self._gate.alone(report)

    def _report_success(self, trainer: Any, save: _Save, report: SaveReport) -> None:
        """Report a committed save, on the training thread."""
        self._save = None
        job_state = job_state_of(trainer)
        with job_state.best.shown_in(trainer):
            trainer.state.best_model_checkpoint = save.prepared.best
        blocked = save.blocked + job_state.update_barrier.waited - save.waited
        report_save(trainer, save.prepared, report, save.transfers, blocked)
        if save.is_event_deferred:
            # The handler's on_save would drop a save that is due at this step.
            handler = trainer.callback_handler
            trainer.control = handler.call_event("on_save", trainer.args, save.state, trainer.control)

    def _report_failure(self, error: Exception) -> None:
        """Raise the error of a save, on the training thread."""
        self._save = None
        raise error


def _begin_copy(workers: _Workers, prepared: PreparedSave) -> _Begun | None:
    """Begin to copy under the plan of the last save, which is right if no rank's shards have changed."""
    try:
        part = prepared.part()
        plan = expected_plan(part, workers.channel.rank)
        if plan is None:
            return None
        ranges = ranges_of(plan, workers.channel.rank, part.job.step, part.replicas)
        if not workers.buffer.has_room(part.tensors, ranges):
            return None
        return _Begun(plan, workers.buffer.begin(part.tensors, ranges))
    except Exception:  # The thread of the save gets the same error, and raises it on all ranks.
        return None


def _capture(trainer: Any, workers: _Workers, begun: _Begun | None) -> Capture:
    """Return a capture that copies into the buffer of the saves."""
    update_barrier = job_state_of(trainer).update_barrier

    def copied(part: LivePart, plan: SavePlan) -> HostTensors:
        if begun is not None:
            tensors = begun.copy.finish()
            if begun.plan is plan:
                return tensors
        ranges = ranges_of(plan, workers.channel.rank, part.job.step, part.replicas)
        if workers.buffer.reserve(part.tensors, ranges) and trainer.args.should_log:
            logger.info(
                f"Saves beside training keep {size_text(workers.buffer.capacity)} of host memory for a snapshot."
            )
        begin = partial(workers.buffer.begin, part.tensors, ranges)
        copying = update_barrier.call(begin) if on_device(part.tensors, ranges) else begin()
        return copying.finish()

    return lambda part, plan: run_on_all(workers.channel, "copying a snapshot", lambda: copied(part, plan))


class StepEnds(TrainerCallback):
    """Reports the steps of a loop to a gate.

    Args:
        gate: shared with the background threads of the Trainer.
    """

    def __init__(self, gate: StepGate) -> None:
        self.gate = gate

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin at the step of the checkpoint that is resumed."""
        self.gate.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Run what is agreed for this step."""
        self.gate.step_ended(state.global_step)
