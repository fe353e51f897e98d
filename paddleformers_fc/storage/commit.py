"""Stage, commit, replace and remove a checkpoint or an export.

A directory appears under its name as a whole or not at all. It is written into a hidden sibling directory (*staging*),
whose process holds its lock. Once all files, all directories and the manifest are on the device, one rename gives it
its name.

Saving a step again (after a resume) replaces a finished checkpoint, which is never written into: the old directory is
renamed aside, the new one gets the name, and the old one is deleted. A crash between the two renames leaves the old
checkpoint aside; :func:`recover` gives it its name back. A complete checkpoint of the step exists at every instant.

Files of other programs under the target's name (another checkpoint format, notes) are moved to a visible ``kept-...``
name and never deleted.

Two jobs may save the same step at once. What is moved aside must be what had the name when staging was created, and a
rename never replaces files, so that the second commit fails.

One process per save and disk calls these functions; the other ranks only write files into the directory.

An export into a directory that exists, which may hold files of other programs and be mounted, keeps the directory. The
export is staged inside of it, and its files are renamed one by one. The mark by which readers recognise an export is
deleted first and renamed last, so that after a crash in between the directory is not an export. Its checksums are there
throughout, so that readers of numbered files, which need no mark, do not mistake parts of two exports for one.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.errors import CheckpointError, Corrupt, StorageError
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.files import (
    entry_identity,
    files_within,
    fsync_directory,
    fsync_file,
    is_directory,
    list_directory,
    make_directories,
    make_directory,
    real_path,
    remove_file,
    remove_tree,
    rename,
    walk_directories,
)
from paddleformers_fc.storage.manifest import Manifest, read_manifest
from paddleformers_fc.storage.paths import (
    ASIDE,
    REMOVED,
    UNFINISHED,
    backup_name,
    hidden_name,
    parse_hidden,
    run_digest,
)
from paddleformers_fc.storage.staging_lock import LOCK_NAME, LockState, locked

_ATTEMPTS = 3
_NAME_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


@dataclass(frozen=True)
class Staging:
    """A staging directory of this process.

    Attributes:
        path: the directory.
        target: the name that it is going to have.
        replaces: the identity of what had that name when staging was created; None for nothing.
    """

    path: Path
    target: Path
    replaces: tuple[int, int] | None


@contextlib.contextmanager
def staging_directory(target: Path, run: str = "") -> Iterator[Staging]:
    """Context manager around the writing of a directory: staged beside ``target``, locked, and deleted at the end.

    :func:`commit` takes it away before. A rank that still writes into a deleted directory gets a :class:`StorageError`,
    and nothing that it writes comes back to life.

    Args:
        target: ``checkpoint-N``; it may exist, and its parent need not.
        run: the id of the run, whose later processes may delete the directory where the file system has no locks.

    Raises:
        StorageError: the operating system refused.
    """
    make_directories(target.parent)
    replaces = entry_identity(target)
    with contextlib.ExitStack() as stack:
        for _ in range(_ATTEMPTS):
            path = hidden_name(target, UNFINISHED, run and run_digest(run) + secrets.token_hex(6))
            make_directory(path)
            stack.callback(_try_remove, path)
            if stack.enter_context(locked(path)) in (LockState.OURS, LockState.UNSUPPORTED):
                break
            stack.close()  # A process that cleans up was faster.
        else:
            raise _taken(target, path)
        fsync_directory(target.parent)
        yield Staging(path, target, replaces)


def _try_remove(staging: Path) -> None:
    # A failure leaves it to the next save, as a crash does.
    with contextlib.suppress(StorageError):
        remove_checkpoint(staging)


def sync_staging(staging: Staging, listed: Collection[str]) -> None:
    """Do the slow part of a commit, which may fail: check that all files are there, and sync the directories.

    Every rank has synced the files that it has written.

    Args:
        staging: with all files written.
        listed: the paths of its files.

    Raises:
        Corrupt: a file is missing.
        StorageError: the operating system refused, or another job has saved this step meanwhile.
    """
    _refuse_other(staging.target, staging)
    there: set[str] = set()
    for directory, names in walk_directories(staging.path):
        there.update((directory / name).relative_to(staging.path).as_posix() for name in names)
        fsync_directory(directory)
    missing = sorted(set(listed) - there)
    if missing:
        raise Corrupt(
            f"{staging.path} has lost files that were written into it.",
            where=str(staging.path),
            evidence=[f"{path} is missing" for path in missing],
            next_step="Check the file system, and save again.",
        )


def commit(staging: Staging) -> Path | None:
    """Give a synced staging directory its name, durably. A finished checkpoint that has the name is replaced.

    Returns:
        where the files of other programs that had the name are now, or a checkpoint with equal tied tensors if those of
        the new one differ.

    Raises:
        StorageError: the operating system refused, or another job has saved this step meanwhile. The target is the old
            or the new checkpoint, never a mixture.
    """
    target, (_, _, token) = staging.target, parse_hidden(staging.path) or ("", "", "")
    aside = hidden_name(target, ASIDE, token)
    try:
        _take_name(staging, aside)
    except StorageError as error:
        # If this fails as well, recover() does it; the first error takes precedence.
        with contextlib.suppress(StorageError):
            rename(aside, target)
        if is_name_taken(error) or _is_missing(error):
            raise _taken(target, staging.path) from error
        raise
    fsync_directory(target.parent)
    with contextlib.suppress(StorageError):
        remove_file(target / LOCK_NAME)  # Readers ignore one that stays.
    return _retire(aside, target)


def _take_name(staging: Staging, aside: Path) -> None:
    try:
        rename(staging.path, staging.target)
    except StorageError as error:
        if not is_name_taken(error):
            raise
        rename(staging.target, aside)
        _refuse_other(aside, staging)
        rename(staging.path, staging.target)


def _refuse_other(path: Path, staging: Staging) -> None:
    """Refuse a directory that is not what had the target's name when staging was created."""
    if entry_identity(path) not in (None, staging.replaces):
        raise _taken(staging.target, staging.path)


