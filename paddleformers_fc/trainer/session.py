"""What this package keeps per Trainer: its state, the events of its training loop, and reports of saves and loads.

PaddleFormers has no event after a load, and its event after a save does not name the checkpoint.
:class:`FlexCheckpointCallback` has both, with a report. :class:`ReportFigures` sends metrics to PaddleFormers'
reporters (VisualDL, TensorBoard, ...) through ``on_log``; the Trainer's log history stays unchanged, so that a resumed
run equals an uninterrupted one.

Under ``load_best_model_at_end`` PaddleFormers' loop unpickles ``model_state.pdparams`` in the best checkpoint. A flex
checkpoint has no such file, but code in a planted one would run. :class:`BestCheckpoint` therefore hides the path of
the best checkpoint from the loop, but not from callbacks and saves.

:class:`LoopEvents` replaces ``call_event`` of the Trainer's callback handler when the Trainer is constructed, so that
every event of PaddleFormers goes through it.

It also stops a run that bypasses the replaced methods, because a subclass overrides a method without ``super()`` or
PaddleFormers calls another method. Such a run would save in PaddleFormers' own format, or ignore the checkpoint to
resume. Replaced methods therefore record their calls (``ran`` and ``output`` of :class:`Run`), which are checked at the
start of training, at every save and after it. Ranks do not communicate: all have the same records.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.communicator import Communicator, job_communicator
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.distributed.step_agreement import StepAgreement
from paddleformers_fc.distributed.store_client import hosts_of_ranks
from paddleformers_fc.errors import EnvironmentMismatch, OptionError
from paddleformers_fc.execute.phases import Phases
from paddleformers_fc.execute.staging_pool import TransferFigures
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.changes import Change
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.manifest import Manifest, RunRecord
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import rate_text, size_text
from paddleformers_fc.trainer import description, live_roles, optimizers, streaming
from paddleformers_fc.trainer.documents import TokenizerFiles, TrainingProgress
from paddleformers_fc.trainer.ema import MovingAverage
from paddleformers_fc.trainer.library import LOAD_METHOD, PREFIX_CHECKPOINT_DIR, ShardingOption, TrainerCallback, logger
from paddleformers_fc.trainer.optimizers import drop_prefetched
from paddleformers_fc.trainer.options import FIELD_NAMES, is_active
from paddleformers_fc.trainer.position import PositionTracker
from paddleformers_fc.trainer.rank_records import RECORDS, update_record
from paddleformers_fc.trainer.resume import Choice
from paddleformers_fc.trainer.tiers import Tier
from paddleformers_fc.trainer.uploads import Uploads

if TYPE_CHECKING:  # It imports this module.
    from paddleformers_fc.trainer.async_save import Saver

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


# ---- The state of a Trainer.

Native = Callable[..., Any]
"""The original of a replaced method, bound to the Trainer."""

SESSION = "_flex_session"
"""The attribute of a Trainer that contains its :class:`Session`."""

_SHARED_OPTIONS = ("aoa_config", "ignore_load_lr_and_optim", "ignore_save_lr_and_optim", "ignore_data_skip")
"""PaddleFormers' options that change what is saved and loaded, and must be equal on all ranks."""


@dataclass(frozen=True)
class Loaded:
    """The checkpoint of the run that is continued.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        changes: differences between the configurations of model and checkpoint.
        progress: the Trainer's state in it.
        generators: the state of this process's random generators as JSON; None if there is none.
        stored_states: the stored optimizer states, by their names in the live model.
    """

    directory: AnyPath
    manifest: Manifest
    changes: tuple[Change, ...]
    progress: TrainingProgress
    generators: bytes | None = None
    stored_states: frozenset[str] = frozenset()


