"""The verb: recipes, the choice of cells, what counts as right, going on, and the document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from paddleformers_fc.errors import OptionError
from verification.matrix import PROGRAM, report
from verification.matrix.__main__ import main
from verification.matrix.recipe import cells_of, chosen, read_recipe
from verification.matrix.running import CellDigests, CellOutcome

RECIPES = Path(__file__).parents[3] / "recipes" / "verification"
SMALL: dict[str, Any] = {
    "title": "Small",
    "text": "Two by one.",
    "model_type": "llama",
    "model": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "sources": ["dp1", "tp2"],
    "targets": ["pp2"],
}
RIGHT = CellOutcome(
    "dp1->pp2", "f", tensors=3, export_equal=True, expected=(4.0, 3.0, 2.0), losses=(4.0, 3.0, 2.0), seconds=1.0
)


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("llama2", 10, 10), ("ernie4_5_moe", 8, 8), ("qwen3", 4, 4), ("qwen3_moe", 4, 4), ("qwen2_5_vl", 4, 5)],
)
def test_the_recipes_are_the_public_matrices(name: str, rows: int, columns: int) -> None:
    recipe = read_recipe(RECIPES / f"{name}.yaml")
    cells = cells_of(recipe)
    assert (len(recipe.sources), len(recipe.targets), len(cells)) == (rows, columns, rows * columns)
    assert len({cell.name for cell in cells}) == rows * columns


def test_prediction_layers_are_held_where_either_side_is_a_pipeline() -> None:
    held = {cell.name for cell in cells_of(read_recipe(RECIPES / "ernie4_5_moe.yaml")) if cell.hold_predictions}
    assert "dp2->pp2" in held
    assert "pp2->dp4" in held
    assert "dp2->tp4" not in held
    assert len(held) == 64 - 6 * 6


def run(tmp_path: Path, recipe: Path, *more: str) -> int:
    """The exit code of a matrix with its work and its document in a directory."""
    places = "--work", str(tmp_path / "work"), "--output", str(tmp_path / "docs")
    return main([str(recipe), *places, *more])


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("tp3", ["vocab_size=128 is not divisible by tp=3", "num_key_value_heads=2 is not divisible by tp=3"]),
        ("sd2s3+tp2", ["stage=3 with tp=2: only stages 1 and 2 support tensor parallelism"]),
    ],
)
def test_layouts_of_a_recipe_are_refused_as_those_of_the_plan_verb_are(
    tmp_path: Path, name: str, faults: list[str]
) -> None:
    model = {"num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2, "moe_num_experts": 6}
    recipe = written(tmp_path, model_type="ernie4_5_moe", model=model, sources=["tp2+pp4vpp2", name])
    with pytest.raises(OptionError) as caught:
        read_recipe(recipe)
    assert list(caught.value.evidence[: len(faults)]) == [f"{name}: {fault}" for fault in faults]
    assert run(tmp_path, recipe) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


@pytest.mark.parametrize("changes", [{"colour": "red"}, {"micro_batch": "1"}])
def test_what_is_no_recipe_is_refused_by_its_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        read_recipe(written(tmp_path, **changes))
    assert caught.value.where == str(tmp_path / "small.yaml")


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"losses": (4.0, 3.0, 2.0000005)}, True),
        ({"losses": (4.0, 3.0, 2.00001)}, False),
        ({"losses": (4.0, 3.0, 2.00001), "by_hand": (4.0, 3.0, 2.00001)}, True),
        ({"losses": (4.0, 3.0, 2.00001), "by_hand": (4.0, 3.0, 2.00002)}, False),
        ({"losses": (4.0, 3.0, float("nan"))}, False),
        ({"losses": (), "expected": ()}, False),
        ({"unequal": ("model_state a under pp2",)}, False),
        ({"export_equal": False}, False),
        ({"tensors": 0}, False),
        ({"error": "A training failed."}, False),
    ],
)
def test_what_is_right_is_decided_by_numbers(changes: dict[str, Any], right: bool) -> None:
    assert msgspec.structs.replace(RIGHT, **changes).right(1e-6) == right


def test_cells_are_chosen_by_name(tmp_path: Path) -> None:
    cells = cells_of(read_recipe(written(tmp_path)))
    for pattern, names in ((None, ["dp1->pp2", "tp2->pp2"]), ("tp2->*", ["tp2->pp2"]), ("dp*", ["dp1->pp2"])):
        assert [cell.name for cell in chosen(cells, pattern)] == names
    with pytest.raises(OptionError, match=r"tp8->\*"):
        chosen(cells, "tp8->*")


@pytest.mark.slow
def test_a_matrix_is_continued_and_a_cell_that_fails_keeps_its_logs_and_the_command_that_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A pipeline of interleaved stages refuses to have fewer than three of them: this fails inside the ranks.
    model = {**SMALL["model"], "num_hidden_layers": 4}
    recipe = written(tmp_path, sources=["dp1"], targets=["tp2", "pp2vpp2"], model=model)
    assert run(tmp_path, recipe, "--only", "dp1->tp2") == 0
    record = tmp_path / "work" / "small" / "cells" / "dp1-to-tp2.json"
    before = record.stat().st_mtime_ns
    page = (tmp_path / "docs" / "small.md").read_text()
    assert "1 of 2 cells: every tensor md5-equal" in page
    assert run(tmp_path, recipe) == 1
    assert record.stat().st_mtime_ns == before
    printed = capsys.readouterr().out
    assert f"again: {PROGRAM} {recipe} --only 'dp1->pp2vpp2'" in printed
    logs = tmp_path / "work" / "small" / "cells" / "dp1-to-pp2vpp2"
    assert f"logs: {logs}" in printed
    assert "AssertionError" in (logs / "there" / "logs" / "rank-00000.log").read_text()
    assert "**wrong**" in (tmp_path / "docs" / "small.md").read_text()


def test_the_document_has_equal_a_number_or_wrong_and_explains_what_is_larger(tmp_path: Path) -> None:
    variants: dict[str, Any] = {"as it is": {}, "without": {"arguments": {"max_grad_norm": 0.0}}}
    experiment = {"title": "Clipping", "text": "Why.", "layouts": ["dp1", "pp2"], "variants": variants}
    recipe = read_recipe(written(tmp_path, sources=["dp1", "tp2", "sd2", "dp2", "dp4"], experiments=[experiment]))
    larger = {"losses": (4.0, 3.0, 2.00001), "by_hand": (4.0, 3.0, 2.00001)}
    outcomes = [
        RIGHT,
        msgspec.structs.replace(RIGHT, name="tp2->pp2", losses=(4.0, 3.0, 2.0000005)),
        msgspec.structs.replace(RIGHT, name="sd2->pp2", **larger),
        msgspec.structs.replace(RIGHT, name="dp2->pp2", unequal=("model_state a under pp2",)),
    ]
    cells = cells_of(recipe)
    known = {cell.name: None for cell in cells} | {one.name: one for one in outcomes}
    found = CellDigests("Clipping", "f", {"as it is": ((4.0, 3.0), (4.0, 3.25)), "without": ((4.0,), (4.0,))})
    report.write(recipe, cells, known, [found], tmp_path / "page")
    page = (tmp_path / "page.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| **")]
    assert rows == [
        "| **dp1** | equal |",
        "| **tp2** | 5.0e-07 |",
        "| **sd2** | 1.0e-05 ¹ |",
        "| **dp2** | **wrong** |",
        "| **dp4** | - |",
    ]
    assert "* sd2->pp2: 1.0e-05 resumed, and by hand the same three losses." in page
    assert "## Clipping\n\nWhy." in page
    assert "| as it is | 2.5e-01 |\n| without | 0.0e+00 |" in page
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_published_tables_are_whole_and_right() -> None:
    for name, total in (("llama2", 100), ("ernie4_5_moe", 64), ("qwen3", 16), ("qwen2_5_vl", 20), ("qwen3_moe", 16)):
        page = (RECIPES.parents[1] / "docs" / "results" / f"{name}.md").read_text()
        assert f"* {total} of {total} cells: every tensor md5-equal" in page
        assert f"* {total} of {total} cells: the exports" in page
        assert "wrong" not in page
