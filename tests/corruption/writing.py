"""A pytest plugin that writes ``docs/results/guarantees.md`` after a run: ``pytest -p tests.corruption.writing``."""

from __future__ import annotations

import pytest

from tests.corruption import guarantees


def pytest_configure() -> None:
    """Turn off the comparison with the page."""
    guarantees.writing = True


def pytest_sessionfinish(exitstatus: int) -> None:
    """Write the page if every test passed."""
    if exitstatus == pytest.ExitCode.OK:
        guarantees.DOCUMENT.write_text(guarantees.document(), encoding="utf-8")
