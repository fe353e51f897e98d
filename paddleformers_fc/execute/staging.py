"""A staging directory that all ranks of a job write into, and that is gone again if any of them fails.

The coordinator makes it beside the target. Ranks that do not see it have output directories on other disks; each of
these gets a staging directory of its own, made by the lowest rank that sees it, its lead. Before that a lead deletes
what crashed saves left beside the target, as far as nobody lives who needs it: a disk that is full of them must not
stop the next save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.disk_leaders import DiskLeaders, find_disk_leaders
from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.commit import clean_unfinished, create_staging, discard
from paddleformers_fc.storage.files import is_directory


@dataclass(frozen=True)
class StagingDirectory:
    """Where this rank writes.

    Args:
        path: the staging directory on this rank's disk.
        disks: which ranks share one.
    """

    path: Path
    disks: DiskLeaders


def _itself(target: Path) -> Path:
    return target


@contextlib.contextmanager
def staging_beside(
    target: Path, channel: Channel, before: Callable[[], None], place_of: Callable[[Path], Path] = _itself
) -> Iterator[StagingDirectory]:
    """A fresh staging directory for ``target`` on every disk; discarded when the block raises.

    Args:
        target: what will be written.
        channel: all ranks; every rank must enter.
        before: what must hold before anything is created; run on the coordinator.
        place_of: the name beside which the target of this rank is staged.
    Raises:
        FlexError: the same on every rank.
    """
    made: list[Path] = []

    def make() -> str:
        if channel.rank == 0:
            before()
        place = place_of(target)
        clean_unfinished(place.parent)
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
            discard(made.pop())  # Another rank, on another host, was the first on this disk.
        yield StagingDirectory(staging, disks)
    except BaseException:
        # What cannot be deleted now is recognisable and goes with the next save; the first error counts.
        for staging in made:
            with contextlib.suppress(StorageError):
                discard(staging)
        raise
