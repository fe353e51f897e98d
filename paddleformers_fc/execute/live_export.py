"""Export a live model: write its stream of weights as open weights, or as a PEFT directory for adapters.

The ranks on the coordinator's disk share the files and write at the same time; the other ranks send. Nothing is read
from storage. Names, files, checksums, staging directory and commit are the same as in an export of a checkpoint
(:mod:`.export`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel, gather_and_keep, run_on_all
from paddleformers_fc.distributed.consistency import ConsistencyCheck, comparable_config, software_versions
from paddleformers_fc.errors import FormatError
from paddleformers_fc.execute.commit_coordinator import staging_beside
from paddleformers_fc.execute.export import ExportReport, check_no_checkpoint, finish_export, report_of
from paddleformers_fc.execute.export_files import LocalExport
from paddleformers_fc.execute.save import LivePart
from paddleformers_fc.execute.stream import (
    Stream,
    StreamPlan,
    StreamRequest,
    Tensors,
    consume,
    known_plans,
    part_of,
    plan_stream,
)
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.formats.adapters import PEFT_WRITER
from paddleformers_fc.formats.checkpoint import REFUSE, OutputFile
from paddleformers_fc.formats.huggingface import HUGGINGFACE_WRITER
from paddleformers_fc.layout.roles import EMA_STATE, MODEL_STATE
from paddleformers_fc.layout.shards import shard_bytes
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.commit import staged_name
from paddleformers_fc.storage.progress import advance, expect


def save_weights(
    weights: Mapping[str, Any],
    model: ModelDescription,
    files: Mapping[str, bytes],
    target: Path,
    max_shard_bytes: int,
    channel: Channel,
    tied: str = REFUSE,
    averages: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a live model's weights as a Hugging Face directory, or its adapters as a PEFT directory.

    Args:
        weights: name -> live ``ShardedWeight`` of this rank, which must not change during the call.
        model: the description of the model.
        files: metadata files for the directory, including ``config.json``, on rank 0.
        target: as in :func:`.export_checkpoint`.
        max_shard_bytes: as in :func:`.export_checkpoint`.
        channel: all ranks of the job; every rank must call.
        tied: as in :func:`.export_checkpoint`.
        averages: this rank's moving averages by weight name, to write instead of the weights.
    Raises:
        FlexError: the same on every rank; older weights in the target are unchanged.
    """
    roles = {MODEL_STATE: weights} if averages is None else {MODEL_STATE: weights, EMA_STATE: averages}
    role = MODEL_STATE if averages is None else EMA_STATE
    writer = HUGGINGFACE_WRITER if model.adapters is None else PEFT_WRITER
    with staging_beside(target, channel, place_of=staged_name) as staging:
        writers = tuple(staging.disks.sharing()[0])
        request = StreamRequest(
            writers, channel.world_size, max_file_bytes=max_shard_bytes, is_divided=True, tied=tied, role=role
        )
        facts = {"versions": software_versions(), "config": comparable_config(model), "request": repr(request)}
        consistency = ConsistencyCheck(f"exporting to {target.name}", facts)

        def begin() -> tuple[list[bytes], tuple[LivePart, dict[bytes, StreamPlan]]]:
            check_no_checkpoint(target)
            part = part_of(roles, model)
            plans = known_plans(part, request, channel.rank)
            return list(plans), (part, plans)

        named, (part, plans) = gather_and_keep(channel, "beginning an export", begin, list[bytes], consistency)
        plan = plan_stream(part, request, plans, named, channel)
        export = LocalExport(staging, target, writer)
        own = plan.files[writers.index(channel.rank) :: len(writers)] if channel.rank in writers else ()
        stream = Stream(plan, part, request, channel, as_arrays=True)
        write = partial(_write_files, export, own)
        everyone = consume(stream.tensors(), channel, "exporting", write, list[FileChecksum])
        written = [checksum for theirs in everyone for checksum in theirs]

        def finish() -> None:
            if plan.checkpoint is not None:
                documents = {**files, **writer.documents(plan.checkpoint, plan.files)}
                finish_export(export, plan.checkpoint, plan.files, documents, written)

        run_on_all(channel, "finishing the export", finish)
    return report_of(target, plan.files, written)


def _write_files(export: LocalExport, files: Sequence[OutputFile], tensors: Tensors) -> list[FileChecksum]:
    """Write some files from their tensors, which come in file order; return the checksums."""
    expect(sum(shard_bytes(shard) for file in files for shard in file.tensors))
    checksums: list[FileChecksum] = []
    for file in files:
        writer, begin = export.create(file.path, export.writer.header(Path(file.path), file.tensors)), 0
        try:
            for shard, (name, array) in zip(file.tensors, tensors, strict=False):
                if name != shard.name:
                    raise FormatError(
                        f"{file.path} cannot be written: {name} came in place of {shard.name}.",
                        where=file.path,
                        next_step="Report this with the model and the layout; nothing was exported.",
                    )
                writer.write(begin, array)
                begin += array.nbytes
                advance(array.nbytes)
        except BaseException:
            writer.abandon()
            raise
        checksums.append(writer.close())
    return checksums
