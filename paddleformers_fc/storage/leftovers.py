"""Leftovers of saves: the hidden directories beside checkpoints that crashes left, and those that running saves use.

:func:`.commit.recover` handles those that no process needs. A user can delete others, such as the files of other
programs (``kept-...``) and, on a file system without locks, staging directories of other runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.commit import doomed, finished
from paddleformers_fc.storage.files import entry_identity, is_directory, list_directory, remove_tree
from paddleformers_fc.storage.paths import ASIDE, REMOVED, UNFINISHED, hidden_name, parse_hidden, parse_kept
from paddleformers_fc.storage.staging_lock import LockState, locked


@dataclass(frozen=True)
class Leftover:
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
    found = [_judge(path) for path in list_directory(output_dir)]
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
    remove_tree(renamed)
    return True


def _judge(path: Path) -> Leftover | None:
    try:
        parsed, kept = parse_hidden(path), parse_kept(path)
        if (parsed is None and kept is None) or not is_directory(path):
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
    if state == ASIDE and entry_identity(target) is None:
        return Leftover(path, f"The next start or save gives it its name {target.name} back.", False, stays=False)
    if state == ASIDE:
        replaced = finished(target) is not None
        why = "It was replaced by a newer save of the same step." if replaced else f"Something else is {target.name}."
        return Leftover(path, why, replaced, stays=not replaced)
    if lock is LockState.UNSUPPORTED:
        return Leftover(path, "Its save was interrupted or runs; this file system has no locks.", True)
    return Leftover(path, "Its save was interrupted.", True, stays=False)
