"""``train`` starts PaddleFormers' own command line with this package registered, and nothing else changed."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddleformers_fc import upstream
from paddleformers_fc.cli import training
from paddleformers_fc.cli.training import LogView, prepare
from paddleformers_fc.cpu_runtime.ranks import JobOutcome
from paddleformers_fc.errors import OptionError
from paddleformers_fc.output import console
from paddleformers_fc.trainer import register
from paddleformers_fc.trainer.rank_records import RECORDS, RankRecord, read_records
from tests.cli.support import Outcome, config, run, save
from tests.execute.simulated import canonical
from tests.harness.on_ranks import on_ranks
from tests.harness.waiting import wait_for_end, wait_until
from verification.demo.assets import prepare as prepare_assets
from verification.demo.settings import SINGLE, settings

OURS = f"custom_register_path={register.PATH}"
LOCAL = ("-m", "paddleformers.cli.launcher", "train", "YAML", "max_steps=3")
HANDED_OVER = ("-m", "paddleformers.cli.cli", "train", "YAML", "max_steps=3")
BIN = str(Path(sys.executable).parent)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let Paddle find this device when it is asked."""

    def use(device: str) -> None:
        monkeypatch.setattr(training, "local_device", lambda: device)

    use("cpu")
    return use


OWN_REGISTRATION = """
import runpy

from paddleformers.trainer import Trainer
from paddleformers_fc.trainer import register

seen = Trainer.__init__
Trainer.own_registration = lambda: (__name__, seen)
runpy.run_path(register.PATH)  # A file that registers this package itself does the same.
"""


@on_ranks(1)
def test_the_files_registration_runs_before_ours(tmp_path: Path) -> None:
    from paddleformers.cli.hparams import parser
    from paddleformers.trainer import Trainer

    (tmp_path / "own.py").write_text(OWN_REGISTRATION)
    os.environ[register.ALSO_RUN] = str(tmp_path / "own.py")
    native = Trainer.__init__
    parser._load_custom_template(str(register.PATH))
    assert Trainer.own_registration() == ("custom_template", native)
    assert Trainer.__init__ is not native


def script_job(directory: Path, text: str, ranks: int | None = 1, **facts: Any) -> training.TrainingJob:
    """A job whose processes run a script in place of PaddleFormers, whose import takes seconds."""
    (directory / "script.py").write_text(text)
    log_dir = str(directory / "out/log")
    command = (sys.executable, str(directory / "script.py"))
    return training.TrainingJob(command, ranks, {RECORDS: log_dir}, log_dir, True, str(directory / "out"), **facts)


