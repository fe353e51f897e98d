"""Export: a flex checkpoint, or a live model, as Hugging Face files of bounded size.

Canonical tensors are put into files in natural order; every rank on the coordinator's disk writes some of the files,
reading just the ranges that its tensors are made of, and reads the next tensors while it writes the last ones. Memory
is twice the largest tensor (where all are small, half a file and at most 64 MiB) plus scratch memory, whatever the size
of the model. The same checkpoint content gives the same bytes whatever layout it was saved under.

Where no rank sees all of the checkpoint, the ranks go from batch to batch together, and get from each other what they
do not see.

A live model is first written as a checkpoint that holds its weights alone, into a staging directory beside the target,
and exported from there: one more pass over the storage instead of gathering tensors over the network.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.catalog.flex import MAPPING_NAME, FlexCheckpoint
from paddleformers_fc.catalog.huggingface import INDEX_NAME, SINGLE_NAME
from paddleformers_fc.errors import OptionError, StorageError
from paddleformers_fc.execute.channel import ALONE, Channel, agree, together
from paddleformers_fc.execute.crew import Crew
from paddleformers_fc.execute.disks import Disks
from paddleformers_fc.execute.exchange import Storage, compare_together, read_together
from paddleformers_fc.execute.opening import open_checkpoint, own_file
from paddleformers_fc.execute.reading import ArraySlot, fill_arrays
from paddleformers_fc.execute.rollcall import Called, software
from paddleformers_fc.execute.save import JobRecord, save_checkpoint
from paddleformers_fc.execute.staging import staging_beside
from paddleformers_fc.layout import Shard
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES
from paddleformers_fc.plan import LoadPlan, ReadItem, Report, Source, canonical_layout, canonical_source, plan_reads
from paddleformers_fc.plan.report import natural
from paddleformers_fc.storage.commit import discard, place_of, publish, replace
from paddleformers_fc.storage.dtypes import item_size, to_numpy, to_safetensors
from paddleformers_fc.storage.files import list_directory, read_file, real_path, write_file
from paddleformers_fc.storage.manifest import MANIFEST_NAME, FileReceipt, verify_files
from paddleformers_fc.storage.places import Place
from paddleformers_fc.storage.safetensors import SafetensorsWriter

DEFAULT_MAX_SHARD_BYTES = 5 * 10**9
TRAINER_DIRECTORY = "trainer"
"""Where the trainer keeps its own state inside a checkpoint."""

_receipts = msgspec.json.Decoder(list[FileReceipt])
_ROOM = 32 * 1024 * 1024
_BATCHES_PER_FILE = 4
"""Two batches are in memory at a time; four in a file leave half the size of a file for everything else."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Args:
        directory: the target.
        files: name -> receipt of every weight file, with size and checksums.
        tensors: number of canonical tensors.
        bytes: bytes of tensors.
    """

    directory: Path
    files: dict[str, FileReceipt]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class _FilePlan:
    """One file of the export: its name and tensors."""

    name: str
    tensors: tuple[Shard, ...]


def export_checkpoint(
    source: Place,
    target: Path,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    channel: Channel = ALONE,
    verify: str = "size",
) -> ExportReport:
    """Write a checkpoint's weights as a Hugging Face directory.

    Args:
        source: a finished flex checkpoint, or one of Paddle with a ``config.json`` in it.
        target: the directory to write. Where it holds other files they are kept; older weights are replaced.
        max_shard_bytes: bound on the tensors of one file, in bytes; a larger tensor has a file of its own.
        channel: the ranks that share the work; every rank must call.
        verify: how the source is checked: ``off``, ``size`` or ``full``.
    Raises:
        FlexError: the same on every rank; older weights in the target are untouched.
    """
    if max_shard_bytes < 1:
        raise OptionError(f"max_shard_bytes is {max_shard_bytes}; a file holds at least one byte.")
    roll = Called(f"exporting to {target.name}", {"versions": software(), "max_shard_bytes": max_shard_bytes})

    def prepare() -> Source:
        _refuse_checkpoint(target)
        if checkpoint.unread:
            verify_files(source, checkpoint.manifest, "full")
        return canonical_source(checkpoint)

    checkpoint = open_checkpoint(source, channel, verify, roll=roll)
    canonical = together(channel, f"preparing an export to {target.name}", prepare)
    layout = canonical_layout(canonical).get(MODEL_STATE, {})
    _refuse_untied(canonical, layout, channel)
    files, room = _divided(layout, max_shard_bytes), _room(layout, max_shard_bytes)
    small = _small_files(checkpoint, channel)
    with staging_beside(target, channel, _nothing, place_of) as staged:
        mine = _share(files, staged.disks, channel.rank)
        if canonical.catalog.seen_by:
            written = _write_together(staged.path, canonical, mine, room, channel)
        else:
            written = agree(channel, "exporting", lambda: _write_files(staged.path, canonical, mine, room))

        def finish() -> None:
            if channel.rank == 0:
                _finish(staged.path, real_path(target), small, files)
            elif channel.rank in staged.disks.of_leads:
                _try_discard(staged.path)  # An export is on one disk, that of the coordinator.

        together(channel, "finishing the export", finish)
    receipts = {receipt.path: receipt for payload in written for receipt in _receipts.decode(payload)}
    total = sum(_nbytes(shard) for shard in layout.values())
    return ExportReport(target, receipts, len(layout), total)


def save_weights(
    weights: Mapping[str, Any],
    config: Mapping[str, Any],
    files: Mapping[str, bytes],
    target: Path,
    max_shard_bytes: int,
    channel: Channel,
) -> ExportReport:
    """Write a live model's weights as a Hugging Face directory.

    Args:
        weights: name -> live ``ShardedWeight`` of this rank.
        config: the model's configuration.
        files: small files for the directory, ``config.json`` among them, on rank 0.
        target: as in :func:`export_checkpoint`.
        max_shard_bytes: as in :func:`export_checkpoint`.
        channel: all ranks of the job; every rank must call.
    Raises:
        FlexError: the same on every rank; older weights in the target are untouched.
    """
    with staging_beside(target, channel, _nothing, place_of) as staged:
        passage = staged.path / "weights"
        save_checkpoint(passage, {MODEL_STATE: weights}, config, files, JobRecord(0, 0, {}), channel)
        report = export_checkpoint(passage, target, max_shard_bytes, channel)
        if channel.rank in staged.disks.of_leads:
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


def _refuse_untied(source: Source, layout: Mapping[str, Shard], channel: Channel) -> None:
    """An export holds a tied weight once, so what is stored of it under two names must be equal."""
    stored, read = source.catalog.roles.get(MODEL_STATE, {}), source.mapping.read
    owners = {owner for alias, owner in source.stored_aliases.items() if alias in stored and owner in read}
    held = [name for owner in sorted(owners) for name in read[owner].names]
    checks = plan_reads(source, {MODEL_STATE: {name: layout[name] for name in held}}).checks
    if checks:
        storage = Storage(source.catalog.root, source.catalog.identities, source.catalog.seen_by)
        compare_together(checks if channel.rank == 0 else (), storage, channel)


def _share(files: list[_FilePlan], disks: Disks, rank: int) -> list[_FilePlan]:
    """The files that a rank writes: those on the coordinator's disk share them."""
    writers = disks.sharing()[0]
    return files[writers.index(rank) :: len(writers)] if rank in writers else []


