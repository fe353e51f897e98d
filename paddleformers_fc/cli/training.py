"""``train``: run the stock PaddleFormers training of a YAML, with flex checkpoints.

The command checks the settings (:mod:`.start_checks`), then runs PaddleFormers' own command line with two overrides:
``custom_register_path`` is the registration file of this package, which runs after the YAML's own if there is one, and
``device`` is ``cpu`` if there is no accelerator. Without an accelerator, the ranks are local processes over gloo. With
one, or on several nodes, the only child process is ``paddleformers-cli``, which starts ``paddle.distributed.launch``.

Every start has its own log directory, ``log``, ``log-2``, ..., with a log per process and a file per rank with its
progress and error (:mod:`paddleformers_fc.trainer.rank_records`). Figures come from these files, not from logs. The
signal of ``flex_save_on_signal`` is forwarded to the ranks, which save and end; other signals end them.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from paddleformers_fc import output
from paddleformers_fc.cli import nodes, start_checks
from paddleformers_fc.cli.settings import parse_overrides, places_of_keys, read_settings, with_overrides
from paddleformers_fc.cpu_runtime.launch import launch
from paddleformers_fc.cpu_runtime.ranks import FORWARDED_SECONDS, SAVED_ON_SIGNAL, JobOutcome, tail
from paddleformers_fc.errors import FlexError, OptionError, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.commit import is_name_taken
from paddleformers_fc.storage.paths import expand_user, parse_hidden, parse_step, require_local
from paddleformers_fc.text import count_text
from paddleformers_fc.trainer import register
from paddleformers_fc.trainer.options import FIELD_NAMES, save_signal
from paddleformers_fc.trainer.rank_records import RECORDS, RankRecord, read_error, read_records
from paddleformers_fc.trainer.resume import newest_without_changes
from paddleformers_fc.trainer.tiers import local_tier_of
from paddleformers_fc.upstream import FORMERS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MESSAGE = r"\[[\d-]{10} [\d:,]+\] \[ *"
"""The beginning of a message of PaddleFormers' logger."""
_DEBUG, _INFO = (re.compile(rf"{_MESSAGE}{level}\]") for level in ("DEBUG", "INFO"))
_HIDDEN = re.compile(
    "|".join(
        (
            _DEBUG.pattern,
            r"I\d{4} [\d:.]+ +\d+ ",  # Level INFO of Paddle's C++ code.
            r"\S+/site-packages/\S+:\d+: \w+Warning: ",
            r"Traceback \(most recent call last\):|During handling of |The above exception ",
            re.escape(f"{FlexError.__module__}."),
        )
    )
)
_DETAIL = re.compile(r"[ \t|+},\n](?!.*\r)")
"""The beginning of a continuation line of a message, but not of a progress bar, which ends in a carriage return."""


class LogView:
    """A stream that filters a training log for a terminal.

    PaddleFormers writes a thousand lines before the first step. These are omitted: DEBUG messages, continuation lines
    of INFO messages (tables, configurations), INFO messages of Paddle's C++ code, warnings of installed packages, and
    tracebacks except for the line of the exception. Errors of this package are omitted too, because the command prints
    them at the end. Colours are kept on terminals only. Memory: one line.

    Args:
        stream: the target.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream: IO[str] | None = stream  # None after its reader has closed it, as under | head.
        self._colours = stream.isatty()
        self._rest = ""
        self._hides_details = False

    def write(self, text: str) -> int:
        """Forward the complete lines of a text, and buffer the rest."""
        *lines, self._rest = re.split(r"(?<=[\n\r])", self._rest + text)
        for line in lines:
            plain = COLOUR.sub("", line)
            if self._is_shown(plain) and self._stream is not None:
                try:
                    self._stream.write(line if self._colours else plain)
                    self._stream.flush()
                except BrokenPipeError:
                    self._stream = None
        return len(text)

    def flush(self) -> None:
        """Do nothing: complete lines are flushed at once."""

    def _is_shown(self, plain: str) -> bool:
        if _DETAIL.match(plain):
            return not self._hides_details
        is_hidden = _HIDDEN.match(plain) is not None
        self._hides_details = is_hidden or _INFO.match(plain) is not None
        return not is_hidden


REGISTER_KEY = "custom_register_path"
CPU = "cpu"
_TAIL_LINES = 25
_CAUSES = {"SIGKILL": ": killed by a user, or by the system because memory ran out"}


class TrainingJob(msgspec.Struct, frozen=True):
    """A training job to start; the output of ``--dry-run``.

    Attributes:
        command: the command of every rank, or of the launcher.
        environment: variables in addition to the caller's.
        ranks: number of local processes; None if ``paddle.distributed.launch`` decides.
        log_dir: directory of the logs and status files of all ranks.
        flex: whether the run saves flex checkpoints.
        output_dir: directory of the checkpoints; None on several nodes, where this node's disk does not determine the
            checkpoint that the job resumes.
        resume_overrides: overrides with which the same command resumes the newest checkpoint; usually none.
        idle: keys of this package that are set but have no effect, because ``flex_checkpoint`` is not true.
        save_signal: name of the signal on which the ranks save and end; None without one.
    """

    command: tuple[str, ...]
    ranks: int | None
    environment: dict[str, str]
    log_dir: str
    flex: bool
    output_dir: str | None = None
    resume_overrides: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    save_signal: str | None = None


class Signalled(msgspec.Struct, frozen=True):
    """A rank that was ended by a signal such as ``SIGKILL``, and not because another rank had failed."""

    rank: int
    signal: str


class Ended(msgspec.Struct, frozen=True):
    """The end of a training.

    Attributes:
        returncode: 0 if every rank succeeded, 85 if they saved and ended on a signal, else the code of the first rank
            that failed.
        command: as in :class:`TrainingJob`.
        logs: the log of every rank, or of the launcher.
        seconds: wall time.
        report: the end of the log of the first rank that failed; None if no rank failed, or with an error of this
            package.
        resumed: the step from which the run resumed; None in a new run.
        step: the last logged or saved step; None before the first.
        loss: the last logged loss; None before the first.
        checkpoint: the last saved checkpoint; None before the first.
        stopped_by: the signal that stopped the training; else None.
        signalled: the ranks that were ended by signals, in order, if that caused the failure.
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


