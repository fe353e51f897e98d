"""Save, rotate and export: the methods of PaddleFormers' Trainer that write, as this package replaces them.

:func:`prepare` and :func:`report_save` run on the training thread: the first at the step to save, the second at once
or, after an asynchronous save (:mod:`.async_save`), some steps later. Work that can fail on a single rank runs inside a
collective that raises its error on all ranks.

Memory: a blocking save copies no tensors; :mod:`paddleformers_fc.execute.save` bounds its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import paddle.distributed as dist
from msgspec import structs

from paddleformers_fc.distributed.channel import ALONE, Channel, format_ranks, run_on_all
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.errors import OptionError, StorageError
from paddleformers_fc.execute.commit_coordinator import DiskLeaders
from paddleformers_fc.execute.phases import PhaseTimer
from paddleformers_fc.execute.save import (
    JobRecord,
    LivePart,
    SaveReport,
    begin_save,
    capture,
    comparable_facts,
    live_part,
    write_and_commit,
)
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.formats.checkpoint import RUN_ARGUMENTS
from paddleformers_fc.layout.live import LiveRoles
from paddleformers_fc.layout.roles import EMA_STATE, MODEL_STATE
from paddleformers_fc.progress_display import shown_in_training
from paddleformers_fc.storage import state_json
from paddleformers_fc.storage.paths import require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import (
    batches,
    documents,
    live_roles,
    position,
    reference,
    rng,
    weight_sources,
)
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library import PREFIX_CHECKPOINT_DIR, ShardingOption, logger
from paddleformers_fc.trainer.options import shard_bytes
from paddleformers_fc.trainer.resume import degrees_text, new_run, parallel_degrees
from paddleformers_fc.trainer.session import CheckpointReport, Native, Session, check_own_loop, session_of
from paddleformers_fc.trainer.tiers import LOCAL_RETENTION, Tier, delete_over_limit, keep, numbered, retention_of

_T = TypeVar("_T")
Encode: TypeAlias = Callable[[], Mapping[str, bytes]]
"""Encodes the metadata files of a rank, by path relative to the checkpoint."""


@dataclass(frozen=True)
class PreparedSave:
    """A prepared save of one step.

    Args:
        tier: where to save.
        directory: ``checkpoint-N``.
        step: completed optimizer steps.
        part: returns this rank's part without its files, or raises the error of its preparation.
        consistency: facts that must be equal on all ranks.
        best: the best checkpoint so far, including this one; None if there is none.
        timer: measures the save.
    """

    tier: Tier
    directory: Path
    step: int
    part: Callable[[], LivePart]
    consistency: ConsistencyCheck
    best: str | None
    timer: PhaseTimer


def prepare(session: Session, metrics: dict[str, float] | None, tier: Tier) -> PreparedSave:
    """Prepare a save of the current step. Live tensors are read later, everything else by :func:`capture_files`.

    Args:
        session: the session; the Trainer's state names the best checkpoint, which this one may replace.
        metrics: metrics of an evaluation at this step.
        tier: where to save.

    Raises:
        FlexError: the same on every rank, at the first save of a run: reading the reference model has failed.
    """
    timer = PhaseTimer()
    trainer, args = session.trainer, session.args
    live_roles.wait_for_weights(args)
    _record_reference(session)
    tier.begun = trainer.state.global_step
    directory = tier.directory(args) / f"{PREFIX_CHECKPOINT_DIR}-{tier.begun}"
    session.run.record = session.run.record or new_run()
    degrees = parallel_degrees(args)
    if args.should_log:
        logger.info(f"Saving step {trainer.state.global_step} ({degrees_text(degrees)}) to {directory}")
    session.position.catch_up(args, trainer.state)
    job = JobRecord(trainer.state.global_step, trainer.state.consumed_samples, degrees, session.run.record)
    model, replicas = describe_model(trainer.model), args.flex_check_replicas
    facts = comparable_facts(model, job, replicas)
    options = session.consistency(f"saving {directory.name}")

    def described() -> LivePart:
        weight_sources.check_defined(trainer.model)
        weight_sources.check_base(trainer.model)
        if session.run.ran:
            check_own_loop(session)
        if tier.is_local:
            keep(tier.directory(args), Path(args.output_dir), tier.id)
        _update_best(trainer, metrics, directory)
        return live_part(_roles(session), model, {}, job, replicas)

    part = outcome(described)
    consistency = structs.replace(options, facts={**options.facts, **facts})
    best = trainer.state.best_model_checkpoint
    return PreparedSave(tier, directory, job.step, part, consistency, best, timer)


def capture_files(session: Session) -> Encode:
    """Capture the contents of this rank's metadata files at this step, after :func:`prepare`.

    Returns:
        a function that encodes the files, or raises the error of the capture.
    """
    captured = outcome(lambda: _capture_files(session))
    return lambda: captured()()


def outcome(work: Callable[[], _T]) -> Callable[[], _T]:
    """Run work now, and return a function that returns its result or raises its error."""
    try:
        result = work()
    except Exception as error:  # Raised later, where all ranks learn of it.
        return partial(raise_error, error)
    return lambda: result


def _roles(session: Session) -> LiveRoles:
    """Return the live tensors that a checkpoint contains."""
    trainer, average = session.trainer, {} if session.average is None else session.average.roles()
    if trainer.args.ignore_save_lr_and_optim:
        return {**live_roles.model_roles(trainer.model), **average}
    return {**live_roles.LiveModel(trainer.model, trainer.optimizer).roles(), **average}


def report_save(
    session: Session,
    prepared: PreparedSave,
    report: SaveReport,
    transfers: TransferFigures,
    blocked: float | None = None,
) -> None:
    """Report a committed checkpoint to the run and its reporters.

    Args:
        session: the session of the Trainer.
        prepared: the save.
        report: the result of the save.
        transfers: the copies between host and devices during it.
        blocked: seconds for which training was blocked; by default the duration of the save.
    """
    seconds = prepared.timer.elapsed
    ties = tuple(line for tie in report.diverged_ties for line in tie.differences)
    _note_disks(session, prepared.tier, report.disks)
    prepared.tier.saved = prepared.directory
    for path in report.set_aside:
        logger.warning(f"Other files in {prepared.directory} were moved to {path}; delete it if you do not need it.")
    _warn_of_differences(session, prepared.directory, report.differences)
    if ties:
        session.warn(
            f"Copies of tied tensors differ between pipeline stages. {prepared.directory} is saved, but does not count "
            "as complete: resume_from_checkpoint: true skips it, and save_total_limit deletes no complete checkpoint "
            "for it. Resume from an older checkpoint and look for the cause.",
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
    session.report_saved(saved)


def upload(session: Session, prepared: PreparedSave, report: SaveReport) -> None:
    """Begin to upload a committed checkpoint. Every rank must call, before old checkpoints are deleted."""
    if session.uploads is not None and not prepared.tier.is_local:
        session.uploads.committed(prepared.directory, prepared.best, report.disks)


def rotate(
    session: Session,
    tier: Tier,
    saved: Path | None,
    best: str | None,
    disks: DiskLeaders | None,
    channel: Channel,
    output_dir: str | None = None,
) -> None:
    """Delete old checkpoints. Checkpoints that are not uploaded yet stay.

    Args:
        session: the session of the Trainer.
        tier: where the checkpoints are.
        saved: the last checkpoint.
        best: the best checkpoint.
        disks: the processes that share a disk; None before the first save.
        channel: all ranks, used if several of them delete.
        output_dir: the directory of the checkpoints, if it is not the tier's.
    """
    args, uploads = session.args, session.uploads
    leads = disks.sorted_leaders if disks is not None else (0,)
    if len(leads) == 1:
        channel = ALONE
    if channel is ALONE and dist.get_rank() != 0:
        return
    try:
        needed = [*([] if best is None else [Path(best)]), *([] if uploads is None else uploads.pending())]
        directory = Path(output_dir or tier.directory(args))
        retention = LOCAL_RETENTION if tier.is_local else retention_of(args)
        delete_over_limit(directory, retention, saved, needed, logger.info, channel, leads)
    except StorageError as error:
        # Continue: the new checkpoint is saved.
        logger.warning(f"An old checkpoint could not be deleted; the next save tries again.\n{error.render()}")


def _record_reference(session: Session) -> None:
    """Sum the contents of the reference model before the first save. Every rank must call."""
    model = reference.reference_of(session.trainer)
    if model is not None and session.reference is None:
        session.reference = reference.contents_of(model, session.channel)


def _warn_of_differences(session: Session, directory: Path, differences: tuple[str, ...]) -> None:
    """Warn once that replicas differ; the manifest of every checkpoint lists its own differences."""
    if differences:
        session.warn_once(
            "Replicas differ: ranks hold different values of the same part of a tensor. "
            f"{directory} contains one version, and its flex_checkpoint.json lists the differences. This warning is "
            "not repeated. To let such a save fail, set flex_check_replicas: refuse.",
            differences,
            subject="replicas",
        )


def _note_disks(session: Session, tier: Tier, disks: DiskLeaders) -> None:
    """Store the disk leaders for the rotation; warn once if a checkpoint is on several disks."""
    known = tier.disks is not None and tier.disks.leads == disks.leads
    if len(disks.sorted_leaders) > 1 and not known:
        shared = "; ".join(format_ranks(ranks) for ranks in disks.sharing().values())
        session.warn(
            f"{tier.directory(session.args)} is on {len(disks.sorted_leaders)} disks, which are visible to: {shared}. "
            "Each disk gets a part of every checkpoint. A resume needs all parts, each visible to some rank.",
        )
    tier.disks = disks


def _capture_files(session: Session) -> Encode:
    """Capture the contents of this rank's metadata files; the first rank writes those that are equal on all ranks."""
    trainer, args, tracker = session.trainer, session.args, session.position
    captured: dict[str, Callable[[], bytes]] = {}
    if args.save_rng_states:
        captured[documents.rng_name(dist.get_rank())] = rng.capture_generators(
            args.world_size, args.use_hybrid_parallel
        )
    describing: Encode = dict
    if dist.get_rank() == 0:
        identity = batches.digest(trainer.train_dataset, position.covered(tracker.position, tracker.order))
        order = replace(tracker.order, corpus=identity)
        data = position.to_document(tracker.position, position.batch_sizes_of(args), order)
        captured |= documents.capture_progress(trainer, data)
        if session.reference is not None:
            about = {"contents": dict(session.reference)}
            captured[documents.REFERENCE] = partial(state_json.encode, about, "reference model")
        if session.average is not None and session.average.has_begun:
            captured[documents.AVERAGE] = partial(state_json.encode, session.average.document(), "moving average")
        captured[documents.ARGUMENTS] = documents.capture_arguments(args, trainer.optimizer)
        describing = documents.capture_model_files(trainer, session.tokenizer_files.of(trainer))
    return lambda: {**describing(), **{name: encode() for name, encode in captured.items()}}


