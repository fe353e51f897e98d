"""What a test finds does not depend on how fast the machine is: no limit on time but the suite's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddleformers_fc.cpu_runtime import ranks
from paddleformers_fc.distributed.communicator import DEFAULT_PATIENCE
from tests.harness.limits import LIMIT, suite_limit

HERE = Path(__file__).parent
CLOCKS = {"tests/harness/clocks.py", "tests/harness/waiting.py"}
"""The modules that may look at a clock or sleep."""
WAITS = {"wait", "join", "result", "exception"}
"""Methods whose first number is a limit."""
LIMITS = {"timeout", "alarm", "deadline", "grace", "patience"}
"""Keywords, and functions, whose number is a limit."""
ENDS = {"grace": "of processes that hang for ever", "patience": "in time that the test makes"}
"""Limits that may be short, because what they end never comes by itself."""


def short_limits(source: str) -> Iterator[str]:
    """Every number in a test's source that bounds a wait, and every look at a wall clock."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        limits = [word.value for word in node.keywords if word.arg in LIMITS - ENDS.keys()]
        if name in WAITS | LIMITS - ENDS.keys():
            limits += node.args[:1]
        for limit in limits:
            if _has_number(limit):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if ast.unparse(node.func) in {"time.sleep", "time.monotonic", "time.time", "time.perf_counter"}:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def _has_number(expression: ast.expr) -> bool:
    """Whether a sum, product or choice holds a number."""
    if isinstance(expression, ast.BinOp):
        sides = (expression.left, expression.right)
        return any(map(_has_number, sides)) and not any(isinstance(side, ast.List) for side in sides)
    if isinstance(expression, ast.IfExp):
        return _has_number(expression.body) or _has_number(expression.orelse)
    return isinstance(expression, ast.Constant) and type(expression.value) in (int, float)


@pytest.mark.parametrize(
    ("line", "is_limit"),
    [
        ("subprocess.run([], timeout=60)", True),
        ("thread.join(30)", True),
        ("event.wait(0.5)", True),
        ("signal.alarm(60)", True),
        ("pytest.mark.timeout(900 if ALL else LIMIT)", True),
        ("threading.Barrier(3, timeout=2 * 30)", True),
        ("settings(deadline=200)", True),
        ("time.sleep(1)", True),
        ("time.monotonic()", True),
        ("thread.join(LIMIT)", False),
        ("', '.join(names)", False),
        ("event.wait()", False),
        ("time.process_time()", False),
    ],
)
def test_a_limit_of_a_tests_own_is_seen(line: str, is_limit: bool) -> None:
    assert list(short_limits(line)) == [f"line 1: {line}"] * is_limit


def test_no_test_has_a_limit_on_time_of_its_own() -> None:
    found = [
        f"{path.relative_to(HERE.parent)} {line}"
        for path in sorted(HERE.rglob("*.py"))
        if str(path.relative_to(HERE.parent)) not in CLOCKS
        for line in short_limits(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_test_harness_waits_as_long_as_the_suite() -> None:
    assert min(ranks.PATIENCE_SECONDS, DEFAULT_PATIENCE) >= LIMIT
    assert suite_limit("faulthandler_timeout = 1\ntimeout = 7\ntimeout_method = 2\n") == 7
