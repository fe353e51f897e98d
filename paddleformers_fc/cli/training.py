"""``train``: run the stock PaddleFormers training of a YAML with flex checkpoints on the devices of this machine.

PaddleFormers' own command line runs unchanged. This command adds two overrides to the YAML. The registration file
becomes ``custom_register_path``; if the YAML names one of its own, both run, the YAML's first. ``device=cpu`` is added
if there is no accelerator and the YAML names no device. On a machine

* without an accelerator, the ranks are local processes over gloo, started and supervised by
  :mod:`paddleformers_fc.cpu_runtime.launch`; each writes a log, and that of rank 0 is shown while it runs;
* with one, or in a job of several nodes, ``paddleformers-cli`` is called. It starts ``paddle.distributed.launch`` on
  the visible devices, and reads ``NNODES``, ``RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` (:mod:`.nodes`).

Faults that are detectable earlier are refused before a process starts (:mod:`.start_checks`). :mod:`.log_view` filters
the output. Ranks record their progress and errors beside their logs (:mod:`paddleformers_fc.trainer.rank_records`); the
command reads these records at the end. The supervisor lists ranks that a signal ended. The signal of
``flex_save_on_signal`` is forwarded to the ranks, which save and end. Otherwise a training that is stopped (Ctrl-C,
SIGTERM) ends its ranks. In these cases the command prints the step at which the next start resumes. Every start has its
own log directory: ``log``, ``log-2``, ...
"""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from paddleformers_fc.cli import nodes, start_checks
from paddleformers_fc.cli.log_view import COLOUR, DEBUG, LogView
from paddleformers_fc.cli.settings import parse_overrides, read_settings
from paddleformers_fc.cpu_runtime.launch import LaunchResult, launch
from paddleformers_fc.cpu_runtime.ranks import FORWARDED_SECONDS, SAVED_ON_SIGNAL, rank_environments, tail
from paddleformers_fc.errors import FlexError, OptionError, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.commit import is_name_taken
from paddleformers_fc.storage.manifest import newest_checkpoint, read_manifest
from paddleformers_fc.storage.paths import expand_user, require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import register
from paddleformers_fc.trainer.options import FIELD_NAMES, FlexFields, check_options, check_stage, save_signal
from paddleformers_fc.trainer.rank_records import RECORDS, read_error, read_processes, read_progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

REGISTER_KEY = "custom_register_path"
REGISTER_BOTH = Path(__file__).resolve().with_name("register_both.py")
OWN_REGISTRATION = "PADDLEFORMERS_FC_OWN_REGISTRATION"
"""The environment variable with the YAML's own registration file, for :mod:`.register_both`."""

CPU = "cpu"
_TAIL_LINES = 25
_OUTSIDE = {"SIGKILL": ": killed by a user, or by the system because memory ran out"}


@dataclass(frozen=True)
class TrainingJob:
    """A training that is about to be started.

    Args:
        argv: arguments of Python: a module and its arguments.
        ranks: number of local processes; None if ``paddle.distributed.launch`` decides.
        environment: variables in addition to this process' environment.
        log_dir: directory of the logs and records of all ranks.
        flex: whether the run saves flex checkpoints.
        output_dir: directory of the checkpoints; None if it is not needed.
        resume_overrides: overrides with which the same command resumes the newest checkpoint; mostly none.
        idle: keys of this package that are set and have no effect, because the run does not use it.
        save_signal: name of the signal on which the ranks save and end; None without one.
    """

    argv: tuple[str, ...]
    ranks: int | None
    environment: Mapping[str, str]
    log_dir: Path
    flex: bool
    output_dir: Path | None = None
    resume_overrides: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    save_signal: str | None = None

    @property
    def command(self) -> list[str]:
        """The command of one rank, or of the launcher."""
        return [sys.executable, *self.argv]


class LaunchPlan(msgspec.Struct, frozen=True):
    """The output of ``--dry-run``.

    Attributes:
        command: of every rank, or of the launcher.
        environment: variables of all ranks in addition to the caller's.
        ranks: the variables of each rank; ports are chosen at every start. None if ``paddle.distributed.launch``
            decides.
        log_dir: directory of the logs.
    """

    command: list[str]
    environment: dict[str, str]
    ranks: list[dict[str, str]] | None
    log_dir: str


class Signalled(msgspec.Struct, frozen=True):
    """A rank that a signal ended, such as ``SIGKILL``; ranks stopped after a failure of another one do not count."""

    rank: int
    signal: str


