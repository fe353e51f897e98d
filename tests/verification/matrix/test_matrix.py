"""Layouts, recipes, the choice of cells, what counts as right, continuing, and the document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from paddleformers_fc.errors import OptionError
from verification.matrix import PROGRAM, report
from verification.matrix.__main__ import main
from verification.matrix.layouts import MatrixLayout, layout_from, parse_layout
from verification.matrix.recipe import cells_of, chosen, read_recipe
from verification.matrix.running import CellDigests, CellOutcome


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sd4v2", MatrixLayout("sd4v2", nproc=4, sharding=4, split_param=True)),
        ("sd2s2+tp2", MatrixLayout("sd2s2+tp2", nproc=4, sharding=2, tp=2, stage=2)),
        ("pp4vpp2", MatrixLayout("pp4vpp2", nproc=4, pp=4, vpp=2)),
        ("sd2+tp2(ep2)", MatrixLayout("sd2+tp2(ep2)", nproc=4, tp=2, sharding=2, split_param=True, ep=2)),
        ("tp2+pp2+sd2", MatrixLayout("tp2+pp2+sd2", nproc=8, tp=2, pp=2, sharding=2, split_param=True)),
    ],
)
def test_a_name_describes_the_layout_of_ranks(name: str, expected: MatrixLayout) -> None:
    assert parse_layout(name) == expected
    assert layout_from(expected.to_json()) == expected
    assert expected.grid.world_size == expected.nproc


@pytest.mark.parametrize("name", ["", "xp2", "tp2+tp2", "sd2v3", "ep2", "vpp2"])
def test_an_invalid_layout_name_is_rejected_with_its_invalid_part(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_layout(name)
    assert repr(name) in caught.value.render()


RECIPES = Path(__file__).parents[3] / "recipes" / "verification"
SMALL: dict[str, Any] = {
    "title": "Small",
    "text": "Two by one.",
    "model_type": "llama",
    "model": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "sources": ["dp1", "tp2"],
    "targets": ["pp2"],
}
LOSSES = (4.0, 3.0, 2.0)
RIGHT = CellOutcome("dp1->pp2", "f", tensors=3, export_equal=True, expected=LOSSES, losses=LOSSES)


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("llama2", 10, 10), ("ernie4_5_moe", 8, 8), ("qwen3", 4, 4), ("qwen3_moe", 4, 4), ("qwen2_5_vl", 4, 5)],
)
def test_a_recipe_is_the_published_matrix_which_is_complete_and_right(name: str, rows: int, columns: int) -> None:
    recipe = read_recipe(RECIPES / f"{name}.yaml")
    total = len({cell.name for cell in cells_of(recipe)})
    assert (len(recipe.sources), len(recipe.targets), total) == (rows, columns, rows * columns)
    page = (RECIPES.parents[1] / "docs" / "results" / f"{name}.md").read_text()
    assert f"* {total} of {total} cells: every tensor md5-equal" in page
    assert f"* {total} of {total} cells: the exports" in page
    assert "wrong" not in page


def test_prediction_layers_are_not_trained_if_either_side_is_a_pipeline() -> None:
    cells = cells_of(read_recipe(RECIPES / "ernie4_5_moe.yaml"))
    held = {cell.name: cell.hold_predictions for cell in cells}
    assert (held["dp2->pp2"], held["pp2->dp4"], held["dp2->tp4"]) == (True, True, False)
    assert sum(held.values()) == 64 - 6 * 6


def run(tmp_path: Path, recipe: Path, *more: str) -> int:
    """The exit code of a matrix with its work and its document in a directory."""
    places = "--work", str(tmp_path / "work"), "--output", str(tmp_path / "docs")
    return main([str(recipe), *places, *more])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sources": ["tp2", "tp3"]}, "tp3: vocab_size=128 is not divisible by tp=3"),
        ({"sources": ["sd2s3+tp2"]}, "sd2s3+tp2: stage=3 with tp=2: only stages 1 and 2 support tensor parallelism"),
        ({"colour": "red"}, "colour"),
        ({"micro_batch": "1"}, "micro_batch"),
    ],
)
def test_an_invalid_recipe_is_rejected_with_its_faults(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    recipe = written(tmp_path, **changes)
    with pytest.raises(OptionError) as caught:
        read_recipe(recipe)
    assert caught.value.where == str(recipe)
    assert fault in caught.value.evidence[0]
    assert run(tmp_path, recipe) == 2
    assert list(tmp_path.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"losses": (4.0, 3.0, 2.0000005)}, True),
        ({"losses": (4.0, 3.0, 2.00001)}, False),
        ({"losses": (4.0, 3.0, float("nan"))}, False),
        ({"losses": (), "expected": ()}, False),
        ({"unequal": ("model_state a under pp2",)}, False),
        ({"export_equal": False}, False),
        ({"tensors": 0}, False),
        ({"error": "A training failed."}, False),
    ],
)
def test_a_cell_is_right_by_its_numbers_alone(changes: dict[str, Any], right: bool) -> None:
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
    # Interleaved stages need as many forward passes as stages, which recipes do not check: this fails inside the ranks.
    model = {**SMALL["model"], "num_hidden_layers": 10}
    recipe = written(tmp_path, sources=["dp1"], targets=["tp2", "pp5vpp2"], model=model)
    assert run(tmp_path, recipe, "--only", "dp1->tp2") == 0
    record = tmp_path / "work" / "small" / "cells" / "dp1-to-tp2.json"
    before = record.stat().st_mtime_ns
    page = (tmp_path / "docs" / "small.md").read_text()
    assert "1 of 2 cells: every tensor md5-equal" in page
    assert run(tmp_path, recipe) == 1
    assert record.stat().st_mtime_ns == before
    printed = capsys.readouterr().out
    assert f"again: {PROGRAM} {recipe} --only 'dp1->pp5vpp2'" in printed
    logs = record.with_name("dp1-to-pp5vpp2")
    assert f"logs: {logs}" in printed
    assert "accumulate_steps(4) should be" in (logs / "there" / "logs" / "rank-00000.log").read_text()
    assert "**wrong**" in (tmp_path / "docs" / "small.md").read_text()


def test_the_document_has_equal_a_number_or_wrong(tmp_path: Path) -> None:
    variants: dict[str, Any] = {"as it is": {}, "without": {"arguments": {"max_grad_norm": 0.0}}}
    experiment = {"title": "Clipping", "text": "Why.", "layouts": ["dp1", "pp2"], "variants": variants}
    recipe = read_recipe(written(tmp_path, sources=["dp1", "tp2", "sd2", "dp2", "dp4"], experiments=[experiment]))
    outcomes = [
        RIGHT,
        msgspec.structs.replace(RIGHT, name="tp2->pp2", losses=(4.0, 3.0, 2.0000005)),
        msgspec.structs.replace(RIGHT, name="sd2->pp2", losses=(4.0, 3.0, 2.00001)),
        msgspec.structs.replace(RIGHT, name="dp2->pp2", unequal=("model_state a under pp2",)),
    ]
    known = {cell.name: None for cell in cells_of(recipe)} | {one.name: one for one in outcomes}
    found = CellDigests("Clipping", "f", {"as it is": ((4.0, 3.0), (4.0, 3.25)), "without": ((4.0,), (4.0,))})
    report.write(recipe, known, [found], tmp_path / "page")
    page = (tmp_path / "page.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| **")]
    assert rows == [
        "| **dp1** | equal |",
        "| **tp2** | 5.0e-07 |",
        "| **sd2** | **wrong** |",
        "| **dp2** | **wrong** |",
        "| **dp4** | - |",
    ]
    assert "## Clipping\n\nWhy." in page
    assert "| as it is | 2.5e-01 |\n| without | 0.0e+00 |" in page
