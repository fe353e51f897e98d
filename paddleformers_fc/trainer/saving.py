"""Saving, rotation and export, as PaddleFormers' Trainer does them when ``flex_checkpoint`` is true.

One function per method that changes. Whatever may fail on one rank alone runs inside an agreement of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle.distributed as dist
from paddleformers.trainer.trainer_utils import ShardingOption
from paddleformers.utils.env import PREFIX_CHECKPOINT_DIR
from paddleformers.utils.log import logger

from paddleformers_fc.distributed.channel import ALONE, Channel, run_on_all
from paddleformers_fc.distributed.disk_leaders import DiskLeaders
from paddleformers_fc.distributed.rank_format import format_ranks
from paddleformers_fc.errors import OptionError, StorageError
from paddleformers_fc.execute.export import RUN_ARGUMENTS, save_weights
from paddleformers_fc.execute.save import JobRecord, save_checkpoint
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.manifest import Manifest
from paddleformers_fc.storage.paths import require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import documents, lineage, position, rng, rotation, state
from paddleformers_fc.trainer.bypass import refuse_other_loop
from paddleformers_fc.trainer.callback import CheckpointReport
from paddleformers_fc.trainer.description import describe
from paddleformers_fc.trainer.job_state import (
    JobState,
    Native,
    channel_of,
    consistency_check_of,
    job_state_of,
    reporters,
    when_active,
)
from paddleformers_fc.trainer.options import parse_size


@when_active
def save(trainer: Any, native: Native, model: Any, metrics: dict[str, float] | None = None) -> None:
    """``Trainer._save_checkpoint``: write ``checkpoint-N`` as a whole, then delete what is beyond the limit.

    Raises:
        FlexError: the same on every rank; the previous checkpoints are untouched.
    """
    with job_state_of(trainer).best.shown_in(trainer):
        _save(trainer, metrics)


def _save(trainer: Any, metrics: dict[str, float] | None) -> None:
    started = time.monotonic()
    args, channel = trainer.args, channel_of(trainer.args)
    trainer.runtime_timer.start("checkpoint saving time")
    directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    consistency = consistency_check_of(args, f"saving {directory.name}")

    def prepare() -> tuple[state.LiveRoles, dict[str, bytes]]:
        if job_state_of(trainer).ran:
            refuse_other_loop(trainer)
        _note_best(trainer, metrics, directory)
        return _roles_to_save(trainer), _files(trainer, channel)

    roles, files = run_on_all(channel, "preparing a checkpoint", prepare, consistency)
    run = job_state_of(trainer)
    run.record = run.record or lineage.new_run()
    job = JobRecord(trainer.state.global_step, trainer.state.consumed_samples, parallel_degrees(args), run.record)
    bound = parse_size(args.flex_max_file_size)
    model, checked = describe(trainer.model), args.flex_check_replicas
    report = save_checkpoint(directory, roles, model, files, job, channel, bound, checked)
    _note_saved(job_state_of(trainer), directory, report.disks, args)
    for path in report.set_aside:
        logger.warning(f"{path} was in the way of {directory} and is kept; delete it if it is not needed.")
    _tell_of_differences(trainer, directory, report.differences)
    if report.diverged_ties and args.should_log:
        lines = "".join(f"\n  - {line}" for tie in report.diverged_ties for line in tie.differences)
        logger.warning(
            f"Copies of tied tensors differ between pipeline stages. {directory} is saved and does not count as "
            "whole: resume_from_checkpoint: true skips it, and save_total_limit deletes no whole checkpoint for it. "
            f"Resume from an older checkpoint and look for the cause.{lines}"
        )
    trainer.runtime_timer.stop()
    seconds = time.monotonic() - started
    ties = tuple(line for tie in report.diverged_ties for line in tie.differences)
    saved = CheckpointReport(
        job.step, directory, seconds, _total_bytes(report.manifest), report.differences, diverged_ties=ties
    )
    for reporter in reporters(trainer):
        reporter.on_checkpoint_saved(args, saved)
    trainer._rotate_checkpoints(output_dir=args.output_dir)


def _tell_of_differences(trainer: Any, directory: Path, differences: tuple[str, ...]) -> None:
    """Say once in a run that its ranks have gone apart; every checkpoint says it of itself."""
    run = job_state_of(trainer)
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


def _note_saved(run: JobState, directory: Path, disks: DiskLeaders, args: Any) -> None:
    """Remember what rotation must know; say once that a checkpoint lies on several disks."""
    known = run.disks is not None and run.disks.leads == disks.leads
    if len(disks.sorted_leaders) > 1 and not known and args.should_log:
        shared = "; ".join(format_ranks(ranks) for ranks in disks.sharing().values())
        logger.warning(
            f"{args.output_dir} lies on {len(disks.sorted_leaders)} disks, which are seen by: {shared}. "
            "Each gets a part of every checkpoint; to resume, all parts must be seen, each by any rank."
        )
    run.saved, run.disks = directory, disks


def _roles_to_save(trainer: Any) -> state.LiveRoles:
    if trainer.args.ignore_save_lr_and_optim:
        return state.model_roles(trainer.model)
    return state.run_roles(trainer.model, trainer.optimizer)


def _files(trainer: Any, channel: Channel) -> dict[str, bytes]:
    """This rank's small files; those that are the same on every rank are written by the first."""
    args, tracker = trainer.args, job_state_of(trainer).tracker
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


