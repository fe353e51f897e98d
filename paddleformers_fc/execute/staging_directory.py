"""Create a staging directory for all ranks of a job, and remove it if any rank fails.

The coordinator creates it beside the target. Ranks without access to it have output directories on other disks; the
leader of each of these disks creates a staging directory there. Before that, a leader deletes the leftovers of crashed
saves whose processes have ended, so that a disk full of leftovers does not stop the next save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.disk_leaders import DiskLeaders, find_disk_leaders
from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.commit import create_staging, discard
from paddleformers_fc.storage.files import is_directory, real_path
from paddleformers_fc.storage.leftovers import clean_unfinished


@dataclass(frozen=True)
class StagingDirectory:
    """The staging directory of a save.

    Args:
        path: the directory on this rank's disk.
        disks: the disks of all ranks.
    """

    path: Path
    disks: DiskLeaders


def _itself(target: Path) -> Path:
    return target


@contextlib.contextmanager
def staging_beside(
    target: Path, channel: Channel, before: Callable[[], None], place_of: Callable[[Path], Path] = _itself
) -> Iterator[StagingDirectory]:
    """Create a staging directory for ``target`` on every disk; discard it when the block raises.

    Args:
        target: the directory that is going to be written.
        channel: all ranks; every rank must enter.
        before: raises if the save must not begin; called on the coordinator.
        place_of: returns the path beside which the target of this rank is staged.
    Raises:
        FlexError: the same on every rank.
    """
    made: list[Path] = []

    def make() -> str:
        if channel.rank == 0:
            before()
        place = place_of(target)
        clean_unfinished(place.parent)
        if place.parent == real_path(target):
            # What an export has left that created the directory; its parent need not be readable.
            with contextlib.suppress(StorageError):
                clean_unfinished(place.parent.parent)
        made.append(create_staging(place))
        return made[0].name

    def staging_of(name: str) -> Path:
        return place_of(target).with_name(name)

    try:
        disks = find_disk_leaders(
            channel, f"preparing to write {target.name}", make, lambda name: is_directory(staging_of(name))
        )
        staging = staging_of(disks.token)
        if made and made[0] != staging:
            discard(made.pop())  # A rank of another host was first on this disk.
        yield StagingDirectory(staging, disks)
    except BaseException:
        # The next save deletes the rest; the first error takes precedence.
        for staging in made:
            with contextlib.suppress(StorageError):
                discard(staging)
        raise
