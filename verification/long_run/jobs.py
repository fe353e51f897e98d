"""The job of the ranks that lets PaddleFormers write a unified checkpoint; trainings are those of the matrices.

Importing this module imports no Paddle; its function is a job of the fork server.
"""

from __future__ import annotations

from typing import Any

from verification.matrix.jobs import trained

UNIFY = f"{__name__}:unify"


def unify(training: dict[str, Any]) -> str:
    """Load a checkpoint of which all steps are made, and let PaddleFormers write it; the error that prevents it.

    Args:
        training: a :class:`verification.matrix.jobs.Training` as JSON; its output directory gets ``unified``.
    """
    from paddleformers.trainer.unified_checkpoint import UnifiedCheckpointHandler

    trainer = trained(training)
    handler = UnifiedCheckpointHandler(trainer.args)
    try:
        target = f"{training['output_dir']}/unified"
        handler.save_unified_checkpoint(trainer.model, trainer.optimizer, target, save_to_hf=True)
    except Exception as error:  # The exception of upstream is the finding.
        return type(error).__name__
    return ""
