"""Resuming, as PaddleFormers' Trainer does it when ``flex_checkpoint`` is true: one function per method that changes.

Which checkpoint, its weights and states, and then the data where the checkpoint ended. The training loop is
PaddleFormers' own; it is told that nothing is resumed, because a resumed run's state, data position and random state
are put in place here. Whatever may fail on one rank alone runs inside an agreement of all ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paddle.distributed as dist
from paddleformers.utils.log import logger

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.errors import CheckpointError, Diverged, FlexError, StorageError
from paddleformers_fc.execute.load import PLANS, Fill, load_checkpoint, prepare_load
from paddleformers_fc.execute.opening import open_on_all_ranks, own_file, own_or_handed
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.checkpoint import REFUSE
from paddleformers_fc.layout.roles import MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan.cache import PlanCache
from paddleformers_fc.storage.files import real_path
from paddleformers_fc.storage.leftovers import leftovers
from paddleformers_fc.storage.manifest import Manifest
from paddleformers_fc.storage.paths import AnyPath, expand_user, parse_path
from paddleformers_fc.text import count_text, natural
from paddleformers_fc.trainer import (
    batches,
    changes,
    documents,
    inherited,
    lineage,
    optimizers,
    origin,
    position,
    preflight,
    resume,
    rng,
    state,
)
from paddleformers_fc.trainer.best import locate_best
from paddleformers_fc.trainer.callback import CheckpointReport
from paddleformers_fc.trainer.description import describe
from paddleformers_fc.trainer.job_state import (
    WAITING,
    JobState,
    Native,
    channel_of,
    consistency_check_of,
    job_state_of,
    read_options,
    refuse_optimizer,
    reporters,
    when_active,
)
from paddleformers_fc.trainer.saving import degrees_text, parallel_degrees


@when_active
def train(
    trainer: Any,
    native: Native,
    resume_from_checkpoint: str | bool | None = None,
    ignore_keys_for_eval: list[str] | None = None,
) -> Any:
    """``Trainer.train``: ``True`` becomes the path of the newest finished checkpoint.

    Raises:
        NotACheckpoint: there is none, or what was named is none.
        FlexError: what :func:`.preflight.check` finds, before the first step.
        OptionError: see :func:`.origin.refuse_other_reference`.
    """
    preflight.check(trainer, channel_of(trainer.args))
    run = job_state_of(trainer)
    run_on_all(channel_of(trainer.args), "comparing the reference model", lambda: _refuse_other_reference(trainer))
    run.resumed_from = run.progress = run.generators = run.saved = None
    run.told_of_generators = False
    run.ran, run.said, run.record = {"train"}, set(), None
    chosen, run.named = _chosen(trainer.args, resume_from_checkpoint, _warner(run, trainer.args))
    run.chosen = chosen
    _tell_of_leftovers(trainer.args)
    if chosen is None:
        _begin(run, trainer.args)
    return native(None if chosen is None else str(chosen), ignore_keys_for_eval)


def _refuse_other_reference(trainer: Any) -> None:
    # PaddleFormers' preference training sets it after Trainer.__init__.
    reference = getattr(trainer, "ref_model", None)
    origin.refuse_other_reference(reference, trainer.model, trainer.args.flex_accept_model)


def _tell_of_leftovers(args: Any) -> None:
    """List what saves of other hosts or containers may have left; no save of this machine deletes it."""
    if not args.should_log:
        return
    try:
        found = [one for one in leftovers(Path(args.output_dir)) if one.removable and not one.disposable]
    except StorageError:
        return  # The first save raises it.
    if found:
        lines = "".join(f"\n  - {one.path.name}: {one.why}" for one in found)
        logger.warning(
            f"{args.output_dir} holds leftovers of other saves. paddleformers-fc clean {args.output_dir} removes those "
            f"that you confirm.{lines}"
        )


def _warner(run: JobState, args: Any) -> Callable[[str], None]:
    """Say each line once, on every node."""

    def warn(line: str) -> None:
        if args.should_log and line not in run.said:
            logger.warning(line)
        run.said.add(line)

    return warn


def _chosen(args: Any, requested: str | bool | None, warn: Callable[[str], None]) -> tuple[AnyPath | None, bool]:
    """The checkpoint to resume from, and whether it was named."""
    if getattr(args, "looks_for_last_checkpoint", False):
        if args.resume_from_checkpoint is None and not args.overwrite_output_dir:
            # The command line resumes by itself from the newest directory, whatever is in it. What was requested does
            # not count: it is None on a node whose disk is empty, and all ranks must decide together.
            return resume.newest_or_begin(Path(args.output_dir), channel_of(args), warn), False
        # Its preference training asks for that directory, or for none, whatever was named.
        requested = args.resume_from_checkpoint
    if not requested:
        return None, False
    if requested is True:
        return resume.newest_or_refuse(Path(args.output_dir), channel_of(args), warn), False
    return resume.require_named(parse_path(expand_user(requested)), channel_of(args)), True


def _begin(run: JobState, args: Any) -> None:
    """Identify a run from the beginning, and warn of checkpoints of others in its output directory."""
    output_dir = Path(args.output_dir)
    run.record = lineage.new_run()
    warning = lineage.begun(run.record, lineage.saved_in(output_dir, channel_of(args)), output_dir)
    if warning and args.should_log:
        logger.warning(warning)


@when_active
def load(trainer: Any, native: Native, resume_from_checkpoint: str) -> None:
    """``Trainer._load_flex_checkpoint``: fill model and optimizer, and take over the Trainer's state.

    Raises:
        FlexError: the same on every rank, before any weight has changed; see :mod:`paddleformers_fc.execute.load`.
    """
    started = time.monotonic()
    args, channel = trainer.args, channel_of(trainer.args)
    run = job_state_of(trainer)
    ready = _ready(trainer, _meant(run, resume_from_checkpoint), channel)
    checkpoint, progress = ready.checkpoint, ready.progress
    directory = run.chosen = checkpoint.catalog.root
    _go_on(run, args, checkpoint.manifest, directory, channel)
    report = ready.fill()
    inherited.take_over(trainer.model, checkpoint.config, ready.generation)
    _drop_begun_step(trainer, run)
    run.resumed_from, run.progress, run.generators = directory, progress, ready.generators
    run.manifest, run.changes = checkpoint.manifest, report.changes
    run.ran.add("_load_flex_checkpoint")
    if progress is not None:
        _take_over(trainer, progress)
        _look_for_best(trainer, directory, channel)
    loaded = CheckpointReport(
        step=checkpoint.manifest.step,
        directory=directory,
        seconds=time.monotonic() - started,
        bytes=report.bytes_read,
        known_plan=report.known_plan,
        layouts=(degrees_text(checkpoint.manifest.parallel), degrees_text(parallel_degrees(args))),
    )
    for reporter in reporters(trainer):
        reporter.on_checkpoint_loaded(args, loaded)
    if progress is None:
        _warn(args, changes.changes_text(checkpoint.manifest.step, run.changes))
    elif args.aoa_config is None:
        _warn_of_unfrozen(trainer, checkpoint, channel)


def _warn(args: Any, text: str) -> None:
    """Log a warning on every node, unless it is empty."""
    if text and args.should_log:
        logger.warning(text)


def _warn_of_unfrozen(trainer: Any, checkpoint: OpenedCheckpoint, channel: Channel) -> None:
    """Report parameters that are trained and have no states: frozen in the saved run, or never given a gradient."""
    stored = checkpoint.catalog.roles.get(OPTIMIZER_STATE, {})

    def look() -> list[str]:
        return list(state.trained_without_states(trainer.model, stored))

    everyone = all_gather_checked(channel, "looking for parameters without states", look, list[str])
    names = sorted({name for names in everyone for name in names}, key=natural)
    if names:
        lines = "".join(f"\n  - {line}" for line in fold(names))
        _warn(
            trainer.args,
            f"{count_text(len(names), 'parameter')} of this run {'is' if len(names) == 1 else 'are'} trained and "
            f"without optimizer states in {checkpoint.catalog.root}: frozen in the run that saved it, or without a "
            f"gradient. Their states start at zero.{lines}",
        )


@dataclass(frozen=True)
class _Ready:
    """A checkpoint that was verified and fits, before anything is changed.

    Args:
        checkpoint: opened.
        progress: the Trainer's state in it; None unless it is to be continued.
        generators: this process's random generators in it, where it does not see the file.
        generation: its ``generation_config.json``; None where it has none.
        fill: fills the weights and states.
    """

    checkpoint: OpenedCheckpoint
    progress: documents.TrainingProgress | None
    generators: bytes | None
    generation: bytes | None
    fill: Fill


class _FailsVerificationError(Exception):
    """A checkpoint is damaged, and nothing was changed."""

    def __init__(self, error: FlexError) -> None:
        super().__init__(error)
        self.error = error


@contextlib.contextmanager
def _verifying() -> Iterator[None]:
    """A block in which an error about the checkpoint alone means that it fails verification."""
    try:
        yield
    except (CheckpointError, Diverged) as error:
        raise _FailsVerificationError(error) from error


def _ready(trainer: Any, directory: AnyPath, channel: Channel) -> _Ready:
    """The checkpoint that is resumed: the one that was named, or the newest one that passes verification.

    Raises:
        FlexError: the same on every rank: what was named fails; what is newest does not fit; or there is none.
    """
    run, args = job_state_of(trainer), trainer.args
    unusable: dict[str, str] = {}
    while True:
        try:
            return _prepared(trainer, directory, channel)
        except _FailsVerificationError as failed:
            if run.named:
                raise failed.error from None
            unusable[directory.name] = why = failed.error.in_one_line()
        warn = _warner(run, args)
        warn(f"{directory} fails verification and is skipped: {why}")
        directory = resume.newest_or_refuse(Path(args.output_dir), channel, warn, unusable)


def _prepared(trainer: Any, directory: AnyPath, channel: Channel) -> _Ready:
    args = trainer.args
    consistency = consistency_check_of(args, f"resuming from {directory.name}")
    with _verifying():
        checkpoint = open_on_all_ranks(directory, channel, args.flex_verify, args.flex_threads, consistency)
    checkpoint = replace(checkpoint, tied=_tied(trainer, checkpoint))
    continued = not args.ignore_load_lr_and_optim
    progress = documents.read_progress(checkpoint, channel) if continued else None
    if progress is not None:
        _refuse_unlike(trainer, progress, directory)
    generators = documents.read_generators(checkpoint, channel) if continued else None
    handed = own_file(checkpoint, channel, lambda rank: inherited.GENERATION)

    def prepare() -> tuple[state.LiveRoles, bytes | None]:
        return _roles_to_fill(trainer, checkpoint, continued), own_or_handed(checkpoint, inherited.GENERATION, handed)

    roles, generation = run_on_all(channel, "preparing the optimizer", prepare)
    model, options = describe(trainer.model), read_options(args)
    with _verifying():
        may_change = args.flex_allow_config_changes
        fill = prepare_load(checkpoint, roles, model, channel, options, args.aoa_config, _plans(args), may_change)
    return _Ready(checkpoint, progress, generators, generation, fill)


def _go_on(run: JobState, args: Any, manifest: Manifest, directory: AnyPath, channel: Channel) -> None:
    """Identify the run that resumes a checkpoint, and warn of other runs in its output directory."""
    output_dir = Path(args.output_dir)
    saved = lineage.saved_in(output_dir, channel)
    if args.ignore_load_lr_and_optim:
        run.record = lineage.new_run()
        warning = lineage.begun(run.record, saved, output_dir)
    else:
        here = isinstance(directory, Path) and real_path(directory.parent) == real_path(output_dir)
        run.record, warning = lineage.resumed(manifest, saved, here, run.named)
    if warning and args.should_log:
        logger.warning(warning)


def _tied(trainer: Any, checkpoint: OpenedCheckpoint) -> str:
    """Which copy of a tied tensor is read. What differs is a user's to choose, of a checkpoint that he names."""
    args, manifest = trainer.args, checkpoint.manifest
    if not job_state_of(trainer).named or args.flex_tied == REFUSE:
        return REFUSE
    if manifest.ties and args.should_log:
        lines = "".join(f"\n  - {line}" for tie in manifest.ties for line in tie.differences)
        logger.warning(
            f"Copies of tied tensors in {checkpoint.catalog.root} differ. Under flex_tied: {args.flex_tied} those of "
            f"the {args.flex_tied} pipeline stage are read.{lines}"
        )
    return str(args.flex_tied)


