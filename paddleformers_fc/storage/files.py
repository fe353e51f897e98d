"""Write, sync, rename and delete local files; no other module does.

Its functions add three properties to the bare calls. A refusal of the operating system becomes a :class:`StorageError`
with the path. A write continues until every byte is accepted. A file counts as written once it is synced.

Readers take a local or remote path (:mod:`.paths`); writers take a local one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, overload

import msgspec
import numpy as np

from paddleformers_fc.errors import FormatError, OptionError, StorageError
from paddleformers_fc.storage import remote
from paddleformers_fc.storage.checksum import FileChecksum, checksum_of
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.remote import RemoteFile, RemoteStatus

# Linux takes 1024, and every system at least 16.
MOST_BUFFERS = max(16, min(1024, os.sysconf("SC_IOV_MAX")))
"""Maximum number of buffers of :func:`read_several`."""
_T = TypeVar("_T")
_R = TypeVar("_R")
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors of a name that leads to no file; links in a circle are among them."""
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
_NO_TIME: int = getattr(os, "O_NOATIME", 0)
_ADVICE = {
    errno.ENOSPC: "Free space on this file system, or save elsewhere, and try again.",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f), or bound the files of a save, and try again.",
    errno.EDQUOT: "Free some of your quota on this file system, or save elsewhere, and try again.",
    errno.EACCES: "Give this user the right to this path, or choose another.",
    errno.EPERM: "Give this user the right to this path, or choose another.",
    errno.EROFS: "The file system is mounted read-only; choose another directory.",
    errno.EIO: "The device reported a failure; check the system log before you rely on anything on it.",
    errno.ESTALE: "The network file system lost this file; check the mount and try again.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.EEXIST: "Choose a name that does not exist yet; nothing was overwritten.",
}


def refused(action: str, path: Path | str, error: OSError, offset: int | None = None) -> StorageError:
    """Return the :class:`StorageError` for a failed system call.

    Args:
        action: an infinitive such as "write" or "rename".
        path: the name that was passed to the call.
        error: the error of the system.
        offset: the byte of the file at which it failed, if any.
    """
    reason = error.strerror or type(error).__name__
    number = error.errno or 0
    return StorageError(
        f"The operating system refused to {action} {path}: {reason}.",
        where=str(path) if offset is None else f"{path}, byte {offset}",
        evidence=[f"errno {number} ({errno.errorcode.get(number, 'unknown')})"],
        next_step=_ADVICE.get(number, "Check the path and the file system, then try again."),
    )


