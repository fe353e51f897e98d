"""The jobs of the ranks: one training, and one unified checkpoint of PaddleFormers.

Importing this module imports no Paddle; its functions are jobs of the fork server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAIN = f"{__name__}:train"
UNIFY = f"{__name__}:unify"


def train(
    model_type: str,
    layout: Mapping[str, Any],
    output_dir: str,
    model: Mapping[str, Any],
    arguments: Mapping[str, Any],
    resume: str | None = None,
) -> list[float]:
    """Train a tiny model with flex checkpoints; the loss of every step that was made, on every rank.

    Args:
        model_type: ``llama`` or ``ernie4_5_moe``.
        layout: a matrix layout as JSON.
        output_dir: the Trainer's output directory.
        model: overrides of the tiny model's configuration.
        arguments: training arguments.
        resume: a checkpoint to resume.
    """
    trainer = _trainer(model_type, layout, output_dir, model, arguments)
    trainer.train(resume_from_checkpoint=resume)
    return list(trainer.losses)


def unify(
    model_type: str,
    layout: Mapping[str, Any],
    output_dir: str,
    model: Mapping[str, Any],
    arguments: Mapping[str, Any],
    resume: str,
) -> str:
    """Load a checkpoint of which all steps are made, and let PaddleFormers write it; the error that prevents it.

    Args:
        model_type: as for :func:`train`, and so are the others.
        layout: under which PaddleFormers writes.
        output_dir: gets the unified checkpoint in ``unified``.
        model: overrides of the tiny model's configuration.
        arguments: training arguments.
        resume: the checkpoint.
    """
    from paddleformers.trainer.unified_checkpoint import UnifiedCheckpointHandler

    trainer = _trainer(model_type, layout, output_dir, model, arguments)
    trainer.train(resume_from_checkpoint=resume)
    handler = UnifiedCheckpointHandler(trainer.args)
    try:
        handler.save_unified_checkpoint(trainer.model, trainer.optimizer, f"{output_dir}/unified", save_to_hf=True)
    except Exception as error:  # The exception of upstream is the finding.
        return type(error).__name__
    return ""


def _trainer(
    model_type: str, layout: Mapping[str, Any], output_dir: str, model: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Any:
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from verification.matrix import tiny

    args = tiny.training_arguments(layout, output_dir, cls=FlexTrainingArguments, flex_checkpoint=True, **arguments)
    return tiny.trainer(tiny.build(model_type, layout, args, **model), args, cls=FlexTrainer)
