"""The life of a checkpoint directory: staged, committed, replaced, cleaned up, removed.

A checkpoint appears under its name as a whole or not at all. It is written into a hidden sibling directory (*staging*),
and one rename gives it its name once every file, every directory and the manifest are on the device. After a crash at
any instant there is:

================  ================================================================
up to the rename  the target as it was; a directory named ``unfinished``
after the rename  the new checkpoint
================  ================================================================

Saving a step again (after a resume) must replace a finished checkpoint, which is never written into. Both are complete
directories then, and if the system supports it, staging and target are exchanged atomically. A crash right after
leaves the new checkpoint under its name and the old one named ``unfinished``, without an owner: it was replaced and can
be cleaned up.

Otherwise it takes two renames, target to ``aside`` and staging to target. A crash between them leaves no target, but
the old checkpoint aside: ``newest_checkpoint`` returns that one, and :func:`recover` restores its name. So at every
instant a complete checkpoint of the step can be found.

Files of other programs found under the target's name (another checkpoint format, notes) are moved to a visible
``kept-...`` name and never deleted.

Other jobs may work in the same directory, even on the same step. No decision uses an earlier look: a name is taken with
one operation, and only then its former content is inspected. A name that another job has taken meanwhile is taken from
it in turn. The last to commit has the name, each time with a complete checkpoint.

One process per save and disk, the coordinator, calls the functions of this module; the other ranks only write files
into the directory that :func:`create_staging` returned. If a save fails, the coordinator calls :func:`discard`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace as changed
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
    is_mount_point,
    link,
    list_directory,
    make_directories,
    make_directory,
    real_path,
    remove_empty_directory,
    remove_file,
    remove_tree,
    rename,
    stat_path,
    write_file,
)
from paddleformers_fc.storage.manifest import read_manifest, verify_files
from paddleformers_fc.storage.names import (
    ASIDE,
    REMOVED,
    UNFINISHED,
    backup_name,
    hidden_name,
    parse_hidden,
    parse_kept,
)
from paddleformers_fc.storage.staging_lock import (
    OWNER_NAME,
    PARTIAL_OWNER_NAME,
    ProcessState,
    is_own,
    process_state,
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
        kept: where the files of other programs that had that name are now.
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
        disposable: whether it is proved to be unused.
        nameless: whether it is empty and has no owner record yet; its process may be alive.
        removable: whether it may be deleted when a user confirms: no process of this machine writes it, and it is no
            checkpoint that has only lost its name.
    """

    path: Path
    target: Path
    why: str
    disposable: bool
    nameless: bool = False
    removable: bool = False


