"""A training script on two ranks, as ``paddle.distributed.launch`` runs it: ``python signal_script.py OUTPUT``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paddleformers_fc import cpu_runtime


def main(output_dir: str) -> None:
    """Train; a file of each rank is left once its loop runs."""
    cpu_runtime.activate()
    from paddleformers.trainer import TrainerCallback

    from tests.harness.tiny import DP2
    from tests.trainer.jobs import flex_trainer

    class Started(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            (Path(output_dir) / f"started-{args.process_index}").touch()

    trainer = flex_trainer(DP2.to_json(), output_dir, {"max_steps": 100_000})
    trainer.add_callback(Started())
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
