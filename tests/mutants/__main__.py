"""``python -m tests.mutants``: run every mutant; exit code 1 when fewer are noticed than the goal.

Nothing here is changed: each of two workers has a copy of the tree under ``out/mutants``, in which a mutant is applied,
its tests run with ``-x -q``, and the source is put back. First the tests of all mutants run without any and must pass;
how long each took bounds the time of the mutants, of which one that runs away is stopped and counts as noticed. What
is done is remembered, so that a run that was stopped goes on, until anything in the tree changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, TypeVar

from paddleformers_fc.errors import FlexError, OptionError
from tests.harness.limits import ROOT
from tests.mutants import timing
from tests.mutants.lists import MUTANTS
from tests.mutants.mutant import PACKAGE, Mutant

PLACE = ROOT / "out" / "mutants"
GOAL = 95.0
WORKERS = 2
LEAST_SECONDS = 90.0
"""What a mutant may take in any case; else so many times what its tests take without it:"""
TIMES = 8.0
_SHOWN = 20
_LEFT_OUT = shutil.ignore_patterns(".*", "out", "demo_out", "log", "build", "dist", "*.egg-info", "__pycache__")
_T = TypeVar("_T")
NOTICED, STOPPED, SURVIVED, BROKEN = "noticed", "stopped", "survived", "broken"


@dataclass(frozen=True)
class Outcome:
    """How the tests of a mutant ended.

    Args:
        result: ``noticed``; ``stopped``, which counts as noticed; ``survived``; or ``broken``: no test ran.
        seconds: it took.
        shown: the end of what pytest printed.
    """

    result: str
    seconds: float
    shown: str = ""

    @property
    def is_noticed(self) -> bool:
        """Whether a test failed, or would at the suite's limit."""
        return self.result in (NOTICED, STOPPED)


_running: set[int] = set()
"""The process groups of tests that run now."""


def _stop(number: int, frame: object) -> NoReturn:
    """End with all tests; what is done is remembered."""
    print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    for group in tuple(_running):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os._exit(128 + number)


