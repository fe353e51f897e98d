"""Write, sync, rename and delete local files; no other module does.

The functions add three properties to the system calls: an error of the operating system becomes a
:class:`StorageError` with the path, a write continues until every byte is written, and a file is synced when it is
closed. Readers accept a local or remote path (:mod:`.paths`); writers accept only a local path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
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
from paddleformers_fc.text import suggestion

# Linux supports 1024, and every system at least 16.
MAX_BUFFERS = max(16, min(1024, os.sysconf("SC_IOV_MAX")))
"""Maximum number of buffers for :func:`read_several`."""
_T = TypeVar("_T")
_R = TypeVar("_R")
_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors of a path that leads to no file, including circular links."""
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})
_NO_TIME: int = getattr(os, "O_NOATIME", 0)
_ADVICE = {
    errno.ENOSPC: "Free space on this file system, or save elsewhere, and try again.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or write smaller files, and try again.",
    errno.EDQUOT: "Free some of your quota on this file system, or save elsewhere, and try again.",
    errno.EACCES: "Give this user permission for this path, or choose another path.",
    errno.EPERM: "Give this user permission for this path, or choose another path.",
    errno.EROFS: "The file system is mounted read-only; choose another directory.",
    errno.EIO: "The device reported a failure; check the system log before you rely on anything on it.",
    errno.ESTALE: "The network file system lost this file; check the mount and try again.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n).",
    errno.EEXIST: "Choose a name that does not exist yet; nothing was overwritten.",
}


