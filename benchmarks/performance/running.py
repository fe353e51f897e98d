"""Carrying cases out: prepare what is loaded, warm up and check, then rounds in turn."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.performance.cases import CHECKS, LEVELS, Case
from benchmarks.performance.files import copy_of, write_open_weights
from benchmarks.performance.pool import Pool, Round

PADDLE = "benchmarks.performance.with_paddle"
TORCH = "benchmarks.performance.with_torch"


@dataclass(frozen=True)
class Timing:
    """What one contender did in one case.

    Args:
        seconds: of every round.
        first: seconds of the warm-up, which also imports and connects.
        read: bytes that its ranks say they read, of all ranks; -1 if they are not counted.
        peak: the most that any rank's memory rose, in bytes, in any round.
        failure: why there is no figure; empty where there is one.
    """

    seconds: tuple[float, ...] = ()
    first: float = 0.0
    read: int = -1
    peak: int = 0
    failure: str = ""


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


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def measure(case: Case, rounds: int, root: Path) -> Outcome:
    """Measure one case.

    Args:
        case: which.
        rounds: how often each contender has its turn after the warm-up.
        root: an empty directory on a file system in memory; it is left empty.
    """
    contenders = [name for name in case.contenders if name != "dcp" or has_torch()]
    places = {name: root / name.replace(" ", "-") for name in contenders}
    for name, place in places.items():
        if name in LEVELS[1:]:
            place.symlink_to(root / LEVELS[0])
        else:
            place.mkdir()
    failures = _prepared(case, places, root / "logs")
    while True:
        taking_part = [name for name in contenders if name not in failures]
        try:
            outcome = _rounds(case, taking_part, rounds, places, root / "logs")
        except _Failed as failed:
            # Its ranks may wait for each other for ever, so that all begin again without it.
            failures[failed.contender] = failed.reason
            continue
        break
    outcome.timings.update({name: Timing(failure=reason) for name, reason in failures.items()})
    for place in root.iterdir():
        if place.is_symlink():
            place.unlink()
        else:
            shutil.rmtree(place)
    return outcome


class _Failed(Exception):
    """A contender cannot do a case."""

    def __init__(self, contender: str, error: RuntimeError) -> None:
        super().__init__(contender)
        self.contender = contender
        self.reason = _reason(error)


def _reason(error: RuntimeError) -> str:
    """The line of a traceback that says what was wrong."""
    lines = str(error).strip().splitlines()
    return next(
        (line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Mismatch|Corrupt)\b", line)), lines[-1]
    )


def _module(contender: str) -> str:
    return TORCH if contender == "dcp" else PADDLE


@contextmanager
def _pools(contenders: list[str], ranks: int, logs: Path) -> Iterator[dict[str, Pool]]:
    """One pool per kind of rank, by contender."""
    with ExitStack() as stack:
        modules = sorted({_module(name) for name in contenders})
        made = {module: stack.enter_context(Pool(module, ranks, logs)) for module in modules}
        yield {name: made[_module(name)] for name in contenders}


def _prepared(case: Case, places: dict[str, Path], logs: Path) -> dict[str, str]:
    """Write what is loaded; who could not, and why."""
    failures: dict[str, str] = {}
    if case.verb == "save":
        return failures
    if case.verb == "start":
        shared = logs.parent / "open"
        write_open_weights(case.model, shared, case.layout if case.model == "7b" else "")
        for place in places.values():
            (place / "open").symlink_to(shared)
        return failures
    # A raw read takes what this layout needs; everybody else reads what the other layout saved.
    left = [name for name in places if name not in ("raw", *LEVELS[1:])]
    while left:
        left = _saved(case, left, places, logs, failures)
    if case.verb == "diff":
        saved = places["ours"] / "checkpoint-1"
        shutil.copytree(saved, copy_of(saved))
    return failures


def _saved(case: Case, savers: list[str], places: dict[str, Path], logs: Path, failures: dict[str, str]) -> list[str]:
    """Let one after the other save what it will read; those that are left once one has failed.

    The ranks of one that failed may wait for each other for ever, so that others begin again without it.
    """
    with _pools(savers, case.saved_ranks, logs) as pools:
        for pool in set(pools.values()):
            pool.run(do="build", model=case.model, layout=case.saved_layout)
        for number, name in enumerate(savers):
            if case.verb == "export" and name != "ours":
                continue
            try:
                pools[name].run(do="save", contender=name, places=[str(places[name])])
            except RuntimeError as error:
                failures[name] = _reason(error)
                return savers[number + 1 :]
    return []


def _rounds(case: Case, contenders: list[str], rounds: int, places: dict[str, Path], logs: Path) -> Outcome:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    first = dict.fromkeys(contenders, 0.0)
    read = dict.fromkeys(contenders, -1)
    peak = dict.fromkeys(contenders, 0)
    with _pools(contenders, case.ranks, logs) as pools:
        built = {pool: pool.run(do="build", model=case.model, layout=case.layout) for pool in set(pools.values())}
        nbytes = sum(answer["bytes"] for answer in next(iter(built.values())).answers)
        if "raw" in contenders and case.verb in ("load", "start", *CHECKS):
            for left in places["raw"].glob("*.raw"):
                left.unlink()
            pools["raw"].run(do="save", contender="raw", places=[str(places["raw"])])
        for number in range(rounds + 1):
            # Every round begins with another contender, so that none always follows the same one.
            turn = number % len(contenders)
            for name in contenders[turn:] + contenders[:turn]:
                try:
                    done = _turn(case, name, pools[name], places[name], number == 0)
                except RuntimeError as error:
                    raise _Failed(name, error) from error
                if number == 0:
                    first[name] = done.seconds
                else:
                    seconds[name].append(done.seconds)
                    read[name] = sum(answer["read"] for answer in done.answers)
                    peak[name] = max(peak[name], *(answer["peak"] for answer in done.answers))
    made = {name: Timing(tuple(seconds[name]), first[name], max(read[name], -1), peak[name]) for name in contenders}
    return Outcome(case, nbytes, made)


def _turn(case: Case, name: str, pool: Pool, place: Path, check: bool) -> Round:
    """One turn of one contender; a load is checked, bit by bit, where ``check`` asks for it."""
    if case.verb in ("save", "export"):
        target = place / "round"
        target.mkdir()
        places = [str(target)] if case.verb == "save" else [str(place), str(target)]
        done = pool.run(do=case.verb, contender=name, places=places)
        shutil.rmtree(target)
        return done
    if case.verb in CHECKS:
        return pool.run(do=case.verb, contender=name, places=[str(place)])
    pool.run(do="zero")
    verb = "load" if name == "raw" else case.verb
    source = place if name == "raw" or case.verb == "load" else place / "open"
    with TemporaryDirectory(dir=place.parent) as cache:
        done = pool.run(do=verb, contender=name, places=[str(source)], rate=case.storage_rate, cache=cache)
    if check:
        wrong = pool.run(do="check", canonical=case.verb == "start" and name != "raw")
        names = [wrong_name for answer in wrong.answers for wrong_name in answer["wrong"]]
        if names:
            raise RuntimeError(f"{len(names)} tensors are not filled with the right bits, {names[0]} first")
    return done
