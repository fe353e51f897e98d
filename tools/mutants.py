"""Mutate random places of the package and print the share of mutants that the tests notice.

First every test file runs once under coverage, together with its ranks and subprocesses. Then each mutant runs against
tests that execute its line, up to 60 seconds of them. A mutant of a line that no test executes survives.
No tool on the public index does both: mutmut maps only tests that run in one process, and cosmic-ray runs one command
for all mutants. Results are kept in ``out/mutants/<commit>``, so an interrupted run continues. The seed fixes
the choice of mutants of a commit. Code for PaddleNLP is left out: its tests need another environment.

Run it on a clean tree with ``make mutants``. Time: twice the suite, then seconds for a noticed mutant and up to the
budget for a survivor, divided by the number of workers.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

import pytest
from coverage import Coverage

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("storage", "execute", "plan", "mapping", "families", "layout", "distributed", "trainer")
SEED, COUNT, WORKERS = 1, 300, 2
BUDGET = 60.0
"""Seconds that the tests of a mutant may take without it."""
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--sample", "--hypothesis-seed=0"]
CONTEXTS = ["-p", "tools.mutants"]
"""This file as a plugin of pytest. Coverage can find tests by itself, but looks for one at each call in every rank."""
PAIRS = (
    *((ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
)
OPPOSITES = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """A replacement of bytes ``start`` to ``stop`` of a file, which begin in ``line``."""

    file: str
    line: int
    start: int
    stop: int
    text: str


def mutated(node: ast.AST) -> ast.AST | None:
    """Return the faulty variant of a node, None for a node that has none."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in OPPOSITES:
            return ast.Compare(left, [OPPOSITES[type(operator)]()], right)
        case ast.BinOp(left, operator, right) if type(operator) in OPPOSITES:
            return ast.BinOp(left, OPPOSITES[type(operator)](), right)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(OPPOSITES[type(operator)](), values)
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value)):
            return ast.Constant(value + 1)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Expr(ast.Call() | ast.Yield()) | ast.Raise():
            return ast.Pass()
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            return ast.Return(ast.Constant(None))
    return None


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Return every mutant of a file in the order of the syntax tree."""
    source = file.read_bytes()
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    nodes = list(ast.walk(ast.parse(source)))
    # Python 3.11 states wrong places for what is inside of these.
    formatted = {id(inner) for node in nodes if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    for node in nodes:
        other = mutated(node)
        if other is None or id(node) in formatted:
            continue
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(ast.fix_missing_locations(other))
        text = f"({text})" if isinstance(node, ast.expr) else text
        yield Mutant(str(file.relative_to(ROOT)), node.lineno, start, stop, text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record the lines from here on as those of a test, as forked ranks do (``verification/forkserver.py``)."""
    Coverage.current().switch_context(item.nodeid.partition("[")[0])


def cover(file: str, place: Path) -> None:
    """Run a test file under coverage and keep its data, and the seconds of each of its test functions, in ``place``."""
    data = place / "data"
    if data.exists():
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    measured = ["-m", "coverage", "run", f"--data-file={data}", f"--context={file}"]
    command = [sys.executable, *measured, *PYTEST, *CONTEXTS, f"--junitxml={place / 'seconds.xml'}", file]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode == 0:
        Coverage(data_file=str(data)).combine([str(place)])
    elif ended.returncode != 5:  # The sample has no case of this file.
        print(f"left out, because it fails under coverage without a mutant: {file}", flush=True)


