"""Jobs for ranks: a PaddleFormers with a method under another name, and Trainers that go around the replaced ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from paddleformers_fc.errors import FlexError
from tests.harness import tiny
from tests.trainer.jobs import flex_trainer


@contextlib.contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """Context manager in which a class or module has this attribute under another name."""
    original = vars(owner)[name]
    delattr(owner, name)
    setattr(owner, f"{name}_renamed", original)
    try:
        yield
    finally:
        delattr(owner, f"{name}_renamed")
        setattr(owner, name, original)


def goes_around(
    layout: tiny.MatrixLayout | Mapping[str, Any], output_dir: str, method: str, way: str, resume: str | None = None
) -> dict[str, Any]:
    """Train with a Trainer class that overrides one method and calls PaddleFormers' own in place of ``super()``.

    Where a checkpoint is to be resumed it does nothing instead, because PaddleFormers' own method cannot read it.

    Args:
        way: ``subclass`` of ``FlexTrainer``, or of the stock Trainer, ``installed``.
    """
    from paddleformers.trainer import Trainer

    native = getattr(Trainer, method)  # Before an import of FlexTrainer replaces it.
    from paddleformers_fc import FlexTrainer

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if resume else native(self, *args, **kwargs)

    mine = type("Mine", (FlexTrainer if way == "subclass" else Trainer,), {method: own})
    trainer = flex_trainer(layout, output_dir, {"max_steps": 4, "save_steps": 2}, cls=mine)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except FlexError as error:
        return {"error": type(error).__name__, "text": str(error), "step": trainer.state.global_step}
    return {"error": None, "step": trainer.state.global_step}


def train_with_a_renamed_method(layout: Mapping[str, Any], output_dir: str, name: str) -> dict[str, Any]:
    """Train with the stock Trainer class and our arguments where a method has another name; the error."""
    from paddleformers.trainer import Trainer

    from paddleformers_fc import FlexTrainingArguments

    with without(Trainer, name):
        try:
            args = tiny.training_arguments(
                layout, output_dir, cls=FlexTrainingArguments, flex_checkpoint=True, max_steps=2, save_steps=1
            )
            tiny.trainer(tiny.build("llama", layout, args), args).train()
        except FlexError as error:
            return {"error": type(error).__name__, "evidence": list(error.evidence)}
    return {"error": None, "evidence": []}


def command_line_with_a_renamed_method(yaml: str, name: str) -> None:
    """Train as a worker of the stock command line where a method of the Trainer has another name."""
    from paddleformers.trainer import Trainer

    from tests.trainer.entry_jobs import run_command_line

    with without(Trainer, name):
        run_command_line(yaml)
