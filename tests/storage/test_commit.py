"""A checkpoint gets its name whole, replaces only what it may, and leftovers are distinguished."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddleformers_fc.errors import Corrupt, NotACheckpoint, StorageError
from paddleformers_fc.storage import (
    commit as commit_module,
    files,
    leftovers as leftovers_module,
    staging_lock,
)
from paddleformers_fc.storage.commit import (
    Committed,
    commit,
    commit_export,
    create_staging,
    discard,
    remove_checkpoint,
    staged_name,
)
from paddleformers_fc.storage.files import write_file
from paddleformers_fc.storage.leftovers import clean_unfinished, recover, unfinished
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    DivergedTie,
    newest_checkpoint,
    read_manifest,
    write_manifest,
)
from paddleformers_fc.storage.paths import ASIDE, REMOVED, hidden_name, parse_hidden
from paddleformers_fc.storage.staging_lock import OWNER_NAME, PARTIAL_OWNER_NAME, write_owner
from tests.crash.refusals import with_own_mounts
from tests.storage.support import (
    WEIGHTS,
    Crash,
    Machine,
    a_dead_process,
    names_in,
    running_on,
    save,
    stage,
    value_of,
)


def test_a_committed_checkpoint_holds_what_was_staged_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out" / "runs" / "checkpoint-5"
    assert save(target, 3) == Committed(target)
    assert value_of(target) == 3
    assert names_in(target.parent) == ["checkpoint-5"]
    assert names_in(target) == [MANIFEST_NAME, "model_state", "trainer"]


def test_staging_is_hidden_beside_the_target_and_records_its_owner(tmp_path: Path) -> None:
    staging = create_staging(tmp_path / "checkpoint-5")
    assert staging.parent == tmp_path
    assert staging.name.startswith(".checkpoint-5.unfinished-")
    assert names_in(staging) == [OWNER_NAME]
    assert create_staging(tmp_path / "checkpoint-5") != staging


@pytest.mark.parametrize("can_exchange", [True, False])
def test_saving_a_step_again_replaces_it(tmp_path: Path, can_exchange: bool) -> None:
    target = tmp_path / "checkpoint-5"
    with running_on(Machine(can_exchange=can_exchange)):
        save(target, 1)
        assert save(target, 2) == Committed(target)
    assert value_of(target) == 2
    assert names_in(tmp_path) == ["checkpoint-5"]
    assert OWNER_NAME not in names_in(target)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_save_whose_ties_differ_keeps_the_whole_checkpoint_that_it_replaces(
    tmp_path: Path, can_exchange: bool
) -> None:
    target = tmp_path / "checkpoint-5"
    with running_on(Machine(can_exchange=can_exchange)):
        save(target, 1)
        diverged = [DivergedTie(["a", "b"], ["model_state b on rank 1, a on rank 0"])]
        kept: tuple[Path, ...] = ()
        for value in (2, 3):
            staging = stage(target, value)
            manifest = msgspec.structs.replace(read_manifest(staging), diverged_ties=diverged)
            (staging / MANIFEST_NAME).unlink()
            write_manifest(staging, manifest)
            committed = commit(staging, target)
            kept = committed.kept or kept
    assert [value_of(path) for path in kept] == [1]
    assert names_in(tmp_path) == sorted(["checkpoint-5", *(path.name for path in kept)])


def test_this_machine_exchanges_names_or_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("b")
    if files.exchange(tmp_path / "a", tmp_path / "b"):
        assert (tmp_path / "a").read_text() == "b"
        assert (tmp_path / "b").is_dir()
    else:
        assert (tmp_path / "a").is_dir()


def test_an_exchange_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert not files.exchange(tmp_path / "a", tmp_path / "gone")
    assert names_in(tmp_path) == ["a"]


def test_an_empty_directory_of_the_name_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    assert save(tmp_path / "checkpoint-5", 1).kept == ()
    assert value_of(tmp_path / "checkpoint-5") == 1


@pytest.mark.parametrize("kind", ["directory", "file", "link", "half a checkpoint"])
def test_a_foreign_file_is_kept_and_reported(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "checkpoint-5"
    if kind == "directory":
        target.mkdir()
        (target / "0.metadata").write_text("theirs")
    elif kind == "file":
        target.write_text("theirs")
    elif kind == "link":
        target.symlink_to(tmp_path / "elsewhere")
    else:
        save(target, 9)
        (target / MANIFEST_NAME).unlink()
    done = save(target, 1)
    assert value_of(target) == 1
    (kept,) = done.kept
    assert os.path.lexists(kept)
    assert names_in(tmp_path) == ["checkpoint-5", kept.name]
    assert not kept.name.startswith((".", "checkpoint"))
    if kind == "directory":
        assert (kept / "0.metadata").read_text() == "theirs"


def test_a_link_to_a_finished_checkpoint_is_replaced_and_what_it_points_to_is_not_touched(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere" / "checkpoint-5", 1)
    (tmp_path / "checkpoint-5").symlink_to(tmp_path / "elsewhere" / "checkpoint-5")
    save(tmp_path / "checkpoint-5", 2)
    assert not (tmp_path / "checkpoint-5").is_symlink()
    assert value_of(tmp_path / "checkpoint-5") == 2
    assert value_of(tmp_path / "elsewhere" / "checkpoint-5") == 1


def test_staging_without_a_manifest_is_not_committed(tmp_path: Path) -> None:
    staging = create_staging(tmp_path / "checkpoint-5")
    with pytest.raises(NotACheckpoint):
        commit(staging, tmp_path / "checkpoint-5")
    assert names_in(tmp_path) == [staging.name]


def test_staging_that_lost_a_file_is_not_committed(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-5", 1)
    staging = stage(tmp_path / "checkpoint-5", 2)
    (staging / WEIGHTS).unlink()
    with pytest.raises(Corrupt, match=f"{WEIGHTS} is missing"):
        commit(staging, tmp_path / "checkpoint-5")
    assert value_of(tmp_path / "checkpoint-5") == 1


def test_staging_is_committed_only_to_its_own_target(tmp_path: Path) -> None:
    staging = stage(tmp_path / "checkpoint-5", 1)
    for target in (tmp_path / "checkpoint-6", tmp_path / "sub" / "checkpoint-5"):
        with pytest.raises(StorageError, match="was not staged for"):
            commit(staging, target)
    with pytest.raises(StorageError, match="was not staged for"):
        commit(tmp_path / "anything", tmp_path / "checkpoint-5")


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoint-5", 1)

    def refuse(path: Path) -> None:
        raise StorageError("a reader holds a file", where=str(path))

    with monkeypatch.context() as patch:
        patch.setattr(commit_module, "remove_tree", refuse)
        done = save(tmp_path / "checkpoint-5", 2)
    assert value_of(tmp_path / "checkpoint-5") == 2
    (left,) = done.left
    assert names_in(tmp_path) == sorted(["checkpoint-5", left.name])
    assert [one.path for one in clean_unfinished(tmp_path)[0]] == [left]
    assert names_in(tmp_path) == ["checkpoint-5"]


def test_a_refused_second_rename_gives_the_old_checkpoint_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint-5"
    save(target, 1)
    staging = stage(target, 2)

    class RefusingMachine(Machine):
        def rename(self, source: Path, target: Path) -> None:
            if source == staging:
                raise PermissionError(13, "Permission denied")
            super().rename(source, target)

    with running_on(RefusingMachine(can_exchange=False)), pytest.raises(StorageError, match="Permission denied"):
        commit(staging, target)
    assert value_of(target) == 1
    discard(staging)
    assert names_in(tmp_path) == ["checkpoint-5"]


def test_everything_is_synced_before_the_name_and_the_name_before_the_old_one_is_deleted(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-5"
    for can_exchange in (True, False):
        save(target, 1)
        machine = Machine(can_exchange=can_exchange)
        with running_on(machine):
            staging = stage(target, 2)
            machine.log.clear()
            commit(staging, target)
        named = machine.log.index(("exchange" if can_exchange else "rename", str(target)))
        before, after = machine.log[:named], machine.log[named + 1 :]
        for directory in (staging, staging / "model_state", staging / "trainer"):
            assert ("sync", str(directory)) in before
        assert after[0] == ("sync", str(tmp_path))
        assert {"unlink", "rmdir"} <= {name for name, _ in after[1:]}


def test_discard_deletes_staging_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-5", 1)
    staging = stage(tmp_path / "checkpoint-5", 2)
    discard(staging)
    discard(staging)
    assert names_in(tmp_path) == ["checkpoint-5"]
    for path in (tmp_path, tmp_path / "checkpoint-5"):
        with pytest.raises(StorageError, match="is not a staging directory"):
            discard(path)
    assert value_of(tmp_path / "checkpoint-5") == 1


def test_discard_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("years")
    staging = create_staging(tmp_path / "checkpoint-5")
    (staging / "link").symlink_to(tmp_path / "mine")
    discard(staging)
    assert (tmp_path / "mine" / "thesis").read_text() == "years"


def test_a_rank_that_writes_while_staging_is_discarded_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = stage(tmp_path / "checkpoint-5", 1)
    late: list[str] = []

    def remove_tree(path: Path) -> None:
        with pytest.raises(StorageError) as caught:
            write_file(staging / "trainer" / "late.json", b"late", root=staging)
        late.append(caught.value.what)
        files.remove_tree(path)

    monkeypatch.setattr(commit_module, "remove_tree", remove_tree)
    discard(staging)
    assert len(late) == 1
    assert names_in(tmp_path) == []


def test_two_processes_that_clean_at_the_same_time_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = leftover_of(a_dead_process(), tmp_path / "checkpoint-1")
    found = unfinished(tmp_path)
    assert [one.path for one in clean_unfinished(tmp_path)[0]] == [leftover]
    monkeypatch.setattr(leftovers_module, "unfinished", lambda output_dir: found)
    assert clean_unfinished(tmp_path) == ([], [])


def test_a_removed_checkpoint_loses_its_name_first(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-5", 1)
    machine = Machine()
    with running_on(machine):
        remove_checkpoint(tmp_path / "checkpoint-5")
    assert machine.log[0][0] == "rename"
    assert machine.log[1] == ("sync", str(tmp_path))
    assert names_in(tmp_path) == []


def test_an_export_is_published_whole(tmp_path: Path) -> None:
    staging = create_staging(tmp_path / "export")
    (staging / "tokenizer.json").write_text("{}")
    machine = Machine()
    with running_on(machine):
        commit_export(staging, tmp_path / "export", (MARK,), is_old)
    assert names_in(tmp_path) == ["export"]
    assert names_in(tmp_path / "export") == ["tokenizer.json"]
    named = machine.log.index(("rename", str(tmp_path / "export")))
    assert ("sync", str(staging / "tokenizer.json")) in machine.log[:named], "somebody else wrote it"


def test_an_export_replaces_nothing_that_came_meanwhile(tmp_path: Path) -> None:
    staging = create_staging(tmp_path / "export")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.safetensors").write_text("theirs")
    with pytest.raises(StorageError, match="exists already and is not empty"):
        commit_export(staging, tmp_path / "export", (MARK,), is_old)
    assert (tmp_path / "export" / "model.safetensors").read_text() == "theirs"
    (tmp_path / "export" / "model.safetensors").unlink()
    commit_export(staging, tmp_path / "export", (MARK,), is_old)


def leftover_of(process: staging_lock.Owner, target: Path) -> Path:
    with running_on(Machine(), process):
        return stage(target, 0)


def test_leftovers_of_the_dead_are_cleaned_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    dead, here = a_dead_process(), staging_lock.this_process()
    elsewhere = staging_lock.Owner("node7", dead.pid, "another-boot", dead.namespace, dead.started)
    gone = leftover_of(dead, tmp_path / "checkpoint-1")
    mine = leftover_of(here, tmp_path / "checkpoint-2")
    theirs = leftover_of(elsewhere, tmp_path / "checkpoint-3")
    judged = {one.path: one for one in unfinished(tmp_path)}
    assert {path: one.disposable for path, one in judged.items()} == {gone: True, mine: False, theirs: False}
    assert judged[gone].target == tmp_path / "checkpoint-1"
    assert f"process {here.pid}" in judged[mine].why
    assert "node7" in judged[theirs].why
    removed, left = clean_unfinished(tmp_path)
    assert [one.path for one in removed] == [gone]
    assert {one.path for one in left} == {mine, theirs}
    assert names_in(tmp_path) == sorted([mine.name, theirs.name])


def test_a_directory_without_owner_is_cleaned_only_if_it_is_empty(tmp_path: Path) -> None:
    empty, barely, full = (hidden_name(tmp_path / f"checkpoint-{n}", "unfinished") for n in range(3))
    for directory in (empty, barely, full):
        directory.mkdir()
    (barely / PARTIAL_OWNER_NAME).write_text('{"ho')
    (full / "something").write_text("?")
    removed, left = clean_unfinished(tmp_path)
    assert {one.path for one in removed} == {empty, barely}
    assert [one.why for one in left] == ["It has no owner record."]
    assert names_in(tmp_path) == [full.name]


def test_a_creator_whose_new_directory_is_cleaned_away_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner = staging_lock.write_owner
    victims: list[Path] = []

    def after_the_cleaner(directory: Path) -> None:
        if not victims:
            victims.extend(one.path for one in clean_unfinished(tmp_path)[0])
        write_owner(directory)

    monkeypatch.setattr(commit_module, "write_owner", after_the_cleaner)
    staging = create_staging(tmp_path / "checkpoint-5")
    assert len(victims) == 1
    assert victims[0] != staging
    assert names_in(tmp_path) == [staging.name]


def test_recover_gives_a_name_back_only_if_it_is_free(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-5"
    save(target, 1)
    aside = hidden_name(target, ASIDE)
    shutil.copytree(target, aside)
    assert recover(tmp_path) == []
    assert [(one.path, one.disposable) for one in unfinished(tmp_path)] == [(aside, True)]
    shutil.rmtree(target)
    assert [(one.path, one.disposable) for one in unfinished(tmp_path)] == [(aside, False)]
    assert recover(tmp_path) == [target]
    assert value_of(target) == 1
    assert names_in(tmp_path) == ["checkpoint-5"]


def test_recover_gives_no_name_to_half_a_checkpoint(tmp_path: Path) -> None:
    aside = hidden_name(tmp_path / "checkpoint-5", ASIDE)
    save(tmp_path / "checkpoint-5", 1)
    (tmp_path / "checkpoint-5").rename(aside)
    (aside / MANIFEST_NAME).unlink()
    assert recover(tmp_path) == []
    assert names_in(tmp_path) == [aside.name]


def test_recover_leaves_alone_what_a_living_process_is_replacing(tmp_path: Path) -> None:
    staging = stage(tmp_path / "checkpoint-5", 1)
    staging.rename(hidden_name(tmp_path / "checkpoint-5", ASIDE))
    assert recover(tmp_path) == []


def test_an_interrupted_deletion_is_finished(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-5", 1)
    (tmp_path / "checkpoint-5").rename(hidden_name(tmp_path / "checkpoint-5", REMOVED))
    assert newest_checkpoint(tmp_path) == (None, [])
    assert len(clean_unfinished(tmp_path)[0]) == 1
    assert names_in(tmp_path) == []


def test_names_that_only_look_alike_are_nobodys_leftovers(tmp_path: Path) -> None:
    for name in (
        ".checkpoint-5.unfinished-",
        ".checkpoint-5.unfinished-xyz",
        "checkpoint-5.unfinished-ab",
        ".unfinished-ab",
    ):
        (tmp_path / name).mkdir()
        assert parse_hidden(tmp_path / name) is None
    assert unfinished(tmp_path) == []
    assert unfinished(tmp_path / "gone") == []


def test_a_directory_with_a_new_owner_record_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = hidden_name(tmp_path / "checkpoint-5", "unfinished")
    staging.mkdir()
    seen = unfinished(tmp_path)
    assert [one.disposable for one in seen] == [True]
    staging_lock.write_owner(staging)
    monkeypatch.setattr(leftovers_module, "unfinished", lambda output_dir: seen)
    assert clean_unfinished(tmp_path) == ([], [])
    assert names_in(staging) == [OWNER_NAME]


def test_a_leftover_that_cannot_be_deleted_is_reported_and_stops_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = leftover_of(a_dead_process(), tmp_path / "checkpoint-1")

    def refuse(path: Path) -> None:
        raise StorageError("a reader holds a file", where=str(path))

    monkeypatch.setattr(commit_module, "remove_tree", refuse)
    removed, (left,) = clean_unfinished(tmp_path)
    assert (removed, left.path) == ([], leftover)
    assert "It cannot be deleted: a reader holds a file" in left.why


@pytest.mark.parametrize("closed", ["its record", "its manifest"])
def test_a_leftover_that_cannot_be_looked_at_is_reported_and_stops_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    theirs = leftover_of(a_dead_process(), tmp_path / "theirs")
    mine = leftover_of(a_dead_process(), tmp_path / "checkpoint-1")
    (theirs / OWNER_NAME).unlink()
    secret = theirs / OWNER_NAME if closed == "its record" else theirs / MANIFEST_NAME
    open_file = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        # The tests may run as a user who may read everything.
        if Path(path) == secret:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    removed, (left,) = clean_unfinished(tmp_path)
    assert ([one.path for one in removed], left.path, left.disposable) == ([mine], theirs, False)
    assert left.why.startswith("It cannot be looked at: ")
    assert "Permission denied" in left.why
    save(tmp_path / "checkpoint-2", 1)


def test_a_replaced_checkpoint_whose_successor_is_missing_is_kept_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint-5"
    save(target, 1)
    with monkeypatch.context() as patch:
        patch.setattr(commit_module, "try_remove", lambda directory: directory)
        (old,) = save(target, 2).left
    shutil.rmtree(target)
    assert recover(tmp_path) == []
    (left,) = unfinished(tmp_path)
    assert (left.path, left.disposable) == (old, False)
    assert left.why.endswith("rename it to checkpoint-5, or delete it.")
    old.rename(target)
    assert newest_checkpoint(tmp_path) == (target, [])


def test_an_old_checkpoint_with_a_thousand_nested_directories_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "checkpoint-5"
    save(target, 1)
    monkeypatch.chdir(target)
    for _ in range(1100):  # Of names this short, so many make a path that the system still takes.
        os.mkdir("a")
        os.chdir("a")
    os.chdir(tmp_path)
    try:
        assert save(target, 2).left == ()
        assert (names_in(tmp_path), value_of(target)) == (["checkpoint-5"], 2)
    finally:
        # What deletes the directories of tests would recurse.
        subprocess.run(["rm", "-rf", *map(str, tmp_path.iterdir())], check=True)


def test_discard_leaves_what_another_process_has_made(tmp_path: Path) -> None:
    theirs = leftover_of(a_dead_process(), tmp_path / "checkpoint-5")
    discard(theirs)
    assert names_in(tmp_path) == [theirs.name]


def test_a_commit_whose_name_could_not_be_synced_loses_neither_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-5"
    save(target, 1)
    staging = stage(target, 2)

    class UnsyncedMachine(Machine):
        def fsync(self, descriptor: int) -> None:
            if ("exchange", str(target)) in self.log:
                raise OSError(5, "Input/output error")
            super().fsync(descriptor)

    with running_on(UnsyncedMachine()), pytest.raises(StorageError, match="EIO"):
        commit(staging, target)
    discard(staging)
    assert sorted([value_of(target), value_of(staging)]) == [1, 2]


def test_a_checkpoint_that_takes_the_name_during_the_save_is_replaced_and_not_kept_as_foreign_files(
    tmp_path: Path,
) -> None:
    target = tmp_path / "checkpoint-5"
    target.mkdir()
    (target / "notes").write_text("theirs")
    staging, faster = stage(target, 2), stage(target, 1)

    class SlowMachine(Machine):
        def rename(self, source: Path, new: Path) -> None:
            if source == target and faster.exists():
                shutil.rmtree(target)
                os.rename(faster, target)
            super().rename(source, new)

    with running_on(SlowMachine(can_exchange=False)):
        done = commit(staging, target)
    assert (done.kept, value_of(target), names_in(tmp_path)) == ((), 2, ["checkpoint-5"])


# ---- Exports, which take the place of others.

MARK = "model.safetensors"
BIND = 4096
NO_MOUNTS = 2


def is_old(name: str) -> bool:
    return name.startswith("model")


def exported(target: Path, value: str) -> Path:
    """A staging directory with an export of two files."""
    staging = create_staging(staged_name(target))
    for name in (MARK, "config.json"):
        write_file(staging / name, value.encode())
    return staging


def older(target: Path) -> Path:
    """An older export under the target's name, beside a file of somebody else."""
    target.mkdir(exist_ok=True)
    for name in (MARK, "config.json", "model-00001-of-00002.safetensors", "notes.txt"):
        (target / name).write_text("old")
    return target