class TestsByLine:
    """Which tests execute a line, and how long they take, read from the directories that :func:`cover` wrote."""

    def __init__(self, places: dict[str, Path]) -> None:
        self._seconds: dict[str, float] = {}
        self._lines: dict[str, dict[int, set[str]]] = {}
        self._outside: dict[str, set[int]] = {}
        for file, place in ((file, place) for file, place in places.items() if (place / "data").exists()):
            for case in ElementTree.parse(place / "seconds.xml").iter("testcase"):
                for name in (file, f"{file}::{case.attrib['name'].partition('[')[0]}"):
                    self._seconds[name] = self._seconds.get(name, 0.0) + float(case.attrib["time"])
            self._read_lines(file, place)

    def _read_lines(self, file: str, place: Path) -> None:
        covered = Coverage(data_file=str(place / "data"))
        covered.load()
        for source in covered.get_data().measured_files():
            lines = self._lines.setdefault(str(Path(source).relative_to(ROOT)), {})
            for line, contexts in covered.get_data().contexts_by_lineno(source).items():
                for context in contexts:
                    name = context.rpartition("|")[2]
                    lines.setdefault(line, set()).add(name if name in self._seconds else file)

    def tests_of(self, mutant: Mutant) -> tuple[list[str], float]:
        """Return tests that execute the mutant's line, at least one if there is any, and their seconds.

        Tests that execute more of the file in less time go first. Lines outside of functions run at import in every
        test file, so for them each test function is a candidate, and tests of the same package go first.
        """
        lines = self._lines.get(mutant.file, {})
        executed = Counter(name for names in lines.values() for name in names)
        candidates = lines.get(mutant.line, set())
        if mutant.line in self._lines_outside_functions(mutant.file):
            candidates = {name for file in candidates for name in self._functions_of(file.partition("::")[0])}
        package = str(Path("tests", *Path(mutant.file).parts[1:2])) + os.sep

        def order(name: str) -> tuple[bool, float, str]:
            is_near = name in executed or name.startswith(package)
            return not is_near, self._seconds[name] / max(1, executed[name]), name

        names = sorted(candidates, key=order)
        sums = list(accumulate(self._seconds[name] for name in names))
        count = max(1, sum(seconds <= BUDGET for seconds in sums))
        return names[:count], sums[min(count, len(sums)) - 1] if sums else 0.0

    def _functions_of(self, file: str) -> list[str]:
        return [name for name in self._seconds if name.startswith(f"{file}::")]

    def _lines_outside_functions(self, file: str) -> set[int]:
        """Return the lines that an import executes; a lambda is on such a line."""
        if file not in self._outside:
            tree = ast.parse((ROOT / file).read_bytes())
            bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            inside = {line for body in bodies for line in range(body[0].lineno, body[-1].end_lineno + 1)}
            self._outside[file] = set(range(1, tree.body[-1].end_lineno + 1)) - inside
        return self._outside[file]


def judge(mutant: Mutant, tests: list[str], seconds: float, tree: Path) -> str:
    """Return ``noticed``, ``survived`` or ``uncovered`` after running the tests in a copy of the repository."""
    if not tests:
        return "uncovered"
    path = tree / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.stop :])
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *PYTEST, "-x", f"--basetemp={tree.with_suffix('.tmp')}", *tests]
    try:
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=120 + 5 * seconds)
    except subprocess.TimeoutExpired:
        return "noticed"
    finally:
        path.write_bytes(source)
    return "survived" if ended.returncode == 0 else "noticed"


def main() -> None:
    """Judge a sample of mutants, print each with its outcome, then the share that is noticed."""
    commit = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], text=True)
    place = ROOT / "out" / "mutants" / commit.strip()
    tests = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    places = {str(file): place / "coverage" / file.with_suffix("") for file in tests if file.parts[1] != "nlp"}
    files = [file for name in PACKAGES for file in sorted((ROOT / "paddleformers_fc" / name).rglob("*.py"))]
    population = [mutant for file in files if "nlp" not in file.name for mutant in mutants_of(file)]
    sample = random.Random(SEED).sample(population, COUNT)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(cover, places, places.values()))
        coverage, trees, memory = TestsByLine(places), SimpleQueue[Path](), place / "outcomes.json"
        outcomes: dict[str, str] = json.loads(memory.read_text()) if memory.exists() else {}
        for tree in (place / f"tree{number}" for number in range(WORKERS)):
            shutil.rmtree(tree, ignore_errors=True)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "out", "demo_out", "site", "__pycache__"))
            trees.put(tree)

        def outcome_of(mutant: Mutant) -> str:
            tree = trees.get()
            if str(mutant) not in outcomes:
                outcomes[str(mutant)] = judge(mutant, *coverage.tests_of(mutant), tree)
                memory.write_text(json.dumps(dict(outcomes)))
            trees.put(tree)
            return outcomes[str(mutant)]

        for mutant, outcome in zip(sample, pool.map(outcome_of, sample), strict=True):
            removed = (ROOT / mutant.file).read_bytes()[mutant.start : mutant.stop].decode()
            print(f"{outcome:9} {mutant.file}:{mutant.line}  {removed}  ->  {mutant.text}", flush=True)
    noticed = sum(outcomes[str(mutant)] == "noticed" for mutant in sample)
    print(f"{noticed} of {COUNT} mutants are noticed: {noticed / COUNT:.1%} (seed {SEED}, of {len(population)})")


if __name__ == "__main__":
    main()
