"""A checkpoint gets its name whole and replaces only what it may; leftovers are recovered, deleted or reported."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddleformers_fc.errors import Corrupt, StorageError
from paddleformers_fc.storage.commit import (
    LockState,
    commit,
    commit_export,
    hidden_name,
    leftovers,
    locked,
    recover,
    remove_checkpoint,
    staged_name,
    staging_directory,
    sync_staging,
)
from paddleformers_fc.storage.files import write_file
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    DivergedTie,
    newest_checkpoint,
    read_manifest,
    write_manifest,
)
from paddleformers_fc.storage.paths import ASIDE, LOCK_NAME, REMOVED, UNFINISHED, parse_hidden
from tests.crash.net import refusing
from tests.crash.refusals import with_own_mounts
from tests.storage.support import (
    STATE,
    WEIGHTS,
    Machine,
    leave,
    names_in,
    running_on,
    save,
    stage,
    value_of,
)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a device."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with the value 1."""
    save(tmp_path / "checkpoint-5", 1)
    return tmp_path / "checkpoint-5"


def test_a_checkpoint_takes_the_place_of_an_empty_directory(tmp_path: Path) -> None:
    target = tmp_path / "out" / "runs" / "checkpoint-5"
    target.mkdir(parents=True)
    assert save(target, 2) is None
    assert value_of(target) == 2
    assert names_in(target.parent) == ["checkpoint-5"]


def part_copies(checkpoint: Path) -> None:
    """Record that copies of a tied tensor differ."""
    ties = [DivergedTie(["a", "b"], ["model_state b on rank 1, a on rank 0"])]
    write_manifest(checkpoint, msgspec.structs.replace(read_manifest(checkpoint), ties=ties))


@pytest.mark.parametrize("killed", [False, True])
def test_a_save_with_diverged_ties_keeps_the_checkpoint_that_it_replaces(
    tmp_path: Path, saved: Path, killed: bool
) -> None:
    for value in (2, 3):
        if killed:  # Right after the renames.
            saved.rename(hidden_name(saved, ASIDE))
            save(saved, value)
            part_copies(saved)
            recover(tmp_path)
        else:
            with stage(saved, value) as staging:
                part_copies(staging.path)
                commit(staging)
    (kept,) = [path for path in tmp_path.iterdir() if path.name.startswith("kept-")]
    assert value_of(kept) == 1
    assert names_in(tmp_path) == ["checkpoint-5", kept.name]


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
    kept = save(target, 1)
    assert value_of(target) == 1
    assert kept is not None
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


def test_staging_that_lost_a_file_is_not_committed(tmp_path: Path, saved: Path) -> None:
    with stage(saved, 2) as staging:
        (staging.path / WEIGHTS).unlink()
        with pytest.raises(Corrupt, match="has lost files") as caught:
            sync_staging(staging, (WEIGHTS, STATE))
    assert list(caught.value.evidence) == [f"{WEIGHTS} is missing"]
    assert value_of(saved) == 1
    assert names_in(tmp_path) == ["checkpoint-5"]


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(tmp_path: Path, saved: Path) -> None:
    with refusing("unlink", f"/{MANIFEST_NAME}$", errno.EBUSY):
        save(saved, 2)
    assert value_of(saved) == 2
    (left, _) = names_in(tmp_path)
    assert left.startswith(".checkpoint-5.removed-")
    recover(tmp_path)
    assert names_in(tmp_path) == ["checkpoint-5"]


def test_a_refused_second_rename_gives_the_old_checkpoint_its_name_back(tmp_path: Path, saved: Path) -> None:
    with stage(saved, 2) as staging, refusing("rename", "/checkpoint-5$", errno.EACCES, only=2):
        with pytest.raises(StorageError, match="Permission denied"):
            commit(staging)
        assert value_of(saved) == 1
    assert names_in(tmp_path) == ["checkpoint-5"]


def test_staging_is_synced_before_its_name_and_the_name_before_the_old_checkpoint_is_deleted(
    tmp_path: Path, saved: Path
) -> None:
    machine = Machine()
    with stage(saved, 2) as staging, running_on(machine):
        sync_staging(staging, (WEIGHTS, STATE))
        commit(staging)
    named = machine.log.index(("rename", str(saved)))
    before, after = machine.log[:named], machine.log[named + 1 :]
    for directory in (staging.path, staging.path / "model_state", staging.path / "trainer"):
        assert ("sync", str(directory)) in before
    assert after[0] == ("sync", str(tmp_path))
    assert {"unlink", "rmdir"} <= {name for name, _ in after[1:]}


