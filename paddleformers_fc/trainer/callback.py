"""Reports of saves and loads: log lines, callback events, metrics, progress records; and the best checkpoint.

PaddleFormers has no event after a load, and its event after a save does not name the checkpoint.
:class:`FlexCheckpointCallback` has both, with a report. :class:`ReportFigures` sends metrics to PaddleFormers'
reporters (VisualDL, TensorBoard, ...) through ``on_log``; the Trainer's log history stays unchanged, so that a resumed
run equals an uninterrupted one.

Under ``load_best_model_at_end`` PaddleFormers' loop unpickles ``model_state.pdparams`` in the best checkpoint. A flex
checkpoint has no such file, but code in a planted one would run. :class:`BestCheckpoint` therefore hides the path of
the best checkpoint from the loop, but not from callbacks and saves.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.execute.phases import Phases
from paddleformers_fc.execute.staging_pool import TransferFigures
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import rate_text, size_text
from paddleformers_fc.trainer.library import TrainerCallback, logger
from paddleformers_fc.trainer.rank_records import RECORDS, update_record

ATTENDED = "_flex_attended"
"""The attribute that marks training arguments whose Trainer uses this package."""


@dataclass(frozen=True)
class CheckpointReport:
    """The report of a save or a load.

    Args:
        step: optimizer steps done.
        directory: the checkpoint.
        seconds: wall time on this rank.
        bytes: after a save, the size of the checkpoint; after a load, what this rank read.
        differences: after a save, shards whose replicas differ between ranks; normally none.
        diverged_ties: after a save, where copies of tied tensors differ; normally none.
        layouts: after a load, the layouts of the saved run and of this run, such as ``("dp=2", "tp=2")``; the first is
            empty if the checkpoint does not record it.
        transfers: copies between host and devices on this rank.
        blocked: after a save, seconds for which training was blocked on this rank.
        casts: after a load with ``flex_allow_casts``, one line per role with cast tensors on this rank.
        phases: ``seconds`` by phase: ``plan, capture, write, agree, commit`` for a save, and ``open, plan, agree,
            read, finish`` for a load.
    """

    step: int
    directory: AnyPath
    seconds: float
    bytes: int
    differences: tuple[str, ...] = ()
    diverged_ties: tuple[str, ...] = ()
    layouts: tuple[str, str] | None = None
    transfers: TransferFigures = field(default_factory=TransferFigures)
    casts: tuple[str, ...] = ()
    blocked: float = 0.0
    phases: Phases = field(default_factory=Phases)


class FlexCheckpointCallback(TrainerCallback):
    """Writes a log line for each saved or loaded checkpoint.

    A Trainer with ``flex_checkpoint: true`` adds it by default. Subclass it to do more.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check that the Trainer does not ignore ``flex_checkpoint``, which would save in another format.

        Raises:
            EnvironmentMismatch: the Trainer does not use this package.
        """
        if getattr(args, "flex_checkpoint", False) and not getattr(args, ATTENDED, False):
            raise EnvironmentMismatch(
                "flex_checkpoint is true, but this Trainer ignores it and saves in PaddleFormers' own format.",
                where="on_init_end",
                next_step="Use paddleformers_fc.FlexTrainer, or call paddleformers_fc.install() before the Trainer is "
                "constructed.",
            )

    def on_checkpoint_saved(self, args: Any, report: CheckpointReport) -> None:
        """Handle a committed checkpoint. Called on every rank.

        Args:
            args: the training arguments.
            report: the report of the save.
        """
        self._log_report(args, "Saved", "to", report)

    def on_checkpoint_loaded(self, args: Any, report: CheckpointReport) -> None:
        """Handle a loaded checkpoint, before the first training step. Called on every rank.

        Args:
            args: the training arguments.
            report: the report of the load.
        """
        self._log_report(args, "Resumed", "from", report)

    def _log_report(self, args: Any, done: str, where: str, report: CheckpointReport) -> None:
        if args.should_log:
            logger.info(
                f"{done} step {report.step}{_layouts_text(report.layouts)} {where} {report.directory}: "
                f"{size_text(report.bytes)} in {report.seconds:.2f} s, {rate_text(report.bytes, report.seconds)}"
                f"{_blocked_text(report)}; {report.phases}{_transfers_text(report.transfers)}"
                f"{_casts_text(report.casts)}"
            )


def _blocked_text(report: CheckpointReport) -> str:
    return f", training blocked for {report.blocked:.2f} s" if 0 < report.blocked < report.seconds else ""


def _layouts_text(layouts: tuple[str, str] | None) -> str:
    if layouts is None:
        return ""
    saved, now = layouts
    return f" (saved as {saved}, now {now})" if saved else f" (now {now})"


def _casts_text(casts: tuple[str, ...]) -> str:
    return f"; precision changed on this rank: {'; '.join(casts)}" if casts else ""


def _transfers_text(transfers: TransferFigures) -> str:
    if not transfers.in_flight:  # All tensors are in host memory.
        return ""
    return (
        f"; device copies: {size_text(transfers.bytes)}, at most {transfers.in_flight} in flight, "
        f"{transfers.waited:.2f} s waiting for staging buffers"
    )


_REPORTERS = "trainer.integrations"


class ReportFigures:
    """Sends bytes, seconds by phase and throughput of every save and load to the reporters of a Trainer.

    Args:
        trainer: the Trainer, whose reporters and state are read at every event.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: CheckpointReport | None = None

    def saved(self, report: CheckpointReport) -> None:
        """Send the figures of a save; some steps later if the save was asynchronous."""
        self._send(report.step, {**_figures("save", report), "checkpoint_save_blocked_seconds": report.blocked})

    def loaded(self, report: CheckpointReport) -> None:
        """Keep the figures of a load: reporters open their logs when training begins."""
        self._loaded = report

    def send_loaded(self) -> None:
        """Send the figures of the load, once."""
        report, self._loaded = self._loaded, None
        if report is not None:
            self._send(report.step, _figures("load", report))

    def _send(self, step: int, figures: dict[str, float]) -> None:
        trainer = self._trainer
        state = copy(trainer.state)
        state.global_step = step
        for one in trainer.callback_handler.callbacks:
            if any(kind.__module__.endswith(_REPORTERS) for kind in type(one).__mro__):
                one.on_log(trainer.args, state, trainer.control, model=trainer.model, logs=dict(figures))


