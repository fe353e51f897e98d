"""The suite's one limit on time.

Every wait of a test that a fault could make endless is bounded by :data:`LIMIT`: joins, barriers, subprocesses, jobs of
ranks. It is pytest's own limit per test (``timeout`` in pyproject.toml), so that no wait ends before the test does, and
what a test finds does not depend on the load of the machine. Tests that are about a timeout bring their own clock
(:mod:`tests.harness.clocks`).
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def suite_limit(pyproject: str) -> float:
    """pytest's limit per test, in seconds, as pyproject.toml states it."""
    (stated,) = re.findall(r"^timeout = (\d+)$", pyproject, re.MULTILINE)
    return float(stated)


def be_patient() -> None:
    """Let this process wait for the job's store as long as a test may take, in place of a minute."""
    from paddleformers_fc.distributed import store_client

    store_client.OPENING_SECONDS = LIMIT


LIMIT = suite_limit((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
"""Seconds."""
