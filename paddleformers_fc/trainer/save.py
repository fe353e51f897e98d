"""Save, rotate and export: one save of a Trainer, and the replaced methods of PaddleFormers' Trainer that write.

:func:`prepare` runs on the training thread, at the step that is saved. :func:`report_save` runs there at once or some
steps later. Work that can fail on one rank alone runs inside an agreement helper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

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
    plan_save,
    write_and_commit,
)
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.staging_pool import TransferFigures, measured_transfers
from paddleformers_fc.formats.checkpoint import RUN_ARGUMENTS
from paddleformers_fc.layout.live import LiveRoles
from paddleformers_fc.layout.roles import EMA_STATE, MODEL_STATE
from paddleformers_fc.progress_display import shown_in_training
from paddleformers_fc.storage import state_json
from paddleformers_fc.storage.paths import require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import (
    base_fingerprint,
    documents,
    ema,
    lineage,
    live_roles,
    optimizers,
    position,
    reference,
    rng,
)
from paddleformers_fc.trainer.callback import CheckpointReport
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.events import check_own_loop
from paddleformers_fc.trainer.library import PREFIX_CHECKPOINT_DIR, ShardingOption, logger
from paddleformers_fc.trainer.lineage import degrees_text, parallel_degrees
from paddleformers_fc.trainer.options import shard_bytes
from paddleformers_fc.trainer.rotation import LOCAL_RETENTION, delete_superfluous, numbered, retention_of
from paddleformers_fc.trainer.session import Native, Session, session_of
from paddleformers_fc.trainer.tiers import Tier, keep

_T = TypeVar("_T")
Encode: TypeAlias = Callable[[], Mapping[str, bytes]]
"""Encodes the small files of a rank, by path relative to the checkpoint."""


@dataclass(frozen=True)
class PreparedSave:
    """A save at one step.

    Args:
        tier: where it is saved.
        directory: ``checkpoint-N``.
        step: optimizer steps done.
        part: returns this rank's part without its files, or raises the error of its preparation.
        consistency: facts that must be equal on all ranks.
        best: the best checkpoint with this one; None if there is none.
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
    """Return a save of the present step. It reads live tensors later; :func:`capture_files` reads everything else.

    Args:
        session: of the Trainer; its state names the best checkpoint, which this one may replace.
        metrics: those of an evaluation at this step.
        tier: where to save.

    Raises:
        FlexError: the same on every rank, at the first save of a run: its reference model cannot be compared.
    """
    timer = PhaseTimer()
    trainer, args = session.trainer, session.args
    live_roles.wait_for_weights(args)
    _look_at_reference(session)
    tier.begun = trainer.state.global_step
    directory = tier.directory(args) / f"{PREFIX_CHECKPOINT_DIR}-{tier.begun}"
    session.run.record = session.run.record or lineage.new_run()
    degrees = parallel_degrees(args)
    if args.should_log:
        logger.info(f"Saving step {trainer.state.global_step} ({degrees_text(degrees)}) to {directory}")
    session.position.catch_up(args, trainer.state)
    job = JobRecord(trainer.state.global_step, trainer.state.consumed_samples, degrees, session.run.record)
    model, replicas = describe_model(trainer.model), args.flex_check_replicas
    facts = comparable_facts(model, job, replicas)
    options = session.consistency(f"saving {directory.name}")

    def described() -> LivePart:
        base_fingerprint.check_defined(trainer.model)
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
    """Capture what this step has in the small files of this rank, after :func:`prepare`.

    Returns:
        a function that encodes the files, or raises the error of their capture.
    """
    captured = outcome(lambda: _capture_files(session))
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


def _roles(session: Session) -> LiveRoles:
    """Return the live tensors that a checkpoint contains."""
    trainer, average = session.trainer, {} if session.average is None else session.average.roles()
    if trainer.args.ignore_save_lr_and_optim:
        return {**live_roles.model_roles(trainer.model), **average}
    return {**live_roles.run_roles(trainer.model, trainer.optimizer), **average}


