"""The fork server: values come back, failures are reported, nothing is left running."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddleformers_fc.errors import PeerError
from tests.harness.limits import LIMIT
from tests.harness.waiting import wait_for_end, wait_for_file
from verification.forkserver import ForkServer

JOBS = "tests.cpu_runtime.jobs_plain"


@pytest.fixture(scope="module")
def plain() -> Iterator[ForkServer]:
    """A server that preloads nothing."""
    with ForkServer(preload=()) as server:
        yield server


@pytest.mark.parametrize(
    ("job", "given", "lines"),
    [
        ("fail_on", {"rank": 1}, ["rank 0 returned 0", "rank 1 returned 1", "RuntimeError: the reactor is on fire"]),
        ("crash", {}, [f"rank 0 returned -{signal.SIGSEGV:d}", "in crash"]),
        ("unsayable", {}, ["is not JSON serializable"]),
    ],
)
def test_failed_ranks_are_shown_with_logs(plain: ForkServer, job: str, given: dict[str, int], lines: list[str]) -> None:
    with pytest.raises(PeerError) as caught:
        plain.run(f"{JOBS}:{job}", 2, given)
    assert f"The job {JOBS}:{job} failed" in caught.value.what
    text = "\n".join(caught.value.evidence)
    assert [line for line in lines if line not in text] == []
    assert "Extension modules" not in text  # Those that a crashed rank has loaded.


def test_an_interrupted_job_shows_stacks(plain: ForkServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pid_file = tmp_path / "pid"

    def interrupt() -> None:
        wait_for_file(pid_file)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            plain.attempt(f"{JOBS}:hang_with_a_child", 2, {"pid_file": str(pid_file)})
    finally:
        signal.signal(signal.SIGINT, before)
        watcher.join(LIMIT)
    wait_for_end(int(pid_file.read_text()))
    assert "wait_for_a_sign_that_never_comes" in capfd.readouterr().err
    assert plain.run(f"{JOBS}:fail_on", 2, {"rank": 7}).values == ("fine", "fine")


def test_a_server_that_cannot_preload_reports_the_reason() -> None:
    with pytest.raises(PeerError, match="No module named 'no_such_module'"), ForkServer(preload=["no_such_module"]):
        raise AssertionError("it started")


def test_ranks_end_with_the_server_and_the_server_with_its_client(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    client = os.fork()
    if client == 0:
        try:
            with ForkServer(preload=()) as server:
                server.attempt(f"{JOBS}:hang_with_a_child", 1, {"pid_file": str(pid_file)})
        finally:
            os._exit(1)
    child = int(wait_for_file(pid_file))
    os.kill(client, 9)
    os.waitpid(client, 0)
    wait_for_end(child)
