"""``clean`` removes the leftovers that a user confirms, and ``inspect`` lists them."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paddleformers_fc.execute import output_directory
from paddleformers_fc.storage.commit import locked, staging_directory
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.storage.paths import LOCK_NAME
from tests.cli.support import Outcome, run
from tests.storage.support import save

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


def answering(monkeypatch: pytest.MonkeyPatch, answers: str, output_dir: Path) -> Outcome:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    return run("clean", output_dir)


def test_all_leftovers_are_removed_except_checkpoints_and_a_running_save(output_dir: Path) -> None:
    outcome = run("clean", output_dir, "--yes", "--json")
    assert outcome.code == 0
    assert names(output_dir) == WHOLE
    assert {one["name"] for one in outcome.document["removed"]} == LEFT
    (left,) = outcome.document["left"]
    assert left["name"].startswith(ALIVE)
    assert not left["removable"]
    assert read_manifest(output_dir / "checkpoint-4").step == 4


def test_json_without_yes_lists_leftovers_and_keeps_them(output_dir: Path) -> None:
    outcome = run("clean", output_dir, "--json")
    assert outcome.code == 0
    assert outcome.document["removed"] == []
    listed = {one["name"]: (one["bytes"] >= 3, one["removable"]) for one in outcome.document["left"]}
    assert {name: listed[name] for name in LEFT} == dict.fromkeys(LEFT, (True, True))
    assert names(output_dir) == WHOLE | LEFT


def test_every_removal_is_confirmed(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("clean", output_dir, "--json").document["left"]
    asked = [one["name"] for one in found if one["removable"]]
    one_of_them = "".join("y\n" if name == NOBODYS else "n\n" for name in asked)
    # An answer that is missing is no answer.
    for answers, code, gone in (
        ("", 130, set()),
        ("\n" * 3, 0, set()),
        (one_of_them, 0, {NOBODYS}),
        ("y\n" * 2, 0, LEFT),
    ):
        assert answering(monkeypatch, answers, output_dir).code == code
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


def test_a_checkpoint_is_not_accepted_as_output_directory(output_dir: Path) -> None:
    outcome = run("clean", output_dir / "checkpoint-4", "--yes")
    assert outcome.code == 2
    assert "is a checkpoint" in outcome.err
    assert run("clean", output_dir / "absent", "--yes").code == 2


def test_inspect_lists_checkpoints_and_leftovers(output_dir: Path) -> None:
    (output_dir / "checkpoint-3").rename(output_dir / "checkpoint-5")
    document = run("inspect", output_dir, "--json").document
    assert document["kind"] == "output_directory"
    faults = {one["name"]: one["fault"] for one in document["output"]["checkpoints"]}
    assert faults["checkpoint-4"] == ""
    assert "contains step 3: rename it to checkpoint-3" in faults["checkpoint-5"]
    assert {one["name"] for one in document["output"]["leftovers"]} > LEFT
    text = run("inspect", output_dir)
    assert text.code == 0
    assert all(name in text.out for name in LEFT)
    assert "paddleformers-fc clean" in text.out
