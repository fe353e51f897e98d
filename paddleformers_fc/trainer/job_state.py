"""What this package remembers of one Trainer, and what its replaced methods have in common.

A replaced method is a function that takes the Trainer, the native method, and the method's arguments.
:func:`when_active` makes it one that does nothing of its own where ``flex_checkpoint`` is not true.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddleformers_fc.cpu_runtime import stores
from paddleformers_fc.distributed.channel import Channel, job_channel
from paddleformers_fc.distributed.communicator import DEFAULT_PATIENCE, Communicator
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.distributed.disk_leaders import DiskLeaders
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.execute.read_pool import ReadOptions
from paddleformers_fc.families.changes import Change
from paddleformers_fc.storage.manifest import Manifest, RunRecord
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.trainer import batches, documents, optimizers
from paddleformers_fc.trainer.best import BestCheckpoint
from paddleformers_fc.trainer.callback import FlexCheckpointCallback
from paddleformers_fc.trainer.options import FIELD_NAMES, parse_size

Native = Callable[..., Any]
"""A method of PaddleFormers' own."""

RUN = "_flex_run"
"""Our attribute of a Trainer, for its :class:`Run`."""
WAITING = "_pp_data_buffer"
"""PaddleFormers' attribute for the batches that a pipeline has taken and not trained."""

_SHARED_OPTIONS = ("aoa_config", "ignore_load_lr_and_optim", "ignore_save_lr_and_optim", "ignore_data_skip")
"""PaddleFormers' options that decide what is saved and loaded, and that every rank must have alike."""


@dataclass
class JobState:
    """What this package remembers of one Trainer.

    Args:
        tracker: follows the position in the data.
        ran: the replaced methods that have run since training was asked for, by name; see :mod:`.bypass`.
        chosen: the checkpoint to resume from; None in a run from the beginning. The native methods hand it on as text,
            which for a URL lacks its password.
        record: identifies the run in its checkpoints; None before the training begins.
        said: warnings about checkpoints that are passed over.
        named: whether ``chosen`` is what a user named, and not the newest one.
        resumed_from: the checkpoint that was loaded; None in a run from the beginning.
        progress: the Trainer's state in that checkpoint; None unless it is to be continued.
        generators: this process's random generators in that checkpoint; None if it has none of this process.
        manifest: of the checkpoint that was loaded.
        changes: where the model's configuration differs from that in the checkpoint that was loaded.
        saved: the last checkpoint that has been saved since training was asked for.
        disks: which processes share the disk that they save on; known after the first save.
        told_of_differences: whether the log says that replicas differ.
        has_trained: whether its loop has run before, which may have left a step that it had begun.
        told_of_generators: whether the log says that random generators could not be restored.
        best: keeps the name of the best checkpoint from PaddleFormers' loop.
    """

    tracker: batches.PositionTracker
    ran: set[str] = field(default_factory=set)
    best: BestCheckpoint = field(default_factory=BestCheckpoint)
    chosen: AnyPath | None = None
    named: bool = False
    record: RunRecord | None = None
    said: set[str] = field(default_factory=set)
    resumed_from: AnyPath | None = None
    progress: documents.TrainingProgress | None = None
    generators: bytes | None = None
    manifest: Manifest | None = None
    changes: tuple[Change, ...] = ()
    saved: Path | None = None
    disks: DiskLeaders | None = None
    told_of_differences: bool = False
    has_trained: bool = False
    told_of_generators: bool = False


def is_active(args: Any) -> bool:
    """Whether training arguments ask for this package."""
    return bool(getattr(args, "flex_checkpoint", False))


def when_active(override: Callable[..., Any]) -> Callable[..., Any]:
    """The override for Trainers that ask for it, the native method for all others."""

    @functools.wraps(override)
    def either(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> Any:
        if not is_active(trainer.args):
            return native(*args, **kwargs)
        return override(trainer, native, *args, **kwargs)

    return either


def refuse_optimizer(trainer: Any) -> None:
    """Refuse an optimizer whose states the first save could not write, after hours of training.

    Raises:
        OptionError: see :func:`.optimizers.refuse_unsupported`.
    """
    if not trainer.args.ignore_save_lr_and_optim:
        optimizers.refuse_unsupported(trainer.optimizer)


def consistency_check_of(args: Any, doing: str) -> ConsistencyCheck:
    """What ranks that were started alike have in common, for the consistency check of what they are ``doing``."""
    names = (*FIELD_NAMES, *_SHARED_OPTIONS)
    return ConsistencyCheck(doing, {name: getattr(args, name) for name in names if hasattr(args, name)})


def channel_of(args: Any) -> Channel:
    """Return the channel of the job with the timeout of a run."""
    return job_communicator(args.flex_timeout)


def job_communicator(patience: float = DEFAULT_PATIENCE) -> Channel:
    """Return the job's communicator, which is opened once and kept; a process alone has no one to wait for.

    Args:
        patience: seconds that a rank waits for the others.

    Raises:
        PeerError: the store of the job does not answer; on this rank alone.
    """
    channel = job_channel()
    return channel if channel.world_size == 1 else _open_communicator(patience, stores.job_store_address())


@functools.cache
def _open_communicator(patience: float, address: tuple[str, int] | None) -> Communicator:
    """Open a connection of our own: Paddle's client is not safe for two threads, and its waits have no bound."""
    store = address and stores.StoreClient(address, min(patience, stores.OPENING_SECONDS), patience)
    return Communicator(job_channel(), patience, store)


def read_options(args: Any) -> ReadOptions:
    """How the options of a run read tensors."""
    return ReadOptions(
        threads=args.flex_threads,
        staging_memory_bytes=parse_size(args.flex_staging_size),
        once=args.flex_read == "once",
    )


def job_state_of(trainer: Any) -> JobState:
    """What :func:`.seam.init_trainer` has made for a Trainer.

    Raises:
        EnvironmentMismatch: it has made nothing, because the Trainer was made without it or without the option.
    """
    run: JobState | None = getattr(trainer, RUN, None)
    if run is None:
        raise EnvironmentMismatch(
            "flex_checkpoint is true, and this Trainer was made without it.",
            where=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            next_step="Set flex_checkpoint before the Trainer is made, and let its __init__ call super().__init__.",
        )
    return run


def reporters(trainer: Any) -> list[FlexCheckpointCallback]:
    """The callbacks that are told of saves and loads."""
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, FlexCheckpointCallback)]
