"""The launcher: scripts and modules on several ranks, with logs, deadlines and nothing left running."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paddleformers_fc.cpu_runtime import ranks as supervision
from paddleformers_fc.cpu_runtime.launch import launch
from paddleformers_fc.errors import OptionError
from tests.harness.limits import LIMIT
from tests.harness.waiting import reached, wait_for_end, wait_for_file

MODULE = ["-m", "tests.cpu_runtime.jobs_plain"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def test_a_module_runs_once_per_rank_with_a_log_each(tmp_path: Path) -> None:
    result = launch([*MODULE, "print"], 2, tmp_path / "logs", timeout=LIMIT)
    assert (result.returncode, result.returncodes) == (0, (0, 0))
    for rank, log in enumerate(result.logs):
        assert log == tmp_path / "logs" / f"rank-{rank:05d}.log"
        assert f"'PADDLE_TRAINER_ID': '{rank}'" in log.read_text()
        assert "'leader': True" in log.read_text()
    assert result.report() == ""


def test_settings_of_the_caller_reach_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MINE'])")
    result = launch([str(script)], 2, tmp_path, timeout=LIMIT, env={"MINE": "yes"})
    assert [log.read_text() for log in result.logs] == ["1 yes\n"] * 2


def test_rank_zero_is_heard_while_it_runs(tmp_path: Path) -> None:
    heard = io.StringIO()
    launch([*MODULE, "loud", "2"], 2, tmp_path, timeout=LIMIT, echo=heard)
    assert heard.getvalue().splitlines() == ["line 0", "line 1", "to standard error"]


def test_a_failed_rank_decides_the_return_code_and_is_reported(tmp_path: Path) -> None:
    result = launch([*MODULE, "fail", "1"], 2, tmp_path, timeout=LIMIT)
    assert (result.returncode, result.returncodes) == (1, (0, 1))
    assert "--- rank 1 (code 1)" in result.report()
    assert "the reactor is on fire" in result.report()
    assert "--- rank 0" not in result.report()


def test_a_killed_rank_does_not_leave_the_others_hanging(tmp_path: Path) -> None:
    result = launch([*MODULE, "die", "0", str(tmp_path / "waiting")], 2, tmp_path, timeout=LIMIT, grace=0.2)
    assert result.returncodes == (-9, -9)
    assert result.alone == (0,)
    assert result.returncode == 128 + signal.SIGKILL
    assert "wait_for_a_sign_that_never_comes" in result.logs[1].read_text()


def test_a_deadline_ends_ranks_with_their_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def start(seconds: float) -> None:
        result = launch([*MODULE, "hang", str(pid_file)], 1, tmp_path, timeout=seconds)
        assert (result.returncode, result.returncodes) == (124, (-9,))

    reached(start, pid_file)
    assert "wait_for_a_sign_that_never_comes" in (tmp_path / "rank-00000.log").read_text()
    wait_for_end(int(pid_file.read_text()))


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import os; from pathlib import Path; from paddleformers_fc.cpu_runtime.launch import launch; "
        f"launch({[*MODULE, 'hang', str(pid_file)]!r}, 1, Path({str(tmp_path)!r}), {LIMIT})"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program])
    child = int(wait_for_file(pid_file))
    rank = int(Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1])
    launcher.kill()
    launcher.wait()
    wait_for_end(rank)
    wait_for_end(child)


@pytest.mark.parametrize(("argv", "nproc"), [([], 1), (["train.py"], 0)])
def test_a_job_without_ranks_or_without_work_is_refused(tmp_path: Path, argv: list[str], nproc: int) -> None:
    with pytest.raises(OptionError):
        launch(argv, nproc, tmp_path / "logs", timeout=LIMIT)
    assert not (tmp_path / "logs").exists()


def test_return_codes_of_signals_are_those_of_a_shell() -> None:
    for codes, timed_out, code in (((0, -15), False, 143), ((0, 3), False, 3), ((-9,), True, 124)):
        assert supervision.JobOutcome(codes, timed_out, 1.0).returncode == code


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = supervision.free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
