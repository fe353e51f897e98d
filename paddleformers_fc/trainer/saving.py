"""Save, rotate and export: the methods of PaddleFormers' Trainer that write, one function each.

Work that can fail on one rank alone runs inside an agreement helper.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import ALONE, run_on_all
from paddleformers_fc.execute.export import save_weights
from paddleformers_fc.formats.checkpoint import RUN_ARGUMENTS
from paddleformers_fc.layout.live import LiveRoles
from paddleformers_fc.layout.roles import EMA_STATE, MODEL_STATE
from paddleformers_fc.storage.paths import require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import (
    documents,
    live_roles,
    rotation,
    save_job,
)
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.job_state import (
    Native,
    channel_of,
    consistency_check_of,
    job_state_of,
)
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.library_models import PREFIX_CHECKPOINT_DIR, ShardingOption
from paddleformers_fc.trainer.options import shard_bytes


def save(trainer: Any, native: Native, model: Any, metrics: dict[str, float] | None = None) -> None:
    """``Trainer._save_checkpoint``: write ``checkpoint-N``, then delete the checkpoints beyond the limit.

    Raises:
        FlexError: the same on every rank; the previous checkpoints are untouched.
    """
    job_state = job_state_of(trainer)
    with job_state.best.shown_in(trainer):
        job_state.saver.save(trainer, metrics)
    if job_state.uploads is not None:
        job_state.uploads.finish_outside_loop()


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


def rotate_checkpoints(trainer: Any, native: Native, use_mtime: bool = False, output_dir: str | None = None) -> None:
    """``Trainer._rotate_checkpoints``: delete old checkpoints on the lowest rank of every disk."""
    args, job_state = trainer.args, job_state_of(trainer)
    # A save of another class may call on the first rank only, so only the save of this package agrees between ranks.
    saved_here = job_state.saved is not None and job_state.saved.name.endswith(f"-{trainer.state.global_step}")
    with job_state.best.shown_in(trainer):
        best = trainer.state.best_model_checkpoint
    channel = channel_of(args) if saved_here else ALONE
    save_job.rotate(
        args, job_state.saved, best, job_state.disks, channel, output_dir or args.output_dir, job_state.uploads
    )


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
    directory, channel = require_local(output_dir, "An export"), channel_of(trainer.args)
    max_shard_bytes = shard_bytes(max_shard_size)
    consistency = consistency_check_of(trainer.args, f"exporting to {directory.name}")

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
