"""Export: a flex checkpoint, or a live model, as Hugging Face files of bounded size.

Canonical tensors are put into files in natural order; every rank on the coordinator's disk writes some of the files,
reading just the ranges that its tensors are made of. Two batches of tensors are under way at a time, each read and
then written by a thread of its own, so that neither waits for the other unless both write the same file. A tensor that
is larger than a batch is read in pieces. Memory is at most twice 4 MiB from files of this machine, twice 32 MiB from
elsewhere or of transposed tensors, plus scratch memory, whatever the size of the model or of a tensor. The same
checkpoint content gives the same bytes whatever layout it was saved under. Checksums of all files are taken while they
are written, and are written beside them (:mod:`paddleformers_fc.storage.export_checksums`).

Where no rank sees all of the checkpoint, the ranks go from batch to batch together, and get from each other what they
do not see.

A live model is first written as a checkpoint that holds its weights alone, into a staging directory beside the target,
and exported from there: one more pass over the storage instead of gathering tensors over the network.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import ALONE, Channel, all_gather_checked, gather_and_keep, run_on_all
from paddleformers_fc.distributed.consistency import ConsistencyCheck, software_versions
from paddleformers_fc.distributed.disk_leaders import DiskLeaders
from paddleformers_fc.errors import OptionError, StorageError
from paddleformers_fc.execute.opening import compare_unread, open_on_all_ranks, own_file
from paddleformers_fc.execute.read_jobs import Key, flat_start
from paddleformers_fc.execute.read_pool import DEFAULT_OPTIONS, ReadPool, run_workers
from paddleformers_fc.execute.reading import ArraySlot, fill_arrays
from paddleformers_fc.execute.redistribute import ReadContext, compare_redistributed, read_redistributed
from paddleformers_fc.execute.save import JobRecord, save_checkpoint
from paddleformers_fc.execute.staging_directory import staging_beside
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.formats.checkpoint import REFUSE, OpenedCheckpoint, not_a_flex_checkpoint
from paddleformers_fc.formats.flex import MAPPING_NAME
from paddleformers_fc.formats.huggingface import INDEX_NAME, SINGLE_NAME
from paddleformers_fc.formats.registry import checkpoints_advice
from paddleformers_fc.layout import Shard
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.plan import LoadPlan, ReadItem, ReadSource, Report, canonical_layout, canonical_source, plan_reads
from paddleformers_fc.plan.build import Planner
from paddleformers_fc.plan.pieces import row_major_pieces, shard_bytes
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.storage.checksum import BlockHasher
from paddleformers_fc.storage.commit import discard
from paddleformers_fc.storage.dtypes import item_size, to_numpy, to_safetensors
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, write_checksums
from paddleformers_fc.storage.export_commit import commit_export, replace_export, staging_parent
from paddleformers_fc.storage.file_checksums import FileChecksum
from paddleformers_fc.storage.files import list_directory, real_path, write_file
from paddleformers_fc.storage.manifest import MANIFEST_NAME, verify_files
from paddleformers_fc.storage.paths import AnyPath, RemotePath
from paddleformers_fc.storage.safetensors import RandomAccessTensorWriter, layout_file
from paddleformers_fc.text import natural

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
TRAINER_DIRECTORY = "trainer"
"""Where the trainer keeps its own state inside a checkpoint."""

RUN_ARGUMENTS = "training_args.json"
"""The training arguments beside an export of a Trainer: of the run and its layout, and not in its checksums."""

_CACHE_BYTES = 4 * 1024 * 1024
"""Bytes of a batch from files of this machine: few enough to be in the processor's cache until they are written."""
_BATCH_BYTES = 32 * 1024 * 1024
"""Bytes of a batch from elsewhere, which takes requests to a store, or a meeting of all ranks."""
_TRANSPOSED_BYTES = 32 * 1024 * 1024
"""Bytes of a piece of a tensor that is not stored in runs: rows enough that runs of its columns are long."""
_BATCHES_PER_FILE = 4
"""Two batches are in memory at a time; four in a file leave half the size of a file for everything else."""
_READERS = 2
"""How many batches are read and written at a time."""
_PAGE = 4096


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Args:
        directory: the target.
        files: name -> bytes of every weight file.
        tensors: number of canonical tensors.
        bytes: bytes of tensors.
    """

    directory: Path
    files: dict[str, int]
    tensors: int
    bytes: int

    def digests(self) -> dict[str, str]:
        """The checksum (xxh3_128) of every weight file, which is read for it; exports of equal content have equal ones.

        Raises:
            Corrupt, StorageError: a file is gone or cannot be read.
        """
        return {name: digest_of(self.directory / name) for name in self.files}


@dataclass(frozen=True)
class _FilePlan:
    """One file of the export: its name and tensors."""

    name: str
    tensors: tuple[Shard, ...]


def export_checkpoint(
    source: AnyPath,
    target: Path,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    channel: Channel = ALONE,
    verify: str = "size",
    tied: str = REFUSE,
) -> ExportReport:
    """Write a checkpoint's weights as a Hugging Face directory.

    Args:
        source: a finished flex checkpoint, or one of Paddle with a ``config.json`` in it.
        target: the directory to write. Where it holds other files they are kept; older weights are replaced.
        max_shard_bytes: bound on the tensors of one file, in bytes; a larger tensor has a file of its own.
        channel: the ranks that share the work; every rank must call.
        verify: how the source is checked: ``off``, ``size`` or ``full``.
        tied: which copy of a tied tensor is exported, by pipeline stage: ``first`` or ``last``; under ``refuse`` the
            copies must be equal.
    Raises:
        FlexError: the same on every rank; older weights in the target are untouched.
    """
    facts = {"versions": software_versions(), "max_shard_bytes": max_shard_bytes, "flex_tied": tied}
    consistency = ConsistencyCheck(f"exporting to {target.name}", facts)
    checkpoint = replace(open_on_all_ranks(source, channel, verify, consistency=consistency), tied=tied)
    return export_opened(checkpoint, target, max_shard_bytes, channel)


def export_opened(
    checkpoint: OpenedCheckpoint, target: Path, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES, channel: Channel = ALONE
) -> ExportReport:
    """Write the weights of an opened checkpoint as a Hugging Face directory.

    Args:
        checkpoint: opened by every rank; where it is ``unread``, every byte of its files is compared first.
        target: as in :func:`export_checkpoint`.
        max_shard_bytes: as in :func:`export_checkpoint`.
        channel: the ranks that share the work; every rank must call.
    Raises:
        FlexError: the same on every rank; older weights in the target are untouched.
    """
    if max_shard_bytes < 1:
        raise OptionError(f"max_shard_bytes is {max_shard_bytes}; a file holds at least one byte.")
    source = checkpoint.catalog.root

    def prepare() -> ReadSource:
        _refuse_checkpoint(target)
        if checkpoint.format.canonical:
            raise not_a_flex_checkpoint(checkpoint.format, source, checkpoints_advice(source))
        if checkpoint.unread and checkpoint.commit_record is not None and not checkpoint.catalog.seen_by:
            verify_files(source, checkpoint.commit_record, "full")
        return canonical_source(checkpoint)

    canonical = run_on_all(channel, f"preparing an export to {target.name}", prepare)
    if checkpoint.unread and checkpoint.catalog.seen_by:
        compare_unread(checkpoint, channel)
    layout = canonical_layout(canonical).get(MODEL_STATE, {})
    _refuse_untied(canonical, layout, channel)
    files, room = _split_into_files(layout, max_shard_bytes), _batch_bytes(canonical, max_shard_bytes)
    small = _small_files(checkpoint, channel)
    with staging_beside(target, channel, _nothing, staging_parent) as staged:
        mine = _files_of_rank(files, staged.disks, channel.rank)
        if canonical.catalog.seen_by:
            written = _write_together(staged.path, canonical, mine, room, channel)
        else:
            written = all_gather_checked(
                channel, "exporting", lambda: _write_files(staged.path, canonical, mine, room), list[FileChecksum]
            )

        receipts = [receipt for theirs in written for receipt in theirs]

        def finish() -> None:
            if channel.rank == 0:
                _finish(staged.path, real_path(target), small, files, receipts)
            elif channel.rank in staged.disks.sorted_leaders:
                _try_discard(staged.path)  # An export is on one disk, that of the coordinator.

        run_on_all(channel, "finishing the export", finish)
    sizes = {receipt.path: receipt.size for receipt in receipts}
    total = sum(shard_bytes(shard) for shard in layout.values())
    return ExportReport(target, dict(sorted(sizes.items())), len(layout), total)


def save_weights(
    weights: Mapping[str, Any],
    model: ModelDescription,
    files: Mapping[str, bytes],
    target: Path,
    max_shard_bytes: int,
    channel: Channel,
    tied: str = REFUSE,
) -> ExportReport:
    """Write a live model's weights as a Hugging Face directory.

    Args:
        weights: name -> live ``ShardedWeight`` of this rank.
        model: what the model was built from.
        files: small files for the directory, ``config.json`` among them, on rank 0.
        target: as in :func:`export_checkpoint`.
        max_shard_bytes: as in :func:`export_checkpoint`.
        channel: all ranks of the job; every rank must call.
        tied: as in :func:`export_checkpoint`.
    Raises:
        FlexError: the same on every rank; older weights in the target are untouched.
    """
    with staging_beside(target, channel, _nothing, staging_parent) as staged:
        passage = staged.path / "weights"
        save_checkpoint(passage, {MODEL_STATE: weights}, model, files, JobRecord(0, 0, {}), channel)
        report = export_checkpoint(passage, target, max_shard_bytes, channel, tied=tied)
        if channel.rank in staged.disks.sorted_leaders:
            _try_discard(staged.path)
    return report


def _try_discard(staging: Path) -> None:
    """Delete a directory that has served; one that resists goes with the next export, for this one is there."""
    with suppress(StorageError):
        discard(staging)


def _nothing() -> None:
    """What must hold before an export is written: the checkpoint was opened and proved already."""


def _refuse_checkpoint(target: Path) -> None:
    if (target / MANIFEST_NAME).exists():
        raise OptionError(
            "The target of the export is a finished checkpoint, which is never written into.",
            where=str(target),
            next_step="Name another directory.",
        )


def refuse_target(target: Path, small: Sequence[str], replace: bool) -> None:
    """Refuse a target inside a checkpoint, or with a model that may not be replaced.

    Args:
        target: the directory of an export.
        small: names of the small files that the export writes.
        replace: whether a model in the target may be replaced.
    Raises:
        OptionError: the target is refused.
    """
    inside = next((path for path in (target, *real_path(target).parents) if (path / MANIFEST_NAME).exists()), None)
    if inside is not None:
        raise OptionError(
            "An export is not written into a checkpoint.",
            where=str(target),
            evidence=[f"{inside / MANIFEST_NAME} is there"],
            next_step="Name another directory.",
        )
    present = [name for name in (INDEX_NAME, SINGLE_NAME, *small) if (target / name).exists()]
    if present and not replace:
        raise OptionError(
            "The directory holds a model already, or files of one.",
            where=str(target),
            evidence=[f"{name} is there" for name in present],
            next_step="Name another directory, or add --replace to replace these files and its weights.",
        )


def _refuse_untied(source: ReadSource, layout: Mapping[str, Shard], channel: Channel) -> None:
    """An export holds a tied weight once, so what is stored of it under two names must be equal."""
    stored, read = source.catalog.roles.get(MODEL_STATE, {}), source.mapping.read
    owners = {owner for alias, owner in source.stored_aliases.items() if alias in stored and owner in read}
    held = [name for owner in sorted(owners) for name in read[owner].names]
    checks = plan_reads(source, {MODEL_STATE: {name: layout[name] for name in held}}).checks
    if checks:
        storage = ReadContext(source.catalog.root, source.catalog.identities, source.catalog.seen_by)
        compare_redistributed(checks if channel.rank == 0 else (), storage, channel)


def _files_of_rank(files: list[_FilePlan], disks: DiskLeaders, rank: int) -> list[_FilePlan]:
    """The files that a rank writes: those on the coordinator's disk share them."""
    writers = disks.sharing()[0]
    return files[writers.index(rank) :: len(writers)] if rank in writers else []