def replaced(staging: Path, target: Path) -> dict[str, str]:
    """What is in a target after an export was let into it."""
    commit_export(staging, target.resolve(), (MARK,), is_old)
    return {path.name: path.read_text() for path in target.iterdir() if path.is_file()}


NEW = {MARK: "new", "config.json": "new", "notes.txt": "old"}


@pytest.mark.parametrize("form", ["plain", "a link", "with a directory", "of other rights", "with an owner"])
def test_an_export_takes_the_place_of_an_older_one_and_of_nothing_else(tmp_path: Path, form: str) -> None:
    target = older(tmp_path / "hf")
    if form == "a link":
        target = target.rename(tmp_path / "elsewhere")
        (tmp_path / "hf").symlink_to(target)
    elif form == "with a directory":
        (target / "checkpoint-5").mkdir()
    elif form == "of other rights":
        target.chmod(0o700)
    elif form == "with an owner":
        write_owner(target)  # A crash right after the rename of a new export leaves it.
    before = [one.stat() for one in (target, target / "notes.txt")]
    assert replaced(exported(tmp_path / "hf", "new"), tmp_path / "hf") == NEW
    after = [one.stat() for one in (target, target / "notes.txt")]
    assert [(one.st_ino, one.st_mode) for one in after] == [(one.st_ino, one.st_mode) for one in before]
    assert unfinished(target) == unfinished(tmp_path) == []