@contextlib.contextmanager
def _naming(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused(action, path, error) from error


def byte_view(buffer: Any) -> memoryview:
    """Return the bytes of a C-contiguous buffer, flat and without a copy.

    Args:
        buffer: bytes, memoryview or numpy array of any dtype, also those of ``ml_dtypes`` that have no buffer format.

    Raises:
        FormatError: the bytes are not in one piece, or are not little-endian.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise FormatError(f"An array of shape {buffer.shape} is not C-contiguous and cannot be taken as bytes.")
        if buffer.dtype.byteorder == ">":
            raise FormatError(f"An array of dtype {buffer.dtype} is big-endian; files hold little-endian numbers.")
        buffer = buffer.reshape(-1).view(np.uint8)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise FormatError(f"A buffer of shape {view.shape} is not contiguous and cannot be taken as bytes.")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


# A view of all addresses: its slices are created fifty times as fast as views of their own.
_FIRST_ADDRESS = 4096
_MEMORY = memoryview((ctypes.c_char * (1 << 62)).from_address(_FIRST_ADDRESS)).cast("B")


def memory_at(address: int, length: int) -> memoryview:
    """Return the bytes at an address of this process. They are the caller's, and must outlive the view."""
    return _MEMORY[address - _FIRST_ADDRESS : address - _FIRST_ADDRESS + length]


class OpenFile(msgspec.Struct, frozen=True):
    """A regular file open for reading; a context manager that closes it.

    Attributes:
        path: the name it was opened under.
        descriptor: of the operating system.
        size: its length in bytes when it was opened.
    """

    path: Path
    descriptor: int
    size: int

    def close(self) -> None:
        """Give the descriptor back; to be called once."""
        with _naming("close", self.path):
            os.close(self.descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def open_regular(path: AnyPath) -> OpenFile | RemoteFile:
    """Open a file to read it.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is a directory, a pipe or a device.
        StorageError: it cannot be opened.
    """
    return remote.open_remote(path) if isinstance(path, RemotePath) else open_local(path)


def open_local(path: Path) -> OpenFile:
    """Open a file of this machine as :func:`open_regular` does."""
    try:
        descriptor = _opened(path)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise refused("open", path, error) from error
        raise remote.missing(path) from error
    try:
        with _naming("look at", path):
            status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file.", where=str(path), next_step=remote.RESTORE_FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return OpenFile(path, descriptor, status.st_size)


def _opened(path: Path) -> int:
    # O_NONBLOCK: a pipe in place of a file is refused later instead of waiting for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # Checking whether the access time is due takes 8 % of a read of a few KiB, and the time is not used.
        return os.open(path, flags | _NO_TIME)
    except PermissionError:
        if not _NO_TIME:
            raise
    return os.open(path, flags)  # The file belongs to another user.


def read_into(file: OpenFile | RemoteFile, offset: int, buffer: Any) -> None:
    """Fill a writable contiguous ``buffer`` with the bytes from ``offset`` on; safe from several threads at once.

    Raises:
        Corrupt: the file ends before the buffer is full.
        FormatError: the buffer is read-only or not in one piece.
        StorageError: the operating system refused.
    """
    view = byte_view(buffer)
    if view.readonly:
        raise FormatError(f"A read-only buffer cannot take bytes of {file.path}.", where=str(file.path))
    if isinstance(file, RemoteFile):
        file.read_into(offset, view)
        return
    done = 0
    while done < view.nbytes:
        # One call moves at most about 2 GiB and may move less; an interrupted call is repeated by Python itself.
        with _naming("read", file.path):
            count = os.preadv(file.descriptor, [view[done:]], offset + done)
        if count == 0:
            raise remote.too_short(file.path, offset, view.nbytes, done)
        done += count


def read_several(file: OpenFile, offset: int, views: Sequence[memoryview]) -> None:
    """Fill several buffers with successive bytes from ``offset`` on, in one call where the system does it in one.

    Args:
        file: open for reading.
        offset: of the first byte.
        views: flat and writable, ``MOST_BUFFERS`` of them at most.

    Raises:
        Corrupt: the file ends before the last buffer is full.
        StorageError: the operating system refused.
    """
    try:
        count = os.preadv(file.descriptor, views, offset)
    except OSError as error:
        raise refused("read", file.path, error) from error
    if count < sum(map(len, views)):
        for view in views:
            read_into(file, offset, view)
            offset += view.nbytes


def read_range(file: OpenFile | RemoteFile, offset: int, length: int) -> bytes:
    """Return ``length`` bytes from ``offset`` on; see :func:`read_into` for the errors."""
    buffer = bytearray(length)
    read_into(file, offset, buffer)
    return bytes(buffer)


class RandomAccessWriter:
    """A new file whose pieces come in any order, from several threads at once; synced when it is closed.

    It computes no checksum, and the caller must check that every piece was written. After an error the written bytes
    stay, so that the fault can be inspected.

    Args:
        path: the file; it must not exist. A missing directory between ``root`` and the file is created.
        root: the directory that the file must be in. Without it no directory is created.

    Attributes:
        path: the file.
        name: its path relative to the root; without a root its bare name.

    Raises:
        StorageError: the file exists or cannot be created.
        FormatError: ``path`` is not inside ``root``.
    """

    def __init__(self, path: Path, *, root: Path | None = None) -> None:
        self.path = path
        self.name = _relative(path, root)
        _make_parents(path, root)
        with _naming("create", path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, offset: int, buffer: Any) -> None:
        """Write all bytes of a C-contiguous ``buffer`` from ``offset`` on.

        Raises:
            StorageError: the operating system refused, for example because the disk is full.
        """
        self._check_open()
        view = byte_view(buffer)
        done = 0
        while done < view.nbytes:
            try:
                # In one call: of two threads that write a file one waits for the other, and then reads while that one
                # waits. Python repeats an interrupted call; a short one continues here.
                count = os.pwrite(self._descriptor, view[done:], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "no byte was accepted")
            except OSError as error:
                raise refused("write", self.path, error, offset + done) from error
            done += count

    def close(self) -> None:
        """Sync and close, after the last write.

        Raises:
            StorageError: the bytes could not be brought to the device, or the file is closed already.
        """
        self._check_open()
        try:
            # A sync that failed is not tried again: the system may have dropped the bytes and would then succeed.
            with _naming("sync", self.path):
                os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptor and leave the file as it is; harmless after ``close``."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with _naming("close", self.path):
                os.close(descriptor)

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise StorageError(f"{self.path} is closed and cannot be written on.", where=str(self.path))


def write_file(path: Path, data: bytes, *, root: Path | None = None) -> FileChecksum:
    """Write a small file and sync it; see :class:`RandomAccessWriter` for the arguments and errors."""
    file = RandomAccessWriter(path, root=root)
    try:
        file.write(0, data)
        file.close()
    finally:
        file.abandon()
    return checksum_of(file.name, data)


def read_file(path: AnyPath) -> bytes:
    """Return all bytes of a small file.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is not a regular file.
        StorageError: it cannot be read.
    """
    with open_regular(path) as file:
        return read_range(file, 0, file.size)


def fsync_file(path: Path) -> None:
    """Sync a file that other code wrote.

    Raises:
        Corrupt: it is missing.
        StorageError: the operating system refused.
    """
    with open_local(path) as file, _naming("sync", path):
        os.fsync(file.descriptor)


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory (created, renamed, deleted names) survive a power failure.

    Raises:
        StorageError: the directory cannot be opened or synced. A file system that has no such sync is left alone.
    """
    with _naming("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(descriptor)


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents, and bring the names of all of them to the device.

    Parents that exist are synced as well: another library may have created them a moment ago, and does not sync.

    Raises:
        StorageError: one of them cannot be created or synced.
    """
    with _naming("create", path):
        missing = [one for one in (path, *path.parents) if not one.is_dir()]
    for directory in reversed(missing):
        with _naming("create", directory):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
    for parent in real_path(path).parents:
        if not os.access(parent, os.R_OK | os.W_OK):
            break  # No process of this user has created anything there.
        fsync_directory(parent)


def check_writable(path: Path) -> None:
    """Check that a directory can be created and written into, without leaving a trace.

    A directory with a unique name is created, and deleted, in the existing part of the path.

    Raises:
        StorageError: :func:`make_directories` would fail, or no entry can be created in the directory.
    """
    with _naming("create", path):
        ground = next(one for one in (path, *path.parents) if one.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".trial-", dir=ground))


def real_path(path: Path) -> Path:
    """Return the absolute path that a name leads to through all links, also where nothing is there.

    Raises:
        StorageError: the operating system refused to look.
    """
    with _naming("look at", path):
        return Path(os.path.realpath(path))


def make_directory(path: Path) -> None:
    """Create one directory that must not exist.

    Raises:
        StorageError: it exists or cannot be created.
    """
    with _naming("create", path):
        os.mkdir(path)


def rename(source: Path, target: Path) -> None:
    """Rename atomically, within one file system; a target file or an empty target directory is replaced.

    Raises:
        StorageError: the operating system refused.
    """
    with _naming(f"rename {source} to", target):
        os.rename(source, target)


def remove_file(path: Path) -> None:
    """Delete a file; one that is already gone is no fault.

    Raises:
        StorageError: the operating system refused.
    """
    with _naming("delete", path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Delete a directory with all it holds; links are deleted, never followed. One that is gone is no fault.

    Raises:
        StorageError: the operating system refused.
    """
    if is_link(path):
        remove_file(path)
        return
    for directory, names in walk_directories(path):
        for name in names:
            remove_file(directory / name)
        with _naming("delete", directory), contextlib.suppress(FileNotFoundError):
            os.rmdir(directory)


@overload
def list_directory(path: Path) -> list[Path]: ...
@overload
def list_directory(path: AnyPath) -> Sequence[AnyPath]: ...
def list_directory(path: AnyPath) -> Sequence[AnyPath]:
    """Return the entries of a directory, by name; none if it does not exist.

    Raises:
        StorageError: it cannot be listed, or is not a directory.
    """
    if isinstance(path, RemotePath):
        return remote.list_remote(path)
    with _naming("list", path), contextlib.suppress(FileNotFoundError):
        return [path / name for name in sorted(os.listdir(path))]
    return []


def subdirectories(path: AnyPath) -> Sequence[AnyPath]:
    """Return the directories in a directory, by name.

    Raises:
        StorageError: it cannot be listed, or is not a directory.
    """
    if isinstance(path, RemotePath):
        return [one for one in remote.list_remote(path) if is_directory(one)]
    with _naming("list", path), os.scandir(path) as entries:
        found = [one for one in entries if one.is_dir(follow_symlinks=False) or one.is_symlink()]
        # Only a link has to be looked at.
        return sorted(path / one.name for one in found if not one.is_symlink() or is_directory(path / one.name))


def is_directory(path: AnyPath) -> bool:
    """Return whether ``path`` is a directory or a link to one; False if there is no such name.

    Raises:
        StorageError: the operating system or the store refused to look.
    """
    if isinstance(path, RemotePath):
        if remote.list_remote(path):
            return True
        found = remote.stat_remote(path)  # Of the backends, only file servers have empty directories.
        return found is not None and found.kind == "directory"
    status = _stat(path, follow_links=True)
    return status is not None and stat.S_ISDIR(status.st_mode)


def exists(path: AnyPath) -> bool:
    """Return whether there is a file or directory of this name.

    Raises:
        StorageError: the operating system or the store refused to look.
    """
    return stat_path(path) is not None


def is_file(path: AnyPath) -> bool:
    """Return whether ``path`` is a regular file or a link to one; False if there is no such name.

    Raises:
        StorageError: the operating system or the store refused to look.
    """
    status = stat_path(path)
    if isinstance(status, RemoteStatus):
        return status.kind == "file"
    return status is not None and stat.S_ISREG(status.st_mode)


def check_not_file(target: AnyPath) -> None:
    """Refuse a target of a directory whose name a file has.

    Raises:
        OptionError: it is a file, a link to one, or a link in a circle.
        StorageError: the operating system or the store refused to look.
    """
    circle = isinstance(target, Path) and os.path.islink(real_path(target))
    if circle or (exists(target) and not is_directory(target)):
        raise OptionError(
            f"{target} is {'a link to itself' if circle else 'a file'}, and a directory would be written in its place.",
            where=str(target),
            next_step="Name a directory that does not exist yet; nothing was written.",
        )


def stat_path(path: AnyPath, *, follow_links: bool = True) -> os.stat_result | RemoteStatus | None:
    """Return the status of a name from the system or the store; None if it is missing, or a link to nothing.

    Args:
        path: the name.
        follow_links: False for the status of a link itself; a store has no links.
    Raises:
        StorageError: it refused to look.
    """
    return remote.stat_remote(path) if isinstance(path, RemotePath) else _stat(path, follow_links=follow_links)


def is_link(path: Path) -> bool:
    """Return whether a name is a link, wherever it leads; False if there is no such name.

    Raises:
        StorageError: the operating system refused to look.
    """
    status = _stat(path, follow_links=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def entry_identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a name, of a link those of itself; None if there is no such name.

    Raises:
        StorageError: the operating system refused to look.
    """
    status = _stat(path, follow_links=False)
    return None if status is None else (status.st_dev, status.st_ino)


def _stat(path: Path, *, follow_links: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow_links)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise refused("look at", path, error) from error
    except ValueError:  # No name holds a null character.
        return None


def size_of(path: AnyPath) -> int:
    """Return the length of a file in bytes.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is not a regular file.
        StorageError: it cannot be opened.
    """
    with open_regular(path) as file:
        return file.size


def map_paths(work: Callable[[_T], _R], items: Iterable[_T], at: AnyPath) -> Iterable[_R]:
    """Return ``work`` of every item in order; several at a time for a store, whose latency is high.

    Args:
        work: inspects or reads a file.
        items: its arguments.
        at: the directory of the files, or one of them.
    """
    if not isinstance(at, RemotePath):
        return map(work, items)
    with ThreadPoolExecutor(remote.AT_ONCE, "flex-ask") as pool:
        return list(pool.map(work, items))


def files_within(path: Path) -> list[Path]:
    """Return every regular file in a directory and below it; links are not followed.

    Raises:
        StorageError: a directory cannot be listed.
    """
    entries = [directory / name for directory, names in walk_directories(path) for name in names]
    return [entry for entry in entries if entry.is_file() and not entry.is_symlink()]


def walk_directories(path: Path) -> list[tuple[Path, list[str]]]:
    """Return a directory and every one below it, the deepest first, each with the names that are no directories.

    Links are names, and are not followed. A directory that is gone is empty.

    Raises:
        StorageError: one of them cannot be listed.
    """
    # Without recursion, because files of other programs may be nested more deeply than Python's stack allows.
    found: list[tuple[Path, list[str]]] = []
    waiting = [path]
    while waiting:
        directory, names = waiting.pop(), list[str]()
        with _naming("list", directory), contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(directory / entry.name)
                else:
                    names.append(entry.name)
        found.append((directory, sorted(names)))
    return found[::-1]


def _relative(path: Path, root: Path | None) -> str:
    if root is None:
        return path.name
    try:
        return PurePosixPath(path.relative_to(root)).as_posix()
    except ValueError as error:
        raise FormatError(f"{path} is not inside {root}.", where=str(path)) from error


def _make_parents(path: Path, root: Path | None) -> None:
    # Never the root itself: a late rank must not create a discarded directory again.
    between = [one for one in path.parents if root in one.parents]
    for directory in reversed(between):
        with _naming("create", directory), contextlib.suppress(FileExistsError):
            os.mkdir(directory)
