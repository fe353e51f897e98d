"""Save, rotate and export: the methods of PaddleFormers' Trainer that write, one function each.

Whatever can fail on one rank alone runs inside an agreement helper.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle.distributed as dist

from paddleformers_fc.distributed.channel import ALONE, Channel, run_on_all
from paddleformers_fc.distributed.disk_leaders import DiskLeaders
from paddleformers_fc.distributed.rank_format import format_ranks
from paddleformers_fc.errors import OptionError, StorageError
from paddleformers_fc.execute.export import save_weights
from paddleformers_fc.execute.save import JobRecord, save_checkpoint
from paddleformers_fc.execute.staging_pool import measured_transfers
from paddleformers_fc.formats.huggingface import RUN_ARGUMENTS
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.paths import require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import (
    codecs,
    corpus,
    documents,
    lineage,
    position,
    reference,
    rng,
    rotation,
    state,
    undefined,
)
from paddleformers_fc.trainer.bypass import refuse_other_loop
from paddleformers_fc.trainer.callback import CheckpointReport
from paddleformers_fc.trainer.description import describe
from paddleformers_fc.trainer.host import logger
from paddleformers_fc.trainer.host_models import PREFIX_CHECKPOINT_DIR, ShardingOption
from paddleformers_fc.trainer.job_state import (
    JobState,
    Native,
    channel_of,
    consistency_check_of,
    job_state_of,
    reporters,
    warn,
    when_active,
)
from paddleformers_fc.trainer.options import parse_size


@when_active
def save(trainer: Any, native: Native, model: Any, metrics: dict[str, float] | None = None) -> None:
    """``Trainer._save_checkpoint``: write ``checkpoint-N``, then delete the checkpoints beyond the limit.

    Raises:
        FlexError: the same on every rank; the previous checkpoints are untouched.
    """
    with job_state_of(trainer).best.shown_in(trainer):
        _save(trainer, metrics)


def _save(trainer: Any, metrics: dict[str, float] | None) -> None:
    started = time.monotonic()
    run, args, channel = job_state_of(trainer), trainer.args, channel_of(trainer.args)
    trainer.runtime_timer.start("checkpoint saving time")
    directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    consistency = consistency_check_of(args, f"saving {directory.name}")

    def prepare() -> tuple[state.LiveRoles, dict[str, bytes]]:
        undefined.refuse_undefined(trainer.model)
        if run.ran:
            refuse_other_loop(trainer)
        _update_best(trainer, metrics, directory)
        if args.ignore_save_lr_and_optim:
            return state.model_roles(trainer.model), _files(trainer, channel)
        live = {**state.run_roles(trainer.model, trainer.optimizer), **reference.roles(trainer, run.reference)}
        return live, _files(trainer, channel)

    _look_at_reference(trainer, channel)
    roles, files = run_on_all(channel, "preparing a checkpoint", prepare, consistency)
    run.record = run.record or lineage.new_run()
    job = JobRecord(trainer.state.global_step, trainer.state.consumed_samples, parallel_degrees(args), run.record)
    model, max_file_bytes = describe(trainer.model), parse_size(args.flex_max_file_size)
    replicas, staging_bytes = args.flex_check_replicas, parse_size(args.flex_staging_size)
    with measured_transfers() as transfers:
        report = save_checkpoint(directory, roles, model, files, job, channel, max_file_bytes, replicas, staging_bytes)
    ties = tuple(line for tie in report.diverged_ties for line in tie.differences)
    _note_disks(run, report.disks, args)
    run.saved = directory
    for path in report.set_aside:
        logger.warning(f"{path} was moved from {directory} and is kept; delete it if it is not needed.")
    _warn_of_differences(run, args, directory, report.differences)
    if ties:
        warn(
            args,
            f"Copies of tied tensors differ between pipeline stages. {directory} is saved and does not count as "
            "whole: resume_from_checkpoint: true skips it, and save_total_limit deletes no whole checkpoint for it. "
            "Resume from an older checkpoint and look for the cause.",
            ties,
        )
    trainer.runtime_timer.stop()
    seconds, size = time.monotonic() - started, sum(checksum.size for checksum in report.manifest.files)
    saved = CheckpointReport(
        job.step, directory, seconds, size, report.differences, diverged_ties=ties, transfers=transfers
    )
    for reporter in reporters(trainer):
        reporter.on_checkpoint_saved(args, saved)
    trainer._rotate_checkpoints(output_dir=args.output_dir)


def _look_at_reference(trainer: Any, channel: Channel) -> None:
    """Before the first save, look at a reference model that stays the base; every rank must call."""
    model, record = reference.model_of(trainer), job_state_of(trainer).reference
    if model is not None and record.contents is None and not reference.is_state(trainer, record):
        record.contents = reference.contents_of(model, channel)


def _warn_of_differences(run: JobState, args: Any, directory: Path, differences: tuple[str, ...]) -> None:
    """Warn once that replicas differ; the manifest of every checkpoint lists its own differences."""
    if differences and not run.differences_logged:
        run.differences_logged = True
        warn(
            args,
            "Replicas differ: ranks hold different values of the same part of a tensor. "
            f"{directory} has one version, and its flex_checkpoint.json lists the differences. This warning is not "
            "repeated. With flex_check_replicas: refuse such a save fails.",
            differences,
        )


def _note_disks(run: JobState, disks: DiskLeaders, args: Any) -> None:
    """Keep the disk leaders for the rotation; warn once that a checkpoint is on several disks."""
    known = run.disks is not None and run.disks.leads == disks.leads
    if len(disks.sorted_leaders) > 1 and not known:
        shared = "; ".join(format_ranks(ranks) for ranks in disks.sharing().values())
        warn(
            args,
            f"{args.output_dir} is on {len(disks.sorted_leaders)} disks, which are visible to: {shared}. "
            "Each disk gets a part of every checkpoint; a resume needs all parts, each visible to any rank.",
        )
    run.disks = disks


def _files(trainer: Any, channel: Channel) -> dict[str, bytes]:
    """Return the small files of this rank; the first rank has those that are equal on all ranks."""
    args, tracker = trainer.args, job_state_of(trainer).tracker
    files: dict[str, bytes] = {}
    if args.save_rng_states:
        files[documents.rng_name(channel.rank)] = rng.capture(args.world_size, args.use_hybrid_parallel)
    if channel.rank == 0:
        identity = corpus.digest(trainer.train_dataset, position.covered(tracker.position, tracker.order))
        order = replace(tracker.order, corpus=identity)
        data = position.to_document(tracker.position, position.pace_of(args), order)
        files |= {**documents.model_files(trainer), **documents.trainer_files(trainer, data)}
        if reference.model_of(trainer) is not None:
            about = reference.document(trainer, job_state_of(trainer).reference, position.pace_of(args))
            files[documents.REFERENCE] = codecs.encode(about, "reference model")
    return files


def _update_best(trainer: Any, metrics: dict[str, float] | None, directory: Path) -> None:
    """Set the best checkpoint as PaddleFormers does.

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
    if state.best_metric is None or state.best_model_checkpoint is None or better(value, state.best_metric):
        state.best_metric = float(value)
        state.best_model_checkpoint = str(directory)