def test_a_job_that_was_handed_over_returns_its_code(tmp_path: Path) -> None:
    for text, code in (("print('here'); exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        echo = io.StringIO()
        ended, _ = training.run(script_job(tmp_path, text, None), echo)
        assert (ended.returncode, ended.signalled, "here" in echo.getvalue()) == (code, (), code == 7)


def test_a_stopped_launcher_is_ended_with_the_ranks_that_it_leaves(tmp_path: Path) -> None:
    rank = "import os, signal; from paddleformers_fc.trainer.rank_records import update_record; "
    rank += "os.setsid(); update_record(process=os.getpid()); os.kill(int(os.environ['COMMAND']), signal.SIGTERM); "
    launcher = "import os, subprocess, sys; os.environ['COMMAND'] = str(os.getppid())\n"
    launcher += f"subprocess.run([sys.executable, '-c', {rank + 'signal.pause()'!r}])"
    ended, error = training.run(script_job(tmp_path, launcher, None), io.StringIO())
    assert (ended.returncode, ended.stopped_by, error) == (143, "SIGTERM", None)
    (record,) = read_records(tmp_path / "out/log")
    wait_for_end(int(str(record.process)))


def test_a_process_that_has_the_id_of_a_rank_that_has_ended_gets_no_signal(tmp_path: Path) -> None:
    job = script_job(tmp_path, "pass", None, save_signal="SIGTERM")
    Path(job.log_dir).mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other:
        record = RankRecord(process=other.pid, listens=True)
        (Path(job.log_dir) / "rank-00000.json").write_bytes(msgspec.json.encode(record))
        assert not any(training._send(job, number) for number in (signal.SIGTERM, signal.SIGKILL))
        assert other.poll() is None
        other.kill()


def shown(ended: training.Ended) -> list[str]:
    """What a person reads of an end."""
    with redirect_stdout(io.StringIO()) as out:
        training.show(ended, console())
    return out.getvalue().splitlines()


def test_a_killed_rank_is_listed_with_its_signal_and_the_step_to_resume(tmp_path: Path) -> None:
    save(tmp_path / "out/checkpoint-3", canonical())
    ended, _ = training.run(script_job(tmp_path, "import os; os.kill(os.getpid(), 9)"), io.StringIO())
    assert ended.signalled == (training.Signalled(0, "SIGKILL"),)
    lines = shown(ended)
    assert lines[-2].startswith("  rank 0 was ended by SIGKILL: ")
    assert lines[-1] == "  next: run the same command again; it resumes at step 3"


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("name", "code", "forwarded"), [("SIGTERM", 143, None), ("SIGTERM", 143, "SIGTERM"), ("SIGINT", 130, "SIGTERM")]
)
def test_a_stopped_run_reports_the_step_to_resume(tmp_path: Path, name: str, code: int, forwarded: str | None) -> None:
    save(tmp_path / "out/checkpoint-3", canonical())
    stopping = f"if os.environ['PADDLE_TRAINER_ID'] == '1': os.kill(os.getppid(), signal.{name})"
    facts = {"resume_overrides": ("resume_from_checkpoint=true",), "save_signal": forwarded}
    job = script_job(tmp_path, f"import os, signal\n{stopping}\nsignal.pause()", 2, **facts)
    before = signal.getsignal(signal.SIGTERM)
    ended, _ = training.run(job, io.StringIO())
    assert (ended.returncode, ended.stopped_by, signal.getsignal(signal.SIGTERM)) == (code, name, before)
    lines = shown(ended)
    assert lines[0].startswith(f"stopped by {name}; ")
    assert lines[1:3] == [f"  log: {tmp_path / 'out/log' / f'rank-0000{rank}.log'}" for rank in (0, 1)]
    again = "run the same command again with resume_from_checkpoint=true"
    assert lines[3:] == [f"  next: {again}; it resumes at step 3"]


def test_a_signal_while_a_rank_is_polled_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(process: subprocess.Popen[bytes]) -> int | None:
        """As a signal that arrives between an acquisition of the process' lock and the code that releases it."""
        if sent.acquire(blocking=False):
            process._waitpid_lock.acquire()  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGTERM)
            process._waitpid_lock.release()  # type: ignore[attr-defined]
        return poll(process)

    sent, poll = threading.Semaphore(1), subprocess.Popen.poll
    monkeypatch.setattr(subprocess.Popen, "poll", interrupted)
    ended, _ = training.run(script_job(tmp_path, "import signal; signal.pause()", 2), io.StringIO())
    assert (ended.returncode, ended.stopped_by) == (143, "SIGTERM")


