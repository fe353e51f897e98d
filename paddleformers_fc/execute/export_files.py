"""Write the files of an export: batches are read, hashed, and written at their offsets.

Two batches are in progress at a time, each read and then written by one thread, and neither waits for the other.
Headers are known in advance. If no rank has the whole checkpoint, the ranks take one batch each at a time and read for
each other.

Divide the files of an export into batches that fit into memory, and plan their reads.

A tensor that is larger than a batch is read in pieces. A batch has at most 4 MiB from files of this machine, or 32 MiB
from elsewhere or of transposed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, gather_and_keep, run_on_all
from paddleformers_fc.execute.exchange import ReadContext, read_redistributed
from paddleformers_fc.execute.merging import Merge
from paddleformers_fc.execute.reading import ArraySlot, Key, fill_arrays
from paddleformers_fc.formats.checkpoint import ExportWriter, OutputFile
from paddleformers_fc.layout.shards import Shard, shard_bytes
from paddleformers_fc.plan.build import Planner, ReadSource, row_major_pieces
from paddleformers_fc.plan.items import LoadPlan, ReadItem, flat_start
from paddleformers_fc.plan.report import Report
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.dtypes import dtype_size, to_numpy, to_safetensors
from paddleformers_fc.storage.executor import DEFAULT_OPTIONS, ReadPool, run_workers
from paddleformers_fc.storage.paths import RemotePath
from paddleformers_fc.storage.progress import advance, expect
from paddleformers_fc.storage.safetensors import FileLayout, TensorWriter

_CACHE_BYTES = 4 * 1024 * 1024
"""Bytes of a batch from files of this machine: few enough to be in the processor's cache until they are written."""
_BATCH_BYTES = 32 * 1024 * 1024
"""Bytes of a batch from elsewhere: each takes requests to a store, or an exchange of all ranks."""
_TRANSPOSED_BYTES = 32 * 1024 * 1024
"""Bytes of a piece of a tensor that is not stored in runs: rows enough that runs of its columns are long."""
_BATCHES_PER_FILE = 4
"""Two batches are in memory at a time. Four in a file leave half the size of a file for everything else."""
_PAGE = 4096


@dataclass(frozen=True)
class _TensorRange:
    """Successive elements of one tensor.

    Args:
        tensor: the tensor.
        begin: index of the first element.
        end: index behind the last.
        items: their reads; starts are counted from the first element of the tensor.
    """

    tensor: Shard
    begin: int
    end: int
    items: tuple[ReadItem, ...]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return (self.end - self.begin) * dtype_size(self.tensor.dtype)


@dataclass(frozen=True)
class Batch:
    """Successive ranges of one file that are read together.

    Args:
        file: the file.
        begin: offset of the first byte among the tensors of the file.
        ranges: at most one per tensor.
    """

    file: OutputFile
    begin: int
    ranges: tuple[_TensorRange, ...]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return sum(one.nbytes for one in self.ranges)

    @property
    def items(self) -> tuple[ReadItem, ...]:
        """The reads; starts are counted from the first element of a range."""
        return tuple(
            msgspec.structs.replace(item, start=item.start - one.begin) for one in self.ranges for item in one.items
        )

    def carved(self, memory: np.ndarray[Any, Any]) -> dict[Key, np.ndarray[Any, Any]]:
        """Return a flat array for every range, in memory that is laid out as the file."""
        arrays: dict[Key, np.ndarray[Any, Any]] = {}
        at = 0
        for one in self.ranges:
            part = memory[at : at + one.nbytes]
            arrays[self.file.role, one.tensor.name] = part.view(to_numpy(to_safetensors(one.tensor.dtype)))
            at += part.nbytes
        return arrays


