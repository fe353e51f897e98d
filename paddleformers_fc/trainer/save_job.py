"""One save of a Trainer: its preparation, and its report once the checkpoint is committed.

:func:`prepare` runs on the training thread, at the step that is saved. :func:`report_save` runs there at once or some
steps later.

Saves during which training waits.

Stop a run whose training loop bypasses this package.

Two changes can bypass the replaced methods of a Trainer: a subclass that overrides one without ``super()``, or a
PaddleFormers that calls another method. The run would then save in PaddleFormers' own format, or continue without the
weights of the checkpoint that it resumes. Each replaced method therefore records its call
(:attr:`.job_state.JobState.ran`, :attr:`.job_state.JobState.saved`). The records are checked at the start of training,
in every save and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import paddle.distributed as dist

from paddleformers_fc.distributed.channel import ALONE, Channel, format_ranks, run_on_all
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.distributed.disk_leaders import DiskLeaders
from paddleformers_fc.errors import EnvironmentMismatch, OptionError, StorageError
from paddleformers_fc.execute.phases import PhaseTimer
from paddleformers_fc.execute.save import (
    JobRecord,
    LivePart,
    SaveReport,
    begin_save,
    capture,
    comparable_facts,
    live_part,
    plan_save,
    write_and_commit,
)
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.layout.live import LiveRoles
from paddleformers_fc.progress_display import shown_in_training
from paddleformers_fc.storage import state_json
from paddleformers_fc.trainer import (
    base_fingerprint,
    documents,
    ema,
    lineage,
    live_roles,
    optimizer_states,
    position,
    reference,
    rng,
)
from paddleformers_fc.trainer.callback import CheckpointReport
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.job_state import (
    JobState,
    channel_of,
    consistency_check_of,
    job_state_of,
    reporters,
    warn,
)
from paddleformers_fc.trainer.library import LOAD_METHOD, TrainerCallback, logger
from paddleformers_fc.trainer.library_models import PREFIX_CHECKPOINT_DIR
from paddleformers_fc.trainer.lineage import degrees_text, parallel_degrees
from paddleformers_fc.trainer.rotation import delete_superfluous, retention_of
from paddleformers_fc.trainer.uploads import Uploads


def refuse_other_loop(trainer: Any) -> None:
    """Refuse to train or save if the loop or the requested load is not the replaced method.

    Args:
        trainer: a Trainer that trains, or that saves without having trained.

    Raises:
        EnvironmentMismatch: with the methods that did not run.
    """
    job_state = job_state_of(trainer)
    expected = ("train", LOAD_METHOD, "_inner_training_loop")
    skipped = [name for name in expected if name not in job_state.ran]
    if job_state.chosen is None and LOAD_METHOD in skipped:
        skipped.remove(LOAD_METHOD)
    _refuse(trainer, "the start of training", skipped)


class BypassCheck(TrainerCallback):
    """Compares what the training loop has reached with the replaced methods that ran.

    Args:
        trainer: the Trainer whose callback it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop before the first step if the loop or the load was not ours.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        run_on_all(channel_of(args), "starting to train", lambda: refuse_other_loop(self._trainer))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after the first save that was not ours.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        if state is not self._trainer.state:
            return  # After a save beside training the event has the state of its step, also on a rank that ends alone.
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        skipped = [] if job_state_of(self._trainer).saved == directory else ["_save_checkpoint"]
        run_on_all(
            channel_of(args), f"looking at {directory.name}", lambda: _refuse(self._trainer, str(directory), skipped)
        )


def _refuse(trainer: Any, where: str, skipped: Sequence[str]) -> None:
    if not skipped:
        return
    raise EnvironmentMismatch(
        "flex_checkpoint is true, and the training loop did not go through this package.",
        where=where,
        evidence=[
            f"{name} of paddleformers_fc did not run; the Trainer's own is {_definition(trainer, name)}"
            for name in skipped
        ],
        next_step="Let the methods that a Trainer class overrides call super(). Delete checkpoints that such a run has "
        "written: they are in another format.",
    )


