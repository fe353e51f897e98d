"""Write the files of an export into a local directory or to a URL, in batches.

Two threads each read, hash and write a batch of at most 4 MiB (32 MiB from a store or of transposed tensors); a larger
tensor is written in pieces. A local export is staged and renamed (:mod:`~paddleformers_fc.storage.commit`).

Object stores cannot rename, so the order of uploads ensures that no directory with a *marker*, a file by which readers
recognise an export, is incomplete. First the markers of an older export are deleted, then its other files. Tensors,
metadata files and checksums are uploaded (tensor files that are markers without completing them), read again and
compared. Then the markers are completed and compared. After an error the uploaded files are deleted, markers first; a
killed process leaves files without a marker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import structs

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute.commit_coordinator import StagingDirectory, staging_beside
from paddleformers_fc.execute.digest import Array, PieceBatch, TensorHasher, piece_batches
from paddleformers_fc.execute.merging import Merge
from paddleformers_fc.formats.checkpoint import ExportWriter, OutputFile
from paddleformers_fc.layout.shards import ShardsByRole, shard_bytes
from paddleformers_fc.plan.build import Planner, ReadSource
from paddleformers_fc.plan.items import ReadItem, is_contiguous
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.commit import commit_export, staged_name
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, ReadPool, run_workers
from paddleformers_fc.storage.files import RandomAccessWriter, real_path, write_file
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.storage.remote import list_remote
from paddleformers_fc.storage.remote_writes import RemoteFileWriter, compare_uploaded, remove_remote, write_remote
from paddleformers_fc.storage.safetensors import FileLayout, TensorWriter

_CACHE_BYTES = 4 * 1024 * 1024
"""Bytes of a batch from local files, small enough to stay in the processor's cache until they are written."""
_BATCH_BYTES = 32 * 1024 * 1024
"""Bytes of a batch from a store, large because each batch takes requests."""
_TRANSPOSED_BYTES = 32 * 1024 * 1024
"""Bytes of a piece of a transposed tensor, enough rows to make the runs of its columns long."""
_BATCHES_PER_FILE = 4
"""Minimum number of batches in a file, so that the two batches in memory take at most half the size of a file."""
_PAGE = 4096


@dataclass(frozen=True)
class Batch:
    """Successive pieces of one file that are read together.

    Args:
        file: the file.
        begin: offset of the first byte in the concatenated tensors of the file.
        reads: the pieces.
    """

    file: OutputFile
    begin: int
    reads: PieceBatch


