"""A save on the way out: which step it saves, how the process ends, and what resumes."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.cpu_runtime.ranks import SAVED_ON_SIGNAL, free_ports
from paddleformers_fc.errors import OptionError
from paddleformers_fc.trainer.options import FlexFields
from paddleformers_fc.trainer.save_on_signal import WorkerShield
from tests.harness import tiny
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import DP2, PP2, SINGLE, MatrixLayout
from tests.harness.waiting import pause, wait_for_file, wait_until
from tests.trainer.jobs import callback, few_samples, flex_trainer, trained
from tests.trainer.test_trainer import settings
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

PAGE = Path(__file__).parents[2] / "docs/save-on-signal.md"
FOR_LONG = 10_000
"""Steps that no test waits for."""


def in_numpy(rows: Sequence[Any]) -> dict[str, Any]:
    """A batch that a forked worker can make, which must not touch Paddle's tensors."""
    import numpy as np

    return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}


def run_signalled(
    signalled: Sequence[int],
    event: str = "on_step_end",
    at: int = 2,
    name: str = "SIGTERM",
    group: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train until a signal ends the training; how it ended.

    Args:
        signalled: the ranks that get the signal.
        event: the callback in which they get it.
        at: the step after which they get it.
        name: the signal.
        group: whether the workers of data loaders get it too.
    """
    from paddleformers_fc.distributed import step_agreement

    step_agreement.IDLE_SECONDS = 0.5
    saves: list[int] = []
    evaluated: list[int] = []
    sent: list[bool] = []

    def send(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step >= at:
            pause()  # Fewer steps until the ranks have agreed.
        if state.global_step >= at and not sent and args.process_index in signalled:
            sent.append(True)
            # Paddle's workers end well on a signal of their parent, so another process sends it to the group.
            target = -os.getpid() if group else os.getpid()
            command = ["kill", "-s", name.removeprefix("SIG"), "--", str(target)]
            subprocess.run(command, check=True, start_new_session=True)

    noting = callback(
        on_save=lambda args, state, *_, **__: saves.append(state.global_step),
        on_evaluate=lambda args, state, *_, **__: evaluated.append(state.global_step),
        **{event: send},
    )
    before = signal.getsignal(signal.Signals[name])
    if group:
        settings["data_collator"] = in_numpy
    trainer = flex_trainer(**settings, eval_dataset=few_samples(), callbacks=[noting])
    code = None
    try:
        trainer.train()
    except SystemExit as end:
        code = end.code
    restored = signal.getsignal(signal.Signals[name]) == before
    return {
        "code": code,
        "step": trainer.state.global_step,
        "saves": saves,
        "evaluated": evaluated,
        "restored": restored,
    }


def assert_resumes(layout: MatrixLayout, directory: Path, step: int, arguments: dict[str, Any]) -> None:
    """A run on these ranks that resumes at the saved step equals one that was not interrupted."""
    given = {"max_steps": step + 2, "save_steps": step + 2, **arguments}
    whole = trained(layout, directory / "whole", given)
    resumed = trained(layout, directory / "resumed", given, resume=directory / "out" / f"checkpoint-{step}")
    assert whole.losses[step:] == resumed.losses
    one, other = (directory / name / f"checkpoint-{step + 2}" for name in ("whole", "resumed"))
    assert list(canonical_digests(one)) == list(canonical_digests(other))


# Every step saves and evaluates, so the last one would do both without a signal too.
EVERY_STEP = {"save_steps": 1, "save_total_limit": 2, "evaluation_strategy": "steps", "eval_steps": 1}
ACCUMULATED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
BESIDE = {**ACCUMULATED, "flex_async_save": True}
BEST = {**EVERY_STEP, "load_best_model_at_end": True}
EPOCHS = {"per_device_train_batch_size": tiny.SAMPLES, "save_strategy": "epoch", "evaluation_strategy": "epoch"}
"""Every step is the last one of an epoch."""

Case = tuple[MatrixLayout, list[int], dict[str, Any], dict[str, Any], dict[str, Any] | None]
CASES: dict[str, Case] = {
    "one of two ranks": (DP2, [1], {}, {}, {}),
    "one of two stages": (PP2, [1], {}, {}, {}),
    "both ranks": (DP2, [0, 1], {"name": "SIGUSR2"}, {"flex_save_on_signal": "SIGUSR2"}, None),
    "during accumulation": (SINGLE, [0], {"event": "on_substep_end"}, {**BEST, **ACCUMULATED}, ACCUMULATED),
    "during accumulation, beside steps": (SINGLE, [0], {"event": "on_substep_end"}, {**BEST, **BESIDE}, BESIDE),
    "at the end of an epoch": (SINGLE, [0], {}, EPOCHS, None),
    "workers of the data loader too": (SINGLE, [0], {"group": True, "at": 9}, {"dataloader_num_workers": 2}, None),
}
"""Layout, ranks that get a signal, which and when, options of the run, and those of the run that resumes, if any."""
NOT_CHOSEN = ("one of two stages", "during accumulation")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in NOT_CHOSEN else pytest.mark.chosen) for name in CASES]
)
def test_all_ranks_save_the_same_step_once_after_a_signal(ranks: ForkServer, tmp_path: Path, case: str) -> None:
    layout, signalled, given, arguments, again = CASES[case]
    job = settings(layout, tmp_path / "out", **{"max_steps": FOR_LONG, **arguments})
    ran = job_on_ranks(ranks.run, layout.nproc, run_signalled, **job, signalled=signalled, **given)
    (step,) = {one["step"] for one in ran.values}
    saves = [*range(1, step + 1)] if arguments.keys() & {"save_steps", "save_strategy"} else [step]
    for ended in ran.values:
        assert (ended["code"], ended["saves"], ended["restored"]) == (SAVED_ON_SIGNAL, saves, True)
        assert step not in ended["evaluated"]
    assert "The model now has the weights of its best checkpoint" not in ran.logs[0].read_text()
    assert (tmp_path / f"out/checkpoint-{step}").exists()
    if again is not None:
        resumed = {"layout": layout, "directory": tmp_path, "step": step, "arguments": again}
        run_on_ranks(ranks, layout.nproc, assert_resumes, **resumed)


@pytest.mark.parametrize("handles", [False, True], ids=["default", "own handler"])
def test_a_shielded_worker_ends_if_its_parent_ends_it(tmp_path: Path, handles: bool) -> None:
    shield = WorkerShield(signal.SIGTERM)
    worker = multiprocessing.get_context("fork").Process(target=wait_to_be_ended, args=(tmp_path, handles))
    worker.start()
    shield.deactivate()
    wait_for_file(tmp_path / "waiting")
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)  # The sender must not be the parent.
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
@on_ranks()
def test_two_signals_in_a_save_commit_it_and_the_last_step(layout: MatrixLayout, tmp_path: Path) -> None:
    """The signals come while the first save is written."""
    from paddleformers_fc.execute import save

    sent, saves = threading.Event(), []

    def send(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step:
            pause()  # Fewer steps until the ranks have agreed.
            for _ in range(0 if sent.is_set() else 2):
                os.kill(os.getpid(), signal.SIGTERM)
            sent.set()

    precede(save, "_write_files", lambda *_: sent.wait(LIMIT))
    noting = callback(on_step_begin=send, on_save=lambda args, state, *_, **__: saves.append(state.global_step))
    given = {"max_steps": FOR_LONG, "save_steps": 1, "flex_async_save": True}
    trainer = flex_trainer(layout, tmp_path / "out", given, callbacks=[noting])
    with pytest.raises(SystemExit) as end:
        trainer.train()
    step = trainer.state.global_step
    assert (end.value.code, saves) == (SAVED_ON_SIGNAL, list(range(1, step + 1)))
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {f"checkpoint-{one}" for one in saves}
    assert_resumes(layout, tmp_path, step, {})


def test_with_off_the_signal_ends_the_process(ranks: ForkServer, tmp_path: Path) -> None:
    job = settings(SINGLE, tmp_path, max_steps=FOR_LONG, flex_save_on_signal=False)
    assert job_on_ranks(ranks.attempt, 1, run_signalled, **job, signalled=[0]).returncodes == (-15,)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_signal_of_stack_dumps_is_refused_with_its_reason() -> None:
    with pytest.raises(OptionError) as caught:
        FlexFields(flex_save_on_signal="SIGUSR1")
    (line,) = caught.value.evidence
    assert line.startswith("flex_save_on_signal: 'SIGUSR1' is not one of off, SIGTERM, ")
    assert line.endswith("SIGHUP: ranks write their stacks on it")


SCRIPT = """
import sys
from pathlib import Path

from paddleformers_fc import cpu_runtime

cpu_runtime.activate()

from tests.harness.tiny import DP2
from tests.trainer.jobs import callback, trained

def started(args, *_, **__):
    Path(sys.argv[1], f"started-{args.process_index}").touch()

trained(DP2, sys.argv[1], {"max_steps": 100_000}, callbacks=[callback(on_step_end=started)])
"""


@pytest.mark.slow
def test_ranks_of_paddles_launcher_save_when_it_is_ended(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--master", f"127.0.0.1:{port}", "--nnodes", "1"]
    script = ["--nproc_per_node", "2", str(tmp_path / "script.py"), str(tmp_path)]
    own = {"PYTHONPATH": str(PAGE.parents[1]), "PADDLE_DISTRI_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own}
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
