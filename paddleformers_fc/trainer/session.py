"""The state that this package keeps per Trainer, and helpers of the replaced methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.communicator import Communicator, job_communicator
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.distributed.step_agreement import StepAgreement
from paddleformers_fc.distributed.store_client import hosts_of_ranks
from paddleformers_fc.errors import EnvironmentMismatch, OptionError
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.changes import Change
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.manifest import Manifest, RunRecord
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.trainer import live_roles, optimizers
from paddleformers_fc.trainer.batches import PositionTracker
from paddleformers_fc.trainer.callback import BestCheckpoint, CheckpointReport, FlexCheckpointCallback, ReportFigures
from paddleformers_fc.trainer.documents import TokenizerFiles, TrainingProgress
from paddleformers_fc.trainer.ema import MovingAverage, UpdateBarrier
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.options import FIELD_NAMES, is_active
from paddleformers_fc.trainer.resume import Choice
from paddleformers_fc.trainer.tiers import Tier
from paddleformers_fc.trainer.uploads import Uploads

Native = Callable[..., Any]
"""The original of a replaced method, bound to the Trainer."""

SESSION = "_flex_session"
"""The attribute of a Trainer that contains its :class:`Session`."""
WAITING = "_pp_data_buffer"
"""PaddleFormers' attribute for batches that a pipeline has read and not trained yet."""

_SHARED_OPTIONS = ("aoa_config", "ignore_load_lr_and_optim", "ignore_save_lr_and_optim", "ignore_data_skip")
"""PaddleFormers' options that change what is saved and loaded, and must be equal on all ranks."""


class Saver(Protocol):
    """Saves checkpoints of a Trainer, blocking or asynchronously. Every rank must call every method.

    Attributes:
        under_way: the current phase of a pending save; None if there is none.
        is_done: whether this rank has finished that phase.
    """

    @property
    def under_way(self) -> object:
        """Return the current phase."""

    @property
    def is_done(self) -> bool:
        """Return whether this rank has finished it."""

    def save(self, session: Session, metrics: dict[str, float] | None, tier: Tier) -> None:
        """Save the current step.

        Args:
            session: the session; the Trainer's state names the best checkpoint.
            metrics: metrics of an evaluation at this step.
            tier: where to save.

        Raises:
            FlexError: the same on every rank; previous checkpoints are unchanged.
        """

    def advance(self, session: Session) -> None:
        """Exchange the results of a phase, and begin the next one."""

    def report(self) -> None:
        """Report a save that has ended at this step."""

    def finish(self, session: Session) -> None:
        """Wait until the pending save is committed."""

    def draining(self, session: Session) -> AbstractContextManager[None]:
        """Context manager around the training loop that commits every save before it exits."""

    def defers_event(self, step: int) -> bool:
        """Return whether ``on_save`` of a step is called later, when its save is committed."""


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that a run was resumed from.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        changes: differences between the configurations of model and checkpoint.
        progress: the Trainer's state in it; None if the run does not continue it.
        generators: the state of this process's random generators as JSON; None if there is none.
        stored_states: the stored optimizer states, by their names in the live model.
    """

    directory: AnyPath
    manifest: Manifest
    changes: tuple[Change, ...]
    progress: TrainingProgress | None
    generators: bytes | None = None
    stored_states: frozenset[str] = frozenset()


@dataclass
class Run:
    """The state of one call of ``train``.

    Args:
        model: the description of the live model when training began or it was loaded; empty before training.
        ran: names of the replaced methods that have run since; see :mod:`.events`.
        chosen: the checkpoint to resume; None in a new run. The native methods pass its path as text, without the
            password of a URL.
        loaded: what was loaded from it; None before the load, and in a new run.
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

    @property
    def progress(self) -> TrainingProgress | None:
        """The Trainer's state that the run continues; None if there is none."""
        return None if self.loaded is None else self.loaded.progress


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
    barrier: UpdateBarrier
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


def step_agreement_of(channel: Channel) -> StepAgreement:
    """Return the agreement of the ranks at step ends for the loops of a Trainer."""
    return StepAgreement(channel, channel.liveness if isinstance(channel, Communicator) else None)


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