def _figures(operation: str, report: CheckpointReport) -> dict[str, float]:
    rate = report.bytes / max(report.seconds, 1e-9) / 1e9
    figures = {"bytes": report.bytes, "seconds": report.seconds, "gb_per_second": rate}
    figures |= {f"{phase}_seconds": seconds for phase, seconds in report.phases.seconds.items()}
    if report.phases.slowest is not None:
        figures[f"slowest_{report.phases.slowest.phase}_seconds"] = report.phases.slowest.seconds
    return {f"checkpoint_{operation}_{name}": value for name, value in figures.items()}


def locate_best(named: str, resumed: AnyPath, channel: Channel) -> str | None:
    """Return the path of the best checkpoint of a resumed run: its old path, or next to the resumed checkpoint.

    The output directory may have been moved, and a relative path depends on the working directory.

    Args:
        named: its path in the saved run.
        resumed: the checkpoint to resume.
        channel: all ranks of the job; every rank must call.

    Returns:
        the path on this rank; None if no rank finds the checkpoint.

    Raises:
        StorageError: the operating system denied access.
    """
    paths = [Path(named), *([resumed.with_name(Path(named).name)] if isinstance(resumed, Path) else [])]

    def find() -> int:
        return next((number for number, path in enumerate(paths, 1) if exists(path / MANIFEST_NAME)), 0)

    found = all_gather_checked(channel, "looking for the best checkpoint", find, int)
    chosen = found[channel.rank] or max(found)
    return str(paths[chosen - 1]) if chosen else None


class BestCheckpoint:
    """Keeps the path of the best checkpoint while it is hidden from the loop."""

    def __init__(self) -> None:
        self._hiding = False
        self._name: str | None = None

    @contextlib.contextmanager
    def hidden_from_loop(self, trainer: Any) -> Iterator[None]:
        """Context manager around PaddleFormers' loop."""
        self._hide(trainer)
        try:
            yield
        finally:
            self._show(trainer)

    @contextlib.contextmanager
    def visible_in(self, trainer: Any) -> Iterator[None]:
        """Context manager in which the path is visible and may be set."""
        if not self._hiding:
            yield
            return
        self._show(trainer)
        try:
            yield
        finally:
            self._hide(trainer)

    def _hide(self, trainer: Any) -> None:
        self._hiding, self._name = True, trainer.state.best_model_checkpoint
        trainer.state.best_model_checkpoint = None

    def _show(self, trainer: Any) -> None:
        self._hiding, trainer.state.best_model_checkpoint = False, self._name


def record_progress(trainer: Any) -> None:
    """Let a Trainer record its progress for the process that started this rank, if that process reads it."""
    if RECORDS in os.environ and trainer.args.should_log:
        trainer.add_callback(ProgressRecorder())


class ProgressRecorder(FlexCheckpointCallback):
    """Updates this rank's progress record after every logged loss, save and load."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the step and its loss."""
        if isinstance(logs, dict) and "loss" in logs:
            update_record(step=state.global_step, loss=str(logs["loss"]))

    def on_checkpoint_saved(self, args: Any, report: CheckpointReport) -> None:
        """Record the checkpoint."""
        update_record(step=report.step, checkpoint=str(report.directory))

    def on_checkpoint_loaded(self, args: Any, report: CheckpointReport) -> None:
        """Record the resumed step."""
        update_record(resumed=report.step)
