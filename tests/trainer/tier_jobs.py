"""Trainings with a local tier; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import flex_trainer, refused_training


def run_and_note(**settings: Any) -> dict[str, Any]:
    """Train; the steps of ``on_save``, and the checkpoints that reporters were told of."""
    from paddleformers_fc import FlexCheckpointCallback

    events: list[int] = []
    saved: list[str] = []

    class Note(FlexCheckpointCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            events.append(state.global_step)

        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            saved.append(f"{report.directory.parent.name}/{report.directory.name}")

    flex_trainer(**settings, callbacks=[Note()]).train()
    return {"events": events, "saved": saved}


def run_evaluated(resume: bool | None = None, **settings: Any) -> dict[str, Any]:
    """Train with an evaluation after every step; the losses, and the best checkpoint."""
    samples = tiny.Samples()
    trainer = flex_trainer(**settings, eval_dataset=[samples[index] for index in range(tiny.GLOBAL_BATCH)])
    trainer.train(resume_from_checkpoint=resume)
    return {"losses": trainer.losses, "best": trainer.state.best_model_checkpoint}


def run_around(**settings: Any) -> dict[str, Any]:
    """Train with a class whose end of a step is its own; the error, and the step at which it was raised."""
    from paddleformers_fc import FlexTrainer

    class Around(FlexTrainer):
        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

    return refused_training(**settings, cls=Around)
