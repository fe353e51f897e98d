"""Entry point of ``paddleformers-fc`` and ``python -m paddleformers_fc``; handles Ctrl-C during imports."""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def _exit(signum: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    # Some imports turn KeyboardInterrupt into other errors. A hard exit is safe: nothing is written or buffered yet.
    replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaced:
        signal.signal(signal.SIGINT, _exit)
    from paddleformers_fc.cli.main import main as run

    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
