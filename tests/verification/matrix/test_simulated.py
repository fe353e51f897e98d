"""A matrix by simulated layouts, through the verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddleformers_fc.errors import OptionError
from paddleformers_fc.verification.matrix.simulated import read_simulated
from tests.cli.support import run

RECIPES = Path(__file__).parents[3] / "recipes" / "verification"
RECIPE = RECIPES / "qwen3_moe.yaml"


def test_some_cells_are_run_and_none_of_the_document_is_written(tmp_path: Path) -> None:
    outcome = run("matrix", RECIPE, "--only", "tp2->ep4", "--output", tmp_path, "--json")
    assert outcome.code == 0
    (cell,) = outcome.document["cells"]
    assert (cell["source"], cell["target"], cell["differences"]) == ("tp2", "ep4", [])
    assert cell["tensors"] > 100
    assert not list(tmp_path.iterdir())


def test_a_cell_that_does_not_exist_is_misuse(tmp_path: Path) -> None:
    assert run("matrix", RECIPE, "--only", "tp3->*", "--output", tmp_path).code == 2


def test_the_published_table_is_whole_and_equal() -> None:
    text = (RECIPES.parents[1] / "docs/verification/qwen3_moe.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    assert [row.count("| equal ") for row in rows] == [7] * 7


def test_recipes_of_trained_layouts_are_not_simulated() -> None:
    assert read_simulated(RECIPES / "llama2.yaml") is None


def test_an_unknown_simulated_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("title: x\ntext: y\nsimulated: acorn\n", encoding="utf-8")
    with pytest.raises(OptionError, match="acorn"):
        read_simulated(path)