@dataclass
class Run:
    """The state of one call of ``train``.

    Args:
        model: the description of the live model when training began or it was loaded; empty before training.
        ran: names of the replaced methods that have run since; see :class:`LoopEvents`.
        chosen: the checkpoint to resume; None in a new run. The native methods pass its path as text, without the
            password of a URL.
        loaded: what was loaded from it; None before the load, and in a new run, which may start from its weights.
        record: identifies the run in its checkpoints; None before training.
        output: the saves in ``output_dir``.
        local: the saves in ``flex_local_dir``; None without it.
        begun: the step at which the loop began.
        warned: subjects of warnings that were logged and are not repeated.
    """

    model: ModelDescription = field(default_factory=lambda: ModelDescription({}))
    ran: set[str] = field(default_factory=set)
    chosen: Choice | None = None
    loaded: Loaded | None = None
    record: RunRecord | None = None
    output: Tier = field(default_factory=Tier)
    local: Tier | None = None
    begun: int = 0
    warned: set[str] = field(default_factory=set)


@dataclass
class Session:
    """The state of this package for one Trainer.

    Args:
        trainer: the Trainer.
        figures: sends figures of saves and loads to reporters.
        position: tracks the position in the data.
        barrier: the pending reads of live tensors, for which the next update waits.
        agreement: the agreement of the ranks at step ends.
        saver: saves checkpoints.
        average: the moving average of the weights; None without one.
        uploads: uploads checkpoints; None without ``flex_upload``.
        receive: the function of ``flex_stream``, on the first rank; None without it.
        run: the last call of ``train``.
        best: hides the name of the best checkpoint from PaddleFormers' loop.
        signals: the :class:`.save_on_signal.SignalWatch` of ``flex_save_on_signal``; None outside a loop, and without
            the option.
        has_trained: whether the loop has run before; it may have left an unfinished step.
        reference: contents of the reference model of preference training; None before the first save.
        tokenizer_files: the files of the tokenizer, cached between saves.
    """

    trainer: Any
    figures: ReportFigures
    position: PositionTracker
    barrier: live_roles.UpdateBarrier
    agreement: StepAgreement
    saver: Saver
    average: MovingAverage | None = None
    uploads: Uploads | None = None
    receive: Callable[[int, Any], object] | None = None
    run: Run = field(default_factory=Run)
    best: BestCheckpoint = field(default_factory=BestCheckpoint)
    signals: Any = None
    has_trained: bool = False
    reference: Mapping[str, str] | None = None
    tokenizer_files: TokenizerFiles = field(default_factory=TokenizerFiles)

    @property
    def args(self) -> Any:
        """The training arguments."""
        return self.trainer.args

    @property
    def channel(self) -> Channel:
        """All ranks of the job."""
        return channel_of(self.args)

    def attach(self) -> None:
        """Attach the session to its Trainer, whose events it handles from now on."""
        setattr(self.trainer, SESSION, self)
        LoopEvents(self)
        if all(isinstance(one, ProgressRecorder) for one in reporters(self.trainer)):
            self.trainer.add_callback(FlexCheckpointCallback())

    def warn(self, text: str, lines: Iterable[str] = ()) -> None:
        """Log a warning, followed by a list, once per node; do nothing if the text is empty."""
        if text and self.args.should_log:
            logger.warning(text + "".join(f"\n  - {line}" for line in lines))

    def warn_once(self, text: str, lines: Iterable[str] = (), subject: str = "") -> None:
        """Log a warning once per run, or once per subject."""
        if (subject or text) not in self.run.warned:
            self.warn(text, lines)
        self.run.warned.add(subject or text)

    def consistency(self, doing: str) -> ConsistencyCheck:
        """Return the options that must be equal on all ranks, for the consistency check of an operation."""
        names = {*FIELD_NAMES, *_SHARED_OPTIONS} - {"flex_local_dir"}  # Nodes may have disks under other paths.
        return ConsistencyCheck(doing, {name: getattr(self.args, name) for name in names if hasattr(self.args, name)})

    def report_saved(self, report: CheckpointReport) -> None:
        """Report a save to the callbacks that receive reports."""
        for one in reporters(self.trainer):
            one.on_checkpoint_saved(self.args, report)
        self.figures.saved(report)

    def report_loaded(self, report: CheckpointReport) -> None:
        """Report a load to the callbacks that receive reports."""
        for one in reporters(self.trainer):
            one.on_checkpoint_loaded(self.args, report)
        self.figures.loaded(report)

    def settle_weights(self) -> None:
        """Wait for pending transfers of weights, and release gathered copies that the next pass would use instead."""
        live_roles.wait_for_weights(self.args)
        live_roles.release_full_parameters(self.trainer.model)

    def check_optimizer(self) -> None:
        """Check that the optimizer's states can be saved, unless the run does not save them.

        Raises:
            OptionError: see :func:`.optimizers.check_supported`.
        """
        if not self.args.ignore_save_lr_and_optim:
            optimizers.check_supported(self.trainer.optimizer)


