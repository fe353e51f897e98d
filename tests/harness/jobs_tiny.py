"""Jobs for ranks: look into the tiny models."""

from __future__ import annotations

from tests.harness import tiny


def classes(output_dir: str) -> list[str]:
    """The classes that were asked for."""
    from paddleformers.trainer import Trainer, TrainingArguments

    class MyArguments(TrainingArguments):
        pass

    class MyTrainer(Trainer):
        pass

    args = tiny.training_arguments(tiny.SINGLE, output_dir, cls=MyArguments)
    run = tiny.trainer(tiny.build("llama", tiny.SINGLE, args), args, cls=MyTrainer)
    return [type(args).__name__, type(run).__name__]
