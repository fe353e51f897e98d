"""The life of a checkpoint directory: staged, committed, replaced, cleaned up, removed.

A checkpoint appears under its name whole or not at all. It is written into a hidden sibling directory (*staging*), and
one rename gives it its name once every file, every directory and the manifest are on the device. What a crash, at any
instant, leaves behind:

================  ================================================================
up to the rename  the target as it was; a directory named ``unfinished``
after the rename  the new checkpoint
================  ================================================================

Saving a step again (after a resume) must replace a finished checkpoint, which is never written into. Both are complete
directories then, and where the system can do it, staging and target are exchanged atomically. A crash right after
leaves the new checkpoint under its name and the old one named ``unfinished``, without an owner: it was replaced and can
be cleaned away.

Where names cannot be exchanged it takes two renames, target to ``aside`` and staging to target. A crash between them
leaves no target, but the old checkpoint aside: ``newest_checkpoint`` returns that one, and :func:`recover` gives it its
name back. So at every instant a complete checkpoint of the step can be found.

Files of somebody else found under the target's name (another program's checkpoint, notes) are moved to a visible
``kept-...`` name and never deleted.

Other jobs may work in the same directory, even on the same step. Nothing is decided by what was seen before: a name is
taken with one operation, and only then is it looked at what had it; a name that meanwhile is somebody else's is taken
from that one in its turn. The last to commit has the name, each time whole.

One process per save and disk, the coordinator, calls the functions of this module; the other ranks only write files
into the directory that :func:`create_staging` returned. If a save fails, the coordinator calls :func:`discard`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paddleformers_fc.errors import CheckpointError, StorageError
from paddleformers_fc.storage.files import (
    directories_within,
    exchange,
    files_within,
    fsync_directory,
    fsync_file,
    is_directory,
    list_directory,
    make_directories,
    make_directory,
    remove_empty_directory,
    remove_file,
    remove_tree,
    rename,
)
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from paddleformers_fc.storage.names import ASIDE, REMOVED, UNFINISHED, beside, kept, parse_beside
from paddleformers_fc.storage.owner import (
    OWNER_NAME,
    PARTIAL_OWNER_NAME,
    Life,
    is_own,
    life_of,
    read_owner,
    write_owner,
)

_ATTEMPTS = 8
_IN_THE_WAY = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR})


@dataclass(frozen=True)
class Committed:
    """What a commit did.

    Attributes:
        path: the checkpoint under its final name.
        kept: where somebody else's files, found under that name, are now.
        left: what is no longer needed and could not be deleted; the next save tries again.
    """

    path: Path
    kept: tuple[Path, ...] = ()
    left: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Leftover:
    """A hidden directory beside the checkpoints.

    Attributes:
        path: the directory.
        target: the name it was meant for.
        why: what it is, one sentence for the reader.
        disposable: whether it is proved that nobody needs it.
        nameless: whether it is empty and its maker, who may live, has not yet said whose it is.
    """

    path: Path
    target: Path
    why: str
    disposable: bool
    nameless: bool = False


def create_staging(target: Path) -> Path:
    """A fresh directory beside ``target``, marked as this process's, to write a checkpoint into.

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
        staging = beside(target, UNFINISHED)
        make_directory(staging)
        try:
            write_owner(staging)
            fsync_directory(target.parent)
        except StorageError as error:
            with contextlib.suppress(StorageError):
                remove_tree(staging)
            # Another process that cleans up may take the directory away as long as it has no owner.
            if not _is_gone(error) or attempt + 1 == _ATTEMPTS:
                raise
        else:
            break
    return staging


def commit(staging: Path, target: Path) -> Committed:
    """Give a complete staging directory its final name, durably.

    Args:
        staging: from :func:`create_staging`, with all files and the manifest written.
        target: the name it was created for. A finished checkpoint there is replaced; other files are kept aside.

    Raises:
        NotACheckpoint, FormatError, Corrupt: staging has no manifest, or not the files its manifest lists. Nothing was
            renamed.
        StorageError: the operating system refused. ``target`` is the old or the new checkpoint, never a mixture.
    """
    make_ready(staging, target)
    return take_name(staging, target)


def make_ready(staging: Path, target: Path, elsewhere: Collection[str] = ()) -> None:
    """The part of :func:`commit` that may take long and may fail: see that all is there, and bring it to the device.

    Args:
        staging: as for :func:`commit`.
        target: as for :func:`commit`.
        elsewhere: listed files that are on other disks, where other ranks have written them.
    """
    _check_pair(staging, target)
    manifest = read_manifest(staging)
    here = [receipt for receipt in manifest.files if receipt.path not in elsewhere]
    verify_files(staging, msgspec.structs.replace(manifest, files=here), "size")
    for directory in directories_within(staging):
        fsync_directory(directory)


