"""The program: ``paddleformers-fc`` and ``python -m paddleformers_fc``, and Ctrl-C during its imports."""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def _exit(signum: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    # No output is buffered and no file is written yet; some imports turn KeyboardInterrupt into other errors.
    replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaced:
        signal.signal(signal.SIGINT, _exit)
    from paddleformers_fc.cli.main import main as run

    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
