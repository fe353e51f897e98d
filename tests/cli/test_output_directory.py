"""``list`` and ``inspect`` show an output directory, and ``clean`` removes the leftovers that a user confirms."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paddleformers_fc.execute import output_directory
from paddleformers_fc.storage.commit import locked, staging_directory
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.storage.paths import LOCK_NAME
from tests.cli.support import document_of, run
from tests.storage.support import save


@pytest.fixture
def listed_dir(one: Path, four: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of four ranks, an incomplete one, one of another format, and a save that is running."""
    shutil.copytree(four, tmp_path / "checkpoint-3")
    broken = Path(shutil.copytree(one, tmp_path / "checkpoint-9"))
    (broken / "model_state/rank-00000.safetensors").unlink()
    (tmp_path / "checkpoint-5").mkdir()
    with staging_directory(tmp_path / "checkpoint-7"):
        yield tmp_path


def test_every_checkpoint_has_its_step_layout_size_and_state(listed_dir: Path, four: Path) -> None:
    shown = document_of("list", listed_dir, code=1)
    found = {one["name"]: one for one in shown["checkpoints"]}
    assert list(found) == ["checkpoint-9", "checkpoint-5", "checkpoint-3"]
    whole = found["checkpoint-3"]
    assert (whole["step"], whole["world_size"], whole["parallel"]["tp"], whole["fault"]) == (3, 4, 2, "")
    assert whole["bytes"] == run("inspect", four, "--json").document["bytes"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", whole["time"])
    assert "step 3" in found["checkpoint-9"]["fault"]
    assert (found["checkpoint-5"]["kind"], found["checkpoint-5"]["step"]) == ("", None)
    assert "no flex_checkpoint.json" in found["checkpoint-5"]["fault"]


def test_the_text_and_the_exit_code_show_which_checkpoints_are_complete(listed_dir: Path) -> None:
    outcome = run("list", listed_dir)
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("  checkpoint-") and ":" not in line.split()[0]}
    assert "tp=2" in rows["checkpoint-3"]
    assert rows["checkpoint-3"].split()[-1] == "OK"
    assert {rows[name].split()[-1] for name in ("checkpoint-5", "checkpoint-9")} == {"FAILED"}
    assert lines[-1].startswith("3 checkpoints, 1 complete, ")
    assert lines[-1].endswith("; 1 leftover")
    assert any("A running save uses it." in line for line in lines)
    shutil.rmtree(listed_dir / "checkpoint-9")
    assert run("list", listed_dir).code == 1
    (listed_dir / "checkpoint-5").rename(listed_dir / "checkpoint-2")  # An older one may be incomplete.
    assert run("list", listed_dir).code == 0


def test_an_empty_directory_has_no_checkpoints(tmp_path: Path) -> None:
    outcome = run("list", tmp_path, "--json")
    expected = {"path": str(tmp_path), "checkpoints": [], "leftovers": [], "local": None}
    assert (outcome.code, outcome.document) == (0, expected)
    assert "0 checkpoints" in run("list", tmp_path).out


def test_a_parent_of_output_directories_names_them(listed_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    parent = tmp_path_factory.mktemp("parent")
    for name in ("runs/first", "second"):
        shutil.copytree(listed_dir / "checkpoint-3", parent / name / "checkpoint-3")
    (parent / "empty").mkdir()
    lines = run("list", parent).out.splitlines()
    assert lines[1].startswith("0 checkpoints, ")
    assert lines[2:] == ["Subdirectories with checkpoints; list one of them:", "  runs/first", "  second"]


NOBODYS = ".checkpoint-8.unfinished-0123456789ab"
ALIVE = ".checkpoint-7."
DEAD = ".checkpoint-6.unfinished-0123456789ab"
KEPT = "kept-0123456789ab.checkpoint-5"


@pytest.fixture
def output_dir(tmp_path: Path) -> Iterator[Path]:
    """Two checkpoints and a leftover of every kind; one is being written by this process."""
    for step in (3, 4):
        save(tmp_path / f"checkpoint-{step}", step)
    for name in (DEAD, NOBODYS):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(b"12345")
    (tmp_path / DEAD / LOCK_NAME).touch()
    (tmp_path / KEPT).mkdir()
    (tmp_path / KEPT / "notes").write_text("mine")
    with staging_directory(tmp_path / "checkpoint-7"):
        yield tmp_path


def names(output_dir: Path) -> set[str]:
    return {path.name if ALIVE not in path.name else ALIVE for path in output_dir.iterdir()}


WHOLE = {"checkpoint-3", "checkpoint-4", ALIVE}
LEFT = {DEAD, NOBODYS, KEPT}


def test_stale_directories_are_removed_but_no_checkpoints_and_no_running_save(output_dir: Path) -> None:
    found = document_of("clean", output_dir, "--yes")
    assert names(output_dir) == WHOLE
    assert {one["name"] for one in found["removed"]} == LEFT
    (left,) = found["left"]
    assert left["name"].startswith(ALIVE)
    assert not left["removable"]
    assert read_manifest(output_dir / "checkpoint-4").step == 4


@pytest.mark.parametrize("command", ["list", "inspect"])
def test_a_list_names_what_clean_would_remove_with_the_reasons(output_dir: Path, command: str) -> None:
    lines = run(command, output_dir).out.splitlines()
    first = lines.index(f"  paddleformers-fc clean {output_dir} removes these, after a confirmation for each:")
    kept = lines.index("  it keeps these:")
    removed = [line.removeprefix("  removed") for line in run("clean", output_dir, "--yes").out.splitlines()]
    assert len(lines[first + 1 : kept]) == 3
    assert set(lines[first + 1 : kept]) <= set(removed)
    assert "A running save uses it." in lines[kept + 1]
    assert lines[kept + 1] in removed


def test_json_without_yes_lists_stale_directories_and_keeps_them(output_dir: Path) -> None:
    found = document_of("clean", output_dir)
    assert found["removed"] == []
    listed = {one["name"]: (one["bytes"] >= 3, one["removable"]) for one in found["left"]}
    assert {name: listed[name] for name in LEFT} == dict.fromkeys(LEFT, (True, True))
    assert names(output_dir) == WHOLE | LEFT


def test_every_removal_is_confirmed(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("clean", output_dir, "--json").document["left"]
    asked = [one["name"] for one in found if one["removable"]]
    one_of_them = "".join("y\n" if name == NOBODYS else "n\n" for name in asked)
    # End of input means no.
    answered = [("", 130, set()), ("\n" * 3, 0, set()), (one_of_them, 0, {NOBODYS}), ("y\n" * 2, 0, LEFT)]
    for answers, code, gone in answered:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
        assert run("clean", output_dir).code == code
        assert names(output_dir) == (WHOLE | LEFT) - gone


@pytest.mark.parametrize("name", [".checkpoint-4.aside-0123456789ab", "kept-ba9876543210.checkpoint-4"])
def test_a_checkpoint_that_has_lost_its_name_stays(output_dir: Path, name: str) -> None:
    (output_dir / "checkpoint-4").rename(output_dir / name)
    run("clean", output_dir, "--yes")
    assert read_manifest(output_dir / name).step == 4


def test_a_save_that_begins_during_a_cleanup_is_kept(output_dir: Path) -> None:
    """The lock is taken just before a directory is removed."""
    with ExitStack() as stack:

        def confirmed(one: output_directory.LeftoverFacts) -> bool:
            if one.name == NOBODYS:
                stack.enter_context(locked(output_dir / NOBODYS))
            return True

        output_directory.clean(output_dir, confirmed)
        assert NOBODYS in names(output_dir)
        assert DEAD not in names(output_dir)