def reporters(trainer: Any) -> list[FlexCheckpointCallback]:
    """Return the callbacks that receive reports of saves and loads."""
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, FlexCheckpointCallback)]


def channel_of(args: Any) -> Channel:
    """Return the channel of the job with the timeout of a run."""
    return job_communicator(args.flex_timeout)


def new_session(trainer: Any, barrier: live_roles.UpdateBarrier, saver: Saver) -> Session:
    """Return a new session for a Trainer."""
    channel = channel_of(trainer.args)
    agreement = StepAgreement(channel, channel.liveness if isinstance(channel, Communicator) else None)
    # PaddleFormers' buffer of batches that a pipeline has read and not trained yet.
    tracker = PositionTracker(lambda: len(getattr(trainer, "_pp_data_buffer", ())))
    return Session(trainer, ReportFigures(trainer), tracker, barrier, agreement, saver)


def read_options(args: Any) -> ReadOptions:
    """Return how a run reads tensors."""
    return ReadOptions(threads=args.flex_threads, replicas=args.flex_read, hosts=hosts_of_ranks())


def session_of(trainer: Any) -> Session:
    """Return the session that :func:`.startup.init_trainer` has created.

    Raises:
        OptionError: the Trainer does not use this package.
        EnvironmentMismatch: the Trainer was constructed without the option, or its class bypasses the constructor.
    """
    session: Session | None = getattr(trainer, SESSION, None)
    if session is None and not is_active(trainer.args):
        raise OptionError(
            "This Trainer does not use paddleformers_fc: flex_checkpoint is not true.",
            where=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            next_step="Construct it with flex_checkpoint: true in its arguments, as paddleformers_fc.FlexTrainer or "
            "after paddleformers_fc.install().",
        )
    if session is None:
        raise EnvironmentMismatch(
            "flex_checkpoint is true, and this Trainer was constructed without it.",
            where=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            next_step="Set flex_checkpoint before the Trainer is constructed, and call super().__init__ in __init__.",
        )
    return session


# ---- The events of its training loop.


