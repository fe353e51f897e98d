"""A server that imports Paddle once and forks the ranks of many jobs.

Importing Paddle and PaddleFormers costs 2.5 s per rank; a fork of a process that has imported them costs milliseconds.
The server is a separate process, so that its user (pytest, the CLI) need not import Paddle and may have threads. It
runs one job at a time: N forked ranks, each with a new parallel environment, a log and a result file.

Protocol: one line of JSON per request on the server's standard input, one line per answer on a pipe; results are JSON
files. No pickle. An empty line ends a running job. The server and all its ranks end when its standard input is closed.
They also end at an empty line, because processes that its user has forked may keep that input open.

A forked rank is a copy of the server. The preloaded modules must not have computed anything on several threads, so the
server and its ranks run with one thread each.

Time: a job takes 20 ms, with a parallel environment of two ranks 0.15 s, beside its work. Memory: ranks share the pages
of the server, about 400 MB, until they write to them.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from paddleformers_fc import errors
from paddleformers_fc.cpu_runtime import ranks

PRELOAD = (
    "paddleformers_fc.cpu_runtime:activate",
    "paddleformers.trainer",
    "paddleformers.transformers",
    "paddleformers.transformers.llama.modeling",
    "paddleformers.transformers.ernie4_5_moe.modeling",
)
"""Default imports of a server; ``module:function`` entries are called as well."""

_ABANDON, _END = b"\n", b"end\n"


@dataclass(frozen=True)
class JobResult:
    """The outcome of a job of forked ranks.

    Args:
        values: the results of the job function by rank; None for a rank without a result or that failed.
        returncodes: by rank, negative for a signal.
        logs: by rank, output and errors of that rank.
        timed_out: the time was over before the last rank had ended.
        seconds: from the first fork to the last rank's end.
    """

    values: tuple[Any, ...]
    returncodes: tuple[int, ...]
    logs: tuple[Path, ...]
    timed_out: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Every rank returned."""
        return not any(self.returncodes)


class ForkServer:
    """Starts jobs of forked ranks; a context manager.

    Args:
        preload: modules to import before the first fork; ``module:function`` is called as well. The default imports
            PaddleFormers and activates the CPU runtime.
        directory: gets one directory of logs and results per job; a temporary one, removed at the end, by default.
        grace: seconds for the other ranks of a job to end by themselves once one has failed.
        patience: seconds for the server to start or to answer, and for a job that is given no time of its own.
        path: directories that only the server imports from, after all others.
        variables: of the server's environment, beside those of this process.
    """

    def __init__(
        self,
        preload: Sequence[str] = PRELOAD,
        directory: Path | None = None,
        grace: float = ranks.GRACE_SECONDS,
        patience: float = ranks.PATIENCE_SECONDS,
        path: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._grace = grace
        self._patience = patience
        self._preload = tuple(preload)
        self._path = tuple(path)
        self._variables = dict(variables or {})
        self._stack = ExitStack()
        self._directory = directory
        self._numbers = count(1)

    def __enter__(self) -> ForkServer:
        with ExitStack() as stack:
            self._root = self._directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forkserver-")))
            self._root.mkdir(parents=True, exist_ok=True)
            self._start(stack, self._root / "server.log")
            self._answer(self._patience)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def with_grace(self, grace: float) -> ForkServer:
        """Return this running server for jobs whose ranks have another time to end by themselves."""
        other = copy.copy(self)
        other._grace = grace
        return other

    def run(self, job: str, nproc: int, kwargs: Mapping[str, Any] | None = None) -> JobResult:
        """Run a job of which every rank is expected to return.

        Args:
            job: ``module:function``, importable by the server under this process' ``sys.path``.
            nproc: number of ranks.
            kwargs: keyword arguments of the function, JSON; the same on every rank.

        Raises:
            PeerError: a rank failed or hung; with the end of each rank's log, stacks of hung ranks included.
        """
        result = self.attempt(job, nproc, kwargs)
        if not result.ok:
            raise _failure(job, result)
        return result

    def attempt(
        self, job: str, nproc: int, kwargs: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> JobResult:
        """As :meth:`run`, for a job whose ranks may fail: the result lists them.

        All ranks are stopped after ``timeout`` seconds, by default those of the server's patience.

        An exception that interrupts the waiting (an interrupt, the time limit of a test) ends the job and prints the
        stacks of its ranks. The server then takes the next one.

        Raises:
            PeerError: the server itself has ended.
        """
        directory = self._root / f"job-{next(self._numbers):05d}"
        directory.mkdir()
        timeout = self._patience if timeout is None else timeout
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0].partition("[")[0]
        request = _Request(job, nproc, dict(kwargs or {}), timeout, self._grace, str(directory), test)
        self._ask(json.dumps(asdict(request)).encode() + b"\n")
        try:
            answer = self._answer(timeout + self._patience)
        except errors.PeerError:
            raise
        except BaseException:
            self._ask(_ABANDON)
            result = _result(request, self._answer(self._patience))
            print(_failure(job, result).render(), file=sys.stderr)
            raise
        return _result(request, answer)

    def _ask(self, line: bytes) -> None:
        try:
            self._requests.write(line)
            self._requests.flush()
        except OSError:
            raise self._gone() from None

    def _start(self, stack: ExitStack, log: Path) -> None:
        environment = {**os.environ, **self._variables}
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join([*(path for path in sys.path if path), *self._path])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verification.forkserver", *self._preload],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(log.open("wb")),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        stack.callback(self._stop)

    def _stop(self) -> None:
        """End the server, close its input, and wait for it."""
        with suppress(OSError):  # It has ended already.
            self._requests.write(_END)
            self._requests.flush()
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, timeout: float) -> dict[str, Any]:
        is_there = select.select([self._answers], [], [], timeout)[0]
        line = self._answers.readline() if is_there else b""
        if not line:
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self) -> errors.PeerError:
        log = self._root / "server.log"
        return errors.PeerError(
            "The fork server does not answer.",
            where=str(log),
            evidence=ranks.tail(log).splitlines(),
            next_step="Check that everything it preloads can be imported.",
        )


