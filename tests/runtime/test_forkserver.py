"""The fork server: values come back, failures are told, nothing is left running."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddleformers_fc.errors import PeerError
from paddleformers_fc.runtime.forkserver import ForkServer

JOBS = "tests.runtime.jobs_plain"


@pytest.fixture(scope="module")
def plain() -> Iterator[ForkServer]:
    """A server that preloads nothing."""
    with ForkServer(preload=()) as server:
        yield server


def has_ended(pid: int, deadline_seconds: float = 10) -> bool:
    """Whether a process ends, or has ended, before the deadline; a zombie has ended."""
    end = time.monotonic() + deadline_seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def wait_for_file(path: Path, deadline_seconds: float = 20) -> str:
    """The content of a file as soon as it exists."""
    end = time.monotonic() + deadline_seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.01)
    return path.read_text()


def test_every_rank_returns_its_own_value(plain: ForkServer) -> None:
    result = plain.run(f"{JOBS}:identity", 3, {"number": 7, "text": "ä", "list": [1, None, 2.5]})
    for rank, value in enumerate(result.values):
        assert value["given"] == {"number": 7, "text": "ä", "list": [1, None, 2.5]}
        assert value["leader"]
        assert value["environment"] == {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "3",
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
    assert result.ok
    assert result.returncodes == (0, 0, 0)


def test_ranks_of_a_job_share_an_address_that_other_jobs_do_not_have(plain: ForkServer) -> None:
    first, second = plain.run(f"{JOBS}:master", 2).values, plain.run(f"{JOBS}:master", 2).values
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second


def test_a_rank_that_fails_is_named_with_its_traceback(plain: ForkServer) -> None:
    with pytest.raises(PeerError) as caught:
        plain.run(f"{JOBS}:fail_on", 2, {"rank": 1})
    assert f"The job {JOBS}:fail_on failed" in caught.value.what
    text = "\n".join(caught.value.evidence)
    assert "rank 0 returned 0" in text
    assert "rank 1 returned 1" in text
    assert "RuntimeError: the reactor is on fire" in text


def test_an_attempt_tells_who_failed_and_keeps_what_the_others_returned(plain: ForkServer) -> None:
    result = plain.attempt(f"{JOBS}:fail_on", 2, {"rank": 0})
    assert result.returncodes == (1, 0)
    assert result.values == (None, "fine")
    assert not result.ok
    assert not result.timed_out
    assert "reactor" in result.logs[0].read_text()


def test_a_value_that_is_no_json_is_a_failure(plain: ForkServer) -> None:
    with pytest.raises(PeerError, match="is not JSON serializable"):
        plain.run(f"{JOBS}:unsayable", 1)


def test_hung_ranks_show_their_stacks_and_take_their_children_along(plain: ForkServer, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = plain.attempt(f"{JOBS}:hang_with_a_child", 1, {"pid_file": str(pid_file)}, timeout=2)
    assert result.timed_out
    assert result.returncodes == (-9,)
    assert "wait_for_a_sign_that_never_comes" in result.logs[0].read_text()
    assert has_ended(int(pid_file.read_text()))


def test_a_killed_rank_does_not_leave_the_others_hanging() -> None:
    with ForkServer(preload=(), grace=0.2) as server:
        result = server.attempt(f"{JOBS}:die_on", 2, {"rank": 1})
    assert result.returncodes == (-9, -9)
    assert not result.timed_out
    assert result.seconds < 5


def test_logs_hold_both_outputs(plain: ForkServer) -> None:
    log = plain.run(f"{JOBS}:loud", 1, {"lines": 3}).logs[0].read_text()
    assert log.splitlines() == ["line 0", "line 1", "line 2", "to standard error"]


def test_a_server_that_cannot_preload_says_why() -> None:
    with pytest.raises(PeerError, match="No module named 'no_such_module'"), ForkServer(preload=["no_such_module"]):
        raise AssertionError("it started")


def test_ranks_end_with_the_server_and_the_server_with_its_client(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    client = os.fork()
    if client == 0:
        try:
            with ForkServer(preload=()) as server:
                server.attempt(f"{JOBS}:hang_with_a_child", 1, {"pid_file": str(pid_file)}, timeout=600)
        finally:
            os._exit(1)
    child = int(wait_for_file(pid_file))
    os.kill(client, 9)
    os.waitpid(client, 0)
    assert has_ended(child)
