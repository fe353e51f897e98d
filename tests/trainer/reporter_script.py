"""A training that reports to every reporter which can be installed: ``python reporter_script.py OUTPUT RESUME``."""

from __future__ import annotations

import sys

from paddleformers_fc import cpu_runtime


def main(output_dir: str, resume: str) -> None:
    """Train up to step 4 and save every second step; without a checkpoint to resume from the beginning."""
    cpu_runtime.activate()
    from tests.harness.tiny import SINGLE
    from tests.trainer.jobs import flex_trainer

    reporters = ["visualdl", "tensorboard", "wandb"]
    arguments = {"max_steps": 4, "save_steps": 2, "report_to": reporters, "logging_dir": f"{output_dir}/runs"}
    flex_trainer(SINGLE.to_json(), output_dir, arguments).train(resume_from_checkpoint=resume or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
