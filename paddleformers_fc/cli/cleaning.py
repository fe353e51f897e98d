"""``clean``: remove what saves have left beside the checkpoints of an output directory.

A save deletes what it can prove to be needed by no process. The rest may belong to a process of another host or
container, or to another program, so a user confirms it: directory by directory, or all with ``--yes``. Checkpoints are
never removed, also those that have only lost their name, nor is what a process of this machine writes. What changes
while the command looks is being written elsewhere and stays too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paddleformers_fc.errors import OptionError, StorageError
from paddleformers_fc.storage.files import exists, files_within, stat_path
from paddleformers_fc.storage.leftovers import Leftover, leftovers, remove_leftover
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from paddleformers_fc.text import count_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

LOOK_SECONDS = 1.0
"""How long it is seen whether a directory changes."""


class LeftoverFacts(msgspec.Struct, frozen=True):
    """A directory that a save has left.

    Attributes:
        name: its name in the output directory.
        why: what it is, one sentence.
        bytes: of its files.
        removable: whether it may be removed when a user confirms.
    """

    name: str
    why: str
    bytes: int
    removable: bool


class Cleaned(msgspec.Struct, frozen=True):
    """What was removed.

    Attributes:
        path: the output directory.
        removed: directories that are gone.
        left: those that stay.
    """

    path: str
    removed: list[LeftoverFacts]
    left: list[LeftoverFacts]


def clean(output_dir: Path, confirmed: Callable[[LeftoverFacts], bool]) -> Cleaned:
    """Remove the leftovers that a user confirms.

    Args:
        output_dir: the directory that holds the checkpoints.
        confirmed: asks for one of them.
    Raises:
        OptionError: the directory is a checkpoint itself.
        StorageError: the operating system refused to look into it.
    """
    if exists(output_dir / MANIFEST_NAME):
        raise OptionError(
            "The directory is a checkpoint.",
            where=str(output_dir),
            next_step="Name the output directory that holds it.",
        )
    found = leftovers(output_dir)
    before = {one.path: _state(one.path) for one in found}
    if any(one.removable and not one.disposable for one in found):
        time.sleep(LOOK_SECONDS)
    removed: list[LeftoverFacts] = []
    left: list[LeftoverFacts] = []
    for one in found:
        facts = facts_of(one)
        if facts.removable and not one.disposable and _state(one.path) != before[one.path]:
            left.append(msgspec.structs.replace(facts, why="It is being written.", removable=False))
        elif facts.removable and confirmed(facts):
            (removed if _removed(one.path) else left).append(facts)
        else:
            left.append(facts)
    return Cleaned(str(output_dir), removed, left)


def facts_of(leftover: Leftover) -> LeftoverFacts:
    """What a user is told of a leftover."""
    size = sum(length for _, _, length in _state(leftover.path))
    return LeftoverFacts(leftover.path.name, leftover.why, size, leftover.removable)


def _removed(path: Path) -> bool:
    try:
        return remove_leftover(path)
    except StorageError:
        return False  # It stays in the list of what is left.


def _state(directory: Path) -> list[tuple[str, int, int]]:
    """Name, time of change in nanoseconds and size of every file in a directory; nothing of one that is gone."""
    try:
        seen = [(path, stat_path(path)) for path in files_within(directory)]
    except StorageError:
        return []
    return sorted((str(path), one.st_mtime_ns, one.st_size) for path, one in seen if isinstance(one, os.stat_result))


def show(found: Cleaned, console: Console) -> None:
    """Every directory on a line, and the sum."""
    from rich.text import Text

    console.print(Text(found.path, "bold"))
    show_leftovers(found.left, console)
    for one in found.removed:
        console.print(f"  removed  {one.name}  {size_text(one.bytes)}")
    size = size_text(sum(one.bytes for one in found.removed))
    said = f": {count_text(len(found.removed), 'leftover')}, {size}; {len(found.left)} left"
    console.print(Text.assemble(("removed", "bold green"), said))


def show_leftovers(found: list[LeftoverFacts], console: Console) -> None:
    """Every leftover with its size and its reason."""
    for one in found:
        console.print(f"  {one.name}  {size_text(one.bytes)}: {one.why}")
