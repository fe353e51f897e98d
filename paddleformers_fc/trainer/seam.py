"""What PaddleFormers' Trainer does differently when ``flex_checkpoint`` is true: one function per method that changes.

Each function takes the Trainer, the native method, and the method's arguments. :mod:`.mixin` calls them from a
subclass, :mod:`.install` from the patched class; there is no third implementation. Without ``flex_checkpoint`` each one
calls the native method with the arguments it was given and does nothing else.

What changes, and what stays: saving, loading, rotation and export are replaced. The training loop is PaddleFormers'
own; it is told that nothing is resumed, because a resumed run's state, data position and random state are put in place
here.

Whatever may fail on one rank alone runs inside an agreement of all ranks, so that no rank waits for one that has
failed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import paddle.distributed as dist
from paddleformers.peft import LoRAModel
from paddleformers.trainer.trainer_utils import ShardingOption
from paddleformers.utils.env import PREFIX_CHECKPOINT_DIR
from paddleformers.utils.log import logger

from paddleformers_fc.catalog import FlexCheckpoint
from paddleformers_fc.errors import OptionError, StorageError
from paddleformers_fc.execute.channel import Channel, agree, together
from paddleformers_fc.execute.crew import ReadOptions
from paddleformers_fc.execute.disks import Disks
from paddleformers_fc.execute.export import save_weights
from paddleformers_fc.execute.load import PLANS, load_checkpoint
from paddleformers_fc.execute.opening import open_checkpoint, own_file
from paddleformers_fc.execute.rollcall import Called
from paddleformers_fc.execute.save import JobRecord, save_checkpoint
from paddleformers_fc.execute.told import spelled
from paddleformers_fc.families import family_for
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.plan.cache import PlanCache
from paddleformers_fc.storage.documents import read_document
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.manifest import Manifest, newest_checkpoint
from paddleformers_fc.storage.places import Place, at_home, local, place
from paddleformers_fc.trainer import batches, documents, optimizers, position, resume, rng, rotation, state
from paddleformers_fc.trainer.best import BestCheckpoint, found_again
from paddleformers_fc.trainer.callback import ATTENDED, CheckpointReport, FlexCheckpointCallback
from paddleformers_fc.trainer.options import FIELD_NAMES, parse_size, without_effect
from paddleformers_fc.trainer.watch import patient_channel
from paddleformers_fc.wording import count_text

Native = Callable[..., Any]

_told_data = msgspec.json.Decoder(tuple[position.Order, int | None])

_RUN = "_flex_run"

_WAITING = "_pp_data_buffer"
"""PaddleFormers' attribute for the batches that a pipeline has taken and not trained."""

_SHARED_OPTIONS = ("aoa_config", "ignore_load_lr_and_optim", "ignore_save_lr_and_optim", "ignore_data_skip")
"""PaddleFormers' options that decide what is saved and loaded, and that every rank must have alike."""


@dataclass
class Run:
    """What this package remembers of one Trainer.

    Args:
        tracker: follows the position in the data.
        chosen: the checkpoint to resume from; None in a run from the beginning. The native methods hand it on as text,
            which for a URL lacks its password.
        resumed_from: the checkpoint that was loaded; None in a run from the beginning.
        progress: the Trainer's state in that checkpoint; None unless it is to be continued.
        generators: this process's random generators in that checkpoint, where it does not see the file.
        saved: the last checkpoint that this run has saved.
        disks: which processes share the disk that they save on; known after the first save.
        told_of_differences: whether the log says that replicas differ.
        has_trained: whether its loop has run before, which may have left a step that it had begun.
        told_of_generators: whether the log says that random generators could not be restored.
        best: keeps the name of the best checkpoint from PaddleFormers' loop.
    """

    tracker: batches.PositionTracker
    best: BestCheckpoint = field(default_factory=BestCheckpoint)
    chosen: Place | None = None
    resumed_from: Place | None = None
    progress: documents.Progress | None = None
    generators: bytes | None = None
    saved: Path | None = None
    disks: Disks | None = None
    told_of_differences: bool = False
    has_trained: bool = False
    told_of_generators: bool = False


def is_active(args: Any) -> bool:
    """Whether training arguments ask for this package."""
    return bool(getattr(args, "flex_checkpoint", False))


