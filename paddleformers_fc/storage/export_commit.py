"""The commit of an export, by renames alone.

A new directory is staged beside its name and renamed. A directory that exists, which may hold files of other programs
and be mounted, keeps its identity: the export is staged inside of it, and its files are renamed one by one. The mark by
which readers recognise an export is deleted first and renamed last, so that after a crash in between the directory is
not an export. Its checksums are there throughout, so that readers of numbered files, which need no mark, do not mistake
parts of two exports for one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.commit import check_pair, discard, is_taken, make_durable
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.files import (
    directories_within,
    files_within,
    fsync_directory,
    fsync_file,
    is_directory,
    list_directory,
    make_directories,
    real_path,
    remove_file,
    rename,
)
from paddleformers_fc.storage.staging_lock import OWNER_NAME


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
