"""``families`` shows the declared families."""

from __future__ import annotations

import pytest

from paddleformers_fc.families.evidence import family_table
from tests.cli.support import run


@pytest.mark.parametrize(("columns", "most"), [("", 80), ("120", 120)])
def test_the_table_fits_80_columns_or_those_of_the_environment(
    columns: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run("families").out.splitlines()
    assert 70 < max(map(len, lines)) <= most
    names = {line.split()[0] for line in lines if line.strip()}
    assert all(one.family in names for one in family_table().families)
    assert " ".join(" ".join(lines).split()).endswith("by simulated ranks.")
