"""Write and delete files of a store, through fsspec.

Files are uploaded sequentially, in parts. A store such as S3 shows a file only when its upload is completed; an
interrupted upload is discarded. A deferred file is uploaded first and completed later
(:meth:`RemoteFileWriter.publish`). Uploaded bytes are verified by reading them again (:func:`compare_uploaded`),
because stores report no comparable checksums.

Memory of a file that is being written: :data:`UPLOAD_BYTES`; more for files of more than 270 GB.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from paddleformers_fc.errors import StorageError
from paddleformers_fc.storage.block_checksums import compare_files
from paddleformers_fc.storage.checksum import FileChecksum, checksum_of
from paddleformers_fc.storage.paths import RemotePath
from paddleformers_fc.storage.remote import asking

UPLOAD_BYTES = 32 * 1024 * 1024
"""Length of an uploaded part."""
_PROBE = ".paddleformers_fc.test"
_MAX_PARTS = 9000
"""S3 accepts up to 10,000."""


class RemoteFileWriter:
    """A file of a store that is uploaded sequentially. Several threads may write it, approximately in order.

    A piece that comes early is copied and kept until the pieces before it have come.

    Args:
        directory: the URL that the name is relative to.
        name: name of the file; an older file is replaced when this file is completed.
        size: its length in bytes.
        deferred: whether :meth:`close` uploads the file without completing it.

    Raises:
        StorageError: the store refused.
    """

    def __init__(self, directory: RemotePath, name: str, size: int, *, deferred: bool = False) -> None:
        self.path, self.name = directory / name, name
        self._deferred, self._done = deferred, False
        self._written = 0
        self._early: dict[int, bytes | memoryview] = {}
        self._lock = threading.Lock()
        part = max(UPLOAD_BYTES, -(-size // _MAX_PARTS))
        with asking("write", self.path) as (system, inner):
            options = {"block_size": part, "autocommit": not deferred}
            try:
                self._file: Any = system.open(inner, "wb", **options)
            except FileNotFoundError:
                # Unlike an object store, a file system needs the directory first.
                system.makedirs(system._parent(inner), exist_ok=True)
                self._file = system.open(inner, "wb", **options)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes from ``offset`` on; each byte may be written once.

        Raises:
            StorageError: the store refused a part.
        """
        with self._lock, asking("write", self.path):
            self._early[offset] = bytes(data) if offset != self._written else data
            while piece := self._early.pop(self._written, b""):
                self._file.write(piece)
                self._written += len(piece)

    def close(self) -> None:
        """Upload the rest, and complete the file unless it is deferred.

        Raises:
            StorageError: the store refused.
        """
        with asking("write", self.path):
            self._file.close()
            self._done = not self._deferred

    def publish(self) -> None:
        """Complete a deferred file after :meth:`close`.

        Raises:
            StorageError: the store refused.
        """
        if not self._done:
            with asking("write", self.path):
                self._file.commit()
                self._done = True

    def abandon(self) -> None:
        """Discard an upload that was not completed, and ignore errors."""
        if not self._done:
            with contextlib.suppress(Exception):  # The error that led here takes precedence.
                self._file.discard()
            with contextlib.suppress(AttributeError):
                self._file.closed = True  # Its finalizer would complete the file.
            self._done = True


def write_remote(directory: RemotePath, name: str, data: bytes) -> FileChecksum:
    """Write a small file, and return its checksum.

    Raises:
        StorageError: the store refused.
    """
    writer = RemoteFileWriter(directory, name, len(data))
    try:
        writer.write(0, data)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return checksum_of(name, data)


def check_remote_writable(directory: RemotePath) -> None:
    """Check that a store can be written to, before hours of training, by writing and deleting a small file.

    Raises:
        StorageError: the store refused to write.
    """
    write_remote(directory, _PROBE, b"written to test this URL, and deleted at once\n")
    with contextlib.suppress(StorageError):  # Only save_total_limit needs permission to delete.
        remove_remote(directory / _PROBE)


def remove_remote(path: RemotePath) -> None:
    """Delete a file if it exists.

    Raises:
        StorageError: the store refused.
    """
    with asking("delete", path) as (system, inner), contextlib.suppress(FileNotFoundError):
        system.rm_file(inner)


def compare_uploaded(directory: RemotePath, checksums: Sequence[FileChecksum]) -> None:
    """Read files of a store again, and compare their checksums.

    Raises:
        Corrupt: the store does not have the uploaded bytes.
        StorageError: the store refused to read them.
    """
    fault = f"The store does not have the bytes that were uploaded to {directory}"
    advice = "Make sure that no other program writes there, then upload again."
    compare_files(directory, checksums).raise_if_found(fault, directory, advice)
