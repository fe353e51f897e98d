"""``docs/results/guarantees.md`` matches its template, and every row has a test."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.corruption import guarantees


def test_every_row_has_a_test_every_test_a_row_and_the_page_matches_its_template() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.corruption.{path.stem}")
    rows = re.findall(r"^\| ([A-Z]\d+) \|.*\| `(\w+::\w+)` \|$", "\n".join(guarantees.TEXT), re.MULTILINE)
    assert dict(rows) == guarantees.FAULTS
    if not guarantees.writing:
        lines = guarantees.DOCUMENT.read_text(encoding="utf-8").splitlines()
        assert all("{" in text or text == line for text, line in zip(guarantees.TEXT, lines, strict=True))
