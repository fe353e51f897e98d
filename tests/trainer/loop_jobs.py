"""Jobs of a hand-written training loop, run inside rank processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def run(layout: Mapping[str, Any], output_dir: str, target: str, source: str | None = None) -> list[str]:
    """Train three steps, or load ``source`` after one step, and save ``target``; the names that were fresh.

    Args:
        layout: a ``MatrixLayout`` as JSON.
        output_dir: for PaddleFormers' arguments, which initialise the parallel environment.
        target: the checkpoint to save.
        source: the checkpoint to load over weights and states of another history.
    """
    import paddle

    import paddleformers_fc
    from tests.harness import tiny

    args = tiny.training_arguments(layout, output_dir)
    model = tiny.build("llama", layout, args)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    for step in range(1 if source else 3):
        paddle.seed(step)
        tokens = paddle.randint(0, 64, [2, 8])
        model(input_ids=tokens)[0].square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    report = paddleformers_fc.load(source, model, optimizer) if source else None
    paddleformers_fc.save(target, model, optimizer, step=3, consumed_samples=6)
    return list(report.fresh) if report else []


def refuse(output_dir: str) -> str:
    """The error of a model without a configuration."""
    import paddle

    import paddleformers_fc
    from paddleformers_fc.errors import OptionError

    try:
        paddleformers_fc.save(output_dir, paddle.nn.Linear(2, 2))
    except OptionError as error:
        return error.what
    return ""
