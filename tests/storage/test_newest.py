"""The newest checkpoint is the newest that can be resumed from."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.commit import hidden_name
from paddleformers_fc.storage.manifest import MANIFEST_NAME, newest_checkpoint, read_manifest, write_manifest
from paddleformers_fc.storage.paths import ASIDE, REMOVED, UNFINISHED
from tests.storage.support import STATE, WEIGHTS, leave, save


def test_the_highest_step_wins_by_number_not_by_text(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "gone") == (None, [])
    (tmp_path / "checkpoint-1").mkdir()  # An older checkpoint is not checked.
    assert newest_checkpoint(tmp_path)[0] is None
    for step in (9, 10, 100, 11):
        save(tmp_path / f"checkpoint-{step}", step)
    assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-100", [])


def test_damaged_and_empty_checkpoints_are_skipped_with_the_reason(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-2" / WEIGHTS).unlink()
    os.truncate(tmp_path / "checkpoint-3" / STATE, 2)
    (tmp_path / "checkpoint-4" / MANIFEST_NAME).write_text("{}")
    (tmp_path / "checkpoint-5").mkdir()
    leave(tmp_path / "checkpoint-6", 6)
    found, skipped = newest_checkpoint(tmp_path)
    assert found == tmp_path / "checkpoint-1"
    assert [path.name for path, _ in skipped] == ["checkpoint-5", "checkpoint-4", "checkpoint-3", "checkpoint-2"]
    expected = ["has no flex_checkpoint.json", "flex_checkpoint.json is not valid", "2 of 12 bytes"]
    assert all(reason in why for (_, why), reason in zip(skipped, expected, strict=False))
    assert skipped[-1][1] == f"checkpoint-2 is damaged: 1 fault found: {WEIGHTS} is missing", "without its whole path"


def test_a_checkpoint_whose_name_contradicts_its_step_is_skipped(tmp_path: Path) -> None:
    for step in (3, 4):
        save(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-3").rename(tmp_path / "checkpoint-10")
    found, ((skipped, why),) = newest_checkpoint(tmp_path)
    assert (found, skipped) == (tmp_path / "checkpoint-4", tmp_path / "checkpoint-10")
    assert why == "checkpoint-10 contains step 3: rename it to checkpoint-3 if that name is free."


@pytest.mark.parametrize(
    "name", ["checkpoint-", "checkpoint-x", "checkpoint-5.bak", "xcheckpoint-5", "checkpoint-\u0665"]
)
def test_other_names_are_not_checkpoints(tmp_path: Path, name: str) -> None:
    save(tmp_path / "checkpoint-5", 5)
    (tmp_path / "checkpoint-5").rename(tmp_path / name)
    (tmp_path / "checkpoint-9").write_text("a file")
    assert newest_checkpoint(tmp_path) == (None, [])


def test_a_complete_backup_takes_the_place_of_its_missing_target(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-4", 4)
    save(tmp_path / "checkpoint-5", 5)
    aside = hidden_name(tmp_path / "checkpoint-5", ASIDE)
    (tmp_path / "checkpoint-5").rename(aside)
    assert newest_checkpoint(tmp_path) == (aside, [])
    save(tmp_path / "checkpoint-5", 6)
    assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-5", [])


@pytest.mark.parametrize("state", [UNFINISHED, REMOVED])
def test_an_unfinished_or_removed_directory_never_counts_even_if_it_is_complete(tmp_path: Path, state: str) -> None:
    leave(tmp_path / "checkpoint-5", 5, state)
    assert newest_checkpoint(tmp_path) == (None, [])


@pytest.mark.parametrize(
    ("circle", "reason"),
    [
        ("", "has no flex_checkpoint.json"),
        (MANIFEST_NAME, "has no flex_checkpoint.json"),
        (WEIGHTS, f"{WEIGHTS} is missing"),
        ("model_state", f"{WEIGHTS} is missing"),
    ],
    ids=["its own", "the manifest", "a file", "a directory of files"],
)
def test_a_checkpoint_with_a_symlink_loop_is_skipped(tmp_path: Path, circle: str, reason: str) -> None:
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", step)
    newer = tmp_path / "checkpoint-2"
    (newer / circle).rename(tmp_path / "elsewhere")
    (newer / circle).symlink_to(newer / circle)
    found, ((passed, why),) = newest_checkpoint(tmp_path)
    assert (found, passed) == (tmp_path / "checkpoint-1", newer)
    assert reason in why


def test_a_link_to_a_missing_disk_is_not_skipped_silently(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", 1)
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "unmounted" / "checkpoint-2")
    found, skipped = newest_checkpoint(tmp_path)
    assert (found, [path.name for path, _ in skipped]) == (tmp_path / "checkpoint-1", ["checkpoint-2"])


def test_a_file_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    newer = tmp_path / "checkpoint-2"
    save(newer, 2)
    manifest = read_manifest(newer)
    longer = replace(manifest.files[0], path="x" * 10_000)
    write_manifest(newer, replace(manifest, files=[*manifest.files[1:], longer]))
    found, ((_, why),) = newest_checkpoint(tmp_path)
    assert found is None
    assert "is missing" in why


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", [f"checkpoint-2/{WEIGHTS}", "private"])
def test_an_inaccessible_checkpoint_stops_the_search_and_an_inaccessible_other_file_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "private").mkdir()
    look = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if path == tmp_path / name:
            raise OSError(number, os.strerror(number), str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    if name == "private":
        assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-2", [])
        return
    with pytest.raises(StorageError, match=WEIGHTS):
        newest_checkpoint(tmp_path)
