"""Tied weights whose copies differ: jobs of the fork server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import flex_trainer


def run_and_part_copies(
    after: int,
    layout: tiny.MatrixLayout | Mapping[str, Any],
    resume: str | bool | None = None,
    ours: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """Train a tied Llama over a pipeline; from a step on, the copy of the last stage is another one.

    Args:
        after: the first step behind which the copies differ.
        ours: with this package, or the stock Trainer.

    Returns:
        the losses, the steps that were trained, and this rank's copy as hex; or the error.
    """
    from paddleformers.trainer import TrainerCallback

    tied = {"tie_word_embeddings": True}

    class PartCopies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            import paddle

            head = copies(model).get("lm_head.weight")
            if state.global_step >= after and head is not None:
                with paddle.no_grad():
                    head.set_value(head * 1.5)

    callbacks = [PartCopies()]
    if ours:
        trainer = flex_trainer(layout, model=tied, callbacks=callbacks, **settings)
    else:
        args = tiny.training_arguments(layout, settings["output_dir"], **settings["arguments"])
        trainer = tiny.trainer(tiny.build("llama", layout, args, **tied), args, callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    bits = {name: one.numpy().tobytes().hex() for name, one in copies(trainer.model).items()}
    return {"step": trainer.state.global_step, "losses": trainer.losses, "copies": bits}


def copies(model: Any) -> dict[str, Any]:
    """This rank's copies of a tied embedding."""
    from paddleformers.transformers.model_utils import unwrap_model

    held = unwrap_model(model).state_dict()
    return {name: held[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in held}