def _taken(target: Path, staging: Path) -> StorageError:
    return StorageError(
        f"Another job has saved {target} or removed {staging.name} during this save.",
        where=str(target),
        next_step="Let one job at a time save into a directory, or give each its own; what has the name is complete.",
    )


def _retire(aside: Path, target: Path) -> Path | None:
    """Delete a checkpoint that was replaced; rename anything else, and return its new path."""
    if entry_identity(aside) is None:
        return None
    with contextlib.suppress(StorageError):  # The new checkpoint is committed; recover() tries again.
        old, new = finished(aside), finished(target)
        if old is None or (new is not None and new.ties and not old.ties):
            place = backup_name(target)
            rename(aside, place)
            return place
        if new is not None:
            remove_checkpoint(aside)
    return None


def finished(directory: Path) -> Manifest | None:
    """Return the manifest of a finished checkpoint; None for any other directory."""
    try:
        return read_manifest(directory)
    except CheckpointError:
        return None


def remove_checkpoint(directory: Path) -> None:
    """Delete a directory so that a crash never leaves a part of it under its name.

    Raises:
        StorageError: the operating system refused.
    """
    remove_tree(doomed(directory))


def doomed(directory: Path) -> Path:
    """Give a directory a name under which any process may delete it, and return that name.

    Raises:
        StorageError: the operating system refused.
    """
    parsed = parse_hidden(directory)
    renamed = hidden_name(parsed[0] if parsed else directory, REMOVED)
    rename(directory, renamed)
    fsync_directory(renamed.parent)
    return renamed


def recover(output_dir: Path, runs: Collection[str] = ()) -> None:
    """Complete interrupted replacements and deletions, and delete staging directories that no process writes.

    An entry that resists stays, which must not stop the next save.

    Args:
        output_dir: the directory of the checkpoints.
        runs: ids of the run and its ancestors, whose staging directories are deleted where there are no locks.

    Raises:
        StorageError: the operating system refused to list the directory.
    """
    digests = {run_digest(run) for run in runs}
    for path in list_directory(output_dir):
        with contextlib.suppress(StorageError):
            _recover(path, digests)


def _recover(path: Path, runs: Collection[str]) -> None:
    target, state, token = parse_hidden(path) or (path, "", "")
    if state in (ASIDE, UNFINISHED):
        with locked(hidden_name(target, UNFINISHED, token)) as lock:
            if lock is LockState.BUSY:
                return
            if state == ASIDE:
                _put_back(path, target)
            elif lock is not LockState.UNSUPPORTED or any(map(token.startswith, runs)):
                # Deleted below: NFS keeps a file that is deleted while it is open, as the lock is here.
                path, state = doomed(path), REMOVED
    if state == REMOVED:
        remove_tree(path)


def _put_back(aside: Path, target: Path) -> None:
    try:
        rename(aside, target)
    except StorageError as error:
        if not is_name_taken(error):
            raise
        _retire(aside, target)
    fsync_directory(target.parent)


def _is_missing(error: StorageError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def is_name_taken(error: StorageError) -> bool:
    """Return whether an operation failed because its new name exists."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NAME_TAKEN


def staged_name(target: Path) -> Path:
    """Return the name beside which an export to ``target`` is staged: inside of a directory that exists.

    Links are followed: a link and its target may be on different file systems.

    Raises:
        StorageError: the operating system refused to look.
    """
    real = real_path(target)
    return real / (real.name or "export") if is_directory(real) else real


def commit_export(staging: Staging, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Make a staging directory without a manifest an export, durably.

    Args:
        staging: for :func:`staged_name`, with all files written.
        target: the directory, without links.
        marks: names of files by one of which an export is recognised; staging holds one of them.
        is_old: whether a name in the target is that of a file of an export, which goes; all others stay.

    Raises:
        StorageError: something has taken the name since, or the operating system refused.
    """
    # Other libraries write parts of an export, such as a tokenizer, and do not sync them.
    for file in files_within(staging.path):
        fsync_file(file)
    sync_staging(staging, ())
    if staging.path.parent == target:
        _move_in(staging.path, target, marks, is_old)
    else:
        commit(staging)


def _move_in(staging: Path, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Move the files of an export, one by one, into a directory that may hold others."""
    own = [path.relative_to(staging) for path in files_within(staging) if path.name != LOCK_NAME]
    for name in marks:
        remove_file(target / name)
    fsync_directory(target)
    first = [path for path in own if path.name == CHECKSUMS_NAME]
    for path in list_directory(target):
        # A crash right after the rename of a new export has left its lock.
        if path.name == LOCK_NAME or (is_old(path.name) and not (first and path.name == CHECKSUMS_NAME)):
            remove_file(path)
    fsync_directory(target)
    for path in first:
        rename(staging / path, target / path)
    fsync_directory(target)
    last = [path for path in own if str(path) in marks]
    for path in sorted(set(own).difference(first, last)):
        make_directories((target / path).parent)
        rename(staging / path, target / path)
    for directory in {path.parent for path in own}:
        fsync_directory(target / directory)
    for path in last:
        rename(staging / path, target / path)
    fsync_directory(target)
