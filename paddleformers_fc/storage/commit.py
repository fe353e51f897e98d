"""Stage, commit, replace and remove a checkpoint directory.

A checkpoint appears under its name as a whole or not at all. It is written into a hidden sibling directory (*staging*).
One rename gives it its name once all files, all directories and the manifest are on the device. After a crash at any
instant there is:

================  ================================================================
up to the rename  the target as it was; a directory named ``unfinished``
after the rename  the new checkpoint
================  ================================================================

Saving a step again (after a resume) must replace a finished checkpoint, which is never written into. Both are complete
directories then, and if the system supports it, staging and target are exchanged atomically. A crash right after leaves
the new checkpoint under its name. The old one is named ``unfinished`` and has no owner, so it can be cleaned up.

Otherwise it takes two renames, target to ``aside`` and staging to target. A crash between them leaves no target, but
the old checkpoint aside: ``newest_checkpoint`` returns that one, and :func:`.leftovers.recover` restores its name. A
complete checkpoint of the step therefore exists at every instant.

Files of other programs found under the target's name (another checkpoint format, notes) are moved to a visible
``kept-...`` name and never deleted.

Other jobs may work in the same directory, even on the same step. No decision uses an earlier look: a name is taken with
one operation, and only then its former content is inspected. A name that another job has taken meanwhile is taken from
it in turn. The last to commit has the name, each time with a complete checkpoint.

One process per save and disk, the coordinator, calls the functions of this module; the other ranks only write files
into the directory that :func:`create_staging` returned. If a save fails, the coordinator calls :func:`discard`.

The commit of an export, by renames alone.

A new directory is staged beside its name and renamed. A directory that exists, which may hold files of other programs
and be mounted, keeps its identity: the export is staged inside of it, and its files are renamed one by one. The mark by
which readers recognise an export is deleted first and renamed last, so that after a crash in between the directory is
not an export. Its checksums are there throughout, so that readers of numbered files, which need no mark, do not mistake
parts of two exports for one.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paddleformers_fc.errors import CheckpointError, StorageError
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.files import (
    directories_within,
    exchange,
    exists,
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
)
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from paddleformers_fc.storage.paths import (
    ASIDE,
    REMOVED,
    UNFINISHED,
    backup_name,
    hidden_name,
    parse_hidden,
)
from paddleformers_fc.storage.staging_lock import (
    OWNER_NAME,
    is_own,
    write_owner,
)

_ATTEMPTS = 8
_NAME_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


@dataclass(frozen=True)
class Committed:
    """The result of a commit.

    Attributes:
        path: the checkpoint under its final name.
        kept: where the files of other programs that had that name are now.
        left: unneeded directories that could not be deleted; the next save tries again.
    """

    path: Path
    kept: tuple[Path, ...] = ()
    left: tuple[Path, ...] = ()


def create_staging(target: Path) -> Path:
    """Create a directory beside ``target`` for the files of a checkpoint, with this process as its owner.

    The parent of ``target`` is created if it is missing. ``target`` itself may exist; it is not touched.

    Args:
        target: ``checkpoint-N``.

    Returns:
        The directory; it holds the owner's record and nothing else.

    Raises:
        StorageError: the operating system refused.
    """
    make_directories(target.parent)
    for attempt in range(_ATTEMPTS):
        staging = hidden_name(target, UNFINISHED)
        make_directory(staging)
        try:
            write_owner(staging)
            fsync_directory(target.parent)
        except StorageError as error:
            with contextlib.suppress(StorageError):
                remove_tree(staging)
            # Another process that cleans up may take the directory away as long as it has no owner.
            if not is_missing(error) or attempt + 1 == _ATTEMPTS:
                raise
        else:
            break
    return staging


def commit(staging: Path, target: Path) -> Committed:
    """Give a complete staging directory its final name, durably.

    Args:
        staging: from :func:`create_staging`, with all files and the manifest written.
        target: the name it was created for. A finished checkpoint there is replaced. Other files are renamed, and so is
            a checkpoint with equal tied tensors if those of the new one differ.

    Raises:
        NotACheckpoint, FormatError, Corrupt: staging has no manifest, or not the files its manifest lists. No directory
            was renamed.
        StorageError: the operating system refused. ``target`` is the old or the new checkpoint, never a mixture.
    """
    prepare_commit(staging, target)
    return finish_commit(staging, target)


def prepare_commit(staging: Path, target: Path, elsewhere: Collection[str] = ()) -> None:
    """Do the slow part of :func:`commit`, which may fail: check that all files are there, and sync them to the device.

    Args:
        staging: as for :func:`commit`.
        target: as for :func:`commit`.
        elsewhere: listed files that are on other disks, where other ranks have written them.
    """
    check_pair(staging, target)
    manifest = read_manifest(staging)
    here = [checksum for checksum in manifest.files if checksum.path not in elsewhere]
    verify_files(staging, msgspec.structs.replace(manifest, files=here), "size", documents=())
    for directory in directories_within(staging):
        fsync_directory(directory)


def finish_commit(staging: Path, target: Path) -> Committed:
    """Do the rest of :func:`commit`: give a prepared directory its name."""
    check_pair(staging, target)
    displaced = _displace(staging, target)
    make_durable(target)
    old = [path for path in displaced if is_finished(path) and not _is_only_whole(path, target)]
    kept = [_made_visible(path, target) for path in displaced if path not in old]
    return Committed(target, tuple(kept), tuple(path for path in map(try_remove, old) if path is not None))


def discard(staging: Path) -> None:
    """Delete the staging directory of a save that failed; harmless if it is gone.

    A rank that is still writing into it gets a :class:`StorageError`, and nothing that it writes comes back to life.
    Where a commit failed after names were exchanged, another checkpoint has the staging directory's name; only what
    this process has made is deleted.

    Raises:
        StorageError: it is not a staging directory, or the operating system refused.
    """
    parsed = parse_hidden(staging)
    if parsed is None or parsed[1] != UNFINISHED:
        raise StorageError(f"{staging} is not a staging directory and is not deleted.", where=str(staging))
    if is_directory(staging) and is_own(staging):
        remove_checkpoint(staging)


def remove_checkpoint(directory: Path) -> None:
    """Delete a directory so that a crash never leaves a part of it under its name.

    Raises:
        StorageError: the operating system refused.
    """
    renamed = _removal_name(directory)
    rename(directory, renamed)
    fsync_directory(renamed.parent)
    remove_tree(renamed)


def check_pair(staging: Path, target: Path) -> None:
    """Refuse a directory that is not a staging directory of this target."""
    if parse_hidden(staging) != (target, UNFINISHED):
        raise StorageError(
            f"{staging} was not staged for {target}.",
            where=str(staging),
            next_step="Commit the directory that create_staging returned, to the target it was given.",
        )


def _is_only_whole(old: Path, new: Path) -> bool:
    """Return whether a checkpoint with equal copies of tied tensors was replaced by one whose copies differ."""
    return bool(read_manifest(new).ties) and not read_manifest(old).ties


def is_finished(directory: Path) -> bool:
    """Return whether a directory has a valid manifest."""
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def _displace(staging: Path, target: Path) -> list[Path]:
    """Give a complete directory its name; return the new paths of the directories that had the name before."""
    displaced: list[Path] = []
    for attempt in range(_ATTEMPTS):
        if is_taken(target):
            if is_finished(target):
                # A record left in an old checkpoint would make it look like a staging directory.
                remove_file(target / OWNER_NAME)
            if exchange(staging, target):
                return [*displaced, staging]
            displaced.extend(_move_to_backup(target))
        try:
            rename(staging, target)
        except StorageError as error:
            # Another job has taken the name since.
            if is_name_taken(error) and attempt + 1 < _ATTEMPTS:
                continue
            _restore_backup(displaced, target)
            raise
        break
    return displaced


def _move_to_backup(target: Path) -> Iterator[Path]:
    """Move the current holder of a name to a backup name and yield it; yield nothing if another job did so first."""
    old = hidden_name(target, ASIDE)
    try:
        rename(target, old)
    except StorageError as error:
        if not is_missing(error):
            raise
    else:
        yield old


def _restore_backup(displaced: Sequence[Path], target: Path) -> None:
    # If this fails as well, the next start restores the name (recover); the first error takes precedence.
    for old in reversed(displaced):
        with contextlib.suppress(StorageError):
            rename(old, target)
            return


def is_taken(target: Path) -> bool:
    """Return whether the name is in use by anything but an empty directory."""
    if target.is_symlink():
        return True
    return bool(list_directory(target)) if is_directory(target) else exists(target)


def _made_visible(foreign: Path, target: Path) -> Path:
    """Give files of other programs, which had the target's name, a visible name; return their path."""
    place = backup_name(target)
    try:
        rename(foreign, place)
    except StorageError:
        return foreign  # The checkpoint is committed, and these are not deleted under any name.
    return place


