"""Asynchronous saves, under ``flex_async_save``; without it, :class:`Saver` saves at once (:func:`.save.save_now`).

Saves are planned, and a buffer for this rank's shards is allocated, before the first step. At a save, the training
thread compares plans with the other ranks, captures the Trainer's state and begins the copy into the buffer. A save
thread finishes the copy during the next passes (the next update waits for it, see :mod:`.ema`) and writes the files.

The save thread never communicates. At step ends the training threads agree whether all ranks have written, and
exchange checksums (:mod:`~paddleformers_fc.distributed.step_agreement`). The coordinator's save thread then commits
and, after another agreement, deletes old checkpoints. Finally all training threads report the save at the end of the
same step, or raise its error. One save runs at a time; the next one, and the end of the loop, wait for it.

Memory: what this rank writes, and the ranges of replicas that it hashes.
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
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy, ranges_of, snapshot_bytes
from paddleformers_fc.execute.memory import HostPieces
from paddleformers_fc.execute.replicas import ElementRanges
from paddleformers_fc.execute.save import (
    JobRecord,
    LivePart,
    PlannedSave,
    SaveReport,
    begin_save,
    live_part,
    plan_save,
    save_parts,
)
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.text import size_text
from paddleformers_fc.trainer import ema, live_roles, optimizers
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.documents import copied_state
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.save import (
    PreparedSave,
    capture_files,
    outcome,
    prepare,
    raise_error,
    report_save,
    rotate,
    save_now,
    upload,
)
from paddleformers_fc.trainer.session import Session
from paddleformers_fc.trainer.tiers import Tier


def plan_ahead(session: Session) -> tuple[LivePart, SavePlan]:
    """Plan the saves of a run before its first step. Every rank must call.

    The plan expects the optimizer states that the first step will create. If it creates others, the first save is
    planned again.

    Returns:
        this rank's part of a save, and the plan.
    Raises:
        FlexError: the same on every rank.
    """
    trainer, args = session.trainer, session.args

    def expected() -> LivePart:
        optimizers.build_buffers(trainer.model_wrapped, trainer.optimizer)
        roles = live_roles.LiveModel(trainer.model, trainer.optimizer).roles(may_expect=True)
        average = {} if session.average is None else session.average.roles() or ema.expected_roles(roles)
        if args.ignore_save_lr_and_optim:
            roles = live_roles.model_roles(trainer.model)
        job = JobRecord(trainer.state.global_step, 0, {})
        return live_part({**roles, **average}, describe_model(trainer.model), {}, job, args.flex_check_replicas)

    return plan_save(expected, session.channel, session.consistency("planning saves"))


@dataclass(eq=False)
class _Save:
    """The save in progress.

    Args:
        prepared: the prepared save.
        state: the Trainer's state at the saved step.
        transfers: counts copies between host and devices.
        measuring: stops this count when it is closed.
        waited: seconds for which the update barrier had blocked training when the save began.
        blocked: seconds that the training thread took to begin the save.
        parts: the remaining work.
        part: the work that the save thread does now.
        done: the future of this work.
        report: reports the result; None until the save has ended.
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


