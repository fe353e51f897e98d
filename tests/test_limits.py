"""Tests have no time limit except the suite's, so a slow machine does not change their results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddleformers_fc.cpu_runtime import ranks
from paddleformers_fc.distributed.communicator import DEFAULT_PATIENCE
from tests.harness.limits import LIMIT, suite_limit

HERE = Path(__file__).parent
EXEMPT = {"tests/harness/clocks.py", "tests/harness/waiting.py", "tests/test_limits.py"}
"""The modules that may read a clock or sleep, and this one."""
OWN_LIMIT = re.compile(
    r"\b(?:timeout|alarm|deadline) ?[=(] ?[\d.]"
    r"|\.(?:wait|join|result|exception)\([\d.]+\)"
    r"|\btime\.(?:sleep|monotonic|time|perf_counter)\("
)
"""A number that bounds a wait, or a read of a wall clock."""


@pytest.mark.parametrize(
    ("line", "is_limit"),
    [
        ("subprocess.run([], timeout=60)", True),
        ("event.wait(0.5)", True),
        ("pytest.mark.timeout(900 if ALL else LIMIT)", True),
        ("time.sleep(1)", True),
        ("thread.join(LIMIT)", False),
        ("settings(deadline=None)", False),
    ],
)
def test_a_limit_of_a_tests_own_is_seen(line: str, is_limit: bool) -> None:
    assert bool(OWN_LIMIT.search(line)) == is_limit


def test_no_test_has_a_limit_on_time_of_its_own() -> None:
    found = [
        f"{path.relative_to(HERE.parent)}: {line.strip()}"
        for path in sorted(HERE.rglob("*.py"))
        if str(path.relative_to(HERE.parent)) not in EXEMPT
        for line in path.read_text(encoding="utf-8").splitlines()
        if OWN_LIMIT.search(line)
    ]
    assert found == []


def test_the_test_harness_waits_as_long_as_the_suite() -> None:
    assert min(ranks.PATIENCE_SECONDS, DEFAULT_PATIENCE) >= LIMIT
    assert suite_limit("faulthandler_timeout = 1\ntimeout = 7\ntimeout_method = 2\n") == 7
