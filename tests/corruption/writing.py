"""A plugin of pytest that writes the page of guarantees after a run: ``pytest -p tests.corruption.writing``."""

from __future__ import annotations

import pytest

from tests.corruption import guarantees


def pytest_configure() -> None:
    """The document is not looked at in this run."""
    guarantees.writing = True


def pytest_sessionfinish(exitstatus: int) -> None:
    """Write what was seen, if every test has passed."""
    if exitstatus == pytest.ExitCode.OK:
        guarantees.DOCUMENT.write_text(guarantees.document(), encoding="utf-8")