def plan_ahead(session: Session) -> tuple[LivePart, SavePlan]:
    """Plan the saves of a run before its first step. Every rank must call.

    Optimizer states that do not exist yet are described as the first step will create them. If it creates others, the
    first save is planned again.

    Returns:
        what this rank will bring into a save, and its plan.
    Raises:
        FlexError: the same on every rank.
    """
    trainer, args = session.trainer, session.args

    def expected() -> LivePart:
        optimizers.build_buffers(trainer.model_wrapped, trainer.optimizer)
        roles = live_roles.run_roles(trainer.model, trainer.optimizer, may_expect=True)
        average = {} if session.average is None else session.average.roles() or ema.expected_roles(roles)
        if args.ignore_save_lr_and_optim:
            roles = live_roles.model_roles(trainer.model)
        job = JobRecord(trainer.state.global_step, 0, {})
        return live_part({**roles, **average}, describe_model(trainer.model), {}, job, args.flex_check_replicas)

    return plan_save(expected, session.channel, session.consistency("planning saves"))


def report_save(
    session: Session,
    prepared: PreparedSave,
    report: SaveReport,
    transfers: TransferFigures,
    blocked: float | None = None,
) -> None:
    """Report a committed checkpoint to the run and its reporters.

    Args:
        session: of the Trainer.
        prepared: the save.
        report: its result.
        transfers: the copies between host and devices during it.
        blocked: seconds for which training was blocked; by default for all of the save.
    """
    seconds = prepared.timer.elapsed
    ties = tuple(line for tie in report.diverged_ties for line in tie.differences)
    _note_disks(session, prepared.tier, report.disks)
    prepared.tier.saved = prepared.directory
    for path in report.set_aside:
        logger.warning(f"{path} was moved from {prepared.directory} and is kept; delete it if it is not needed.")
    _warn_of_differences(session, prepared.directory, report.differences)
    if ties:
        session.warn(
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
    session.report_saved(saved)


def upload(session: Session, prepared: PreparedSave, report: SaveReport) -> None:
    """Upload a committed checkpoint in the background, before old ones are deleted; called on every rank."""
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
    """Delete old checkpoints.

    Args:
        session: of the Trainer. Checkpoints that are not uploaded yet stay.
        tier: where the checkpoints are.
        saved: the last checkpoint.
        best: the best checkpoint.
        disks: the processes that share a disk; None before the first save.
        channel: all ranks, used if several of them delete.
        output_dir: where they are instead of the tier's directory.
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
        delete_superfluous(directory, retention, saved, needed, logger.info, channel, leads)
    except StorageError as error:
        # The new checkpoint is saved, so the run continues.
        logger.warning(f"An old checkpoint could not be deleted; the next save tries again.\n{error.render()}")


def _look_at_reference(session: Session) -> None:
    """Before the first save, look at the reference model; every rank must call."""
    model = reference.model_of(session.trainer)
    if model is not None and session.reference is None:
        session.reference = reference.contents_of(model, session.channel)


def _warn_of_differences(session: Session, directory: Path, differences: tuple[str, ...]) -> None:
    """Warn once that replicas differ; the manifest of every checkpoint lists its own differences."""
    if differences:
        session.warn_once(
            "Replicas differ: ranks hold different values of the same part of a tensor. "
            f"{directory} has one version, and its flex_checkpoint.json lists the differences. This warning is not "
            "repeated. With flex_check_replicas: refuse such a save fails.",
            differences,
            subject="replicas",
        )


def _note_disks(session: Session, tier: Tier, disks: DiskLeaders) -> None:
    """Keep the disk leaders for the rotation; warn once that a checkpoint is on several disks."""
    known = tier.disks is not None and tier.disks.leads == disks.leads
    if len(disks.sorted_leaders) > 1 and not known:
        shared = "; ".join(format_ranks(ranks) for ranks in disks.sharing().values())
        session.warn(
            f"{tier.directory(session.args)} is on {len(disks.sorted_leaders)} disks, which are visible to: {shared}. "
            "Each disk gets a part of every checkpoint; a resume needs all parts, each visible to any rank.",
        )
    tier.disks = disks


def _capture_files(session: Session) -> Encode:
    """Capture what this step has in the small files of this rank, and return a function that encodes them.

    The first rank has those that are equal on all ranks.
    """
    trainer, args, tracker = session.trainer, session.args, session.position
    captured: dict[str, Callable[[], bytes]] = {}
    if args.save_rng_states:
        captured[documents.rng_name(dist.get_rank())] = rng.capture(args.world_size, args.use_hybrid_parallel)
    describing: Encode = dict
    if dist.get_rank() == 0:
        identity = position.digest(trainer.train_dataset, position.covered(tracker.position, tracker.order))
        order = replace(tracker.order, corpus=identity)
        data = position.to_document(tracker.position, position.pace_of(args), order)
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
    """Plan, capture, write and commit in a row, on the training thread, as :class:`.session.Saver`."""

    under_way, is_done = None, False

    def save(self, session: Session, metrics: dict[str, float] | None, tier: Tier) -> None:
        """Save the present step."""
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

    def advance(self, session: Session) -> None:
        """Do nothing: no save is under way after a step."""

    def report(self) -> None:
        """Do nothing: every save is reported at once."""

    def finish(self, session: Session) -> None:
        """Do nothing."""

    def draining(self, session: Session) -> AbstractContextManager[None]:
        """Return a context manager without effect."""
        return nullcontext()

    def defers_event(self, step: int) -> bool:
        """Return that ``on_save`` is called at once."""
        return False


# ---- The replaced methods.


def save(trainer: Any, native: Native, model: Any, metrics: dict[str, float] | None = None) -> None:
    """``Trainer._save_checkpoint``: write ``checkpoint-N``, then delete the checkpoints beyond the limit.

    Raises:
        FlexError: the same on every rank; the previous checkpoints are untouched.
    """
    session = session_of(trainer)
    with session.best.visible_in(trainer):
        session.saver.save(session, metrics, session.run.output)
    if session.uploads is not None:
        session.uploads.finish_outside_loop()


def log_save_evaluate(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> None:
    """``Trainer._maybe_log_save_evaluate``: afterwards save the local tier, if it is due and this step is not saved.

    Raises:
        FlexError: the same on every rank; the previous checkpoints are untouched.
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
    """``Trainer._sorted_checkpoints``: in the order of steps, which a copy of the files does not change."""
    found = numbered(Path(output_dir or trainer.args.output_dir), checkpoint_prefix)
    return [str(path) for path in found]


def rotate_checkpoints(trainer: Any, native: Native, use_mtime: bool = False, output_dir: str | None = None) -> None:
    """``Trainer._rotate_checkpoints``: delete old checkpoints on the lowest rank of every disk."""
    session = session_of(trainer)
    # A save of another class may call on the first rank only, so only the save of this package agrees between ranks.
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
    """``Trainer.save_model``: under sharding stage 3 without gathering the model, because slices are exported in place.

    Raises:
        FlexError: the same on every rank; an older export in the directory is untouched.
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
        FlexError: the same on every rank; an older export in the directory is untouched.
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
    """``model.save_pretrained`` of a Trainer's model. Every rank must call, as of the native method.

    Args:
        trainer: the Trainer that the model belongs to.
        native: the method of the model's class; called if a ``state_dict`` is given.
        save_dir: the directory to write.
        is_main_process: ignored, because the ranks share the work.
        state_dict: other weights than the model's.
        max_shard_size: maximum bytes of a file, such as ``"5GB"`` or a number. Default: ``flex_max_shard_size``.

    Raises:
        FlexError: the same on every rank; an older export in the directory is untouched.
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
        averages: returns this rank's moving averages, which are exported in place of the weights.

    Raises:
        FlexError: the same on every rank; an older export in the directory is untouched.
    """
    from paddleformers_fc.execute.live_export import save_weights  # Saves and loads need none of it.

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
        arguments = documents.arguments_document(trainer.args)
        tokenizer = documents.tokenizer_files(trainer)
        return roles, {**documents.capture_model_files(trainer, tokenizer)(), RUN_ARGUMENTS: arguments}

    roles, files = run_on_all(channel, "preparing an export", prepare, consistency)
    model, tied = describe_model(trainer.model), trainer.args.flex_tied
    weights, averaged = roles[MODEL_STATE], roles.get(EMA_STATE)
    report = save_weights(weights, model, files, directory, max_shard_bytes, channel, tied, averaged)
    if trainer.args.should_log:
        tensors, files_made = count_text(report.tensors, "tensor"), count_text(len(report.files), "file")
        logger.info(f"Exported {tensors} to {directory} in {files_made}.")
