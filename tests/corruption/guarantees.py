"""The table of guarantees, made of what the tests of this room observe.

A test of a known fault is decorated with :func:`fault` and returns an :class:`Observed`: what stock did and what this
package did, in words that are put together from what was seen in this very run. Ordinarily each test compares its row
with ``docs/results/guarantees.md``, so that the document cannot say what no run produced. With the plugin
``tests.corruption.writing`` (``make guarantees``) the rows are written instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddleformers_fc.errors import FlexError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "results" / "guarantees.md"


@dataclass(frozen=True)
class Fault:
    """A known way to lose or garble a checkpoint.

    Args:
        key: its number; ``S`` faults are Paddle's, ``T`` faults of PaddleFormers' Trainer and files, ``G`` faults on
            any way in or out.
        trigger: what leads to it.
        test: file and name of the test.
    """

    key: str
    trigger: str
    test: str


@dataclass(frozen=True)
class Observed:
    """What a test has seen.

    Args:
        stock: what Paddle or PaddleFormers did by itself.
        ours: what this package did.
    """

    stock: str
    ours: str


FAULTS: dict[str, Fault] = {}
"""Every fault whose test has been imported, by key."""
RESULTS: dict[str, Observed] = {}
"""What the tests of this run have seen, by key of the fault or of the count."""
COUNTS: dict[str, str] = {}
"""Sentences with numbers that tests of this run have counted, by key."""


BOUNDS: dict[str, str] = {}
"""Sentences about hostile input, by key; they stand in the order of their keys."""


@dataclass
class Mode:
    """Whether this run makes the document or is compared with it."""

    writing: bool = False


MODE = Mode()


def fault(key: str, trigger: str) -> Callable[[Callable[..., Observed]], Callable[..., None]]:
    """Decorate the test of a known fault; what the test returns becomes, or must equal, its row of the table."""

    def decorate(test: Callable[..., Observed]) -> Callable[..., None]:
        known = Fault(key, trigger, f"{test.__module__.rpartition('.')[2]}::{test.__name__}")
        assert key not in FAULTS, f"{key} has two tests"
        FAULTS[key] = known

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            seen = test(*args, **kwargs)
            RESULTS[key] = seen
            _must_be_said(row(known, seen))

        return run

    return decorate


def count(key: str, sentence: str) -> None:
    """A sentence with numbers for the document, which a test of this run has counted."""
    COUNTS[key] = sentence
    _must_be_said(sentence)


def bound(key: str, sentence: str) -> None:
    """A sentence about hostile input for the document: a bound that a test of this run has held to, or a count."""
    BOUNDS[key] = sentence
    _must_be_said(sentence)


def _must_be_said(line: str) -> None:
    if not MODE.writing:
        lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
        assert line in lines, f"{DOCUMENT.name} does not say what this run has seen; run `make guarantees`.\n{line}"


def row(known: Fault, seen: Observed) -> str:
    """A fault's row of the table."""
    return f"| {known.key} | {known.trigger} | {seen.stock} | {seen.ours} | `{known.test}` |".replace("\n", " ")


def order(key: str) -> tuple[int, int]:
    """Where a fault's row stands: by section, then by number."""
    return list(TITLES).index(key[0]), int(key[1:])


HEAD = """\
# Guarantees

Written by `make guarantees` from observations of the tests in `tests/corruption/` and `tests/crash/`; `make test-all`
compares each line with its observations. *Stock* is paddlepaddle 3.3.1 and paddleformers 1.2.0, observed in the
same test. "Nothing changed" means that every target was compared, bit by bit, with its earlier content.

Unless a row states another value, a checkpoint is read with the default `flex_verify: full`, which detects every
changed byte that a load reads: of headers and documents before anything changes, of tensors while they are filled.
`size` detects no changed byte of a tensor in a file of the right length. The `verify` command compares all bytes.
Documents are compared with their checksums at every level.
"""
HOSTILE = """\
## Hostile input

Reading any file or setting ends in success or in an error of this package: no code that it names is run, no file
outside its directory is read, and memory stays within the bounds below. Links of open weights are followed, as the
cache of a hub has them. Checksums guard against accidents, not against forgers who rewrite them too; the following
holds for carefully forged files.

"""
TITLES = {
    "S": "Paddle's flex checkpoint",
    "T": "PaddleFormers' Trainer and files",
    "G": "Every way in and every way out",
}
COUNTED = {"Mutations": "mutations", "Crashes": "crash-"}
"""Titles of what is counted, and how its keys begin."""
COLUMNS = "| | trigger | stock | ours | test |\n|---|---|---|---|---|"


def document() -> str:
    """The whole document, of what this run has seen."""
    parts = [HEAD]
    for letter, title in TITLES.items():
        keys = sorted((key for key in RESULTS if key[0] == letter), key=order)
        if keys:
            rows = "\n".join(row(FAULTS[key], RESULTS[key]) for key in keys)
            parts.append(f"## {title}\n\n{COLUMNS}\n{rows}\n")
    for title, beginning in COUNTED.items():
        lines = [COUNTS[key] for key in sorted(COUNTS) if key.startswith(beginning)]
        if lines:
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    if BOUNDS:
        parts.append(HOSTILE + "\n\n".join(BOUNDS[key] for key in sorted(BOUNDS)) + "\n")
    return "\n".join(parts)


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
