"""The main program of a launched rank.

``python -m paddleformers_fc.cpu_runtime.rankmain LIFELINE (SCRIPT | -m MODULE) ARGS...`` prepares stack dumps and the
end of the rank when its launcher vanishes (:mod:`.ranks`), and then becomes the script, as with ``python SCRIPT
ARGS...``. A rank whose script has succeeded stays until the other ranks are done.
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
        _become(command)
    except SystemExit as end:
        if end.code in (None, 0, ranks.SAVED_ON_SIGNAL):
            ranks.leave()
        raise
    ranks.leave()


def _become(command: list[str]) -> None:
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
