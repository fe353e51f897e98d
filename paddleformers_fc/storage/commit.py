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

One process per save and disk calls these functions; the other ranks only write files into the directory. It holds the
lock of its staging directory, and the system releases the lock when the process ends. A process that gets the lock may
delete the directory. The lock is ``flock``, which holds between the clients of NFS, CephFS and GPFS, and of Lustre
unless it is mounted with ``localflock``.

:func:`leftovers` lists the hidden directories of crashed and running saves. :func:`recover` handles those that no
process needs. A user can delete others, such as the files of other programs (``kept-...``) and, on a file system
without locks, staging directories of other runs.

An export into a directory that exists, which may hold files of other programs and be mounted, keeps the directory. The
export is staged inside of it, and its files are renamed one by one. The mark by which readers recognise an export is
deleted first and renamed last, so that after a crash in between the directory is not an export. Its checksums are there
throughout, so that readers of numbered files, which need no mark, do not mistake parts of two exports for one.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from paddleformers_fc.errors import CheckpointError, Corrupt, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.manifest import Manifest, read_manifest
from paddleformers_fc.storage.paths import (
    ASIDE,
    LOCK_NAME,
    REMOVED,
    UNFINISHED,
    backup_name,
    hidden_name,
    parse_hidden,
    parse_kept,
    run_digest,
)

_ATTEMPTS = 3
_NAME_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class LockState(enum.Enum):
    """The answer to a request for a lock."""

    OURS = "ours"
    BUSY = "busy"
    ABSENT = "absent"
    UNSUPPORTED = "unsupported"


