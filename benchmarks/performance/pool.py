"""A pool of ranks that wait for commands: started once per case, so that a round costs no start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from paddleformers_fc.cpu_runtime.ranks import rank_environments, tail


@dataclass(frozen=True)
class Round:
    """One command, carried out by all ranks.

    Args:
        seconds: from the command to the last rank's answer.
        answers: by rank.
    """

    seconds: float
    answers: tuple[dict[str, Any], ...]


class Pool:
    """So many ranks of one kind; a context manager.

    Args:
        module: what they run, such as ``benchmarks.performance.with_paddle``.
        ranks: how many.
        logs: a directory for what they print.
    """

    def __init__(self, module: str, ranks: int, logs: Path) -> None:
        self._module, self._ranks, self._logs = module, ranks, logs
        self._processes: list[subprocess.Popen[str]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Pool:
        self._logs.mkdir(parents=True, exist_ok=True)
        for rank, placed in enumerate(rank_environments(self._ranks)):
            log = self._stack.enter_context(self._log(rank).open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                env={**os.environ, **placed, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._stack.close()

    def run(self, **command: Any) -> Round:
        """Give a command to all ranks, and wait for all.

        Raises:
            RuntimeError: a rank failed or ended.
        """
        line = json.dumps(command) + "\n"
        started = time.perf_counter()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write(line)
                process.stdin.flush()
        lines = [process.stdout.readline() if process.stdout is not None else "" for process in self._processes]
        seconds = time.perf_counter() - started
        answers = []
        for rank, text in enumerate(lines):
            answer = json.loads(text) if text else {"error": f"the rank has ended\n{tail(self._log(rank))}"}
            if "error" in answer:
                raise RuntimeError(f"{self._module}, rank {rank}, {command}:\n{answer['error']}")
            answers.append(answer)
        return Round(seconds, tuple(answers))

    def _log(self, rank: int) -> Path:
        return self._logs / f"{self._module.rpartition('.')[2]}-{rank}.log"
