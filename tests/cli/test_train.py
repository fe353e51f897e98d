"""``train`` starts PaddleFormers' own command line with this package registered, and nothing else changed."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from omegaconf import OmegaConf

from paddleformers_fc import upstream
from paddleformers_fc.cli import main, start_checks, training
from paddleformers_fc.cli.settings import parse_overrides, read_settings
from paddleformers_fc.cli.training import LogView, prepare
from paddleformers_fc.cpu_runtime.launch import LaunchResult
from paddleformers_fc.errors import MismatchError, OptionError, StorageError
from paddleformers_fc.families.models.minimax_m2 import FAMILY as MINIMAX
from paddleformers_fc.output import console
from paddleformers_fc.trainer import register
from paddleformers_fc.trainer.rank_records import RECORDS, read_error, read_records
from paddleformers_fc.trainer.stock_keys import stock_arguments
from tests.cli.support import Outcome, run, save
from tests.execute.simulated import canonical
from tests.harness.waiting import wait_until
from verification.demo.assets import prepare as prepare_assets
from verification.demo.settings import SINGLE, settings
from verification.forkserver import ForkServer

OURS = f"custom_register_path={register.PATH}"
LAUNCHER = ("-m", "paddleformers.cli.launcher", "train")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let Paddle find this device when it is asked."""

    def use(device: str) -> None:
        monkeypatch.setattr(training, "local_device", lambda: device)

    use("cpu")
    return use


def config(directory: Path, **keys: Any) -> Path:
    """A YAML with these keys and an output directory."""
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(directory / "out"), "flex_checkpoint": True, **keys}))
    return path


def test_the_registration_and_the_device_are_added(tmp_path: Path, on: Any) -> None:
    path = config(tmp_path)
    job = prepare(path, None, ["max_steps=3"])
    assert job.argv == (*LAUNCHER, str(path), "max_steps=3", OURS, "device=cpu")
    assert (job.ranks, dict(job.environment)) == (1, {RECORDS: str(tmp_path / "out/log")})
    assert job.log_dir == tmp_path / "out/log"


def test_a_missing_device_is_refused(tmp_path: Path, on: Any) -> None:
    with pytest.raises(OptionError, match="device=gpu, and this machine has no accelerator"):
        prepare(config(tmp_path, device="gpu"), 2, [])


@pytest.mark.parametrize("own", [["device=cpu"], []])
def test_a_configured_device_is_kept(tmp_path: Path, on: Any, own: list[str]) -> None:
    on("gpu:0")
    path = config(tmp_path) if own else config(tmp_path, device="cpu")
    assert prepare(path, 2, own).argv == (*LAUNCHER, str(path), *own, OURS)


@pytest.mark.parametrize("named_in", ["yaml", "override"])
def test_a_registration_of_the_users_runs_as_well(tmp_path: Path, on: Any, named_in: str) -> None:
    own = tmp_path / "own.py"
    own.touch()
    path = config(tmp_path, **({"custom_register_path": str(own)} if named_in == "yaml" else {}))
    job = prepare(path, None, [f"custom_register_path={own}"] if named_in == "override" else [])
    assert job.argv[4:] == (OURS, "device=cpu")
    assert job.environment[register.ALSO_RUN] == str(own)


def test_a_yaml_with_our_registration_keeps_it(tmp_path: Path, on: Any) -> None:
    job = prepare(config(tmp_path, custom_register_path=str(register.PATH)), None, [])
    assert job.argv[4:] == (OURS, "device=cpu")
    assert register.ALSO_RUN not in job.environment


OWN_REGISTRATION = """
import runpy

from paddleformers.trainer import Trainer
from paddleformers_fc.trainer import register

seen = Trainer.__init__
Trainer.own_registration = lambda: (__name__, seen)
runpy.run_path(register.PATH)  # As a file does that registers this package itself.
"""


def test_the_files_registration_runs_before_ours(ranks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_REGISTRATION)
    job = {"also": str(tmp_path / "own.py")}
    (found,) = ranks.run("tests.trainer.entry_jobs:registered_after_another", 1, job).values
    assert found == {"name": "custom_template", "theirs": True, "ours": True}


def test_on_an_accelerator_the_job_is_handed_over(tmp_path: Path, on: Any) -> None:
    on("gpu:0")
    path = config(tmp_path)
    job = prepare(path, None, ["max_steps=3"])
    assert job.argv == ("-m", "paddleformers.cli.cli", "train", str(path), "max_steps=3", OURS)
    assert job.ranks is None
    assert job.environment["PADDLEFORMERS_DIST_LOG"] == str(tmp_path / "out/log")
    assert job.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert run("train", path, "--dry-run", "--json").document["ranks"] is None