def parallel_degrees(args: Any) -> dict[str, int]:
    """Return the degree of every parallel axis, for readers of a manifest."""
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
    """``Trainer._sorted_checkpoints``: in the order of steps, which a copy of the files does not change."""
    found = rotation.numbered(Path(output_dir or trainer.args.output_dir), checkpoint_prefix)
    return [str(path) for path in found]


@when_active
def rotate_checkpoints(trainer: Any, native: Native, use_mtime: bool = False, output_dir: str | None = None) -> None:
    """``Trainer._rotate_checkpoints``: delete old checkpoints on the lowest rank of every disk."""
    args, run = trainer.args, job_state_of(trainer)
    leads = run.disks.sorted_leaders if run.disks is not None else (0,)
    limit = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
    # Under full the ranks share the work of reading the newest checkpoint. A save of another class may call on the
    # first rank alone, so only the save of this package asks all ranks.
    saved_here = run.saved is not None and run.saved.name.endswith(f"-{trainer.state.global_step}")
    shared = len(leads) > 1 or (limit is not None and args.flex_verify == "full")
    channel = channel_of(args) if shared and saved_here else ALONE
    if channel is ALONE and dist.get_rank() != 0:
        return
    with run.best.shown_in(trainer):
        best = trainer.state.best_model_checkpoint
    try:
        needed = [path for path in (run.saved, None if best is None else Path(best)) if path is not None]
        level, threads, directory = args.flex_verify, args.flex_threads, Path(output_dir or args.output_dir)
        rotation.rotate(directory, limit, needed, logger.info, level, threads, channel, leads)
    except StorageError as error:
        # The new checkpoint is saved, so the run continues.
        logger.warning(f"An old checkpoint could not be deleted; the next save tries again.\n{error.render()}")


@when_active
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


@when_active
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
    _export(trainer, output_dir or trainer.args.output_dir, trainer.args.flex_max_shard_size)


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
    _export(trainer, save_dir, trainer.args.flex_max_shard_size if max_shard_size is None else max_shard_size)


def _export(trainer: Any, output_dir: str, max_shard_size: str | int) -> None:
    directory, channel = require_local(output_dir, "An export"), channel_of(trainer.args)
    max_shard_bytes = parse_size(max_shard_size) if isinstance(max_shard_size, str) else int(max_shard_size)
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
