"""What reaches a person's screen."""

from __future__ import annotations

import io
import sys

import pytest

from paddleformers_fc.output import console
from paddleformers_fc.progress_display import working


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console().print("[bold]a[/bold] :smile: " + "x" * 300)
    assert stream.getvalue() == "[bold]a[/bold] :smile: " + "x" * 300 + "\n"


def test_no_spinner_is_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with working("reading"):
        pass
    assert stream.getvalue() == ""
