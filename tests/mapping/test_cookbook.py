"""The cookbook: its examples run, and print the documented output."""

from __future__ import annotations

from pathlib import Path

from tests.harness.documents import run_examples

DOCUMENT = Path(__file__).parents[2] / "docs" / "cookbook.md"


def test_the_examples_of_the_cookbook_print_its_output() -> None:
    assert run_examples(DOCUMENT) == 8
