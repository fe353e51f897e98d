"""The lock of a staging directory: its process holds it, and the system releases it when the process ends.

Whoever gets the lock may delete the directory. The lock is ``flock``, which holds between the clients of NFS, CephFS
and GPFS, and of Lustre unless it is mounted with ``localflock``.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from paddleformers_fc.storage.files import refused

LOCK_NAME = ".flex.lock"
"""The lock's name inside a staging directory."""

_UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK})


class LockState(enum.Enum):
    """The answer to a request for a lock."""

    OURS = "ours"
    BUSY = "busy"
    ABSENT = "absent"
    UNSUPPORTED = "unsupported"


@contextlib.contextmanager
def locked(staging: Path, *, probe: bool = False) -> Iterator[LockState]:
    """Context manager that holds the lock of a staging directory if it is free.

    Args:
        staging: the directory.
        probe: only look, which needs no right to write.

    Yields:
        OURS: no other process has the lock. BUSY: another one has it. ABSENT: there is no such directory, or of a probe
        no lock in it. UNSUPPORTED: the file system has no locks.

    Raises:
        StorageError: the operating system refused to open the lock.
    """
    path = staging / LOCK_NAME
    flags, kind = (os.O_RDONLY | os.O_NONBLOCK, fcntl.LOCK_SH) if probe else (os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
    descriptor = -1
    try:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise refused("lock", path, error) from error
    if descriptor < 0:
        yield LockState.ABSENT
        return
    try:
        yield _lock(path, descriptor, kind)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # A forked process may have the descriptor too.
        os.close(descriptor)


def _lock(path: Path, descriptor: int, kind: int) -> LockState:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            return LockState.BUSY
        if error.errno in _UNSUPPORTED:
            return LockState.UNSUPPORTED
        raise refused("lock", path, error) from error
    # A process that had the lock before may have removed the directory.
    return LockState.OURS if os.path.exists(path) else LockState.ABSENT
