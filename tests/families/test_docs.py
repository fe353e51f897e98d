"""Pages whose examples run, and print the documented output."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddleformers_fc.families import registry
from tests.harness.documents import run_examples

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "outputs"), [("add-a-family.md", 1), ("cookbook.md", 4)])
def test_the_examples_print_the_output_in_the_document(
    page: str, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    assert run_examples(DOCS / page) == outputs


def test_an_example_that_prints_something_else_is_found_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.md"
    path.write_text("# A\n\n```python\nprint(1)\n```\n```text\n2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"wrong\.md:6: the example prints\n1"):
        run_examples(path)
