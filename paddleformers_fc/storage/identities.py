"""Identities of files, which ensure that the file that is read is the file that was checked.

A checkpoint is checked by path and later read by path. In between, a file can be replaced, for example when a step is
saved again. The identity of a local file (device, inode, size, change time) is recorded before the check, and compared
with the open descriptor after opening and before closing. A remote file has no descriptor: its size and entity tag, or
change time, are compared when it is opened and again after the last read.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import xxhash

from paddleformers_fc.errors import Corrupt
from paddleformers_fc.storage.dtypes import ScaledFile
from paddleformers_fc.storage.files import OpenFile, map_paths, stat_path
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.remote import RemoteFile, RemoteStatus


class FileIdentity(msgspec.Struct, frozen=True):
    """The identity of a local file.

    Args:
        device: device number.
        inode: inode number.
        size: length in bytes.
        modified: time of the last modification, in nanoseconds.
    """

    device: int
    inode: int
    size: int
    modified: int


Identity = FileIdentity | RemoteStatus | ScaledFile
"""Identifies a file, or the files that a virtual file is computed from."""
Identities = Mapping[AnyPath, Identity]


def identities_of(paths: Iterable[AnyPath]) -> dict[AnyPath, Identity]:
    """Return the identities of files. Missing files are left out; a later check reports them.

    Raises:
        StorageError: the operating system or the store refused access.
    """
    paths = list(paths)
    found = zip(paths, map_paths(stat_path, paths, paths[0]), strict=True) if paths else ()
    return {path: identity_of(status) for path, status in found if status is not None}


def stored_identities(identities: Identities) -> dict[AnyPath, Identity]:
    """Return the identities of files, without virtual files."""
    return {path: one for path, one in identities.items() if not isinstance(one, ScaledFile)}


def same_bytes_key(identities: Identities) -> str:
    """Return a text that is equal for processes that read the same bytes; empty if that cannot be known.

    Processes on one machine read local files through one page cache. Copies on the disks of several machines can
    differ, and so can their page caches. An object of a store is the same for all machines.
    """
    if not identities:
        return ""
    found = sorted((str(path), repr(identity)) for path, identity in identities.items())
    local = any(isinstance(identity, FileIdentity) for identity in identities.values())
    machine = f"{socket.gethostname()} {boot_id()}" if local else ""
    return xxhash.xxh3_128_hexdigest(f"{machine} {found}".encode(errors="surrogateescape"))


def boot_id() -> str:
    """Return the kernel's identifier of the current boot of this machine; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def check_unreplaced(file: OpenFile | RemoteFile, identities: Identities) -> None:
    """Check that an open file was not replaced or changed since it was checked; other files pass.

    Raises:
        Corrupt: it was replaced or changed.
    """
    expected = identities.get(file.path)
    found = file.status if isinstance(file, RemoteFile) else os.fstat(file.descriptor)
    if expected is not None and identity_of(found) != expected:
        raise replaced(file.path)


def check_unreplaced_meanwhile(paths: Iterable[AnyPath], identities: Identities) -> None:
    """Check, after reading, that remote files were not replaced or changed meanwhile.

    Raises:
        Corrupt: a file was replaced, changed or deleted.
        StorageError: the store refused access.
    """
    read = [path for path in paths if isinstance(path, RemotePath) and path in identities]
    for path, status in zip(read, map_paths(stat_path, read, read[0]) if read else (), strict=True):
        if status != identities[path]:
            raise replaced(path)


def replaced(path: AnyPath) -> Corrupt:
    """Return the error for a file that was replaced or changed after it was checked."""
    return Corrupt(
        f"{path} was replaced or changed after it was checked.",
        where=str(path),
        next_step="Another job writes into this directory. Let it finish, then load again.",
    )


def identity_of(status: os.stat_result | RemoteStatus) -> Identity:
    """Return the identity of a file from its status."""
    if isinstance(status, RemoteStatus):
        return status
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


NO_IDENTITIES: Identities = MappingProxyType({})
"""For files that were not checked before."""
