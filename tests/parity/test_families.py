"""The table of families: the fixtures that exist, and ``docs/families.md``."""

from __future__ import annotations

import os
from pathlib import Path

from paddleformers_fc.families import own_families
from tests.parity.evidence import EXCEPT, HEADINGS, ONE_RANK, REFUSED_APART, row
from tests.parity.test_parity import FIRST

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
HEAD = Path(__file__).with_name("families.md")
"""The page without its table."""


def page() -> str:
    """The whole page."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *map(row, own_families())]
    return HEAD.read_text() + "".join(f"| {' | '.join(one)} |\n" for one in rows)


def test_the_page_is_that_of_the_table() -> None:
    if os.environ.get("FLEX_WRITE_FAMILIES"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run make families"


def test_the_table_names_the_families_of_which_something_is_not_compared() -> None:
    assert {name for name in FIRST if name in REFUSED_APART} == ONE_RANK.keys()
    assert {name.split("-")[0] for name in REFUSED_APART} == ONE_RANK.keys() | EXCEPT.keys()