def _update_best(trainer: Any, metrics: dict[str, float] | None, directory: Path) -> None:
    """Set the best checkpoint as PaddleFormers does, except that NaN never counts as best.

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


def save_now(session: Session, metrics: dict[str, float] | None, tier: Tier) -> None:
    """Save the current step on the training thread: plan, capture, write and commit. Every rank must call.

    Args:
        session: the session; the Trainer's state names the best checkpoint.
        metrics: metrics of an evaluation at this step.
        tier: where to save.

    Raises:
        FlexError: the same on every rank; previous checkpoints are unchanged.
    """
    trainer, args, channel = session.trainer, session.args, session.channel
    trainer.runtime_timer.start("checkpoint saving time")
    prepared = prepare(session, metrics, tier)
    encode = capture_files(session)
    part = outcome(lambda: structs.replace(prepared.part(), files=encode()))
    with measured_transfers() as transfers:
        planned = begin_save(part, prepared.directory, channel, prepared.consistency, prepared.timer)
        with shown_in_training(f"saving {prepared.directory.name}", args.should_log):
            report = write_and_commit(planned, capture(planned.part), channel)
    trainer.runtime_timer.stop()
    upload(session, prepared, report)
    report_save(session, prepared, report, transfers)
    if tier.is_local:
        rotate(session, tier, tier.saved, None, tier.disks, channel)
    else:
        trainer._rotate_checkpoints(output_dir=args.output_dir)


# ---- The replaced methods.


def save(trainer: Any, native: Native, model: Any, metrics: dict[str, float] | None = None) -> None:
    """``Trainer._save_checkpoint``: write ``checkpoint-N``, then delete checkpoints over the limit.

    Raises:
        FlexError: the same on every rank; previous checkpoints are unchanged.
    """
    session = session_of(trainer)
    with session.best.visible_in(trainer):
        session.saver.save(session, metrics, session.run.output)
    if session.uploads is not None:
        session.uploads.finish_outside_loop()


def log_save_evaluate(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> None:
    """``Trainer._maybe_log_save_evaluate``: then save to the local tier, if that is due and the step is not saved yet.

    Raises:
        FlexError: the same on every rank; previous checkpoints are unchanged.
    """
    native(*args, **kwargs)
    session, step = session_of(trainer), trainer.state.global_step
    run, local = session.run, session.run.local
    run.ran.add("_maybe_log_save_evaluate")
    if local is None or step % session.args.flex_local_steps or step in (run.begun, run.output.begun, local.begun):
        return
    with session.best.visible_in(trainer):
        session.saver.save(session, None, local)


def sorted_checkpoints(
    trainer: Any,
    native: Native,
    output_dir: str | None = None,
    checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR,
    use_mtime: bool = False,
) -> list[str]:
    """``Trainer._sorted_checkpoints``: sort by step, because copying files changes their times."""
    found = numbered(Path(output_dir or trainer.args.output_dir), checkpoint_prefix)
    return [str(path) for path in found]


def rotate_checkpoints(trainer: Any, native: Native, use_mtime: bool = False, output_dir: str | None = None) -> None:
    """``Trainer._rotate_checkpoints``: delete old checkpoints on the lowest rank of every disk."""
    session = session_of(trainer)
    # Other callers may call this on the first rank only, so communicate only right after a save of this package.
    output = session.run.output
    saved_here = output.saved is not None and output.saved.name.endswith(f"-{trainer.state.global_step}")
    with session.best.visible_in(trainer):
        best = trainer.state.best_model_checkpoint
    channel = session.channel if saved_here else ALONE
    rotate(session, output, output.saved, best, output.disks, channel, output_dir)


def save_model_of_slices(
    trainer: Any,
    native: Native,
    output_dir: str | None = None,
    merge_tensor_parallel: bool = False,
    last_fc_to_hf: bool = False,
) -> None:
    """``Trainer.save_model``: under sharding stage 3 do not gather the model, because slices are exported in place.

    Raises:
        FlexError: the same on every rank; an older export in the directory is unchanged.
    """
    save = trainer._save if ShardingOption.FULL_SHARD in trainer.args.sharding else native
    save(output_dir, merge_tensor_parallel=merge_tensor_parallel, last_fc_to_hf=last_fc_to_hf)


def save_model(
    trainer: Any,
    native: Native,
    output_dir: str | None = None,
    state_dict: Any = None,
    merge_tensor_parallel: bool = False,
    last_fc_to_hf: bool = False,
) -> None:
    """``Trainer._save``: export the model in Hugging Face format, with all files that ``from_pretrained`` needs.

    Raises:
        FlexError: the same on every rank; an older export in the directory is unchanged.
    """
    export_live(trainer, output_dir or trainer.args.output_dir, trainer.args.flex_max_shard_size)


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
    """``model.save_pretrained`` of a Trainer's model. Like the native method, every rank must call.

    Args:
        trainer: the Trainer that the model belongs to.
        native: the method of the model's class; called if a ``state_dict`` is given.
        save_dir: the directory to write.
        is_main_process: ignored, because the ranks share the work.
        state_dict: weights to save instead of the model's.
        max_shard_size: maximum bytes of a file, such as ``"5GB"`` or a number. Default: ``flex_max_shard_size``.

    Raises:
        FlexError: the same on every rank; an older export in the directory is unchanged.
    """
    if state_dict is not None:
        native(save_dir, is_main_process, state_dict, *args, **kwargs)
        return
    export_live(trainer, save_dir, trainer.args.flex_max_shard_size if max_shard_size is None else max_shard_size)


def export_live(
    trainer: Any,
    output_dir: str,
    max_shard_size: str | int,
    averages: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Export the weights of a Trainer's model. Every rank must call.

    Args:
        trainer: the Trainer that the model belongs to.
        output_dir: the directory to write.
        max_shard_size: maximum bytes of a file.
        averages: returns this rank's moving averages, which are exported instead of the weights.

    Raises:
        FlexError: the same on every rank; an older export in the directory is unchanged.
    """
    from paddleformers_fc.execute.live_export import save_weights  # Not needed by saves and loads.

    session, directory = session_of(trainer), require_local(output_dir, "An export")
    channel, max_shard_bytes = session.channel, shard_bytes(max_shard_size)
    consistency = session.consistency(f"exporting to {directory.name}")

    live_roles.wait_for_weights(trainer.args)

    def prepare() -> tuple[LiveRoles, dict[str, bytes]]:
        roles = live_roles.model_roles(trainer.model)
        if averages is not None:
            roles[EMA_STATE] = averages()
        if channel.rank != 0:
            return roles, {}
        arguments = documents.capture_arguments(trainer.args)()
        tokenizer = documents.tokenizer_files(trainer)
        return roles, {**documents.capture_model_files(trainer, tokenizer)(), RUN_ARGUMENTS: arguments}

    roles, files = run_on_all(channel, "preparing an export", prepare, consistency)
    model, tied = describe_model(trainer.model), trainer.args.flex_tied
    weights, averaged = roles[MODEL_STATE], roles.get(EMA_STATE)
    report = save_weights(weights, model, files, directory, max_shard_bytes, channel, tied, averaged)
    if trainer.args.should_log:
        tensors, written = count_text(report.tensors, "tensor"), count_text(len(report.files), "file")
        logger.info(f"Exported {tensors} to {directory} in {written}.")


def raise_error(error: Exception) -> NoReturn:
    raise error