def test_a_job_that_was_handed_over_returns_its_code(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        for code, returned in (("print('here'); exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
            job = training.TrainingJob(("-c", code), None, {}, tmp_path, True)
            assert training.run(job, log)[0].returncode == returned
        assert (tmp_path / "log").read_text() == "here\n"


def test_a_stopped_launcher_is_ended(tmp_path: Path) -> None:
    code = "import os, signal; print('here', flush=True); os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    ended, error = training.run(training.TrainingJob(("-c", code), None, {}, tmp_path, True), io.StringIO())
    assert (ended.returncode, ended.stopped_by, error) == (143, "SIGTERM", None)


KILLED = """
import os, signal
if os.environ["PADDLE_TRAINER_ID"] == "1":
    os.kill({of}, signal.{name})
signal.pause()
"""


def job_of_two(directory: Path, of: str, name: str, resume_overrides: tuple[str, ...] = ()) -> training.TrainingJob:
    """Two ranks that wait for ever, of which the second sends a signal to a process."""
    (directory / "script.py").write_text(KILLED.format(of=of, name=name))
    argv = (str(directory / "script.py"),)
    return training.TrainingJob(argv, 2, {}, directory / "out/log", True, directory / "out", resume_overrides)


def shown(ended: training.Ended) -> list[str]:
    """What a person reads of an end."""
    with redirect_stdout(io.StringIO()) as out:
        training.show(ended, console())
    return out.getvalue().splitlines()


def test_a_killed_rank_is_listed_with_its_signal_and_the_step_to_resume(tmp_path: Path) -> None:
    save(tmp_path / "out/checkpoint-3", canonical())
    ended, _ = training.run(job_of_two(tmp_path, "os.getpid()", "SIGKILL"), io.StringIO())
    assert ended.signalled == (training.Signalled(1, "SIGKILL"),)
    lines = shown(ended)
    assert lines[-2].startswith("  rank 1 was ended by SIGKILL: ")
    assert lines[-1] == "  next: run the same command again; it resumes at step 3"


@pytest.fixture
def heeding() -> Iterator[None]:
    """A process that an interrupt interrupts; a shell may start those in its background so that they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding")
@pytest.mark.parametrize("forwarded", [None, "SIGTERM", "SIGINT"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_stopped_training_reports_the_step_at_which_it_resumes(
    tmp_path: Path, name: str, code: int, forwarded: str | None
) -> None:
    save(tmp_path / "out/checkpoint-3", canonical())
    job = job_of_two(tmp_path, "os.getppid()", name, ("resume_from_checkpoint=true",))
    job = dataclasses.replace(job, save_signal=forwarded)
    before = signal.getsignal(signal.SIGTERM)
    ended, _ = training.run(job, io.StringIO())
    assert (ended.returncode, ended.stopped_by, signal.getsignal(signal.SIGTERM)) == (code, name, before)
    lines = shown(ended)
    assert lines[0].startswith(f"stopped by {name}; ")
    assert lines[1:3] == [f"  log: {tmp_path / 'out/log' / f'rank-0000{rank}.log'}" for rank in (0, 1)]
    added = "with resume_from_checkpoint=true"
    assert lines[3:] == [f"  next: run the same command again {added}; it resumes at step 3"]


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
    job = job_of_two(tmp_path, "os.getpid()", "SIGCONT")
    ended, _ = training.run(job, io.StringIO())
    assert (ended.returncode, ended.stopped_by) == (143, "SIGTERM")


HANDLING = """
import signal, sys, time
from paddleformers_fc.trainer.rank_records import process_recorded

signal.signal(signal.SIGTERM, lambda *_: sys.exit(85) if {saves} else None)
with process_recorded():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "hangs"])
@pytest.mark.parametrize("local", [True, False], ids=["local ranks", "another launcher"])
def test_a_forwarded_signal_lets_ranks_save_in_time(
    tmp_path: Path, local: bool, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "out/checkpoint-3", canonical())
    script, log_dir = tmp_path / "script.py", tmp_path / "out/log"
    script.write_text(HANDLING.format(saves=saves))
    job = training.TrainingJob(
        (str(script),), 1 if local else None, {RECORDS: str(log_dir)}, log_dir, True, tmp_path / "out"
    )

    class Stopping(io.StringIO):
        def write(self, text: str) -> int:
            if "ready" in text:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)

    if not saves:
        monkeypatch.setattr(training, "FORWARDED_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGTERM)
    ended, error = training.run(dataclasses.replace(job, save_signal="SIGTERM"), Stopping())
    assert (ended.returncode, ended.stopped_by, ended.report, error) == (85 if saves else 143, "SIGTERM", None, None)
    assert (ended.signalled, signal.getsignal(signal.SIGTERM)) == ((), before)
    lines = shown(ended)
    assert lines[0].startswith("saved and stopped by SIGTERM; " if saves else "stopped by SIGTERM; ")
    assert lines[-1] == "  next: run the same command again; it resumes at step 3"
    assert not local or ("script.py" in (log_dir / "rank-00000.log").read_text()) != saves  # The stacks of ranks.


def test_a_rank_that_aborts_after_an_error_of_another_is_not_reported_as_the_cause(tmp_path: Path) -> None:
    logs = (tmp_path, tmp_path)
    assert training._signalled(LaunchResult(134, (-6, 1), logs, 1.0, (1, 0))) == ()
    both = training._signalled(LaunchResult(134, (-6, -9), logs, 1.0, (1, 0)))
    assert both == (training.Signalled(1, "SIGKILL"), training.Signalled(0, "SIGABRT"))


@pytest.mark.parametrize(
    ("keys", "added"),
    [
        ({"do_train": True}, ()),
        ({"resume_from_checkpoint": True}, ()),
        ({"do_train": True, "overwrite_output_dir": True}, ("overwrite_output_dir=false",)),
        ({}, ("resume_from_checkpoint=true",)),
    ],
)
def test_the_overrides_for_a_resume_follow_from_the_keys(
    tmp_path: Path, on: Any, keys: dict[str, Any], added: tuple[str, ...]
) -> None:
    assert prepare(config(tmp_path, **keys), None, []).resume_overrides == added


def test_the_number_of_ranks_is_not_chosen_on_an_accelerator(tmp_path: Path, on: Any) -> None:
    on("gpu:0")
    with pytest.raises(OptionError, match="--nproc is for machines without an accelerator"):
        prepare(config(tmp_path), 2, [])


@pytest.mark.parametrize(
    ("keys", "overrides", "text"),
    [
        ({"save_checkpoint_format": "unified_checkpoint"}, [], "save_checkpoint_format: unified_checkpoint"),
        ({}, ["flex_verify=twice"], "flex_verify: 'twice'"),
        ({"output_dir": None}, [], "output_dir is missing"),
        ({"custom_register_path": "nowhere.py"}, [], "The file of custom_register_path does not exist."),
        ({}, ["max_steps", "=3", "save_steps=1"], "- 'max_steps'\n  - '=3'\n"),
        ({}, ["max_steps=[3"], "The value of an override is not valid YAML."),
        ({}, ["flex_verfy=full"], "flex_verfy: is flex_verify meant?"),
        ({"flex_plan_cache": "p"}, [], "flex_plan_cache: removed: the value is constant now"),
        ({}, ["flex_plan_cache=p"], "flex_plan_cache: removed: the value is constant now"),
        ({"flexcheckpoint": True}, [], "flexcheckpoint: is flex_checkpoint meant?"),
        (
            {"stage": "ernie_pretrain"},
            [],
            "flex_checkpoint: true and stage: ernie_pretrain: that stage loads and saves",
        ),
        (
            {"FLEX_verify": "full"},
            ["flex-verify=full"],
            "- FLEX_verify: is flex_verify meant?\n  - flex-verify: is flex",
        ),
        ({}, ["save_total_limt=2", "--dry-run"], "save_total_limt: is save_total_limit meant?"),
        ({"model_name_or_path": "./nowhere"}, [], "model_name_or_path: ./nowhere"),
        ({"model_name_or_path": "tests/nothing"}, [], "- model_name_or_path: tests/nothing"),
        ({"model_name_or_path": "nowhere/"}, [], "- model_name_or_path: nowhere/"),
        ({"output_dir": 3}, [], "output_dir is missing"),
        ({"output_dir": ""}, [], "named by an empty text"),
        ({"output_dir": ""}, ["flex_checkpoint=false"], "named by an empty text"),
        ({"train_dataset_path": "/dev/null,/nowhere/a.jsonl"}, [], "- train_dataset_path: /nowhere/a.jsonl"),
        ({"tensor_model_parallel_size": 4}, ["--nproc", "2"], "2 ranks cannot be divided into groups of 4"),
        ({"tensor_model_parallel_size": "two"}, ["--dry-run"], "- tensor_model_parallel_size: 'two'"),
        (
            {},
            ["max_steps=abc", "sharding_parallel_size=1.5"],
            "- max_steps: 'abc' is text, not a number\n  - sharding_p",
        ),
        ({"learning_rate": "1e-5"}, [], "- learning_rate: '1e-5' is text, not a number"),
        ({"save_steps": "3"}, ["do_eval='no'"], "- do_eval: 'no' is text, not true or false\n  - save_steps: '3'"),
        ({"stage": "pt", "compute_type": "fp32"}, [], "- stage: 'pt' is none of SFT, PT, DPO, VL-SFT, VL-PT, VL-DPO"),
        ({"fine_tuning": "fulll", "flex_checkpoint": False}, [], "- fine_tuning: 'fulll' is none of LoRA, full"),
        ({}, ["save_strategy=no"], "- save_strategy: False is none of no, steps, epoch"),
        ({"sharding": "stage4"}, [], "- sharding: 'stage4' is none of stage1, stage2, stage3, offload\n"),
        ({"sharding": ["stage1"]}, [], "- sharding: ['stage1'] is none of stage1"),
        ({"sharding": None}, [], "- sharding: null is none of stage1, stage2, stage3, offload\n"),
        ({"lr_scheduler_type": "cosin"}, [], "- lr_scheduler_type: 'cosin' is none of linear, cosine, constant"),
        ({"optim": "adam"}, ["sharding=stage1 stage5"], "- optim: 'adam' is none of adamw, adafactor, adamw_mini"),
        ({"sep_parallel_size": 2}, ["--nproc", "2"], "flex_checkpoint: true and sep_parallel_size: 2: segment"),
        ({}, ["context_parallel_size=2"], "flex_checkpoint: true and context_parallel_size: 2: context"),
        ({"save_steps": 0}, [], "save_steps: 0 with save_strategy: steps"),
        ({"save_steps": -1, "save_strategy": "steps"}, [], "save_steps: -1 with save_strategy: steps"),
        ({"lora_rank": 0, "lora": True}, [], "- lora_rank: 0 is less than 1"),
        ({"gradient_accumulation_steps": 0}, ["per_device_train_batch_size=0"], "- per_device_train_batch_size: 0 is"),
        ({"logging_steps": 0}, [], "- logging_steps: 0 with logging_strategy: steps"),
        ({"do_eval": True}, [], "- do_eval: true with evaluation_strategy: no"),
        ({"load_best_model_at_end": True}, [], "- load_best_model_at_end: true with evaluation_strategy: no and save"),
        (
            {"load_best_model_at_end": True, "evaluation_strategy": "steps", "eval_steps": 2, "save_steps": 3},
            [],
            "- load_best_model_at_end: true with save_steps: 3, which is no multiple of eval_steps: 2",
        ),
        ({"max_steps": -1, "num_train_epochs": 0}, [], "- max_steps: -1 and num_train_epochs: 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_rank_starts(
    tmp_path: Path, on: Any, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], overrides: list[str], text: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    outcome = run("train", config(tmp_path, **keys), *overrides)
    assert outcome.code == 2
    assert text in outcome.err
    assert not (tmp_path / "out").exists()


def test_faults_of_every_kind_are_listed_together_with_the_advice_of_each(tmp_path: Path, on: Any) -> None:
    on("gpu:0")
    keys = {
        "save_steps": "3",
        "max_steps": 1.5,
        "train_dataset_path": "./no",
        "compute_type": "fp8",
        "logging_steps": 0,
    }
    with pytest.raises(OptionError) as caught:
        prepare(config(tmp_path, **keys, **pipeline(2, 2)), None, [])
    heads = [line.partition(" ")[0] for line in caught.value.evidence]
    virtual = "virtual_pipeline_model_parallel_size:"
    assert heads == [
        "save_steps:",
        "max_steps:",
        "train_dataset_path:",
        "compute_type:",
        "logging_steps:",
        virtual,
        virtual,
    ]
    for advice in ("without quotes", "Relative paths", "one of the listed words", "Change the listed keys"):
        assert caught.value.next_step.count(advice) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"save_strategy": "no", "save_steps": 0},
        {"save_steps": 0, "save_last_step": True},
        {"save_steps": 0, "flex_checkpoint": False},
        {"lora_rank": 0, "fine_tuning": "full"},
        {"logging_steps": 0, "logging_strategy": "epoch"},
        {"load_best_model_at_end": True, "evaluation_strategy": "steps", "eval_steps": 2, "save_steps": 4},
        {"load_best_model_at_end": True, "evaluation_strategy": "epoch", "save_strategy": "epoch", "eval_steps": 3},
        {"max_steps": 0, "num_train_epochs": 1},
    ],
)
def test_numbers_and_strategies_that_go_together_are_accepted(tmp_path: Path, on: Any, keys: dict[str, Any]) -> None:
    assert run("train", config(tmp_path, **keys), "--dry-run").code == 0