def prepare(config: Path, nproc: int | None, overrides: Sequence[str], claim_logs: bool = False) -> TrainingJob:
    """Check the settings of a training and return the job to start.

    Args:
        config: a YAML or JSON file of PaddleFormers.
        nproc: number of ranks; None for one, or on accelerators for one per visible device.
        overrides: ``key=value``, as on PaddleFormers' command line.
        claim_logs: whether to create the log directory, so that no other start uses it.
    Raises:
        FlexError: as :func:`.start_checks.check` and :func:`.nodes.this_node`; or Paddle has no such device.
        StorageError: the output directory cannot be created or is not writable.
    """
    start_checks.check_paddleformers_installed("Training")
    settings = with_overrides(read_settings(config), parse_overrides(overrides))
    named = Path(str(settings.get(REGISTER_KEY) or register.PATH)).resolve()
    own, node = None if named == register.PATH else named, nodes.this_node(os.environ)
    checked = start_checks.check(settings, own is not None, node.count, places_of_keys(config))
    is_cpu = _is_cpu(settings.get("device"), nproc)
    if is_cpu:
        start_checks.check_ranks(vars(checked), (nproc or 1) * node.count, own is not None)
    is_local, flex = is_cpu and node.count == 1, bool(settings.get("flex_checkpoint"))
    output_dir = require_local(expand_user(settings["output_dir"]), "A checkpoint")
    log_dir = str(_log_dir(output_dir, node, claim_logs))
    environment = {RECORDS: log_dir} if own is None else {RECORDS: log_dir, register.ALSO_RUN: str(own)}
    if not is_local:
        # PaddleFormers starts its ranks as plain `python`: let that be this interpreter.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment |= {**node.environment, "PADDLEFORMERS_DIST_LOG": log_dir, "PATH": path}
        environment |= nodes.on_cpu(nproc or 1) if is_cpu else {}
    module = f"{FORMERS}.cli.launcher" if is_local else f"{FORMERS}.cli.cli"
    passed = [text for text in overrides if not text.startswith(f"{REGISTER_KEY}=")]
    added = [f"device={CPU}"] if is_cpu and "device" not in settings else []
    return TrainingJob(
        (sys.executable, "-m", module, "train", str(config), *passed, f"{REGISTER_KEY}={register.PATH}", *added),
        (nproc or 1) if is_local else None,
        environment,
        log_dir,
        flex,
        str(output_dir) if node.count == 1 else None,
        _resume_overrides(settings),
        idle=() if flex else tuple(name for name in FIELD_NAMES if name in settings and name != "flex_checkpoint"),
        save_signal=save_signal(checked),
    )


def local_device() -> str:
    """Return Paddle's default device: ``cpu``, ``gpu:0``, ..."""
    import paddle

    return str(paddle.device.get_device())