def _definition(trainer: Any, name: str) -> str:
    """Return the class that defines a method of the Trainer."""
    owner = next((one for one in type(trainer).__mro__ if name in vars(one)), type(trainer))
    return f"{owner.__module__}.{owner.__qualname__}.{name}"


_T = TypeVar("_T")
Encode: TypeAlias = Callable[[], Mapping[str, bytes]]
"""Encodes the small files of a rank, by path relative to the checkpoint."""


@dataclass(frozen=True)
class PreparedSave:
    """A save at one step.

    Args:
        directory: ``checkpoint-N``.
        step: optimizer steps done.
        part: returns this rank's part without its files, or raises the error of its preparation.
        consistency: facts that must be equal on all ranks.
        best: the best checkpoint with this one; None if there is none.
        timer: measures the save.
    """

    directory: Path
    step: int
    part: Callable[[], LivePart]
    consistency: ConsistencyCheck
    best: str | None
    timer: PhaseTimer


def prepare(trainer: Any, metrics: dict[str, float] | None) -> PreparedSave:
    """Return a save of the present step. It reads live tensors later; :func:`capture_files` reads everything else.

    Args:
        trainer: the Trainer; its state names the best checkpoint, which this one may replace.
        metrics: those of an evaluation at this step.

    Raises:
        FlexError: the same on every rank, at the first save of a run: its reference model cannot be compared.
    """
    timer = PhaseTimer()
    job_state, args = job_state_of(trainer), trainer.args
    live_roles.wait_for_weights(args)
    _look_at_reference(trainer, channel_of(args))
    directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    job_state.record = job_state.record or lineage.new_run()
    degrees = parallel_degrees(args)
    if args.should_log:
        logger.info(f"Saving step {trainer.state.global_step} ({degrees_text(degrees)}) to {directory}")
    job_state.tracker.catch_up(args, trainer.state)
    job = JobRecord(trainer.state.global_step, trainer.state.consumed_samples, degrees, job_state.record)
    model, replicas = describe_model(trainer.model), args.flex_check_replicas
    facts = comparable_facts(model, job, replicas)
    options = consistency_check_of(args, f"saving {directory.name}")

    def described() -> LivePart:
        base_fingerprint.refuse_undefined(trainer.model)
        if job_state.ran:
            refuse_other_loop(trainer)
        _update_best(trainer, metrics, directory)
        return live_part(_roles(trainer, job_state), model, {}, job, replicas)

    part = outcome(described)
    consistency = replace(options, facts={**options.facts, **facts})
    best = trainer.state.best_model_checkpoint
    return PreparedSave(directory, job.step, part, consistency, best, timer)


def capture_files(trainer: Any) -> Encode:
    """Capture what this step has in the small files of this rank, after :func:`prepare`.

    Returns:
        a function that encodes the files, or raises the error of their capture.
    """
    captured = outcome(lambda: _capture_files(trainer))
    return lambda: captured()()


def outcome(work: Callable[[], _T]) -> Callable[[], _T]:
    """Do work now, and return a function with its result or error."""
    try:
        result = work()
    except Exception as error:  # Raised by the caller of the outcome, which reports it to all ranks.
        failure = error

        def fail() -> _T:
            raise failure

        return fail
    return lambda: result


def _roles(trainer: Any, job_state: JobState) -> LiveRoles:
    """Return the live tensors that a checkpoint contains."""
    average = {} if job_state.average is None else job_state.average.roles()
    if trainer.args.ignore_save_lr_and_optim:
        return {**live_roles.model_roles(trainer.model), **average}
    return {**live_roles.run_roles(trainer.model, trainer.optimizer), **average}


def plan_ahead(trainer: Any) -> tuple[LivePart, SavePlan]:
    """Plan the saves of a run before its first step. Every rank must call.

    Optimizer states that do not exist yet are described as the first step will create them. If it creates others, the
    first save is planned again.

    Returns:
        what this rank will bring into a save, and its plan.
    Raises:
        FlexError: the same on every rank.
    """
    args, job_state = trainer.args, job_state_of(trainer)

    def expected() -> LivePart:
        optimizer_states.build_buffers(trainer.model_wrapped, trainer.optimizer)
        roles = live_roles.run_roles(trainer.model, trainer.optimizer, may_expect=True)
        average = {} if job_state.average is None else job_state.average.roles() or ema.expected_roles(roles)
        if args.ignore_save_lr_and_optim:
            roles = live_roles.model_roles(trainer.model)
        job = JobRecord(trainer.state.global_step, 0, {})
        return live_part({**roles, **average}, describe_model(trainer.model), {}, job, args.flex_check_replicas)

    return plan_save(expected, channel_of(args), consistency_check_of(args, "planning saves"))