def _when_active(override: Callable[..., Any]) -> Callable[..., Any]:
    """The override for Trainers that ask for it, the native method for all others."""

    @functools.wraps(override)
    def either(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> Any:
        if not is_active(trainer.args):
            return native(*args, **kwargs)
        return override(trainer, native, *args, **kwargs)

    return either


def construct(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> None:
    """``Trainer.__init__``: afterwards the model exports through us and the loop is followed.

    Raises:
        OptionError: the model or the optimizer is one whose checkpoints are not supported.
        MappingError: no family declares the model.
    """
    for given in (*args, *kwargs.values()):
        if is_active(given):
            setattr(given, ATTENDED, True)
    native(*args, **kwargs)
    arguments = trainer.args
    if not is_active(arguments) or trainer.model is None:
        return
    _refuse_unsupported(trainer.model)
    _refuse_optimizer(trainer)
    run = Run(batches.PositionTracker(lambda: len(getattr(trainer, _WAITING, ()))))
    setattr(trainer, _RUN, run)
    trainer.add_callback(run.tracker)
    if not _reporters(trainer):
        trainer.add_callback(FlexCheckpointCallback())
    trainer.model.save_pretrained = functools.partial(save_pretrained, trainer, trainer.model.save_pretrained)
    if arguments.should_log:
        for line in without_effect(arguments):
            logger.warning(line)


def _refuse_unsupported(model: Any) -> None:
    if isinstance(model, LoRAModel):
        raise OptionError(
            "flex_checkpoint: true contradicts another option.",
            where="training arguments",
            evidence=["flex_checkpoint: true and lora: true: adapters are not supported yet"],
            next_step="Remove one of the two keys.",
        )
    if getattr(model, "config", None) is None:
        raise OptionError(
            "flex_checkpoint: true needs a model of PaddleFormers, whose configuration says what its tensors are.",
            where=type(model).__name__,
            next_step="Train a PretrainedModel, or remove flex_checkpoint.",
        )
    family_for(documents.model_config(model))  # Refuses a model that could not be saved after hours of training.


def _refuse_optimizer(trainer: Any) -> None:
    """Refuse an optimizer whose states the first save could not write, after hours of training."""
    if not trainer.args.ignore_save_lr_and_optim:
        optimizers.refuse_unsupported(trainer.optimizer)


@_when_active
def train(
    trainer: Any,
    native: Native,
    resume_from_checkpoint: str | bool | None = None,
    ignore_keys_for_eval: list[str] | None = None,
) -> Any:
    """``Trainer.train``: ``True`` becomes the path of the newest finished checkpoint.

    Raises:
        NotACheckpoint: there is none, or what was named is none.
    """
    run = _run_of(trainer)
    run.resumed_from = run.progress = run.generators = None
    run.told_of_generators = False
    chosen = run.chosen = _chosen(trainer.args, resume_from_checkpoint)
    if chosen is None:
        _warn_of_another_run(trainer.args)
    return native(None if chosen is None else str(chosen), ignore_keys_for_eval)


def _chosen(args: Any, requested: str | bool | None) -> Place | None:
    if getattr(args, "looks_for_last_checkpoint", False):
        if requested and args.resume_from_checkpoint is None:
            # The command line resumes by itself from the newest directory, whatever is in it.
            return resume.newest_or_begin(Path(args.output_dir), _channel(args), logger.warning)
        # Its preference training asks for that directory, or for none, whatever was named.
        requested = args.resume_from_checkpoint
    if not requested:
        return None
    if requested is True:
        return resume.newest_or_refuse(Path(args.output_dir), _channel(args), logger.warning)
    return resume.named(place(at_home(requested)), _channel(args))


def _warn_of_another_run(args: Any) -> None:
    """Say that a run from the beginning will share its directory with the checkpoints of an earlier one."""
    if not args.should_log:
        return
    try:
        found, _ = newest_checkpoint(Path(args.output_dir))
    except StorageError:
        return  # The first save will say it.
    if found is not None:
        logger.warning(
            f"This run starts from the beginning, and {args.output_dir} holds checkpoints of another, up to {found}. "
            "Until this run has passed that step, resume_from_checkpoint: true would take the other's. Name another "
            "output_dir to keep them apart."
        )


@_when_active
def load(trainer: Any, native: Native, resume_from_checkpoint: str) -> None:
    """``Trainer._load_flex_checkpoint``: fill model and optimizer, and take over the Trainer's state.

    Raises:
        FlexError: the same on every rank, before any weight has changed; see :mod:`paddleformers_fc.execute.load`.
    """
    started = time.monotonic()
    args, channel = trainer.args, _channel(trainer.args)
    run = _run_of(trainer)
    directory = _meant(run, resume_from_checkpoint)
    roll = _options(args, f"resuming from {directory.name}")
    checkpoint = open_checkpoint(directory, channel, args.flex_verify, args.flex_threads, roll)
    continued = not args.ignore_load_lr_and_optim
    progress = documents.read_progress(checkpoint, channel) if continued else None
    if progress is not None:
        _refuse_unlike(trainer, progress, directory)
    generators = own_file(checkpoint, channel, documents.rng_name) if continued else None
    roles = together(channel, "preparing the optimizer", lambda: _roles_to_fill(trainer, checkpoint, continued))
    config = documents.model_config(trainer.model)
    options = _read_options(args)
    report = load_checkpoint(checkpoint, roles, config, channel, options, args.aoa_config, _plans(args))
    _drop_begun_step(trainer, run)
    run.resumed_from, run.progress, run.generators = directory, progress, generators
    if progress is not None:
        _take_over(trainer, progress)
        _look_for_best(trainer, directory, channel)
    loaded = CheckpointReport(
        step=checkpoint.manifest.step,
        directory=directory,
        seconds=time.monotonic() - started,
        bytes=report.bytes_read,
        known_plan=report.known_plan,
    )
    for reporter in _reporters(trainer):
        reporter.on_checkpoint_loaded(args, loaded)


def _read_options(args: Any) -> ReadOptions:
    return ReadOptions(
        threads=args.flex_threads, staging_bytes=parse_size(args.flex_staging_size), once=args.flex_read == "once"
    )


def _plans(args: Any) -> PlanCache:
    return PlanCache(Path(at_home(args.flex_plan_cache))) if args.flex_plan_cache != "none" else PLANS


def _meant(run: Run, named: str) -> Place:
    """The checkpoint that a native method names."""
    return run.chosen if run.chosen is not None and named == str(run.chosen) else place(named)


def _roles_to_fill(trainer: Any, checkpoint: FlexCheckpoint, continued: bool) -> state.LiveRoles:
    """The live weights and states that the checkpoint is to fill."""
    stored = checkpoint.catalog.roles
    masters = stored.get(MASTER_WEIGHT, {})
    state.make_room(trainer.model)
    if not (continued or masters):
        return state.model_roles(trainer.model)
    optimizers.refuse_unsupported(trainer.optimizer)
    if continued:
        state.create_states(trainer.model, trainer.optimizer, {*masters, *stored.get(OPTIMIZER_STATE, {})})
        wanted = (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE)
        return _asked_for(wanted, stored, state.run_roles(trainer.model, trainer.optimizer))
    # Master weights are weights: a new run from a checkpoint's weights begins with all of their digits.
    state.create_states(trainer.model, trainer.optimizer, masters)
    return _asked_for((MODEL_STATE, MASTER_WEIGHT), stored, state.run_roles(trainer.model, trainer.optimizer))


def _asked_for(wanted: Sequence[str], stored: Mapping[str, object], live: state.LiveRoles) -> state.LiveRoles:
    """The live roles that are wanted, and the stored ones of which this rank holds nothing.

    A role that no rank names is left alone by a load. Under overlaps of a pipeline Paddle has nothing to make states
    of before the first step, and a run would go on with new ones; of a role that is named, what no rank holds is
    missed.
    """
    return {role: live.get(role, {}) for role in wanted if role in live or stored.get(role)}


def _refuse_unlike(trainer: Any, progress: documents.Progress, directory: Place) -> None:
    """Before anything changes: what :func:`_take_over` will set must be what these objects could have saved."""
    position.from_document(progress.data, str(directory / documents.DATA))
    documents.refuse_unlike(progress.scheduler, trainer.lr_scheduler.state_dict(), directory / documents.SCHEDULER)
    if trainer.do_grad_scaling and progress.scaler is not None:
        documents.refuse_unlike(progress.scaler, trainer.scaler.state_dict(), directory / documents.SCALER)


def _take_over(trainer: Any, progress: documents.Progress) -> None:
    """Scheduler, scaler and state of the run that is continued."""
    trainer.lr_scheduler.set_state_dict(progress.scheduler)
    if trainer.do_grad_scaling and progress.scaler is not None:
        trainer.scaler.load_state_dict(progress.scaler)
    trainer.state = progress.state


def _drop_begun_step(trainer: Any, run: Run) -> None:
    """What a training that broke off in the middle of a step has left in this Trainer: gradients, and batches."""
    if run.has_trained:
        state.drop_gradients(trainer.model, trainer.optimizer)
    setattr(trainer, _WAITING, [])


def _look_for_best(trainer: Any, resumed: Place, channel: Channel) -> None:
    """Where the best checkpoint is now; said here if it is gone, and not by an error when training has ended."""
    named = trainer.state.best_model_checkpoint
    if named is None:
        return
    found = trainer.state.best_model_checkpoint = found_again(named, resumed, channel)
    if found is None and trainer.args.should_log:
        logger.warning(
            f"The best checkpoint so far is gone: {named} is neither there nor beside {resumed}. The next one that "
            "is evaluated and saved takes its place."
        )


@_when_active
def inner_training_loop(
    trainer: Any,
    native: Native,
    args: Any,
    model: Any,
    train_dataloader: Any,
    len_dataloader: int | None,
    max_steps: int,
    num_train_epochs: int,
    num_update_steps_per_epoch: int,
    num_train_samples: int,
    resume_from_checkpoint: str | None,
    ignore_keys_for_eval: list[str] | None,
) -> Any:
    """``Trainer._inner_training_loop``: a resumed run's data begins where the checkpoint ended.

    Raises:
        OptionError: the data is dealt in another order or in portions that do not fit, or the optimizer is one whose
            states are not supported.
    """
    run = _run_of(trainer)
    # Only now is it certain which optimizer the run has, and what sharding has made of it.
    together(_channel(args), "looking at the optimizer", lambda: _refuse_optimizer(trainer))
    order, passes = _data(args, train_dataloader, len_dataloader)
    start, epochs, loader = position.Start(position.Position(), 0), num_train_epochs, train_dataloader
    on_made_up = None
    if run.progress is not None:
        start = _start(run, args, order, passes)
        done = trainer.state.global_step >= max_steps
        epochs = position.epochs_left(start, num_train_epochs, args.max_steps > 0, done)
        loader = batches.ResumedBatches(
            train_dataloader,
            start,
            order.indexed,
            on_first_batch=lambda: trainer._load_rng_state(str(run.resumed_from)),
            on_epoch_over=run.tracker.begin_next_epoch,
            keep_waiting=getattr(trainer, _WAITING).append,
        )
        on_made_up = loader.expect_first
    run.tracker.begin(order, passes, start, run.progress is not None, num_train_epochs, on_made_up)
    run.has_trained = True
    with run.best.kept_from(trainer):
        result = native(
            args,
            model,
            loader,
            len_dataloader,
            max_steps,
            epochs,
            num_update_steps_per_epoch,
            num_train_samples,
            None,
            ignore_keys_for_eval,
        )
    if args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        _load_best(trainer, Path(trainer.state.best_model_checkpoint))
    return result


def _data(args: Any, loader: Any, passes: int | None) -> tuple[position.Order, int | None]:
    """The order of the data, and the passes of an epoch if they are known.

    Where ranks are handed their batches by others, these say it for all: who reads nothing knows neither.
    """
    own = batches.order_of(loader), passes
    if not args.distributed_dataloader:
        return own
    reads = not batches.is_handed_its_batches(loader)
    told = agree(_channel(args), "looking at the data", lambda: msgspec.json.encode(own) if reads else b"")
    return _told_data.decode(next(filter(None, told)))


def _start(run: Run, args: Any, order: position.Order, passes: int | None) -> position.Start:
    if run.progress is None or run.resumed_from is None:
        return position.Start(position.Position(), 0)
    saved = position.from_document(run.progress.data, f"{run.resumed_from}/{documents.DATA}")
    pace = position.pace_of(args, passes)
    change = position.changed_batch(saved[1], pace)
    if change and args.should_log:
        logger.warning(change)
    if args.ignore_data_skip:
        return position.Start(position.Position(saved[0].epoch, 0, saved[0].consumed), 0)
    if not order.indexed and saved[0].samples and args.should_log:
        other = position.changed_stream(documents.told_arguments(run.resumed_from), args)
        if other:
            logger.warning(other)
    pipeline = args.pipeline_model_parallel_size > 1
    return position.start_after(saved, pace, order, passes, pipeline)


def _load_best(trainer: Any, directory: Path) -> None:
    """The weights of the best checkpoint, once training has ended."""
    channel = _channel(trainer.args)
    checkpoint = open_checkpoint(directory, channel, trainer.args.flex_verify, trainer.args.flex_threads)
    roles = together(channel, "preparing the best model", lambda: state.model_roles(trainer.model))
    options = _read_options(trainer.args)
    load_checkpoint(checkpoint, roles, documents.model_config(trainer.model), channel, options)
    if trainer.args.should_log:
        logger.info(f"The model now has the weights of its best checkpoint, {directory}.")


@_when_active
def load_rng_state(trainer: Any, native: Native, checkpoint: str | None) -> None:
    """``Trainer._load_rng_state``: this rank's random generators, if the number of ranks has not changed."""
    if checkpoint is None:
        return
    args = trainer.args
    run = _run_of(trainer)
    path = _meant(run, checkpoint) / documents.rng_name(dist.get_rank())
    raw = read_document(path) if exists(path) else run.generators
    restored = raw is not None and rng.restore(
        raw, str(path), args.world_size, args.use_hybrid_parallel, args.tensor_model_parallel_size > 1
    )
    if not restored and args.should_log and not run.told_of_generators:
        run.told_of_generators = True
        logger.warning(
            f"Random generators start anew: {checkpoint} has none for {count_text(args.world_size, 'rank')}. "
            "Dropout and other randomness differ from the run that was saved."
        )


@_when_active
def save(trainer: Any, native: Native, model: Any, metrics: dict[str, float] | None = None) -> None:
    """``Trainer._save_checkpoint``: write ``checkpoint-N`` as a whole, then delete what is beyond the limit.

    Raises:
        FlexError: the same on every rank; the previous checkpoints are untouched.
    """
    with _run_of(trainer).best.shown_in(trainer):
        _save(trainer, metrics)


def _save(trainer: Any, metrics: dict[str, float] | None) -> None:
    started = time.monotonic()
    args, channel = trainer.args, _channel(trainer.args)
    trainer.runtime_timer.start("checkpoint saving time")
    directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    roll = _options(args, f"saving {directory.name}")

    def prepare() -> tuple[state.LiveRoles, dict[str, bytes]]:
        _note_best(trainer, metrics, directory)
        return _roles_to_save(trainer), _files(trainer, channel)

    roles, files = together(channel, "preparing a checkpoint", prepare, roll)
    job = JobRecord(trainer.state.global_step, trainer.state.consumed_samples, parallel_degrees(args))
    bound = parse_size(args.flex_max_file_size)
    config, checked = documents.model_config(trainer.model), args.flex_check_replicas
    report = save_checkpoint(directory, roles, config, files, job, channel, bound, checked)
    _note_saved(_run_of(trainer), directory, report.disks, args)
    for path in report.set_aside:
        logger.warning(f"{path} was in the way of {directory} and is kept; delete it when nobody needs it.")
    _tell_of_differences(trainer, directory, report.differences)
    trainer.runtime_timer.stop()
    seconds = time.monotonic() - started
    saved = CheckpointReport(job.step, directory, seconds, _total_bytes(report.manifest), report.differences)
    for reporter in _reporters(trainer):
        reporter.on_checkpoint_saved(args, saved)
    trainer._rotate_checkpoints(output_dir=args.output_dir)


def _tell_of_differences(trainer: Any, directory: Path, differences: tuple[str, ...]) -> None:
    """Say once in a run that its ranks have gone apart; every checkpoint says it of itself."""
    run = _run_of(trainer)
    if not differences or run.told_of_differences:
        return
    run.told_of_differences = True
    if trainer.args.should_log:
        lines = "".join(f"\n  - {line}" for line in differences)
        logger.warning(
            "Ranks that hold the same part of a tensor hold different numbers: training has gone apart on them. "
            f"{directory} has one of the versions, and its flex_checkpoint.json lists what differs. This is said once "
            f"in a run; flex_check_replicas: refuse saves nothing then.{lines}"
        )


def _note_saved(run: Run, directory: Path, disks: Disks, args: Any) -> None:
    """Remember what rotation must know; say once that a checkpoint lies on several disks."""
    known = run.disks is not None and run.disks.leads == disks.leads
    if len(disks.of_leads) > 1 and not known and args.should_log:
        shared = "; ".join(spelled(ranks) for ranks in disks.sharing().values())
        logger.warning(
            f"{args.output_dir} lies on {len(disks.of_leads)} disks, which are seen by: {shared}. Each gets a part of "
            "every checkpoint; to resume, all parts must be seen, each by any rank."
        )
    run.saved, run.disks = directory, disks


def _roles_to_save(trainer: Any) -> state.LiveRoles:
    if trainer.args.ignore_save_lr_and_optim:
        return state.model_roles(trainer.model)
    return state.run_roles(trainer.model, trainer.optimizer)


def _files(trainer: Any, channel: Channel) -> dict[str, bytes]:
    """This rank's small files; those that are the same on every rank are written by the first."""
    args, tracker = trainer.args, _run_of(trainer).tracker
    files: dict[str, bytes] = {}
    if args.save_rng_states:
        files[documents.rng_name(channel.rank)] = rng.capture(args.world_size, args.use_hybrid_parallel)
    if channel.rank == 0:
        data = position.to_document(tracker.position, position.pace_of(args), tracker.order)
        files |= {**documents.model_files(trainer), **documents.trainer_files(trainer, data)}
    return files


def _note_best(trainer: Any, metrics: dict[str, float] | None, directory: Path) -> None:
    """Remember the best checkpoint, as PaddleFormers does.

    Raises:
        OptionError: the evaluation has no such metric.
    """
    args, state = trainer.args, trainer.state
    if metrics is None or args.metric_for_best_model is None:
        return
    named = args.metric_for_best_model
    name = named if named.startswith("eval_") else f"eval_{named}"
    if name not in metrics:
        raise OptionError(
            f"The evaluation has no metric {name}, by which the best checkpoint is to be chosen.",
            where=f"metric_for_best_model: {named}",
            evidence=[f"it has {', '.join(sorted(metrics))}"],
            next_step="Name one of these in metric_for_best_model; of several evaluation sets the last one counts.",
        )
    value = metrics[name]
    better = np.greater if args.greater_is_better else np.less
    if state.best_metric is None or state.best_model_checkpoint is None or better(value, state.best_metric):
        state.best_metric = float(value)
        state.best_model_checkpoint = str(directory)


def parallel_degrees(args: Any) -> dict[str, int]:
    """The degree of every parallel axis, for the reader of a manifest."""
    sharding = max(args.sharding_parallel_size, 1)
    return {
        "dp": max(args.dataset_world_size // sharding, 1),
        "tp": max(args.tensor_model_parallel_size, 1),
        "pp": max(args.pipeline_model_parallel_size, 1),
        "sharding": sharding,
        "ep": max(args.expert_model_parallel_size, 1),
        "sep": max(args.sep_parallel_size, 1),
        "cp": max(args.context_parallel_size, 1),
    }


@_when_active
def sorted_checkpoints(
    trainer: Any,
    native: Native,
    output_dir: str | None = None,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
) -> list[str]:
    """``Trainer._sorted_checkpoints``: by step, which copying files does not change."""
    found = rotation.numbered(Path(output_dir or trainer.args.output_dir), checkpoint_prefix)
    return [str(path) for path in found]


@_when_active
def rotate_checkpoints(trainer: Any, native: Native, use_mtime: bool = False, output_dir: str | None = None) -> None:
    """``Trainer._rotate_checkpoints``: on the first rank of every disk, and never the newest finished one."""
    args, run = trainer.args, _run_of(trainer)
    if dist.get_rank() not in (run.disks.of_leads if run.disks is not None else (0,)):
        return
    with run.best.shown_in(trainer):
        best = trainer.state.best_model_checkpoint
    limit = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
    try:
        needed = [path for path in (run.saved, None if best is None else Path(best)) if path is not None]
        level, threads = args.flex_verify, args.flex_threads
        rotation.rotate(Path(output_dir or args.output_dir), limit, needed, logger.info, level, threads)
    except StorageError as error:
        # The checkpoint is saved; that an old one resists is no reason to end the run.
        logger.warning(f"An old checkpoint could not be deleted; the next save tries again.\n{error.render()}")


@_when_active
def save_model_of_slices(
    trainer: Any,
    native: Native,
    output_dir: str | None = None,
    merge_tensor_parallel: bool = False,
    last_fc_to_hf: bool = False,
) -> None:
    """``Trainer.save_model``: under sharding stage 3 without gathering the whole model on every rank before.

    Slices are exported as they lie, and on a CPU the gathering fails.

    Raises:
        FlexError: the same on every rank; an older export in the directory is untouched.
    """
    save = trainer._save if ShardingOption.FULL_SHARD in trainer.args.sharding else native
    save(output_dir, merge_tensor_parallel=merge_tensor_parallel, last_fc_to_hf=last_fc_to_hf)


@_when_active
def save_model(
    trainer: Any,
    native: Native,
    output_dir: str | None = None,
    state_dict: Any = None,
    merge_tensor_parallel: bool = False,
    last_fc_to_hf: bool = False,
) -> None:
    """``Trainer._save``: the model in HuggingFace format, with everything that ``from_pretrained`` needs.

    Raises:
        FlexError: the same on every rank; an older export in the directory is untouched.
    """
    _export(
        trainer, local(output_dir or trainer.args.output_dir, "An export"), parse_size(trainer.args.flex_max_shard_size)
    )


def save_pretrained(
    trainer: Any,
    native: Native,
    save_dir: str,
    is_main_process: bool = True,
    state_dict: Any = None,
    *args: Any,
    max_shard_size: str | int | None = None,
    **kwargs: Any,
) -> None:
    """``model.save_pretrained`` of a Trainer's model. Every rank must call, as for the native method.

    Args:
        trainer: the Trainer that the model belongs to.
        native: the model's own method, used if a ``state_dict`` is given that is not the model's.
        save_dir: the directory to write.
        is_main_process: without meaning here; the ranks share the work.
        state_dict: other weights than the model's.
        max_shard_size: largest file, such as ``"5GB"`` or a number of bytes. Default: ``flex_max_shard_size``.

    Raises:
        FlexError: the same on every rank; an older export in the directory is untouched.
    """
    if state_dict is not None:
        native(save_dir, is_main_process, state_dict, *args, **kwargs)
        return
    asked = trainer.args.flex_max_shard_size if max_shard_size is None else max_shard_size
    _export(trainer, local(save_dir, "An export"), parse_size(asked) if isinstance(asked, str) else int(asked))


def _export(trainer: Any, directory: Path, max_shard_bytes: int) -> None:
    channel = _channel(trainer.args)
    roll = _options(trainer.args, f"exporting to {directory.name}")

    def prepare() -> tuple[state.LiveRoles, dict[str, bytes]]:
        roles = state.model_roles(trainer.model)
        if channel.rank != 0:
            return roles, {}
        arguments = documents.arguments_document(trainer.args)
        return roles, {**documents.model_files(trainer), documents.EXPORTED_ARGUMENTS: arguments}

    roles, files = together(channel, "preparing an export", prepare, roll)
    config = documents.model_config(trainer.model)
    report = save_weights(roles[MODEL_STATE], config, files, directory, max_shard_bytes, channel)
    if trainer.args.should_log:
        tensors, files_made = count_text(report.tensors, "tensor"), count_text(len(report.files), "file")
        logger.info(f"Exported {tensors} to {directory} in {files_made}.")


def _options(args: Any, doing: str) -> Called:
    """What ranks that were started alike have in common."""
    names = (*FIELD_NAMES, *_SHARED_OPTIONS)
    return Called(doing, {name: getattr(args, name) for name in names if hasattr(args, name)})


def _channel(args: Any) -> Channel:
    """All ranks of the job, none of which waits for another forever."""
    return patient_channel(args.flex_timeout)


def _run_of(trainer: Any) -> Run:
    run: Run = getattr(trainer, _RUN)
    return run


def _reporters(trainer: Any) -> list[FlexCheckpointCallback]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, FlexCheckpointCallback)]


def _total_bytes(manifest: Manifest) -> int:
    return sum(receipt.size for receipt in manifest.files)
