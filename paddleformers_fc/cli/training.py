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

Filter the log of a running training for a terminal.

PaddleFormers writes a thousand lines before the first step. The log file alone has messages of level DEBUG, further
lines of messages of level INFO (tables, configurations), messages of level INFO of Paddle's C++ code, and warnings of
installed Python packages. Python tracebacks are reduced to the line of the exception. Errors of this package are
omitted, because the command prints them at the end. Colours are used on terminals only. Memory is one line.
"""

from __future__ import annotations

import codecs
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from paddleformers_fc.cli import nodes, start_checks
from paddleformers_fc.cli.settings import parse_overrides, read_settings
from paddleformers_fc.cpu_runtime.launch import LaunchResult, launch
from paddleformers_fc.cpu_runtime.ranks import FORWARDED_SECONDS, POLL_SECONDS, SAVED_ON_SIGNAL, rank_environments, tail
from paddleformers_fc.errors import FlexError, OptionError, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.commit import is_name_taken
from paddleformers_fc.storage.manifest import newest_checkpoint, read_manifest
from paddleformers_fc.storage.paths import expand_user, require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import register
from paddleformers_fc.trainer.options import FIELD_NAMES, FlexFields, check_options, check_stage, save_signal
from paddleformers_fc.trainer.rank_records import RECORDS, RankRecord, read_error, read_records

if TYPE_CHECKING:
    from rich.console import Console

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DEBUG = re.compile(r"\[ *DEBUG\]")
_RECORD = re.compile(r"\[[\d-]{10} [\d:,]+\] \[ *(\w+)\]")
"""The beginning of a message of PaddleFormers' logger."""
_DETAILED = ("DEBUG", "INFO")
_DETAIL = re.compile(r"[ \t|+},\n](?!.*\r)")
"""The beginning of a further line of a message; progress bars, which end in a carriage return, are none."""
_GLOG_INFO = re.compile(r"I\d{4} [\d:.]+ +\d+ ")
_LIBRARY_WARNING = re.compile(r"\S+/site-packages/\S+:\d+: \w+Warning: ")
_TRACEBACK = "Traceback (most recent call last):"
_OF_TRACEBACK = (" ", "During handling of ", "The above exception ", f"{FlexError.__module__}.")


