"""The file for ``custom_register_path``: adds flex checkpoints to the stock ``paddleformers-cli``.

The command line runs it in every worker process, by its path and under another module name, before it parses the YAML.
This command prints the path for the YAML::

    python -m paddleformers_fc.trainer.register
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType

PATH = Path(__file__).resolve()
"""What ``custom_register_path`` has to name."""


ERRORS = "PADDLEFORMERS_FC_ERRORS"
"""The environment variable that names a directory for the errors by which ranks end, as JSON."""


def register() -> None:
    """Add ``flex_checkpoint`` to the stock Trainer and argument parser; on a CPU, patch Paddle for training.

    If Paddle or PaddleFormers differs from the tested versions, a job without flex checkpoints continues
    without this package, with a warning.

    Raises:
        EnvironmentMismatch: that is so, and the job may ask for flex checkpoints.
    """
    from paddleformers_fc import upstream
    from paddleformers_fc.cpu_runtime import activate, needed
    from paddleformers_fc.errors import EnvironmentMismatch

    if ERRORS in os.environ:
        _leave_error_in(Path(os.environ[ERRORS]))
    try:
        upstream.require((*upstream.TRAINER, *upstream.COMMAND_LINE, *needed()))
    except EnvironmentMismatch as error:
        if _may_ask_for_flex():
            raise
        _go_on_without(error)
        return
    activate()
    from paddleformers_fc.trainer.install import install

    install()


def _may_ask_for_flex() -> bool:
    """Whether ``flex_checkpoint`` may be true in this job; False only if its command line and YAML show otherwise."""
    if sys.argv[1:2] != ["train"]:
        return True
    try:
        from paddleformers.cli.hparams.parser import read_args

        settings = read_args()
    except Exception:  # The command line reports what is wrong with its own arguments.
        return True
    return not isinstance(settings, dict) or settings.get("flex_checkpoint") not in (None, False)


def _go_on_without(error: Exception) -> None:
    """Leave PaddleFormers as it is, but for what fits: the CPU runtime, and a parser that accepts our keys."""
    from paddleformers.utils.log import logger

    from paddleformers_fc.cpu_runtime import activate
    from paddleformers_fc.errors import EnvironmentMismatch

    with contextlib.suppress(EnvironmentMismatch):  # The error lists what it would say.
        activate()
    logger.warning(f"flex_checkpoint: true is refused in this environment; this job does not ask for it.\n{error}")
    try:
        from paddleformers_fc.trainer.install import install_options

        install_options()
    except (ImportError, AttributeError) as missing:
        logger.warning(f"The keys of paddleformers_fc are unknown to this parser: {missing}")


def _leave_error_in(directory: Path) -> None:
    """If this rank ends with an error of this package, write it for the starter of the rank."""
    from paddleformers_fc.errors import FlexError

    previous = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found: BaseException | None = error
        while found is not None and not isinstance(found, FlexError):
            found = found.__cause__ or found.__context__  # PaddleFormers wraps some errors.
        if found is not None:
            rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
            (directory / f"rank-{rank:05d}.error.json").write_text(found.to_wire(), encoding="utf-8")
        previous(kind, error, trace)

    sys.excepthook = leave


if __name__ == "__main__":
    print(PATH)
elif __name__ != "paddleformers_fc.trainer.register":
    register()