class Tree:
    """A copy of the repository in which one mutant at a time lives.

    Args:
        directory: for the copy and the temporary files of its tests.
    """

    def __init__(self, directory: Path) -> None:
        self._copy, self._temporary = directory / "tree", directory / "tmp"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(ROOT, self._copy, ignore=_LEFT_OUT)
        # Compiled files that are known by their sources' content: two mutants of a second may have the same length.
        arguments = ["-q", "--invalidation-mode", "checked-hash", PACKAGE]
        subprocess.run([sys.executable, "-m", "compileall", *arguments], cwd=self._copy, check=True)

    def run(self, tests: Sequence[str], seconds: float | None, *options: str, **environment: str) -> Outcome:
        """Run tests in the copy, at most so long."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        command += [f"--basetemp={self._temporary}", *options, *tests]
        began = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=self._copy,
            env={**os.environ, "PYTHONPATH": str(self._copy), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            _running.add(process.pid)
            try:
                shown, _ = process.communicate(timeout=seconds)
                result = {0: SURVIVED, 1: NOTICED}.get(process.returncode, BROKEN)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                shown, _ = process.communicate()
                result = STOPPED
            finally:
                _running.discard(process.pid)
        return Outcome(result, time.monotonic() - began, "\n".join(shown.splitlines()[-_SHOWN:]))

    def judge(self, mutant: Mutant, seconds: float) -> Outcome:
        """Apply a mutant, run its tests, and put the source back."""
        path = mutant.path(self._copy)
        source = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(source), encoding="utf-8")
        try:
            return self.run(mutant.tests, seconds, "-x")
        finally:
            path.write_text(source, encoding="utf-8")

    def unmutated(self, tests: Sequence[str]) -> tuple[Outcome, dict[str, float]]:
        """Run tests that must pass; how they ended, and the seconds of each by node id, none if one failed."""
        report = self._copy / "durations.json"
        outcome = self.run(tests, None, "-p", timing.__name__, **{timing.VARIABLE: str(report)})
        found: dict[str, float] = json.loads(report.read_bytes()) if outcome.result == SURVIVED else {}
        return outcome, found


class Memory:
    """What earlier runs over the same tree have found, in a file.

    Args:
        path: of the file.
        tree: a digest of everything that a copy holds.
    """

    def __init__(self, path: Path, tree: str) -> None:
        self._path = path
        known = json.loads(path.read_bytes()) if path.exists() else {}
        same = known.get("tree") == tree
        self._document = known if same else {"tree": tree, "durations": {}, "outcomes": {}}

    @property
    def durations(self) -> dict[str, float]:
        """Of the tests that have run without a mutant, by node id."""
        return dict(self._document["durations"])

    def outcome(self, mutant: Mutant) -> Outcome | None:
        """What was found of a mutant."""
        found = self._document["outcomes"].get(_key(mutant))
        return Outcome(**found) if found else None

    def keep_durations(self, durations: dict[str, float]) -> None:
        """Remember that the tests pass."""
        self._document["durations"] = durations
        self._write()

    def keep(self, mutant: Mutant, outcome: Outcome) -> None:
        """Remember an outcome."""
        self._document["outcomes"][_key(mutant)] = asdict(outcome)
        self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._document))
        partial.rename(self._path)


def _key(mutant: Mutant) -> str:
    return hashlib.blake2b(repr(mutant).encode(), digest_size=16).hexdigest()


def digest_of_tree(root: Path) -> str:
    """A digest of all files that a copy would hold, but the lists, of which each mutant stands for itself."""
    digest = hashlib.blake2b(digest_size=16)
    for directory, names, files in os.walk(root):
        left_out = _LEFT_OUT(directory, [*names, *files])
        names[:] = sorted(name for name in names if name not in left_out and name != "mutants")
        for name in sorted(set(files) - left_out):
            path = Path(directory, name)
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def expected_seconds(mutant: Mutant, durations: dict[str, float]) -> float:
    """What the tests of a mutant take without it."""
    return sum(seconds for test in mutant.tests for seconds in _taken(test, durations))


def _taken(test: str, durations: dict[str, float]) -> list[float]:
    """What the tests of a selection have taken; nothing where they have not run."""
    inside = (f"{test}::", f"{test}[")
    return [seconds for node, seconds in durations.items() if node == test or node.startswith(inside)]


def check(mutants: Iterable[Mutant]) -> None:
    """See that every mutant applies.

    Raises:
        OptionError: one does not.
    """
    for mutant in mutants:
        mutant.applied(mutant.path(ROOT).read_text(encoding="utf-8"))


def chosen(pattern: str) -> list[Mutant]:
    """The mutants whose file or reason holds a text."""
    return [mutant for mutant in MUTANTS if pattern in str(mutant)]


def run(mutants: Sequence[Mutant], memory: Memory, say: Callable[[str], None]) -> dict[Mutant, Outcome]:
    """Judge every mutant that is not known yet; the outcomes of all.

    Raises:
        OptionError: tests fail although nothing is wrong.
    """
    outcomes = {mutant: known for mutant in mutants if (known := memory.outcome(mutant))}
    left = [mutant for mutant in mutants if mutant not in outcomes]
    if not left:
        return outcomes
    trees: SimpleQueue[Tree] = SimpleQueue()
    for number in range(WORKERS):
        trees.put(Tree(PLACE / f"worker-{number}"))
    with ThreadPoolExecutor(WORKERS) as pool:
        durations = memory.durations
        parts = _parts({test for mutant in left for test in mutant.tests if not _taken(test, durations)})
        failed: list[str] = []
        ran = pool.map(lambda part: _with(trees, lambda tree: tree.unmutated(part)), parts)
        for part, (outcome, found) in zip(parts, ran, strict=True):
            failed += [] if found else outcome.shown.splitlines()
            durations |= found
            memory.keep_durations(durations)
            say(f"without a mutant {outcome.seconds:6.1f} s  {' '.join(part)}")
        if failed:
            raise OptionError("Tests fail without any mutant.", evidence=failed)

        def judge(mutant: Mutant) -> Outcome:
            seconds = LEAST_SECONDS + TIMES * expected_seconds(mutant, durations)
            return _with(trees, lambda tree: tree.judge(mutant, seconds))

        for mutant, outcome in zip(left, pool.map(judge, left), strict=True):
            outcomes[mutant] = outcome
            memory.keep(mutant, outcome)
            say(f"{len(outcomes):4d} of {len(mutants)}  {outcome.result:9}{outcome.seconds:6.1f} s  {mutant}")
    return outcomes


def _parts(tests: Iterable[str]) -> list[list[str]]:
    """What is run at a time without a mutant: the selections of one file, or the file where it is one of them."""
    parts: dict[str, list[str]] = {}
    for test in sorted(tests):
        parts.setdefault(test.split("::")[0], []).append(test)
    return [[file] if file in part else part for file, part in parts.items()]


def _with(trees: SimpleQueue[Tree], work: Callable[[Tree], _T]) -> _T:
    tree = trees.get()
    try:
        return work(tree)
    finally:
        trees.put(tree)


def report(mutants: Sequence[Mutant], outcomes: dict[Mutant, Outcome], goal: float) -> int:
    """Print the table; the exit code."""
    total, noticed = Counter[str](), Counter[str]()
    for mutant in mutants:
        package = mutant.file.split("/")[0]
        total[package] += 1
        noticed[package] += outcomes[mutant].is_noticed
    print(f"\n{'package':12}{'mutants':>9}{'noticed':>9}{'share':>9}")
    for package in [*sorted(total), ""]:
        one, all_ = (noticed[package], total[package]) if package else (noticed.total(), total.total())
        print(f"{package or 'all':12}{all_:9}{one:9}{100 * one / all_:8.1f}%")
    code = 0
    for mutant in mutants:
        outcome = outcomes[mutant]
        if outcome.result == BROKEN:
            code = 1
            print(f"\nbroken: {mutant}\n{outcome.shown}")
        elif outcome.is_noticed and mutant.equivalent:
            code = 1
            print(f"\nnoticed, although argued to be equivalent: {mutant}\n{outcome.shown}")
        elif not outcome.is_noticed and mutant.equivalent:
            print(f"\nequivalent: {mutant}\n  {mutant.equivalent}")
        elif not outcome.is_noticed:
            code = 1
            print(f"\nsurvived: {mutant}\n- {mutant.text}\n+ {mutant.instead}")
    share = 100 * noticed.total() / total.total()
    print(f"\n{noticed.total()} of {total.total()} mutants are noticed: {share:.1f} % (goal {goal:g} %)")
    return code if share >= goal else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose file or reason holds this")
    parser.add_argument("--goal", type=float, default=GOAL, metavar="PERCENT", help="share to be noticed")
    given = parser.parse_args(arguments)
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, _stop)
    try:
        mutants = chosen(given.only)
        check(mutants)
        PLACE.mkdir(parents=True, exist_ok=True)
        memory = Memory(PLACE / "outcomes.json", digest_of_tree(ROOT))
        outcomes = run(mutants, memory, lambda line: print(line, flush=True))
    except FlexError as error:
        print(error.render(), file=sys.stderr)
        return 2
    return report(mutants, outcomes, given.goal)


if __name__ == "__main__":
    sys.exit(main())
