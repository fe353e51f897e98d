"""A process is called dead only where that is proved."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paddleformers_fc.storage import staging_lock
from paddleformers_fc.storage.staging_lock import (
    OWNER_NAME,
    Owner,
    ProcessState,
    process_state,
    read_owner,
    this_process,
    write_owner,
)
from tests.storage.support import a_dead_process, names_in

SAYS_WHO_IT_IS = """
import msgspec
from paddleformers_fc.storage.staging_lock import this_process
print(msgspec.json.encode(this_process()).decode(), flush=True)
input()
"""


def test_this_process_is_alive() -> None:
    assert process_state(this_process()) is ProcessState.ALIVE


def test_another_running_process_is_alive_until_it_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAYS_WHO_IT_IS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        other = msgspec.json.decode(process.stdout.readline(), type=Owner)
        assert other.pid == process.pid
        assert process_state(other) is ProcessState.ALIVE
        process.stdin.close()
        process.wait()
        assert process_state(other) is ProcessState.DEAD


def test_a_reused_process_number_is_not_the_process() -> None:
    assert process_state(msgspec.structs.replace(this_process(), started="1")) is ProcessState.DEAD


@pytest.mark.parametrize(
    "change", [{"boot": "another-boot"}, {"boot": ""}, {"namespace": "pid:[1]"}], ids=lambda change: next(iter(change))
)
def test_elsewhere_nothing_is_proved(change: dict[str, str]) -> None:
    assert process_state(msgspec.structs.replace(a_dead_process(), **change)) is ProcessState.UNKNOWN


def test_a_hidden_process_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = this_process()
    monkeypatch.setattr(staging_lock, "_started", lambda pid: "")
    assert process_state(recorded) is ProcessState.UNKNOWN


def test_a_process_that_may_not_be_signalled_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "kill", refuse)
    assert process_state(this_process()) is ProcessState.ALIVE


def test_a_program_name_with_spaces_and_parentheses_does_not_confuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = " ".join(str(number) for number in range(3, 53))
    monkeypatch.setattr(staging_lock, "_read", lambda path: f"1 (a ) b (c) {fields}\n")
    assert staging_lock._started(1) == "22"


def test_the_record_is_written_and_read(tmp_path: Path) -> None:
    write_owner(tmp_path)
    assert read_owner(tmp_path) == this_process()
    assert names_in(tmp_path) == [OWNER_NAME]
    assert this_process().pid == os.getpid()


@pytest.mark.parametrize("raw", [b"", b"{}", b"\xff", b'{"host": 1}', b'{"host": "\xff"}', b"[" * 100_000])
def test_an_unreadable_record_is_none(tmp_path: Path, raw: bytes) -> None:
    assert read_owner(tmp_path) is None
    (tmp_path / OWNER_NAME).write_bytes(raw)
    assert read_owner(tmp_path) is None


def test_a_process_that_has_ended_is_dead_though_its_parent_has_not_waited() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        started = stat.read_text().rpartition(")")[2].split()[19]
        here = staging_lock.this_process()
        it = staging_lock.Owner(here.host, process.pid, here.boot, here.namespace, started)
        assert staging_lock.process_state(it) is staging_lock.ProcessState.ALIVE
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert staging_lock.process_state(it) is staging_lock.ProcessState.DEAD
