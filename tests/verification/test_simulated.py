"""Simulated ranks with real bytes: any layout to any other and back, and the matrix of all families."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from msgspec import structs

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import family_for, own_families
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from tests.families.spaces import model_of
from tests.parity.evidence import SIMULATED
from verification import simulate_ranks, temporary_directory
from verification.matrix import simulated
from verification.matrix.__main__ import main
from verification.matrix.simulated import read_simulated, simulated_models


@pytest.fixture
def fast() -> Iterator[Path]:
    """A directory in memory, where there is one."""
    with temporary_directory() as path:
        yield path


def round_trip(row: str, column: str, directory: Path) -> simulate_ranks.RoundTrip:
    """One hop of the tiny Qwen3-MoE."""
    model = model_of({**simulate_ranks.QWEN3_MOE.config, "is_fleet": True})
    alone, source, target = (
        declared_model(family_for(model.config), model, parse_grid(grid), "bfloat16") for grid in ("dp=1", row, column)
    )
    (hop,) = simulate_ranks.round_trips(alone, {row: source}, {column: target}, directory)
    return hop


def test_a_hop_keeps_every_bit_and_a_changed_one_is_a_difference(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = simulate_ranks.load

    def faulty(directory: Path, model: SimulatedModel) -> list[simulate_ranks.Roles]:
        held = original(directory, model)
        if directory.name == "source":
            array = held[0]["optimizer_state"]["model.norm.weight.moment1_0"].local_tensor.array
            array.view(np.uint8)[0] ^= 1
        return held

    hop = round_trip("sharding=2,split=true,ep=2", "tp=4", fast)
    assert (hop.source, hop.target, hop.differences) == ("sharding=2,split=true,ep=2", "tp=4", ())
    # 77 weights, of which three routers are float32 and have no master weights, four states and an average of each.
    assert (hop.equal, hop.tensors) == (True, 77 + 74 + 5 * 77)
    assert not list(fast.iterdir())
    monkeypatch.setattr(simulate_ranks, "load", faulty)
    hop = round_trip("tp=2", "sharding=4", fast)
    assert not hop.equal
    assert "there: optimizer_state model.norm.weight.moment1_0 has another md5" in hop.differences
    assert "rank 0: optimizer_state model.norm.weight.moment1_0 came back with other bits" in hop.differences


RECIPES = Path(__file__).parents[2] / "recipes" / "verification"
RECIPE = RECIPES / "simulated.yaml"
KINDS = ("dense", "experts")


def written(tmp_path: Path, **changes: Any) -> Path:
    """The recipe with changes, in a file."""
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(RECIPE.read_text(encoding="utf-8")), **changes}))
    return path


def test_one_model_is_run_and_no_document_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {kind: {"sources": ["tp2"], "targets": ["sd4v2(ep4)"]} for kind in KINDS}
    chosen = ("--only", "qwen3_moe (PaddleFleet)", "--output", str(tmp_path / "docs"))
    assert main([str(written(tmp_path, **small)), *chosen]) == 0
    (tensors,) = re.findall(
        r"^qwen3_moe \(PaddleFleet\): 1 of 1 cells equal, (\d+) tensors each$", capsys.readouterr().out, re.MULTILINE
    )
    assert int(tensors) > 100
    assert not (tmp_path / "docs").exists()


def test_a_cell_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hop = simulate_ranks.RoundTrip("tp2", "pp2", 7, ("back: model_state x has another md5",))
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
    for number in range(4):
        hop = {
            kind: simulated.SimulatedLayouts((one.sources[number],), (one.targets[number - 1],))
            for kind, one in ((kind, getattr(recipe, kind)) for kind in KINDS)
        }
        assert simulated.outcome(structs.replace(recipe, **hop), name, *simulated_models()[name]).wrong == {}
