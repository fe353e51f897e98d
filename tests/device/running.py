"""Ranks whose tensors live on the device under test.

The fake accelerator runs under the fork server of all tests, with the CPU runtime over gloo, because most of its
kernels are the CPU's. A real one cannot be forked after Paddle is imported, and has collectives of its own: its ranks
are started as new processes, one device each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest

from paddleformers_fc.cpu_runtime.launch import launch
from tests.device.counting import FAKE_LIBRARY
from tests.harness.compiling import CannotCompile, shared_library
from tests.harness.fixtures import FREEZE, OURS, PATIENT, WARM
from tests.harness.limits import LIMIT
from verification.forkserver import ForkServer, JobResult

VARIABLE = "FLEX_TEST_DEVICE"
FAKE = "fake_device"

_PREPARE = "tests.device.running:prepare"
_PRELOAD = (_PREPARE, *PATIENT, *OURS, WARM, FREEZE)


def device() -> str:
    """Return the name of the device under test, as Paddle and the key ``device`` of a training have it."""
    return os.environ.get(VARIABLE, FAKE)


def prepare() -> None:
    """In a server that will fork ranks: make the CPU Paddle's device, without which no CPU runtime is activated."""
    import paddle

    from tests.device import through_host

    paddle.set_device("cpu")
    through_host.apply()


class Ranks(Protocol):
    """Starts jobs, as :class:`ForkServer` does."""

    def run(self, job: str, nproc: int, kwargs: Mapping[str, Any] | None = None) -> JobResult: ...

    def attempt(self, job: str, nproc: int, kwargs: Mapping[str, Any] | None = None) -> JobResult: ...


@contextmanager
def device_ranks(directory: Path) -> Iterator[Ranks]:
    """Start jobs on the device under test; skip the test, with the reason, where this machine has none.

    Args:
        directory: for logs and results of ranks that are new processes.
    """
    if device() != FAKE:
        devices = _device_count()
        if not devices:
            pytest.skip(f"no {device()}: this Paddle has no CUDA, or finds no device")
        yield NewProcesses(directory, devices)
        return
    try:
        library = fake_device()
    except CannotCompile as reason:
        pytest.skip(f"no fake accelerator: {reason}")
    with ForkServer(_PRELOAD, variables={"CUSTOM_DEVICE_ROOT": str(library.parent)}) as server:
        yield server


def fake_device() -> Path:
    """Return the library of the fake accelerator, which is compiled in 20 s where it is not there yet.

    Raises:
        CannotCompile: no compiler.
    """
    paddle = Path(str(find_spec("paddle").origin)).parent
    headers = [f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}"]
    options = ["-O1", "-std=c++17", "-w", f"-DFOR_PADDLE={version('paddlepaddle')}", *headers]
    sources = sorted(Path(__file__).with_name("plugin").iterdir())
    return shared_library(FAKE_LIBRARY, "g++", sources, [*options, str(paddle / "base" / "libpaddle.so")])


def _device_count() -> int:
    """The devices that Paddle finds, in a new process: a process that has used CUDA must not be forked."""
    code = "import paddle; print(paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0)"
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    return 0 if found.returncode else int(found.stdout.split()[-1])


class NewProcesses:
    """Starts every rank of a job as a process of its own, on a device of its own.

    Args:
        directory: gets one directory of logs and results per job.
        devices: how many there are; the test of a job that needs more is skipped.
    """

    def __init__(self, directory: Path, devices: int) -> None:
        self._directory = directory
        self._devices = devices
        self._jobs = 0

    def run(self, job: str, nproc: int, kwargs: Mapping[str, Any] | None = None) -> JobResult:
        """Run a job of which every rank is expected to return."""
        result = self.attempt(job, nproc, kwargs)
        assert result.ok, "\n".join(log.read_text(errors="replace")[-6000:] for log in result.logs)
        return result

    def attempt(self, job: str, nproc: int, kwargs: Mapping[str, Any] | None = None) -> JobResult:
        """Run a job whose ranks may fail."""
        if nproc > self._devices:
            pytest.skip(f"{nproc} devices are needed, {self._devices} found")
        self._jobs += 1
        directory = self._directory / f"job-{self._jobs}"
        argv = ["-m", "tests.device.running", job, json.dumps(dict(kwargs or {})), str(directory)]
        outcome = launch(argv, nproc, directory, LIMIT, {"PADDLE_DISTRI_BACKEND": "nccl"})
        paths = [directory / f"rank-{rank}.json" for rank in range(nproc)]
        values = tuple(json.loads(path.read_text()) if path.exists() else None for path in paths)
        return JobResult(values, outcome.returncodes, outcome.logs, False, outcome.seconds)


def main() -> None:
    """Be one rank of :class:`NewProcesses`."""
    job, kwargs, directory = sys.argv[1:]
    rank = os.environ["PADDLE_TRAINER_ID"]
    os.environ.update({"FLAGS_selected_gpus": rank})
    module, _, name = job.partition(":")
    value = getattr(__import__(module, fromlist=[name]), name)(**json.loads(kwargs))
    (Path(directory) / f"rank-{rank}.json").write_text(json.dumps(value))


if __name__ == "__main__":
    main()
