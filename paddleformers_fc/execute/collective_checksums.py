"""Compare the checksums of the bytes that a load reads, on all ranks, for ``flex_verify: full``.

While tensors are filled, each rank compares its blocks (:mod:`.exchange`), and the exchange that ends the load carries
the verdict of all ranks. All faults of all ranks come in one report.

The weight files of an export are compared in the same way if its ``flex_checksums.json`` records them. Before any
weight changes, the ranks divide among themselves the headers of these files and all documents.

A block that no rank reads is not checked: it cannot affect the load. The ``verify`` command compares every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, format_ranks, refuse_failed
from paddleformers_fc.errors import Corrupt
from paddleformers_fc.formats import Catalog
from paddleformers_fc.plan.block_owners import RecordedBlocks
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.block_checksums import compare_blocks
from paddleformers_fc.storage.checksum import FileChecksum, is_document
from paddleformers_fc.storage.files import open_regular, read_range
from paddleformers_fc.storage.identities import Identities, refuse_replaced
from paddleformers_fc.storage.manifest import RESTORE
from paddleformers_fc.storage.paths import AnyPath

_LENGTH = struct.Struct("<Q")


class FaultMessage(msgspec.Struct, frozen=True, array_like=True):
    """The faults that a rank has found.

    Args:
        damaged: whether any block does not match its checksum.
        evidence: a line per file.
        refusal: an error that is no damage, in wire form; empty if there is none.
    """

    damaged: bool = False
    evidence: list[str] = []
    refusal: str = ""


class FillMessage(FaultMessage, frozen=True, array_like=True):
    """The faults that a rank has found while it read, and the rounded seconds that this took."""

    seconds: float = 0.0


def verify_metadata_blocks(
    directory: AnyPath,
    files: Sequence[FileChecksum],
    identities: Identities,
    channel: Channel,
    threads: int,
    next_step: str,
) -> None:
    """Compare what is not a tensor's number in an export; the ranks share the work. Every rank must call.

    Args:
        directory: the export.
        files: the recorded checksums; none if this rank has no export, which is refused later.
        identities: the identities of the files that were opened; another file is refused.
        channel: all ranks.
        threads: how many threads of this rank hash.
        next_step: advice for files that are not what was written.
    Raises:
        Corrupt: the same on every rank, naming all files and blocks that are not what was written.
        StorageError: the same on every rank: files that may not be read, and nothing else is wrong.
    """

    mine = files[channel.rank :: channel.world_size]
    wanted = ((one, _metadata_blocks(directory, one, identities)) for one in mine)
    compare_on_all(directory, wanted, identities, channel, threads, next_step)


def verify_parts(
    catalog: Catalog, recorded: RecordedBlocks, parts: Iterable[StoredPart], channel: Channel, threads: int
) -> None:
    """Compare the blocks that hold some regions. Every rank must call.

    Args:
        catalog: where they are.
        recorded: the checksums of its files.
        parts: the regions that this rank compares.
        channel: all ranks.
        threads: how many threads of this rank hash.
    Raises:
        Corrupt: the same on every rank, naming all files and blocks that are not what was written.
        StorageError: the same on every rank: files that may not be read, and nothing else is wrong.
    """

    compare_on_all(catalog.root, _wanted(recorded, parts), catalog.identities, channel, threads, recorded.next_step)


def _wanted(recorded: RecordedBlocks, parts: Iterable[StoredPart]) -> Iterator[tuple[FileChecksum, Iterable[int]]]:
    alone = [recorded.reads(parts, "")]
    for path, numbers in recorded.owned(alone, 0).items():
        yield recorded.files[path], numbers


def compare_on_all(
    directory: AnyPath,
    wanted: Iterable[tuple[FileChecksum, Iterable[int]]],
    identities: Identities,
    channel: Channel,
    threads: int,
    next_step: str = RESTORE,
) -> None:
    """Compare the share of every rank. Every rank must call.

    Args:
        directory: ``checkpoint-N``, or an export.
        wanted: the share of this rank, as for :func:`.compare_blocks`. An error of one rank while it is listed is
            raised on all ranks.
        identities: the identities of the files that were opened; another file is refused.
        channel: all ranks.
        threads: how many threads of this rank hash.
        next_step: advice for files that are not what was written.
    Raises:
        Corrupt: the same on every rank, naming all files and blocks that are not what was written.
        StorageError: the same on every rank: files that may not be read, and nothing else is wrong.
    """

    def work() -> FaultMessage:
        found = compare_blocks(directory, wanted, threads, identities)
        return FaultMessage(bool(found.faults), found.evidence, found.refusal.to_wire() if found.refusal else "")

    messages = all_gather_checked(channel, f"comparing checksums of {directory.name}", work, FaultMessage)
    refuse_damaged(directory, channel, messages, next_step)
    refuse_failed(channel, [one.refusal for one in messages])


def refuse_damaged(
    directory: AnyPath, channel: Channel, messages: Sequence[FaultMessage], next_step: str, effect: str = ""
) -> None:
    """Raise all faults of all ranks as one error, the same on every rank, if there is damage."""
    if not any(one.damaged for one in messages):
        return
    finders: dict[str, list[int]] = {}
    for rank, one in enumerate(messages):
        for fault in one.evidence:
            finders.setdefault(fault, []).append(rank)
    raise Corrupt(
        f"{directory} is damaged{effect}: {len(finders)} {'fault' if len(finders) == 1 else 'faults'} found.",
        where=str(directory),
        evidence=[
            fault if channel.world_size == 1 else f"{fault} (found by {format_ranks(ranks)})"
            for fault, ranks in sorted(finders.items())
        ],
        next_step=next_step,
    )


def _metadata_blocks(directory: AnyPath, checksum: FileChecksum, identities: Identities) -> range:
    """Return the blocks of a file that hold anything but a tensor's numbers."""
    if is_document(checksum.path) or checksum.size < _LENGTH.size:
        return range(checksum.count)
    with open_regular(directory / checksum.path) as file:
        refuse_replaced(file, identities)
        (length,) = _LENGTH.unpack(read_range(file, 0, _LENGTH.size))
    end = min(_LENGTH.size + length, checksum.size)
    return range(-(-end // checksum.block_bytes))
