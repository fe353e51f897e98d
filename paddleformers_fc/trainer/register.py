"""The file for ``custom_register_path``: adds flex checkpoints to the stock ``paddleformers-cli``.

The command line executes this file in every worker process, under another module name, before it parses the YAML.
This command prints the path for the YAML::

    python -m paddleformers_fc.trainer.register
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

from paddleformers_fc.errors import EnvironmentMismatch

PATH = Path(__file__).resolve()
"""The path for ``custom_register_path``."""

ALSO_RUN = "PADDLEFORMERS_FC_ALSO_RUN"
"""The environment variable with the user's registration file, which runs first so that our methods wrap its."""


def register() -> None:
    """Add ``flex_checkpoint`` to the stock Trainer and argument parser; on a CPU, patch Paddle for training.

    If upstream hooks are missing or different, a job without flex checkpoints continues without this package, with a
    warning.

    Raises:
        EnvironmentMismatch: hooks are missing or different, and the job may use flex checkpoints.
    """
    from paddleformers_fc import upstream
    from paddleformers_fc.cpu_runtime import activate, needed
    from paddleformers_fc.trainer.rank_records import begin_record
    from paddleformers_fc.upstream.hooks import COMMAND_LINES, TRAINERS

    begin_record()
    try:
        upstream.require((*TRAINERS[upstream.FORMERS], *COMMAND_LINES[upstream.FORMERS], *needed()))
    except EnvironmentMismatch as error:
        if _may_use_flex():
            raise
        _continue_without(error)
        return
    activate()
    from paddleformers_fc.trainer.entry import install

    install()


def _may_use_flex() -> bool:
    """Return False if the job's YAML shows that ``flex_checkpoint`` is not true; else True."""
    from paddleformers_fc import upstream

    if sys.argv[1:2] != ["train"]:
        return True
    try:
        settings = import_module(f"{upstream.FORMERS}.cli.hparams.parser").read_args()
    except Exception:  # The command line reports faults of its own arguments.
        return True
    return not isinstance(settings, dict) or settings.get("flex_checkpoint") not in (None, False)


def _continue_without(error: Exception) -> None:
    """Leave PaddleFormers unchanged, except for the CPU runtime and a parser that accepts our keys."""
    from paddleformers_fc import upstream
    from paddleformers_fc.cpu_runtime import activate

    with contextlib.suppress(EnvironmentMismatch):  # ``error`` lists the same faults.
        activate()
    logger = import_module(f"{upstream.FORMERS}.utils.log").logger
    logger.warning(f"This environment does not support flex_checkpoint: true; this job does not set it.\n{error}")
    try:
        from paddleformers_fc.trainer.entry import install_options

        install_options()
    except (ImportError, AttributeError) as missing:
        logger.warning(f"The keys of paddleformers_fc are unknown to this parser: {missing}")


if __name__ == "__main__":
    print(PATH)
elif __name__ != "paddleformers_fc.trainer.register":
    # Unset the variable meanwhile, because the user's file may run this one; set it again for later child processes.
    if (also_run := os.environ.pop(ALSO_RUN, None)) is not None:
        runpy.run_path(also_run, run_name=__name__)
        os.environ[ALSO_RUN] = also_run
    register()
