"""The page ``docs/results/guarantees.md``: a template, filled with what the tests of this package observe.

``guarantees.md`` is the template, with a placeholder for every observed value. Rows ``S`` are faults of Paddle, rows
``T`` faults of PaddleFormers' Trainer and files, rows ``G`` faults of any load, save or export. The test of a row is
decorated with :func:`fault` and returns the values that it observed. Ordinarily a run compares the filled lines with
the page. With the plugin ``tests.corruption.writing`` (``make guarantees``) it writes the page instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import FlexError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results" / "guarantees.md"
TEXT = Path(__file__).with_name("guarantees.md").read_text(encoding="utf-8").splitlines()
Seen = dict[str, object]
"""Observed values by placeholder."""
FAULTS: dict[str, str] = {}
"""Row -> file and name of its test, for the tests imported so far."""
SEEN: dict[str, Seen] = {}
"""Row or count -> what this run observed."""
writing = False
"""Whether this run writes the page and does not compare with it."""


def fault(key: str) -> Callable[[Callable[..., Seen | None]], Callable[..., None]]:
    """Decorate the test of a row; what the test returns fills the row."""

    def decorate(test: Callable[..., Seen | None]) -> Callable[..., None]:
        assert key not in FAULTS, f"{key} has two tests"
        FAULTS[key] = f"{test.__module__.rpartition('.')[2]}::{test.__name__}"

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            observe(key, **(test(*args, **kwargs) or {}))

        return run

    return decorate


def observe(key: str, **seen: object) -> None:
    """Record what a test observed, and compare the lines that contain it with the page."""
    SEEN[key] = seen
    if writing:
        return
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for line in (_filled(line) for line in TEXT if f"{{{key}[" in line):
        assert line in lines, f"{DOCUMENT.name} differs from what this run observed; run `make guarantees`.\n{line}"


def document() -> str:
    """Return the page, filled with what this run observed."""
    missing = FAULTS.keys() - SEEN.keys()
    assert not missing, f"{missing} were not observed"
    return "".join(f"{_filled(line)}\n" for line in TEXT)


def _filled(line: str) -> str:
    return line.format(**SEEN).replace("\n", " ")


def raised(error: FlexError, saying: str) -> str:
    """Return the text of a table cell: the error's class and its line about the fault.

    Args:
        error: what was raised.
        saying: part of the line to quote.
    """
    lines = [line.strip() for text in (error.what, *error.evidence) for line in text.splitlines()]
    found = [line for line in lines if saying in line]
    assert found, f"nothing says {saying!r}:\n{error}"
    return f"raises `{type(error).__name__}`: “{found[0]}”"