def _divided(layout: Mapping[str, Shard], max_shard_bytes: int) -> list[_FilePlan]:
    """Tensors in natural order, in files of bounded size."""
    groups: list[list[Shard]] = []
    room = 0
    for name in sorted(layout, key=natural):
        size = _nbytes(layout[name])
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


def _nbytes(shard: Shard) -> int:
    return shard.size * item_size(to_safetensors(shard.dtype))


@dataclass(frozen=True)
class _Batch:
    """Successive tensors of one file that are read together.

    Args:
        file: which file.
        tensors: its tensors.
        items: how to read them.
    """

    file: _FilePlan
    tensors: tuple[Shard, ...]
    items: tuple[ReadItem, ...]


_Arrays = list[tuple[Shard, np.ndarray[Any, Any]]]


def _write_files(staging: Path, source: Source, files: list[_FilePlan], room: int) -> bytes:
    receipts: list[FileReceipt] = []
    with (
        Crew(identities=source.catalog.identities) as crew,
        closing(_read_ahead(_batches(source, files, room), crew, source.catalog.root, room)) as reading,
    ):
        for file, batches in groupby(reading, key=itemgetter(0)):
            with _writer_of(staging, file) as writer:
                for _, arrays in batches:
                    for shard, array in arrays:
                        writer.write(shard.name, array)
                receipts.append(writer.close())
    return msgspec.json.encode(receipts)


