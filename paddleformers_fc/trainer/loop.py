"""Save and load for a training loop without PaddleFormers' Trainer.

The model is one of PaddleFormers whose family is declared; its configuration is read from the live object.
Every rank of the job must call, and all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from paddleformers.transformers.model_utils import unwrap_model

from paddleformers_fc.distributed.channel import run_on_all
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.load import LoadReport, prepare_load
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.read_pool import ReadOptions
from paddleformers_fc.execute.save import JobRecord, SaveReport, save_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.formats.checkpoint import CONFIG_NAME
from paddleformers_fc.layout.roles import MASTER_WEIGHT, OPTIMIZER_STATE
from paddleformers_fc.storage.paths import RemotePath, expand_user, parse_path, require_local
from paddleformers_fc.trainer import documents, optimizers, state, undefined
from paddleformers_fc.trainer.description import describe
from paddleformers_fc.trainer.job_state import job_communicator


def save(
    directory: str | PathLike[str],
    model: Any,
    optimizer: Any = None,
    *,
    step: int = 0,
    consumed_samples: int = 0,
    parallel: Mapping[str, int] | None = None,
) -> SaveReport:
    """Save a model, and its optimizer, as a flex checkpoint. Every rank must call.

    Args:
        directory: the checkpoint, usually ``checkpoint-N`` with the step as N; an older one is replaced in one step.
        model: a PaddleFormers model of a declared family, or its parallel wrapper.
        optimizer: PaddleFormers' or Paddle's AdamW over its parameters; None saves the weights alone.
        step: optimizer steps done.
        consumed_samples: training samples seen.
        parallel: degree per parallel axis, for a reader; a load does not need it.
    Raises:
        FlexError: the same on every rank; an older checkpoint is untouched.

    Example:
        >>> paddleformers_fc.save("out/checkpoint-3", model, optimizer, step=3)
    """
    channel, model = job_communicator(), unwrap_model(model)
    target = require_local(expand_user(str(directory)), "A checkpoint that is saved")

    def prepare() -> tuple[ModelDescription, state.LiveRoles, dict[str, bytes]]:
        description = _describe(model)
        undefined.refuse_undefined(model)
        files = {CONFIG_NAME: documents.config_text(model).encode()} if channel.rank == 0 else {}
        if optimizer is None:
            return description, state.model_roles(model), files
        optimizers.refuse_unsupported(optimizer)
        return description, state.run_roles(model, optimizer), files

    description, roles, files = run_on_all(channel, "preparing a checkpoint", prepare)
    job = JobRecord(step, consumed_samples, dict(parallel or {}))
    return save_checkpoint(Path(target), roles, description, files, job, channel)


def load(
    directory: str | PathLike[str] | RemotePath,
    model: Any,
    optimizer: Any = None,
    *,
    verify: str = "full",
    threads: int = 4,
) -> LoadReport:
    """Fill a model, and its optimizer, from a flex checkpoint, whatever the two layouts are. Every rank must call.

    Args:
        directory: the checkpoint: a path or a URL.
        model: a PaddleFormers model of a declared family, or its parallel wrapper.
        optimizer: gets the stored states; None loads the weights alone.
        verify: what is compared: ``off``, ``size`` (sizes and documents) or ``full`` (also all tensors that are read).
        threads: number of threads of this rank that read.
    Raises:
        Corrupt: the same on every rank: a checksum does not match. Those of headers and documents are compared before
            anything changes. Those of tensors are compared while they are filled; then the error states that tensors
            are undefined, and ``save`` and the Trainer refuse the model until a load succeeds.
        FlexError: the same on every rank, before any weight changes, if the checkpoint does not fit.

    Example:
        >>> paddleformers_fc.load("out/checkpoint-3", model, optimizer)
    """
    channel, model = job_communicator(), unwrap_model(model)
    source = directory if isinstance(directory, RemotePath) else parse_path(expand_user(str(directory)))
    checkpoint = open_on_all_ranks(source, channel, verify, threads)
    stored = checkpoint.catalog.roles

    def prepare() -> tuple[ModelDescription, state.LiveRoles]:
        description = _describe(model)
        state.make_room(model)
        if optimizer is None:
            return description, state.model_roles(model)
        optimizers.refuse_unsupported(optimizer)
        state.create_states(model, optimizer, {*stored.get(MASTER_WEIGHT, {}), *stored.get(OPTIMIZER_STATE, {})})
        live = state.run_roles(model, optimizer)
        # A stored role that no rank holds is a role that is missed.
        return description, {role: live.get(role, {}) for role in {**live, **stored}}

    description, roles = run_on_all(channel, "preparing the optimizer", prepare)
    load = prepare_load(checkpoint, roles, description, channel, ReadOptions(threads=threads))
    with undefined.until_filled(model, source):
        return load.fill()


def _describe(model: Any) -> ModelDescription:
    """Describe a model whose family is declared; without one, names cannot show that a tensor is fused."""
    if not hasattr(model, "config"):
        raise OptionError(
            f"{type(model).__name__} has no configuration that names its family.",
            where="model",
            next_step="Use a model of PaddleFormers, and declare its family as docs/add-a-family.md shows.",
        )
    description = describe(model)
    family_for(description.config)
    return description