def batch_bytes(source: ReadSource, max_file_bytes: int) -> int:
    """Return the bound on the bytes of a batch; a piece of a transposed tensor may exceed it."""
    is_far = bool(source.catalog.visible_to) or isinstance(source.catalog.root, RemotePath)
    return min(_BATCH_BYTES if is_far else _CACHE_BYTES, max_file_bytes // _BATCHES_PER_FILE)


def batch_memory(files: Sequence[OutputFile], max_bytes: int) -> np.ndarray[Any, Any]:
    """Return memory for any batch. It starts at a page, because the system copies faster to pages of a file then.

    Args:
        files: the files that the batches are of.
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
        planner.report.refuse(str(source.catalog.root))
        some: list[_TensorRange] = []
        begin = used = 0
        planned = zip(file.tensors, items, strict=True)
        pieces = (_pieces(planner, file.role, tensor, own, max_bytes) for tensor, own in planned)
        for piece in (piece for of_tensor in pieces for piece in of_tensor):
            # A range without bytes stays with the range before it: a file is whole when its last byte is written.
            if some and piece.nbytes and used + piece.nbytes > max_bytes:
                yield Batch(file, begin, tuple(_joined(some)))
                some, begin, used = [], begin + used, 0
            some.append(piece)
            used += piece.nbytes
        yield Batch(file, begin, tuple(_joined(some)))


def _pieces(
    planner: Planner, role: str, tensor: Shard, items: list[ReadItem], max_bytes: int
) -> Iterator[_TensorRange]:
    """Yield a tensor as ranges of the size of a batch, or larger ones if short runs of the file would be read."""
    most = max(max_bytes, _CACHE_BYTES if all(map(_is_run, items)) else _TRANSPOSED_BYTES)
    for part in row_major_pieces(tensor, most):
        if part.flat is None:
            yield _TensorRange(tensor, 0, tensor.size, tuple(items))
        else:
            begin, end = part.flat
            planned = (msgspec.structs.replace(item, start=begin + item.start) for item in planner.items(role, part))
            yield _TensorRange(tensor, begin, end, tuple(planned))


def _is_run(item: ReadItem) -> bool:
    """Return whether an item is one run of elements in its file and in its tensor."""
    stored, is_ordered = item.stored, item.axes == tuple(range(len(item.stored.shape)))
    return (
        is_ordered
        and flat_start(stored.shape, stored.part) is not None
        and flat_start(item.shape, item.part) is not None
    )


def _joined(ranges: Iterable[_TensorRange]) -> Iterator[_TensorRange]:
    """Yield successive ranges of the same tensor as one."""
    for _, same in groupby(ranges, key=lambda one: one.tensor.name):
        group = list(same)
        items = tuple(item for one in group for item in one.items)
        yield _TensorRange(group[0].tensor, group[0].begin, group[-1].end, items)


_READERS = 2
"""Number of batches that are read and written at a time."""


@dataclass(frozen=True)
class ExportJob:
    """The part of an export that one rank writes.

    Args:
        create: begins a file.
        source: the checkpoint.
        writer: the format of the files.
        files: the files of this rank.
        batch_bytes: bound on the bytes of a batch.
        merge: the change of the tensors that are read; None without one.
    """

    create: Callable[[str, FileLayout], TensorWriter]
    source: ReadSource
    writer: ExportWriter
    files: tuple[OutputFile, ...]
    batch_bytes: int
    merge: Merge | None = None

    def merged(self, batch: Batch, memory: np.ndarray[Any, Any]) -> None:
        """Change what was read of a batch."""
        if self.merge is not None:
            for one, values in zip(batch.ranges, batch.carved(memory).values(), strict=True):
                self.merge.apply(one.tensor.name, one.begin, values)


def write_files(job: ExportJob, channel: Channel) -> list[FileChecksum]:
    """Write the files of all ranks.

    Args:
        job: the files of this rank.
        channel: all ranks; every rank must call, also one that writes no file.
    Returns:
        the checksums of the files of all ranks.
    Raises:
        FlexError: the same on every rank.
    """
    together = bool(job.source.catalog.visible_to)
    expect(sum(shard_bytes(shard) for file in job.files for shard in file.tensors))
    written = (
        _write_together(job, channel)
        if together
        else all_gather_checked(channel, "exporting", lambda: _write_own(job), list[FileChecksum])
    )
    return [checksum for theirs in written for checksum in theirs]


def _write_own(job: ExportJob) -> list[FileChecksum]:
    """Write this rank's files; each thread reads a batch and writes it while the other reads or writes."""
    # As many threads read as in a load, if tensors are large. Threads that read from a store only wait.
    root = job.source.catalog.root
    near = replace(DEFAULT_OPTIONS, threads=DEFAULT_OPTIONS.threads // _READERS)
    options = DEFAULT_OPTIONS if isinstance(root, RemotePath) else near
    memories = [batch_memory(job.files, job.batch_bytes) for _ in range(_READERS)]

    def lane(draw: Callable[[], Batch | None]) -> int:
        memory, total = memories.pop(), 0
        with ReadPool(options, job.source.catalog.identities) as pool:
            while (batch := draw()) is not None:
                total += fill_arrays(pool, root, batch.items, batch.carved(memory))
                job.merged(batch, memory)
                output.write(batch, memory)
        return total

    with _OutputWriter(job) as output, ThreadPoolExecutor(_READERS, "flex-export") as threads:
        run_workers(threads, _READERS, output.begun(plan_batches(job.source, job.files, job.batch_bytes)), lane)
    return output.checksums


def _write_together(job: ExportJob, channel: Channel) -> list[list[FileChecksum]]:
    """Write the files of all ranks in steps; a rank without a batch reads for others."""

    def plan() -> tuple[int, list[Batch]]:
        batches = list(plan_batches(job.source, job.files, job.batch_bytes))
        return len(batches), batches

    counts, batches = gather_and_keep(channel, "planning an export", plan, int)
    catalog = job.source.catalog
    storage = ReadContext(catalog.root, catalog.identities, catalog.visible_to)
    memory = batch_memory(job.files, job.batch_bytes)
    with _OutputWriter(job) as output:
        for step in range(max(counts)):
            own = batches[step : step + 1]
            reads = LoadPlan(tuple(item for batch in own for item in batch.items), (), {}, Report())
            slots = {key: ArraySlot(array) for batch in own for key, array in batch.carved(memory).items()}
            read_redistributed(reads, storage, slots, channel)
            for batch in own:
                job.merged(batch, memory)
            run_on_all(channel, "exporting", partial(output.write_all, own, memory))
        return all_gather_checked(channel, "collecting checksums", lambda: output.checksums, list[FileChecksum])


class _OutputWriter:
    """The files of one rank, written batch by batch by any thread.

    A context manager: at its end every file is whole; after an error, open files are closed as they are.

    Args:
        job: the files.

    Attributes:
        checksums: of the files that are finished.
    """

    def __init__(self, job: ExportJob) -> None:
        self.checksums: list[FileChecksum] = []
        self._job = job
        self._open: dict[str, TensorWriter] = {}

    def begun(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and create each file before its first one: in one thread, so that a failure is one."""
        for batch in batches:
            if batch.file.path not in self._open:
                layout = self._job.writer.header(Path(batch.file.path), batch.file.tensors)
                self._open[batch.file.path] = self._job.create(batch.file.path, layout)
            yield batch

    def write(self, batch: Batch, memory: np.ndarray[Any, Any]) -> None:
        """Hash and write a batch that has begun; the thread that writes the last one of a file finishes it.

        Args:
            batch: the batch.
            memory: begins with its bytes.
        """
        writer = self._open[batch.file.path]
        is_last = writer.write(batch.begin, memory[: batch.nbytes])
        advance(batch.nbytes)
        if is_last:
            self.checksums.append(writer.close())
            del self._open[batch.file.path]

    def write_all(self, batches: Sequence[Batch], memory: np.ndarray[Any, Any]) -> None:
        """Begin and write one batch, or none."""
        for batch in self.begun(batches):
            self.write(batch, memory)

    def __enter__(self) -> _OutputWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._open.values():
            if kind is None:
                writer.close()
            else:
                writer.abandon()
