"""``list`` shows the checkpoints of an output directory and its leftovers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddleformers_fc.storage.commit import staging_directory
from tests.cli.support import run


@pytest.fixture
def output_dir(one: Path, four: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of four ranks, an incomplete one, one of another format, and a save that is running."""
    shutil.copytree(four, tmp_path / "checkpoint-3")
    broken = Path(shutil.copytree(one, tmp_path / "checkpoint-9"))
    (broken / "model_state/rank-00000.safetensors").unlink()
    (tmp_path / "checkpoint-5").mkdir()
    with staging_directory(tmp_path / "checkpoint-7"):
        yield tmp_path


def test_every_checkpoint_has_its_step_layout_size_and_state(output_dir: Path, four: Path) -> None:
    outcome = run("list", output_dir, "--json")
    assert outcome.code == 0
    found = {one["name"]: one for one in outcome.document["checkpoints"]}
    assert list(found) == ["checkpoint-9", "checkpoint-5", "checkpoint-3"]
    whole = found["checkpoint-3"]
    assert (whole["step"], whole["world_size"], whole["parallel"]["tp"], whole["fault"]) == (3, 4, 2, "")
    assert whole["bytes"] == run("inspect", four, "--json").document["bytes"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", whole["time"])
    assert "step 3" in found["checkpoint-9"]["fault"]
    assert (found["checkpoint-5"]["kind"], found["checkpoint-5"]["step"]) == ("", None)
    assert "no flex_checkpoint.json" in found["checkpoint-5"]["fault"]


def test_the_text_shows_which_are_whole_and_counts_leftovers(output_dir: Path) -> None:
    lines = run("list", output_dir).out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("  checkpoint-") and ":" not in line.split()[0]}
    assert "tp=2" in rows["checkpoint-3"]
    assert rows["checkpoint-3"].split()[-1] == "OK"
    assert {rows[name].split()[-1] for name in ("checkpoint-5", "checkpoint-9")} == {"FAILED"}
    assert lines[-1].startswith("3 checkpoints, 1 complete, ")
    assert lines[-1].endswith("; 1 leftover")
    assert any("A running save uses it." in line for line in lines)


def test_an_empty_directory_has_no_checkpoints(tmp_path: Path) -> None:
    outcome = run("list", tmp_path, "--json")
    expected = {"path": str(tmp_path), "checkpoints": [], "leftovers": [], "local": None}
    assert (outcome.code, outcome.document) == (0, expected)
    assert "0 checkpoints" in run("list", tmp_path).out


def test_a_parent_of_output_directories_names_them(output_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    parent = tmp_path_factory.mktemp("parent")
    for name in ("runs/first", "second"):
        shutil.copytree(output_dir / "checkpoint-3", parent / name / "checkpoint-3")
    (parent / "empty").mkdir()
    lines = run("list", parent).out.splitlines()
    assert lines[1].startswith("0 checkpoints, ")
    assert lines[2:] == [
        "Subdirectories with checkpoints; list one of them:",
        "  runs/first",
        "  second",
    ]


def test_a_checkpoint_is_not_an_output_directory(four: Path) -> None:
    outcome = run("list", four)
    assert outcome.code == 2
    assert "is a checkpoint" in outcome.err