def _plans(args: Any) -> PlanCache:
    return PlanCache(Path(expand_user(args.flex_plan_cache))) if args.flex_plan_cache != "none" else PLANS


def _meant(run: JobState, named: str) -> AnyPath:
    """The checkpoint that a native method names."""
    return run.chosen if run.chosen is not None and named == str(run.chosen) else parse_path(named)


def _roles_to_fill(trainer: Any, checkpoint: OpenedCheckpoint, continued: bool) -> state.LiveRoles:
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


def _refuse_unlike(trainer: Any, progress: documents.TrainingProgress, directory: AnyPath) -> None:
    """Before anything changes: what :func:`_take_over` will set must be what these objects could have saved."""
    position.from_document(progress.data, str(directory / documents.DATA))
    documents.refuse_unlike(progress.scheduler, trainer.lr_scheduler.state_dict(), directory / documents.SCHEDULER)
    if trainer.do_grad_scaling and progress.scaler is not None:
        documents.refuse_unlike(progress.scaler, trainer.scaler.state_dict(), directory / documents.SCALER)


def _take_over(trainer: Any, progress: documents.TrainingProgress) -> None:
    """Scheduler, scaler and state of the run that is continued."""
    trainer.lr_scheduler.set_state_dict(progress.scheduler)
    if trainer.do_grad_scaling and progress.scaler is not None:
        trainer.scaler.load_state_dict(progress.scaler)
    trainer.state = progress.state