class Ended(msgspec.Struct, frozen=True):
    """The end of a training.

    Attributes:
        returncode: 0 if every rank succeeded, 85 if they saved and ended on a signal, else that of the first rank that
            failed.
        command: as in :class:`LaunchPlan`.
        logs: of every rank, or their directory if ``paddle.distributed.launch`` names them.
        seconds: wall time.
        report: the end of the log of the first rank that failed, unless an error of this package ended it; else None.
        resumed: the step that was resumed; None in a run from the beginning.
        step: the last step that was logged or saved; None before the first.
        loss: the last logged loss; None before the first.
        checkpoint: the last saved checkpoint; None before the first.
        stopped_by: the signal that stopped the training; else None.
        signalled: the ranks that signals ended, in order, if that caused the failure.
        goes_on: how to resume after a signal, as a sentence; else None.
    """

    returncode: int
    command: list[str]
    logs: list[str]
    seconds: float
    report: str | None = None
    resumed: int | None = None
    step: int | None = None
    loss: float | None = None
    checkpoint: str | None = None
    stopped_by: str | None = None
    signalled: tuple[Signalled, ...] = ()
    goes_on: str | None = None

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return (self.step or 0) - (self.resumed or 0) if self.step is not None else 0


def prepare(config: Path, nproc: int | None, overrides: Sequence[str]) -> TrainingJob:
    """Check the settings of a training and return the job to start.

    Args:
        config: a YAML or JSON file of PaddleFormers.
        nproc: number of ranks; None for one, or on accelerators for one per visible device.
        overrides: ``key=value``, as on PaddleFormers' command line.
    Raises:
        OptionError: an invalid file or option, or options that contradict each other.
        NotACheckpoint: ``resume_from_checkpoint`` is not a checkpoint.
        EnvironmentMismatch: PaddleFormers is not installed.
        StorageError: the output directory cannot be created or is not writable.
    """
    start_checks.require_paddleformers("Training")
    settings = {**read_settings(config), **parse_overrides(overrides)}
    own = _own_registration(settings.get(REGISTER_KEY))
    start_checks.refuse_settings(settings, is_extended=own is not None)
    check_stage(settings)
    options = SimpleNamespace(**{**vars(FlexFields()), **settings})
    check_options(options)
    start_checks.refuse_upload(options)
    node = nodes.this_node(os.environ)
    start_checks.refuse_resume(settings, node.count > 1)
    start_checks.refuse_resume_without_the_key(settings)
    if own is None:  # A registration file of the user may replace the model.
        start_checks.refuse_model(settings)
    device = _device(settings.get("device"))
    added, environment = _registration(settings.get(REGISTER_KEY))
    passed = [text for text in overrides if not text.startswith(f"{REGISTER_KEY}=")]
    if "device" not in settings and device == CPU:
        added.append(f"device={CPU}")
    arguments = ("train", str(config), *passed, *added)
    output_dir = _output_dir(settings, config)
    log_dir = _log_dir(output_dir, node)
    environment |= {RECORDS: str(log_dir)}
    flex = bool(settings.get("flex_checkpoint"))
    resume_overrides = _resume_overrides(settings)
    idle = () if flex else tuple(name for name in FIELD_NAMES if name in settings and name != "flex_checkpoint")
    if device == CPU:
        start_checks.refuse_layout(settings, (nproc or 1) * node.count, is_extended=own is not None)
    if device == CPU and node.count == 1:
        argv = ("-m", "paddleformers.cli.launcher", *arguments)
        return TrainingJob(
            argv, nproc or 1, environment, log_dir, flex, output_dir, resume_overrides, idle, save_signal(options)
        )
    if nproc is not None and device != CPU:
        raise OptionError(
            f"--nproc is for machines without an accelerator, and this run uses {device}.",
            where="--nproc",
            next_step="Leave it out; choose the devices with CUDA_VISIBLE_DEVICES or its like.",
        )
    environment |= {
        **node.environment,
        **(nodes.on_cpu(nproc or 1) if device == CPU else {}),
        "PADDLEFORMERS_DIST_LOG": str(log_dir),
        # PaddleFormers starts its ranks as plain `python`, which must be this one.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    # On several nodes this node's disk does not determine the checkpoint that the job resumes.
    seen = output_dir if node.count == 1 else None
    argv = ("-m", "paddleformers.cli.cli", *arguments)
    return TrainingJob(argv, None, environment, log_dir, flex, seen, resume_overrides, idle, save_signal(options))


def local_device() -> str:
    """Return Paddle's default device: ``cpu``, ``gpu:0``, ..."""
    import paddle

    return str(paddle.device.get_device())


def register_both() -> None:
    """In a rank, run the registration file of the YAML, then register this package.

    This package comes last, because its methods call those that it replaces.
    """
    path = Path(os.environ[OWN_REGISTRATION])
    spec = importlib.util.spec_from_file_location("custom_template", path)
    if spec is None or spec.loader is None:
        raise OptionError(
            f"The file of {REGISTER_KEY} is not Python.", where=str(path), next_step="Name a file that ends in .py."
        )
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    register.register()


def _device(named: Any) -> str:
    """Return the kind of device: ``cpu``, ``gpu``, ``xpu``, ...; by default that of Paddle."""
    if named == CPU:
        return CPU
    found = local_device().partition(":")[0]
    if named and found == CPU:
        raise OptionError(
            f"device={named}, and this machine has no accelerator for Paddle.",
            where="device",
            next_step="Add device=cpu to run on local processes.",
        )
    return str(named or found)


def _registration(own: Any) -> tuple[list[str], dict[str, str]]:
    """Return the override that registers this package, and its environment variables."""
    path = _own_registration(own)
    if path is None:
        return [f"{REGISTER_KEY}={register.PATH}"], {}
    if not files.is_file(path):
        raise OptionError(
            f"The file of {REGISTER_KEY} does not exist.",
            where=str(path),
            next_step=f"Correct {REGISTER_KEY}, or leave it out: this command registers the package.",
        )
    return [f"{REGISTER_KEY}={REGISTER_BOTH}"], {OWN_REGISTRATION: str(path)}


def _own_registration(named: Any) -> Path | None:
    """Return the registration file of the user, if any."""
    path = None if named is None else Path(str(named)).resolve()
    return None if path == register.PATH else path


def _output_dir(settings: Mapping[str, Any], config: Path) -> Path:
    named = settings.get("output_dir")
    if not isinstance(named, str) or not named:
        raise OptionError(
            "Missing output_dir in the configuration.",
            where=str(config),
            next_step="Add output_dir: the directory for checkpoints and logs.",
        )
    return require_local(expand_user(named), "A checkpoint")


def _resume_overrides(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides for a resume: PaddleFormers resumes from ``output_dir`` by default."""
    named = settings.get("resume_from_checkpoint")
    kept = ["overwrite_output_dir=false"] if settings.get("overwrite_output_dir") else []
    is_default = named is True or (named is None and settings.get("do_train"))
    return (*kept, *([] if is_default else ["resume_from_checkpoint=true"]))


def _log_dir(output_dir: Path, node: nodes.ThisNode) -> Path:
    """Return the first of ``log``, ``log-2``, ``log-3``, ... that does not exist; one per node on several nodes.

    Raises:
        StorageError: the output directory cannot be created or is not writable. On several nodes all ranks raise it
            together, and this node's logs go to a temporary directory.
    """
    try:
        files.check_writable(output_dir)
    except StorageError:
        if node.count == 1:
            raise
        return Path(tempfile.mkdtemp(prefix="paddleformers-fc-log-")) / "log"
    first = output_dir / ("log" if node.count == 1 else f"log-node-{node.rank}")
    return next(path for path in _numbered(first) if not path.exists())


def _numbered(first: Path) -> Iterator[Path]:
    """Yield a path, and the same with ``-2``, ``-3``, ... behind it."""
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in count(2))


def claim_logs(job: TrainingJob) -> TrainingJob:
    """Create the log directory of a job; if another start has taken its name meanwhile, one with the next name.

    Raises:
        StorageError: the operating system refused.
    """
    files.make_directories(job.log_dir.parent)
    for log_dir in _numbered(job.log_dir):
        try:
            files.make_directory(log_dir)
        except StorageError as error:
            if not is_name_taken(error):
                raise
        else:
            break
    named = {key: str(log_dir) for key, value in job.environment.items() if value == str(job.log_dir)}
    return replace(job, log_dir=log_dir, environment={**job.environment, **named})


def plan(job: TrainingJob) -> LaunchPlan:
    """Return the commands of a start without running them."""
    ranks = None if job.ranks is None else rank_environments(job.ranks)
    return LaunchPlan(job.command, dict(job.environment), ranks, str(job.log_dir))


def run(job: TrainingJob, echo: IO[str]) -> tuple[Ended, FlexError | None]:
    """Start a training and wait for it.

    Args:
        job: from :func:`prepare`.
        echo: the target of the filtered log of rank 0.
    Returns:
        the end, and the error of this package that caused it, or None.
    """
    view = LogView(echo)
    files.make_directories(job.log_dir)
    started = time.monotonic()
    failed: Path | None = None
    stopped_by: str | None = None
    signalled: tuple[Signalled, ...] = ()
    try:
        with _sigterm_raises():
            if job.ranks is None:
                code, stopped_by = _run_launcher(job, view)
                logs = [job.log_dir]
            else:
                result = _run_ranks(job, view)
                code, logs, signalled = result.returncode, list(result.logs), _signalled(result)
                stopped_by = None if result.forwarded is None else _signal_name(result.forwarded)
                failed = next((log for log, one in zip(logs, result.returncodes, strict=True) if one != 0), None)
    except (KeyboardInterrupt, _Terminated) as stop:
        number = signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT
        code, stopped_by = 1, number.name
        logs = sorted(job.log_dir.glob("rank-*.log")) or [job.log_dir]
    view.close()
    if stopped_by and code != SAVED_ON_SIGNAL:
        code = 128 + signal.Signals[stopped_by]
    error = read_error(job.log_dir) if code else None
    progress = read_progress(job.log_dir)
    ended = Ended(
        returncode=code,
        command=job.command,
        logs=[str(log) for log in logs],
        seconds=round(time.monotonic() - started, 1),
        report=None if error is not None or failed is None or _is_stopped(code, stopped_by) else _last_lines(failed),
        resumed=progress.resumed,
        step=progress.step,
        loss=None if progress.loss is None else float(progress.loss),
        checkpoint=progress.checkpoint,
        stopped_by=stopped_by,
        signalled=signalled,
        goes_on=_resume_advice(job) if _is_stopped(code, stopped_by) or signalled else None,
    )
    return ended, error


def _is_stopped(code: int, stopped_by: str | None) -> bool:
    """Return whether a signal ended the training in order, that of this process or one that ranks got."""
    return stopped_by is not None or code == SAVED_ON_SIGNAL


class _Terminated(BaseException):
    """SIGTERM, as ``KeyboardInterrupt`` is SIGINT."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise. Python delivers signals to the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Terminated

    earlier = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _signalled(result: LaunchResult) -> tuple[Signalled, ...]:
    """Return the ranks that signals ended, if that caused the failure; ranks also abort after errors of others."""
    if result.forwarded is not None:
        return ()
    failed = [(rank, code) for rank in result.alone if (code := result.returncodes[rank])]
    if not failed or failed[0][1] > 0:
        return ()
    return tuple(Signalled(rank, _signal_name(-code)) for rank, code in failed if code < 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal has no name.
        return f"signal {number}"


def _resume_advice(job: TrainingJob) -> str | None:
    """Describe where the command resumes; None for checkpoints of other formats or without access."""
    if not job.flex or job.output_dir is None:
        return None
    try:
        newest, _ = newest_checkpoint(job.output_dir)
        step = None if newest is None else read_manifest(newest).step
    except FlexError:
        return None
    if step is None:
        return "run the same command again; it starts from the beginning, because no checkpoint was finished"
    added = f" with {' '.join(job.resume_overrides)}" if job.resume_overrides else ""
    return f"run the same command again{added}; it resumes at step {step}"


def _run_ranks(job: TrainingJob, view: LogView) -> LaunchResult:
    forward = () if job.save_signal is None else (signal.Signals[job.save_signal],)
    echo = cast(IO[str], view)  # A launcher needs write and flush only.
    return launch(job.argv, job.ranks or 1, job.log_dir, math.inf, job.environment, echo, forward=forward)


@contextmanager
def _forwarded_to_recorded(job: TrainingJob) -> Iterator[list[str]]:
    """Return a block in which the signal of the job is forwarded to ranks that take it; with what was forwarded.

    PaddleFormers' command starts ``paddle.distributed.launch`` and forwards nothing. Before the ranks handle the signal
    it has its original effect.
    """
    forwarded: list[str] = []
    if job.save_signal is None or threading.current_thread() is not threading.main_thread():
        yield forwarded
        return
    number = signal.Signals[job.save_signal]
    killer = threading.Timer(FORWARDED_SECONDS, _signal_recorded, (job.log_dir, signal.SIGKILL))
    killer.daemon = True

    def forward(*_: object) -> None:
        if not _signal_recorded(job.log_dir, number):
            signal.signal(number, former)
            os.kill(os.getpid(), number)
        elif not forwarded:
            forwarded.append(number.name)
            killer.start()

    former = signal.signal(number, forward)
    try:
        yield forwarded
    finally:
        killer.cancel()
        signal.signal(number, former)


def _signal_recorded(directory: Path, number: signal.Signals) -> bool:
    """Send a signal to the ranks of this node that take it; return whether there are any."""
    found = read_processes(directory)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(found)


def _run_launcher(job: TrainingJob, view: LogView) -> tuple[int, str | None]:
    """Return the exit code, and the signal that was forwarded, if any."""
    environment = {**os.environ, **job.environment}
    with (
        subprocess.Popen(job.command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace") as process,
        _forwarded_to_recorded(job) as forwarded,
    ):
        try:
            for line in process.stdout or ():
                view.write(line)
                view.flush()
            returncode = process.wait()
        except KeyboardInterrupt:
            # The launcher has had the same signal from the terminal and ends its ranks.
            process.wait()
            raise
        except _Terminated:
            process.terminate()
            process.wait()
            raise
    return returncode if returncode >= 0 else 128 - returncode, next(iter(forwarded), None)


def _last_lines(log: Path) -> str:
    lines = [line for line in COLOUR.sub("", tail(log)).splitlines() if line.strip() and not DEBUG.search(line)]
    return "\n".join([f"--- the end of {log}", *lines[-_TAIL_LINES:]])


def show_plan(planned: LaunchPlan, console: Console) -> None:
    """Print the command and the environment in shell syntax."""
    for line in _shell_lines(planned):
        console.print(line, soft_wrap=True)


def _shell_lines(planned: LaunchPlan) -> list[str]:
    ranks = planned.ranks or []
    shared = {key: value for key, value in (ranks[0] if ranks else {}).items() if all(r[key] == value for r in ranks)}
    lines = [_assignment(*pair) for pair in sorted({**shared, **planned.environment}.items())]
    for rank, placed in enumerate(ranks):
        own = {key: value for key, value in placed.items() if key not in shared}
        if own:
            lines.append(f"# rank {rank}: " + " ".join(_assignment(*pair) for pair in sorted(own.items())))
    if ranks:
        lines.append(f"# {count_text(len(ranks), 'rank')} on this machine; ports are chosen at every start")
    lines.append(f"# logs in {planned.log_dir}")
    return [*lines, shlex.join(planned.command)]


def _assignment(key: str, value: str) -> str:
    return f"{key}={shlex.quote(value)}"


def show(ended: Ended, console: Console) -> None:
    """Print the end, the logs, the last checkpoint and the next steps."""
    from rich.text import Text

    console.print(Text.assemble(_verdict(ended), f"; {ended.seconds:.1f} s"))
    for line in _advice(ended):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _verdict(ended: Ended) -> Text:
    from rich.text import Text

    if ended.returncode == 0:
        return Text.assemble(("trained", "bold green"), _steps_text(ended))
    if ended.returncode == SAVED_ON_SIGNAL:
        return Text.assemble(("saved and stopped", "bold"), f" by {ended.stopped_by or 'a signal'}", _steps_text(ended))
    cause = f" by {ended.stopped_by}" if ended.stopped_by else f" with code {ended.returncode}"
    return Text.assemble(("stopped" if ended.stopped_by else "failed", "bold red"), cause)


def _advice(ended: Ended) -> Iterator[str]:
    yield from (f"log: {log}" for log in ended.logs)
    for one in ended.signalled:
        yield f"rank {one.rank} was ended by {one.signal}{_OUTSIDE.get(one.signal, '')}"
    if ended.checkpoint:
        yield f"checkpoint: {ended.checkpoint}"
        yield f"next: paddleformers-fc verify {shlex.quote(ended.checkpoint)}"
    if ended.goes_on:
        yield f"next: {ended.goes_on}"
    if ended.returncode == 0 and not ended.steps and ended.resumed is not None:
        yield "next: raise max_steps to continue; another output_dir or overwrite_output_dir=true: a new run"


def _steps_text(ended: Ended) -> str:
    if ended.step is None and ended.resumed is None:
        return ""  # Without a record, as in an environment that this package does not support.
    resumed = "" if ended.resumed is None else f", resumed at {ended.resumed}"
    if not ended.steps:
        return f" 0 steps{resumed}"
    loss = "not logged" if ended.loss is None else ended.loss
    return f" {count_text(ended.steps, 'step')}{resumed}, up to {ended.step}, last loss {loss}"
