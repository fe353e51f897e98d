"""Trainings of adapters on the tiny models; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import tiny
from tests.trainer.export_jobs import configured
from tests.trainer.jobs import callback, outcome

Layout = tiny.MatrixLayout | Mapping[str, Any]


def trainer_of(
    layout: Layout,
    output_dir: str | Path,
    arguments: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    model: Mapping[str, Any] | None = None,
    adapters: Mapping[str, Any] | None = None,
    base: str | None = None,
    **trainer: Any,
) -> Any:
    """A ``FlexTrainer`` over a tiny model with adapters; ``base`` is a directory of open weights."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **(arguments or {})}
    args = tiny.training_arguments(layout, str(output_dir), **settings)
    plain = tiny.build(model_type, layout, args, **(model or {})) if base is None else from_files(base, layout, args)
    return tiny.trainer(tiny.adapted(plain, **(adapters or {})), args, **{"cls": FlexTrainer, **trainer})


def from_files(base: str, layout: Layout, args: Any) -> Any:
    """A model of open weights, as PaddleFormers' command line makes it."""
    from paddleformers.transformers import AutoModelForCausalLM, AutoModelForCausalLMPipe

    kind = AutoModelForCausalLMPipe if tiny.layout_from(layout).pp > 1 else AutoModelForCausalLM
    return kind.from_pretrained(base, config=configured(layout, args, base), dtype="float32")


def fingerprint(model: Any) -> Any:
    """What identifies the base of a model with adapters."""
    from paddleformers_fc.trainer.description import describe_adapters

    adapters = describe_adapters(model)
    assert adapters is not None
    return adapters.base


def run(resume: str | bool | None = None, **settings: Any) -> dict[str, Any]:
    """Train adapters and save; the losses, and the Trainer's state afterwards."""
    trainer = trainer_of(**settings)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def run_saving_what_was_loaded(resume: str, **settings: Any) -> list[float]:
    """Resume, save the loaded state before the first step, and train on; the losses."""
    save = callback(on_train_begin=lambda *_, **__: trainer._save_checkpoint(trainer.model))
    trainer = trainer_of(**settings, callbacks=[save])
    trainer.train(resume_from_checkpoint=resume)
    return list(trainer.losses)


def export_initial(layout: Mapping[str, Any], output_dir: str, base: str, target: str, checkpoint: str) -> None:
    """Save adapters on a base of files, export them by the Trainer, and write the model's logits beside the export."""
    import numpy as np
    import paddle

    import paddleformers_fc

    trainer = trainer_of(layout, output_dir, {"max_steps": 1}, base=base)
    paddleformers_fc.save(checkpoint, trainer.model, step=1)
    trainer.save_model(target)
    trainer.model.eval()
    logits = trainer.model(paddle.to_tensor(np.arange(1, tiny.SEQUENCE + 1)[None]))
    np.save(f"{target}.npy", (logits[0] if isinstance(logits, tuple) else getattr(logits, "logits", logits)).numpy())
