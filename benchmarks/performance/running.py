"""Carrying cases out: prepare what is loaded, then rounds in which the contenders take turns."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.performance.cases import CHECKS, LEVELS, STORAGE_LATENCY, STORAGE_RATE, Case
from benchmarks.performance.models import MODELS, pieces_of, write_open_weights
from benchmarks.performance.pieces import copy_of, write_pieces
from benchmarks.performance.slow_storage import Storage
from paddleformers_fc.cpu_runtime.ranks import tail
from verification.forkserver import ForkServer, JobResult

PADDLE = ("paddleformers_fc.cpu_runtime:activate", "benchmarks.performance.paddle_tensors", "gc:freeze")
TORCH = ("benchmarks.performance.torch_tensors", "gc:freeze")
_JOB = "benchmarks.performance.turn:turn"
_SECONDS = 600.0


@dataclass
class Timing:
    """What one contender did in one case.

    Args:
        first: seconds of the first call of a fresh process in every round, its imports included.
        later: seconds of the second call.
        phases: for every round the seconds of the first call by phase, of the rank that took longest for it.
        later_phases: the same of the second call.
        read: bytes that its ranks say they read, of all ranks; -1 if they are not counted.
        peak: the most that any rank's memory rose in a later call, in bytes.
        failure: why there is no figure; empty where there is one.
    """

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    later_phases: list[dict[str, float]] = field(default_factory=list)
    read: int = -1
    peak: int = 0
    failure: str = ""

    def add(self, ranks: Sequence[dict[str, Any]]) -> None:
        """Add a round by what its ranks answered."""
        first, later = ([rank["calls"][number] for rank in ranks] for number in (0, 1))
        self.first.append(_seconds(first))
        self.later.append(_seconds(later))
        self.phases.append(_longest(first))
        self.later_phases.append(_longest(later))
        self.read = max(sum(call["read"] for call in later), -1)
        self.peak = max(self.peak, *(call["peak"] for call in later))

    def phase(self, name: str) -> float | None:
        """Return the median of a phase; None if it is not known."""
        found = [one[name] for one in self.phases if name in one]
        return median(found) if found else None


def _longest(calls: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The seconds by phase of the rank that took longest for it."""
    names = dict.fromkeys(name for call in calls for name in call["phases"])
    return {name: max(call["phases"].get(name, 0.0) for call in calls) for name in names}


def _seconds(calls: Sequence[dict[str, Any]]) -> float:
    """From the first rank's begin to the last rank's end."""
    return float(max(call["ended"] for call in calls) - min(call["begun"] for call in calls))


@dataclass(frozen=True)
class Outcome:
    """One case, measured.

    Args:
        case: which.
        nbytes: bytes of the tensors that all ranks hold or want.
        timings: by contender.
    """

    case: Case
    nbytes: int
    timings: dict[str, Timing] = field(default_factory=dict)


class Servers:
    """The servers that fork ranks with Paddle, and with PyTorch where there is one; a context manager.

    Args:
        logs: a directory for what ranks print.
        torch: directory where PyTorch is installed; empty to use the environment's own, if any.
    """

    def __init__(self, logs: Path, torch: str) -> None:
        path = [torch] if torch else []
        self._paddle = ForkServer(PADDLE, logs / "paddle")
        has_torch = bool(torch) or importlib.util.find_spec("torch") is not None
        self._torch = ForkServer(TORCH, logs / "torch", path=path) if has_torch else None

    def __enter__(self) -> Servers:
        self._paddle.__enter__()
        if self._torch is not None:
            self._torch.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._paddle.__exit__(*raised)
        if self._torch is not None:
            self._torch.__exit__(*raised)

    def has(self, contender: str) -> bool:
        """Whether a contender can take part."""
        return contender != "dcp" or self._torch is not None

    def turn(self, contender: str, ranks: int, **arguments: Any) -> Sequence[dict[str, Any]]:
        """Run a turn, and return the answers of its ranks.

        Raises:
            TurnFailed: a rank failed.
        """
        server = self._torch if contender == "dcp" and self._torch is not None else self._paddle
        result = server.attempt(_JOB, ranks, {"contender": contender, **arguments}, _SECONDS)
        if not result.ok:
            raise TurnFailed(_reason(result))
        return result.values


class TurnFailed(Exception):
    """A contender cannot do a case."""