def take_name(staging: Path, target: Path) -> Committed:
    """The rest of :func:`commit`: the name, for a directory that is ready."""
    _check_pair(staging, target)
    displaced = _displacing(staging, target)
    _settle(target)
    old = [path for path in displaced if _is_finished(path)]
    kept = [_made_visible(path, target) for path in displaced if path not in old]
    return Committed(target, tuple(kept), tuple(path for path in map(_try_remove, old) if path is not None))


def publish(staging: Path, target: Path) -> None:
    """Give a staging directory without a manifest (an export) its final name, durably.

    Args:
        staging: from :func:`create_staging`, with all files written.
        target: the name it was created for; absent, or an empty directory.

    Raises:
        StorageError: ``target`` holds something, or the operating system refused. Nothing under it was changed.
    """
    _check_pair(staging, target)
    if _is_taken(target):
        raise StorageError(
            f"{target} exists already and is not empty.",
            where=str(target),
            next_step="Choose another directory, or remove this one; nothing in it was changed.",
        )
    # Other libraries write parts of an export (a tokenizer, say) and do not sync them.
    for file in files_within(staging):
        fsync_file(file)
    for directory in directories_within(staging):
        fsync_directory(directory)
    rename(staging, target)
    _settle(target)


def discard(staging: Path) -> None:
    """Delete the staging directory of a save that failed; harmless if it is gone.

    A rank that is still writing into it gets a :class:`StorageError`, and nothing that it writes comes back to life.
    Where a commit failed after names were exchanged, another checkpoint has the staging directory's name; only what
    this process has made is deleted.

    Raises:
        StorageError: it is not a staging directory, or the operating system refused.
    """
    parsed = parse_beside(staging)
    if parsed is None or parsed[1] != UNFINISHED:
        raise StorageError(f"{staging} is not a staging directory and is not deleted.", where=str(staging))
    if is_directory(staging) and is_own(staging):
        remove_checkpoint(staging)


def remove_checkpoint(directory: Path) -> None:
    """Delete a directory in such a way that a crash in the midst never leaves half of it under its name.

    Raises:
        StorageError: the operating system refused.
    """
    doomed = _doomed(directory)
    rename(directory, doomed)
    fsync_directory(doomed.parent)
    remove_tree(doomed)


def unfinished(output_dir: Path) -> list[Leftover]:
    """Every hidden directory beside the checkpoints of ``output_dir``: saves that run now, and what crashes left.

    Raises:
        StorageError: the operating system refused to look.
    """
    found = [(path, parse_beside(path)) for path in list_directory(output_dir)]
    return [_judge(path, *parsed) for path, parsed in found if parsed is not None and is_directory(path)]


def clean_unfinished(output_dir: Path) -> tuple[list[Leftover], list[Leftover]]:
    """Delete the hidden directories that are proved to be needed by nobody.

    Args:
        output_dir: where the checkpoints are.

    Returns:
        Those deleted, and those left because their process lives or may live, or because they could not be deleted.

    Raises:
        StorageError: the operating system refused to look. That a leftover resists must not stop the next save.
    """
    removed: list[Leftover] = []
    left: list[Leftover] = []
    for one in unfinished(output_dir):
        if not one.disposable:
            left.append(one)
            continue
        try:
            if _remove_nameless(one.path) if one.nameless else _remove_unless_gone(one.path):
                removed.append(one)
        except StorageError as error:
            left.append(replace(one, why=f"{one.why} It cannot be deleted: {error.what}"))
    return removed, left


def recover(output_dir: Path) -> list[Path]:
    """Finish the replacements that a crash interrupted; the checkpoints that got their name back.

    Called by the coordinator before it looks for a checkpoint to resume from.

    Raises:
        StorageError: the operating system refused.
    """
    recovered: list[Path] = []
    for path in list_directory(output_dir):
        parsed = parse_beside(path)
        if parsed is None or parsed[1] != ASIDE or _life(path) is Life.ALIVE:
            continue
        target = parsed[0]
        if not _is_finished(path) or _is_taken(target):
            continue
        try:
            rename(path, target)
        except StorageError as error:
            if _is_gone(error) or _is_in_the_way(error):
                continue  # Another process has given a name back, or has brought in a newer one.
            raise
        _settle(target)
        recovered.append(target)
    return recovered


def _check_pair(staging: Path, target: Path) -> None:
    if parse_beside(staging) != (target, UNFINISHED):
        raise StorageError(
            f"{staging} was not staged for {target}.",
            where=str(staging),
            next_step="Commit the directory that create_staging returned, to the target it was given.",
        )


