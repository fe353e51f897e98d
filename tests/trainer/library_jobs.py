"""Jobs for ranks: train by the library that this process has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from paddleformers_fc.upstream import LIBRARY
from tests.trainer.jobs import flex_trainer


def run(output_dir: str, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """Train with the optimizer that is the library's own, save, and export.

    Returns:
        the losses, and the package of the Trainer.
    """
    arguments = {"optim": "adamw_custom", **settings.pop("arguments")}
    trainer = flex_trainer(output_dir=output_dir, arguments=arguments, **settings)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{output_dir}/export")
    kind = import_module(f"{LIBRARY}.trainer").Trainer
    assert isinstance(trainer, kind)
    return {"losses": trainer.losses, "library": kind.__module__.partition(".")[0]}
