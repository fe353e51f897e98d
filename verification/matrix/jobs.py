"""The jobs of the ranks of one training of a matrix: a source, a conversion, and the way back.

A training is described by one JSON document, :class:`Training`, and always goes through PaddleFormers' Trainer with
this package's checkpoints. One that resumes saves its loaded state before its first step, so that the comparison uses
the state of the model and the optimizer, not the bytes read.

Importing this module imports no Paddle; :func:`run` is a job of the fork server. Time: 0.5 to 6 s per training on two
cores, growing with the ranks; memory: about 50 MB per rank beside the server.
"""

from __future__ import annotations

from typing import Any

import msgspec

from verification.matrix.layouts import MatrixLayout
from verification.matrix.recipe import Recipe

JOB = f"{__name__}:run"


class Training(msgspec.Struct, frozen=True):
    """One training.

    Args:
        recipe: of the matrix: the model, its settings and the steps.
        layout: how the ranks share it.
        output_dir: the Trainer's output directory, with its checkpoints.
        hold_predictions: the multi-token prediction layers are held and not trained.
        resume: the checkpoint to resume.
    """

    recipe: Recipe
    layout: MatrixLayout
    output_dir: str
    hold_predictions: bool = False
    resume: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As the keyword arguments of :func:`run`."""
        return {"training": msgspec.to_builtins(self)}


def run(training: dict[str, Any]) -> list[float]:
    """Train as described; the losses of the steps that were made, on every rank.

    Args:
        training: a :class:`Training` as JSON.
    """
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from verification.matrix import tiny

    wanted = msgspec.convert(training, Training)
    recipe = wanted.recipe
    settings = {
        "cls": FlexTrainingArguments,
        "flex_checkpoint": True,
        "max_steps": recipe.last_step,
        "save_steps": recipe.saved_at if wanted.resume is None else 10**6,
        **recipe.arguments,
    }
    args = tiny.training_arguments(wanted.layout, wanted.output_dir, recipe.micro_batch, **settings)
    model = tiny.build(recipe.model_type, wanted.layout, args, wanted.hold_predictions, **recipe.model)
    model = tiny.adapted(model, **recipe.adapters) if recipe.adapters else model

    class AsLoaded(TrainerCallback):
        """Between the load and the first step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if wanted.resume is not None:
                trainer._save_checkpoint(trainer.model)

    predicted = 0 if wanted.hold_predictions else getattr(model.config, "num_nextn_predict_layers", 0)
    samples = tiny.samples(recipe.model_type, predicted)
    trainer = tiny.trainer(model, args, cls=FlexTrainer, callbacks=[AsLoaded()], train_dataset=samples)
    trainer.train(resume_from_checkpoint=wanted.resume)
    losses: list[float] = trainer.losses
    return losses