HANDLING = """
import os, signal, sys
from paddleformers_fc.trainer.rank_records import update_record

signal.signal(signal.SIGTERM, lambda *_: sys.exit(85) if {saves} else None)
update_record(process=os.getpid(), listens=True)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("local", "saves"), [(True, True), (False, False)], ids=["local ranks save", "another hangs"])
def test_a_forwarded_signal_saves(tmp_path: Path, local: bool, saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "out/checkpoint-3", canonical())
    job = script_job(tmp_path, HANDLING.format(saves=saves), 1 if local else None, save_signal="SIGTERM")

    class Stopping(io.StringIO):
        def write(self, text: str) -> int:
            if "ready" in text:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)

    if not saves:
        monkeypatch.setattr(training, "FORWARDED_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGTERM)
    ended, error = training.run(job, Stopping())
    assert (ended.returncode, ended.stopped_by, ended.report, error) == (85 if saves else 143, "SIGTERM", None, None)
    assert (ended.signalled, signal.getsignal(signal.SIGTERM)) == ((), before)
    lines = shown(ended)
    assert lines[0].startswith("saved and stopped by SIGTERM; " if saves else "stopped by SIGTERM; ")
    assert lines[-1] == "  next: run the same command again; it resumes at step 3"
    assert ("script.py" in (tmp_path / "out/log/rank-00000.log").read_text()) != saves  # The stacks of ranks.


def test_a_rank_that_aborts_after_an_error_of_another_is_not_reported_as_the_cause() -> None:
    assert training._signalled(JobOutcome((-6, 1), False, 1.0, (1, 0))) == ()
    both = training._signalled(JobOutcome((-6, -9), False, 1.0, (1, 0)))
    assert both == (training.Signalled(1, "SIGKILL"), training.Signalled(0, "SIGABRT"))


@pytest.mark.parametrize(
    ("device", "keys", "nproc", "argv", "ranks"),
    [
        ("cpu", {}, None, (*LOCAL, OURS, "device=cpu"), 1),
        ("cpu", {"custom_register_path": str(register.PATH)}, 3, (*LOCAL, OURS, "device=cpu"), 3),
        ("gpu:0", {"device": "cpu"}, 2, (*LOCAL, OURS), 2),
        ("gpu:0", {}, None, (*HANDED_OVER, OURS), None),
    ],
)
def test_the_registration_and_the_device_are_added(
    tmp_path: Path, on: Any, device: str, keys: dict[str, Any], nproc: int | None, argv: tuple[str, ...], ranks: int
) -> None:
    on(device)
    path = config(tmp_path, **keys)
    job = prepare(path, nproc, ["max_steps=3"])
    assert job.command == (sys.executable, *(str(path) if text == "YAML" else text for text in argv))
    assert (job.ranks, job.log_dir) == (ranks, str(tmp_path / "out/log"))
    handed_over = {"PADDLEFORMERS_DIST_LOG": job.log_dir, "PATH": os.pathsep.join([BIN, os.environ["PATH"]])}
    assert job.environment == {RECORDS: job.log_dir, **(handed_over if ranks is None else {})}


def test_a_device_that_the_ranks_cannot_use_is_refused(tmp_path: Path, on: Any) -> None:
    for device, keys in (("cpu", {"device": "gpu"}), ("gpu:0", {})):
        on(device)
        with pytest.raises(OptionError, match="This run uses device=gpu, and "):
            prepare(config(tmp_path, **keys), 2, [])


def test_a_registration_of_the_users_runs_as_well(tmp_path: Path, on: Any) -> None:
    own = tmp_path / "own.py"
    own.touch()
    job = prepare(config(tmp_path), None, [f"custom_register_path={own}"])
    assert (job.command[-2:], job.environment[register.ALSO_RUN]) == ((OURS, "device=cpu"), str(own))


def test_the_overrides_for_a_resume_follow_from_the_keys(tmp_path: Path, on: Any) -> None:
    save(tmp_path / "out/checkpoint-3", canonical())
    for keys, added in (
        ({"do_train": True}, ()),
        ({"resume_from_checkpoint": True}, ()),
        ({"do_train": True, "overwrite_output_dir": True}, ("overwrite_output_dir=false",)),
        ({}, ("resume_from_checkpoint=true",)),
    ):
        path = config(tmp_path, fine_tuning="full", **keys)
        assert prepare(path, None, []).resume_overrides == added


@pytest.mark.parametrize("claim", [True, False])
def test_every_start_has_its_own_logs(tmp_path: Path, on: Any, claim: bool) -> None:
    path = config(tmp_path)
    for name in ("log", "log-2", "log-3"):
        log_dir = prepare(path, None, [], claim_logs=claim).log_dir
        assert (log_dir, Path(log_dir).exists()) == (str(tmp_path / "out" / name), claim)
        Path(log_dir).mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("option", [["--dry-run"], []])
def test_an_output_directory_that_cannot_be_made_is_refused(tmp_path: Path, on: Any, option: list[str]) -> None:
    path = config(tmp_path)
    output = path / "x"
    outcome = run("train", *option, path, f"output_dir={output}")
    assert outcome.code == 2
    assert outcome.err.startswith(f"The operating system refused to create {output}")
    assert "Not a directory" in outcome.err
    assert sorted(tmp_path.iterdir()) == [path]


LOG = """\
/env/lib/python3.11/site-packages/paddle/group.py:145: UserWarning: Current global rank 0 is not in a group
  warnings.warn(
 17%|x     | 1/6 [00:01<00:05,  1.00s/it]\r\x1b[35m[2026-01-01 10:00:00,000] [   DEBUG]\x1b[0m - use_fp8 : False\x1b[0m
I0101 10:00:00.0 18041 tcp_utils.cc:132] Successfully connected to 127.0.0.1:28145
\x1b[32m[2026-01-01 10:00:00,000] [    INFO]\x1b[0m - Final model config: LlamaConfig {
  "hidden_size": 64
}

    +=====+
\x1b[33m[2026-01-01 10:00:00,000] [ WARNING]\x1b[0m - 2 parameters are trained and without optimizer states:
  - model.norm.weight
printed by a callback
  and indented
\x1b[32m[2026-01-01 10:00:00,000] [    INFO]\x1b[0m - loss: 5.68, learning_rate: 0.0, global_step: 5, ppl: 293.3\x1b[0m
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in <module>
paddleformers_fc.errors.Corrupt: It is damaged.
  where: here
the end"""


def test_a_log_is_shown_without_debug_lines_details_warnings_of_libraries_and_tracebacks() -> None:
    stream = io.StringIO()
    screen = LogView(stream)
    for begin in range(0, len(LOG), 7):
        screen.write(LOG[begin : begin + 7])
    screen.write("\n")
    lines = stream.getvalue().splitlines()
    assert [line.partition("] - ")[2] or line for line in lines] == [
        " 17%|x     | 1/6 [00:01<00:05,  1.00s/it]",
        "Final model config: LlamaConfig {",
        "2 parameters are trained and without optimizer states:",
        "  - model.norm.weight",
        "printed by a callback",
        "  and indented",
        "loss: 5.68, learning_rate: 0.0, global_step: 5, ppl: 293.3",
        "KeyError: 'a'",
        "",
        "the end",
    ]
    assert "\x1b" not in stream.getvalue()
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    LogView(terminal).write("\x1b[32mgreen\x1b[0m\n")
    assert terminal.getvalue() == "\x1b[32mgreen\x1b[0m\n"


@pytest.mark.parametrize(
    ("record", "line", "loss"),
    [
        (None, "trained; ", None),
        ({"step": 3, "loss": "5.92332745"}, "trained 3 steps, up to 3, last loss 5.92332745; ", 5.92332745),
        ({"step": 3, "loss": "nan"}, "trained 3 steps, up to 3, last loss nan; ", None),
        ({"resumed": 3, "step": 3}, "trained 0 steps, resumed at 3; ", None),
    ],
)
def test_ranks_record_figures(tmp_path: Path, record: dict[str, Any] | None, line: str, loss: float | None) -> None:
    job = script_job(tmp_path, "print('loss: 1.5, global_step: 2,')")
    Path(job.log_dir).mkdir(parents=True)
    if record is not None:
        Path(job.log_dir, "rank-00000.json").write_text(json.dumps(record))
    ended, _ = training.run(job, io.StringIO())
    found = json.loads(msgspec.json.encode(ended))
    assert (found["loss"], found["step"]) == (loss, None if record is None else 3)
    assert all(found[key] is None for key in ("report", "checkpoint", "stopped_by", "goes_on"))
    lines = shown(ended)
    assert lines[0].startswith(line)
    assert ("overwrite_output_dir=true" in lines[-1]) == ("resumed" in (record or {}))


def test_without_paddleformers_its_installation_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "find_spec", lambda name: None)
    outcome = run("train", config(tmp_path))
    assert outcome.code == 2
    assert 'pip install "paddleformers-fc[cpu]"' in outcome.err


def test_a_dry_run_prints_shell_syntax_or_a_document(tmp_path: Path, on: Any) -> None:
    path = config(tmp_path)
    dry_run = ("train", path, "max_steps=3", "--nproc", "2", "--dry-run")
    *variables, where, command = run(*dry_run).out.splitlines()
    assert variables == [f"{RECORDS}={tmp_path / 'out/log'}"]
    assert where == f"# 2 ranks on this machine, logs in {tmp_path / 'out/log'}"
    document = run(*dry_run, "--json").document
    assert (document["ranks"], document["command"]) == (2, shlex.split(command))
    assert not (tmp_path / "out").exists()


def recipe(directory: Path, **keys: Any) -> Path:
    """The demo's YAML for one rank and three steps, in ``directory``."""
    assets = prepare_assets(directory / "assets")
    content = settings(str(assets.models["llama"]), str(assets.corpus), str(directory / "out"), SINGLE)
    return config(directory, **{**content, "max_steps": 3, **keys})


def test_a_training_leaves_a_checkpoint_that_passes_verification(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (tmp_path / "own.py").write_text(f"open({str(witness)!r}, 'w').write(__name__)\n")
    outcome = run("train", recipe(tmp_path, custom_register_path=str(tmp_path / "own.py")), "--json")
    found = outcome.document
    assert (outcome.code, found["returncode"]) == (0, 0), outcome.err
    (log,) = found["logs"]
    assert "DEBUG" in Path(log).read_text()
    assert "DEBUG" not in outcome.err
    assert "global_step: 3" in outcome.err
    checkpoint = tmp_path / "out/checkpoint-3"
    assert (found["resumed"], found["step"], found["checkpoint"]) == (None, 3, str(checkpoint))
    assert isinstance(found["loss"], float)
    assert [found[key] for key in ("report", "stopped_by", "goes_on")] == [None, None, None]
    assert witness.read_text() == "custom_template"
    assert run("verify", checkpoint).code == 0
    facts = run("inspect", checkpoint, "--json").document["job"]
    assert (facts["step"], facts["world_size"], facts["family"]) == (3, 1, "llama")
    source = tmp_path / "assets/llama"
    described, generation = json.loads((source / "config.json").read_text()), "generation_config.json"
    for directory in (checkpoint, tmp_path / "out"):
        assert json.loads((directory / "config.json").read_text()).items() >= described.items()
        assert (directory / generation).read_bytes() == (source / generation).read_bytes()


def test_the_command_forwards_the_signal_of_its_option(tmp_path: Path, on: Any) -> None:
    for named, keys in (
        ("SIGTERM", {"flex_save_on_signal": "SIGTERM"}),
        (None, {"flex_save_on_signal": "off"}),
        (None, {"flex_checkpoint": False}),
    ):
        assert prepare(config(tmp_path, **keys), None, []).save_signal == named


@pytest.mark.slow
def test_the_lines_for_slurm_save_on_its_signal_and_queue_the_job_again(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/save-on-signal.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^```bash\n(#SBATCH.*?)^```$", page, re.MULTILINE | re.DOTALL)
    recipe(tmp_path, max_steps=100_000, save_steps=100_000)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" > queued\n')
    scontrol.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", lines], cwd=tmp_path, env=variables) as script:
        try:
            wait_until(lambda: any(record.step for record in read_records(tmp_path / "out/log")), "a step")
        finally:
            script.terminate()
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """The command with a rank that runs a script."""

    def train(text: str, *options: str) -> Outcome:
        monkeypatch.setattr(training, "prepare", lambda *_, **__: script_job(tmp_path, text))
        return run("train", config(tmp_path), *options)

    return train


def test_a_failed_training_returns_its_code_and_shows_why(tmp_path: Path, script: Callable[..., Outcome]) -> None:
    outcome = script("raise RuntimeError('no luck today')")
    assert (outcome.code, "no luck today" in outcome.out, "no luck today" in outcome.err) == (1, True, True)
    assert "failed with code 1; " in outcome.out
    assert outcome.out.splitlines()[-1] == f"  log: {tmp_path / 'out/log/rank-00000.log'}"


OWN = """
from paddleformers_fc.errors import MismatchError

def fail(*args, **kwargs):
    raise MismatchError("It does not fit.", where="here", evidence=["a"], next_step="Try b.")
"""


def test_an_error_of_this_package_is_printed_once_or_is_the_document(
    tmp_path: Path, script: Callable[..., Outcome]
) -> None:
    recorded = "from paddleformers_fc.trainer.rank_records import begin_record\nbegin_record()"
    document = script(f"{OWN}\n{recorded}\nfail()\n", "--json").document
    assert (document["error"], document["what"], document["returncode"]) == ("MismatchError", "It does not fit.", 1)
    outcome = script(f"{OWN}\n{recorded}\nfail()\n")
    assert outcome.code == 1
    assert outcome.err == "It does not fit.\n  where: here\n  - a\n  next: Try b.\n"
    assert "It does not fit." not in outcome.out
    assert "Traceback" not in outcome.out
    assert "Traceback" in (tmp_path / "out/log/rank-00000.log").read_text()


def test_a_run_without_flex_checkpoints_has_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = training.Ended(0, [], [str(tmp_path / "log/rank-00000.log")], 1.0, "")
    monkeypatch.setattr(training, "run", lambda job, echo: (ended, None))
    off = "flex_checkpoint=false"
    silent, noted, idle = (
        run("train", config(tmp_path, device="cpu"), *overrides)
        for overrides in ((), (off,), (off, "flex_verify=full", "flex_threads=2"))
    )
    assert (silent.err, silent.out) == ("", noted.out)
    assert "flex_checkpoint is not true" in noted.err
    assert "have no effect" not in noted.err
    assert "these keys have no effect: flex_verify, flex_threads." in idle.err


NODES = {"NNODES": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "8123"}


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of the second of two nodes."""
    for name, value in NODES.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_nodes_of_gpus_run_the_stock_command(tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch) -> None:
    on("gpu:0")
    second_of_two.setenv("MASTER_ADDR", "localhost")
    job = prepare(config(tmp_path), None, [])
    assert job.environment["MASTER_ADDR"] == "127.0.0.1"
    assert "CUDA_VISIBLE_DEVICES" not in job.environment


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_ADDR", "", "needs MASTER_ADDR on every node"),
        ("RANK", "2", "RANK=2 is not a node of this job"),
        ("RANK", "-1", "RANK=-1 is not a whole number"),
        ("MASTER_PORT", "http", "MASTER_PORT=http is not a whole number"),
        ("MASTER_ADDR", "no-such-node.invalid", "MASTER_ADDR=no-such-node.invalid does not resolve"),
        ("MASTER_ADDR", "10.199.77.1", "where other nodes cannot reach it"),
    ],
)
def test_variables_by_which_nodes_would_never_meet_are_refused(
    tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    second_of_two.setenv("POD_IP", "127.0.0.2")
    second_of_two.setenv(name, value)
    with pytest.raises(OptionError) as caught:
        prepare(config(tmp_path), 1, [])
    assert message in caught.value.render()


def test_a_disk_that_one_node_cannot_write_is_no_error(
    tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch()
    job = prepare(config(tmp_path), 1, [])
    assert tmp_path not in Path(job.log_dir).parents
    Path(job.log_dir).rmdir()