def batch_bytes(source: ReadSource, max_file_bytes: int) -> int:
    """Return the bound on the bytes of a batch; a piece of a transposed tensor may exceed it."""
    is_far = isinstance(source.catalog.root, RemotePath)
    return min(_BATCH_BYTES if is_far else _CACHE_BYTES, max_file_bytes // _BATCHES_PER_FILE)


def batch_memory(files: Sequence[OutputFile], max_bytes: int) -> Array:
    """Return memory for any batch, aligned to a page, from which the system writes files faster.

    Args:
        files: the files of the batches.
        max_bytes: the result of :func:`batch_bytes`.
    """
    largest = max((shard_bytes(shard) for file in files for shard in file.tensors), default=0)
    size = max(max_bytes, min(largest, _TRANSPOSED_BYTES))
    memory = np.empty(size + _PAGE, np.uint8)
    begin = -memory.ctypes.data % _PAGE
    return memory[begin : begin + size]


def plan_batches(source: ReadSource, files: Sequence[OutputFile], max_bytes: int) -> Iterator[Batch]:
    """Yield the batches of all files in order; reads are planned file by file.

    Args:
        source: the checkpoint.
        files: the files.
        max_bytes: the result of :func:`batch_bytes`.
    Raises:
        MismatchError: the source lacks a tensor.
    """
    planner = Planner(source)
    for file in files:
        items = [planner.items(file.role, tensor) for tensor in file.tensors]
        planner.report.raise_error(str(source.catalog.root))
        begin, planned = 0, zip(file.tensors, items, strict=True)
        tensors = ((file.role, tensor, own, _piece_bytes(max_bytes, own)) for tensor, own in planned)
        for reads in piece_batches(planner, tensors, max_bytes):
            yield Batch(file, begin, reads)
            begin += reads.nbytes


def _piece_bytes(max_bytes: int, items: list[ReadItem]) -> int:
    """Return the bound on the pieces of a tensor: a batch, or more if short runs of the file would be read."""
    return max(max_bytes, _CACHE_BYTES if all(map(_is_run, items)) else _TRANSPOSED_BYTES)


def _is_run(item: ReadItem) -> bool:
    """Return whether an item is contiguous in its file and in its tensor."""
    stored, is_ordered = item.stored, item.axes == tuple(range(len(item.stored.shape)))
    return is_ordered and is_contiguous(stored.shape, stored.part) and is_contiguous(item.shape, item.part)


@dataclass(frozen=True)
class LocalExport:
    """An export that is being written into a staging directory.

    Args:
        staged: the staging directory.
        target: the output directory.
        writer: the format's writer.
    """

    staged: StagingDirectory
    target: Path
    writer: ExportWriter

    def create(self, name: str, layout: FileLayout) -> TensorWriter:
        """Begin a file of tensors; safe from several threads at once."""
        return TensorWriter(RandomAccessWriter(self.staged.path / name, root=self.staged.path), layout)

    def finish(self, documents: Mapping[str, bytes], written: Sequence[FileChecksum]) -> None:
        """Commit the export; the coordinator calls, after all tensor files are closed.

        Args:
            documents: the metadata files.
            written: the checksums of the tensor files of all ranks.
        Raises:
            StorageError: the system refused.
        """
        if self.staged.own is not None:
            for name, data in documents.items():
                write_file(self.staged.path / name, data, root=self.staged.path)
            commit_export(self.staged.own, real_path(self.target), self.writer.marks, self.writer.owns)


@dataclass(frozen=True)
class RemoteExport:
    """An export that one process is uploading.

    Args:
        target: the URL.
        writer: the format's writer.
        deferred: uploaded markers that are not completed.
        begun: names of the files that may be in the store.
    """

    target: RemotePath
    writer: ExportWriter
    deferred: list[RemoteFileWriter] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    def remove_older(self) -> None:
        """Delete the files of an older export, markers first."""
        names = [path.name for path in list_remote(self.target)]
        for name in self._marks_first(name for name in names if name in self.writer.marks or self.writer.owns(name)):
            remove_remote(self.target / name)

    def create(self, name: str, layout: FileLayout) -> TensorWriter:
        """Begin a file of tensors; safe from several threads at once."""
        is_mark = name in self.writer.marks
        self.begun.append(name)
        size = len(layout.header) + sum(layout.sizes) + len(layout.trailer)
        file = RemoteFileWriter(self.target, name, size, deferred=is_mark)
        if is_mark:
            self.deferred.append(file)
        return TensorWriter(file, layout)

    def finish(self, documents: Mapping[str, bytes], written: Sequence[FileChecksum]) -> None:
        """Commit the export, after all tensor files are closed.

        Raises:
            Corrupt: the store does not have the bytes that were written.
            StorageError: it refused.
        """
        for marks in (False, True):
            for file in self.deferred if marks else ():
                file.publish()
            due = [one for one in written if (one.path in self.writer.marks) == marks]
            for name in documents:
                if (name in self.writer.marks) == marks:
                    self.begun.append(name)
                    due.append(write_remote(self.target, name, documents[name]))
            compare_uploaded(self.target, due)

    def withdraw(self) -> None:
        """Delete what was uploaded, markers first, and ignore errors."""
        for file in self.deferred:
            file.abandon()
        for name in self._marks_first(self.begun):
            with contextlib.suppress(FlexError):
                remove_remote(self.target / name)

    def _marks_first(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: name not in self.writer.marks)


@contextlib.contextmanager
def staged_export(target: AnyPath, writer: ExportWriter) -> Iterator[LocalExport | RemoteExport]:
    """Context manager around the writing of an export. An error leaves nothing that readers take for an export.

    Args:
        target: the output directory or URL.
        writer: the format's writer.
    """
    if isinstance(target, Path):
        with staging_beside(target, ALONE, place_of=staged_name) as staged:
            yield LocalExport(staged, target, writer)
        return
    export = RemoteExport(target, writer)
    export.remove_older()
    try:
        yield export
    except BaseException:
        export.withdraw()
        raise


_READERS = 2
"""Number of batches that are read and written at a time."""


@dataclass(frozen=True)
class ExportPlan:
    """The plan of an export.

    Args:
        source: the source from the checkpoint to the tensors of the format.
        layout: the tensors of the format, by role.
        files: the files and their tensors.
        writer: the format's writer.
        merge: the adapters to merge into the weights, if any.
        max_file_bytes: bound on the tensors of one file.
    """

    source: ReadSource
    layout: ShardsByRole
    files: tuple[OutputFile, ...]
    writer: ExportWriter
    merge: Merge | None
    max_file_bytes: int

    def merged(self, batch: Batch, arrays: Sequence[Array]) -> None:
        """Apply the adapters to a batch that was read."""
        if self.merge is not None:
            for one, values in zip(batch.reads.pieces, arrays, strict=True):
                self.merge.apply(one.tensor.name, one.begin, values)


def write_files(
    plan: ExportPlan, target: LocalExport | RemoteExport, hasher: TensorHasher | None = None
) -> list[FileChecksum]:
    """Write the files of a plan, and return their checksums.

    Two threads work at a time; each reads a batch and writes it.

    Args:
        plan: the files.
        target: where to write them.
        hasher: computes the md5 of every tensor that is written.
    """
    expect(sum(shard_bytes(shard) for file in plan.files for shard in file.tensors))
    # Both threads together read with as many threads as a load. Threads that read from a store mostly wait.
    root = plan.source.catalog.root
    near = structs.replace(DEFAULT_OPTIONS, threads=DEFAULT_OPTIONS.threads // _READERS)
    options = DEFAULT_OPTIONS if isinstance(root, RemotePath) else near
    max_bytes = batch_bytes(plan.source, plan.max_file_bytes)
    memories = [batch_memory(plan.files, max_bytes) for _ in range(_READERS)]

    def lane(draw: Callable[[], Batch | None]) -> int:
        memory, count = memories.pop(), 0
        with ReadPool(options, plan.source.catalog.identities) as pool, hasher or contextlib.nullcontext():
            while (batch := draw()) is not None:
                arrays = batch.reads.read(pool, root, memory)
                plan.merged(batch, arrays)
                if hasher is not None:
                    for piece, numbers in zip(batch.reads.pieces, arrays, strict=True):
                        hasher.update(piece, numbers)
                output.write(batch, memory)
                count += 1
        return count

    with _OutputWriter(target) as output, ThreadPoolExecutor(_READERS, "flex-export") as threads:
        run_workers(threads, _READERS, output.begun(plan_batches(plan.source, plan.files, max_bytes)), lane)
    return output.checksums


class _OutputWriter:
    """Writes the files of an export, batch by batch, from any thread.

    A context manager: at its end every file is complete, or open files are abandoned after an error.

    Args:
        target: where to write them.

    Attributes:
        checksums: the checksums of the finished files.
    """

    def __init__(self, target: LocalExport | RemoteExport) -> None:
        self.checksums: list[FileChecksum] = []
        self._target = target
        self._open: dict[str, TensorWriter] = {}

    def begun(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and create each file before its first batch."""
        for batch in batches:
            if batch.file.path not in self._open:
                layout = self._target.writer.header(Path(batch.file.path), batch.file.tensors)
                self._open[batch.file.path] = self._target.create(batch.file.path, layout)
            yield batch

    def write(self, batch: Batch, memory: Array) -> None:
        """Hash and write a batch; the thread that writes the last batch of a file finishes the file.

        Args:
            batch: a batch of :meth:`begun`.
            memory: memory that begins with the batch's bytes.
        """
        writer, size = self._open[batch.file.path], batch.reads.nbytes
        is_last = writer.write(batch.begin, memory[:size])
        advance(size)
        if is_last:
            self.checksums.append(writer.close())
            del self._open[batch.file.path]

    def __enter__(self) -> _OutputWriter:
        return self

    def __exit__(self, error: object, *raised: object) -> None:
        for writer in self._open.values():
            writer.close() if error is None else writer.abandon()
