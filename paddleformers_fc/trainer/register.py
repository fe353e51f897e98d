"""The file for ``custom_register_path``: it teaches the stock ``paddleformers-cli`` flex checkpoints.

The command line runs it in every worker process, by its path and under another module's name, before it parses the
YAML. Its path, for the YAML, is printed by::

    python -m paddleformers_fc.trainer.register
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

PATH = Path(__file__).resolve()
"""What ``custom_register_path`` has to name."""


ERRORS = "PADDLEFORMERS_FC_ERRORS"
"""The environment variable that names a directory for the errors by which ranks end, as JSON."""


def register() -> None:
    """Let the stock Trainer and argument parser know ``flex_checkpoint``; on a CPU, mend Paddle for training."""
    from paddleformers_fc.runtime import activate
    from paddleformers_fc.trainer.install import install

    if ERRORS in os.environ:
        _leave_error_in(Path(os.environ[ERRORS]))
    activate()
    install()


def _leave_error_in(directory: Path) -> None:
    """Where this rank ends by an error of ours, leave it for whoever started the rank."""
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
