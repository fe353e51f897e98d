"""Run a Python script or module on N ranks of this machine.

``launch(["train.py", "--steps", "3"], nproc=2, ...)`` starts two processes with the environment that Paddle expects
for gloo, writes one log per rank, and returns when all have ended or one has failed. Ranks start through
:mod:`.rankmain`, so that they dump their stacks if they hang. No patch is applied here: the script, or the file of its
``custom_register_path``, calls :func:`paddleformers_fc.cpu_runtime.activate`.

This module does not import Paddle.

Time: starting Python and Paddle costs 1 s per rank and core, with PaddleFormers 2.5 s. Memory: 250 to 450 MB per
rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

from .. import errors
from . import ranks


def launch(
    argv: Sequence[str],
    nproc: int,
    log_dir: Path,
    timeout: float,
    env: Mapping[str, str] | None = None,
    echo: IO[str] | None = None,
    grace: float = ranks.GRACE_SECONDS,
    is_over: Callable[[], bool] = lambda: False,
    places: Sequence[Mapping[str, str]] | None = None,
) -> ranks.JobOutcome:
    """Run ``python argv`` on ``nproc`` local ranks and wait for them.

    Args:
        argv: a script and its arguments, or ``-m``, a module and its arguments.
        nproc: number of ranks, at least 1.
        log_dir: directory of ``rank-00000.log`` and so on; created if missing.
        timeout: seconds until all ranks are stopped.
        env: environment variables that override this process' and those of a rank.
        echo: a stream to which rank 0's output is copied while it runs.
        grace: seconds in which the other ranks may end by themselves after one has failed.
        is_over: polled while the ranks run; True ends them like the timeout.
        places: the rank variables of each process; by default those of local ranks over gloo.

    Raises:
        OptionError: ``nproc`` below 1 or an empty ``argv``.
    """
    if nproc < 1 or not argv:
        raise errors.OptionError(
            "A job needs at least one rank and something to run.",
            evidence=[f"nproc: {nproc}", f"argv: {list(argv)}"],
            next_step="Pass a script, or -m and a module, and nproc of 1 or more.",
        )
    log_dir.mkdir(parents=True, exist_ok=True)
    logs = tuple(log_dir / f"rank-{rank:05d}.log" for rank in range(nproc))
    lifeline_read, lifeline_write = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, lifeline_write)
        processes = [
            _start(argv, log, lifeline_read, {**os.environ, **placed, **(env or {})})
            for log, placed in zip(logs, places or ranks.rank_environments(nproc), strict=True)
        ]
        os.close(lifeline_read)
        log = stack.enter_context(logs[0].open("rb"))

        def forward() -> None:
            if echo is not None and (text := log.read()):
                echo.write(text.decode(errors="replace"))
                echo.flush()

        def each_poll() -> bool:
            forward()
            return is_over()

        outcome = ranks.supervise(processes, timeout, grace, each_poll)
        forward()
    return replace(outcome, logs=logs)


def _start(argv: Sequence[str], log: Path, lifeline: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", "paddleformers_fc.cpu_runtime.rankmain", str(lifeline), *argv]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[lifeline],
            start_new_session=True,
        )
