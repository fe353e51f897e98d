"""The commit of an export, whose target may hold files of other programs.

A new export gets its name by one rename. An older one is replaced by an exchange of names if both directories hold
nothing but files. Otherwise its files are moved one by one, and the mark by which readers recognise an export is
deleted first and moved last. Its checksums are there throughout, so that readers of numbered files, which need no mark,
do not mistake parts of two exports for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.commit import check_pair, discard, is_taken, make_durable, try_remove
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
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
    real_path,
    remove_file,
    rename,
    stat_path,
    write_file,
)
from paddleformers_fc.storage.staging_lock import OWNER_NAME, PARTIAL_OWNER_NAME, write_owner


def staging_parent(target: Path) -> Path:
    """Return the name beside which an export to ``target`` is staged, so that its files can be renamed into place.

    Links are followed: a link and its target may be on different file systems. For a mounted directory, or one whose
    parent is not writable, it is a name inside of it.

    Raises:
        StorageError: the operating system refused to look.
    """
    real = real_path(target)
    return real / (real.name or "export") if is_directory(real) and is_mount_point(real) else real


def commit_export(staging: Path, target: Path) -> None:
    """Give a staging directory without a manifest (an export) its final name, durably.

    Args:
        staging: from :func:`create_staging`, with all files written.
        target: the name it was created for; absent, or an empty directory.

    Raises:
        StorageError: ``target`` holds something, or the operating system refused. The target is unchanged.
    """
    check_pair(staging, target)
    if is_taken(target):
        raise StorageError(
            f"{target} exists already and is not empty.",
            where=str(target),
            next_step="Choose another directory, or remove this one; nothing in it was changed.",
        )
    # Other libraries write parts of an export, such as a tokenizer, and do not sync them.
    for file in files_within(staging):
        fsync_file(file)
    for directory in directories_within(staging):
        fsync_directory(directory)
    rename(staging, target)
    make_durable(target)


def replace_export(staging: Path, target: Path, marks: Sequence[str], is_old: Callable[[str], bool]) -> None:
    """Replace an older export by a staging directory without a manifest, durably.

    If the target contains only files, it and the staging directory are exchanged in one step, and at every instant one
    of the two is complete. A target with directories (a run's output, with its checkpoints) keeps its name. The mark of
    the old export is then deleted first, and that of the new one is added last: after a crash in between, the directory
    is not mistaken for an export.

    Args:
        staging: from :func:`create_staging`, with all files written and synced.
        target: the name it was created for, or the directory that it was created in; one that holds something.
        marks: names of files by one of which an export is recognised; staging holds one of them.
        is_old: whether a name in the target is that of a file of an export, which goes; all others stay.

    Raises:
        StorageError: the operating system refused.
    """
    check_pair(staging, target if staging.parent != target else target / (target.name or "export"))
    own = [path.relative_to(staging) for path in files_within(staging) if path.name != OWNER_NAME]
    for directory in directories_within(staging):
        fsync_directory(directory)
    if not _exchanged(staging, target, {*map(str, own)}, is_old):
        _moved_in(staging, target, own, marks, is_old)
        # The export is there; the next one deletes the rest of its staging directory.
        with contextlib.suppress(StorageError):
            discard(staging)


def _exchanged(staging: Path, target: Path, own: set[str], is_old: Callable[[str], bool]) -> bool:
    """Exchange an export with its target and return whether that was possible; files that stay are then in both."""
    inside = list_directory(target)
    if not _is_alike(staging, target) or any(path.is_symlink() or is_directory(path) for path in inside):
        return False
    stay = [path for path in inside if path.name not in (OWNER_NAME, PARTIAL_OWNER_NAME)]
    stay = [path for path in stay if path.name not in own and not is_old(path.name)]
    if not all(link(path, staging / path.name) for path in stay):
        return False
    fsync_directory(staging)
    # After the exchange the old one has the name of a staging directory; cleanup needs its owner record.
    remove_file(target / PARTIAL_OWNER_NAME)  # A crash has left it.
    write_owner(target)
    if not exchange(staging, target):
        remove_file(target / OWNER_NAME)
        return False
    try:
        make_durable(target)
    except StorageError:
        # The old one may be what is there after a crash; without an owner record it is never deleted.
        remove_file(staging / OWNER_NAME)
        raise
    for path in list_directory(staging):
        known = path.name in own or is_old(path.name) or path.name in (OWNER_NAME, PARTIAL_OWNER_NAME)
        if not known and not _is_same(path, target / path.name):
            rename(path, target / path.name)  # Another process has put it there since the directory was listed.
    try_remove(staging)
    return True


def _is_same(path: Path, other: Path) -> bool:
    one, two = stat_path(path), stat_path(other)
    return None not in (one, two) and all(getattr(one, name) == getattr(two, name) for name in ("st_dev", "st_ino"))


def _is_alike(staging: Path, target: Path) -> bool:
    """Return whether a directory can replace another, which is no link and has the same owner and permissions."""
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
    first = [path for path in own if path.name == CHECKSUMS_NAME]
    for path in list_directory(target):
        if is_old(path.name) and not (first and path.name == CHECKSUMS_NAME):
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


def _try_to_move(staging: Path, target: Path) -> None:
    """Check that files can be renamed from one directory into another, before anything there is removed.

    The trial name is ignored by readers, and the next export deletes it if a crash leaves it.
    """
    write_file(staging / PARTIAL_OWNER_NAME, b"", root=staging)
    rename(staging / PARTIAL_OWNER_NAME, target / PARTIAL_OWNER_NAME)
    remove_file(target / PARTIAL_OWNER_NAME)
