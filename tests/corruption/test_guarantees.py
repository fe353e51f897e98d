"""The table of guarantees is complete, and has no row that no test stands for."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.corruption import guarantees

KNOWN = [
    *(f"S{number}" for number in range(1, 19)),
    *(f"T{number}" for number in range(1, 20)),
    *("G10", "G20"),
    *("G30", "G31"),
    "G40",
    "G50",
    "G51",
    *("G60", "G61"),
    "G70",
    *("G80", "G81"),
    *("G100", "G101"),
    *("G110", "G111", "G112", "G113"),
    *("G114", "G115", "G116", "G117"),
]
"""The faults that this package promises to be free of."""


def test_every_known_fault_has_a_test_and_a_row_and_no_row_is_without_a_test() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.corruption.{path.stem}")
    assert sorted(guarantees.FAULTS, key=guarantees.order) == KNOWN
    if not guarantees.MODE.writing:
        text = guarantees.DOCUMENT.read_text(encoding="utf-8")
        rows = re.findall(r"^\| ([A-Z]\d+) \| (.*?) \|.*\| `(\w+::\w+)` \|$", text, re.MULTILINE)
        known = [guarantees.FAULTS[key] for key in KNOWN]
        assert rows == [(one.key, one.trigger, one.test) for one in known]
        assert text.startswith(guarantees.HEAD)
