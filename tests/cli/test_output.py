"""Numbers as a person reads them."""

from __future__ import annotations

import io
import sys

import pytest

from paddleformers_fc.cli.output import console, count_text, size_text, working


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (5 * 10**9, "5 GB"),
        (123 * 10**18, "1.23e+05 PB"),
    ],
)
def test_sizes_have_three_digits_and_powers_of_a_thousand(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (1024, "1,024 files")])
def test_counts_agree_with_their_noun(count: int, text: str) -> None:
    assert count_text(count, "file") == text


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console().print("[bold]a[/bold] :smile: " + "x" * 300)
    assert stream.getvalue() == "[bold]a[/bold] :smile: " + "x" * 300 + "\n"


def test_nothing_moves_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with working("reading"):
        pass
    assert stream.getvalue() == ""
