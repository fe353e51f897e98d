"""The main program of a launched rank.

``python -m paddleformers_fc.cpu_runtime.rankmain LIFELINE (SCRIPT | -m MODULE) ARGS...`` sets up stack dumps and the
life line to the launcher (:mod:`.ranks`), then runs the script like ``python SCRIPT ARGS...``. After its script has
succeeded, a rank waits until the other ranks have finished.
"""

from __future__ import annotations

import os
import runpy
import sys

from . import ranks


def main() -> None:
    """Prepare this process as a rank, then run the rest of the command line as ``__main__``."""
    lifeline, *command = sys.argv[1:]
    ranks.prepare_rank(int(lifeline))
    try:
        _run(command)
    except SystemExit as end:
        if end.code in (None, 0, ranks.SAVED_ON_SIGNAL):
            ranks.leave()
        raise
    ranks.leave()


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
