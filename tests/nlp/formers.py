"""The other side of an exchange: trains the same tiny models with PaddleFormers, in PaddleFormers' environment.

``python -m tests.nlp.formers`` reads one JSON object per line: the arguments of :func:`train`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from verification.matrix import tiny


def train(model: dict[str, Any], output_dir: str, resume: str | None = None) -> list[float]:
    """Train a tiny Llama on one process for two steps and save; a resumed run saves what it has loaded, and stops.

    Args:
        model: changes of its configuration.
        output_dir: gets ``checkpoint-2``.
        resume: the checkpoint to resume.
    """
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    class SaveWhatWasLoaded(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if resume is not None:
                trainer._save_checkpoint(trainer.model)

    layout = tiny.layout_from({"name": "single", "nproc": 1})
    settings = {"flex_checkpoint": True, "max_steps": 2, "save_steps": 2, "cls": FlexTrainingArguments}
    # The two libraries read the samples of an epoch in different orders.
    args = tiny.training_arguments(layout, output_dir, ignore_data_skip=True, **settings)
    built = tiny.build("llama", layout, args, **model)
    trainer = tiny.trainer(built, args, cls=FlexTrainer, callbacks=[SaveWhatWasLoaded()])
    trainer.train(resume_from_checkpoint=resume)
    return list(trainer.losses)


def main() -> None:
    """Run the trainings of standard input."""
    from paddleformers_fc.cpu_runtime import activate

    activate()
    for line in sys.stdin:
        given = json.loads(line)
        losses = train(**given)
        Path(given["output_dir"], "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
