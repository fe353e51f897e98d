"""Parallel reads of byte ranges into memory of the caller.

Threads read the byte ranges of a plan with ``preadv``, which takes the offset and needs neither lock nor seek, directly
into the tensor's memory. This module manages descriptors: a checkpoint of a thousand ranks has thousands of files, and
a process may open a limited number. Ranges of a file that is produced from others are produced here.

Memory: none for data. At most ``max_open_files`` descriptors are open. The least recently used idle one is closed for
the next, and a thread waits if all are in use. Each thread holds one at a time, so waiting always ends. Remote files
have no descriptor; their ranges come from bounded memory (:mod:`.prefetch`).

Identities of files, so that the file that is read is the file that was checked.

A checkpoint is checked by path and later read by path. Between the two a file can be replaced: a step saved again, a
directory renamed over another. The identity of a local file (device, inode, size, change time) is recorded before the
check and compared on the descriptor that is read, when it is opened and before it is closed. A remote file has no
descriptor: its size and entity tag, or change time, are compared when it is opened and again after the last read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from paddleformers_fc.errors import Corrupt, OptionError, StorageError
from paddleformers_fc.storage.block_scales import ScaledFile
from paddleformers_fc.storage.files import (
    OpenFile,
    map_paths,
    open_regular,
    read_into,
    read_several,
    stat_path,
    writable_view,
)
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.prefetch import ExpectedRange, Prefetcher
from paddleformers_fc.storage.remote import RemoteFile, RemoteStatus
from paddleformers_fc.storage.rows import ScatterList, read_scattered


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One file of this machine as it was.

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


Identity = FileIdentity | RemoteStatus | ScaledFile
"""The identity of a file, or of one that is produced from others."""
Identities = Mapping[AnyPath, Identity]


def identities_of(paths: Iterable[AnyPath]) -> dict[AnyPath, Identity]:
    """Return the identities of files; a missing file has none, which a later check reports.

    Raises:
        StorageError: the operating system refused to look.
    """
    paths = list(paths)
    found = zip(paths, map_paths(stat_path, paths, paths[0]), strict=True) if paths else ()
    return {path: identity_of(status) for path, status in found if status is not None}


def stored_identities(identities: Identities) -> dict[AnyPath, Identity]:
    """Return the identities of files without those that are produced from others."""
    return {path: one for path, one in identities.items() if not isinstance(one, ScaledFile)}


def same_bytes_key(identities: Identities) -> str:
    """Return a text that is equal for processes that read the same bytes; empty if these identities cannot show it.

    Processes of one machine with access to the same local files read them through one page cache. Copies of a file on
    the disks of several machines can differ, and so can their caches. An object of a store is the same for all of them.
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


def refuse_replaced(file: OpenFile | RemoteFile, identities: Identities) -> None:
    """Refuse an open file that is not the one that was checked; a file that was not checked passes.

    Raises:
        Corrupt: it was replaced or changed.
    """
    expected = identities.get(file.path)
    found = file.status if isinstance(file, RemoteFile) else os.fstat(file.descriptor)
    if expected is not None and identity_of(found) != expected:
        raise replaced(file.path)


def refuse_replaced_meanwhile(paths: Iterable[AnyPath], identities: Identities) -> None:
    """Refuse remote files that are no longer those that were checked, once they have been read.

    Raises:
        Corrupt: one was replaced, changed or deleted.
        StorageError: the store refused to look.
    """
    read = [path for path in paths if isinstance(path, RemotePath) and path in identities]
    for path, status in zip(read, map_paths(stat_path, read, read[0]) if read else (), strict=True):
        if status != identities[path]:
            raise replaced(path)


def replaced(path: AnyPath) -> Corrupt:
    """Return the error for a file that is no longer the one that was checked."""
    return Corrupt(
        f"{path} was replaced or changed after it was checked.",
        where=str(path),
        next_step="Another job writes into this directory. Let it finish, then load again.",
    )