def report_save(
    trainer: Any, prepared: PreparedSave, report: SaveReport, transfers: TransferFigures, blocked: float | None = None
) -> None:
    """Report a committed checkpoint to the run and its reporters.

    Args:
        trainer: the Trainer.
        prepared: the save.
        report: its result.
        transfers: the copies between host and devices during it.
        blocked: seconds for which training was blocked; by default for all of the save.
    """
    job_state, args, seconds = job_state_of(trainer), trainer.args, prepared.timer.elapsed
    ties = tuple(line for tie in report.diverged_ties for line in tie.differences)
    _note_disks(job_state, report.disks, args)
    job_state.saved = prepared.directory
    for path in report.set_aside:
        logger.warning(f"{path} was moved from {prepared.directory} and is kept; delete it if it is not needed.")
    _warn_of_differences(job_state, args, prepared.directory, report.differences)
    if ties:
        warn(
            args,
            f"Copies of tied tensors differ between pipeline stages. {prepared.directory} is saved and does not count "
            "as whole: resume_from_checkpoint: true skips it, and save_total_limit deletes no whole checkpoint for it. "
            "Resume from an older checkpoint and look for the cause.",
            ties,
        )
    saved = CheckpointReport(
        prepared.step,
        prepared.directory,
        seconds,
        report.size,
        report.differences,
        diverged_ties=ties,
        transfers=transfers,
        blocked=seconds if blocked is None else blocked,
        phases=report.phases,
    )
    for reporter in reporters(trainer):
        reporter.on_checkpoint_saved(args, saved)


def upload(trainer: Any, prepared: PreparedSave, report: SaveReport) -> None:
    """Upload a committed checkpoint beside training, before old ones are deleted; called on every rank."""
    uploads = job_state_of(trainer).uploads
    if uploads is not None:
        uploads.committed(prepared.directory, prepared.best, report.disks)


def rotate(
    args: Any,
    saved: Path | None,
    best: str | None,
    disks: DiskLeaders | None,
    channel: Channel,
    output_dir: str,
    uploads: Uploads | None,
) -> None:
    """Delete old checkpoints.

    Args:
        args: the training arguments.
        saved: the last checkpoint.
        best: the best checkpoint.
        disks: the processes that share a disk; None before the first save.
        channel: all ranks, used if several of them delete.
        output_dir: where the checkpoints are.
        uploads: those that are not uploaded yet stay.
    """
    leads = disks.sorted_leaders if disks is not None else (0,)
    if len(leads) == 1:
        channel = ALONE
    if channel is ALONE and dist.get_rank() != 0:
        return
    try:
        needed = [*([] if best is None else [Path(best)]), *([] if uploads is None else uploads.pending())]
        delete_superfluous(Path(output_dir), retention_of(args), saved, needed, logger.info, channel, leads)
    except StorageError as error:
        # The new checkpoint is saved, so the run continues.
        logger.warning(f"An old checkpoint could not be deleted; the next save tries again.\n{error.render()}")


def _look_at_reference(trainer: Any, channel: Channel) -> None:
    """Before the first save, look at the reference model; every rank must call."""
    model, job_state = reference.model_of(trainer), job_state_of(trainer)
    if model is not None and job_state.reference is None:
        job_state.reference = reference.contents_of(model, channel)


def _warn_of_differences(job_state: JobState, args: Any, directory: Path, differences: tuple[str, ...]) -> None:
    """Warn once that replicas differ; the manifest of every checkpoint lists its own differences."""
    if differences and not job_state.differences_logged:
        job_state.differences_logged = True
        warn(
            args,
            "Replicas differ: ranks hold different values of the same part of a tensor. "
            f"{directory} has one version, and its flex_checkpoint.json lists the differences. This warning is not "
            "repeated. With flex_check_replicas: refuse such a save fails.",
            differences,
        )