def test_staging_that_is_not_committed_is_deleted_and_nothing_else(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("years")
    with stage(saved, 2) as staging:
        (staging.path / "link").symlink_to(tmp_path / "mine")
    assert names_in(tmp_path) == ["checkpoint-5", "mine"]
    assert (tmp_path / "mine" / "thesis").read_text() == "years"
    assert value_of(saved) == 1


def test_a_rank_that_writes_while_staging_is_deleted_leaves_nothing_behind(tmp_path: Path) -> None:
    late: list[str] = []

    def before(name: str, at: Path) -> None:
        if name == "rmdir" and not late:
            with pytest.raises(StorageError) as caught:
                write_file(staging.path / "trainer" / "late.json", b"late", root=staging.path)
            late.append(caught.value.what)

    with running_on(Machine(before)), stage(tmp_path / "checkpoint-5", 1) as staging:
        pass
    assert len(late) == 1
    assert names_in(tmp_path) == []


def test_a_removed_checkpoint_loses_its_name_first(tmp_path: Path, saved: Path) -> None:
    machine = Machine()
    with running_on(machine):
        remove_checkpoint(saved)
    assert machine.log[0][0] == "rename"
    assert machine.log[1] == ("sync", str(tmp_path))
    assert names_in(tmp_path) == []


def test_a_commit_whose_name_could_not_be_synced_loses_neither_checkpoint(tmp_path: Path, saved: Path) -> None:
    with stage(saved, 2) as staging, refusing("sync", f"{tmp_path}$", errno.EIO):
        with pytest.raises(StorageError, match="EIO"):
            commit(staging)
    assert {value_of(path) for path in tmp_path.iterdir()} == {1, 2}


# ---- Two jobs in one directory.


@pytest.mark.parametrize("older", [True, False], ids=["an older one there", "nothing there"])
def test_one_of_two_saves_of_the_same_step_fails_and_the_other_is_complete(tmp_path: Path, older: bool) -> None:
    """The other save runs from its beginning to its end before each call of the first."""
    for number in itertools.count():
        target = tmp_path / str(number) / "checkpoint-5"
        if older:
            save(target, 1)
        ends: dict[int, str] = {}
        at_once, log = race(target, number, ends)
        if len(log) <= number:
            break
        told = f"at {number}, {log[number]}: {ends}"
        done = [value for value, end in ends.items() if not end]
        assert value_of(target) in done, told
        assert len(done) == 1 or not at_once, told
        assert all("Another job has saved" in end for end in ends.values() if end), told
        recover(target.parent)
        assert names_in(target.parent) == ["checkpoint-5"], told
    assert number > 15


def race(target: Path, number: int, ends: dict[int, str]) -> tuple[bool, list[tuple[str, str]]]:
    """A save of the value 2 that one of 3 meets before a call; whether they met, the calls, and in ``ends`` errors."""
    at_once = False

    def attempt(value: int) -> None:
        ends[value] = ""
        try:
            save(target, value)
        except StorageError as error:
            ends[value] = error.what

    def before(name: str, at: Path) -> None:
        nonlocal at_once
        if len(machine.log) == number and 3 not in ends:
            begun = any(name == "mkdir" and ".unfinished-" in at for name, at in machine.log)
            at_once = begun and ("rename", str(target)) not in machine.log
            with running_on(Machine()):
                attempt(3)

    machine = Machine(before)
    with running_on(machine):
        attempt(2)
    return at_once, machine.log


def test_recovery_during_a_commit_leaves_both_checkpoints_alone(tmp_path: Path, saved: Path) -> None:
    seen: list[int] = []

    def before(name: str, at: Path) -> None:
        with running_on(Machine()):
            recover(tmp_path)
        seen.append(len([path for path in tmp_path.iterdir() if parse_hidden(path)]))

    with stage(saved, 2) as staging, running_on(Machine(before)):
        commit(staging)
    assert max(seen) == 2, "between the renames there is staging, and the old one aside"
    assert (value_of(saved), names_in(tmp_path)) == (2, ["checkpoint-5"])


def test_a_save_that_was_cleaned_away_before_it_had_its_lock_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, victims = fcntl.flock, list[str]()

    def after_the_cleaner(descriptor: int, kind: int) -> None:
        if not victims and kind & fcntl.LOCK_EX:
            victims.extend(names_in(tmp_path))
            recover(tmp_path)
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", after_the_cleaner)
    with stage(tmp_path / "checkpoint-5", 1) as staging:
        assert victims
        assert staging.path.name not in victims
        commit(staging)
    assert names_in(tmp_path) == ["checkpoint-5"]


# ---- Stale staging directories after crashes.


def test_a_process_that_a_save_has_forked_does_not_keep_its_lock(tmp_path: Path) -> None:
    wait, go = os.pipe()
    with staging_directory(tmp_path / "checkpoint-5") as staging:
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(wait, 1)
            os._exit(0)
        staging.path.rename(tmp_path / "elsewhere")
    try:
        with locked(tmp_path / "elsewhere") as lock:
            assert lock is LockState.OURS
    finally:
        os.close(go)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_locks_a_run_deletes_the_staging_of_itself_and_its_ancestors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    mine, ancestor, theirs = (leave(tmp_path / "checkpoint-5", 1, run=run) for run in ("me", "before", "they"))
    nobodys = leave(tmp_path / "checkpoint-6", 1)
    recover(tmp_path)
    assert len(names_in(tmp_path)) == 4
    recover(tmp_path, ("me", "before"))
    assert names_in(tmp_path) == sorted([theirs.name, nobodys.name])
    assert {one.why for one in leftovers(tmp_path)} == {
        "Its save was interrupted or still runs; this file system has no locks."
    }
    assert all(one.removable and one.stays for one in leftovers(tmp_path))
    with staging_directory(tmp_path / "checkpoint-7", "me") as staging:
        assert parse_hidden(staging.path)
    assert mine != ancestor


@pytest.mark.parametrize("staged", [True, False], ids=["with its staging", "alone"])
def test_recover_gives_a_name_back_only_if_it_is_free(tmp_path: Path, staged: bool) -> None:
    target = tmp_path / "checkpoint-5"
    aside = leave(target, 1, ASIDE)
    if staged:
        leave(target, 2).rename(str(aside).replace(ASIDE, UNFINISHED))
    assert newest_checkpoint(tmp_path) == (aside, [])
    recover(tmp_path)
    assert value_of(target) == 1
    recover(tmp_path)
    assert names_in(tmp_path) == ["checkpoint-5"]
    leave(target, 2, ASIDE)
    recover(tmp_path)
    assert (value_of(target), names_in(tmp_path)) == (1, ["checkpoint-5"])


def test_files_of_other_programs_in_a_backup_get_their_name_back_or_a_visible_one(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-5"
    aside = hidden_name(target, ASIDE)
    aside.mkdir()
    (aside / "notes").write_text("theirs")
    recover(tmp_path)
    assert names_in(target) == ["notes"]
    target.rename(aside)
    save(target, 1)
    recover(tmp_path)
    (kept,) = [path for path in tmp_path.iterdir() if path != target]
    assert kept.name.startswith("kept-")
    assert (kept / "notes").read_text() == "theirs"


def test_a_replaced_checkpoint_stays_if_what_has_its_name_is_not_one(tmp_path: Path) -> None:
    aside = leave(tmp_path / "checkpoint-5", 1, ASIDE)
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "notes").write_text("theirs")
    recover(tmp_path)
    assert value_of(aside) == 1
    (one,) = leftovers(tmp_path)
    assert (one.why, one.removable, one.stays) == ("checkpoint-5 is something else now.", False, True)


def test_two_processes_that_recover_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    for number in itertools.count():
        output_dir = tmp_path / str(number)
        for state in (ASIDE, REMOVED, UNFINISHED):
            leave(output_dir / "checkpoint-5", 1, state)
        calls: list[str] = []

        def before(name: str, at: Path, number: int = number, place: Path = output_dir, calls: Any = calls) -> None:
            calls.append(name)
            if len(calls) == number + 1:
                with running_on(Machine()):
                    recover(place)

        with running_on(Machine(before)):
            recover(output_dir)
        recover(output_dir)
        assert (names_in(output_dir), value_of(output_dir / "checkpoint-5")) == (["checkpoint-5"], 1)
        if number >= len(calls):
            return


@pytest.mark.parametrize("kind", ["rename", "create"], ids=["cannot be deleted", "cannot be locked"])
def test_a_stale_directory_that_cannot_be_deleted_does_not_stop_a_save(tmp_path: Path, kind: str) -> None:
    theirs, mine = (leave(tmp_path / name, 1) for name in ("checkpoint-1", "checkpoint-2"))
    with refusing(kind, rf"/\.checkpoint-1\.removed|{theirs}/{LOCK_NAME}$", errno.EACCES):
        recover(tmp_path)
    assert not mine.exists()
    assert value_of(theirs) == 1
    with refusing("look", f"{theirs}/{LOCK_NAME}$", errno.EACCES):
        (found,) = leftovers(tmp_path)
    assert "It cannot be accessed: " in found.why
    assert (found.path, found.removable, found.stays) == (theirs, False, True)
    save(tmp_path / "checkpoint-3", 1)


def test_an_old_checkpoint_with_a_thousand_nested_directories_is_deleted(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved)
    for _ in range(1100):  # With names this short, the path length is still valid.
        os.mkdir("a")
        os.chdir("a")
    os.chdir(tmp_path)
    try:
        save(saved, 2)
        assert (names_in(tmp_path), value_of(saved)) == (["checkpoint-5"], 2)
    finally:
        # The cleanup of pytest would recurse.
        subprocess.run(["rm", "-rf", *map(str, tmp_path.iterdir())], check=True)


# ---- Exports, which take the place of others.

MARK = "model.safetensors"
BIND = 4096
NO_MOUNTS = 2


def is_old(name: str) -> bool:
    return name.startswith("model")


def test_an_export_is_published_completely(tmp_path: Path) -> None:
    machine = Machine()
    with staging_directory(tmp_path / "export") as staging, running_on(machine):
        (staging.path / "tokenizer.json").write_text("{}")
        commit_export(staging, tmp_path / "export", (MARK,), is_old)
    assert names_in(tmp_path) == ["export"]
    assert names_in(tmp_path / "export") == ["tokenizer.json"]
    named = machine.log.index(("rename", str(tmp_path / "export")))
    assert ("sync", str(staging.path / "tokenizer.json")) in machine.log[:named], "somebody else wrote it"


def test_an_export_replaces_nothing_that_came_meanwhile(tmp_path: Path) -> None:
    with staging_directory(tmp_path / "export") as staging:
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "model.safetensors").write_text("theirs")
        with pytest.raises(StorageError, match="Another job has saved"):
            commit_export(staging, tmp_path / "export", (MARK,), is_old)
    assert (tmp_path / "export" / "model.safetensors").read_text() == "theirs"
    assert names_in(tmp_path) == ["export"]


