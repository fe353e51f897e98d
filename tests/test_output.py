"""What reaches a person's screen."""

from __future__ import annotations

import io
import sys

import pytest

from paddleformers_fc.output import console


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    console().print("[bold]a[/bold] :smile: " + "x" * 300)
    assert stream.getvalue() == "[bold]a[/bold] :smile: " + "x" * 300 + "\n"