def refused(action: str, path: Path | str, error: OSError, offset: int | None = None) -> StorageError:
    """Return the :class:`StorageError` for a failed system call.

    Args:
        action: an infinitive such as "write" or "rename".
        path: the path that was passed to the call.
        error: the error of the system call.
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
        buffer: bytes, memoryview or numpy array of any dtype, including those of ``ml_dtypes`` without a buffer format.

    Raises:
        FormatError: the buffer is not contiguous, or not little-endian.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise FormatError(f"An array of shape {buffer.shape} is not C-contiguous and cannot be viewed as bytes.")
        if buffer.dtype.byteorder == ">":
            raise FormatError(f"An array of dtype {buffer.dtype} is big-endian; files contain little-endian numbers.")
        buffer = buffer.reshape(-1).view(np.uint8)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise FormatError(f"A buffer of shape {view.shape} is not contiguous and cannot be viewed as bytes.")
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


# A view of the complete address space, because slicing it is fifty times as fast as creating a view.
_FIRST_ADDRESS = 4096
_MEMORY = memoryview((ctypes.c_char * (1 << 62)).from_address(_FIRST_ADDRESS)).cast("B")


def memory_at(address: int, length: int) -> memoryview:
    """Return the bytes at an address of this process. The caller must keep the memory alive."""
    return _MEMORY[address - _FIRST_ADDRESS : address - _FIRST_ADDRESS + length]


class OpenFile(msgspec.Struct, frozen=True):
    """A regular file open for reading; a context manager that closes it.

    Attributes:
        path: the path that was opened.
        descriptor: the file descriptor.
        size: its length in bytes when it was opened.
    """

    path: Path
    descriptor: int
    size: int

    def close(self) -> None:
        """Close the descriptor; must be called only once."""
        with _naming("close", self.path):
            os.close(self.descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def open_regular(path: AnyPath) -> OpenFile | RemoteFile:
    """Open a file for reading.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is a directory, a pipe or a device.
        StorageError: it cannot be opened.
    """
    return remote.open_remote(path) if isinstance(path, RemotePath) else open_local(path)


def open_local(path: Path) -> OpenFile:
    """Open a local file, like :func:`open_regular`."""
    try:
        descriptor = _opened(path)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise refused("open", path, error) from error
        raise remote.missing(path) from error
    try:
        with _naming("access", path):
            status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a regular file.", where=str(path), next_step=remote.RESTORE_FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return OpenFile(path, descriptor, status.st_size)


def _opened(path: Path) -> int:
    # With O_NONBLOCK, opening a pipe does not wait for a writer; the caller rejects it.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # Updating the access time, which nothing uses, takes 8 % of a read of a few KiB.
        return os.open(path, flags | _NO_TIME)
    except PermissionError:
        if not _NO_TIME:
            raise
    return os.open(path, flags)  # The file belongs to another user.


def read_into(file: OpenFile | RemoteFile, offset: int, buffer: Any) -> None:
    """Fill a writable contiguous ``buffer`` with the bytes from ``offset`` on; safe from several threads at once.

    Raises:
        Corrupt: the file ends before the buffer is full.
        FormatError: the buffer is read-only or not contiguous.
        StorageError: the operating system refused.
    """
    view = byte_view(buffer)
    if view.readonly:
        raise FormatError(f"{file.path} cannot be read into a read-only buffer.", where=str(file.path))
    if isinstance(file, RemoteFile):
        file.read_into(offset, view)
        return
    done = 0
    while done < view.nbytes:
        # One call reads at most about 2 GiB and may read less; Python itself repeats an interrupted call.
        with _naming("read", file.path):
            count = os.preadv(file.descriptor, [view[done:]], offset + done)
        if count == 0:
            raise remote.too_short(file.path, offset, view.nbytes, done)
        done += count


def read_several(file: OpenFile, offset: int, views: Sequence[memoryview]) -> None:
    """Fill several buffers with successive bytes from ``offset`` on, usually in one system call.

    Args:
        file: the open file.
        offset: offset of the first byte.
        views: flat and writable buffers, at most ``MAX_BUFFERS``.

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
    """A new file that is written in any order, from several threads at once, and synced when it is closed.

    It computes no checksum, and the caller must check that every byte was written. After an error the file stays, so
    that it can be inspected.

    Args:
        path: the file; it must not exist. Missing directories between ``root`` and the file are created.
        root: the directory that the file must be in. Without it, no directory is created.

    Attributes:
        path: the file.
        name: its path relative to the root, or its name if there is no root.

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
                # Everything in one call: two threads that write to one file then alternate, and one reads while the
                # other writes. Python repeats an interrupted call; a short write continues here.
                count = os.pwrite(self._descriptor, view[done:], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "no byte was accepted")
            except OSError as error:
                raise refused("write", self.path, error, offset + done) from error
            done += count

    def close(self) -> None:
        """Sync and close, after the last write.

        Raises:
            StorageError: the bytes could not be written to the device, or the file is already closed.
        """
        self._check_open()
        try:
            # A failed sync is not repeated: the system may have dropped the bytes, and the next sync would succeed.
            with _naming("sync", self.path):
                os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptor and leave the file as it is; does nothing after ``close``."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with _naming("close", self.path):
                os.close(descriptor)

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise StorageError(f"{self.path} is already closed.", where=str(self.path))


def write_file(path: Path, data: bytes, *, root: Path | None = None) -> FileChecksum:
    """Write a small file and sync it; see :class:`RandomAccessWriter` for the arguments and errors."""
    file = RandomAccessWriter(path, root=root)
    try:
        file.write(0, data)
        file.close()
    finally:
        file.abandon()
    return checksum_of(file.name, data)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file atomically: under a temporary name, which is then renamed; an older file is replaced.

    Raises:
        StorageError: the operating system refused; an older file is unchanged.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        write_file(partial, data)
        rename(partial, path)
    finally:
        remove_file(partial)


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
    """Sync a file that other code has written.

    Raises:
        Corrupt: it is missing.
        StorageError: the operating system refused.
    """
    with open_local(path) as file, _naming("sync", path):
        os.fsync(file.descriptor)


def fsync_directory(path: Path) -> None:
    """Sync the entries of a directory, so that created, renamed and deleted names survive a power failure.

    Does nothing on a file system that does not support it.

    Raises:
        StorageError: the directory cannot be opened or synced.
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
    """Create a directory and its missing parents, and sync the names of all of them.

    Existing parents are synced as well, because another library may just have created them without a sync.

    Raises:
        StorageError: a directory cannot be created or synced.
    """
    with _naming("create", path):
        missing = [one for one in (path, *path.parents) if not one.is_dir()]
    for directory in reversed(missing):
        with _naming("create", directory):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
    for parent in real_path(path).parents:
        if not os.access(parent, os.R_OK | os.W_OK):
            break  # No process of this user can have created anything there.
        fsync_directory(parent)


def check_writable(path: Path) -> None:
    """Check that a directory can be created and written into, and leave nothing behind.

    A directory with a unique name is created and deleted in the existing part of the path.

    Raises:
        StorageError: :func:`make_directories` would fail, or no entry can be created in the directory.
    """
    with _naming("create", path):
        ground = next(one for one in (path, *path.parents) if one.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".trial-", dir=ground))


def real_path(path: Path) -> Path:
    """Resolve all links of a path, which need not exist.

    Raises:
        StorageError: the operating system refused access.
    """
    with _naming("access", path):
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
    """Delete a file if it exists.

    Raises:
        StorageError: the operating system refused.
    """
    with _naming("delete", path), contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Delete a directory and its content, if it exists; links are deleted, never followed.

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
    """Return the entries of a directory, sorted by name; none if it does not exist.

    Raises:
        StorageError: it cannot be listed, or is not a directory.
    """
    if isinstance(path, RemotePath):
        return remote.list_remote(path)
    with _naming("list", path), contextlib.suppress(FileNotFoundError):
        return [path / name for name in sorted(os.listdir(path))]
    return []


