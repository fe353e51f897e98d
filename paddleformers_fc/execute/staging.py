"""A staging directory that all ranks of a job write into, and that is gone again if any of them fails.

The coordinator makes it and tells the others where it is. Before that it deletes what crashed saves left beside the
target, as far as nobody lives who needs it: a disk that is full of them must not stop the next save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from paddleformers_fc.errors import StorageError
from paddleformers_fc.execute.channel import Channel, agree
from paddleformers_fc.storage.commit import clean_unfinished, create_staging, discard


@contextlib.contextmanager
def staging_beside(target: Path, channel: Channel, before: Callable[[], None]) -> Iterator[Path]:
    """A fresh staging directory for ``target``; discarded when the block raises.

    Args:
        target: what will be written.
        channel: all ranks; every rank must enter.
        before: what must hold before anything is created; run on the coordinator.
    Raises:
        FlexError: the same on every rank.
    """

    made: list[Path] = []

    def prepare() -> bytes:
        if channel.rank != 0:
            return b""
        before()
        clean_unfinished(target.parent)
        made.append(create_staging(target))
        return str(made[0]).encode()

    try:
        yield Path(agree(channel, f"preparing to write {target.name}", prepare)[0].decode())
    except BaseException:
        # What cannot be deleted now is recognisable and goes with the next save; the first error counts.
        for staging in made:
            with contextlib.suppress(StorageError):
                discard(staging)
        raise
