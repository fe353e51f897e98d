"""Jobs for ranks: look into the tiny models."""

from __future__ import annotations

from typing import Any

from tests.harness import tiny


def columns_of_the_first_gate(layout: dict[str, Any], output_dir: str) -> list[list[float]]:
    """This rank's part of a column parallel weight."""
    args = tiny.training_arguments(layout, output_dir)
    model = tiny.build("llama", layout, args)
    rows: list[list[float]] = model.model.layers[0].mlp.gate_proj.weight.tolist()
    return rows


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