def _is_finished(directory: Path) -> bool:
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def _displacing(staging: Path, target: Path) -> list[Path]:
    """Give a complete directory its name; where that is now which had the name before."""
    displaced: list[Path] = []
    for attempt in range(_ATTEMPTS):
        if _is_taken(target):
            if _is_finished(target):
                # A mark left in an old checkpoint would make it look like somebody's unfinished directory.
                remove_file(target / OWNER_NAME)
            if exchange(staging, target):
                return [*displaced, staging]
            displaced.extend(_moved_aside(target))
        try:
            rename(staging, target)
        except StorageError as error:
            # Another job has taken the name since.
            if _is_in_the_way(error) and attempt + 1 < _ATTEMPTS:
                continue
            _give_back(displaced, target)
            raise
        break
    return displaced


def _moved_aside(target: Path) -> Iterator[Path]:
    """Move what has a name out of the way; where it is now, nothing if another job did it first."""
    old = beside(target, ASIDE)
    try:
        rename(target, old)
    except StorageError as error:
        if not _is_gone(error):
            raise
    else:
        yield old


def _give_back(displaced: Sequence[Path], target: Path) -> None:
    # What keeps its hidden name is found there, and the next start gives it its name back; the first error counts.
    for old in reversed(displaced):
        with contextlib.suppress(StorageError):
            rename(old, target)
            return


def _is_taken(target: Path) -> bool:
    """Whether anything but an empty directory has the name."""
    if target.is_symlink():
        return True
    return bool(list_directory(target)) if is_directory(target) else target.exists()


def _made_visible(foreign: Path, target: Path) -> Path:
    """Give somebody else's files, which had the target's name, a name that people see."""
    place = kept(target)
    try:
        rename(foreign, place)
    except StorageError:
        return foreign  # The checkpoint is committed, and these are not deleted under any name.
    return place


def _settle(target: Path) -> None:
    """Make the new name durable, then drop the mark of its maker."""
    fsync_directory(target.parent)
    # The directory is committed; a mark that stays is ignored by every reader.
    with contextlib.suppress(StorageError):
        remove_file(target / OWNER_NAME)


def _try_remove(directory: Path) -> Path | None:
    # The new checkpoint is safe; that the old one resists (a reader on NFS holds a file) must not fail the save.
    doomed = _doomed(directory)
    try:
        rename(directory, doomed)
    except StorageError as error:
        return None if _is_gone(error) else directory
    try:
        fsync_directory(doomed.parent)
        remove_tree(doomed)
    except StorageError:
        return doomed
    return None


def _remove_unless_gone(directory: Path) -> bool:
    """Whether this call removed it, and not another process that cleans at the same time."""
    try:
        remove_checkpoint(directory)
    except StorageError as error:
        if _is_gone(error):
            return False
        raise
    return True


def _remove_nameless(directory: Path) -> bool:
    """Delete a directory only if nobody has put his name into it since; whether it was deleted.

    Not by renaming it first, for its maker may be just about to write his name. Without the partial record, or the
    directory, he fails and starts again; once the record has its name, the directory is not empty and stays.
    """
    remove_file(directory / PARTIAL_OWNER_NAME)
    return remove_empty_directory(directory)


def _doomed(directory: Path) -> Path:
    """A fresh name for a directory that is to be deleted."""
    parsed = parse_beside(directory)
    return beside(parsed[0] if parsed else directory, REMOVED)


def _is_gone(error: StorageError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def _is_in_the_way(error: StorageError) -> bool:
    """Whether a rename failed because its new name is somebody's."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _IN_THE_WAY


def _life(directory: Path) -> Life | None:
    """Whether the directory's owner lives; None if it has no readable record."""
    owner = read_owner(directory)
    return None if owner is None else life_of(owner)


def _judge(path: Path, target: Path, state: str) -> Leftover:
    life = _life(path)
    if state == REMOVED:
        return Leftover(path, target, "Its deletion was interrupted.", True)
    if life is Life.ALIVE or life is Life.UNKNOWN:
        owner = read_owner(path)
        who = f"process {owner.pid} on {owner.host}" if owner else "a process"
        runs = "runs" if life is Life.ALIVE else "may run: it was started elsewhere"
        return Leftover(path, target, f"It belongs to {who}, which {runs}.", False)
    if life is None and _is_finished(path):
        if _is_finished(target):
            return Leftover(path, target, "It was replaced by a newer save of the same step.", True)
        return Leftover(path, target, f"It is complete; recover() gives it the name {target.name} back.", False)
    if life is Life.DEAD:
        return Leftover(path, target, "Its process died before it was finished.", True)
    if state == UNFINISHED and all(entry.name == PARTIAL_OWNER_NAME for entry in list_directory(path)):
        return Leftover(path, target, "It is empty.", True, nameless=True)
    return Leftover(path, target, "It does not say whose it is.", False)