def _drop_begun_step(trainer: Any, run: JobState) -> None:
    """What a training that broke off in the middle of a step has left in this Trainer: gradients, and batches."""
    if run.has_trained:
        state.drop_gradients(trainer.model, trainer.optimizer)
    setattr(trainer, WAITING, [])


def _look_for_best(trainer: Any, resumed: AnyPath, channel: Channel) -> None:
    """Where the best checkpoint is now; said here if it is gone, and not by an error when training has ended."""
    named = trainer.state.best_model_checkpoint
    if named is None:
        return
    found = trainer.state.best_model_checkpoint = locate_best(named, resumed, channel)
    if found is None and trainer.args.should_log:
        logger.warning(
            f"The best checkpoint so far is gone: {named} is neither there nor beside {resumed}. The next one that "
            "is evaluated and saved takes its place."
        )


@when_active
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
    run = job_state_of(trainer)
    # Only now is it certain which optimizer the run has, and what sharding has made of it.
    run_on_all(channel_of(args), "looking at the optimizer", lambda: refuse_optimizer(trainer))
    order, passes = _data(args, train_dataloader, len_dataloader)
    start, epochs, loader = position.Start(position.Position(), 0), num_train_epochs, train_dataloader
    on_made_up = None
    if run.progress is not None:
        start = _start(trainer, order, passes)
        done = trainer.state.global_step >= max_steps
        epochs = position.epochs_left(start, num_train_epochs, args.max_steps > 0, done)
        loader = batches.ResumedBatches(
            train_dataloader,
            start,
            order.indexed,
            on_first_batch=lambda: trainer._load_rng_state(str(run.resumed_from)),
            on_epoch_over=run.tracker.begin_next_epoch,
            keep_waiting=getattr(trainer, WAITING).append,
        )
        on_made_up = loader.expect_first
    run.tracker.begin(order, passes, start, run.progress is not None, num_train_epochs, on_made_up)
    run.has_trained = True
    run.ran.add("_inner_training_loop")
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


