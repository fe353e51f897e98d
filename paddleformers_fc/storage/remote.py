"""Read files of a store that supports range requests, through fsspec: S3, GCS, OSS, HTTP and other backends.

Only the needed range of a file is requested. Large ranges are requested in parts, several at a time, because one stream
of a store is slower than its network. Size and entity tag, or change time, of a file are its identity, because a URL,
unlike a local descriptor, may lead to a replaced file.

Every exception of a backend becomes an error of this package with URL and offset. Backend messages may contain
credentials or signed URLs, so they are masked, and their exceptions are not chained. Access and credentials are
configured in fsspec and its backends, which are imported when the first URL is used.

Memory of a read: ``PART_BYTES * PARTS`` per thread, in addition to the caller's buffer.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from paddleformers_fc.errors import Corrupt, FlexError, FormatError, OptionError, StorageError
from paddleformers_fc.storage.paths import AnyPath, RemotePath, mask_credentials
from paddleformers_fc.text import install_command

PART_BYTES = 8 * 1024 * 1024
"""Maximum length of one request."""
PARTS = 4
"""Number of parts of a range that are requested at a time."""
RESTORE_FILE = "Restore the file or use another checkpoint."
"""The advice for a file that is missing or not a regular file."""
AT_ONCE = 16
"""Number of files that are inspected or opened at a time."""

# Keys under which backends report a value that changes with the file, most precise first.
_TAGS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "Content-MD5", "generation", "version_id", "mtime")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "updated", "modified", "created")
_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3"}
"""The extra of this package that installs the backend of a protocol."""
_SECRET = re.compile(r"key|secret|token|password|passphrase|sas|account|credential", re.IGNORECASE)
_QUERY = re.compile(r"(?<=\S)\?[^\s'\",)]+")
_TOLD = 300
_DOWNLOAD = "Download the directory, and name the copy."
_CUT = "The connection was cut; try again."
_NO_RANGES = f"This server does not answer range requests. {_DOWNLOAD}"
_CHANGES = ("write", "delete")


class RemoteStatus(msgspec.Struct, frozen=True):
    """The status of a name in a store.

    Args:
        kind: ``file``, ``directory``, or another type that the backend reports.
        size: length of a file in bytes; 0 for anything else.
        tag: changes when the file does; empty if the backend reports only the size.
    """

    kind: str
    size: int
    tag: str


class RemoteFile(msgspec.Struct, frozen=True):
    """An existing file of a store. It uses no open connection.

    Args:
        path: its URL.
        status: the status when it was opened.
    """

    path: RemotePath
    status: RemoteStatus

    @property
    def size(self) -> int:
        """Its length in bytes when it was opened."""
        return self.status.size

    def close(self) -> None:
        """Do nothing, because nothing is open."""

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a flat, writable view with the bytes from ``offset`` on; safe from several threads at once.

        Raises:
            Corrupt: the file ends before the view is full, is missing, or was replaced.
            StorageError: the store refused, or sent a wrong answer.
        """
        parts = [(low, min(low + PART_BYTES, view.nbytes)) for low in range(0, view.nbytes, PART_BYTES)]
        for first in range(0, len(parts), PARTS):
            some = parts[first : first + PARTS]
            answers = self.fetch([(offset + low, offset + high) for low, high in some])
            for (low, high), answer in zip(some, answers, strict=True):
                view[low:high] = answer

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Fetch several ranges, at the same time if the backend supports it.

        Args:
            ranges: first offset and end offset of each range.

        Raises:
            Corrupt, StorageError: as for :meth:`read_into`.
        """
        for begin, end in ranges:
            if end > self.size:
                raise too_short(self.path, begin, end - begin, max(0, self.size - begin))
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        try:
            with asking("read", self.path, begins[0]) as (system, inner):
                answers = system.cat_ranges([inner] * len(ranges), begins, ends, on_error="raise")
        except StorageError:
            self._check_unchanged()
            raise
        for (begin, end), answer in zip(ranges, answers, strict=True):
            if len(answer) != end - begin:
                self._check_unchanged()
                raise StorageError(
                    f"The store sent the wrong number of bytes of {self.path}.",
                    where=f"{self.path}, byte {begin}",
                    evidence=[f"requested {end - begin} bytes from byte {begin}, got {len(answer)}"],
                    next_step=_CUT if len(answer) < end - begin else _NO_RANGES,
                )
        return list(answers)

    def _check_unchanged(self) -> None:
        """Check that the file was not replaced, which is the most likely cause of a failed read."""
        now = stat_remote(self.path)
        if now is None:
            raise missing(self.path)
        if now.size < self.size:
            raise too_short(self.path, now.size, self.size - now.size, 0)
        if now != self.status:
            raise Corrupt(
                f"{self.path} was replaced or changed while it was read.",
                where=str(self.path),
                next_step="Another job writes into this directory. Let it finish, then load again.",
            )


def open_remote(path: RemotePath) -> RemoteFile:
    """Open a file for reading.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is not a file.
        StorageError: the store refused, or reports no size of the file.
    """
    status = stat_remote(path)
    if status is None:
        raise missing(path)
    if status.kind != "file":
        raise FormatError(f"{path} is not a regular file.", where=str(path), next_step=RESTORE_FILE)
    return RemoteFile(path, status)


def stat_remote(path: RemotePath) -> RemoteStatus | None:
    """Return the current status of a path; None if it does not exist.

    Raises:
        StorageError: the store refused.
    """
    with asking("access", path) as (system, inner):
        try:
            # A cached listing may be older than the file.
            system.invalidate_cache(inner)
            facts = system.info(inner)
        except (FileNotFoundError, NotADirectoryError) as error:
            if _hides_failure(error):
                raise error.__cause__ or error from None
            return None
    kind = str(facts.get("type", "file"))
    size = facts.get("size")
    if kind == "file" and size is None:
        raise StorageError(f"The store reports no size of {path}.", where=str(path), next_step=_DOWNLOAD)
    return RemoteStatus(kind, int(size) if kind == "file" and size is not None else 0, _tag(facts))


def list_remote(path: RemotePath) -> list[RemotePath]:
    """Return the entries of a directory, sorted by name; none if it does not exist, or is a file.

    Raises:
        StorageError: the store refused to list it.
    """
    with asking("list", path) as (system, inner):
        try:
            system.invalidate_cache(inner)
            found = system.ls(inner, detail=False)
        except (FileNotFoundError, NotADirectoryError) as error:
            if _hides_failure(error):
                raise error.__cause__ or error from None
            return []
        except Exception as error:  # Every backend has its own exceptions.
            if _cannot_list(path, error):
                return []
            raise
    # A file is listed as itself, and so is the placeholder object that some stores have for a directory.
    below = {str(entry).rstrip("/") for entry in found} - {inner.rstrip("/")}
    names = {entry.rpartition("/")[2] for entry in below} - {"", ".", ".."}
    return [path / name for name in sorted(names)]


def missing(path: AnyPath) -> Corrupt:
    """Return the error for a missing file."""
    return Corrupt(f"{path} is missing.", where=str(path), next_step=RESTORE_FILE)


def too_short(path: AnyPath, begin: int, length: int, got: int) -> Corrupt:
    """Return the error for a file that ends before the requested bytes."""
    return Corrupt(
        f"{path} ends too early.",
        where=f"{path}, byte {begin + got}",
        evidence=[f"requested {length} bytes from byte {begin}, got {got}"],
        next_step="The file was truncated. Restore it or use another checkpoint.",
    )


def _refused(action: str, path: RemotePath, error: Exception, offset: int | None, secrets: list[str]) -> StorageError:
    """Return the :class:`StorageError` for an exception of a backend, without credentials in its text.

    Args:
        action: an infinitive such as "read".
        path: the requested file.
        error: the exception of the backend.
        offset: offset of the first requested byte, for a read.
        secrets: texts to mask.
    """
    text = _QUERY.sub("?***", mask_credentials(" ".join(str(error).split())))
    for secret in secrets:
        text = text.replace(secret, "***")
    advice = "Check the URL, the network and the store, then try again."
    if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
        right = action if action in _CHANGES else "read"
        advice = (
            f"Give these credentials permission to {right} it; fsspec reads them from its configuration or environment."
        )
    elif isinstance(error, NotImplementedError):
        advice = "The backend of this protocol does not support it. Use a local directory or another store."
    elif isinstance(error, TimeoutError):
        advice = "The store did not answer in time; try again."
    return StorageError(
        f"The store refused to {action} {path}.",
        where=str(path) if offset is None else f"{path}, byte {offset}",
        evidence=[f"{type(error).__name__}: {text[:_TOLD]}".rstrip(": ")],
        next_step=advice,
    )


@contextlib.contextmanager
def asking(action: str, path: RemotePath, offset: int | None = None) -> Iterator[tuple[Any, str]]:
    """Context manager that yields the file system of a URL and the path inside it, and translates backend exceptions.

    Args:
        action: an infinitive such as "read".
        path: the URL.
        offset: offset of the first requested byte, for a read.

    Raises:
        OptionError: there is no backend for it.
        StorageError: the backend raised.
    """
    system, inner = _file_system(path)
    try:
        yield system, inner
    except FlexError:
        raise
    except Exception as error:  # Every backend has its own exceptions.
        raise _refused(action, path, error, offset, _secrets(system)) from None


def _file_system(path: RemotePath) -> tuple[Any, str]:
    """Return the file system of a URL, which fsspec caches, and the path inside it."""
    from fsspec.core import url_to_fs

    try:
        system, inner = url_to_fs(path.url)
    except ImportError as error:
        raise OptionError(
            f"{path} cannot be read: the backend of fsspec for {path.protocol}:// is not installed.",
            where=str(path),
            evidence=[mask_credentials(str(error))],
            next_step=_install(path.protocol),
        ) from None
    except Exception as error:  # Every backend has its own exceptions.
        raise OptionError(
            f"fsspec does not accept {path}.",
            where=str(path),
            evidence=[f"{type(error).__name__}: {mask_credentials(str(error))[:_TOLD]}"],
            next_step="Check the protocol, and fsspec's configuration for it.",
        ) from None
    return system, str(inner)


def _install(protocol: str) -> str:
    extra = _EXTRAS.get(protocol)
    return f"Run {install_command(extra)}." if extra else "Install the version that belongs to the installed fsspec."


def _hides_failure(error: OSError) -> bool:
    """Return whether a "not found" hides another failure; the HTTP backend reports every failure as "not found"."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return status not in (404, 410)
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


def _cannot_list(path: RemotePath, error: Exception) -> bool:
    """Return whether a web server serves files but no listings, as most do."""
    return path.protocol in ("http", "https") and getattr(error, "status", None) in (401, 403, 405)


def _tag(facts: dict[str, Any]) -> str:
    known = next((name for name in (*_TAGS, *_TIMES) if facts.get(name) is not None), None)
    return "" if known is None else f"{known}={facts[known]}"


def _secrets(system: Any) -> list[str]:
    """Return the secrets among a file system's options and in the environment."""
    found: list[str] = []

    def gather(options: Any, shortest: int) -> None:
        for name, value in options.items() if isinstance(options, dict) else ():
            if isinstance(value, str) and len(value) >= shortest and _SECRET.search(str(name)):
                found.append(value)
            gather(value, shortest)

    gather(getattr(system, "storage_options", {}), 4)
    # Some switches in the environment have "key" or "token" in their names; a credential is longer than "false".
    gather(dict(os.environ), 8)
    # Longest first, because one secret may be a prefix of another.
    return sorted(found, key=len, reverse=True)