def identity_of(status: os.stat_result | RemoteStatus) -> Identity:
    """Return the identity of a file by its status."""
    if isinstance(status, RemoteStatus):
        return status
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


_MOST_BUNDLES = 64
NO_IDENTITIES: Identities = MappingProxyType({})
"""For files without an earlier check."""


@dataclass
class _Shared:
    """One open file and the number of threads reading it now."""

    file: OpenFile | RemoteFile
    users: int


class RangeReader:
    """Reads byte ranges of many files from many threads; a context manager that closes all files.

    Args:
        max_open_files: bound on descriptors held at once.
        threads: number of reading threads; two bundles of remote files are kept for each, up to half a GiB.
        identities: identities of the checked files by path; a replaced file is refused.

    Raises:
        OptionError: the bound is not positive.
    """

    def __init__(self, max_open_files: int = 128, identities: Identities = NO_IDENTITIES, threads: int = 4) -> None:
        if max_open_files < 1:
            raise OptionError(f"max_open_files is {max_open_files}; at least one file must be open to be read.")
        self._limit = max_open_files
        self._identities = identities
        self._files: OrderedDict[AnyPath, _Shared] = OrderedDict()
        self._ahead = Prefetcher(min(2 * threads, _MOST_BUNDLES))
        self._seen: set[AnyPath] = set()
        self._changed: list[Corrupt] = []
        self._open_count = 0
        self._closed = False
        self._change = threading.Condition()

    def expect(self, path: AnyPath, wanted: Iterable[ExpectedRange]) -> None:
        """Announce the ranges of a file that will be read, roughly in this order, in place of earlier ones.

        This saves requests for a remote file, and has no effect for a local one.
        """
        if isinstance(path, RemotePath) and not isinstance(self._identities.get(path), ScaledFile):
            self._ahead.expect(path, wanted)

    def read_into(self, path: AnyPath, offset: int, buffer: Any) -> None:
        """Fill ``buffer`` with the bytes of ``path`` from ``offset`` on.

        Args:
            path: the file.
            offset: of the first byte, from the start of the file.
            buffer: writable and C-contiguous: memoryview, bytearray or numpy array; its length is the number of bytes
            read.

        Raises:
            Corrupt: the file is missing, was replaced after it was checked, or ends before the buffer is full.
            FormatError: ``path`` is not a regular file, or the buffer is not one piece of writable memory.
            StorageError: the operating system refused, or the reader is closed.
        """
        produced = self._identities.get(path)
        if isinstance(produced, ScaledFile):
            produced.read_into(path, self.read_into, offset, writable_view(buffer, path))
            return
        file = self._acquire(path)
        try:
            if isinstance(file, RemoteFile):
                self._ahead.read_into(file, offset, writable_view(buffer, path))
            else:
                read_into(file, offset, buffer)
        finally:
            self._release(path)

    def read_several(self, path: AnyPath, offset: int, views: Sequence[memoryview]) -> None:
        """Fill several flat buffers with successive bytes; see :func:`~paddleformers_fc.storage.files.read_several`."""
        if isinstance(self._identities.get(path), ScaledFile):
            for begin, view in zip(_offsets(offset, views), views, strict=True):
                self.read_into(path, begin, view)
            return
        file = self._acquire(path)
        try:
            if isinstance(file, RemoteFile):
                self._ahead.read_each(file, list(zip(_offsets(offset, views), views, strict=True)))
            else:
                read_several(file, offset, views)
        finally:
            self._release(path)

    def read_rows(self, path: AnyPath, rows: ScatterList) -> None:
        """Fill memory with many ranges of one file.

        Args:
            path: the file.
            rows: the ranges, and where each goes.

        Raises:
            Corrupt, FormatError, StorageError: as :meth:`read_into`.
        """
        produced = self._identities.get(path)
        if isinstance(produced, ScaledFile):
            produced.read_rows(path, self.read_into, rows)
            return
        file = self._acquire(path)
        try:
            if isinstance(file, RemoteFile):
                self._ahead.read_each(file, rows.views())
            else:
                read_scattered(file, rows)
        finally:
            self._release(path)

    def close(self) -> None:
        """Close all files; one that another thread is reading is closed when that read ends. Harmless when repeated.

        Raises:
            StorageError: the operating system refused for a file, the first of them; all were closed.
        """
        refusals: list[StorageError] = []
        with self._change:
            self._closed = True
            for path in [path for path, shared in self._files.items() if shared.users == 0]:
                try:
                    self._drop(path)
                except StorageError as error:
                    refusals.append(error)
            self._change.notify_all()
        if refusals:
            raise refusals[0]

    def refuse_replaced(self) -> None:
        """Refuse files that changed while they were read, and remote files that were replaced; to be called after
        ``close``.

        Raises:
            Corrupt: a file is no longer the one that was checked.
            StorageError: the store refused the request.
        """
        if self._changed:
            raise self._changed[0]
        refuse_replaced_meanwhile(self._seen, self._identities)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        # The first error is more specific than a file that cannot be closed after it.
        with contextlib.suppress(*[] if kind is None else [StorageError]):
            self.close()
        if kind is None:
            self.refuse_replaced()

    def _acquire(self, path: AnyPath) -> OpenFile | RemoteFile:
        with self._change:
            while not self._make_room(path):
                self._change.wait()
            shared = self._files.get(path)
            if shared is not None:
                shared.users += 1
                self._files.move_to_end(path)
                return shared.file
            self._open_count += 1
        # Opening may take long on a network file system and must not stop the other threads.
        try:
            file = self._opened(path)
        except BaseException:
            with self._change:
                self._open_count -= 1
                self._change.notify_all()
            raise
        return self._admit(path, file)

    def _opened(self, path: AnyPath) -> OpenFile | RemoteFile:
        file = open_regular(path)
        try:
            refuse_replaced(file, self._identities)
        except BaseException:
            file.close()
            raise
        return file

    def _admit(self, path: AnyPath, file: OpenFile | RemoteFile) -> OpenFile | RemoteFile:
        with self._change:
            self._seen.add(path)
            shared = self._files.get(path)
            if shared is None:
                self._files[path] = _Shared(file, users=1)
                # Threads that wait for a descriptor may need this very file.
                self._change.notify_all()
                return file
            # Another thread opened the same file in the meantime.
            shared.users += 1
        try:
            file.close()
        except BaseException:
            self._release(path)
            raise
        finally:
            # After the descriptor is closed: another thread may open a file as soon as this one is uncounted.
            with self._change:
                self._open_count -= 1
                self._change.notify_all()
        return shared.file

    def _release(self, path: AnyPath) -> None:
        with self._change:
            shared = self._files[path]
            shared.users -= 1
            self._change.notify_all()
            if shared.users == 0 and self._closed:
                self._drop(path)

    def _make_room(self, path: AnyPath) -> bool:
        """Return whether ``path`` is open or may be opened now; close an idle file if necessary."""
        if self._closed:
            raise StorageError(f"{path} cannot be read: the reader is closed.", where=str(path))
        if path in self._files or self._open_count < self._limit:
            return True
        idle = next((one for one, shared in self._files.items() if shared.users == 0), None)
        if idle is None:
            return False
        self._drop(idle)
        return True

    def _drop(self, path: AnyPath) -> None:
        self._open_count -= 1
        file = self._files.pop(path).file
        try:
            refuse_replaced(file, self._identities)
        except Corrupt as error:
            self._changed.append(error)
        except OSError:
            # The file was deleted, on a network file system. All reads of it were complete.
            pass
        finally:
            file.close()


def _offsets(first: int, views: Sequence[memoryview]) -> Iterable[int]:
    """Yield the offset of each of several successive views."""
    for view in views:
        yield first
        first += view.nbytes
