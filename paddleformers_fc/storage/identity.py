"""Which file it was: so that the file that is read is the file that was checked.

A checkpoint is checked by its paths, and read by its paths later. Between the two a file can be replaced: a step saved
again, a directory moved over another. The operating system's name of a file (device, inode, size, time of the last
change of its content) is taken before the check and compared on the very descriptor that is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.storage.files import OpenFile, refused


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One file as it was.

    Args:
        device: that it is on.
        inode: its number there.
        size: in bytes.
        modified: time of the last change of its content, in nanoseconds.
    """

    device: int
    inode: int
    size: int
    modified: int


Identities = Mapping[Path, FileIdentity]


def identities_of(paths: Iterable[Path]) -> dict[Path, FileIdentity]:
    """The identities of files; one that is missing has none, which a check will say.

    Raises:
        StorageError: the operating system refused to look.
    """
    found: dict[Path, FileIdentity] = {}
    for path in paths:
        try:
            found[path] = _identity(os.stat(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise refused("look at", path, error) from error
    return found


def refuse_replaced(file: OpenFile, identities: Identities) -> None:
    """Refuse an open file that is not the one that was checked; a file that was not checked passes.

    Raises:
        Corrupt: it was replaced or changed.
    """
    expected = identities.get(file.path)
    if expected is not None and _identity(os.fstat(file.descriptor)) != expected:
        raise Corrupt(
            f"{file.path} was replaced or changed after it was checked.",
            where=str(file.path),
            next_step="Another job writes into this directory. Let it finish, then load again.",
        )


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