def _data(args: Any, loader: Any, passes: int | None) -> tuple[position.SampleOrder, int | None]:
    """Return the order of the data, and the passes of an epoch if they are known.

    Ranks that get their batches from others take both from a rank that reads the data.
    """
    own = batches.order_of(loader), passes
    if not args.distributed_dataloader:
        return own
    reads = not batches.is_handed_its_batches(loader)
    everyone = all_gather_checked(
        channel_of(args),
        "looking at the data",
        lambda: [own] if reads else [],
        list[tuple[position.SampleOrder, int | None]],
    )
    return next(order for orders in everyone for order in orders)


def _start(trainer: Any, order: position.SampleOrder, passes: int | None) -> position.Start:
    run, args = job_state_of(trainer), trainer.args
    if run.progress is None or run.resumed_from is None:
        return position.Start(position.Position(), 0)
    saved = position.from_document(run.progress.data, f"{run.resumed_from}/{documents.DATA}")
    pace = position.pace_of(args, passes)
    _warn_of_changes(trainer, saved, pace, order)
    if args.ignore_data_skip:
        return position.Start(position.Position(saved[0].epoch, 0, saved[0].consumed), 0)
    pipeline = args.pipeline_model_parallel_size > 1
    return position.start_after(saved, pace, order, passes, pipeline)