def _result(request: _Request, answer: Mapping[str, Any]) -> JobResult:
    directory = Path(request.directory)
    results = [_result_path(directory, rank) for rank in range(request.nproc)]
    return JobResult(
        values=tuple(json.loads(path.read_bytes()) if path.exists() else None for path in results),
        returncodes=tuple(answer["returncodes"]),
        logs=tuple(_log_path(directory, rank) for rank in range(request.nproc)),
        timed_out=answer["timed_out"],
        seconds=answer["seconds"],
    )


def _failure(job: str, result: JobResult) -> errors.PeerError:
    lines: list[str] = []
    for rank, (code, log) in enumerate(zip(result.returncodes, result.logs, strict=True)):
        lines.append(f"rank {rank} returned {code}; the end of {log}:")
        lines.extend(f"    {line}" for line in ranks.tail(log).splitlines())
    what = "ran out of time" if result.timed_out else "failed"
    return errors.PeerError(
        f"The job {job} {what} after {result.seconds:.1f} s.",
        evidence=lines,
        next_step="Read the log of the first rank that failed; the others were waiting for it.",
    )


def _log_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.log"


def _result_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


# ---- The server's side.


@dataclass(frozen=True)
class _Request:
    job: str
    nproc: int
    kwargs: dict[str, Any]
    timeout: float
    grace: float
    directory: str
    test: str


class _ForkedRank:
    """A child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class _ClientGone(Exception):
    """Standard input was closed in the middle of a job."""


class _Server:
    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._lines = os.fdopen(requests, "rb", closefd=False)
        self._lifeline_read, self._lifeline_write = os.pipe()

    def serve(self) -> None:
        while (line := self._lines.readline()) not in (b"", _END):
            if line != _ABANDON:  # That of a job whose answer was already under way.
                outcome = self._run(_Request(**json.loads(line)))
                self.answer(asdict(outcome))

    def answer(self, content: Mapping[str, Any]) -> None:
        os.write(self._answers, json.dumps(content).encode() + b"\n")

    def _run(self, request: _Request) -> ranks.JobOutcome:
        environments = ranks.rank_environments(request.nproc)
        processes = [self._fork(request, rank, environment) for rank, environment in enumerate(environments)]
        return ranks.supervise(processes, request.timeout, request.grace, self._is_abandoned)

    def _is_abandoned(self) -> bool:
        # While a job runs the client sends at most a line that ends it, so that an end of input is read at once.
        if not select.select([self._requests], [], [], 0)[0]:
            return False
        if self._lines.readline() in (b"", _END):
            raise _ClientGone
        return True

    def _fork(self, request: _Request, rank: int, environment: Mapping[str, str]) -> _ForkedRank:
        pid = os.fork()
        if pid:
            _lead_own_group(pid)
            return _ForkedRank(pid)
        code = 1
        try:
            self._become_rank(request, rank, environment)
            code = _run_job(request, rank)
        except BaseException:  # A forked rank must never come back into the server's code.
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _become_rank(self, request: _Request, rank: int, environment: Mapping[str, str]) -> None:
        _lead_own_group(0)
        log = os.open(_log_path(Path(request.directory), rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for descriptor in (log, nothing, self._requests, self._answers, self._lifeline_write):
            os.close(descriptor)
        os.environ.update(environment)
        _name_covered_lines(request.test)
        _begin_openmp()
        ranks.prepare_rank(self._lifeline_read)
        _forget_parallel_environment()


def _lead_own_group(pid: int) -> None:
    """Set the process group in parent and child, because either may run first."""
    with suppress(PermissionError, ProcessLookupError):  # The child has already done it, or has already ended.
        os.setpgid(pid, pid)


def _name_covered_lines(test: str) -> None:
    """Record the lines that this rank executes as those of a test, if coverage is measured."""
    coverage = sys.modules.get("coverage")
    covered = None if coverage is None else coverage.Coverage.current()
    if covered is not None:
        covered.switch_context(test)


def _begin_openmp() -> None:
    """Begin OpenMP if the CPU runtime is active, before there are threads: forked processes inherit none of
    OpenMP's."""
    device = sys.modules.get("paddleformers_fc.cpu_runtime.device")
    if device is not None:
        device.begin_openmp()


def _forget_parallel_environment() -> None:
    """Paddle caches the environment variables of the process that imported it, in two places."""
    for module, cache in (("parallel", "_global_parallel_env"), ("collective", "_global_env")):
        loaded = sys.modules.get(f"paddle.distributed.{module}")
        if loaded is not None:
            setattr(loaded, cache, None)


def _run_job(request: _Request, rank: int) -> int:
    value = _resolve(request.job)(**request.kwargs)
    path = _result_path(Path(request.directory), rank)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)
    ranks.leave()
    return 0


def _resolve(target: str) -> Any:
    """Return the function that ``module:function`` names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    """Serve standard input until it is closed; preload what the command line names."""
    requests, answers = os.dup(0), os.dup(1)
    # The output of imports and jobs belongs into the log, not into the answers.
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # It is a text file here.
    for target in sys.argv[1:]:
        if ":" in target:
            _resolve(target)()
        else:
            importlib.import_module(target)
    server = _Server(requests, answers)
    server.answer({"ready": True})
    with suppress(_ClientGone):
        server.serve()


if __name__ == "__main__":
    main()