def _write_together(staging: Path, source: Source, files: list[_FilePlan], room: int, channel: Channel) -> list[bytes]:
    """As :func:`_write_files`, all ranks in step; every rank's receipts. One with nothing to write reads for others."""
    batches: list[_Batch] = []

    def plan() -> bytes:
        batches.extend(_batches(source, files, room))
        return str(len(batches)).encode()

    steps = max(int(count) for count in agree(channel, "planning an export", plan))
    storage = Storage(source.catalog.root, source.catalog.identities, source.catalog.seen_by)
    buffer = np.empty(_aligned(room), np.uint8)
    with ExitStack() as stack:
        output = _Output(staging, stack)
        for step in range(steps):
            own = batches[step : step + 1]
            arrays = [pair for batch in own for pair in _carved(buffer, batch.tensors)]
            reads = LoadPlan(tuple(item for batch in own for item in batch.items), (), {}, Report())
            slots = {(MODEL_STATE, shard.name): ArraySlot(array) for shard, array in arrays}
            read_together(reads, storage, slots, channel)
            together(channel, "exporting", partial(output.write, own, arrays))
        return agree(channel, "collecting receipts", lambda: msgspec.json.encode(output.receipts))


@dataclass
class _Output:
    """The files of one rank, written batch by batch.

    Args:
        staging: where.
        stack: closes a file that an error leaves open.
        receipts: of the files that are finished.
    """

    staging: Path
    stack: ExitStack
    receipts: list[FileReceipt] = field(default_factory=list)
    _open: dict[str, SafetensorsWriter] = field(default_factory=dict)

    def write(self, batches: list[_Batch], arrays: _Arrays) -> None:
        """Write the tensors of a batch, if there is one."""
        for batch in batches:
            name = batch.file.name
            if batch.tensors[0] is batch.file.tensors[0]:
                writer = self._open[name] = _writer_of(self.staging, batch.file)
                self.stack.enter_context(writer)
            for shard, array in arrays:
                self._open[name].write(shard.name, array)
            if batch.tensors[-1] is batch.file.tensors[-1]:
                self.receipts.append(self._open.pop(name).close())


def _writer_of(staging: Path, file: _FilePlan) -> SafetensorsWriter:
    entries = [(shard.name, to_safetensors(shard.dtype), shard.global_shape) for shard in file.tensors]
    return SafetensorsWriter(staging / file.name, entries, {"format": "pt"}, root=staging)


