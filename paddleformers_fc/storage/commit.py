"""Stage, commit, replace and remove a checkpoint or an export atomically.

A directory is written under a hidden name next to its target (*staging*) and, once everything is on the device, renamed
to the target. To replace a finished checkpoint of the same step, the old directory is first renamed to a backup, which
is deleted at the end. After a crash in between, :func:`recover` renames the backup back, so a complete checkpoint of
the step exists at every instant. Files of other programs under the target's name are moved to a visible ``kept-...``
name and never deleted. If two jobs save the same step at once, the second commit fails.

One process per save and disk calls these functions; other ranks only write files. It holds the lock of its staging
directory; whoever gets the lock may delete the directory. The lock is ``flock``, which works between clients of NFS,
CephFS and GPFS, and of Lustre unless it is mounted with ``localflock``.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from paddleformers_fc.errors import CheckpointError, Corrupt, OptionError, StorageError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.manifest import Manifest, read_manifest
from paddleformers_fc.storage.paths import ASIDE, LOCK_NAME, REMOVED, UNFINISHED, parse_hidden

_ATTEMPTS = 3
_NAME_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})
_KEPT = re.compile(r"kept-[0-9a-f]+\.(.+)", re.DOTALL)
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


def hidden_name(target: Path, state: str, token: str = "") -> Path:
    """Return the path next to ``target`` of a directory in one of the three hidden states.

    Args:
        target: the final path of the directory.
        state: the state.
        token: makes the name unique; a new token by default.

    Raises:
        OptionError: no directory can be renamed to the target.
    """
    if target.name in ("", ".."):
        raise OptionError(
            f"{target} has no name of its own, but a checkpoint is renamed when it is complete.",
            where=str(target),
            next_step="Name a directory such as checkpoint-3; nothing was written.",
        )
    return target.with_name(f".{target.name}.{state}-{token or secrets.token_hex(6)}")


def run_digest(run: str) -> str:
    """Return the prefix of a run's tokens."""
    return xxhash.xxh3_64_hexdigest(run.encode())


def _backup_name(target: Path) -> Path:
    """Return a new path next to ``target`` for files of other programs that had its name."""
    return target.with_name(f"kept-{secrets.token_hex(6)}.{target.name}")


def _parse_kept(path: Path) -> Path | None:
    """Return the target of a backup directory (:func:`_backup_name`); None for any other name."""
    match = _KEPT.fullmatch(path.name)
    return path.with_name(match[1]) if match else None


class LockState(enum.Enum):
    """The result of a request for a lock."""

    OURS = "ours"
    BUSY = "busy"
    ABSENT = "absent"
    UNSUPPORTED = "unsupported"


@contextlib.contextmanager
def locked(staging: Path, *, check_only: bool = False) -> Iterator[LockState]:
    """Context manager that holds the lock of a staging directory if it is free.

    Args:
        staging: the directory.
        check_only: only check whether the lock is free, which needs no write permission.

    Yields:
        OURS: no other process has the lock. BUSY: another process has it. ABSENT: there is no such directory, or, for a
        check, no lock in it. UNSUPPORTED: the file system has no locks.

    Raises:
        StorageError: the operating system refused to open the lock.
    """
    path = staging / LOCK_NAME
    read, write = os.O_RDONLY | os.O_NONBLOCK, os.O_RDWR | os.O_CREAT
    flags, kind = (read, fcntl.LOCK_SH) if check_only else (write, fcntl.LOCK_EX)
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
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # Closing is not enough if a forked process has the descriptor.
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
    # The previous holder of the lock may have removed the directory.
    return LockState.OURS if os.path.exists(path) else LockState.ABSENT


class Staging(msgspec.Struct, frozen=True):
    """A staging directory of this process.

    Attributes:
        path: the directory.
        target: its final path.
        replaces: the identity of what had that path when staging was created; None if nothing had.
    """

    path: Path
    target: Path
    replaces: tuple[int, int] | None