class LogView:
    """A stream that forwards the lines of a training's log that a person reads.

    Args:
        stream: the target.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream: IO[str] | None = stream  # None after its reader has closed it, as under | head.
        self._colours = stream.isatty()
        self._rest = ""
        self._in_traceback = self._in_details = False

    def write(self, text: str) -> int:
        """Take text of any length; whole lines are forwarded."""
        *lines, self._rest = re.split(r"(?<=[\n\r])", self._rest + text)
        self._forward(lines)
        return len(text)

    def flush(self) -> None:
        """Do nothing: whole lines are flushed."""

    def close(self) -> None:
        """Forward the last line, which may have no end. The stream stays open."""
        self._forward([self._rest])

    def _forward(self, lines: Iterable[str]) -> None:
        for line in lines:
            plain = COLOUR.sub("", line)
            if self._is_shown(plain) and self._stream is not None:
                try:
                    self._stream.write(line if self._colours else plain)
                    self._stream.flush()
                except BrokenPipeError:
                    self._stream = None

    def _is_shown(self, plain: str) -> bool:
        if plain.startswith(_TRACEBACK):
            self._in_traceback = True
        elif self._in_traceback and plain.strip() and not plain.startswith(_OF_TRACEBACK):
            self._in_traceback = False
        is_detail = self._is_detail(plain)
        return not self._in_traceback and not is_detail and not DEBUG.search(plain)

    def _is_detail(self, plain: str) -> bool:
        """Return whether only the log file has a line that follows the lines before it."""
        is_warning = _LIBRARY_WARNING.match(plain) is not None
        if is_warning or not _DETAIL.match(plain):
            record = _RECORD.match(plain)
            self._in_details = is_warning or (record is not None and record[1] in _DETAILED)
            return is_warning or _GLOG_INFO.match(plain) is not None
        return self._in_details


REGISTER_KEY = "custom_register_path"
CPU = "cpu"
_TAIL_LINES = 25
_READ_BYTES = 1 << 16
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


def prepare(config: Path, nproc: int | None, overrides: Sequence[str], claim_logs: bool = False) -> TrainingJob:
    """Check the settings of a training and return the job to start.

    Args:
        config: a YAML or JSON file of PaddleFormers.
        nproc: number of ranks; None for one, or on accelerators for one per visible device.
        overrides: ``key=value``, as on PaddleFormers' command line.
        claim_logs: whether to create the log directory, which no other start then uses.
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
    if device == CPU:
        start_checks.refuse_layout(settings, (nproc or 1) * node.count, is_extended=own is not None)
    elif nproc is not None:
        raise OptionError(
            f"--nproc is for machines without an accelerator, and this run uses {device}.",
            where="--nproc",
            next_step="Leave it out; choose the devices with CUDA_VISIBLE_DEVICES or its like.",
        )
    output_dir = require_local(expand_user(settings["output_dir"]), "A checkpoint")
    log_dir = _log_dir(output_dir, node, claim_logs)
    environment = {RECORDS: str(log_dir), **({} if own is None else {register.ALSO_RUN: str(own)})}
    ranks = (nproc or 1) if device == CPU and node.count == 1 else None
    if ranks is None:
        environment |= {
            **node.environment,
            **(nodes.on_cpu(nproc or 1) if device == CPU else {}),
            "PADDLEFORMERS_DIST_LOG": str(log_dir),
            # PaddleFormers starts its ranks as plain `python`, which must be this one.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        }
    passed = [text for text in overrides if not text.startswith(f"{REGISTER_KEY}=")]
    added = [f"device={CPU}"] if "device" not in settings and device == CPU else []
    module = "paddleformers.cli.cli" if ranks is None else "paddleformers.cli.launcher"
    flex = bool(settings.get("flex_checkpoint"))
    return TrainingJob(
        argv=("-m", module, "train", str(config), *passed, f"{REGISTER_KEY}={register.PATH}", *added),
        ranks=ranks,
        environment=environment,
        log_dir=log_dir,
        flex=flex,
        # On several nodes this node's disk does not determine the checkpoint that the job resumes.
        output_dir=output_dir if node.count == 1 else None,
        resume_overrides=_resume_overrides(settings),
        idle=() if flex else tuple(name for name in FIELD_NAMES if name in settings and name != "flex_checkpoint"),
        save_signal=save_signal(options),
    )


def local_device() -> str:
    """Return Paddle's default device: ``cpu``, ``gpu:0``, ..."""
    import paddle

    return str(paddle.device.get_device())


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


def _own_registration(named: Any) -> Path | None:
    """Return the registration file of the user, if any."""
    path = None if named is None else Path(str(named)).resolve()
    if path is None or path == register.PATH:
        return None
    if not files.is_file(path):
        raise OptionError(
            f"The file of {REGISTER_KEY} does not exist.",
            where=str(path),
            next_step=f"Correct {REGISTER_KEY}, or leave it out: this command registers the package.",
        )
    return path


def _resume_overrides(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides for a resume: PaddleFormers resumes from ``output_dir`` by default."""
    named = settings.get("resume_from_checkpoint")
    kept = ["overwrite_output_dir=false"] if settings.get("overwrite_output_dir") else []
    is_default = named is True or (named is None and settings.get("do_train"))
    return (*kept, *([] if is_default else ["resume_from_checkpoint=true"]))


def _log_dir(output_dir: Path, node: nodes.ThisNode, claim: bool) -> Path:
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
        return Path(tempfile.mkdtemp(prefix="paddleformers-fc-log-"))
    name = "log" if node.count == 1 else f"log-node-{node.rank}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    free = (path for path in map(output_dir.joinpath, names) if not path.exists())
    if claim:
        files.make_directories(output_dir)
    while True:
        path = next(free)
        try:
            if claim:
                files.make_directory(path)
        except StorageError as error:
            if not is_name_taken(error):  # By another start.
                raise
        else:
            return path


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
    result: LaunchResult | None = None
    signals = _Signals(job)
    with signals.handled():
        if job.ranks is None:
            code = _run_launcher(job, view, signals)
        else:
            stream = cast(IO[str], view)  # A launcher needs write and flush only.
            result = launch(
                job.argv, job.ranks, job.log_dir, math.inf, job.environment, stream, is_over=signals.is_over.is_set
            )
            code = result.returncode
    view.close()
    stopped_by = signals.received[-1] if signals.received else None
    if stopped_by and code != SAVED_ON_SIGNAL:
        code = 128 + signal.Signals[stopped_by]
    is_stopped = stopped_by is not None or code == SAVED_ON_SIGNAL
    signalled = () if result is None or is_stopped else _signalled(result)
    error = read_error(job.log_dir) if code else None
    records = read_records(job.log_dir)
    progress = next((one for one in records if (one.step, one.resumed) != (None, None)), RankRecord())
    ended = Ended(
        returncode=code,
        command=job.command,
        logs=[str(log) for log in sorted(job.log_dir.glob("rank-*.log")) or [job.log_dir]],
        seconds=round(time.monotonic() - started, 1),
        report=None if result is None or error is not None or is_stopped else _report(result),
        resumed=progress.resumed,
        step=progress.step,
        loss=None if progress.loss is None else float(progress.loss),
        checkpoint=progress.checkpoint,
        stopped_by=stopped_by,
        signalled=signalled,
        goes_on=_resume_advice(job) if is_stopped or signalled else None,
    )
    return ended, error


class _Signals:
    """The signals that stop a training: forwarded to ranks that save on them; otherwise they end the ranks.

    PaddleFormers' command starts ``paddle.distributed.launch`` and forwards nothing. A handler raises nothing: an
    exception inside of ``Popen.poll`` can leave its lock held, and no process would be waited for any more.

    Attributes:
        received: their names, in order.
        is_over: set when the ranks have to end, or have had their time after a forwarded signal.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.received: list[str] = []
        self.is_over = threading.Event()
        self._job = job
        self._timer = threading.Timer(FORWARDED_SECONDS, self._end)
        self._timer.daemon = True

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Context manager around the training. Python delivers signals to the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = {signal.Signals[name] for name in ("SIGTERM", self._job.save_signal) if name is not None}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Jobs in a shell's background ignore it.
            numbers.add(signal.SIGINT)
        former = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            self._timer.cancel()
            for number, handler in former.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        self.received.append(signal.Signals(number).name)
        if self.received[-1] != self._job.save_signal or not self._send(number):
            self._end()
        elif self._timer.ident is None:
            self._timer.start()

    def _send(self, number: int) -> bool:
        """Send a signal to the ranks of this node that handle it; return whether there are any."""
        pids = [record.process for record in read_records(self._job.log_dir) if record.process is not None]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def _end(self) -> None:
        self.is_over.set()
        if self._job.ranks is None:
            self._send(signal.SIGKILL)


def _run_launcher(job: TrainingJob, view: LogView, signals: _Signals) -> int:
    """Return the exit code."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with subprocess.Popen(job.command, env={**os.environ, **job.environment}, stdout=subprocess.PIPE) as process:
        output = cast(IO[bytes], process.stdout).fileno()
        while not signals.is_over.is_set():
            if select.select([output], [], [], POLL_SECONDS)[0]:
                if not (data := os.read(output, _READ_BYTES)):
                    break
                view.write(decoder.decode(data))
        else:
            _end_launcher(process, signals)
        returncode = process.wait()
    return returncode if returncode >= 0 else 128 - returncode


def _end_launcher(process: subprocess.Popen[bytes], signals: _Signals) -> None:
    """End a launcher whose ranks have to end."""
    if signals.received[-1] != "SIGINT":  # The terminal has sent an interrupt to the launcher as well.
        process.terminate()
    try:
        process.wait(FORWARDED_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _signalled(result: LaunchResult) -> tuple[Signalled, ...]:
    """Return the ranks that signals ended, if that caused the failure; ranks also abort after errors of others."""
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


def _report(result: LaunchResult) -> str | None:
    """Return the end of the log of the first rank that failed, if any."""
    for log, code in zip(result.logs, result.returncodes, strict=True):
        if code:
            lines = [line for line in COLOUR.sub("", tail(log)).splitlines() if line.strip() and not DEBUG.search(line)]
            return "\n".join([f"--- the end of {log}", *lines[-_TAIL_LINES:]])
    return None


def show_plan(planned: LaunchPlan, console: Console) -> None:
    """Print the command and the environment in shell syntax."""
    ranks = planned.ranks or []
    shared = {key: value for key, value in (ranks[0] if ranks else {}).items() if all(r[key] == value for r in ranks)}
    lines = [*_assignments({**shared, **planned.environment})]
    for rank, placed in enumerate(ranks):
        own = {key: value for key, value in placed.items() if key not in shared}
        if own:
            lines.append(f"# rank {rank}: {' '.join(_assignments(own))}")
    if ranks:
        lines.append(f"# {count_text(len(ranks), 'rank')} on this machine; ports are chosen at every start")
    for line in (*lines, f"# logs in {planned.log_dir}", shlex.join(planned.command)):
        console.print(line, soft_wrap=True)


def _assignments(variables: Mapping[str, str]) -> Iterator[str]:
    return (f"{key}={shlex.quote(value)}" for key, value in sorted(variables.items()))


def show(ended: Ended, console: Console) -> None:
    """Print the end, the logs, the last checkpoint and the next steps."""
    from rich.text import Text

    console.print(Text.assemble(*_verdict(ended), f"; {ended.seconds:.1f} s"))
    for line in _advice(ended):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _verdict(ended: Ended) -> tuple[tuple[str, str], str]:
    """Return the end as a word with its style, and what follows it."""
    if ended.returncode == 0:
        return ("trained", "bold green"), _steps_text(ended)
    if ended.returncode == SAVED_ON_SIGNAL:
        return ("saved and stopped", "bold"), f" by {ended.stopped_by or 'a signal'}{_steps_text(ended)}"
    if ended.stopped_by:
        return ("stopped", "bold red"), f" by {ended.stopped_by}"
    return ("failed", "bold red"), f" with code {ended.returncode}"


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
