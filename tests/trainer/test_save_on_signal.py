"""A save on the way out: which step it saves, how the process ends, and what resumes."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cpu_runtime.ranks import SAVED_ON_SIGNAL, free_ports
from paddleformers_fc.errors import OptionError
from paddleformers_fc.trainer.options import FlexFields
from paddleformers_fc.trainer.save_on_signal import WorkerShield
from tests.harness import tiny
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2, PP2, SINGLE, MatrixLayout
from tests.harness.waiting import pause, wait_for_file, wait_until
from tests.trainer.jobs import flex_trainer
from tests.trainer.test_trainer import settings
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

SIGNALLED = "tests.trainer.signal_jobs:run_signalled"
PAGE = Path(__file__).parents[2] / "docs/save-on-signal.md"
FOR_LONG = 10_000
"""Steps that no test waits for."""


def signalled(ranks: ForkServer, layout: MatrixLayout, output_dir: Path, signalled: list[int], **given: Any) -> int:
    """Train until a signal; the step that all ranks saved last, once, without an evaluation."""
    arguments = {"max_steps": FOR_LONG, **given.pop("arguments", {})}
    job = {**settings(layout, output_dir, **arguments), "signalled": signalled, **given}
    ran = ranks.run(SIGNALLED, layout.nproc, job)
    ended = ran.values
    (step,) = {one["step"] for one in ended}
    assert [one["code"] for one in ended] == [SAVED_ON_SIGNAL] * layout.nproc
    assert [one["saves"][-1:] for one in ended] == [[step]] * layout.nproc
    assert all(one["saves"].count(step) == 1 and one["restored"] for one in ended)
    assert step not in ended[0]["evaluated"]
    assert "The model now has the weights of its best checkpoint" not in ran.logs[0].read_text()
    return step


def train_and_resume(layout: MatrixLayout, directory: Path, step: int, arguments: dict[str, Any]) -> None:
    last = step + 2
    losses = []
    for name, resume in (("whole", None), ("resumed", str(directory / "out" / f"checkpoint-{step}"))):
        given = {"max_steps": last, "save_steps": last, **arguments}
        trainer = flex_trainer(layout.to_json(), str(directory / name), given)
        trainer.train(resume_from_checkpoint=resume)
        losses.append(trainer.losses)
    assert losses[0][step:] == losses[1]


def assert_resumes(ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, step: int, **arguments: Any) -> None:
    """A run that resumes at the saved step equals one that was not interrupted."""
    given = {"layout": layout, "directory": tmp_path, "step": step, "arguments": arguments}
    run_on_ranks(ranks, layout.nproc, train_and_resume, **given)
    last = f"checkpoint-{step + 2}"
    whole, resumed = (list(canonical_digests(tmp_path / name / last)) for name in ("whole", "resumed"))
    assert whole == resumed


@pytest.mark.parametrize("layout", [DP2, PP2], ids=lambda layout: layout.name)
def test_all_ranks_save_if_one_gets_the_signal_and_resume_as_if_uninterrupted(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    step = signalled(ranks, layout, tmp_path / "out", [1])
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert_resumes(ranks, tmp_path, layout, step)


def test_ranks_that_all_get_the_signal_save_once(ranks: ForkServer, tmp_path: Path) -> None:
    step = signalled(ranks, DP2, tmp_path / "out", [0, 1], name="SIGUSR2", arguments={"flex_save_on_signal": "SIGUSR2"})
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == [f"checkpoint-{step}"]


@pytest.mark.parametrize("beside", [True, False], ids=["beside steps", "in steps"])
def test_a_signal_during_accumulation_saves_a_whole_step(ranks: ForkServer, tmp_path: Path, beside: bool) -> None:
    accumulated = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "flex_async_save": beside}
    # Every step saves and evaluates, so the last one would do both without a signal too.
    given = {"save_steps": 1, "save_total_limit": 2, "evaluation_strategy": "steps", "eval_steps": 1}
    given |= {"load_best_model_at_end": True, **accumulated}
    step = signalled(ranks, SINGLE, tmp_path / "out", [0], event="on_substep_end", arguments=given)
    assert_resumes(ranks, tmp_path, SINGLE, step, **accumulated)


def test_a_signal_at_the_end_of_an_epoch_saves_its_last_step_once(ranks: ForkServer, tmp_path: Path) -> None:
    # Every step is the last one of an epoch.
    given = {"per_device_train_batch_size": tiny.SAMPLES, "save_strategy": "epoch", "evaluation_strategy": "epoch"}
    signalled(ranks, SINGLE, tmp_path / "out", [0], arguments=given)


def test_a_signal_to_the_whole_process_group_leaves_the_workers_of_the_data_loader(
    ranks: ForkServer, tmp_path: Path
) -> None:
    signalled(ranks, SINGLE, tmp_path / "out", [0], group=True, at=9, arguments={"dataloader_num_workers": 2})


@pytest.mark.parametrize("handles", [False, True], ids=["default", "own handler"])
def test_a_shielded_worker_ends_if_its_parent_ends_it(tmp_path: Path, handles: bool) -> None:
    shield = WorkerShield(signal.SIGTERM)
    worker = multiprocessing.get_context("fork").Process(target=wait_to_be_ended, args=(tmp_path, handles))
    worker.start()
    shield.deactivate()
    wait_for_file(tmp_path / "waiting")
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # Not the parent.
    pause()
    assert worker.is_alive()
    worker.terminate()
    worker.join(LIMIT)
    assert worker.exitcode == (7 if handles else 0)


def wait_to_be_ended(directory: Path, handles: bool) -> None:
    if handles:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    (directory / "waiting").touch()
    while True:
        pause()


@pytest.mark.parametrize("layout", [SINGLE, pytest.param(PP2, marks=pytest.mark.slow)], ids=lambda layout: layout.name)
def test_two_signals_while_a_save_is_under_way_commit_it_and_the_last_step(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    given = {"max_steps": FOR_LONG, "save_steps": 1, "flex_async_save": True}
    job = {**settings(layout, tmp_path / "out", **given)}
    ended = ranks.run("tests.trainer.signal_jobs:run_signalled_while_saving", layout.nproc, job).values
    (step,) = {one["step"] for one in ended}
    steps = list(range(1, step + 1))
    assert [(one["code"], one["saves"]) for one in ended] == [(SAVED_ON_SIGNAL, steps)] * layout.nproc
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {f"checkpoint-{one}" for one in steps}
    assert_resumes(ranks, tmp_path, layout, step)


def test_off_leaves_the_signal_to_the_process(ranks: ForkServer, tmp_path: Path) -> None:
    job = {**settings(SINGLE, tmp_path, max_steps=FOR_LONG, flex_save_on_signal=False), "signalled": [0]}
    assert ranks.attempt(SIGNALLED, 1, job).returncodes == (-15,)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_signal_of_stack_dumps_is_refused_with_its_reason() -> None:
    with pytest.raises(OptionError) as caught:
        FlexFields(flex_save_on_signal="SIGUSR1")
    (line,) = caught.value.evidence
    assert line.startswith("flex_save_on_signal: 'SIGUSR1' is none of off, SIGTERM, ")
    assert line.endswith("SIGHUP: ranks write their stacks on it")


@pytest.mark.slow
def test_ranks_of_paddles_launcher_save_when_it_is_ended(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--master", f"127.0.0.1:{port}", "--nnodes", "1"]
    script = ["--nproc_per_node", "2", str(Path(__file__).with_name("signal_script.py")), str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PADDLE_DISTRI_BACKEND": "gloo",
        "OMP_NUM_THREADS": "1",
    }
    (line,) = re.findall(r"^(pkill .*?) +#", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    # Other launchers of this machine are not ended.
    command = [*shlex.split(line), "--parent", str(os.getpid())]
    with subprocess.Popen([*launcher, *script], cwd=tmp_path, env=environment) as process:
        try:
            wait_until(lambda: (tmp_path / "started-1").exists() or process.poll() is not None, "the loop runs")
            signalled = subprocess.run(command, check=False).returncode
        except BaseException:
            process.terminate()
            raise
        process.wait(LIMIT)
    assert signalled == 0
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    step = checkpoint.name.removeprefix("checkpoint-")
    log = (tmp_path / "log" / "workerlog.0").read_text()
    assert f"Saved step {step} after SIGTERM; the process ends with code {SAVED_ON_SIGNAL}." in log
