"""Saves beside training, under ``flex_async_save``.

At the step that is saved the training thread describes its tensors and captures the Trainer's state. From then on and
during the next passes, threads copy what this rank writes into a kept buffer
(:mod:`~paddleformers_fc.execute.async_snapshot`), and the next update waits for the copy (:mod:`.update_barrier`).
After that a thread writes, commits and deletes old checkpoints. Its exchanges are those of a save in a step, over a
communicator of its own, so the training thread makes none.

When all ranks have finished a save, they agree on a step (:mod:`~paddleformers_fc.distributed.step_gate`). At the end
of that step every training thread reports the save: reporters and ``on_save`` receive the state of the saved step, or
the error of the save is raised. The end of the loop, and an error in it, wait for every save.

``flex_async_depth`` saves may be under way, each with a thread, a communicator and a buffer. Their writes and commits
are in the order of their steps. A further save waits for the oldest.

Memory: per save under way what this rank writes, and the parts of replicas that it hashes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paddleformers_fc.distributed.channel import Channel, run_on_all
from paddleformers_fc.distributed.step_gate import StepGate
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.async_snapshot import SnapshotBuffer, SnapshotCopy, on_device
from paddleformers_fc.execute.element_ranges import ranges_of
from paddleformers_fc.execute.memory import HostTensors
from paddleformers_fc.execute.save import Capture, LivePart, SaveReport, expected_plan, snapshot, write_and_commit
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.text import size_text
from paddleformers_fc.trainer.documents import copied_state
from paddleformers_fc.trainer.job_state import background_communicator, channel_of, job_state_of
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.optimizers import descriptor_of
from paddleformers_fc.trainer.options import memory_limit
from paddleformers_fc.trainer.save_job import (
    Encode,
    PreparedSave,
    capture_files,
    prepare,
    report_save,
    rotate,
    upload,
)
from paddleformers_fc.trainer.snapshot_size import least_snapshot_bytes

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
        reported: is set afterwards, so that the next save keeps the checkpoint until then.
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
    reported: threading.Event = field(default_factory=threading.Event)
    is_event_deferred: bool = False


class _Slot:
    """One save at a time: a thread that saves, one that helps to copy, a communicator and a buffer."""

    def __init__(self, number: int, patience: float, limit: int | None) -> None:
        self.channel: Channel = background_communicator(number, patience)
        self.buffer = SnapshotBuffer(limit)
        self.thread = ThreadPoolExecutor(1, f"flex-save-{number}")
        self.helper = ThreadPoolExecutor(1, f"flex-copy-{number}")
        self.save: _Save | None = None


class AsyncSaves:
    """The saves of one Trainer; every method is called on the training thread."""

    def __init__(self, gate: StepGate) -> None:
        self._gate = gate
        self._slots: list[_Slot] = []
        self._begun = 0
        self._latest: _Save | None = None
        self._in_loop = False

    def save(self, trainer: Any, metrics: dict[str, float] | None) -> None:
        """Begin to save the present step, as :class:`.job_state.Saver`."""
        started = time.monotonic()
        trainer.runtime_timer.start("checkpoint saving time")
        update_barrier = job_state_of(trainer).update_barrier
        self._open(trainer.args)
        slot = self._slots[self._begun % len(self._slots)]
        self._wait_for(trainer, slot, f"before step {trainer.state.global_step} can be saved")
        measuring = ExitStack()
        with self._naming_latest_best(trainer):
            prepared = prepare(trainer, metrics)
            transfers = measuring.enter_context(measured_transfers())
            begun = _begin_copy(slot, prepared)
            if begun is not None and update_barrier.passes_change_weights():
                # Training will wait for the whole copy, which continues while the files are captured.
                slot.helper.submit(begun.copy.help)
            encode, state = capture_files(trainer), copied_state(trainer.state)
        save = _Save(prepared, encode, state, transfers, 0.0, 0.0, Future(), Future(), lambda: None)
        before, self._latest, slot.save = self._latest, save, save
        self._begun += 1
        save.done = slot.thread.submit(self._run, trainer, slot, save, begun, before, measuring)
        update_barrier.add(save.captured, *([] if begun is None else [begun.copy.help]))
        save.waited, save.blocked = update_barrier.waited, time.monotonic() - started
        trainer.runtime_timer.stop()
        if not self._in_loop:
            self.finish(trainer)

    @contextmanager
    def followed(self, trainer: Any) -> Iterator[None]:
        """Return a block in which the training loop runs; at its end every save is committed."""
        self._open(trainer.args)
        run_on_all(channel_of(trainer.args), "estimating a snapshot", lambda: _refuse_too_large(trainer))
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
        """Wait until every save is committed.

        Raises:
            FlexError: that of a save, the same on every rank.
        """
        failures: list[Exception] = []
        for number in range(self._begun, self._begun + len(self._slots)):
            try:
                self._wait_for(trainer, self._slots[number % len(self._slots)], "before training can end")
            except Exception as error:  # The other saves are waited for first.
                failures.append(error)
        if failures:
            raise failures[0]

    def _finish_after_error(self, trainer: Any) -> None:
        """Wait for every save after an error of training, which takes precedence."""
        try:
            self.finish(trainer)
        except Exception as error:  # The error of training is raised.
            logger.warning(f"A save failed after an error of training: {error}")

    def _open(self, args: Any) -> None:
        """Open the communicators, which every rank does at the same time."""
        if self._slots:
            return
        depth, limit, patience = args.flex_async_depth, memory_limit(args.flex_async_memory), args.flex_timeout
        share = None if limit is None else limit // depth

        def opened() -> list[_Slot]:
            return [_Slot(number, patience, share) for number in range(depth)]

        self._slots = run_on_all(channel_of(args), "opening channels for saves beside training", opened)

    @contextmanager
    def _naming_latest_best(self, trainer: Any) -> Iterator[None]:
        """Return a block in which the Trainer's state names the best checkpoint, also if it is not committed yet."""
        committed = trainer.state.best_model_checkpoint
        if self._latest is not None and not self._is_reported(self._latest):
            trainer.state.best_model_checkpoint = self._latest.prepared.best
        try:
            yield
        finally:
            trainer.state.best_model_checkpoint = committed

    def _holds_event(self, step: int) -> bool:
        """Return whether ``on_save`` of a step is called later, when its save is committed."""
        save = self._latest
        if save is None or save.prepared.step != step or self._is_reported(save):
            return False
        save.is_event_deferred = True
        return True

    def _is_reported(self, save: _Save) -> bool:
        return all(slot.save is not save for slot in self._slots)

    def _wait_for(self, trainer: Any, slot: _Slot, why: str) -> None:
        """Wait for the save of a slot and report it; every rank does so at the same step."""
        save = slot.save
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

    def _run(
        self,
        trainer: Any,
        slot: _Slot,
        save: _Save,
        begun: _Begun | None,
        before: _Save | None,
        measuring: ExitStack,
    ) -> None:
        """Save, on the thread of a slot."""
        prepared, args = save.prepared, trainer.args
        try:
            with measuring:
                try:
                    part = prepared.encoded(save.encode)  # Meanwhile other threads copy.
                    if begun is not None:
                        begun.copy.help()  # Before the ranks exchange anything.
                    taken = snapshot(part, _capture(trainer, slot, begun), slot.channel, prepared.consistency)
                finally:
                    if begun is not None:
                        begun.copy.drop()
                    save.captured.set_result(None)
                if before is not None:
                    wait([before.done])
                report = write_and_commit(taken, prepared.directory, slot.channel)
            # The state of the run names the former best checkpoint for a step more, which may be deleted here.
            upload(trainer, prepared, report)
            uploads = job_state_of(trainer).uploads
            if before is not None:
                before.reported.wait(args.flex_timeout)  # Its reporters find its checkpoint.
            rotate(args, prepared.directory, prepared.best, report.disks, slot.channel, args.output_dir, uploads)
            save.report = partial(self._report_success, trainer, slot, save, report)
        except Exception as error:  # Raised on the training thread.
            save.report = partial(self._report_failure, slot, save, error)
        self._agree(slot.channel, save.report)

    def _agree(self, channel: Channel, report: Callable[[], None]) -> None:
        """Have every training thread report a save at the same step."""

        def gather(step: int) -> list[int]:
            return [int.from_bytes(one, "little") for one in channel.all_gather(step.to_bytes(_NUMBER_BYTES, "little"))]

        try:
            channel.all_gather(b"")  # Training is held for the second exchange alone.
            self._gate.agree(gather, report)
        except Exception as error:  # The save is reported in any case.
            logger.warning(f"The ranks have not agreed on a step at which a save is reported.\n{error}")
            self._gate.alone(report)

    def _report_success(self, trainer: Any, slot: _Slot, save: _Save, report: SaveReport) -> None:
        """Report a committed save, on the training thread."""
        slot.save = None
        job_state = job_state_of(trainer)
        with job_state.best.shown_in(trainer):
            trainer.state.best_model_checkpoint = save.prepared.best
        try:
            report_save(
                trainer,
                save.prepared,
                report,
                save.transfers,
                save.blocked + job_state.update_barrier.waited - save.waited,
            )
            if save.is_event_deferred:
                # The handler's on_save would drop a save that is due at this step.
                handler = trainer.callback_handler
                trainer.control = handler.call_event("on_save", trainer.args, save.state, trainer.control)
        finally:
            save.reported.set()  # Also after an error of a callback: the next save waits for it.

    def _report_failure(self, slot: _Slot, save: _Save, error: Exception) -> None:
        """Raise the error of a save, on the training thread."""
        slot.save = None
        save.reported.set()
        raise error