def _is_cpu(named: Any, nproc: int | None) -> bool:
    """Return whether the ranks run on the CPU: if the settings say so, or if Paddle finds no accelerator."""
    if named == CPU:
        return True
    found = local_device().partition(":")[0]
    if named and found == CPU:
        what, next_step = "Paddle finds no accelerator on this machine", "Add device=cpu to run on local processes."
    elif found != CPU and nproc is not None:
        what = "--nproc is for machines without an accelerator"
        next_step = "Omit --nproc; select devices with CUDA_VISIBLE_DEVICES or your device's equivalent."
    else:
        return found == CPU
    raise OptionError(f"This run uses device={named or found}, and {what}.", where="device", next_step=next_step)


def _resume_overrides(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides for a resume; usually none, because PaddleFormers resumes from ``output_dir`` by default."""
    named = settings.get("resume_from_checkpoint")
    kept = ["overwrite_output_dir=false"] if settings.get("overwrite_output_dir") else []
    is_default = named is True or (named is None and settings.get("do_train"))
    return (*kept, *([] if is_default else ["resume_from_checkpoint=true"]))


def _log_dir(output_dir: Path, node: nodes.ThisNode, claim: bool) -> Path:
    """Return the first of ``log``, ``log-2``, ``log-3``, ... that does not exist; on several nodes one per node.

    On several nodes, if the output directory is not writable, return a temporary directory: all ranks then raise the
    error together.

    Raises:
        StorageError: the output directory cannot be created or is not writable.
    """
    try:
        files.check_writable(output_dir)
    except StorageError:
        if node.count == 1:
            raise
        return Path(tempfile.mkdtemp(prefix="paddleformers-fc-log-"))
    name = "log" if node.count == 1 else f"log-node-{node.rank}"
    names = (output_dir / (name if number == 1 else f"{name}-{number}") for number in count(1))
    if not claim:
        return next(path for path in names if not path.exists())
    files.make_directories(output_dir)
    return next(path for path in names if _claim(path))


def _claim(path: Path) -> bool:
    """Create a log directory; return False if it exists already."""
    try:
        files.make_directory(path)
    except StorageError as error:
        if not is_name_taken(error):
            raise
        return False
    return True


def run(job: TrainingJob, echo: IO[str]) -> tuple[Ended, FlexError | None]:
    """Start a training and wait for it.

    Args:
        job: from :func:`prepare`.
        echo: the target of the filtered log of rank 0.
    Returns:
        the result, and the error of this package that caused a failure, or None.
    """
    view, signals = LogView(echo), _Signals(job)
    stream = cast(IO[str], view)  # The launcher only calls write and flush.
    arguments = (job.command[1:], job.ranks or 1, Path(job.log_dir), math.inf, job.environment, stream)
    with signals.recorded():
        result = launch(*arguments, is_over=signals.is_due, places=[{}] if job.ranks is None else None)
    view.write("\n")  # The last line may lack a line break.
    code, stopped_by = result.returncode, signals.received[-1] if signals.received else None
    if stopped_by and job.ranks is None:
        _send(job, signal.SIGKILL)  # The launcher has ended, but its ranks are in other process groups.
    if stopped_by and code != SAVED_ON_SIGNAL:
        code = 128 + signal.Signals[stopped_by]
    is_stopped = stopped_by is not None or code == SAVED_ON_SIGNAL
    signalled = () if is_stopped or job.ranks is None else _signalled(result)
    error = read_error(Path(job.log_dir)) if code else None
    records = read_records(Path(job.log_dir))
    progress = next((one for one in records if (one.step, one.resumed) != (None, None)), RankRecord())
    ended = Ended(
        returncode=code,
        command=[*job.command],
        logs=[str(log) for log in result.logs],
        seconds=round(result.seconds, 1),
        report=None if error is not None or is_stopped else _report(result),
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
    """Signals that stop a training: they are forwarded to ranks that save on them; otherwise the training ends.

    The handler only records a signal, and the supervisor calls :meth:`is_due` between polls. An exception in the
    handler could interrupt ``Popen.poll`` while it holds its lock, and no process could be waited for afterwards.

    Attributes:
        received: the names of the signals, in order.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.received: list[str] = []
        self._job = job
        self._handled = 0
        self._deadline = math.inf

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager around the training that records signals."""
        numbers = {signal.Signals[name] for name in ("SIGTERM", self._job.save_signal) if name is not None}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Shells let background jobs ignore SIGINT.
            numbers.add(signal.SIGINT)
        former = {number: signal.signal(number, self._record) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _record(self, number: int, _: object) -> None:
        self.received.append(signal.Signals(number).name)

    def is_due(self) -> bool:
        """Forward new signals. Return whether to end the ranks: now, or after their time to save is over."""
        for name in self.received[self._handled :]:
            self._handled += 1
            is_forwarded = name == self._job.save_signal and _send(self._job, signal.Signals[name])
            self._deadline = min(self._deadline, time.monotonic() + FORWARDED_SECONDS if is_forwarded else 0)
        return time.monotonic() > self._deadline


def _send(job: TrainingJob, number: signal.Signals) -> bool:
    """Send a signal to the ranks of this node that handle it, or SIGKILL to all; return whether there are any."""
    records = [one for one in read_records(Path(job.log_dir)) if one.listens or number == signal.SIGKILL]
    pids = [one.process for one in records if one.process is not None and _is_rank(one.process, job)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(pids)


def _is_rank(pid: int, job: TrainingJob) -> bool:
    """Return whether a process is a rank of this job, and not another process that reuses the id."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return not Path("/proc/self/environ").exists()  # This system has no /proc.
    return f"{RECORDS}={job.log_dir}".encode() in variables


def _signalled(result: JobOutcome) -> tuple[Signalled, ...]:
    """Return the ranks that were ended by signals, if the first failure was one of them."""
    failed = [(rank, code) for rank in result.alone if (code := result.returncodes[rank])]
    if not failed or failed[0][1] > 0:
        return ()
    names = {one.value: one.name for one in signal.Signals}
    return tuple(Signalled(rank, names.get(-code, f"signal {-code}")) for rank, code in failed if code < 0)


def _resume_advice(job: TrainingJob) -> str | None:
    """Return how to resume, as a sentence; None if checkpoints have another format or cannot be read."""
    if not job.flex or job.output_dir is None:
        return None
    try:
        output_dir = Path(job.output_dir)
        newest, _ = newest_without_changes(output_dir, local_tier_of(output_dir))
    except FlexError:
        return None
    if newest is None:
        return "run the same command again; it starts a new run, because there is no finished checkpoint"
    hidden = parse_hidden(newest)
    step = parse_step(hidden[0] if hidden else newest)
    added = f" with {' '.join(job.resume_overrides)}" if job.resume_overrides else ""
    return f"run the same command again{added}; it resumes at step {step}"


def _report(result: JobOutcome) -> str | None:
    """Return the last lines of the log of the first process that failed, if any."""
    for log, code in zip(result.logs, result.returncodes, strict=True):
        if code:
            lines = COLOUR.sub("", tail(log)).splitlines()
            lines = [line for line in lines if line.strip() and not _DEBUG.search(line)]
            return "\n".join([f"--- the end of {log}", *lines[-_TAIL_LINES:]])
    return None


def show_job(job: TrainingJob, console: output.Console) -> None:
    """Print the command and the environment in shell syntax."""
    where = "by paddle.distributed.launch" if job.ranks is None else f"{count_text(job.ranks, 'rank')} on this machine"
    lines = [f"{key}={shlex.quote(value)}" for key, value in sorted(job.environment.items())]
    for line in (*lines, f"# {where}, logs in {job.log_dir}", shlex.join(job.command)):
        console.print(line, soft_wrap=True)


def show(ended: Ended, console: output.Console) -> None:
    """Print the result, the logs, the last checkpoint and the next steps."""
    output.print_styled(console, *_verdict(ended), f"; {ended.seconds:.1f} s")
    for line in _advice(ended):
        console.print(f"  {line}", soft_wrap=True)


def _verdict(ended: Ended) -> tuple[tuple[str, str], str]:
    """Return the result as a styled word, and the text after it."""
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
        yield f"rank {one.rank} was ended by {one.signal}{_CAUSES.get(one.signal, '')}"
    if ended.checkpoint:
        yield f"checkpoint: {ended.checkpoint}"
        yield f"next: paddleformers-fc verify {shlex.quote(ended.checkpoint)}"
    if ended.goes_on:
        yield f"next: {ended.goes_on}"
    if ended.returncode == 0 and ended.resumed is not None and ended.step in (None, ended.resumed):
        yield "next: raise max_steps to continue; for a new run, set another output_dir or overwrite_output_dir=true"


def _steps_text(ended: Ended) -> str:
    if ended.step is None and ended.resumed is None:
        return ""  # No record, as in an environment that this package does not support.
    resumed = "" if ended.resumed is None else f", resumed at {ended.resumed}"
    steps = 0 if ended.step is None else ended.step - (ended.resumed or 0)
    if not steps:
        return f" 0 steps{resumed}"
    loss = "not logged" if ended.loss is None else ended.loss
    return f" {count_text(steps, 'step')}{resumed}, up to {ended.step}, last loss {loss}"