def test_a_layout_that_divides_the_ranks_and_a_model_of_a_hub_are_accepted(tmp_path: Path, on: Any) -> None:
    keys = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": -1, "sharding_parallel_size": 3}
    keys |= {"flex_ckpt_comm_method": "broadcast", "fine_tuning": "full"}
    path = config(tmp_path, model_name_or_path="owner/name", **keys)
    assert prepare(path, 4, []).ranks == 4


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory that this process may not look into, also where the tests run as root."""
    directory, user = tmp_path / "closed", os.geteuid()
    directory.mkdir(0)
    if user == 0:
        os.seteuid(65534)
    yield directory
    os.seteuid(user)
    directory.chmod(0o700)


@pytest.mark.parametrize(
    "look",
    [
        lambda path: start_checks.refuse_settings({"model_name_or_path": path}, False),
        lambda path: start_checks.refuse_settings({"train_dataset_path": path}, False),
        lambda path: training._own_registration(path),
        lambda path: main._named(path),
    ],
    ids=["model", "data", "registration", "directory of a command"],
)
def test_a_path_of_another_user_is_refused_with_the_next_step(closed: Path, look: Callable[[str], object]) -> None:
    with pytest.raises(StorageError) as caught:
        look(str(closed / "file"))
    assert caught.value.what == f"The operating system refused to look at {closed / 'file'}: Permission denied."
    assert caught.value.next_step == "Give this user the right to this path, or choose another."


def test_a_path_that_is_too_long_to_exist_is_missing(tmp_path: Path, on: Any) -> None:
    outcome = run("train", config(tmp_path, model_name_or_path=str(tmp_path / ("long" * 100))))
    assert outcome.code == 2
    assert "does not exist" in outcome.err


def test_paths_are_read_as_paddleformers_reads_them(tmp_path: Path, on: Any) -> None:
    model, data = tmp_path / "my model", tmp_path / "train.jsonl"
    model.mkdir()
    data.touch()
    named = {"model_name_or_path": str(model), "train_dataset_path": f"{data}#100, {data}"}
    path = config(tmp_path, **named, **FULL)
    assert prepare(path, 1, []).ranks == 1
    with pytest.raises(OptionError) as caught:
        prepare(config(tmp_path, train_dataset_path=f"{data},{tmp_path}/other.jsonl#7"), 1, [])
    assert caught.value.evidence == (f"train_dataset_path: {tmp_path}/other.jsonl does not exist",)


def test_a_model_in_the_output_directory_is_never_looked_up_on_a_hub(tmp_path: Path, on: Any) -> None:
    path = config(tmp_path, model_name_or_path="runs/nothing", output_dir="./runs/first")
    with pytest.raises(OptionError) as caught:
        prepare(path, 1, [])
    assert caught.value.evidence == ("model_name_or_path: runs/nothing does not exist",)
    assert prepare(config(tmp_path, model_name_or_path="owner/name", output_dir="runs", **FULL), 1, []).ranks == 1


def test_data_that_is_never_drawn_may_be_missing(tmp_path: Path, on: Any) -> None:
    data = tmp_path / "train.jsonl"
    data.touch()
    paths = f"{data}, /nowhere/off.jsonl"
    for chances in ("1.0, 0", "0.5,0.0"):
        path = config(tmp_path, train_dataset_path=paths, train_dataset_prob=chances, device="cpu")
        assert prepare(path, 1, []).ranks == 1
    drawn = config(tmp_path, eval_dataset_path="/nowhere/off.jsonl", eval_dataset_prob=0, train_dataset_path=str(data))
    assert prepare(drawn, 1, []).ranks == 1
    for chances in ("0,1", "0", "1,none"):
        with pytest.raises(OptionError, match=r"off\.jsonl does not exist"):
            prepare(config(tmp_path, train_dataset_path=paths, train_dataset_prob=chances), 1, [])


def test_a_key_that_a_users_registration_may_add_is_accepted(tmp_path: Path, on: Any) -> None:
    (tmp_path / "own.py").touch()
    own = {"custom_register_path": str(tmp_path / "own.py"), "device": "cpu"}
    assert prepare(config(tmp_path, new_key=1, **own), None, ["another.one=2"]).ranks == 1
    with pytest.raises(OptionError, match="flex_verfy"):
        prepare(config(tmp_path, flex_verfy="full", **own), None, [])


def test_every_key_that_paddleformers_takes_is_known_without_importing_it(ranks: ForkServer) -> None:
    known = stock_arguments().keys
    (names,) = ranks.run("tests.trainer.entry_jobs:stock_names", 1).values
    assert {"save_total_limit", "tensor_model_parallel_size", "model_name_or_path", "template"} <= set(names)
    assert sorted(set(names) - known) == []


def test_the_words_of_keys_are_those_of_paddleformers_enumerations(ranks: ForkServer, tmp_path: Path) -> None:
    (found,) = ranks.run("tests.trainer.entry_jobs:stock_enumerations", 1, {"output_dir": str(tmp_path)}).values
    assert {key: list(words.known) for key, words in stock_arguments().words.items()} == found


@pytest.mark.parametrize("sharding", ["stage1", "", True, False, []])
def test_every_form_of_sharding_that_paddleformers_takes_is_accepted(tmp_path: Path, on: Any, sharding: Any) -> None:
    assert prepare(config(tmp_path, sharding=sharding), 2, []).ranks == 2


def test_a_missing_checkpoint_to_resume_is_refused_before_a_rank_starts(tmp_path: Path, on: Any) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.safetensors").touch()
    outcome = run("train", config(tmp_path), f"resume_from_checkpoint={tmp_path / 'weights'}")
    assert outcome.code == 1
    assert "holds open weights" in outcome.err
    outcome = run("train", config(tmp_path), f"resume_from_checkpoint={tmp_path / 'nothing'}")
    assert outcome.code == 2
    assert "nothing does not exist" in outcome.err
    assert not (tmp_path / "out").exists()


STOCK = {"flex_checkpoint": False, "do_train": True, "stage": "PT", "device": "cpu"}


def test_a_flex_checkpoint_is_not_resumed_by_paddleformers_alone(tmp_path: Path, on: Any) -> None:
    checkpoint = save(tmp_path / "out/checkpoint-10", canonical())
    (tmp_path / "out/checkpoint-9").mkdir()
    path = config(tmp_path, **STOCK)
    for refused in (
        [],
        ["resume_from_checkpoint=true"],
        ["stage=DPO"],
        [f"resume_from_checkpoint={checkpoint}", f"output_dir={tmp_path / 'other'}"],
    ):
        outcome = run("train", path, *refused, "--dry-run")
        assert outcome.code == 2, refused
        assert outcome.err.startswith(f"{checkpoint} is a flex checkpoint, and without flex_checkpoint: true ")
        assert "  next: Set flex_checkpoint: true; or to start a new run, set another output_dir" in outcome.err


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            ["flex_checkpoint=true"],
            ["overwrite_output_dir=true"],
            ["resume_from_checkpoint=false"],
            ["do_train=false"],
        ),
        *(["output_dir={}/other"], ["output_dir={}/stock"], ["stage=DPO", "output_dir={}/other", "{}"]),
    ],
)
def test_a_run_that_resumes_another_format_is_accepted(tmp_path: Path, on: Any, overrides: list[str]) -> None:
    checkpoint = save(tmp_path / "out/checkpoint-10", canonical())
    (tmp_path / "stock/checkpoint-11").mkdir(parents=True)
    shutil.copytree(checkpoint, tmp_path / "stock/checkpoint-3")
    named = f"resume_from_checkpoint={checkpoint}"
    given = [named if text == "{}" else text.format(tmp_path) for text in overrides]
    assert prepare(config(tmp_path, **STOCK), 1, given).ranks == 1


TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "fuse_rms_norm": False,
}


def model_of(directory: Path, **changes: Any) -> str:
    """A directory with the configuration of a tiny Llama."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY, **changes}))
    return str(directory)