def staging_parent(target: Path) -> Path:
    """The name beside which an export to ``target`` is staged, so that its files can be renamed to where they belong.

    Links are followed: what is staged beside a link may be on another file system than what it leads to. For a
    mounted directory, or one whose parent is not writable, it is a name inside of it.

    Raises:
        StorageError: the operating system refused to look.
    """
    real = real_path(target)
    return real / (real.name or "export") if is_directory(real) and is_mount_point(real) else real


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
        staging = hidden_name(target, UNFINISHED)
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
        target: the name it was created for. A finished checkpoint there is replaced; other files are kept aside, and so
            is a checkpoint whose tied tensors are equal where those of the new one differ.

    Raises:
        NotACheckpoint, FormatError, Corrupt: staging has no manifest, or not the files its manifest lists. Nothing was
            renamed.
        StorageError: the operating system refused. ``target`` is the old or the new checkpoint, never a mixture.
    """
    prepare_commit(staging, target)
    return finish_commit(staging, target)


def prepare_commit(staging: Path, target: Path, elsewhere: Collection[str] = ()) -> None:
    """The part of :func:`commit` that may take long and may fail: see that all is there, and bring it to the device.

    Args:
        staging: as for :func:`commit`.
        target: as for :func:`commit`.
        elsewhere: listed files that are on other disks, where other ranks have written them.
    """
    _check_pair(staging, target)
    manifest = read_manifest(staging)
    here = [checksum for checksum in manifest.files if checksum.path not in elsewhere]
    verify_files(staging, msgspec.structs.replace(manifest, files=here), "size", documents=())
    for directory in directories_within(staging):
        fsync_directory(directory)


def finish_commit(staging: Path, target: Path) -> Committed:
    """The rest of :func:`commit`: the name, for a directory that is ready."""
    _check_pair(staging, target)
    displaced = _displacing(staging, target)
    _settle(target)
    old = [path for path in displaced if _is_finished(path) and not _is_only_whole(path, target)]
    kept = [_made_visible(path, target) for path in displaced if path not in old]
    return Committed(target, tuple(kept), tuple(path for path in map(_try_remove, old) if path is not None))


def commit_export(staging: Path, target: Path) -> None:
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


def replace_export(staging: Path, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Let a staging directory without a manifest (an export) take the place of an older one, durably.

    Where the target holds nothing but files, it and the staging directory are exchanged in one step, and at every
    instant one of the two is there as a whole. A target that holds directories (a run's output, with its checkpoints)
    keeps its name: then the old export loses its mark first, and the new one gets its own last, so that a crash in the
    midst leaves a directory that is not mistaken for an export.

    Args:
        staging: from :func:`create_staging`, with all files written and synced.
        target: the name it was created for, or the directory that it was created in; one that holds something.
        marks: names of files by one of which an export is recognised; staging holds one of them.
        is_old: whether a name in the target is that of a file of an export, which goes; all others stay.

    Raises:
        StorageError: the operating system refused.
    """
    _check_pair(staging, target if staging.parent != target else target / (target.name or "export"))
    own = [path.relative_to(staging) for path in files_within(staging) if path.name != OWNER_NAME]
    for directory in directories_within(staging):
        fsync_directory(directory)
    if not _exchanged(staging, target, {*map(str, own)}, is_old):
        _moved_in(staging, target, own, marks, is_old)
        # The export is there; what is left of its staging directory goes with the next one.
        with contextlib.suppress(StorageError):
            discard(staging)


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
    """Delete a directory in such a way that a crash in the midst never leaves half of it under its name.

    Raises:
        StorageError: the operating system refused.
    """
    doomed = _removal_name(directory)
    rename(directory, doomed)
    fsync_directory(doomed.parent)
    remove_tree(doomed)


def unfinished(output_dir: Path) -> list[Leftover]:
    """Every hidden directory beside the checkpoints of ``output_dir``: saves that run now, and what crashes left.

    Raises:
        StorageError: the operating system refused to look into ``output_dir``.
    """
    found = [(path, parse_hidden(path)) for path in list_directory(output_dir)]
    return [_leftover_of(path, *parsed) for path, parsed in found if parsed is not None and is_directory(path)]


def leftovers(output_dir: Path) -> list[Leftover]:
    """List the directories beside the checkpoints that saves have left, or moved files of other programs to.

    Raises:
        StorageError: the operating system refused to look into ``output_dir``.
    """
    moved = [(path, parse_kept(path)) for path in list_directory(output_dir)]
    kept_ones = [_judged_kept(path, target) for path, target in moved if target is not None and is_directory(path)]
    return [*unfinished(output_dir), *kept_ones]


def remove_leftover(path: Path) -> bool:
    """Delete a directory of :func:`leftovers` after looking at it again; whether it was deleted.

    Raises:
        StorageError: the operating system refused.
    """
    found = next((one for one in leftovers(path.parent) if one.path == path), None)
    if found is None or not found.removable:
        return False
    return _remove_nameless(path) if found.nameless else _remove_unless_gone(path)