def _note_disks(job_state: JobState, disks: DiskLeaders, args: Any) -> None:
    """Keep the disk leaders for the rotation; warn once that a checkpoint is on several disks."""
    known = job_state.disks is not None and job_state.disks.leads == disks.leads
    if len(disks.sorted_leaders) > 1 and not known:
        shared = "; ".join(format_ranks(ranks) for ranks in disks.sharing().values())
        warn(
            args,
            f"{args.output_dir} is on {len(disks.sorted_leaders)} disks, which are visible to: {shared}. "
            "Each disk gets a part of every checkpoint; a resume needs all parts, each visible to any rank.",
        )
    job_state.disks = disks


def _capture_files(trainer: Any) -> Encode:
    """Capture what this step has in the small files of this rank, and return a function that encodes them.

    The first rank has those that are equal on all ranks.
    """
    job_state, args = job_state_of(trainer), trainer.args
    tracker = job_state.tracker
    captured: dict[str, Callable[[], bytes]] = {}
    if args.save_rng_states:
        captured[documents.rng_name(dist.get_rank())] = rng.capture(args.world_size, args.use_hybrid_parallel)
    describing: Encode = dict
    if dist.get_rank() == 0:
        identity = position.digest(trainer.train_dataset, position.covered(tracker.position, tracker.order))
        order = replace(tracker.order, corpus=identity)
        data = position.to_document(tracker.position, position.pace_of(args), order)
        captured |= documents.capture_progress(trainer, data)
        if job_state.reference is not None:
            about = {"contents": dict(job_state.reference)}
            captured[documents.REFERENCE] = partial(state_json.encode, about, "reference model")
        if job_state.average is not None and job_state.average.has_begun:
            captured[documents.AVERAGE] = partial(state_json.encode, job_state.average.document(), "moving average")
        captured[documents.ARGUMENTS] = documents.capture_arguments(args, trainer.optimizer)
        describing = documents.capture_model_files(trainer, job_state.tokenizer_files.of(trainer))
    return lambda: {**describing(), **{name: encode() for name, encode in captured.items()}}


def _update_best(trainer: Any, metrics: dict[str, float] | None, directory: Path) -> None:
    """Set the best checkpoint as PaddleFormers does. A metric that is NaN, than which none is better, gives way.

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
            f"Missing metric {name}: the best checkpoint is chosen by it.",
            where=f"metric_for_best_model: {named}",
            evidence=[f"the evaluation has {', '.join(sorted(metrics))}"],
            next_step="Name one of these in metric_for_best_model; of several evaluation sets the last one counts.",
        )
    value = metrics[name]
    better = np.greater if args.greater_is_better else np.less
    first = state.best_metric is None or state.best_model_checkpoint is None
    if first or np.isnan(state.best_metric) or better(value, state.best_metric):
        state.best_metric = float(value)
        state.best_model_checkpoint = str(directory)


class SyncSaves:
    """Plan, capture, write and commit in a row, on the training thread."""

    def save(self, trainer: Any, metrics: dict[str, float] | None) -> None:
        """Save the present step, as :class:`.job_state.Saver`."""
        args, channel = trainer.args, channel_of(trainer.args)
        trainer.runtime_timer.start("checkpoint saving time")
        prepared = prepare(trainer, metrics)
        encode = capture_files(trainer)
        part = outcome(lambda: replace(prepared.part(), files=encode()))
        with measured_transfers() as transfers:
            planned = begin_save(part, prepared.directory, channel, prepared.consistency, prepared.timer)
            with shown_in_training(f"saving {prepared.directory.name}", args.should_log):
                report = write_and_commit(planned, capture(planned.part), channel)
        trainer.runtime_timer.stop()
        upload(trainer, prepared, report)
        report_save(trainer, prepared, report, transfers)
        trainer._rotate_checkpoints(output_dir=args.output_dir)

    def followed(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a block in which the training loop runs; nothing is left to be done at its end."""
        return nullcontext()