def _reason(result: JobResult) -> str:
    """The line of a traceback that says what was wrong."""
    if result.timed_out:
        return f"timed out after {_SECONDS:.0f} s"
    log = next(log for code, log in zip(result.returncodes, result.logs, strict=True) if code)
    lines = tail(log).strip().splitlines() or ["no output"]
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Mismatch|Corrupt)\b", line)), lines[-1]
    )


def measure(case: Case, rounds: int, root: Path, servers: Servers) -> Outcome:
    """Measure one case.

    Args:
        case: which.
        rounds: how often each contender has its turn.
        root: a directory on a file system in memory.
        servers: fork the ranks.
    """
    contenders = [name for name in case.contenders if servers.has(name)]
    with TemporaryDirectory(dir=root) as directory:
        run = _Run(case, Path(directory), servers)
        for name in contenders:
            run.prepare(name)
        for number in range(rounds):
            # Every round begins with another contender, so that none always follows the same one.
            turn = number % len(contenders)
            for name in contenders[turn:] + contenders[:turn]:
                run.turn(name, is_checked=number == 0)
        return Outcome(case, run.nbytes, run.timings)


class _Run:
    """The rounds of one case."""

    def __init__(self, case: Case, root: Path, servers: Servers) -> None:
        self._case, self._root, self._servers = case, root, servers
        self.timings: dict[str, Timing] = {}
        self.nbytes = self._describe(root / "held", case.layout, case.ranks)

    def _describe(self, held: Path, layout: str, ranks: int) -> int:
        """Write what every rank holds; the bytes of all of them."""
        held.mkdir()
        (held / "config.json").write_text(json.dumps(dict(MODELS[self._case.model].config)), encoding="utf-8")
        total = 0
        for rank in range(ranks):
            pieces = pieces_of(self._case.model, layout, rank, ranks)
            write_pieces(held / f"{rank}.json", pieces)
            total += sum(piece.nbytes for piece in pieces)
        return total

    def prepare(self, name: str) -> None:
        """Write what a contender reads: what it saved itself under the other layout, or shared open weights."""
        case, place = self._case, self._place(name)
        self.timings[name] = Timing()
        if place.exists() or case.verb in ("save", "stream") or (case.verb, name) == ("export", "safetensors"):
            return
        place.mkdir()
        if case.verb == "start" and name != "raw":
            shared = self._root / "open"
            if not shared.exists():
                write_open_weights(case.model, shared, case.layout if case.model == "7b" else "")
            place.rmdir()
            place.symlink_to(shared)
            return
        # A raw read takes what this layout needs; everybody else reads what the other layout saved.
        held, ranks = self._root / "held", case.ranks
        if name != "raw" and (case.saved_layout, case.saved_ranks) != (case.layout, case.ranks):
            held, ranks = self._root / "saved", case.saved_ranks
            if not held.exists():
                self._describe(held, case.saved_layout, ranks)
        try:
            self._servers.turn(name, ranks, verb="save", held=str(held), places=[[str(place)]])
        except TurnFailed as failed:
            self.timings[name].failure = str(failed)
        if case.verb == "diff" and name != "raw":
            saved = place / "checkpoint-1"
            shutil.copytree(saved, copy_of(saved))

    def turn(self, name: str, is_checked: bool) -> None:
        """Let a contender take its turn, in a fresh process per rank."""
        case, timing, place = self._case, self.timings[name], self._place(name)
        if timing.failure:
            return
        is_stream = case.verb == "stream"
        fills = case.verb not in ("save", "export", *CHECKS)
        expected = "canonical" if case.verb == "start" and name != "raw" else "streamed" if is_stream else "values"
        with TemporaryDirectory(dir=self._root) as scratch:
            places = [[str(place)], [str(place)]]
            if case.verb in ("save", "export", "stream"):
                targets = [Path(scratch) / str(number) for number in (0, 1)]
                for target in targets:
                    target.mkdir()
                places = [[*([str(place)] if case.verb == "export" else []), str(target)] for target in targets]
            storage = asdict(Storage(STORAGE_RATE, STORAGE_LATENCY, scratch)) if case.is_stored else None
            try:
                answers = self._servers.turn(
                    name,
                    case.ranks,
                    verb=case.verb,
                    held=str(self._root / "held"),
                    places=places,
                    storage=storage,
                    check=expected if fills and is_checked else "",
                )
            except TurnFailed as failed:
                timing.failure = str(failed)
                return
        timing.add(answers)

    def _place(self, name: str) -> Path:
        """Where the files of a contender are; this package reads the same ones at every level."""
        return self._root / (LEVELS[0] if name in LEVELS else name).replace(" ", "-")
