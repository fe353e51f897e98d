"""What ranks do in the tests of this room; each function is a job of the fork server and returns JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import tiny


def flex_trainer(
    model_type: str,
    layout: Mapping[str, Any],
    output_dir: str,
    arguments: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Any:
    """A ``FlexTrainer`` over the tiny model and data."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **(arguments or {})}
    args = tiny.training_arguments(layout, output_dir, **settings)
    return tiny.trainer(tiny.build(model_type, layout, args, **(model or {})), args, **{"cls": FlexTrainer, **trainer})


def run(
    model_type: str,
    layout: Mapping[str, Any],
    output_dir: str,
    arguments: Mapping[str, Any] | None = None,
    resume: str | bool | None = None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and save; the losses, and what the Trainer's state says afterwards."""
    trainer = flex_trainer(model_type, layout, output_dir, arguments, model)
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    return {
        "losses": trainer.losses,
        "step": state.global_step,
        "epoch": state.epoch,
        "consumed": state.consumed_samples,
        "entries": sorted(path.name for path in Path(output_dir).iterdir()),
    }
