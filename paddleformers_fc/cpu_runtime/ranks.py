"""Start and supervise ranks on this machine: environment, ports, supervision, life line.

A job is a set of rank processes, each the leader of its own process group with its own log. The supervisor polls them
until all have ended. If one fails, the others have a few seconds to fail on their own, because their error messages are
useful. After that, or on a timeout, each writes its Python stacks to its log and ends (SIGUSR1), and the rest of its
process group is killed. Every rank has the read end of a pipe, the life line, whose write end only the parent has: if
the parent dies, its ranks end.

This module imports only the standard library.

Time: one ``waitpid`` per rank every 20 ms.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PATIENCE_SECONDS = 1800.0
"""Time after which a process that another one waits for counts as hung. All timeouts of the CPU runtime are at least
this long, because a loaded machine is many times slower."""

POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0
FORWARDED_SECONDS = 30.0
"""Time for ranks to end after a forwarded signal, as under ``paddle.distributed.launch``."""

DUMP_SECONDS = 60.0
TIMED_OUT = 124
SAVED_ON_SIGNAL = 85
"""The exit code of a rank that has saved on a signal. No shell, signal or sysexits.h uses it."""
_GOOD = (None, 0, SAVED_ON_SIGNAL)
"""The return codes of ranks that have not failed."""

_TAIL_BYTES = 12_000
_MODULES = b"Extension modules: "
"""The last line of Python's crash reports: 6 kB of module names after the stacks."""

_PORTS = range(12000, 32000)


class RankProcess(Protocol):
    """A rank: its process id, which is also its process group, and its return code after its end."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of the ranks of a job.

    Args:
        returncodes: codes by rank; negative for a signal, as in :mod:`subprocess`.
        timed_out: whether the timeout ended the job.
        seconds: from the first rank's start to the last one's end.
        alone: the ranks that the supervisor did not end, in the order in which they ended, as far as it is known.
        logs: logs by rank, with standard output and errors; empty if ranks write no logs.
    """

    returncodes: tuple[int, ...]
    timed_out: bool
    seconds: float
    alone: tuple[int, ...] = ()
    logs: tuple[Path, ...] = ()

    @property
    def returncode(self) -> int:
        """0 if all ranks returned 0, 124 after a timeout, else the first failure's code (128 + n for signal n)."""
        if self.timed_out:
            return TIMED_OUT
        failed = next((code for code in self.returncodes if code != 0), 0)
        return failed if failed >= 0 else 128 - failed

    def report(self) -> str:
        """Return the last lines of every failed rank's log (after a timeout, of all), or the codes without logs."""
        if not self.logs:
            return f"codes by rank: {', '.join(map(str, self.returncodes))}"
        ended = enumerate(zip(self.returncodes, self.logs, strict=True))
        return "\n".join(f"--- rank {rank} (code {code}): {log}\n{tail(log)}" for rank, (code, log) in ended if code)


def free_ports(count: int) -> list[int]:
    """Return ``count`` different free ports of the loopback interface.

    The ports are below the system's range for outgoing connections, so that no connection takes one before it is bound.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found


def rank_environments(nproc: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank of a new local job, by rank.

    These are the variables of ``paddle.distributed.launch`` with the gloo backend, and others that PaddleFormers reads.
    """
    *ports, master = free_ports(nproc + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    shared = {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "PADDLE_TRAINERS_NUM": str(nproc),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_LOCAL_SIZE": str(nproc),
        "PADDLE_GLOBAL_SIZE": str(nproc),
        "FLAGS_stop_check_timeout": f"{PATIENCE_SECONDS:.0f}",
    }
    if nproc > 1:
        shared |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return [
        shared
        | {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_GLOBAL_RANK": str(rank),
            "FLAGS_selected_cpus": str(rank),
        }
        for rank, endpoint in enumerate(endpoints)
    ]


def supervise(
    processes: Sequence[RankProcess], timeout: float, grace: float, each_poll: Callable[[], bool | None] = lambda: None
) -> JobOutcome:
    """Wait until all ranks have ended, one has failed, or the timeout is over. Then end all processes of the job.

    Args:
        processes: the started ranks, by rank.
        timeout: seconds for the complete job.
        grace: seconds in which the other ranks may end by themselves after one has failed.
        each_poll: called every 20 ms. True ends the job like the timeout. An exception ends the job and is raised
            again.
    """
    start = time.monotonic()
    deadline = start + timeout
    failed_at: float | None = None
    alone: list[int] = []
    try:
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            alone += _newly_ended(processes, alone)
            if now > deadline or (failed_at is not None and now > failed_at + grace):
                break
            if failed_at is None and any(process.poll() not in _GOOD for process in processes):
                failed_at = now
            if each_poll():
                break
            time.sleep(POLL_SECONDS)
    except BaseException:
        kill(processes)
        raise
    alone += _newly_ended(processes, alone)
    hung = [process for rank, process in enumerate(processes) if rank not in alone]
    end_with_stacks(hung)
    kill(processes)
    codes = [process.poll() for process in processes]
    return JobOutcome(
        returncodes=tuple(
            code if code is not None and rank in alone else -signal.SIGKILL for rank, code in enumerate(codes)
        ),
        timed_out=bool(hung) and failed_at is None,
        seconds=time.monotonic() - start,
        alone=tuple(alone),
    )


def _newly_ended(processes: Sequence[RankProcess], known: Sequence[int]) -> list[int]:
    """Return newly ended ranks, killed ones first: they are the cause, because no rank is killed by another's end."""
    ended = {rank: code for rank, one in enumerate(processes) if rank not in known and (code := one.poll()) is not None}
    return sorted(ended, key=lambda rank: ended[rank] != -signal.SIGKILL)


def end_with_stacks(processes: Sequence[RankProcess]) -> None:
    """Make each rank write its Python stacks to its log and end, and wait for that at most a minute."""
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
    end = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def kill(processes: Sequence[RankProcess]) -> None:
    """Kill every rank's process group, even if its leader has ended, and wait for the leaders."""
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # The process group has ended.
    while any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def prepare_rank(lifeline: int) -> None:
    """Prepare a new rank: on SIGUSR1 dump stacks and end; when the life line closes, kill its process group.

    Args:
        lifeline: file descriptor of the pipe's read end.
    """
    faulthandler.enable()
    # Chain to the default action, so that the process ends after all stacks are written.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)

    def watch() -> None:
        os.read(lifeline, 1)  # Nothing is ever written, so this returns when the parent has died.
        os.killpg(os.getpgrp(), signal.SIGKILL)  # This rank and its children.

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def leave() -> None:
    """Call :func:`paddleformers_fc.cpu_runtime.p2p.leave` at the end of a rank, if that module is in use."""
    p2p = sys.modules.get("paddleformers_fc.cpu_runtime.p2p")
    if p2p is not None:
        p2p.leave()


def tail(log: Path) -> str:
    """Return the end of a rank's log, about 12 kB of text; empty if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2 * _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return ""
    return b"".join(line for line in lines if not line.startswith(_MODULES))[-_TAIL_BYTES:].decode(errors="replace")