def older(target: Path) -> Path:
    """An older export under the target's name, beside a file of somebody else."""
    target.mkdir(exist_ok=True)
    for name in (MARK, "config.json", "model-00001-of-00002.safetensors", "notes.txt"):
        (target / name).write_text("old")
    return target


def replaced(target: Path, names: tuple[str, ...] = (MARK, "config.json")) -> dict[str, str]:
    """What is in a target after an export of some files was let into it."""
    with staging_directory(staged_name(target)) as staging:
        for name in names:
            write_file(staging.path / name, b"new")
        commit_export(staging, target.resolve(), (MARK,), is_old)
    return {path.name: path.read_text() for path in target.iterdir() if path.is_file()}


NEW = {MARK: "new", "config.json": "new", "notes.txt": "old"}


@pytest.mark.parametrize("form", ["plain", "a link", "with a directory", "of other rights", "with a lock"])
def test_an_export_replaces_an_older_export_and_nothing_else(tmp_path: Path, form: str) -> None:
    target = older(tmp_path / "hf")
    if form == "a link":
        target = target.rename(tmp_path / "elsewhere")
        (tmp_path / "hf").symlink_to(target)
    elif form == "with a directory":
        (target / "checkpoint-5").mkdir()
    elif form == "of other rights":
        target.chmod(0o700)
    elif form == "with a lock":
        (target / LOCK_NAME).touch()  # A crash right after the rename of a new export leaves it.
    before = [one.stat() for one in (target, target / "notes.txt")]
    assert replaced(tmp_path / "hf") == NEW
    after = [one.stat() for one in (target, target / "notes.txt")]
    assert [(one.st_ino, one.st_mode) for one in after] == [(one.st_ino, one.st_mode) for one in before]
    assert leftovers(target) == leftovers(tmp_path) == []


@pytest.mark.parametrize("device", ["another", "the same"])
def test_an_export_into_a_mounted_directory_writes_nothing_next_to_it(tmp_path: Path, device: str) -> None:
    target, origin = tmp_path / "mounted", tmp_path / "origin"
    for one in (target, origin):
        one.mkdir()
    mount = ctypes.CDLL(None).mount
    flags, kind = (0, b"tmpfs") if device == "another" else (BIND, b"")
    pid = os.fork()
    if pid == 0:
        try:
            mounted = with_own_mounts() and mount(os.fsencode(origin), os.fsencode(target), kind, flags, None) == 0
            found = replaced(older(target)) if mounted else NEW
            os._exit(NO_MOUNTS if not mounted else int(found != NEW))
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == NO_MOUNTS:
        pytest.skip("this machine does not let its users mount")
    assert code == 0
    assert names_in(tmp_path) == ["mounted", "origin"]