def clean_unfinished(output_dir: Path) -> tuple[list[Leftover], list[Leftover]]:
    """Delete the hidden directories that are proved to be unused.

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
            left.append(changed(one, why=f"{one.why} It cannot be deleted: {error.what}"))
    return removed, left


def recover(output_dir: Path) -> list[Path]:
    """Finish the replacements that a crash interrupted; the checkpoints that got their name back.

    Called by the coordinator before it looks for a checkpoint to resume from.

    Raises:
        StorageError: the operating system refused.
    """
    recovered: list[Path] = []
    for path in list_directory(output_dir):
        parsed = parse_hidden(path)
        if parsed is None or parsed[1] != ASIDE or _owner_state(path) is ProcessState.ALIVE:
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
    if parse_hidden(staging) != (target, UNFINISHED):
        raise StorageError(
            f"{staging} was not staged for {target}.",
            where=str(staging),
            next_step="Commit the directory that create_staging returned, to the target it was given.",
        )


def _is_only_whole(old: Path, new: Path) -> bool:
    """Whether a checkpoint with equal copies of tied tensors was replaced by one whose copies differ."""
    return bool(read_manifest(new).ties) and not read_manifest(old).ties


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
                # A record left in an old checkpoint would make it look like a staging directory.
                remove_file(target / OWNER_NAME)
            if exchange(staging, target):
                return [*displaced, staging]
            displaced.extend(_move_to_backup(target))
        try:
            rename(staging, target)
        except StorageError as error:
            # Another job has taken the name since.
            if _is_in_the_way(error) and attempt + 1 < _ATTEMPTS:
                continue
            _restore_backup(displaced, target)
            raise
        break
    return displaced


def _move_to_backup(target: Path) -> Iterator[Path]:
    """Move what has a name out of the way; where it is now, nothing if another job did it first."""
    old = hidden_name(target, ASIDE)
    try:
        rename(target, old)
    except StorageError as error:
        if not _is_gone(error):
            raise
    else:
        yield old


def _restore_backup(displaced: Sequence[Path], target: Path) -> None:
    # What keeps its hidden name is found there, and the next start gives it its name back; the first error counts.
    for old in reversed(displaced):
        with contextlib.suppress(StorageError):
            rename(old, target)
            return


def _exchanged(staging: Path, target: Path, own: set[str], is_old: Callable[[str], bool]) -> bool:
    """Whether an export and what is under its target's name could be exchanged; what is to stay is in both then."""
    inside = list_directory(target)
    if not _is_alike(staging, target) or any(path.is_symlink() or is_directory(path) for path in inside):
        return False
    stay = [path for path in inside if path.name not in (OWNER_NAME, PARTIAL_OWNER_NAME)]
    stay = [path for path in stay if path.name not in own and not is_old(path.name)]
    if not all(link(path, staging / path.name) for path in stay):
        return False
    fsync_directory(staging)
    # From the exchange on the old one has the name of a staging directory; cleanup needs its owner record.
    remove_file(target / PARTIAL_OWNER_NAME)  # A crash has left it.
    write_owner(target)
    if not exchange(staging, target):
        remove_file(target / OWNER_NAME)
        return False
    try:
        _settle(target)
    except StorageError:
        # The old one may be what is there after a crash; without an owner record it is never deleted.
        remove_file(staging / OWNER_NAME)
        raise
    for path in list_directory(staging):
        known = path.name in own or is_old(path.name) or path.name in (OWNER_NAME, PARTIAL_OWNER_NAME)
        if not known and not _is_same(path, target / path.name):
            rename(path, target / path.name)  # Another process has put it there since the directory was listed.
    _try_remove(staging)
    return True


def _is_same(path: Path, other: Path) -> bool:
    one, two = stat_path(path), stat_path(other)
    return None not in (one, two) and all(getattr(one, name) == getattr(two, name) for name in ("st_dev", "st_ino"))


def _is_alike(staging: Path, target: Path) -> bool:
    """Whether a directory can stand in for another: that one is no link to it, and of the same owner and rights."""
    if target.is_symlink():
        return False
    one, other = stat_path(staging), stat_path(target)
    return all(getattr(one, name) == getattr(other, name) for name in ("st_mode", "st_uid", "st_gid", "st_dev"))


def _moved_in(
    staging: Path, target: Path, own: list[Path], marks: Sequence[str], is_old: Callable[[str], bool]
) -> None:
    """Move the files of an export, one by one, into a directory that holds others."""
    _try_to_move(staging, target)
    for name in marks:
        remove_file(target / name)
    fsync_directory(target)
    for path in list_directory(target):
        if is_old(path.name):
            remove_file(path)
    last = [path for path in own if str(path) in marks]
    for path in sorted(set(own).difference(last)):
        make_directories((target / path).parent)
        rename(staging / path, target / path)
    for directory in {path.parent for path in own}:
        fsync_directory(target / directory)
    for path in last:
        rename(staging / path, target / path)
    fsync_directory(target)