@contextlib.contextmanager
def staging_directory(target: Path, run: str = "") -> Iterator[Staging]:
    """Context manager for a locked staging directory next to ``target``, which is deleted unless it was committed.

    :func:`commit` renames it before that. A rank that still writes into a deleted directory gets a
    :class:`StorageError`, and cannot create the directory again.

    Args:
        target: ``checkpoint-N``; it may exist, and its parent need not.
        run: the id of the run. On a file system without locks, later processes of the run may delete the directory.

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
            stack.close()  # Another process has already deleted it as stale.
        else:
            raise _conflict_error(target, path)
        files.fsync_directory(target.parent)
        yield Staging(path, target, replaces)


def _try_remove(staging: Path) -> None:
    # After a failure the next save deletes it, as after a crash.
    with contextlib.suppress(StorageError):
        remove_checkpoint(staging)


def sync_staging(staging: Staging, listed: Collection[str]) -> None:
    """Do the slow part of a commit, which may fail: check that all files exist, and sync the directories.

    Every rank has already synced its files.

    Args:
        staging: the staging directory, with all files written.
        listed: the paths of its files.

    Raises:
        Corrupt: a file is missing.
        StorageError: the operating system refused, or another job has saved this step meanwhile.
    """
    _check_not_replaced(staging.target, staging)
    present: set[str] = set()
    for directory, names in files.walk_directories(staging.path):
        present.update((directory / name).relative_to(staging.path).as_posix() for name in names)
        files.fsync_directory(directory)
    missing = sorted(set(listed) - present)
    if missing:
        raise Corrupt(
            f"{staging.path} has lost files that were written into it.",
            where=str(staging.path),
            evidence=[f"{path} is missing" for path in missing],
            next_step="Check the file system, and save again.",
        )


def commit(staging: Staging) -> Path | None:
    """Rename a synced staging directory to its target, durably. A finished checkpoint at the target is replaced.

    Returns:
        the new path of what was at the target if it is not deleted: files of other programs, or a checkpoint with equal
        tied tensors if the new checkpoint has diverged ones; else None.

    Raises:
        StorageError: the operating system refused, or another job has saved this step meanwhile. The target is the old
            or the new checkpoint, never a mixture.
    """
    target, (_, _, token) = staging.target, parse_hidden(staging.path) or ("", "", "")
    aside = hidden_name(target, ASIDE, token)
    try:
        _publish(staging, aside)
    except StorageError as error:
        # If this fails as well, recover() does it later; the first error takes precedence.
        with contextlib.suppress(StorageError):
            files.rename(aside, target)
        if is_name_taken(error) or _is_missing(error):
            raise _conflict_error(target, staging.path) from error
        raise
    files.fsync_directory(target.parent)
    with contextlib.suppress(StorageError):
        files.remove_file(target / LOCK_NAME)  # Readers ignore it if it stays.
    return _retire(aside, target)


def _publish(staging: Staging, aside: Path) -> None:
    try:
        files.rename(staging.path, staging.target)
    except StorageError as error:
        if not is_name_taken(error):
            raise
        files.rename(staging.target, aside)
        _check_not_replaced(aside, staging)
        files.rename(staging.path, staging.target)


def _check_not_replaced(path: Path, staging: Staging) -> None:
    """Check that a directory is the one that was at the target when staging was created."""
    if files.entry_identity(path) not in (None, staging.replaces):
        raise _conflict_error(staging.target, staging.path)


def _conflict_error(target: Path, staging: Path) -> StorageError:
    return StorageError(
        f"Another job has saved {target} or removed {staging.name} during this save.",
        where=str(target),
        next_step="Give each job its own output directory. The existing checkpoint is complete.",
    )


def _retire(aside: Path, target: Path) -> Path | None:
    """Delete a replaced checkpoint, or rename anything else to a visible backup and return its path."""
    if files.entry_identity(aside) is None:
        return None
    with contextlib.suppress(StorageError):  # The new checkpoint is committed; recover() tries again.
        old, new = finished(aside), finished(target)
        if old is None or (new is not None and new.ties and not old.ties):
            place = _backup_name(target)
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
    files.remove_tree(mark_removed(directory))


def mark_removed(directory: Path) -> Path:
    """Rename a directory so that any process may delete it, and return its new path.

    Raises:
        StorageError: the operating system refused.
    """
    parsed = parse_hidden(directory)
    renamed = hidden_name(parsed[0] if parsed else directory, REMOVED)
    files.rename(directory, renamed)
    files.fsync_directory(renamed.parent)
    return renamed


def recover(output_dir: Path, runs: Collection[str] = ()) -> None:
    """Complete interrupted replacements and deletions, and delete stale staging directories.

    Entries that cannot be handled stay, so that they do not stop the next save.

    Args:
        output_dir: the directory of the checkpoints.
        runs: ids of the run and its ancestors. On a file system without locks, their staging directories are deleted.

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
                # Deleted below, after the lock is closed, because NFS keeps a file that is deleted while it is open.
                path, state = mark_removed(path), REMOVED
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
    """Return whether an operation failed because the new name exists."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NAME_TAKEN


class Leftover(msgspec.Struct, frozen=True):
    """A stale directory, a backup or a staging directory next to the checkpoints.

    Attributes:
        path: the directory.
        why: its description, one sentence.
        removable: whether it may be deleted if a user confirms.
        stays: whether the next save leaves it.
    """

    path: Path
    why: str
    removable: bool
    stays: bool = True


def leftovers(output_dir: Path) -> list[Leftover]:
    """List the staging directories, backups and stale directories of saves next to the checkpoints.

    Raises:
        StorageError: the operating system refused to list ``output_dir``.
    """
    found = [_classify(path) for path in files.list_directory(output_dir)]
    return [one for one in found if one is not None]


def remove_leftover(path: Path) -> bool:
    """Delete a directory of :func:`leftovers` unless it has come into use; return whether it was deleted.

    Raises:
        StorageError: the operating system refused.
    """
    found = _classify(path)
    if found is None or not found.removable:
        return False
    with locked(path) as lock:
        if lock is LockState.BUSY:
            return False  # A save has begun to use it meanwhile.
        renamed = mark_removed(path)
    files.remove_tree(renamed)
    return True


def _classify(path: Path) -> Leftover | None:
    try:
        parsed, kept = parse_hidden(path), _parse_kept(path)
        if (parsed is None and kept is None) or not files.is_directory(path):
            return None
        return _classify_kept(path, kept) if parsed is None else _classify_hidden(path, *parsed)
    except StorageError as error:
        # It may belong to another user, or the disk may be broken there. That must not stop a save.
        return Leftover(path, f"It cannot be accessed: {error.what}", False)


def _classify_kept(path: Path, target: Path | None) -> Leftover:
    if target is None or finished(path):
        return Leftover(path, "It is a checkpoint.", False)
    return Leftover(path, f"It contains files of another program that had the name {target.name}.", True)


def _classify_hidden(path: Path, target: Path, state: str, token: str) -> Leftover:
    if state == REMOVED:
        return Leftover(path, "Its deletion was interrupted.", True, stays=False)
    with locked(hidden_name(target, UNFINISHED, token), check_only=True) as lock:
        if lock is LockState.BUSY:
            return Leftover(path, "A running save uses it.", False)
    if state == ASIDE and files.entry_identity(target) is None:
        return Leftover(path, f"The next start or save renames it back to {target.name}.", False, stays=False)
    if state == ASIDE:
        replaced = finished(target) is not None
        newer, other = "It was replaced by a newer save of the same step.", f"{target.name} is something else now."
        return Leftover(path, newer if replaced else other, replaced, stays=not replaced)
    if lock is LockState.UNSUPPORTED:
        return Leftover(path, "Its save was interrupted or still runs; this file system has no locks.", True)
    return Leftover(path, "Its save was interrupted.", True, stays=False)


def staged_name(target: Path) -> Path:
    """Return the path next to which an export to ``target`` is staged: inside of the target if it is a directory.

    Links are followed, because a link and its target may be on different file systems.

    Raises:
        StorageError: the operating system refused to access it.
    """
    real = files.real_path(target)
    return real / (real.name or "export") if files.is_directory(real) else real


def commit_export(staging: Staging, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Commit a staged export, durably.

    If the target is a directory, it is kept, because it may be mounted or contain files of other programs. The files
    are then renamed into it one by one. The marker file is deleted first and renamed last, so that after a crash in
    between the directory is not an export. The checksums exist throughout, so that readers of numbered files, which
    need no marker, do not mistake files of two exports for one.

    Args:
        staging: the staging directory of :func:`staged_name`, with all files written.
        target: the directory, without links.
        marks: names of marker files, by which readers recognise an export; staging contains one of them.
        is_old: returns whether a file in the target belongs to an older export and is deleted; other files stay.

    Raises:
        StorageError: the name is in use now, or the operating system refused.
    """
    # Other libraries write some files of an export, such as the tokenizer, and do not sync them.
    for file in files.files_within(staging.path):
        files.fsync_file(file)
    sync_staging(staging, ())
    if staging.path.parent == target:
        _move_in(staging.path, target, marks, is_old)
    else:
        commit(staging)


def _move_in(staging: Path, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Move the files of an export, one by one, into a directory that may contain other files."""
    own = [path.relative_to(staging) for path in files.files_within(staging) if path.name != LOCK_NAME]
    for name in marks:
        files.remove_file(target / name)
    files.fsync_directory(target)
    has_checksums = Path(CHECKSUMS_NAME) in own
    for path in files.list_directory(target):
        # A crash right after the rename of a new export leaves its lock.
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
