"""The target of an export: a directory of this machine, or a URL.

A local export is written into a staging directory and renamed (:mod:`~paddleformers_fc.storage.commit`).

Object stores cannot rename, so files are uploaded under their final names in an order in which no directory with a mark
is incomplete. A mark is a file by which readers recognise an export:

1. the marks of an older export are deleted, then its other files;
2. tensors are uploaded, then documents and checksums; files of tensors that are marks are uploaded without being
   completed;
3. every uploaded byte is read again and compared;
4. the marks are completed and compared in the same way; a mark that differs is deleted.

After an error or an interrupt the uploaded files are deleted, the marks first. A process that is killed leaves files
without a mark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.errors import FlexError, OptionError
from paddleformers_fc.execute.commit_coordinator import StagingDirectory, staging_beside
from paddleformers_fc.formats.checkpoint import ExportWriter, OutputFile
from paddleformers_fc.storage.checksum import FileChecksum, checksum_of
from paddleformers_fc.storage.commit import commit_export, staged_name
from paddleformers_fc.storage.files import RandomAccessWriter, real_path, write_file
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.remote import list_remote
from paddleformers_fc.storage.remote_writes import RemoteFileWriter, compare_uploaded, remove_remote, write_remote
from paddleformers_fc.storage.safetensors import FileLayout, TensorWriter

Seal = Callable[[Sequence[FileChecksum]], Mapping[str, bytes]]
"""Returns the document that records the checksums of all other files."""


class StagedExport(Protocol):
    """An export that is being written and has no mark yet."""

    def share(self, files: tuple[OutputFile, ...]) -> tuple[OutputFile, ...]:
        """Return the files that this rank writes."""

    def create(self, name: str, layout: FileLayout) -> TensorWriter:
        """Begin a file of tensors; safe from several threads at once."""

    def finish(self, documents: Mapping[str, bytes], written: Sequence[FileChecksum], seal: Seal) -> None:
        """Make the directory an export; every rank calls, after all files of tensors are closed.

        Args:
            documents: the files without tensors, on the coordinator.
            written: the checksums of the files with tensors, of all ranks.
            seal: returns the last document.
        Raises:
            Corrupt: the target does not have the bytes that were written.
            StorageError: the system or the store refused.
        """


def staged_export(target: AnyPath, channel: Channel, writer: ExportWriter) -> AbstractContextManager[StagedExport]:
    """Return a block in which an export is written; an error in it leaves nothing that looks like an export.

    Args:
        target: the directory.
        channel: all ranks; every rank must enter.
        writer: of the format.
    Raises:
        OptionError: several ranks write to a URL.
        FlexError: the same on every rank.
    """
    if isinstance(target, RemotePath):
        return _staged_remotely(target, channel, writer)
    return _staged_locally(target, channel, writer)


@contextlib.contextmanager
def _staged_locally(target: Path, channel: Channel, writer: ExportWriter) -> Iterator[StagedExport]:
    with staging_beside(target, channel, place_of=staged_name) as staged:
        yield _LocalExport(staged, target, channel.rank, writer)


class _LocalExport(StagedExport):
    def __init__(self, staged: StagingDirectory, target: Path, rank: int, writer: ExportWriter) -> None:
        self._staged, self._target, self._rank, self._writer = staged, target, rank, writer

    def share(self, files: tuple[OutputFile, ...]) -> tuple[OutputFile, ...]:
        # The ranks on the coordinator's disk share the files.
        writers = self._staged.disks.sharing()[0]
        return files[writers.index(self._rank) :: len(writers)] if self._rank in writers else ()

    def create(self, name: str, layout: FileLayout) -> TensorWriter:
        staging = self._staged.path
        return TensorWriter(RandomAccessWriter(staging / name, root=staging), layout)

    def finish(self, documents: Mapping[str, bytes], written: Sequence[FileChecksum], seal: Seal) -> None:
        if self._rank != 0 or self._staged.own is None:
            return  # Only the disk of the coordinator gets the export.
        staging = self._staged.path
        checksums = [write_file(staging / name, data, root=staging) for name, data in documents.items()]
        for name, data in seal([*written, *checksums]).items():
            write_file(staging / name, data, root=staging)
        commit_export(self._staged.own, real_path(self._target), self._writer.marks, self._writer.owns)


@contextlib.contextmanager
def _staged_remotely(target: RemotePath, channel: Channel, writer: ExportWriter) -> Iterator[StagedExport]:
    if channel.world_size > 1:
        raise OptionError(
            f"{channel.world_size} ranks cannot export to {target} together.",
            where=str(target),
            next_step="Save a checkpoint, then export it with paddleformers_fc export.",
        )
    export = _RemoteExport(target, writer)
    export.remove_older()
    try:
        yield export
    except BaseException:
        export.withdraw()
        raise


class _RemoteExport(StagedExport):
    def __init__(self, target: RemotePath, writer: ExportWriter) -> None:
        self._target, self._writer = target, writer
        self._deferred: list[RemoteFileWriter] = []
        self._begun: list[str] = []

    def remove_older(self) -> None:
        """Delete the files of an older export, its marks first."""
        names = [path.name for path in list_remote(self._target)]
        for name in sorted(filter(self._owns, names), key=lambda name: name not in self._writer.marks):
            remove_remote(self._target / name)

    def _owns(self, name: str) -> bool:
        return name in self._writer.marks or self._writer.owns(name)

    def share(self, files: tuple[OutputFile, ...]) -> tuple[OutputFile, ...]:
        return files

    def create(self, name: str, layout: FileLayout) -> TensorWriter:
        is_mark = name in self._writer.marks
        self._begun.append(name)
        size = len(layout.header) + sum(layout.sizes) + len(layout.trailer)
        file = RemoteFileWriter(self._target, name, size, deferred=is_mark)
        if is_mark:
            self._deferred.append(file)
        return TensorWriter(file, layout)

    def finish(self, documents: Mapping[str, bytes], written: Sequence[FileChecksum], seal: Seal) -> None:
        recorded = [checksum_of(name, data) for name, data in documents.items()]
        documents = {**documents, **seal([*written, *recorded])}
        self._complete(documents, written, marks=False)
        for file in self._deferred:
            file.publish()
        self._complete(documents, written, marks=True)

    def _complete(self, documents: Mapping[str, bytes], written: Sequence[FileChecksum], *, marks: bool) -> None:
        """Upload the documents that are marks, or all others, and compare these files."""
        own = [one for one in written if (one.path in self._writer.marks) == marks]
        chosen = [name for name in documents if (name in self._writer.marks) == marks]
        compare_uploaded(self._target, [*own, *(self._write(name, documents[name]) for name in chosen)])

    def _write(self, name: str, data: bytes) -> FileChecksum:
        self._begun.append(name)
        return write_remote(self._target, name, data)

    def withdraw(self) -> None:
        """Delete what was uploaded, the marks first; the error that led here takes precedence over a refusal."""
        for file in self._deferred:
            file.abandon()
        for name in sorted(self._begun, key=lambda name: name not in self._writer.marks):
            with contextlib.suppress(FlexError):
                remove_remote(self._target / name)