class Saver:
    """Saves the checkpoints of one Trainer. Every rank must call every method, on the training thread.

    Args:
        is_async: whether saves are asynchronous; otherwise no save is in progress after a step.
    """

    def __init__(self, is_async: bool) -> None:
        self._is_async = is_async
        self._buffer = SnapshotBuffer()
        self._thread = ThreadPoolExecutor(1, "flex-save")
        self._save: _Save | None = None
        self._in_loop = False

    def save(self, session: Session, metrics: dict[str, float] | None, tier: Tier) -> None:
        """Save the current step, or begin to. The arguments and errors are those of :func:`.save.save_now`.

        A local save that falls into a save to ``output_dir`` is blocking, so that it does not wait for the slower disk.
        """
        if not self._is_async or (tier.is_local and self._save is not None and not self._save.prepared.tier.is_local):
            save_now(session, metrics, tier)
        else:
            self._begin(session, metrics, tier)

    def _begin(self, session: Session, metrics: dict[str, float] | None, tier: Tier) -> None:
        started = time.monotonic()
        trainer, channel = session.trainer, session.channel
        trainer.runtime_timer.start("checkpoint saving time")
        self._wait(session, f"before step {trainer.state.global_step} can be saved")
        prepared = prepare(session, metrics, tier)
        measuring = ExitStack()
        transfers = measuring.enter_context(measured_transfers())
        # The save thread fills both before it writes.
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
        """The part of a save that runs now; the same on all ranks."""
        return None if self._save is None or self._save.report is not None else self._save.part

    @property
    def is_done(self) -> bool:
        """Whether this rank has done its part."""
        return self._save is not None and self._save.done.done()

    def advance(self, session: Session) -> None:
        """Exchange the results of a part, and begin the next one. All ranks call at the end of the same step."""
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
            save.report = partial(raise_error, error)

    def report(self) -> None:
        """Report a save that has ended. All ranks call at the end of the same step.

        Raises:
            FlexError: the save failed; the same on every rank.
        """
        save = self._save
        if save is not None and save.report is not None:
            self._save = None
            save.measuring.close()
            save.report()

    @contextmanager
    def draining(self, session: Session) -> Iterator[None]:
        """Context manager around the training loop; its exit waits for the save in progress."""
        self._in_loop = True
        try:
            if self._is_async:
                self._allocate(session)
            yield
            self.finish(session)
        except BaseException:
            self._finish_after_error(session)
            raise
        finally:
            self._in_loop = False

    def finish(self, session: Session) -> None:
        """Wait until the save in progress is committed.

        Raises:
            FlexError: the save failed; the same on every rank.
        """
        self._wait(session, "before training can end")

    def _finish_after_error(self, session: Session) -> None:
        """Wait for the save in progress after a training error, which takes precedence over errors of the save."""
        if self._save is None:
            return
        try:
            if session.agreement.all_end():
                self.finish(session)
                return
            # Other ranks may be in a collective of the step, which does not end without this rank.
            name = self._save.prepared.directory.name
            logger.warning(f"{name} may not be committed: training has failed on some ranks only.")
            self._save.parts.close()
        except Exception as error:  # The training error is raised instead.
            logger.warning(f"A save failed after training had failed: {error}")
        self._save = None

    def _allocate(self, session: Session) -> None:
        """Plan the saves of a loop and allocate their buffer before the first step. Every rank must call.

        Raises:
            FlexError: the same on every rank.
        """
        part, plan = plan_ahead(session)

        def allocate() -> None:
            plan.raise_failures()
            self._reserve(session, part, ranges_of(plan, None, part.replicas))

        run_on_all(session.channel, "allocating memory for saves", allocate)

    def _reserve(self, session: Session, part: LivePart, ranges: ElementRanges) -> None:
        """Allocate memory for a snapshot of these ranges, unless the buffer has it.

        Raises:
            OptionError: there is not enough memory.
        """
        needed = snapshot_bytes(part.tensors, ranges)
        try:
            is_new = self._buffer.reserve(part.tensors, ranges)
        except (MemoryError, OSError, RuntimeError) as error:
            raise OptionError(
                f"Asynchronous saves of this process need {size_text(needed)} of host memory, more than is available.",
                where="flex_async_save: true",
                evidence=[f"{type(error).__name__}: {error}"],
                next_step="Give the job more memory or locked memory (ulimit -l), train with more ranks, or remove "
                "flex_async_save.",
            ) from error
        if is_new and session.args.should_log:
            logger.info(f"Asynchronous saves use {size_text(needed)} of host memory for a snapshot.")

    def _begin_copy(self, session: Session, planned: PlannedSave) -> SnapshotCopy:
        """Begin to copy what this rank writes. Allocates memory only if the planned buffer does not fit."""
        part = planned.part
        ranges = ranges_of(planned.plan, part.job.step, part.replicas)
        self._reserve(session, part, ranges)
        return self._buffer.begin(part.tensors, ranges)

    def _parts(
        self, session: Session, prepared: PreparedSave, steps: Parts[SaveReport], channel: Channel
    ) -> Parts[SaveReport]:
        """Write, commit and delete old checkpoints."""
        report = yield from steps
        upload(session, prepared, report)

        def delete() -> tuple[None, None]:
            # The Trainer's state names the former best checkpoint until this save is reported.
            rotate(session, prepared.tier, prepared.directory, prepared.best, report.disks, channel)
            return None, None

        if len(report.disks.sorted_leaders) == 1:
            yield Part("deleting old checkpoints", delete, type(None))
        else:
            delete()  # The leaders communicate, so this runs on the training thread.
        return report

    def defers_event(self, step: int) -> bool:
        """Return whether ``on_save`` of a step is called later, when its save is reported."""
        if self._save is None or self._save.prepared.step != step:
            return False
        self._save.is_event_deferred = True
        return True

    def _wait(self, session: Session, why: str) -> None:
        """Wait for the save in progress and report it; every rank does so at the same step."""
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
        trainer = session.trainer
        with session.best.visible_in(trainer):
            trainer.state.best_model_checkpoint = save.prepared.best
        blocked = save.blocked + session.barrier.waited - save.waited
        report_save(session, save.prepared, report, save.transfers, blocked)
        if save.is_event_deferred:
            # The handler's own on_save would reset should_save, and a save that is due at this step would be lost.
            handler = trainer.callback_handler
            trainer.control = handler.call_event("on_save", trainer.args, save.state, trainer.control)