class LoopEvents:
    """The events of one Trainer.

    Args:
        session: the session of the Trainer.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        handler = session.trainer.callback_handler
        self._call_callbacks = handler.call_event
        handler.call_event = self.call_event

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Handle an event, and call all callbacks as ``CallbackHandler.call_event`` does."""
        session = self._session
        with session.best.visible_in(session.trainer):
            if event == "on_save" and session.saver.defers_event(state.global_step):
                return control
            self._before(event, args, state, control)
            control = self._call_callbacks(event, args, state, control, **kwargs)
            self._after(event, args, state, control)
        return control

    def _before(self, event: str, args: Any, state: Any, control: Any) -> None:
        session = self._session
        if event == "on_train_begin":
            check_own_loop(session)
            if getattr(args, "using_sonic_moe", False):
                description.alternate_before_training(session.trainer)
            session.position.on_train_begin(args, state)
        elif event == "on_epoch_begin":
            session.position.on_epoch_begin(state)
        elif event == "on_optimizer_begin":
            if session.average is not None:
                session.average.check_not_in_model()
            session.barrier.finish()
            if ShardingOption.FULL_SHARD in args.sharding:
                drop_prefetched(session.trainer.model.parameters())  # The update changes their weights.
        elif event == "on_step_end":
            self._check_local(state)
            session.position.on_step_end(args, state)
            # Before the callbacks, so that a save in a callback contains the average of this step.
            if session.average is not None:
                session.average.on_step_end(state)
        elif event == "on_save":
            self._check_saved(args, state)
        elif event == "on_train_end":
            session.saver.finish(session)

    def _after(self, event: str, args: Any, state: Any, control: Any) -> None:
        session = self._session
        if event == "on_prediction_step" and session.agreement.is_running:
            agree(session, "evaluation")
        elif event == "on_step_end":
            agree(session, "training")
            session.saver.report()
            session.figures.send_loaded()
            streaming.push(session.trainer, session.receive, session.channel)
        elif event == "on_epoch_end":
            session.position.on_epoch_end(args, state, control)
        if session.signals is not None:
            session.signals.direct(event, control)

    def _check_local(self, state: Any) -> None:
        """Check at the second step that the end of the first step could save to the local tier.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        run, name = self._session.run, "_maybe_log_save_evaluate"
        if run.local is not None and state.global_step == run.begun + 2 and name not in run.ran:
            _raise_skipped(self._session.trainer, "the end of a step", [name])

    def _check_saved(self, args: Any, state: Any) -> None:
        """Check that this package did the save that has just ended.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        session = self._session
        if state is not session.trainer.state:
            return  # The deferred event of an asynchronous save, which has the state of its step.
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        skipped = [] if session.run.output.saved == directory else ["_save_checkpoint"]
        _raise_skipped(session.trainer, str(directory), skipped)


def agree(session: Session, kind: str) -> None:
    """Advance a save whose current part all ranks have done, and learn whether any rank has received a signal.

    Args:
        session: the session of the Trainer.
        kind: the kind of the step that ends.
    """
    saver, signals = session.saver, session.signals
    agreed = session.agreement.read()
    if agreed is not None and agreed.is_signalled:
        signals.become_due()
    subject = saver.under_way
    if subject is not None and agreed is not None and agreed.subject is subject:
        saver.advance(session)
        subject = saver.under_way
    if subject is not None or signals is not None:
        session.agreement.begin_next(kind, subject, saver.is_done, bool(signals and signals.received))


def check_own_loop(session: Session) -> None:
    """Check that the training loop and the requested load went through the replaced methods.

    Args:
        session: the session of a Trainer that trains, or that saves without having trained.

    Raises:
        EnvironmentMismatch: lists the methods that did not run.
    """
    expected = ("train", LOAD_METHOD, "_inner_training_loop")
    skipped = [name for name in expected if name not in session.run.ran]
    if session.run.chosen is None and LOAD_METHOD in skipped:
        skipped.remove(LOAD_METHOD)
    _raise_skipped(session.trainer, "the start of training", skipped)


def _raise_skipped(trainer: Any, where: str, skipped: Sequence[str]) -> None:
    if not skipped:
        return
    raise EnvironmentMismatch(
        "flex_checkpoint is true, and the training loop did not go through this package.",
        where=where,
        evidence=[
            f"{name} of paddleformers_fc did not run; the Trainer's own is {_definition(trainer, name)}"
            for name in skipped
        ],
        next_step="Call super() in every method that a Trainer class overrides. Delete checkpoints of such runs: they "
        "are in another format.",
    )


def _definition(trainer: Any, name: str) -> str:
    """Return the qualified name of a method in the class that defines it."""
    owner = next((one for one in type(trainer).__mro__ if name in vars(one)), type(trainer))
    return f"{owner.__module__}.{owner.__qualname__}.{name}"