def similar_entry(path: Path) -> list[str]:
    """Return evidence for a path that does not exist: a line that suggests a similar name in its directory, or none."""
    with contextlib.suppress(StorageError):
        if is_directory(path.parent):
            return suggestion(path.name, [one.name for one in list_directory(path.parent)])
    return []


def subdirectories(path: AnyPath) -> Sequence[AnyPath]:
    """Return the directories in a directory, sorted by name.

    Raises:
        StorageError: it cannot be listed, or is not a directory.
    """
    if isinstance(path, RemotePath):
        return [one for one in remote.list_remote(path) if is_directory(one)]
    with _naming("list", path), os.scandir(path) as entries:
        found = [one for one in entries if one.is_dir(follow_symlinks=False) or one.is_symlink()]
        # Only links need another system call.
        return sorted(path / one.name for one in found if not one.is_symlink() or is_directory(path / one.name))


def is_directory(path: AnyPath) -> bool:
    """Return whether ``path`` is a directory or a link to one; False if it does not exist.

    Raises:
        StorageError: the operating system or the store refused access.
    """
    if isinstance(path, RemotePath):
        if remote.list_remote(path):
            return True
        found = remote.stat_remote(path)  # Backends for file servers, unlike object stores, have empty directories.
        return found is not None and found.kind == "directory"
    status = _stat(path, follow_links=True)
    return status is not None and stat.S_ISDIR(status.st_mode)


def exists(path: AnyPath) -> bool:
    """Return whether ``path`` exists.

    Raises:
        StorageError: the operating system or the store refused access.
    """
    return stat_path(path) is not None


def is_file(path: AnyPath) -> bool:
    """Return whether ``path`` is a regular file or a link to one; False if it does not exist.

    Raises:
        StorageError: the operating system or the store refused access.
    """
    status = stat_path(path)
    if isinstance(status, RemoteStatus):
        return status.kind == "file"
    return status is not None and stat.S_ISREG(status.st_mode)


def check_not_file(target: AnyPath) -> None:
    """Check that a target directory is not a file.

    Raises:
        OptionError: it is a file, a link to a file, or a circular link.
        StorageError: the operating system or the store refused access.
    """
    circle = isinstance(target, Path) and os.path.islink(real_path(target))
    if circle or (exists(target) and not is_directory(target)):
        raise OptionError(
            f"{target} is {'a link to itself' if circle else 'a file'}, not a directory.",
            where=str(target),
            next_step="Name a directory that does not exist yet; nothing was written.",
        )


def stat_path(path: AnyPath, *, follow_links: bool = True) -> os.stat_result | RemoteStatus | None:
    """Return the status of a path; None if it does not exist, or is a dangling link.

    Args:
        path: the path.
        follow_links: False for the status of a link itself; a store has no links.
    Raises:
        StorageError: the operating system or the store refused access.
    """
    return remote.stat_remote(path) if isinstance(path, RemotePath) else _stat(path, follow_links=follow_links)


def is_link(path: Path) -> bool:
    """Return whether a path is a link, dangling or not; False if it does not exist.

    Raises:
        StorageError: the operating system refused access.
    """
    status = _stat(path, follow_links=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def entry_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a path, without following a link; None if it does not exist.

    Raises:
        StorageError: the operating system refused access.
    """
    status = _stat(path, follow_links=False)
    return None if status is None else (status.st_dev, status.st_ino)


def _stat(path: Path, *, follow_links: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow_links)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise refused("access", path, error) from error
    except ValueError:  # The path contains a null character, so it does not exist.
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
    """Map ``work`` over items, in order; concurrently for a store, whose latency is high.

    Args:
        work: inspects or reads a file.
        items: the arguments of ``work``.
        at: the directory of the files, or one of the files.
    """
    if not isinstance(at, RemotePath):
        return map(work, items)
    with ThreadPoolExecutor(remote.AT_ONCE, "flex-ask") as pool:
        return list(pool.map(work, items))


def files_within(path: Path) -> list[Path]:
    """Return every regular file below a directory; links are not followed.

    Raises:
        StorageError: a directory cannot be listed.
    """
    entries = [directory / name for directory, names in walk_directories(path) for name in names]
    return [entry for entry in entries if entry.is_file() and not entry.is_symlink()]


def walk_directories(path: Path) -> list[tuple[Path, list[str]]]:
    """Return a directory and every directory below it, deepest first, each with the names of its other entries.

    Links are not followed, and count as other entries. A directory that does not exist is empty.

    Raises:
        StorageError: a directory cannot be listed.
    """
    # Without recursion, because other programs may nest directories more deeply than Python's stack allows.
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
    # Never the root itself, because a late rank must not recreate a staging directory that was deleted.
    between = [one for one in path.parents if root in one.parents]
    for directory in reversed(between):
        with _naming("create", directory), contextlib.suppress(FileExistsError):
            os.mkdir(directory)
