"""The matrix of all families by simulated layouts, through the verb."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import own_families
from tests.parity.evidence import SIMULATED
from verification import simulate_ranks
from verification.matrix import simulated
from verification.matrix.__main__ import main
from verification.matrix.simulated import read_simulated, simulated_models

RECIPES = Path(__file__).parents[3] / "recipes" / "verification"
RECIPE = RECIPES / "simulated.yaml"
KINDS = ("dense", "experts")


def written(tmp_path: Path, **changes: Any) -> Path:
    """The recipe with changes, in a file."""
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(RECIPE.read_text(encoding="utf-8")), **changes}))
    return path


def test_one_model_is_run_and_nothing_of_the_document_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {kind: {"sources": ["tp2"], "targets": ["sd4v2(ep4)"]} for kind in KINDS}
    chosen = ("--only", "qwen3_moe (PaddleFleet)", "--output", str(tmp_path / "docs"))
    assert main([str(written(tmp_path, **small)), *chosen]) == 0
    (tensors,) = re.findall(
        r"^qwen3_moe \(PaddleFleet\): 1 of 1 cells equal, (\d+) tensors each$", capsys.readouterr().out, re.MULTILINE
    )
    assert int(tensors) > 100
    assert not (tmp_path / "docs").exists()


def test_a_cell_that_differs_is_named_with_its_first_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hop = simulate_ranks.RoundTrip("tp2", "pp2", 7, ("back: model_state x has another md5",), 0.1)
    monkeypatch.setattr(simulated, "round_trips", lambda *_: iter([hop]))
    assert main([str(RECIPE), "--only", "llama (PaddleFormers)", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: llama (PaddleFormers): tp2->pp2: back: model_state x has another md5" in printed


def test_every_family_is_in_the_published_table_and_equal() -> None:
    text = (RECIPES.parents[1] / "docs/results/simulated.md").read_text(encoding="utf-8")
    rows = dict(line[2:].split(" | ")[:2] for line in text.splitlines() if ") | " in line)
    assert rows == dict.fromkeys(simulated_models(), f"{SIMULATED} of {SIMULATED} cells equal")
    assert {name.partition(" ")[0] for name in rows} == {family.name for family in own_families()}


def test_unknown_simulated_models_are_refused(tmp_path: Path) -> None:
    assert main([str(RECIPE), "--only", "tp3->*", "--output", str(tmp_path)]) == 2
    with pytest.raises(OptionError, match="acorn"):
        read_simulated(written(tmp_path, simulated="acorn"))


@pytest.mark.slow
@pytest.mark.parametrize("name", simulated_models())
def test_hops_that_cover_every_row_and_column_keep_every_bit(name: str, tmp_path: Path) -> None:
    recipe = read_simulated(RECIPE)
    assert recipe is not None
    kinds = {kind: getattr(recipe, kind) for kind in KINDS}
    wrong = {}
    for number in range(4):
        only = {
            kind: simulated.SimulatedLayouts((one.sources[number],), (one.targets[number - 1],))
            for kind, one in kinds.items()
        }
        wrong |= simulated.outcome(
            simulated.SimulatedRecipe(recipe.title, recipe.text, "families", **only), name, *simulated_models()[name]
        ).wrong
    assert wrong == {}