def _refuse_too_large(trainer: Any) -> None:
    """Refuse before training what the first save would refuse.

    Raises:
        OptionError: the snapshots take more than ``flex_async_memory`` at least.
    """
    args, limit = trainer.args, memory_limit(trainer.args.flex_async_memory)
    if limit is None:
        return
    optimizer = None if args.ignore_save_lr_and_optim else descriptor_of(trainer.optimizer)
    least = args.flex_async_depth * least_snapshot_bytes(trainer, optimizer)
    if least > limit:
        raise OptionError(
            f"Saves beside training keep at least {size_text(least)} on this rank, and flex_async_memory allows "
            f"{size_text(limit)}.",
            where="training arguments",
            evidence=[f"flex_async_depth: {args.flex_async_depth}", f"flex_async_memory: {args.flex_async_memory}"],
            next_step="Raise flex_async_memory, lower flex_async_depth, or remove flex_async_save.",
        )


def _begin_copy(slot: _Slot, prepared: PreparedSave) -> _Begun | None:
    """Begin to copy under the plan of the last save, which is right if no rank's shards have changed."""
    try:
        part = prepared.part()
        plan = expected_plan(part, slot.channel.rank)
        if plan is None:
            return None
        ranges = ranges_of(plan, slot.channel.rank, part.job.step, part.replicas)
        if not slot.buffer.has_room(part.tensors, ranges):
            return None
        return _Begun(plan, slot.buffer.begin(part.tensors, ranges))
    except Exception:  # The thread of the slot gets the same error, and raises it on all ranks.
        return None


def _capture(trainer: Any, slot: _Slot, begun: _Begun | None) -> Capture:
    """Return a capture that copies into the slot's buffer."""
    update_barrier = job_state_of(trainer).update_barrier

    def copied(part: LivePart, plan: SavePlan) -> HostTensors:
        if begun is not None:
            tensors = begun.copy.finish()
            if begun.plan is plan:
                return tensors
        ranges = ranges_of(plan, slot.channel.rank, part.job.step, part.replicas)
        if slot.buffer.reserve(part.tensors, ranges) and trainer.args.should_log:
            logger.info(f"Saves beside training keep {size_text(slot.buffer.capacity)} of host memory for a snapshot.")
        begin = partial(slot.buffer.begin, part.tensors, ranges)
        copying = update_barrier.call(begin) if on_device(part.tensors, ranges) else begin()
        return copying.finish()

    return lambda part, plan: run_on_all(slot.channel, "copying a snapshot", lambda: copied(part, plan))
