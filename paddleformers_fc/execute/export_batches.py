"""Divide the files of an export into batches that fit into memory, and plan their reads.

A tensor that is larger than a batch is read in pieces. A batch has at most 4 MiB from files of this machine, or 32 MiB
from elsewhere or of transposed tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.execute.read_jobs import Key, flat_start
from paddleformers_fc.formats.checkpoint import OutputFile
from paddleformers_fc.layout.shards import Shard, shard_bytes
from paddleformers_fc.plan import ReadItem, ReadSource
from paddleformers_fc.plan.bounded_boxes import row_major_pieces
from paddleformers_fc.plan.build import Planner
from paddleformers_fc.storage.dtypes import dtype_size, to_numpy, to_safetensors
from paddleformers_fc.storage.paths import RemotePath

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
        plan = planner.plan({file.role: {shard.name: shard for shard in file.tensors}})
        plan.report.refuse(str(source.catalog.root))
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.name, []).append(item)
        some: list[_TensorRange] = []
        begin = used = 0
        pieces = (_pieces(planner, file.role, one, items.get(one.name, []), max_bytes) for one in file.tensors)
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