@contextlib.contextmanager
def locked(staging: Path, *, probe: bool = False) -> Iterator[LockState]:
    """Context manager that holds the lock of a staging directory if it is free.

    Args:
        staging: the directory.
        probe: only look, which needs no right to write.

    Yields:
        OURS: no other process has the lock. BUSY: another one has it. ABSENT: there is no such directory, or of a probe
        no lock in it. UNSUPPORTED: the file system has no locks.

    Raises:
        StorageError: the operating system refused to open the lock.
    """
    path = staging / LOCK_NAME
    flags, kind = (os.O_RDONLY | os.O_NONBLOCK, fcntl.LOCK_SH) if probe else (os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
    descriptor = -1
    try:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise files.refused("lock", path, error) from error
    if descriptor < 0:
        yield LockState.ABSENT
        return
    try:
        yield _lock(path, descriptor, kind)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # A forked process may have the descriptor too.
        os.close(descriptor)


def _lock(path: Path, descriptor: int, kind: int) -> LockState:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            return LockState.BUSY
        if error.errno in _NO_LOCKS:
            return LockState.UNSUPPORTED
        raise files.refused("lock", path, error) from error
    # A process that had the lock before may have removed the directory.
    return LockState.OURS if os.path.exists(path) else LockState.ABSENT


class Staging(msgspec.Struct, frozen=True):
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
    files.make_directories(target.parent)
    replaces = files.entry_identity(target)
    with contextlib.ExitStack() as stack:
        for _ in range(_ATTEMPTS):
            path = hidden_name(target, UNFINISHED, run and run_digest(run) + secrets.token_hex(6))
            files.make_directory(path)
            stack.callback(_try_remove, path)
            if stack.enter_context(locked(path)) in (LockState.OURS, LockState.UNSUPPORTED):
                break
            stack.close()  # A process that cleans up was faster.
        else:
            raise _taken(target, path)
        files.fsync_directory(target.parent)
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
    _check_not_replaced(staging.target, staging)
    there: set[str] = set()
    for directory, names in files.walk_directories(staging.path):
        there.update((directory / name).relative_to(staging.path).as_posix() for name in names)
        files.fsync_directory(directory)
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
            files.rename(aside, target)
        if is_name_taken(error) or _is_missing(error):
            raise _taken(target, staging.path) from error
        raise
    files.fsync_directory(target.parent)
    with contextlib.suppress(StorageError):
        files.remove_file(target / LOCK_NAME)  # If it stays, readers ignore it.
    return _retire(aside, target)


def _take_name(staging: Staging, aside: Path) -> None:
    try:
        files.rename(staging.path, staging.target)
    except StorageError as error:
        if not is_name_taken(error):
            raise
        files.rename(staging.target, aside)
        _check_not_replaced(aside, staging)
        files.rename(staging.path, staging.target)


def _check_not_replaced(path: Path, staging: Staging) -> None:
    """Refuse a directory that is not what had the target's name when staging was created."""
    if files.entry_identity(path) not in (None, staging.replaces):
        raise _taken(staging.target, staging.path)


def _taken(target: Path, staging: Path) -> StorageError:
    return StorageError(
        f"Another job has saved {target} or removed {staging.name} during this save.",
        where=str(target),
        next_step="Let one job at a time save into a directory, or give each its own; what has the name is complete.",
    )


def _retire(aside: Path, target: Path) -> Path | None:
    """Delete a checkpoint that was replaced; rename anything else, and return its new path."""
    if files.entry_identity(aside) is None:
        return None
    with contextlib.suppress(StorageError):  # The new checkpoint is committed; recover() tries again.
        old, new = finished(aside), finished(target)
        if old is None or (new is not None and new.ties and not old.ties):
            place = backup_name(target)
            files.rename(aside, place)
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
    files.remove_tree(doomed(directory))


def doomed(directory: Path) -> Path:
    """Give a directory a name under which any process may delete it, and return that name.

    Raises:
        StorageError: the operating system refused.
    """
    parsed = parse_hidden(directory)
    renamed = hidden_name(parsed[0] if parsed else directory, REMOVED)
    files.rename(directory, renamed)
    files.fsync_directory(renamed.parent)
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
    for path in files.list_directory(output_dir):
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
        files.remove_tree(path)


def _put_back(aside: Path, target: Path) -> None:
    try:
        files.rename(aside, target)
    except StorageError as error:
        if not is_name_taken(error):
            raise
        _retire(aside, target)
    files.fsync_directory(target.parent)


def _is_missing(error: StorageError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def is_name_taken(error: StorageError) -> bool:
    """Return whether an operation failed because its new name exists."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NAME_TAKEN


class Leftover(msgspec.Struct, frozen=True):
    """A directory beside the checkpoints.

    Attributes:
        path: the directory.
        why: its description, one sentence for the reader.
        removable: whether it may be deleted after a user confirms.
        stays: whether the next save leaves it.
    """

    path: Path
    why: str
    removable: bool
    stays: bool = True


def leftovers(output_dir: Path) -> list[Leftover]:
    """List the directories beside the checkpoints that saves use, have left, or moved files of other programs to.

    Raises:
        StorageError: the operating system refused to look into ``output_dir``.
    """
    found = [_judge(path) for path in files.list_directory(output_dir)]
    return [one for one in found if one is not None]


def remove_leftover(path: Path) -> bool:
    """Check a directory of :func:`leftovers` again and delete it; return whether it was deleted.

    Raises:
        StorageError: the operating system refused.
    """
    found = _judge(path)
    if found is None or not found.removable:
        return False
    with locked(path) as lock:
        if lock is LockState.BUSY:
            return False  # A save has begun to use it since.
        renamed = doomed(path)
    files.remove_tree(renamed)
    return True


def _judge(path: Path) -> Leftover | None:
    try:
        parsed, kept = parse_hidden(path), parse_kept(path)
        if (parsed is None and kept is None) or not files.is_directory(path):
            return None
        return _judge_kept(path, kept) if parsed is None else _judge_hidden(path, *parsed)
    except StorageError as error:
        # It may belong to another user, or the disk is broken there. That must not stop a save.
        return Leftover(path, f"It cannot be looked at: {error.what}", False)


def _judge_kept(path: Path, target: Path | None) -> Leftover:
    if target is None or finished(path):
        return Leftover(path, "It is a checkpoint.", False)
    return Leftover(path, f"It holds files of another program that were found as {target.name}.", True)


def _judge_hidden(path: Path, target: Path, state: str, token: str) -> Leftover:
    if state == REMOVED:
        return Leftover(path, "Its deletion was interrupted.", True, stays=False)
    with locked(hidden_name(target, UNFINISHED, token), probe=True) as lock:
        if lock is LockState.BUSY:
            return Leftover(path, "A running save uses it.", False)
    if state == ASIDE and files.entry_identity(target) is None:
        return Leftover(path, f"The next start or save gives it its name {target.name} back.", False, stays=False)
    if state == ASIDE:
        replaced = finished(target) is not None
        why = "It was replaced by a newer save of the same step." if replaced else f"Something else is {target.name}."
        return Leftover(path, why, replaced, stays=not replaced)
    if lock is LockState.UNSUPPORTED:
        return Leftover(path, "Its save was interrupted or runs; this file system has no locks.", True)
    return Leftover(path, "Its save was interrupted.", True, stays=False)


def staged_name(target: Path) -> Path:
    """Return the name beside which an export to ``target`` is staged: inside of a directory that exists.

    Links are followed: a link and its target may be on different file systems.

    Raises:
        StorageError: the operating system refused to look.
    """
    real = files.real_path(target)
    return real / (real.name or "export") if files.is_directory(real) else real


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
    for file in files.files_within(staging.path):
        files.fsync_file(file)
    sync_staging(staging, ())
    if staging.path.parent == target:
        _move_in(staging.path, target, marks, is_old)
    else:
        commit(staging)


def _move_in(staging: Path, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Move the files of an export, one by one, into a directory that may hold others."""
    own = [path.relative_to(staging) for path in files.files_within(staging) if path.name != LOCK_NAME]
    for name in marks:
        files.remove_file(target / name)
    files.fsync_directory(target)
    has_checksums = Path(CHECKSUMS_NAME) in own
    for path in files.list_directory(target):
        # A crash right after the rename of a new export has left its lock.
        if path.name == LOCK_NAME or (is_old(path.name) and not (has_checksums and path.name == CHECKSUMS_NAME)):
            files.remove_file(path)
    files.fsync_directory(target)
    for stage in range(3):
        moved = [path for path in own if (0 if path.name == CHECKSUMS_NAME else 1 + (str(path) in marks)) == stage]
        for path in moved:
            files.make_directories((target / path).parent)
            files.rename(staging / path, target / path)
        for directory in {path.parent for path in moved}:
            files.fsync_directory(target / directory)