def _try_to_move(staging: Path, target: Path) -> None:
    """See that files of one directory can be renamed into another, before anything there is given up for them.

    Under a name that no reader takes for anything, and that the next export clears away if a crash leaves it.
    """
    write_file(staging / PARTIAL_OWNER_NAME, b"", root=staging)
    rename(staging / PARTIAL_OWNER_NAME, target / PARTIAL_OWNER_NAME)
    remove_file(target / PARTIAL_OWNER_NAME)


def _is_taken(target: Path) -> bool:
    """Whether anything but an empty directory has the name."""
    if target.is_symlink():
        return True
    return bool(list_directory(target)) if is_directory(target) else target.exists()


def _made_visible(foreign: Path, target: Path) -> Path:
    """Give files of other programs, which had the target's name, a visible name."""
    place = backup_name(target)
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
    doomed = _removal_name(directory)
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
    """Delete a directory only if it still has no owner record; return whether it was deleted.

    Not by renaming it first, for its maker may be just about to write his name. Without the partial record, or the
    directory, he fails and starts again; once the record has its name, the directory is not empty and stays.
    """
    remove_file(directory / PARTIAL_OWNER_NAME)
    return remove_empty_directory(directory)


def _removal_name(directory: Path) -> Path:
    """A fresh name for a directory that is to be deleted."""
    parsed = parse_hidden(directory)
    return hidden_name(parsed[0] if parsed else directory, REMOVED)


def _is_gone(error: StorageError) -> bool:
    return isinstance(error.__cause__, FileNotFoundError)


def _is_in_the_way(error: StorageError) -> bool:
    """Return whether a rename failed because its new name exists."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _IN_THE_WAY


def _owner_state(directory: Path) -> ProcessState | None:
    """Whether the directory's owner lives; None if it has no readable record."""
    owner = read_owner(directory)
    return None if owner is None else process_state(owner)


def _leftover_of(path: Path, target: Path, state: str) -> Leftover:
    try:
        return _judge_leftover(path, target, state)
    except StorageError as error:
        # Another user's, in a directory of several users, or on a part of the disk that is broken: it stops no save.
        return Leftover(path, target, f"It cannot be looked at: {error.what}", False)


def _judged_kept(path: Path, target: Path) -> Leftover:
    try:
        finished = _is_finished(path)
    except StorageError as error:
        return Leftover(path, target, f"It cannot be looked at: {error.what}", False)
    if finished:
        return Leftover(path, target, "It is a checkpoint.", False)
    why = f"It holds files of another program that were found as {target.name}."
    return Leftover(path, target, why, False, removable=True)


def _judge_leftover(path: Path, target: Path, state: str) -> Leftover:
    found = _judge_owner(path, target, state)
    alive = _owner_state(path) is ProcessState.ALIVE
    # A checkpoint that has only lost its name is one.
    lost = state != REMOVED and _is_finished(path) and not _is_finished(target)
    return changed(found, removable=found.disposable or not (alive or lost))


def _judge_owner(path: Path, target: Path, state: str) -> Leftover:
    owner_state = _owner_state(path)
    if state == REMOVED:
        return Leftover(path, target, "Its deletion was interrupted.", True)
    if owner_state is ProcessState.ALIVE or owner_state is ProcessState.UNKNOWN:
        owner = read_owner(path)
        who = f"process {owner.pid} on {owner.host}" if owner else "a process"
        runs = "runs" if owner_state is ProcessState.ALIVE else "may run: it was started elsewhere"
        return Leftover(path, target, f"It belongs to {who}, which {runs}.", False)
    if owner_state is None and _is_finished(path):
        if _is_finished(target):
            return Leftover(path, target, "It was replaced by a newer save of the same step.", True)
        if state == ASIDE:
            return Leftover(path, target, f"It is complete; recover() gives it the name {target.name} back.", False)
        why = f"It is complete, and the save that replaced it is gone; rename it to {target.name}, or delete it."
        return Leftover(path, target, why, False)
    if owner_state is ProcessState.DEAD:
        return Leftover(path, target, "Its process died before it was finished.", True)
    if state == UNFINISHED and all(entry.name == PARTIAL_OWNER_NAME for entry in list_directory(path)):
        return Leftover(path, target, "It is empty.", True, nameless=True)
    return Leftover(path, target, "It has no owner record.", False)
