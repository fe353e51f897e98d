"""``flex_verify: full`` for a load: every rank compares the checksums of what it is about to read, and no more.

A checkpoint is verified before any weight changes, in two steps. On opening, the ranks divide among themselves what is
not a tensor's number, that is the headers of the safetensors files and all documents; each compares its share. Once the
plan is made, each rank compares the blocks that its plan will read. All faults of all ranks come in one report.

The weight files of an export are compared in the same way where its ``flex_checksums.json`` records them.

Cost: what is read is read twice, the second time from the system's page cache, in whole blocks of 4 MiB. A block that
no rank reads is not checked: it cannot affect the load. The ``verify`` command compares every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence

import msgspec

from paddleformers_fc.distributed.channel import Channel, gather_and_keep, refuse_failed
from paddleformers_fc.distributed.rank_format import format_ranks
from paddleformers_fc.errors import Corrupt
from paddleformers_fc.formats import Catalog
from paddleformers_fc.formats.flex import DOCUMENTS
from paddleformers_fc.plan import LoadPlan
from paddleformers_fc.plan.blocks import blocks_read
from paddleformers_fc.storage.block_checksums import BlockComparison, compare_blocks
from paddleformers_fc.storage.file_checksums import FileChecksum, is_document
from paddleformers_fc.storage.identity import Identities
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.ranges import RangeReader

_LENGTH = struct.Struct("<Q")


class _FaultMessage(msgspec.Struct, frozen=True):
    """The faults that a rank has found: a line per file, and its error in wire form for files that it may not read."""

    damaged: bool
    evidence: list[str]
    refusal: str


def verify_metadata_blocks(
    directory: AnyPath,
    files: Sequence[FileChecksum],
    identities: Identities,
    channel: Channel,
    threads: int,
    next_step: str = RESTORE,
) -> None:
    """Compare what is not a tensor's number; the ranks share the work. Every rank must call.

    Args:
        directory: ``checkpoint-N``, or an export.
        files: the recorded checksums; none if this rank sees no checkpoint, which opening refuses later.
        identities: which files were looked at; another one is refused.
        channel: all ranks.
        threads: how many threads of this rank hash.
        next_step: advice for files that are not what was written.
    Raises:
        Corrupt: the same on every rank, naming all files and blocks that are not what was written.
        StorageError: the same on every rank: files that may not be read, and nothing else is wrong.
    """

    def share() -> BlockComparison:
        mine = [one for index, one in enumerate(files) if index % channel.world_size == channel.rank]
        shared = [one for one in files if one.path in DOCUMENTS and one not in mine]
        with RangeReader(identities=identities) as reader:
            wanted = [(one, _metadata_blocks(directory, one, reader)) for one in (*mine, *shared)]
        return compare_blocks(directory, wanted, threads, identities)

    _compare_on_all(directory, channel, share, next_step)


def verify_whole_files(
    directory: AnyPath, files: Sequence[FileChecksum], identities: Identities, channel: Channel, threads: int
) -> None:
    """Compare every byte of some files; every rank gives those that are its share. Every rank must call.

    Args:
        directory: ``checkpoint-N``.
        files: this rank's share.
        identities: which files were looked at; another one is refused.
        channel: all ranks.
        threads: how many threads of this rank hash.
    Raises:
        Corrupt: the same on every rank, naming all files and blocks that are not what was written.
        StorageError: the same on every rank: files that may not be read, and nothing else is wrong.
    """

    def share() -> BlockComparison:
        return compare_blocks(directory, [(one, range(len(one.blocks))) for one in files], threads, identities)

    _compare_on_all(directory, channel, share)


def verify_planned_blocks(
    catalog: Catalog,
    files: Collection[FileChecksum],
    plan: LoadPlan,
    channel: Channel,
    threads: int,
    next_step: str = RESTORE,
) -> int:
    """Compare the blocks that this rank will read. Every rank must call.

    Args:
        catalog: where they are.
        files: the checksums of its files.
        plan: what this rank reads.
        channel: all ranks.
        threads: how many threads of this rank hash.
        next_step: advice for files that are not what was written.
    Returns:
        bytes that this rank has hashed.
    Raises:
        Corrupt: the same on every rank, naming all files and blocks that are not what was written.
        StorageError: the same on every rank: files that may not be read, and nothing else is wrong.
    """

    def share() -> BlockComparison:
        wanted = blocks_read(plan, {checksum.path: checksum.block_bytes for checksum in files})
        chosen = [(checksum, sorted(wanted[checksum.path])) for checksum in files if checksum.path in wanted]
        return compare_blocks(catalog.root, chosen, threads, catalog.identities)

    return _compare_on_all(catalog.root, channel, share, next_step)


def _compare_on_all(
    directory: AnyPath, channel: Channel, share: Callable[[], BlockComparison], next_step: str = RESTORE
) -> int:
    """Return the number of bytes that this rank has hashed, if no rank has found a fault."""

    def work() -> tuple[_FaultMessage, int]:
        found = share()
        refusal = found.refusal.to_wire() if found.refusal else ""
        return _FaultMessage(bool(found.faults), found.evidence, refusal), found.bytes

    doing = f"comparing checksums of {directory.name}"
    everyone, hashed = gather_and_keep(channel, doing, work, _FaultMessage)
    if not any(one.damaged for one in everyone):
        refuse_failed(channel, [one.refusal for one in everyone])
    finders: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        for fault in one.evidence:
            finders.setdefault(fault, []).append(rank)
    if finders:
        raise Corrupt(
            f"{directory} is damaged: {len(finders)} {'fault' if len(finders) == 1 else 'faults'} found.",
            where=str(directory),
            evidence=[_fault_message(fault, ranks, channel) for fault, ranks in sorted(finders.items())],
            next_step=next_step,
        )
    return hashed


def _fault_message(fault: str, ranks: list[int], channel: Channel) -> str:
    return fault if channel.world_size == 1 else f"{fault} (found by {format_ranks(ranks)})"


def _metadata_blocks(directory: AnyPath, checksum: FileChecksum, reader: RangeReader) -> range:
    """The blocks of a file that hold anything but a tensor's numbers."""
    if is_document(checksum.path) or checksum.size < _LENGTH.size:
        return range(len(checksum.blocks))
    raw = bytearray(_LENGTH.size)
    reader.read_into(directory / checksum.path, 0, raw)
    end = min(_LENGTH.size + _LENGTH.unpack(raw)[0], checksum.size)
    return range(-(-end // checksum.block_bytes))