def _warn_of_changes(
    trainer: Any,
    saved: tuple[position.Position, position.Pace, position.SampleOrder],
    pace: position.Pace,
    order: position.SampleOrder,
) -> None:
    """Report in one table what differs between the model and run that were saved and these."""
    args, run = trainer.args, job_state_of(trainer)
    done, old_pace, old_order = saved
    streams = not order.indexed and done.samples > 0 and not args.ignore_data_skip

    def compare() -> str:
        directory, manifest = run.resumed_from, run.manifest
        if directory is None or manifest is None or not args.should_log:
            return ""
        arguments = documents.read_arguments(directory, manifest), documents.own_arguments(args)
        found = [
            *run.changes,
            *changes.argument_changes(*arguments, streams),
            *changes.batch_changes(old_pace, pace),
            *changes.length_changes((old_order, old_pace), (order, pace)),
            *changes.file_changes(manifest, documents.tokenizer_files(trainer)),
        ]
        return changes.changes_text(trainer.state.global_step, found, streams)

    _warn(args, run_on_all(channel_of(args), "comparing the run with the one that was saved", compare))


def _load_best(trainer: Any, directory: Path) -> None:
    """The weights of the best checkpoint, once training has ended."""
    channel = channel_of(trainer.args)
    checkpoint = open_on_all_ranks(directory, channel, trainer.args.flex_verify, trainer.args.flex_threads)
    checkpoint = replace(checkpoint, tied=trainer.args.flex_tied)
    roles = run_on_all(channel, "preparing the best model", lambda: state.model_roles(trainer.model))
    options = read_options(trainer.args)
    may_change = trainer.args.flex_allow_config_changes
    load_checkpoint(checkpoint, roles, describe(trainer.model), channel, options, may_change=may_change)
    if trainer.args.should_log:
        logger.info(f"The model now has the weights of its best checkpoint, {directory}.")


@when_active
def load_rng_state(trainer: Any, native: Native, checkpoint: str | None) -> None:
    """``Trainer._load_rng_state``: this rank's random generators, if the number of ranks has not changed."""
    if checkpoint is None:
        return
    args = trainer.args
    run = job_state_of(trainer)
    path = _meant(run, checkpoint) / documents.rng_name(dist.get_rank())
    restored = run.generators is not None and rng.restore(
        run.generators, str(path), args.world_size, args.use_hybrid_parallel, args.tensor_model_parallel_size > 1
    )
    if not restored and args.should_log and not run.told_of_generators:
        run.told_of_generators = True
        logger.warning(
            f"Random generators start anew: {checkpoint} has none for {count_text(args.world_size, 'rank')}. "
            "Dropout and other randomness differ from the run that was saved."
        )
