"""Asynchronous saves, under ``flex_async_save``.

Before the first step of a loop its saves are planned, and memory for what this rank writes is allocated. At the step
that is saved all ranks compare their plans. The training thread captures the Trainer's state, and begins to copy into
this memory (:mod:`~paddleformers_fc.execute.async_snapshot`). A thread goes on with it during the next passes, and the
next update waits for the copy (:mod:`.ema`). Then the thread writes.

The thread never communicates. At step ends the training threads agree whether all ranks have written
(:mod:`~paddleformers_fc.distributed.step_agreement`), and exchange checksums at the end of the same step. Then the
thread of the coordinator commits, and after another agreement it deletes old checkpoints. When that is agreed, every
training thread reports the save at the end of the same step: reporters and ``on_save`` receive the state of the saved
step, or the error of the save is raised. The end of the loop waits for the save under way.

One save may be under way, with a thread and a buffer. A further save waits for it.

Memory: what this rank writes, and the parts of replicas that it hashes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paddleformers_fc.distributed.channel import Channel, Part, Parts, exchange_part, run_on_all
from paddleformers_fc.distributed.step_agreement import StepAgreement
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy, snapshot_bytes
from paddleformers_fc.execute.memory import HostPieces
from paddleformers_fc.execute.replicas import ElementRanges, ranges_of
from paddleformers_fc.execute.save import LivePart, PlannedSave, SaveReport, begin_save, save_parts
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.text import size_text
from paddleformers_fc.trainer.documents import copied_state
from paddleformers_fc.trainer.job_state import channel_of, job_state_of
from paddleformers_fc.trainer.library import TrainerCallback, logger
from paddleformers_fc.trainer.save_job import (
    PreparedSave,
    capture_files,
    outcome,
    plan_ahead,
    prepare,
    report_save,
    rotate,
    upload,
)


@dataclass(eq=False)
class _Save:
    """A save that is under way.

    Args:
        prepared: the save.
        state: the Trainer's state at its step.
        transfers: its copies between host and devices.
        measuring: ends their count.
        waited: seconds that the training thread had waited for reads when it had begun.
        blocked: seconds that the training thread took to begin it.
        parts: the rest of its work.
        part: the part that the thread does.
        done: ends with it.
        report: reports the result, once there is one.
        is_event_deferred: whether ``on_save`` is called when the save is reported.
    """

    prepared: PreparedSave
    state: Any
    transfers: TransferFigures
    measuring: ExitStack
    waited: float
    blocked: float
    parts: Parts[SaveReport]
    part: Part
    done: Future[Any]
    report: Callable[[], None] | None = None
    is_event_deferred: bool = False


class AsyncSaves:
    """The saves of one Trainer, one at a time; every method is called on the training thread.

    Args:
        agreement: of the ranks at step ends.
    """

    def __init__(self, agreement: StepAgreement) -> None:
        self._agreement = agreement
        self._buffer = SnapshotBuffer()
        self._thread = ThreadPoolExecutor(1, "flex-save")
        self._save: _Save | None = None
        self._in_loop = False

    def save(self, trainer: Any, metrics: dict[str, float] | None) -> None:
        """Begin to save the present step, as :class:`.job_state.Saver`."""
        started = time.monotonic()
        trainer.runtime_timer.start("checkpoint saving time")
        update_barrier, channel = job_state_of(trainer).update_barrier, channel_of(trainer.args)
        self._wait(trainer, f"before step {trainer.state.global_step} can be saved")
        prepared = prepare(trainer, metrics)
        measuring = ExitStack()
        transfers = measuring.enter_context(measured_transfers())
        # The thread fills both before it writes.
        files: dict[str, bytes] = {}
        tensors: dict[str, Mapping[str, HostPieces]] = {}
        part = outcome(lambda: replace(prepared.part(), files=files))
        planned = begin_save(part, prepared.directory, channel, prepared.consistency, prepared.timer)
        begun = outcome(lambda: self._begin_copy(trainer, planned))
        copied = self._thread.submit(lambda: tensors.update(begun().finish()))
        encode, state = capture_files(trainer), copied_state(trainer.state)
        update_barrier.add(copied)
        try:
            parts = self._parts(trainer, prepared, save_parts(planned, tensors, channel), channel)
            first = next(parts)
        except BaseException:
            wait([copied])  # The next save uses the buffer.
            raise

        def write() -> Any:
            copied.result()
            files.update(encode())
            return first.work()

        blocked = time.monotonic() - started
        done = self._thread.submit(write)
        waited = update_barrier.waited
        self._save = _Save(prepared, state, transfers, measuring, waited, blocked, parts, first, done)
        trainer.runtime_timer.stop()
        if not self._in_loop:
            self.finish(trainer)

    @property
    def under_way(self) -> Part | None:
        """The part of a save that all ranks do; equal on all of them."""
        return None if self._save is None or self._save.report is not None else self._save.part

    @property
    def is_done(self) -> bool:
        """Whether this rank has done its part."""
        return self._save is not None and self._save.done.done()

    def advance(self, trainer: Any) -> None:
        """Exchange what the ranks have done, and begin the next part. All ranks call at the end of the same step."""
        save = self._save
        if save is None:
            return
        channel = channel_of(trainer.args)
        try:
            done = replace(save.part, work=save.done.result)
            save.part = exchange_part(save.parts, done, channel)
            works = save.part.source in (None, channel.rank)
            save.done = self._thread.submit(save.part.work if works else lambda: None)
        except StopIteration as ended:
            save.report = partial(self._report_success, trainer, save, ended.value)
        except Exception as error:  # Raised at the end of a training step.
            save.report = partial(_raise, error)

    def report(self) -> None:
        """Report a save that has ended. All ranks call at the end of the same step.

        Raises:
            FlexError: that of the save, the same on every rank.
        """
        save = self._save
        if save is not None and save.report is not None:
            self._save = None
            save.measuring.close()
            save.report()

    @contextmanager
    def followed(self, trainer: Any) -> Iterator[None]:
        """Context manager around the training loop; at its end every save is committed."""
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
            self._allocate(trainer)
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
        if self._save is None:
            return
        try:
            if self._agreement.all_end():
                self.finish(trainer)
                return
            # The others may be in an operation of a step, which does not end without this rank.
            name = self._save.prepared.directory.name
            logger.warning(f"{name} may not be committed: training has failed on some ranks alone.")
            self._save.parts.close()
        except Exception as error:  # The error of training is raised.
            logger.warning(f"A save failed after an error of training: {error}")
        self._save = None

    def _allocate(self, trainer: Any) -> None:
        """Plan the saves of a loop, and allocate their memory before the first step. Every rank must call.

        Raises:
            FlexError: the same on every rank.
        """
        channel = channel_of(trainer.args)
        part, plan = plan_ahead(trainer)

        def allocate() -> None:
            plan.refuse_failed()
            self._reserve(trainer, part, ranges_of(plan, None, part.replicas))

        run_on_all(channel, "allocating memory for saves", allocate)

    def _reserve(self, trainer: Any, part: LivePart, ranges: ElementRanges) -> None:
        """Have memory for a snapshot of these ranges.

        Raises:
            OptionError: there is too little.
        """
        needed = snapshot_bytes(part.tensors, ranges)
        try:
            is_new = self._buffer.reserve(part.tensors, ranges)
        except (MemoryError, OSError, RuntimeError) as error:
            raise OptionError(
                f"Asynchronous saves of this process need {size_text(needed)} of host memory, and it has less.",
                where="flex_async_save: true",
                evidence=[f"{type(error).__name__}: {error}"],
                next_step="Give the job more memory or locked memory (ulimit -l), train with more ranks, or remove "
                "flex_async_save.",
            ) from error
        if is_new and trainer.args.should_log:
            logger.info(f"Asynchronous saves keep {size_text(needed)} of host memory for a snapshot.")

    def _begin_copy(self, trainer: Any, planned: PlannedSave) -> SnapshotCopy:
        """Begin to copy what this rank writes. Memory is allocated here only if the first step was not foreseen."""
        part = planned.part
        ranges = ranges_of(planned.plan, part.job.step, part.replicas)
        self._reserve(trainer, part, ranges)
        return self._buffer.begin(part.tensors, ranges)

    def _parts(
        self, trainer: Any, prepared: PreparedSave, saving: Parts[SaveReport], channel: Channel
    ) -> Parts[SaveReport]:
        """Write, commit and delete old checkpoints."""
        report = yield from saving
        # The state of the run names the former best checkpoint for a step more, which may be deleted here.
        upload(trainer, prepared, report)
        args, uploads = trainer.args, job_state_of(trainer).uploads

        def delete() -> tuple[None, None]:
            rotate(args, prepared.directory, prepared.best, report.disks, channel, args.output_dir, uploads)
            return None, None

        if len(report.disks.sorted_leaders) == 1:
            yield Part("deleting old checkpoints", delete, type(None))
        else:
            delete()  # The leaders exchange.
        return report

    def _holds_event(self, step: int) -> bool:
        """Return whether ``on_save`` of a step is called later, when its save is committed."""
        if self._save is None or self._save.prepared.step != step:
            return False
        self._save.is_event_deferred = True
        return True

    def _wait(self, trainer: Any, why: str) -> None:
        """Wait for the save under way and report it; every rank does so at the same step."""
        save, started = self._save, time.monotonic()
        if save is None:
            return
        was_done = save.report is not None
        job_state_of(trainer).update_barrier.finish()
        while save.report is None:
            self.advance(trainer)
        if trainer.args.should_log and not was_done:
            seconds = time.monotonic() - started
            logger.info(f"Waited {seconds:.2f} s for the save of step {save.prepared.step}, {why}.")
        self.report()

    def _report_success(self, trainer: Any, save: _Save, report: SaveReport) -> None:
        """Report a committed save."""
        job_state = job_state_of(trainer)
        with job_state.best.shown_in(trainer):
            trainer.state.best_model_checkpoint = save.prepared.best
        blocked = save.blocked + job_state.update_barrier.waited - save.waited
        report_save(trainer, save.prepared, report, save.transfers, blocked)
        if save.is_event_deferred:
            # The handler's on_save would drop a save that is due at this step.
            handler = trainer.callback_handler
            trainer.control = handler.call_event("on_save", trainer.args, save.state, trainer.control)


def _raise(error: Exception) -> None:
    raise error


class StepEnds(TrainerCallback):
    """The ends of steps and of the batches of evaluations, at which the ranks agree.

    Args:
        trainer: the Trainer whose callback it is.
        agreement: of its ranks.
        saves: its asynchronous saves; None without them.
    """

    def __init__(self, trainer: Any, agreement: StepAgreement, saves: AsyncSaves | None) -> None:
        self._trainer, self._agreement, self._saves = trainer, agreement, saves

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit a save that all ranks have written."""
        if self._agreement.is_running:
            self._agree("evaluation")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit a save that all ranks have written, report it, and find out whether a rank has got a signal.

        Raises:
            FlexError: that of a save, the same on every rank.
        """
        self._agree("training")
        if self._saves is not None:
            self._saves.report()

    def _agree(self, kind: str) -> None:
        saves, signals = self._saves, job_state_of(self._trainer).signals
        agreed = self._agreement.read()
        if agreed is not None and agreed.is_signalled:
            signals.become_due()
        subject = saves and saves.under_way
        if saves and subject is not None and agreed is not None and agreed.subject is subject:
            saves.advance(self._trainer)
            subject = saves.under_way
        if subject is not None or signals is not None:
            is_done = saves is not None and saves.is_done
            self._agreement.begin_next(kind, subject, is_done, bool(signals and signals.received))