def test_a_crash_while_an_export_is_replaced_leaves_a_whole_one_or_none(tmp_path: Path) -> None:
    old = dict.fromkeys((MARK, "config.json", "model-00001-of-00002.safetensors", "notes.txt"), "old")
    new = {**NEW, "tokenizer.json": "new"}
    for number in range(10_000):
        output_dir = tmp_path / str(number)
        output_dir.mkdir()
        target = older(output_dir / "hf")
        staging = exported(target, "new")
        write_file(staging / "tokenizer.json", b"new")
        try:
            with running_on(Machine(number)):
                replaced(staging, target)
        except Crash:
            found = {path.name: path.read_text() for path in target.iterdir() if path.is_file()}
            assert MARK not in found or found in (old, new)
        else:
            break
    assert number > 10


@pytest.mark.parametrize("device", ["another", "the same"])
def test_an_export_into_a_mounted_directory_needs_nothing_beside_it(tmp_path: Path, device: str) -> None:
    target, origin = tmp_path / "mounted", tmp_path / "origin"
    for one in (target, origin):
        one.mkdir()
    mount = ctypes.CDLL(None).mount
    flags, kind = (0, b"tmpfs") if device == "another" else (BIND, b"")
    pid = os.fork()
    if pid == 0:
        try:
            mounted = with_own_mounts() and mount(os.fsencode(origin), os.fsencode(target), kind, flags, None) == 0
            found = replaced(exported(older(target), "new"), target) if mounted else NEW
            os._exit(NO_MOUNTS if not mounted else int(found != NEW))
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == NO_MOUNTS:
        pytest.skip("this machine does not let its users mount")
    assert code == 0
    assert names_in(tmp_path) == ["mounted", "origin"]
