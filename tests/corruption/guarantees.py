"""The page of guarantees: its text, filled with what the tests of this room observe.

``guarantees.md`` is the text, with a name in braces in place of everything that a test observes. ``S`` faults are
Paddle's, ``T`` faults of PaddleFormers' Trainer and files, ``G`` faults on any way in or out. The test of a fault is
decorated with :func:`fault` and returns what it has seen in this very run. Ordinarily its lines are compared with
``docs/results/guarantees.md``, so that the document cannot say what no run produced. With the plugin
``tests.corruption.writing`` (``make guarantees``) the document is written instead.
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
"""What a test has observed, by the names that the text gives it."""
FAULTS: dict[str, str] = {}
"""File and name of the test of every fault whose test has been imported, by key."""
SEEN: dict[str, Seen] = {}
"""What the tests of this run have observed, by key of the fault or of the count."""
writing = False
"""Whether this run makes the document, and is not compared with it."""


def fault(key: str) -> Callable[[Callable[..., Seen | None]], Callable[..., None]]:
    """Decorate the test of a known fault, a row of the text; what it returns fills the row."""

    def decorate(test: Callable[..., Seen | None]) -> Callable[..., None]:
        assert key not in FAULTS, f"{key} has two tests"
        FAULTS[key] = f"{test.__module__.rpartition('.')[2]}::{test.__name__}"

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            observe(key, **(test(*args, **kwargs) or {}))

        return run

    return decorate


def observe(key: str, **seen: object) -> None:
    """Fill the lines of the text with what a test has counted or seen, or with a bound that it has held to."""
    SEEN[key] = seen
    if writing:
        return
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    for line in (_filled(line) for line in TEXT if f"{{{key}[" in line):
        assert line in lines, f"{DOCUMENT.name} does not say what this run has seen; run `make guarantees`.\n{line}"


def document() -> str:
    """The whole document, of what this run has seen."""
    missing = FAULTS.keys() - SEEN.keys()
    assert not missing, f"{missing} were not observed"
    return "".join(f"{_filled(line)}\n" for line in TEXT)


def _filled(line: str) -> str:
    return line.format(**SEEN).replace("\n", " ")


def refused(error: FlexError, saying: str) -> str:
    """An error in the words of the table: its class and the one line that names the fault.

    Args:
        error: what was raised.
        saying: part of the line that is quoted.
    """
    lines = [line.strip() for text in (error.what, *error.evidence) for line in text.splitlines()]
    found = [line for line in lines if saying in line]
    assert found, f"nothing says {saying!r}:\n{error}"
    return f"refused: `{type(error).__name__}`, “{found[0]}”; nothing changed"
