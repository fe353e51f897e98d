"""Jobs for ranks that need no Paddle: what the fork server does with what they return, raise or never finish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.harness.waiting import wait_for_file


def identity() -> dict[str, Any]:
    """Who the rank is."""
    names = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_RANK_IN_NODE", "PADDLE_DISTRI_BACKEND")
    return {
        "environment": {name: os.environ[name] for name in names},
        "leader": os.getpgrp() == os.getpid(),
    }


def fail_on(rank: int) -> str:
    """One rank raises, the others return."""
    if os.environ["PADDLE_TRAINER_ID"] == str(rank):
        raise RuntimeError("the reactor is on fire")
    return "fine"


def die_on(rank: int, waiting: str) -> None:
    """One rank of two kills itself as soon as the other waits, for ever, which it shows by a file."""
    if os.environ["PADDLE_TRAINER_ID"] == str(rank):
        wait_for_file(Path(waiting))
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_a_sign_that_never_comes(Path(waiting))


def hang_with_a_child(pid_file: str) -> None:
    """Start a process of one's own and wait for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    wait_for_a_sign_that_never_comes(Path(pid_file), str(child.pid))


def wait_for_a_sign_that_never_comes(shown: Path, text: str = "") -> None:
    """Hang, in a function whose name can be found in a stack; a file shows that it has come here."""
    unfinished = shown.with_name(f"{shown.name}-{os.getpid()}")
    unfinished.write_text(text)
    unfinished.rename(shown)
    threading.Event().wait()


def unsayable() -> object:
    """A value that JSON cannot hold."""
    return object()


def loud(lines: int) -> None:
    """Write to both outputs."""
    for number in range(lines):
        print(f"line {number}")
    print("to standard error", file=sys.stderr)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    calls = {
        "print": lambda: print(identity(), flush=True),
        "loud": lambda: loud(int(arguments[0])),
        "fail": lambda: fail_on(int(arguments[0])),
        "die": lambda: die_on(int(arguments[0]), arguments[1]),
        "hang": lambda: hang_with_a_child(arguments[0]),
    }
    calls[command]()


def crash() -> None:
    """End as a fault in a library's own code ends a process, with extension modules loaded."""
    import ctypes

    import numpy as np

    ctypes.string_at(np.int64(0).item())
