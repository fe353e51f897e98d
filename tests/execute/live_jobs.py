"""Jobs that run inside rank processes: a real model and optimizer, loaded and saved by the executors alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def hop(
    model_type: str,
    layout: Mapping[str, Any],
    model: Mapping[str, Any],
    output_dir: str,
    source: str | None,
    target: str,
) -> list[str]:
    """Train a little under a layout, load ``source`` over it, and save ``target``; the names that were fresh.

    Args:
        model_type: ``llama`` or ``ernie4_5_moe``.
        layout: a ``tiny.Layout`` as JSON.
        model: overrides of the model's configuration.
        output_dir: the Trainer's output directory.
        source: a flex checkpoint, or None to save what was trained.
        target: the flex checkpoint to write.
    """
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.load import load_checkpoint
    from paddleformers_fc.execute.opening import open_on_all_ranks
    from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
    from paddleformers_fc.trainer.description import describe_model
    from tests.harness import tiny

    # The step gives the optimizer its states, and the model weights that a load must overwrite.
    args = tiny.training_arguments(layout, output_dir, max_steps=1 if source else 3)
    built = tiny.build(model_type, layout, args, **model)
    trainer = tiny.trainer(built, args)
    trainer.train()
    weights = built.sharded_state_dict()
    roles: dict[str, dict[str, Any]] = {"model_state": weights}
    for name, state in trainer.optimizer.sharded_state_dict(weights).items():
        roles.setdefault("master_weight" if name.endswith(".w_0") else "optimizer_state", {})[name] = state
    channel = job_channel()
    described = describe_model(built)
    fresh: list[str] = []
    if source is not None:
        fresh = list(load_checkpoint(open_on_all_ranks(Path(source), channel), roles, described, channel).fresh)
    files = {"config.json": config_bytes(described.config)} if channel.rank == 0 else {}
    save_checkpoint(Path(target), roles, described, files, JobRecord(3, 24, {}), channel)
    return fresh
