"""Leftovers of saves: the hidden directories beside checkpoints that crashes left, and those that running saves use.

A leftover is judged by its name, its owner record (:mod:`.staging_lock`) and its manifest. It is deleted only if it is
proved to be unused. A checkpoint that lost its name in a crash between two renames gets the name back
(:func:`recover`). Files of other programs (``kept-...``) are deleted only when a user confirms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.commit import (
    is_finished,
    is_missing,
    is_name_taken,
    is_taken,
    make_durable,
    remove_checkpoint,
)
from paddleformers_fc.storage.files import is_directory, list_directory, remove_empty_directory, remove_file, rename
from paddleformers_fc.storage.paths import ASIDE, REMOVED, UNFINISHED, parse_hidden, parse_kept
from paddleformers_fc.storage.staging_lock import PARTIAL_OWNER_NAME, ProcessState, process_state, read_owner


@dataclass(frozen=True)
class Leftover:
    """A hidden directory beside the checkpoints.

    Attributes:
        path: the directory.
        target: the name it was meant for.
        why: its description, one sentence for the reader.
        disposable: whether it is proved to be unused.
        nameless: whether it is empty and has no owner record yet; its process may be alive.
        removable: whether it may be deleted after a user confirms: no process of this machine writes it, and it is not
            a finished checkpoint under a hidden name.
    """

    path: Path
    target: Path
    why: str
    disposable: bool
    nameless: bool = False
    removable: bool = False


def unfinished(output_dir: Path) -> list[Leftover]:
    """Return the hidden directories beside the checkpoints of ``output_dir``: of running saves, and of crashes.

    Raises:
        StorageError: the operating system refused to look into ``output_dir``.
    """
    found = [(path, parse_hidden(path)) for path in list_directory(output_dir)]
    return [
        _judged(path, parsed[0], partial(_judge, state=parsed[1]))
        for path, parsed in found
        if parsed is not None and is_directory(path)
    ]


def leftovers(output_dir: Path) -> list[Leftover]:
    """List the directories beside the checkpoints that saves have left, or moved files of other programs to.

    Raises:
        StorageError: the operating system refused to look into ``output_dir``.
    """
    moved = [(path, parse_kept(path)) for path in list_directory(output_dir)]
    kept_ones = [
        _judged(path, target, _judge_kept) for path, target in moved if target is not None and is_directory(path)
    ]
    return [*unfinished(output_dir), *kept_ones]


def remove_leftover(path: Path) -> bool:
    """Check a directory of :func:`leftovers` again and delete it; return whether it was deleted.

    Raises:
        StorageError: the operating system refused.
    """
    found = next((one for one in leftovers(path.parent) if one.path == path), None)
    if found is None or not found.removable:
        return False
    return _removed(found)


def clean_unfinished(output_dir: Path) -> tuple[list[Leftover], list[Leftover]]:
    """Delete the hidden directories that are proved to be unused.

    Args:
        output_dir: where the checkpoints are.

    Returns:
        Those deleted, and those left because their process is or may be alive, or because they could not be deleted.

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
            if _removed(one):
                removed.append(one)
        except StorageError as error:
            left.append(replace(one, why=f"{one.why} It cannot be deleted: {error.what}"))
    return removed, left


def recover(output_dir: Path) -> list[Path]:
    """Complete the replacements that a crash interrupted; return the checkpoints whose names were restored.

    The coordinator calls it before it searches for a checkpoint to resume from.

    Raises:
        StorageError: the operating system refused.
    """
    recovered: list[Path] = []
    for path in list_directory(output_dir):
        parsed = parse_hidden(path)
        if parsed is None or parsed[1] != ASIDE or _owner_state(path) is ProcessState.ALIVE:
            continue
        target = parsed[0]
        if not is_finished(path) or is_taken(target):
            continue
        try:
            rename(path, target)
        except StorageError as error:
            if is_missing(error) or is_name_taken(error):
                continue  # Another process has given a name back, or has brought in a newer one.
            raise
        make_durable(target)
        recovered.append(target)
    return recovered


def _removed(leftover: Leftover) -> bool:
    """Delete a leftover; return whether this call deleted it, and not another process that cleans up.

    A directory without an owner record is not renamed first, because its process may be about to write the record.
    Without the partial record, or the directory, that process fails and starts again. Once the record has its name, the
    directory is not empty and stays.
    """
    if leftover.nameless:
        remove_file(leftover.path / PARTIAL_OWNER_NAME)
        return remove_empty_directory(leftover.path)
    try:
        remove_checkpoint(leftover.path)
    except StorageError as error:
        if is_missing(error):
            return False
        raise
    return True


def _owner_state(directory: Path) -> ProcessState | None:
    """Return whether the directory's owner is alive; None if it has no readable record."""
    owner = read_owner(directory)
    return None if owner is None else process_state(owner)


def _judged(path: Path, target: Path, judge: Callable[[Path, Path], Leftover]) -> Leftover:
    try:
        return judge(path, target)
    except StorageError as error:
        # It may belong to another user, or the disk is broken there. That must not stop a save.
        return Leftover(path, target, f"It cannot be looked at: {error.what}", False)


def _judge_kept(path: Path, target: Path) -> Leftover:
    if is_finished(path):
        return Leftover(path, target, "It is a checkpoint.", False)
    why = f"It holds files of another program that were found as {target.name}."
    return Leftover(path, target, why, False, removable=True)


def _judge(path: Path, target: Path, state: str) -> Leftover:
    found = _judge_owner(path, target, state)
    alive = _owner_state(path) is ProcessState.ALIVE
    # A checkpoint that has only lost its name is one.
    lost = state != REMOVED and is_finished(path) and not is_finished(target)
    return replace(found, removable=found.disposable or not (alive or lost))


def _judge_owner(path: Path, target: Path, state: str) -> Leftover:
    owner_state = _owner_state(path)
    if state == REMOVED:
        return Leftover(path, target, "Its deletion was interrupted.", True)
    if owner_state is ProcessState.ALIVE or owner_state is ProcessState.UNKNOWN:
        owner = read_owner(path)
        who = f"process {owner.pid} on {owner.host}" if owner else "a process"
        runs = "runs" if owner_state is ProcessState.ALIVE else "may run: it was started elsewhere"
        return Leftover(path, target, f"It belongs to {who}, which {runs}.", False)
    if owner_state is None and is_finished(path):
        if is_finished(target):
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