FULL = {"fine_tuning": "full", "stage": "PT", "device": "cpu"}


def test_a_degree_that_the_model_cannot_have_is_refused_as_plan_refuses_it(tmp_path: Path, on: Any) -> None:
    path = config(tmp_path, model_name_or_path=model_of(tmp_path / "model"), **FULL)
    outcome = run("train", path, "--nproc", "3", "tensor_model_parallel_size=3")
    assert outcome.code == 2
    assert outcome.err.startswith("The grid tp=3 does not fit this model.\n")
    assert "vocab_size=64 is not divisible by tp=3" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, ["tensor_model_parallel_size=2"]),
        ({}, ["pipeline_model_parallel_size=6"]),
        ({"model_type": "unknown"}, []),
        ({"model_type": "unknown"}, ["flex_checkpoint=false"]),
        ({**MINIMAX.tiny, "model_type": "minimax_m2", "vocab_size": 66}, ["tensor_model_parallel_size=3"]),
        ({}, ["tensor_model_parallel_size=3", "stage=dsv3_pretrain"]),
        ({}, ["tensor_model_parallel_size=3", "flex_checkpoint=false"]),
        ({}, ["sharding=stage1", "expert_model_parallel_size=3", "use_expert_parallel=true"]),
        ({}, ["sharding=stage1", "expert_model_parallel_size=6", "use_expert_parallel=true"]),
        ({}, ["tensor_model_parallel_size=3", "custom_register_path={}/own.py"]),
        ({}, ["tensor_model_parallel_size=3", "model_name_or_path=owner/name"]),
    ],
)
def test_a_degree_that_may_be_possible_is_accepted(
    tmp_path: Path, on: Any, changes: dict[str, Any], overrides: list[str]
) -> None:
    (tmp_path / "own.py").touch()
    path = config(tmp_path, model_name_or_path=model_of(tmp_path / "model", **changes), **FULL)
    assert prepare(path, 6, [text.format(tmp_path) for text in overrides]).ranks == 6


