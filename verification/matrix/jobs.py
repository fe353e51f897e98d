"""The jobs of the ranks of one training of a matrix: a source, a conversion, the way back, and one set by hand.

A training is described by one JSON document, :class:`Training`, and always goes through PaddleFormers' Trainer with
this package's checkpoints. One that resumes saves its loaded state before its first step, so that the comparison uses
the state of the model and the optimizer, not the bytes read.

Importing this module imports no Paddle; :func:`run` is a job of the fork server. Time: 0.5 to 6 s per training on two
cores, growing with the ranks; memory: about 50 MB per rank beside the server.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verification.matrix.layouts import MatrixLayout, layout_from

JOB = f"{__name__}:run"
SAVED_AT = 3
LAST_STEP = 6


@dataclass(frozen=True)
class Training:
    """One training.

    Args:
        model_type: a model of :mod:`.tiny`.
        model: overrides of the tiny model's configuration.
        arguments: overrides of the training arguments.
        layout: how the ranks share it.
        output_dir: the Trainer's output directory, with its checkpoints.
        last_step: when it ends.
        micro_batch: samples per forward; None for as many as fit.
        hold_predictions: the multi-token prediction layers are held and not trained.
        resume: the checkpoint to resume.
        by_hand: overwrite what was loaded with numbers that no line of this package's loader has touched.
        adapters: settings of LoRA adapters that are trained in place of the model; empty for none.
        saved_at: after how many steps a checkpoint is saved, unless one is resumed.
    """

    model_type: str
    model: dict[str, Any]
    arguments: dict[str, Any]
    layout: MatrixLayout
    output_dir: str
    last_step: int = LAST_STEP
    micro_batch: int | None = None
    hold_predictions: bool = False
    resume: str | None = None
    by_hand: bool = False
    adapters: dict[str, Any] = field(default_factory=dict)
    saved_at: int = SAVED_AT

    def to_json(self) -> dict[str, Any]:
        """As the keyword arguments of :func:`run`."""
        return {"training": asdict(self)}


def run(training: dict[str, Any]) -> list[float]:
    """Train as described; the losses of the steps that were made, on every rank.

    Args:
        training: a :class:`Training` as JSON.
    """
    losses: list[float] = trained(training).losses
    return losses


def trained(training: dict[str, Any]) -> Any:
    """Return a Trainer that has trained as described."""
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from verification.matrix import by_hand, tiny

    wanted = Training(**{**training, "layout": layout_from(training["layout"])})
    settings = {
        "cls": FlexTrainingArguments,
        "flex_checkpoint": True,
        "max_steps": wanted.last_step,
        "save_steps": wanted.saved_at if wanted.resume is None else 10**6,
        **wanted.arguments,
    }
    args = tiny.training_arguments(wanted.layout, wanted.output_dir, wanted.micro_batch, **settings)
    model = tiny.build(wanted.model_type, wanted.layout, args, wanted.hold_predictions, **wanted.model)
    model = tiny.adapted(model, **wanted.adapters) if wanted.adapters else model
    source = None if wanted.resume is None else Path(wanted.resume)

    class AsLoaded(TrainerCallback):
        """Between the load and the first step."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if source is None:
                return
            if wanted.by_hand:
                by_hand.fill(trainer, source)
            trainer._save_checkpoint(trainer.model)

    predicted = 0 if wanted.hold_predictions else getattr(model.config, "num_nextn_predict_layers", 0)
    samples = tiny.samples(wanted.model_type, predicted)
    trainer = tiny.trainer(model, args, cls=FlexTrainer, callbacks=[AsLoaded()], train_dataset=samples)
    trainer.train(resume_from_checkpoint=wanted.resume)
    return trainer
