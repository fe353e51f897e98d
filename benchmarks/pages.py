"""The measured part of a page of the documentation, between two marks."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- measured -->", "<!-- end -->"


def replace_measured(page: Path, text: str) -> None:
    """Replace the measured part of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