def pipeline(stages: int, virtual: int = 1, passes: int = 1, **keys: Any) -> dict[str, Any]:
    degrees = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
    return {**FULL, **degrees, "gradient_accumulation_steps": passes, **keys}


PASSES = "virtual_pipeline_model_parallel_size: 2 needs gradient_accumulation_steps: 4, or 8 or more, instead of "


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (pipeline(2, stage="DPO"), "clear_every_step_cache: not true, which stage: DPO needs in a pipeline"),
        (pipeline(2, stage="VL-DPO", clear_every_step_cache=False), "which stage: VL-DPO needs"),
        (
            pipeline(2, stage="DPO", clear_every_step_cache=True, sequence_parallel=True),
            "- partial_send_recv: not false, which stage: DPO needs with sequence_parallel: true\n",
        ),
        (pipeline(2, 2, 4), "virtual_pipeline_model_parallel_size: 2 needs more than 2 pipeline stages"),
        (pipeline(4, 2, 3), f"{PASSES}3"),
        (pipeline(4, 2, 7), f"{PASSES}7"),
        (pipeline(4, 2, 2, best_unbalanced_scheduler=True), f"{PASSES}2"),
        (pipeline(4, 2, 8, pp_seg_method="uniform"), "needs pp_seg_method: layer:DecoderLayer|EmptyLayer instead of"),
        (pipeline(4, 2, 8), "10 layers, empty ones included, are not divisible by pp x vpp = 4 x 2 = 8"),
        (pipeline(4, 3, 8), "num_hidden_layers=10 is less than pp x vpp = 4 x 3 = 12 stages"),
    ],
)
def test_a_pipeline_that_every_rank_would_refuse_is_refused_before_any_starts(
    tmp_path: Path, on: Any, keys: dict[str, Any], text: str
) -> None:
    model = model_of(tmp_path / "model", num_hidden_layers=10)
    outcome = run("train", config(tmp_path, model_name_or_path=model, **keys), "--nproc", "4")
    assert outcome.code == 2
    assert text in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "keys",
    [
        pipeline(2, stage="DPO", clear_every_step_cache=True),
        pipeline(2, stage="DPO", clear_every_step_cache=True, sequence_parallel=True, partial_send_recv=False),
        pipeline(1, 2, stage="DPO", sequence_parallel=True),
        pipeline(4, 2, 4),
        pipeline(4, 2, 9),
        pipeline(4, 2, 7, best_unbalanced_scheduler=True),
        pipeline(4, 2, 8, pp_seg_method="layer:DecoderLayer"),
        pipeline(4, 1, 3),
    ],
)
def test_a_pipeline_that_may_be_possible_is_accepted(tmp_path: Path, on: Any, keys: dict[str, Any]) -> None:
    model = model_of(tmp_path / "model", num_hidden_layers=8)
    assert prepare(config(tmp_path, model_name_or_path=model, **keys), 4, []).ranks == 4


@pytest.mark.parametrize("written", [{"fuse_rms_norm": True}, {"fuse_rms_norm": None}])
def test_a_fused_norm_on_a_cpu_is_refused_with_its_key(tmp_path: Path, on: Any, written: dict[str, Any]) -> None:
    model = Path(model_of(tmp_path / "model"))
    keys = {**TINY, **written}
    (model / "config.json").write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    outcome = run("train", config(tmp_path, model_name_or_path=str(model), **FULL))
    assert outcome.code == 2
    assert "fuse_rms_norm" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ranks", "keys", "message"),
    [
        (3, {"sharding": "stage1", "use_expert_parallel": True}, "no multiple of it"),
        (1, {"use_expert_parallel": True}, "no multiple of it"),
        (2, {"sharding": "stage1"}, "use_expert_parallel is not true"),
        (2, {"sharding": "", "use_expert_parallel": True}, "data parallel degree 2"),
        (4, {"sharding": "stage1", "sharding_parallel_size": 2, "use_expert_parallel": True}, "data parallel degree 2"),
    ],
)
def test_a_degree_of_experts_that_does_not_fit_is_refused_with_its_key(
    tmp_path: Path, on: Any, ranks: int, keys: dict[str, Any], message: str
) -> None:
    path = config(tmp_path, expert_model_parallel_size=2, model_name_or_path="owner/name", **FULL, **keys)
    outcome = run("train", path, "--nproc", ranks)
    assert outcome.code == 2
    assert "expert_model_parallel_size: 2" in outcome.err
    assert message in outcome.err
    assert not (tmp_path / "out").exists()


def test_experts_without_the_key_sharding_have_paddleformers_default(tmp_path: Path, on: Any) -> None:
    keys = {"expert_model_parallel_size": 2, "use_expert_parallel": True}
    assert prepare(config(tmp_path, model_name_or_path="owner/name", **FULL, **keys), 2, []).ranks == 2


EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 16}


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (EXPERTS, "it is read from n_routed_experts, num_experts, num_local_experts"),
        ({**EXPERTS, "num_experts": 4, "num_local_experts": 8}, "num_experts: 4"),
        ({"hidden_size": None}, "it is read from hidden_size"),
    ],
    ids=str,
)
def test_a_configuration_that_every_rank_would_refuse_is_refused_before_any_starts(
    tmp_path: Path, on: Any, changes: dict[str, Any], message: str, degree: int
) -> None:
    path = config(tmp_path, model_name_or_path=model_of(tmp_path / "model", **changes), **FULL)
    outcome = run("train", path, "--dry-run", "--nproc", "2", f"tensor_model_parallel_size={degree}")
    assert outcome.code == 1
    assert message in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({**EXPERTS, "num_local_experts": 4}, []),
        ({**EXPERTS, "num_experts": 4}, []),
        (EXPERTS, ["n_routed_experts=4"]),
    ],
)
def test_a_size_that_the_file_or_the_command_line_gives_is_enough(
    tmp_path: Path, on: Any, changes: dict[str, Any], overrides: list[str]
) -> None:
    path = config(tmp_path, model_name_or_path=model_of(tmp_path / "model", **changes), **FULL)
    assert run("train", path, "--dry-run", *overrides).code == 0


