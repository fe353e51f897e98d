"""Write and delete files of a store, through fsspec.

Files are uploaded from the front to the end, in parts. A store such as S3 shows a file when its upload is completed,
never a part of it; an interrupted upload is discarded. A deferred file is uploaded and completed later
(:meth:`RemoteFileWriter.publish`).

Uploaded bytes are proved by reading them again (:func:`compare_uploaded`), because stores report no comparable
checksums.

Memory of a file that is being written: :data:`UPLOAD_BYTES`, more for files of more than 270 GB.
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
_MOST_PARTS = 9000
"""S3 takes 10,000."""


class RemoteFileWriter:
    """A file of a store, uploaded from the front to the end. Its pieces come nearly in order, from several threads.

    A piece that comes early is copied and kept until the pieces before it have come.

    Args:
        directory: the URL that the name is relative to.
        name: of the file; an older file is replaced when this one is completed.
        size: its length in bytes.
        deferred: whether :meth:`close` uploads it without completing it.

    Raises:
        StorageError: the store refused.
    """

    def __init__(self, directory: RemotePath, name: str, size: int, *, deferred: bool = False) -> None:
        self.path, self.name = directory / name, name
        self._deferred, self._done = deferred, False
        self._written = 0
        self._early: dict[int, bytes | memoryview] = {}
        self._lock = threading.Lock()
        part = max(UPLOAD_BYTES, -(-size // _MOST_PARTS))
        with asking("write", self.path) as (system, inner):
            options = {"block_size": part, "autocommit": not deferred}
            try:
                self._file: Any = system.open(inner, "wb", **options)
            except FileNotFoundError:
                # Unlike an object store, such as a file system of this machine.
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
        """Complete a deferred file that is closed.

        Raises:
            StorageError: the store refused.
        """
        if not self._done:
            with asking("write", self.path):
                self._file.commit()
                self._done = True

    def abandon(self) -> None:
        """Discard the upload of a file that was not completed; a refusal of the store is ignored."""
        if not self._done:
            with contextlib.suppress(Exception):  # An error that led here takes precedence.
                self._file.discard()
            with contextlib.suppress(AttributeError):
                self._file.closed = True  # Its finalizer would complete the file.
            self._done = True


def write_remote(directory: RemotePath, name: str, data: bytes) -> FileChecksum:
    """Write a small file; return its checksum.

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
    """Write a small file and delete it, so that a missing bucket or right is found before hours of training.

    Raises:
        StorageError: the store refused to write.
    """
    write_remote(directory, _PROBE, b"written to test this URL, and deleted at once\n")
    with contextlib.suppress(StorageError):  # Only save_total_limit needs the right.
        remove_remote(directory / _PROBE)


def remove_remote(path: RemotePath) -> None:
    """Delete a file; one that is already gone is no fault.

    Raises:
        StorageError: the store refused.
    """
    with asking("delete", path) as (system, inner), contextlib.suppress(FileNotFoundError):
        system.rm_file(inner)


def compare_uploaded(directory: RemotePath, checksums: Sequence[FileChecksum]) -> None:
    """Read files of a store again, and compare every byte with its checksum.

    Raises:
        Corrupt: the store has other bytes than those that were uploaded.
        StorageError: it refused to read them.
    """
    fault = f"The store does not have the bytes that were uploaded to {directory}"
    advice = "Make sure that no other program writes there, then upload again."
    compare_files(directory, checksums).raise_if_found(fault, directory, advice)
