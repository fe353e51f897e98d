"""Upload a committed checkpoint to an object store, and delete old ones there.

Files are sent in parts and read again. The manifest is sent last, so a directory without it is not a checkpoint. Files
that already exist with the recorded checksums are not sent again, and a checkpoint with the same manifest is skipped.

If a checkpoint is on several disks, the leader of each disk sends its tensor files. The coordinator sends the metadata
files, waits for all other files, compares them, and sends the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from paddleformers_fc.errors import CheckpointError, Corrupt, StorageError
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.storage.checksum import BlockHasher, FileRecord, is_document, size_fault
from paddleformers_fc.storage.files import exists, open_local, read_file, read_into
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest, read_manifest
from paddleformers_fc.storage.paths import RemotePath, parse_step
from paddleformers_fc.storage.remote import list_remote, stat_remote
from paddleformers_fc.storage.remote_writes import RemoteFileWriter, compare_uploaded, remove_remote, write_remote

_FILES = 4
"""Number of files that are sent at a time."""
_READ_BYTES = 4 * 1024 * 1024
_POLL_SECONDS = 1.0


class Upload(msgspec.Struct, frozen=True):
    """The upload of one checkpoint from one disk.

    Args:
        source: ``checkpoint-N``.
        target: its URL.
        is_coordinator: whether this process sends the metadata files and the manifest.
        patience: seconds to wait for the files of other disks.
        check: raises an error to stop the upload; called often.
    """

    source: Path
    target: RemotePath
    is_coordinator: bool
    patience: float
    check: Callable[[], None]

    def run(self) -> int:
        """Upload the checkpoint; return the bytes that were sent.

        Raises:
            Corrupt: a local file is damaged, or the store does not have the bytes that were sent.
            StorageError: the store refused, or the files of another disk are missing.
        """
        manifest, raw = read_manifest(self.source), read_file(self.source / MANIFEST_NAME)
        if self._is_there(raw):
            return 0
        self._remove_older(manifest, raw)
        here = [one for one in manifest.files if exists(self.source / one.path)]
        mine = [one for one in here if self.is_coordinator or not is_document(one.path)]
        with ThreadPoolExecutor(_FILES, "flex-upload") as pool:
            sent = sum(pool.map(self._send, mine))
        if not self.is_coordinator:
            return sent
        for one in manifest.files:  # The files of other disks must arrive unchanged.
            if one not in here:
                self._poll(partial(self._has, one), one.path)
        self.check()
        wrote = write_remote(self.target, MANIFEST_NAME, raw)
        try:
            compare_uploaded(self.target, [wrote])
        except Corrupt:
            remove_remote(self.target / MANIFEST_NAME)
            raise
        return sent + len(raw)

    def _is_there(self, raw: bytes) -> bool:
        """Return whether the store has this manifest, and therefore all files."""
        path = self.target / MANIFEST_NAME
        return stat_remote(path) is not None and read_file(path) == raw

    def _remove_older(self, manifest: Manifest, raw: bytes) -> None:
        """Ensure that no other checkpoint is visible at the URL while its files are replaced."""
        if not self.is_coordinator:
            self._poll(lambda: not exists(self.target / MANIFEST_NAME) or self._is_there(raw), "its older manifest")
            return
        older: list[FileRecord] = []
        with suppress(CheckpointError):
            older = read_manifest(self.target).files
        remove_remote(self.target / MANIFEST_NAME)
        listed = {one.path for one in manifest.files}
        for one in older:
            if one.path not in listed:
                remove_remote(self.target / one.path)

    def _send(self, record: FileRecord) -> int:
        """Send a file unless the store has it; return the bytes that were sent."""
        self.check()
        if self._has(record):
            return 0
        hasher = BlockHasher()
        writer = RemoteFileWriter(self.target, record.path, record.size)
        try:
            for begin, data in self._read(record):
                hasher.update(data)
                writer.write(begin, data)
            checksum = hasher.file_checksum(record.path)
            if (checksum.size, checksum.digest) != (record.size, record.digest):
                raise Corrupt(
                    f"{self.source / record.path} does not match its recorded checksum and is not uploaded.",
                    where=str(self.source / record.path),
                    next_step="Run paddleformers-fc verify on the checkpoint, and delete it if it is damaged.",
                )
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        compare_uploaded(self.target, [checksum])
        return record.size

    def _read(self, record: FileRecord) -> Iterator[tuple[int, bytes]]:
        with open_local(self.source / record.path) as file:
            for begin in range(0, file.size, _READ_BYTES):
                self.check()
                data = bytearray(min(_READ_BYTES, file.size - begin))
                read_into(file, begin, data)
                yield begin, bytes(data)

    def _has(self, record: FileRecord) -> bool:
        """Return whether the store has every byte of a file, comparing the size before reading it."""
        path = self.target / record.path
        try:
            return not size_fault(stat_remote(path), record.size) and digest_of(path) == record.digest
        except Corrupt:
            return False

    def _poll(self, is_done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.patience
        while not is_done():
            self.check()
            if time.monotonic() > end:
                raise StorageError(
                    f"Another node has not finished its part of the upload to {self.target}: {what}.",
                    where=str(self.target),
                    evidence=[f"waited {self.patience:.0f} s"],
                    next_step="Check the logs of the other nodes. The next start of the run uploads the rest.",
                )
            time.sleep(_POLL_SECONDS)


def uploaded_checkpoints(url: RemotePath) -> dict[RemotePath, Manifest]:
    """Return the complete checkpoints ``checkpoint-N`` below a URL, lowest step first.

    Raises:
        StorageError: the store refused.
    """
    found: dict[RemotePath, Manifest] = {}
    numbered = [(step, path) for path in list_remote(url) if (step := parse_step(path)) is not None]
    for step, path in sorted(numbered):
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            if manifest.step == step:
                found[path] = manifest
    return found


def remove_uploaded(path: RemotePath, manifest: Manifest) -> None:
    """Delete a checkpoint in a store, its manifest first. Files that the manifest does not list stay.

    Raises:
        StorageError: the store refused.
    """
    for name in (MANIFEST_NAME, *(one.path for one in manifest.files)):
        remove_remote(path / name)