@pytest.mark.parametrize("keys", [{"fine_tuning": "LoRA"}, {"lora": True}, {}])
def test_adapters_are_trained_as_paddleformers_does_by_default(tmp_path: Path, on: Any, keys: dict[str, Any]) -> None:
    path = config(tmp_path, model_name_or_path=model_of(tmp_path / "model"), **keys)
    assert run("train", path, "--dry-run").code == 0


@pytest.mark.parametrize("verb", [["train", "--dry-run"], ["train"]])
@pytest.mark.parametrize(("inside", "reason"), [("/proc/x", "No such file"), ("job.yaml/x", "Not a directory")])
def test_an_output_directory_that_cannot_be_made_is_refused(
    tmp_path: Path, on: Any, verb: list[str], inside: str, reason: str
) -> None:
    path = config(tmp_path)
    output = tmp_path / inside  # An absolute path stays what it is.
    outcome = run(*verb, path, f"output_dir={output}")
    assert outcome.code == 2
    assert outcome.err.startswith(f"The operating system refused to create {output}")
    assert reason in outcome.err
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("change", [lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
def test_a_checkpoint_with_a_file_of_another_size_is_refused_before_anything_starts(
    tmp_path: Path, on: Any, change: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path / "run/checkpoint-3", canonical())
    resumed = [config(tmp_path), f"resume_from_checkpoint={checkpoint}"]
    assert run("train", *resumed, "--dry-run").code == 0
    change(checkpoint / "config.json")
    outcome = run("train", *resumed, "--dry-run")
    assert outcome.code == 1
    assert "config.json" in outcome.err
    assert run("train", *resumed, "flex_verify=off", "--dry-run").code == 0
    for name, value in (("NNODES", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    assert run("train", *resumed, "--dry-run").code == 0


def test_checkpoints_below_the_directory_to_resume_are_offered(tmp_path: Path, on: Any) -> None:
    checkpoint = save(tmp_path / "all/runs/one/checkpoint-3", canonical())
    outcome = run("train", config(tmp_path), f"resume_from_checkpoint={tmp_path / 'all'}")
    assert f"  next: Name a checkpoint inside it, such as {checkpoint}." in outcome.err


def test_preparation_leaves_an_output_directory_empty(tmp_path: Path, on: Any) -> None:
    (tmp_path / "out").mkdir()
    prepare(config(tmp_path), None, [])
    assert list((tmp_path / "out").iterdir()) == []


def test_every_start_has_its_own_logs(tmp_path: Path, on: Any) -> None:
    path = config(tmp_path)
    for name in ("log", "log-2", "log-3"):
        job = prepare(path, None, [])
        assert job.log_dir == tmp_path / "out" / name
        job.log_dir.mkdir(parents=True)


def test_two_starts_at_the_same_time_have_logs_of_their_own(tmp_path: Path, on: Any) -> None:
    path = config(tmp_path)
    jobs = [prepare(path, None, [], claim_logs=True) for _ in range(2)]
    assert [job.log_dir for job in jobs] == [tmp_path / "out" / name for name in ("log", "log-2")]
    for job in jobs:
        assert job.log_dir.is_dir()
        assert job.environment[RECORDS] == str(job.log_dir)


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
\x1b[32m[2026-01-01 10:00:00,000] [    INFO]\x1b[0m - Resumed step 3 from out/checkpoint-3: 2.6 MB in 0.15 s\x1b[0m
\x1b[32m[2026-01-01 10:00:00,000] [    INFO]\x1b[0m - loss: 5.68, learning_rate: 0.0, global_step: 5, ppl: 293.3\x1b[0m
\x1b[32m[2026-01-01 10:00:00,000] [    INFO]\x1b[0m - Saved step 6 to out/checkpoint-6: 2.7 MB in 0.09 s\x1b[0m
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
    screen.close()
    lines = stream.getvalue().splitlines()
    assert [line.partition("] - ")[2] or line for line in lines] == [
        " 17%|x     | 1/6 [00:01<00:05,  1.00s/it]",
        "Final model config: LlamaConfig {",
        "2 parameters are trained and without optimizer states:",
        "  - model.norm.weight",
        "printed by a callback",
        "  and indented",
        "Resumed step 3 from out/checkpoint-3: 2.6 MB in 0.15 s",
        "loss: 5.68, learning_rate: 0.0, global_step: 5, ppl: 293.3",
        "Saved step 6 to out/checkpoint-6: 2.7 MB in 0.09 s",
        "KeyError: 'a'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "the end",
    ]
    assert "\x1b" not in stream.getvalue()


def test_figures_that_no_rank_recorded_are_null_and_a_loss_is_a_number(tmp_path: Path) -> None:
    absent = ("report", "resumed", "step", "loss", "checkpoint", "stopped_by", "goes_on")
    script = tmp_path / "script.py"
    script.write_text("print('loss: 1.5, global_step: 2,')")
    for loss in (None, 5.92332745, math.nan):
        log_dir = tmp_path / str(loss)
        if loss is not None:
            log_dir.mkdir()
            (log_dir / "rank-00000.json").write_text(json.dumps({"step": 3, "loss": str(loss)}))
        ended, _ = training.run(training.TrainingJob((str(script),), 1, {}, log_dir, True), io.StringIO())
        found = json.loads(msgspec.json.encode(ended))
        assert found["loss"] == (None if loss is None or math.isnan(loss) else loss)
        assert found["step"] == (None if loss is None else 3)
        assert all(found[key] is None for key in absent if key not in ("step", "loss"))
    assert shown(ended)[0].startswith("trained 3 steps, up to 3, last loss nan; ")
    job = training.TrainingJob((str(script),), 1, {}, tmp_path / "again", True)
    job.log_dir.mkdir()
    (job.log_dir / "rank-00000.json").write_text(json.dumps({"resumed": 3, "step": 3}))
    lines = shown(training.run(job, io.StringIO())[0])
    assert lines[0].startswith("trained 0 steps, resumed at 3; ")
    assert "overwrite_output_dir=true" in lines[-1]


def test_a_terminal_keeps_its_colours() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    LogView(stream).write("\x1b[32mgreen\x1b[0m\n")
    assert stream.getvalue() == "\x1b[32mgreen\x1b[0m\n"


def test_without_paddleformers_the_error_has_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "find_spec", lambda name: None)
    outcome = run("train", config(tmp_path))
    assert outcome.code == 2
    assert 'pip install "paddleformers-fc[cpu]"' in outcome.err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("a.yaml", "a: [1"), ("a.yaml", "- 1"), ("a.yaml", ""), ("a.yaml", "\xff"), ("a.yaml", "[" * 3000)),
        *(("a.json", "{"), ("a.json", "[]"), ("a.json", '{"a": 1, "a": 2}'), ("a.json", '{"a": \xff}')),
        ("a.toml", "a = 1"),
    ],
)
def test_an_unreadable_configuration_is_refused_with_its_path(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OptionError) as caught:
        read_settings(path)
    assert caught.value.where == str(path)


def test_a_fault_of_a_yaml_is_reported_with_file_and_line(tmp_path: Path) -> None:
    for text, message in (("a: 1\nb: [1\n", 'in "job.yaml", line 2'), ("a: \0", 'in "job.yaml", position 3')):
        (tmp_path / "job.yaml").write_text(text)
        with pytest.raises(OptionError) as caught:
            read_settings(tmp_path / "job.yaml")
        assert message in caught.value.render()
        assert "unicode string" not in caught.value.render()
    with pytest.raises(OptionError, match='in "max_steps", line 1'):
        parse_overrides(["max_steps=[3"])


def test_a_duplicate_key_of_a_yaml_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for text in ("a: 1\nseed: 3\nb: 2\n'seed': 4\n", "a: 1\nb: {c: 1,\n  d: 2,\n\n  d: 3}\n"):
        path.write_text(text)
        with pytest.raises(OptionError) as caught:
            read_settings(path)
        message = caught.value.render()
        assert f"the key {'seed' if 'seed' in text else 'd'} is there" in message
        lines = (2, 4) if "seed" in text else (3, 5)
        assert all(f'in "job.yaml", line {line}, column' in message for line in lines)


def test_a_key_that_replaces_a_merged_one_is_not_a_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("b: &b {x: 1, y: 1}\na: &a {<<: *b, x: 2}\nc: {<<: *a, y: 3}\nd: [*a, 1, '1']\ne: {1: 1, '1': 2}\n")
    assert read_settings(path) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "a.json"])
def test_a_configuration_is_yaml_or_json(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps({"max_steps": 3}))
    assert read_settings(tmp_path / name) == {"max_steps": 3}


def test_numbers_with_an_exponent_are_numbers_in_overrides_as_for_paddleformers(tmp_path: Path, on: Any) -> None:
    given = {"learning_rate": "1e-5", "weight_decay": "2E3", "min_lr": "1.0e1", "adam_epsilon": "-1e-8"}
    given |= {"run_name": "1e-5x", "max_grad_norm": "1.5", "num_train_epochs": "3"}
    overrides = [f"{key}={value}" for key, value in given.items()]
    assert parse_overrides(overrides) == OmegaConf.to_container(OmegaConf.from_cli(overrides))
    assert prepare(config(tmp_path, device="cpu", report_to=None, bf16="True"), 1, overrides).ranks == 1


def test_the_values_of_overrides_are_yaml() -> None:
    found = parse_overrides(["a=1", "b=true", "c=x=y", "d="])
    assert found == {"a": 1, "b": True, "c": "x=y", "d": None}


def test_a_dry_run_prints_shell_syntax(tmp_path: Path, on: Any) -> None:
    path = config(tmp_path)
    lines = run("train", path, "max_steps=3", "--nproc", "2", "--dry-run").out.splitlines()
    assert "PADDLE_TRAINERS_NUM=2" in lines
    assert [line.split(":")[0] for line in lines if line.startswith("# rank")] == ["# rank 0", "# rank 1"]
    assert shlex.split(lines[-1]) == [sys.executable, *LAUNCHER, str(path), "max_steps=3", OURS, "device=cpu"]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_is_a_document_under_json(tmp_path: Path, on: Any) -> None:
    document = run("train", config(tmp_path), "--nproc", "2", "--dry-run", "--json").document
    assert document.keys() == {"command", "environment", "ranks", "log_dir"}
    assert [rank["PADDLE_TRAINER_ID"] for rank in document["ranks"]] == ["0", "1"]


def recipe(directory: Path, **keys: Any) -> Path:
    """The demo's YAML for one rank and three steps, in ``directory``."""
    assets = prepare_assets(directory / "assets")
    content = settings(str(assets.models["llama"]), str(assets.corpus), str(directory / "out"), SINGLE)
    return config(directory, **{**content, "max_steps": 3, **keys})


def test_a_training_leaves_a_checkpoint_that_passes_verification(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (tmp_path / "own.py").write_text(f"open({str(witness)!r}, 'w').write(__name__)\n")
    outcome = run("train", recipe(tmp_path, custom_register_path=str(tmp_path / "own.py")), "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["returncode"] == 0
    (log,) = outcome.document["logs"]
    assert "DEBUG" in Path(log).read_text()
    assert "DEBUG" not in outcome.err
    assert "global_step: 3" in outcome.err
    found = outcome.document
    assert (found["resumed"], found["step"], found["checkpoint"]) == (None, 3, str(tmp_path / "out/checkpoint-3"))
    assert isinstance(found["loss"], float)
    assert [found[key] for key in ("report", "stopped_by", "goes_on")] == [None, None, None]
    assert witness.read_text() == "custom_template"
    checkpoint = tmp_path / "out/checkpoint-3"
    assert run("verify", checkpoint).code == 0
    facts = run("inspect", checkpoint, "--json").document["job"]
    assert (facts["step"], facts["world_size"], facts["family"]) == (3, 1, "llama")
    exported = run("export", checkpoint, tmp_path / "export", "--json").document
    assert run("diff", tmp_path / "export", checkpoint).code == 0
    assert exported["tensors"] == facts_of_weights(tmp_path / "out")
    source = tmp_path / "assets/llama"
    wanted = json.loads((source / "config.json").read_text())
    for directory in (checkpoint, tmp_path / "out", tmp_path / "export"):
        generation = (directory / "generation_config.json").read_bytes()
        assert generation == (source / "generation_config.json").read_bytes()
        written = json.loads((directory / "config.json").read_text())
        assert {key: written.get(key, "lost") for key in wanted} == wanted


@pytest.mark.parametrize("named", ["SIGTERM", "off"])
def test_the_command_forwards_the_signal_of_its_option(tmp_path: Path, on: Any, named: str) -> None:
    job = prepare(config(tmp_path, flex_save_on_signal=named), None, [])
    assert job.save_signal == (None if named == "off" else named)
    assert prepare(config(tmp_path, flex_checkpoint=False), None, []).save_signal is None


def wait_for_a_step(directory: Path) -> None:
    """Return as soon as a rank has recorded a step."""
    wait_until(lambda: any(record.step for record in read_records(directory)), "a step")


@pytest.mark.slow
def test_a_training_that_is_stopped_saves_and_reports_where_it_resumes(tmp_path: Path) -> None:
    path, main = recipe(tmp_path, max_steps=100_000, save_steps=100_000), os.getpid()

    def stop() -> None:
        wait_for_a_step(tmp_path / "out/log")
        os.kill(main, signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    stopped = run("train", path, "--nproc", "2")
    stopper.join()
    assert stopped.code == 85
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert "saved and stopped by SIGTERM" in stopped.out
    assert f"it resumes at step {step}" in stopped.out.splitlines()[-1]


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
            wait_for_a_step(tmp_path / "out/log")
        finally:
            script.terminate()
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


def facts_of_weights(directory: Path) -> int:
    """Number of tensors in the final weights of a training."""
    outcome: Outcome = run("inspect", directory, "--json")
    return int(outcome.document["roles"]["model_state"]["tensors"])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Outcome]:
    """The command with a rank that runs a script in place of PaddleFormers, whose import takes seconds."""

    def train(text: str) -> Outcome:
        path, log_dir = tmp_path / "script.py", tmp_path / "out/log"
        path.write_text(text)
        job = training.TrainingJob((str(path),), 1, {RECORDS: str(log_dir)}, log_dir, True)
        monkeypatch.setattr(training, "prepare", lambda *_, **__: job)
        return run("train", config(tmp_path))

    return train


def test_a_training_that_fails_returns_the_code_of_its_rank_and_shows_why(
    tmp_path: Path, script: Callable[[str], Outcome]
) -> None:
    outcome = script("raise RuntimeError('no luck today')")
    assert outcome.code == 1
    assert "no luck today" in outcome.out
    assert "no luck today" in outcome.err
    assert "failed with code 1; " in outcome.out
    assert outcome.out.splitlines()[-1] == f"  log: {tmp_path / 'out/log/rank-00000.log'}"


OWN = """
from paddleformers_fc.errors import MismatchError

def fail(*args, **kwargs):
    raise MismatchError("It does not fit.", where="here", evidence=["a"], next_step="Try b.")
"""


def test_an_error_of_this_package_is_printed_once(tmp_path: Path, script: Callable[[str], Outcome]) -> None:
    recorded = "from paddleformers_fc.trainer.rank_records import record_error_at_exit\nrecord_error_at_exit()"
    outcome = script(f"{OWN}\n{recorded}\nfail()\n")
    assert outcome.code == 1
    assert outcome.err == "It does not fit.\n  where: here\n  - a\n  next: Try b.\n"
    assert "It does not fit." not in outcome.out
    assert "Traceback" not in outcome.out
    assert "Traceback" in (tmp_path / "out/log/rank-00000.log").read_text()


def test_an_error_that_paddleformers_wraps_is_a_document_under_json(
    ranks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What custom_register_path raises before this package is registered cannot be seen, so it registers first.
    own = f"{OWN}\nfrom paddleformers_fc.trainer.register import register\nregister()\nfail()\n"
    (tmp_path / "own.py").write_text(own)
    path = config(tmp_path, device="cpu", custom_register_path=str(tmp_path / "own.py"))
    job = {"yaml": str(path), "records": str(tmp_path)}
    assert ranks.attempt("tests.corruption.jobs:train_as_a_worker", 1, job).returncodes == (1,)
    error = read_error(tmp_path)
    assert isinstance(error, MismatchError)
    ended = training.Ended(1, [], [str(tmp_path / "log/rank-00000.log")], 1.0)
    monkeypatch.setattr(training, "run", lambda job, echo: (ended, error))
    document = run("train", path, "--json").document
    assert (document["error"], document["what"], document["returncode"]) == ("MismatchError", "It does not fit.", 1)


def test_a_run_without_flex_checkpoints_has_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = training.Ended(0, [], [str(tmp_path / "log/rank-00000.log")], 1.0, "")

    def pretend(job: training.TrainingJob, echo: io.StringIO) -> tuple[training.Ended, None]:
        return ended, None

    monkeypatch.setattr(training, "run", pretend)
    silent = run("train", config(tmp_path, device="cpu"))
    noted = run("train", config(tmp_path, device="cpu"), "flex_checkpoint=false")
    idle = run("train", config(tmp_path, device="cpu"), "flex_checkpoint=false", "flex_verify=full", "flex_threads=2")
    assert "without effect: flex_verify, flex_threads." in idle.err
    assert "without effect" not in noted.err
    assert silent.err == ""
    assert "flex_checkpoint is not true" in noted.err
    assert silent.out == noted.out


NODES = {"NNODES": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "8123"}


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of the second of two nodes."""
    for name, value in NODES.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_in_a_job_of_several_nodes_ranks_on_a_cpu_are_started_by_the_stock_command(
    tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path)
    job = prepare(path, 2, ["tensor_model_parallel_size=4"])
    assert job.argv[:3] == ("-m", "paddleformers.cli.cli", "train")
    assert job.ranks is None
    assert job.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert job.environment["PADDLE_DISTRI_BACKEND"] == "gloo"
    assert (job.environment["MASTER_ADDR"], job.environment["MASTER_PORT"]) == ("127.0.0.1", "8123")
    assert job.log_dir == tmp_path / "out/log-node-1"
    with pytest.raises(OptionError, match="4 ranks cannot be divided into groups of 3"):
        prepare(path, 2, ["tensor_model_parallel_size=3"])


def test_on_an_accelerator_several_nodes_are_left_to_the_stock_command(
    tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch
) -> None:
    on("gpu:0")
    second_of_two.setenv("MASTER_ADDR", "localhost")
    job = prepare(config(tmp_path), None, [])
    assert job.environment["MASTER_ADDR"] == "127.0.0.1"
    assert "CUDA_VISIBLE_DEVICES" not in job.environment


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", None, "needs RANK on every node"),
        ("MASTER_ADDR", "", "needs MASTER_ADDR on every node"),
        ("RANK", "2", "RANK=2 is not a node of this job"),
        ("RANK", "-1", "RANK=-1 is not a whole number"),
        ("NNODES", "two", "NNODES=two is not a whole number"),
        ("MASTER_PORT", "http", "MASTER_PORT=http is not a whole number"),
        ("MASTER_ADDR", "no-such-node.invalid", "MASTER_ADDR=no-such-node.invalid does not resolve"),
        ("MASTER_ADDR", "10.199.77.1", "where no other node reaches it"),
    ],
)
def test_variables_by_which_nodes_would_never_meet_are_refused(
    tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch, name: str, value: str | None, message: str
) -> None:
    second_of_two.setenv("POD_IP", "127.0.0.2")
    if value is None:
        second_of_two.delenv(name)
    else:
        second_of_two.setenv(name, value)
    with pytest.raises(OptionError) as caught:
        prepare(config(tmp_path), 1, [])
    assert message in caught.value.render()


def test_a_path_that_another_node_may_see_is_not_refused(
    tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch
) -> None:
    assert prepare(config(tmp_path, resume_from_checkpoint=str(tmp_path / "there/checkpoint-3")), 1, []).ranks is None


def test_a_disk_that_one_of_several_nodes_cannot_write_is_left_to_all_ranks(
    tmp_path: Path, on: Any, second_of_two: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").touch()
    job = prepare(config(tmp_path), 1, [])
    assert tmp_path not in job.log_dir.parents
    job.log_dir.rmdir()
