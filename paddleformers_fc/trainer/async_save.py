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
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from paddleformers_fc.distributed.channel import Channel, Part, Parts, exchange_part, run_on_all
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy, snapshot_bytes
from paddleformers_fc.execute.memory import HostPieces
from paddleformers_fc.execute.replicas import ElementRanges
from paddleformers_fc.execute.save import LivePart, PlannedSave, SaveReport, begin_save, save_parts
from paddleformers_fc.execute.save_plan import ranges_of
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.text import size_text
from paddleformers_fc.trainer.documents import copied_state
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.save import (
    PreparedSave,
    SyncSaves,
    capture_files,
    outcome,
    plan_ahead,
    prepare,
    report_save,
    rotate,
    upload,
)
from paddleformers_fc.trainer.session import Session
from paddleformers_fc.trainer.tiers import Tier


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
    """The saves of one Trainer, one at a time, as :class:`.session.Saver`; called on the training thread."""

    def __init__(self) -> None:
        self._buffer = SnapshotBuffer()
        self._thread = ThreadPoolExecutor(1, "flex-save")
        self._save: _Save | None = None
        self._in_loop = False

    def save(self, session: Session, metrics: dict[str, float] | None, tier: Tier) -> None:
        """Begin to save the present step.

        While ``output_dir`` is written, a local save blocks training for its own time, and not for the slower disk.
        """
        if tier.is_local and self._save is not None and not self._save.prepared.tier.is_local:
            SyncSaves().save(session, metrics, tier)
            return
        started = time.monotonic()
        trainer, channel = session.trainer, session.channel
        trainer.runtime_timer.start("checkpoint saving time")
        self._wait(session, f"before step {trainer.state.global_step} can be saved")
        prepared = prepare(session, metrics, tier)
        measuring = ExitStack()
        transfers = measuring.enter_context(measured_transfers())
        # The thread fills both before it writes.
        files: dict[str, bytes] = {}
        tensors: dict[str, Mapping[str, HostPieces]] = {}
        part = outcome(lambda: structs.replace(prepared.part(), files=files))
        planned = begin_save(part, prepared.directory, channel, prepared.consistency, prepared.timer)
        begun = outcome(lambda: self._begin_copy(session, planned))
        copied = self._thread.submit(lambda: tensors.update(begun().finish()))
        encode, state = capture_files(session), copied_state(trainer.state)
        session.barrier.add(copied)
        try:
            parts = self._parts(session, prepared, save_parts(planned, tensors, channel), channel)
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
        waited = session.barrier.waited
        self._save = _Save(prepared, state, transfers, measuring, waited, blocked, parts, first, done)
        trainer.runtime_timer.stop()
        if not self._in_loop:
            self.finish(session)

    @property
    def under_way(self) -> Part | None:
        """The part of a save that all ranks do; equal on all of them."""
        return None if self._save is None or self._save.report is not None else self._save.part

    @property
    def is_done(self) -> bool:
        """Whether this rank has done its part."""
        return self._save is not None and self._save.done.done()

    def advance(self, session: Session) -> None:
        """Exchange what the ranks have done, and begin the next part. All ranks call at the end of the same step."""
        save = self._save
        if save is None:
            return
        channel = session.channel
        try:
            done = structs.replace(save.part, work=save.done.result)
            save.part = exchange_part(save.parts, done, channel)
            works = save.part.source in (None, channel.rank)
            save.done = self._thread.submit(save.part.work if works else lambda: None)
        except StopIteration as ended:
            save.report = partial(self._report_success, session, save, ended.value)
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
    def draining(self, session: Session) -> Iterator[None]:
        """Context manager around the training loop; at its end every save is committed."""
        self._in_loop = True
        try:
            self._allocate(session)
            yield
            self.finish(session)
        except BaseException:
            self._finish_after_error(session)
            raise
        finally:
            self._in_loop = False

    def finish(self, session: Session) -> None:
        """Wait until the save under way is committed.

        Raises:
            FlexError: that of the save, the same on every rank.
        """
        self._wait(session, "before training can end")

    def _finish_after_error(self, session: Session) -> None:
        """Wait for the save under way after an error of training, which takes precedence."""
        if self._save is None:
            return
        try:
            if session.agreement.all_end():
                self.finish(session)
                return
            # The others may be in an operation of a step, which does not end without this rank.
            name = self._save.prepared.directory.name
            logger.warning(f"{name} may not be committed: training has failed on some ranks alone.")
            self._save.parts.close()
        except Exception as error:  # The error of training is raised.
            logger.warning(f"A save failed after an error of training: {error}")
        self._save = None

    def _allocate(self, session: Session) -> None:
        """Plan the saves of a loop, and allocate their memory before the first step. Every rank must call.

        Raises:
            FlexError: the same on every rank.
        """
        part, plan = plan_ahead(session)

        def allocate() -> None:
            plan.raise_failures()
            self._reserve(session, part, ranges_of(plan, None, part.replicas))

        run_on_all(session.channel, "allocating memory for saves", allocate)

    def _reserve(self, session: Session, part: LivePart, ranges: ElementRanges) -> None:
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
        if is_new and session.args.should_log:
            logger.info(f"Asynchronous saves keep {size_text(needed)} of host memory for a snapshot.")

    def _begin_copy(self, session: Session, planned: PlannedSave) -> SnapshotCopy:
        """Begin to copy what this rank writes. Memory is allocated here only if the first step was not foreseen."""
        part = planned.part
        ranges = ranges_of(planned.plan, part.job.step, part.replicas)
        self._reserve(session, part, ranges)
        return self._buffer.begin(part.tensors, ranges)

    def _parts(
        self, session: Session, prepared: PreparedSave, saving: Parts[SaveReport], channel: Channel
    ) -> Parts[SaveReport]:
        """Write, commit and delete old checkpoints."""
        report = yield from saving
        # The state of the run names the former best checkpoint for a step more, which may be deleted here.
        upload(session, prepared, report)

        def delete() -> tuple[None, None]:
            rotate(session, prepared.tier, prepared.directory, prepared.best, report.disks, channel)
            return None, None

        if len(report.disks.sorted_leaders) == 1:
            yield Part("deleting old checkpoints", delete, type(None))
        else:
            delete()  # The leaders exchange.
        return report

    def defers_event(self, step: int) -> bool:
        """Return whether ``on_save`` of a step is called later, when its save is committed."""
        if self._save is None or self._save.prepared.step != step:
            return False
        self._save.is_event_deferred = True
        return True

    def _wait(self, session: Session, why: str) -> None:
        """Wait for the save under way and report it; every rank does so at the same step."""
        save, started = self._save, time.monotonic()
        if save is None:
            return
        was_done = save.report is not None
        session.barrier.finish()
        while save.report is None:
            self.advance(session)
        if session.args.should_log and not was_done:
            seconds = time.monotonic() - started
            logger.info(f"Waited {seconds:.2f} s for the save of step {save.prepared.step}, {why}.")
        self.report()

    def _report_success(self, session: Session, save: _Save, report: SaveReport) -> None:
        """Report a committed save."""
        trainer = session.trainer
        with session.best.visible_in(trainer):
            trainer.state.best_model_checkpoint = save.prepared.best
        blocked = save.blocked + session.barrier.waited - save.waited
        report_save(session, save.prepared, report, save.transfers, blocked)
        if save.is_event_deferred:
            # The handler's on_save would drop a save that is due at this step.
            handler = trainer.callback_handler
            trainer.control = handler.call_event("on_save", trainer.args, save.state, trainer.control)


def _raise(error: Exception) -> None:
    raise error