def make_durable(target: Path) -> None:
    """Make the new name durable, then drop the mark of its maker."""
    fsync_directory(target.parent)
    # The directory is committed; a mark that stays is ignored by every reader.
    with contextlib.suppress(StorageError):
        remove_file(target / OWNER_NAME)


def try_remove(directory: Path) -> Path | None:
    """Delete a replaced directory; return what is left of it.

    A failure, such as an open file on NFS, must not fail the save: the new checkpoint is committed.
    """
    renamed = _removal_name(directory)
    try:
        rename(directory, renamed)
    except StorageError as error:
        return None if is_missing(error) else directory
    try:
        fsync_directory(renamed.parent)
        remove_tree(renamed)
    except StorageError:
        return renamed
    return None


def _removal_name(directory: Path) -> Path:
    """Return a fresh name for a directory that is to be deleted."""
    parsed = parse_hidden(directory)
    return hidden_name(parsed[0] if parsed else directory, REMOVED)


def is_missing(error: StorageError) -> bool:
    """Return whether an operation failed because its file or directory is missing."""
    return isinstance(error.__cause__, FileNotFoundError)


def is_name_taken(error: StorageError) -> bool:
    """Return whether a rename failed because its new name exists."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NAME_TAKEN


def staged_name(target: Path) -> Path:
    """Return the name beside which an export to ``target`` is staged: inside of a directory that exists.

    Links are followed: a link and its target may be on different file systems.

    Raises:
        StorageError: the operating system refused to look.
    """
    real = real_path(target)
    return real / (real.name or "export") if is_directory(real) else real


def commit_export(staging: Path, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Make a staging directory without a manifest an export, durably.

    Args:
        staging: from :func:`create_staging` for :func:`staged_name`, with all files written.
        target: the directory, without links.
        marks: names of files by one of which an export is recognised; staging holds one of them.
        is_old: whether a name in the target is that of a file of an export, which goes; all others stay.

    Raises:
        StorageError: something has taken the name since, or the operating system refused.
    """
    is_inside = staging.parent == target
    check_pair(staging, target / (target.name or "export") if is_inside else target)
    # Other libraries write parts of an export, such as a tokenizer, and do not sync them.
    for file in files_within(staging):
        fsync_file(file)
    for directory in directories_within(staging):
        fsync_directory(directory)
    if is_inside:
        _move_in(staging, target, marks, is_old)
        # The export is there; the next one deletes the rest of its staging directory.
        with contextlib.suppress(StorageError):
            discard(staging)
        return
    if is_taken(target):
        raise StorageError(
            f"{target} exists already and is not empty.",
            where=str(target),
            next_step="Choose another directory, or remove this one; nothing in it was changed.",
        )
    rename(staging, target)
    make_durable(target)


def _move_in(staging: Path, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Move the files of an export, one by one, into a directory that may hold others."""
    own = [path.relative_to(staging) for path in files_within(staging) if path.name != OWNER_NAME]
    for name in marks:
        remove_file(target / name)
    fsync_directory(target)
    first = [path for path in own if path.name == CHECKSUMS_NAME]
    for path in list_directory(target):
        # A crash right after a rename has left the record of its owner.
        if path.name == OWNER_NAME or (is_old(path.name) and not (first and path.name == CHECKSUMS_NAME)):
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
