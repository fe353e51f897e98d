"""A plugin of pytest that writes how long each test took, as JSON: node id -> seconds."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "FLEX_DURATIONS"
_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up setup, call and teardown."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file that the environment names."""
    Path(os.environ[VARIABLE]).write_text(json.dumps(_seconds))