def _room(layout: Mapping[str, Shard], max_shard_bytes: int) -> int:
    """How many bytes of tensors are read at a time: few beside a file's, so that the bound on files bounds memory."""
    return max([min(_ROOM, max_shard_bytes // _BATCHES_PER_FILE), *[_nbytes(shard) for shard in layout.values()]])


def _batches(source: Source, files: list[_FilePlan], room: int) -> Iterator[_Batch]:
    """The tensors of all files in order, as many at a time as there is room for; planned file by file."""
    for file in files:
        plan = plan_reads(source, {MODEL_STATE: {shard.name: shard for shard in file.tensors}})
        plan.report.refuse(str(source.catalog.root))
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.name, []).append(item)
        batch: list[Shard] = []
        used = 0
        for shard in file.tensors:
            if batch and used + _aligned(_nbytes(shard)) > room:
                yield _batch(file, batch, items)
                batch, used = [], 0
            batch.append(shard)
            used += _aligned(_nbytes(shard))
        yield _batch(file, batch, items)


def _batch(file: _FilePlan, tensors: list[Shard], items: Mapping[str, list[ReadItem]]) -> _Batch:
    return _Batch(file, tuple(tensors), tuple(item for shard in tensors for item in items.get(shard.name, ())))


def _read_ahead(
    batches: Iterator[_Batch], crew: Crew, root: Place, room: int
) -> Generator[tuple[_FilePlan, _Arrays], None, None]:
    """The tensors of every batch; while the caller has one, a thread reads the next.

    The arrays of a batch lie in one of two buffers and are overwritten when the next but one is read.
    """
    buffers = [np.empty(_aligned(room), np.uint8) for _ in range(2)]

    def read(buffer: np.ndarray[Any, Any]) -> tuple[_FilePlan, _Arrays] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        arrays = _carved(buffer, batch.tensors)
        fill_arrays(crew, root, batch.items, {(MODEL_STATE, shard.name): array for shard, array in arrays})
        return batch.file, arrays

    with ThreadPoolExecutor(1, "flex-export") as pool:
        coming = pool.submit(read, buffers[0])
        while (found := coming.result()) is not None:
            buffers.reverse()
            coming = pool.submit(read, buffers[0])
            yield found


def _carved(buffer: np.ndarray[Any, Any], tensors: tuple[Shard, ...]) -> _Arrays:
    """A flat array for every tensor, one behind the other."""
    arrays: _Arrays = []
    at = 0
    for shard in tensors:
        part = buffer[at : at + _nbytes(shard)]
        arrays.append((shard, part.view(to_numpy(to_safetensors(shard.dtype)))))
        at += _aligned(part.nbytes)
    return arrays


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _small_files(checkpoint: FlexCheckpoint, channel: Channel) -> dict[str, bytes]:
    """What describes the model, on the coordinator; another rank hands over what that one does not see."""
    names = [receipt.path for receipt in checkpoint.manifest.files if _describes_model(receipt.path)]
    handed = {name: own_file(checkpoint, channel, partial(_for_coordinator, name)) for name in names}

    def read() -> dict[str, bytes]:
        mine = handed if channel.rank == 0 else {}
        return {
            name: read_file(checkpoint.catalog.root / name) if data is None else data for name, data in mine.items()
        }

    return together(channel, "reading what describes the model", read)


def _for_coordinator(name: str, rank: int) -> str:
    return name if rank == 0 else ""


def _finish(staging: Path, target: Path, small: Mapping[str, bytes], files: list[_FilePlan]) -> None:
    """On the coordinator: the small files, the index, and the final name."""
    for name, data in small.items():
        write_file(staging / name, data, root=staging)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(_nbytes(shard) for file in files for shard in file.tensors)},
            "weight_map": {shard.name: file.name for file in files for shard in file.tensors},
        }
        write_file(staging / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode(), root=staging)
    if target.is_dir() and list_directory(target):
        replace(staging, target, (INDEX_NAME, SINGLE_NAME), _is_weight_file)
    else:
        publish(staging, target)


def _describes_model(path: str) -> bool:
    """Whether a file of a checkpoint belongs into an export: configuration, tokenizer, templates."""
    return path != MAPPING_NAME and path.split("/")[0] not in (*ROLES, TRAINER_DIRECTORY)


def _is_weight_file(name: str) -> bool:
    return name in (INDEX_NAME, SINGLE_NAME) or (name.startswith("model-") and name.endswith(".safetensors"))
