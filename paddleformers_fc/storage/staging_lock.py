"""The process that owns a staging directory, and whether that process is alive.

The next save cleans up a directory that a crash has left, but not one that another job is writing. The first file in
every staging directory therefore records the process that made it. A process number alone is not enough: it is reused,
and has no meaning on another machine or in another container. The record also contains the machine's boot id, the
process-number namespace and the start time of the process. If these do not prove that the process is gone, the answer
is "unknown", and unknown counts as alive.
"""

from __future__ import annotations

import enum
import os
import socket
from pathlib import Path

import msgspec

from paddleformers_fc.errors import CheckpointError
from paddleformers_fc.storage.files import fsync_directory, rename, write_file
from paddleformers_fc.storage.json_io import read_document

OWNER_NAME = ".owner.json"
"""The record's name inside an unfinished directory."""

PARTIAL_OWNER_NAME = OWNER_NAME + ".part"
"""Its name while it is written."""


_ENDED = ("Z", "X")
"""States of a process that has ended and whose parent has not collected its exit status."""

_MAX_BYTES = 64 * 1024


class ProcessState(enum.Enum):
    """The state of a process, as far as it can be proved."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Owner(msgspec.Struct, frozen=True):
    """A process, recognisable after it died.

    Attributes:
        host: host name, for the reader.
        pid: process number in its namespace.
        boot: the machine's boot id; differs between machines and between boots. Empty where there is none.
        namespace: the process-number namespace (containers have their own). Empty where there is none.
        started: start time in clock ticks since boot. Empty where there is none.
    """

    host: str
    pid: int
    boot: str
    namespace: str
    started: str


_owners = msgspec.json.Decoder(Owner)


def this_process() -> Owner:
    """Return the process that runs this code."""
    pid = os.getpid()
    return Owner(socket.gethostname(), pid, boot_id(), _namespace(), _started(pid))


def write_owner(directory: Path) -> None:
    """Record this process as the owner of ``directory``, in one step.

    Raises:
        StorageError: the record cannot be written; also if someone else deleted the directory meanwhile.
    """
    partial = directory / PARTIAL_OWNER_NAME
    write_file(partial, msgspec.json.encode(this_process()) + b"\n", root=directory)
    rename(partial, directory / OWNER_NAME)
    fsync_directory(directory)


def read_owner(directory: Path) -> Owner | None:
    """Return the owner recorded in ``directory``; None if there is no readable record."""
    try:
        return _owners.decode(read_document(directory / OWNER_NAME, _MAX_BYTES))
    except (CheckpointError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_own(directory: Path) -> bool:
    """Return whether this process is recorded as the owner of ``directory``."""
    return read_owner(directory) == this_process()


def process_state(owner: Owner) -> ProcessState:
    """Return whether ``owner`` still runs, as far as this process can prove it."""
    here = this_process()
    if not owner.boot or owner.boot != here.boot or owner.namespace != here.namespace:
        return ProcessState.UNKNOWN
    if not _exists(owner.pid) or next(iter(_status(owner.pid)), "") in _ENDED:
        return ProcessState.DEAD
    started = _started(owner.pid)
    if not started or not owner.started:
        return ProcessState.UNKNOWN
    # Another start time: the number now belongs to another process.
    return ProcessState.ALIVE if started == owner.started else ProcessState.DEAD


def boot_id() -> str:
    """Return the kernel's identifier of the current boot of this machine; empty if there is none."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    # The list of processes under /proc may hide those of other users; signal 0 does not.
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        # A number beyond every process number is that of no process.
        return False
    except PermissionError:
        pass
    return True


def _started(pid: int) -> str:
    fields = _status(pid)
    return fields[19] if len(fields) > 19 else ""


def _status(pid: int) -> list[str]:
    """Return the fields of a process in ``/proc`` from its state on; empty if there are none."""
    # The second field is the program's name in parentheses, which may hold spaces and parentheses itself.
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
