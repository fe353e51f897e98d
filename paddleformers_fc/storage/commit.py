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
name back. So ``aside`` always means complete, and at every instant a complete checkpoint of the step can be found.

Files of somebody else found under the target's name (another program's checkpoint, notes) are moved to a visible
``kept-...`` name and never deleted.

One process per save, the coordinator, calls the functions of this module; the other ranks only write files into the
directory that :func:`create_staging` returned. If a save fails, the coordinator calls :func:`discard`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

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
    remove_file,
    remove_tree,
    rename,
)
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from paddleformers_fc.storage.names import ASIDE, REMOVED, UNFINISHED, beside, kept, parse_beside
from paddleformers_fc.storage.owner import OWNER_NAME, PARTIAL_OWNER_NAME, Life, life_of, read_owner, write_owner

_ATTEMPTS = 8


@dataclass(frozen=True)
class Committed:
    """What a commit did.

    Attributes:
        path: the checkpoint under its final name.
        kept: where somebody else's files, found under that name, are now; None if there were none.
        left: a directory that is no longer needed and could not be deleted; None normally. The next save tries again.
    """

    path: Path
    kept: Path | None = None
    left: Path | None = None


@dataclass(frozen=True)
class Leftover:
    """A hidden directory beside the checkpoints.

    Attributes:
        path: the directory.
        target: the name it was meant for.
        why: what it is, one sentence for the reader.
        disposable: whether it is proved that nobody needs it.
    """

    path: Path
    target: Path
    why: str
    disposable: bool


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
        except StorageError as error:
            # Another process that cleans up may take the directory away as long as it has no owner.
            if isinstance(error.__cause__, FileNotFoundError) and attempt + 1 < _ATTEMPTS:
                continue
            raise
        break
    fsync_directory(target.parent)
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
    _check_pair(staging, target)
    verify_files(staging, read_manifest(staging), "size")
    for directory in directories_within(staging):
        fsync_directory(directory)
    if _is_finished(target):
        old = _swap(staging, target)
        _settle(target)
        return Committed(target, left=_try_remove(old))
    foreign = _set_aside(target)
    rename(staging, target)
    _settle(target)
    return Committed(target, kept=foreign)


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

    Raises:
        StorageError: it is not a staging directory, or the operating system refused.
    """
    parsed = parse_beside(staging)
    if parsed is None or parsed[1] != UNFINISHED:
        raise StorageError(f"{staging} is not a staging directory and is not deleted.", where=str(staging))
    if is_directory(staging):
        remove_checkpoint(staging)


def remove_checkpoint(directory: Path) -> None:
    """Delete a directory in such a way that a crash in the midst never leaves half of it under its name.

    Raises:
        StorageError: the operating system refused.
    """
    remove_tree(_doom(directory))


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
        Those deleted, and those left because their process lives or may live.

    Raises:
        StorageError: the operating system refused.
    """
    leftovers = unfinished(output_dir)
    removed = [one for one in leftovers if one.disposable and _remove_unless_gone(one.path)]
    return removed, [one for one in leftovers if not one.disposable]


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
        if _is_finished(path) and not _is_finished(target):
            _set_aside(target)
            rename(path, target)
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


def _swap(staging: Path, target: Path) -> Path:
    """Put one complete directory in the place of another; where the old one is now."""
    # A mark left in the old checkpoint would make it look like somebody's unfinished directory.
    remove_file(target / OWNER_NAME)
    if exchange(staging, target):
        return staging
    old = beside(target, ASIDE)
    rename(target, old)
    try:
        rename(staging, target)
    except StorageError:
        rename(old, target)
        raise
    return old


def _is_taken(target: Path) -> bool:
    """Whether anything but an empty directory has the name."""
    if target.is_symlink():
        return True
    return bool(list_directory(target)) if is_directory(target) else target.exists()


def _set_aside(target: Path) -> Path | None:
    """Move what has the target's name out of the way; where it is now, None if there was nothing."""
    if not _is_taken(target):
        return None
    place = kept(target)
    rename(target, place)
    return place


def _settle(target: Path) -> None:
    """Make the new name durable, then drop the mark of its maker."""
    fsync_directory(target.parent)
    # The directory is committed; a mark that stays is ignored by every reader.
    with contextlib.suppress(StorageError):
        remove_file(target / OWNER_NAME)


def _try_remove(directory: Path) -> Path | None:
    # The new checkpoint is safe; that the old one resists (a reader on NFS holds a file) must not fail the save.
    try:
        directory = _doom(directory)
        remove_tree(directory)
    except StorageError:
        return directory
    return None


def _remove_unless_gone(directory: Path) -> bool:
    """Whether this call removed it, and not another process that cleans at the same time."""
    try:
        remove_checkpoint(directory)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True


def _doom(directory: Path) -> Path:
    """Take a directory's name away, durably; what is to be deleted now."""
    parsed = parse_beside(directory)
    doomed = beside(parsed[0] if parsed else directory, REMOVED)
    rename(directory, doomed)
    fsync_directory(doomed.parent)
    return doomed


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
    if state == ASIDE and not _is_finished(target):
        return Leftover(path, target, f"It is complete; recover() gives it the name {target.name} back.", False)
    if state == ASIDE or (life is None and _is_finished(path) and _is_finished(target)):
        return Leftover(path, target, "It was replaced by a newer save of the same step.", True)
    if life is Life.DEAD:
        return Leftover(path, target, "Its process died before it was finished.", True)
    if all(entry.name == PARTIAL_OWNER_NAME for entry in list_directory(path)):
        return Leftover(path, target, "It is empty.", True)
    return Leftover(path, target, "It does not say whose it is.", False)
