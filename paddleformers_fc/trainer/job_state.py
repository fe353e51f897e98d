"""The state of one Trainer in this package, and helpers of all replaced methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.communicator import Communicator, job_communicator
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.distributed.disk_leaders import DiskLeaders
from paddleformers_fc.distributed.step_agreement import StepAgreement
from paddleformers_fc.distributed.store_client import hosts_of_ranks
from paddleformers_fc.errors import EnvironmentMismatch, OptionError
from paddleformers_fc.families.changes import Change
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.manifest import Manifest, RunRecord
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.trainer import batches, documents, live_roles, optimizers
from paddleformers_fc.trainer.callback import BestCheckpoint, FlexCheckpointCallback
from paddleformers_fc.trainer.ema import MovingAverage, UpdateBarrier
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.options import FIELD_NAMES, is_active
from paddleformers_fc.trainer.resume import Choice
from paddleformers_fc.trainer.uploads import Uploads

Native = Callable[..., Any]
"""A method of PaddleFormers' own."""

JOB_STATE = "_flex_run"
"""Our attribute of a Trainer, for its :class:`JobState`."""
WAITING = "_pp_data_buffer"
"""PaddleFormers' attribute for the batches that a pipeline has taken and not trained."""

_SHARED_OPTIONS = ("aoa_config", "ignore_load_lr_and_optim", "ignore_save_lr_and_optim", "ignore_data_skip")
"""PaddleFormers' options that decide what is saved and loaded; they must be equal on all ranks."""


class Saver(Protocol):
    """Saves checkpoints of a Trainer, in its steps or beside them."""

    def save(self, trainer: Any, metrics: dict[str, float] | None) -> None:
        """Save the present step. Every rank must call.

        Args:
            trainer: the Trainer; its state names the best checkpoint.
            metrics: those of an evaluation at this step.

        Raises:
            FlexError: the same on every rank; the previous checkpoints are untouched.
        """

    def followed(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a block in which the training loop runs; at its end every save is committed."""


@dataclass
class JobState:
    """The state of one Trainer.

    Args:
        tracker: follows the position in the data.
        update_barrier: the reads of live tensors that the next update waits for.
        saver: saves checkpoints.
        agreement: of the ranks at step ends.
        ran: names of the replaced methods that have run since ``train`` was called; see :mod:`.save_job`.
        best: hides the name of the best checkpoint from PaddleFormers' loop.
        chosen: the checkpoint to resume; None in a run from the beginning. The native methods pass its path on as text,
            which lacks the password of a URL.
        choosing: seconds that it took to choose it.
        record: identifies the run in its checkpoints; None before training.
        warned: warnings that are logged once per run.
        resumed_from: the checkpoint that was loaded; None in a run from the beginning.
        progress: the Trainer's state in that checkpoint; None if it is not continued.
        manifest: of the checkpoint that was loaded.
        changes: differences of the model's configuration from that in the checkpoint that was loaded.
        saved: the last checkpoint that was saved since ``train`` was called.
        disks: the processes that share the disk of their saves; known after the first save.
        differences_logged: whether the log contains the warning about replicas that differ.
        has_trained: whether the loop has run before; it may have left an unfinished step.
        reference: contents of the reference model of preference training; None before they are needed.
        average: the moving average of the weights; None without one.
        uploads: uploads checkpoints; None without ``flex_upload``.
        signals: follows the signal of ``flex_save_on_signal``, a :class:`.save_on_signal.SignalWatch`; None outside of
            a loop, and without the option.
        tokenizer_files: the files of the tokenizer, kept between saves.
    """

    tracker: batches.PositionTracker
    update_barrier: UpdateBarrier
    saver: Saver
    agreement: StepAgreement
    ran: set[str] = field(default_factory=set)
    best: BestCheckpoint = field(default_factory=BestCheckpoint)
    chosen: Choice | None = None
    choosing: float = 0.0
    record: RunRecord | None = None
    warned: set[str] = field(default_factory=set)
    resumed_from: AnyPath | None = None
    progress: documents.TrainingProgress | None = None
    manifest: Manifest | None = None
    changes: tuple[Change, ...] = ()
    saved: Path | None = None
    disks: DiskLeaders | None = None
    differences_logged: bool = False
    has_trained: bool = False
    reference: Mapping[str, str] | None = None
    average: MovingAverage | None = None
    uploads: Uploads | None = None
    signals: Any = None
    tokenizer_files: documents.TokenizerFiles = field(default_factory=documents.TokenizerFiles)

    def warn_once(self, args: Any, line: str) -> None:
        """Log a warning on every node, once per run."""
        warn(args, "" if line in self.warned else line)
        self.warned.add(line)


def warn(args: Any, text: str, lines: Iterable[str] = ()) -> None:
    """Log a warning and the lines that it lists on every node; nothing if the text is empty."""
    if text and args.should_log:
        logger.warning(text + "".join(f"\n  - {line}" for line in lines))


def settle_weights(trainer: Any) -> None:
    """Leave weights where they are filled, and nothing that the next pass would use in their place. On every rank."""
    live_roles.wait_for_weights(trainer.args)
    live_roles.release_full_parameters(trainer.model)


def refuse_optimizer(trainer: Any) -> None:
    """Refuse an optimizer whose states cannot be saved, unless they are not to be saved.

    Raises:
        OptionError: see :func:`.optimizers.refuse_unsupported`.
    """
    if not trainer.args.ignore_save_lr_and_optim:
        optimizers.refuse_unsupported(trainer.optimizer)


def consistency_check_of(args: Any, doing: str) -> ConsistencyCheck:
    """Return the options that must be equal on all ranks, for the consistency check of an operation."""
    names = (*FIELD_NAMES, *_SHARED_OPTIONS)
    return ConsistencyCheck(doing, {name: getattr(args, name) for name in names if hasattr(args, name)})


def channel_of(args: Any) -> Channel:
    """Return the channel of the job with the timeout of a run."""
    return job_communicator(args.flex_timeout)


def step_agreement_of(args: Any) -> StepAgreement:
    """Return what the loops of a Trainer agree with at step ends."""
    channel = channel_of(args)
    return StepAgreement(channel, channel.liveness if isinstance(channel, Communicator) else None)


def read_options(args: Any) -> ReadOptions:
    """Return how a run reads tensors."""
    return ReadOptions(threads=args.flex_threads, replicas=args.flex_read, hosts=hosts_of_ranks())


def job_state_of(trainer: Any) -> JobState:
    """Return the state that :func:`.trainer_init.init_trainer` has set.

    Raises:
        OptionError: the Trainer does not use this package.
        EnvironmentMismatch: it was constructed without the option, or its class goes around the constructor.
    """
    job_state: JobState | None = getattr(trainer, JOB_STATE, None)
    if job_state is None and not is_active(trainer.args):
        raise OptionError(
            "This Trainer does not use paddleformers_fc: flex_checkpoint is not true.",
            where=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            next_step="Construct it with flex_checkpoint: true in its arguments, as paddleformers_fc.FlexTrainer or "
            "after paddleformers_fc.install().",
        )
    if job_state is None:
        raise EnvironmentMismatch(
            "flex_checkpoint is true, and this Trainer was constructed without it.",
            where=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            next_step="Set flex_checkpoint before the Trainer is constructed, and call super().__init__ in __init__.",
        )
    return job_state


def reporters(trainer: Any) -> list[FlexCheckpointCallback]:
    """Return the callbacks that receive reports of saves and loads."""
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, FlexCheckpointCallback)]