def degrees_text(degrees: Mapping[str, int]) -> str:
    """Return parallel degrees above one as text, such as ``tp=2 pp=2``; of a single rank ``dp=1``."""
    return " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1) or "dp=1"


@when_active
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


@when_active
def rotate_checkpoints(trainer: Any, native: Native, use_mtime: bool = False, output_dir: str | None = None) -> None:
    """``Trainer._rotate_checkpoints``: on the first rank of every disk, and never the newest whole one."""
    args, run = trainer.args, job_state_of(trainer)
    leads = run.disks.sorted_leaders if run.disks is not None else (0,)
    channel = channel_of(args) if len(leads) > 1 else ALONE
    if channel is ALONE and dist.get_rank() != 0:
        return
    with run.best.shown_in(trainer):
        best = trainer.state.best_model_checkpoint
    limit = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
    try:
        needed = [path for path in (run.saved, None if best is None else Path(best)) if path is not None]
        level, threads, directory = args.flex_verify, args.flex_threads, Path(output_dir or args.output_dir)
        rotation.rotate(directory, limit, needed, logger.info, level, threads, channel, leads)
    except StorageError as error:
        # The checkpoint is saved; that an old one resists is no reason to end the run.
        logger.warning(f"An old checkpoint could not be deleted; the next save tries again.\n{error.render()}")


@when_active
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


@when_active
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
        trainer,
        require_local(output_dir or trainer.args.output_dir, "An export"),
        parse_size(trainer.args.flex_max_shard_size),
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
    _export(trainer, require_local(save_dir, "An export"), parse_size(asked) if isinstance(asked, str) else int(asked))


def _export(trainer: Any, directory: Path, max_shard_bytes: int) -> None:
    channel = channel_of(trainer.args)
    consistency = consistency_check_of(trainer.args, f"exporting to {directory.name}")

    def prepare() -> tuple[state.LiveRoles, dict[str, bytes]]:
        roles = state.model_roles(trainer.model)
        if channel.rank != 0:
            return roles, {}
        arguments = documents.arguments_document(trainer.args)
        return roles, {**documents.model_files(trainer), RUN_ARGUMENTS: arguments}

    roles, files = run_on_all(channel, "preparing an export", prepare, consistency)
    model, tied = describe(trainer.model), trainer.args.flex_tied
    report = save_weights(roles[MODEL_STATE], model, files, directory, max_shard_bytes, channel, tied)
    if trainer.args.should_log:
        tensors, files_made = count_text(report.tensors, "tensor"), count_text(len(report.files), "file")
        logger.info(f"Exported {tensors} to {directory} in {files_made}.")


def _total_bytes(manifest: Manifest) -> int:
    return sum(checksum.size for checksum in manifest.files)