def _split_into_files(layout: Mapping[str, Shard], max_shard_bytes: int) -> list[_FilePlan]:
    """Tensors in natural order, in files of bounded size."""
    groups: list[list[Shard]] = []
    room = 0
    for name in sorted(layout, key=natural):
        size = shard_bytes(layout[name])
        if not groups or size > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(layout[name])
        room -= size
    if len(groups) == 1:
        return [_FilePlan(SINGLE_NAME, tuple(groups[0]))]
    return [
        _FilePlan(f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for index, group in enumerate(groups)
    ]


@dataclass(frozen=True)
class _TensorRange:
    """Successive numbers of one tensor.

    Args:
        tensor: whose.
        begin: the first of them.
        end: behind the last.
        items: how to read them; where they start is counted from the first number of the tensor.
    """

    tensor: Shard
    begin: int
    end: int
    items: tuple[ReadItem, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of these numbers."""
        return (self.end - self.begin) * item_size(to_safetensors(self.tensor.dtype))


@dataclass(frozen=True)
class _Batch:
    """Successive pieces of one file that are read together.

    Args:
        file: which file.
        begin: where they begin among the bytes of its tensors.
        pieces: of each tensor those that follow one another are one.
    """

    file: _FilePlan
    begin: int
    pieces: tuple[_TensorRange, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def items(self) -> tuple[ReadItem, ...]:
        """How to read them; where they start is counted from the first number of a piece."""
        return tuple(
            msgspec.structs.replace(item, start=item.start - piece.begin)
            for piece in self.pieces
            for item in piece.items
        )

    def carved(self, memory: np.ndarray[Any, Any]) -> dict[Key, np.ndarray[Any, Any]]:
        """A flat array for every piece, one behind the other as in the file."""
        arrays: dict[Key, np.ndarray[Any, Any]] = {}
        at = 0
        for piece in self.pieces:
            part = memory[at : at + piece.nbytes]
            arrays[MODEL_STATE, piece.tensor.name] = part.view(to_numpy(to_safetensors(piece.tensor.dtype)))
            at += part.nbytes
        return arrays


def _write_files(staging: Path, source: ReadSource, files: list[_FilePlan], room: int) -> list[FileChecksum]:
    """Write this rank's files: every thread reads a batch, and writes it while others read and write theirs."""
    # As many read as in a load, if tensors are large; threads that read from a store only wait.
    near = replace(DEFAULT_OPTIONS, threads=DEFAULT_OPTIONS.threads // _READERS)
    options = DEFAULT_OPTIONS if isinstance(source.catalog.root, RemotePath) else near
    memories = [_memory(room, files) for _ in range(_READERS)]

    def lane(draw: Callable[[], _Batch | None]) -> int:
        memory, total = memories.pop(), 0
        with output.stopping(), ReadPool(options, source.catalog.identities) as pool:
            while (batch := draw()) is not None:
                total += fill_arrays(pool, source.catalog.root, batch.items, batch.carved(memory))
                if not output.write(batch, memory):
                    break
        return total

    with _Output(staging) as output, ThreadPoolExecutor(_READERS, "flex-export") as pool:
        run_workers(pool, _READERS, output.begun(_batches(source, files, room)), lane)
    return output.receipts


def _write_together(
    staging: Path, source: ReadSource, files: list[_FilePlan], room: int, channel: Channel
) -> list[list[FileChecksum]]:
    """As :func:`_write_files`, all ranks in step; every rank's receipts. One with nothing to write reads for others."""

    def plan() -> tuple[int, list[_Batch]]:
        batches = list(_batches(source, files, room))
        return len(batches), batches

    counts, batches = gather_and_keep(channel, "planning an export", plan, int)
    steps = max(counts)
    storage = ReadContext(source.catalog.root, source.catalog.identities, source.catalog.seen_by)
    memory = _memory(room, files)
    with _Output(staging) as output:
        for step in range(steps):
            own = batches[step : step + 1]
            arrays = {key: array for batch in own for key, array in batch.carved(memory).items()}
            reads = LoadPlan(tuple(item for batch in own for item in batch.items), (), {}, Report())
            slots = {key: ArraySlot(array) for key, array in arrays.items()}
            read_redistributed(reads, storage, slots, channel)
            run_on_all(channel, "exporting", partial(output.write_all, own, memory))
        return all_gather_checked(channel, "collecting checksums", lambda: output.receipts, list[FileChecksum])


class _Output:
    """The files of one rank, written batch by batch, by any thread.

    Batches are hashed in the order of their file: a thread waits until the batches before its own are hashed. They are
    drawn in that order, so that another thread has them.

    A context manager: at its end every file is whole, and what an error leaves open is closed as it is.

    Args:
        staging: where.

    Attributes:
        receipts: of the files that are finished.
    """

    def __init__(self, staging: Path) -> None:
        self.receipts: list[FileChecksum] = []
        self._staging = staging
        self._open: dict[str, _OpenOutput] = {}
        self._turns = threading.Condition()
        self._stopped = False

    def begun(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches, each file made before its first one comes: by one thread, so that what fails fails once."""
        for batch in batches:
            if batch.file.name not in self._open:
                self._open[batch.file.name] = _opened_output(self._staging, batch.file)
            yield batch

    def write(self, batch: _Batch, memory: np.ndarray[Any, Any]) -> bool:
        """Hash and write a batch that has begun; a file is finished by who writes the last of it.

        Args:
            batch: which.
            memory: begins with their bytes.
        Returns:
            False if another thread has failed, so that this one stops.
        """
        name, data = batch.file.name, memory[: batch.nbytes]
        output = self._open[name]
        with self._turns:
            self._turns.wait_for(lambda: self._stopped or output.hashed == batch.begin)
            if self._stopped:
                return False
        output.hasher.update(data.data)
        with self._turns:
            output.hashed += batch.nbytes
            self._turns.notify_all()
        if output.writer.write(batch.begin, data):
            output.writer.close()
            self.receipts.append(output.hasher.file_checksum(name))
            del self._open[name]
        return True

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Let a thread that fails in this block wake those that wait for it, so that they stop."""
        try:
            yield
        except BaseException:
            with self._turns:
                self._stopped = True
                self._turns.notify_all()
            raise

    def write_all(self, batches: Sequence[_Batch], memory: np.ndarray[Any, Any]) -> None:
        """Begin and write one batch, or none."""
        for batch in self.begun(batches):
            self.write(batch, memory)

    def __enter__(self) -> _Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for output in self._open.values():
            if kind is None:
                output.writer.close()
            else:
                output.writer.abandon()


@dataclass
class _OpenOutput:
    """A file that is being written.

    Args:
        writer: of its bytes.
        hasher: of its bytes, in their order.
        hashed: how many bytes of tensors were hashed.
    """

    writer: RandomAccessTensorWriter
    hasher: BlockHasher
    hashed: int = 0


def _opened_output(staging: Path, file: _FilePlan) -> _OpenOutput:
    entries = [(shard.name, to_safetensors(shard.dtype), shard.global_shape) for shard in file.tensors]
    path, hasher = staging / file.name, BlockHasher()
    layout = layout_file(path, entries, {"format": "pt"})
    hasher.update(layout.header)
    return _OpenOutput(RandomAccessTensorWriter(path, layout, root=staging), hasher)


def _batch_bytes(source: ReadSource, max_shard_bytes: int) -> int:
    """How many bytes of tensors are read at a time: few beside a file's, so that the bound on files bounds memory."""
    far = bool(source.catalog.seen_by) or isinstance(source.catalog.root, RemotePath)
    return min(_BATCH_BYTES if far else _CACHE_BYTES, max_shard_bytes // _BATCHES_PER_FILE)


def _batches(source: ReadSource, files: list[_FilePlan], room: int) -> Iterator[_Batch]:
    """All files in order, in batches of as many pieces as there is room for; planned file by file."""
    planner = Planner(source)
    for file in files:
        plan = planner.plan({MODEL_STATE: {shard.name: shard for shard in file.tensors}})
        plan.report.refuse(str(source.catalog.root))
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.name, []).append(item)
        some: list[_TensorRange] = []
        begin = used = 0
        for piece in (piece for one in file.tensors for piece in _pieces(planner, one, items.get(one.name, []), room)):
            # What has no bytes goes with what is before it: a file is whole when its last byte is written.
            if some and piece.nbytes and used + piece.nbytes > room:
                yield _Batch(file, begin, tuple(_joined(some)))
                some, begin, used = [], begin + used, 0
            some.append(piece)
            used += piece.nbytes
        yield _Batch(file, begin, tuple(_joined(some)))


def _pieces(planner: Planner, tensor: Shard, items: list[ReadItem], room: int) -> Iterator[_TensorRange]:
    """A tensor as ranges that fit: of the room of a batch, or more where short runs of the file would be read."""
    most = max(room, _CACHE_BYTES if all(map(_is_run, items)) else _TRANSPOSED_BYTES)
    for part in row_major_pieces(tensor, most):
        if part.flat is None:
            yield _TensorRange(tensor, 0, tensor.size, tuple(items))
        else:
            begin, end = part.flat
            planned = (
                msgspec.structs.replace(item, start=begin + item.start) for item in planner.items(MODEL_STATE, part)
            )
            yield _TensorRange(tensor, begin, end, tuple(planned))


def _is_run(item: ReadItem) -> bool:
    """Whether an item is one run of numbers in its file and in its tensor."""
    stored, is_ordered = item.stored, item.axes == tuple(range(len(item.stored.shape)))
    return (
        is_ordered
        and flat_start(stored.shape, stored.part) is not None
        and flat_start(item.shape, item.part) is not None
    )


def _joined(pieces: Iterable[_TensorRange]) -> Iterator[_TensorRange]:
    """Successive pieces of the same tensor as one."""
    for _, same in groupby(pieces, key=lambda piece: piece.tensor.name):
        group = list(same)
        items = tuple(item for piece in group for item in piece.items)
        yield _TensorRange(group[0].tensor, group[0].begin, group[-1].end, items)


def _memory(room: int, files: list[_FilePlan]) -> np.ndarray[Any, Any]:
    """Memory for any batch, from a page on: where it is in step with a page of the file, the system copies faster."""
    largest = max((shard_bytes(shard) for file in files for shard in file.tensors), default=0)
    size = max(room, min(largest, _TRANSPOSED_BYTES))
    memory = np.empty(size + _PAGE, np.uint8)
    begin = -memory.ctypes.data % _PAGE
    return memory[begin : begin + size]


def _small_files(checkpoint: OpenedCheckpoint, channel: Channel) -> dict[str, bytes]:
    """What describes the model, on the coordinator; another rank hands over what that one does not see."""
    names = described_files(checkpoint)
    handed = {name: own_file(checkpoint, channel, partial(_for_coordinator, name)) for name in names}

    def read() -> dict[str, bytes]:
        mine = handed if channel.rank == 0 else {}
        return {name: checkpoint.document(name) if data is None else data for name, data in mine.items()}

    return run_on_all(channel, "reading what describes the model", read)


def _for_coordinator(name: str, rank: int) -> str:
    return name if rank == 0 else ""


def _finish(
    staging: Path,
    target: Path,
    small: Mapping[str, bytes],
    files: list[_FilePlan],
    written: Sequence[FileChecksum],
) -> None:
    """On the coordinator: the small files, the index, the checksums of all, and the final name."""
    texts = dict(small)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(shard_bytes(shard) for file in files for shard in file.tensors)},
            "weight_map": {shard.name: file.name for file in files for shard in file.tensors},
        }
        texts[INDEX_NAME] = (json.dumps(index, indent=2) + "\n").encode()
    receipts = [write_file(staging / name, data, root=staging) for name, data in texts.items()]
    write_checksums(staging, [*written, *(one for one in receipts if one.path != RUN_ARGUMENTS)])
    if target.is_dir() and list_directory(target):
        replace_export(staging, target, (INDEX_NAME, SINGLE_NAME), _is_weight_file)
    else:
        commit_export(staging, target)


def described_files(checkpoint: OpenedCheckpoint) -> list[str]:
    """Return the files of a checkpoint that belong into an export: configuration, tokenizer, templates."""
    apart = (*ROLES, TRAINER_DIRECTORY)
    return [path for path in checkpoint.recorded if path != MAPPING_NAME and path.split("/")[0] not in apart]


def _is_weight_file(name: str) -> bool:
    return name in (INDEX_NAME, SINGLE_NAME, CHECKSUMS_NAME) or (
        name.startswith("model-") and name.endswith(".safetensors")
    )
