"""Open a checkpoint on all ranks, which may have access to different files of it.

Every rank opens the checkpoint alone. One exchange reports the files that are visible to each rank, and its failure. If
all ranks have the same files, no other exchange follows. If output directories are on disks of single hosts, each disk
has the files of its own ranks, and failures of single ranks are ignored. The header of every file is read by one rank
for all, and the catalog is the union. Each rank checks its visible files. An error lists the files that are visible to
no rank, and the ranks without any file.

Memory: descriptions of the files that are not visible to all ranks, linear in their shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import (
    Bytes,
    Channel,
    ConsistencyFacts,
    all_gather_checked,
    broadcast,
    format_ranks,
    gather_and_keep,
    refuse_failed,
    run_on_all,
)
from paddleformers_fc.errors import Corrupt, FlexError, NotACheckpoint
from paddleformers_fc.execute.collective_checksums import verify_metadata_blocks, verify_whole_files
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint, StoredShard
from paddleformers_fc.formats.flex import (
    DOCUMENTS,
    FileVisibility,
    build_catalog,
    build_checkpoint,
    is_shard_file,
    open_probed,
    probe,
    read_document_bytes,
    shards_of,
)
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.roles import ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan.transfer_plan import VisibleTo
from paddleformers_fc.storage.checksum import FileChecksum, is_document
from paddleformers_fc.storage.manifest import Manifest, manifest_seal, read_manifest, refuse_as_newest, verify_files
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text


class _VisibilityMessage(msgspec.Struct, frozen=True):
    """The files that are visible to one rank, as sent to the others.

    Args:
        seal: the manifest's checksum of itself; empty if there is no manifest.
        size: bytes of the encoded manifest.
        saved: summary of the save for errors.
        missing: one bit per listed file, set if the file is missing; empty if none is.
    """

    seal: str = ""
    saved: str = ""
    missing: bytes = b""


class _ProbeMessage(msgspec.Struct):
    """The report of one rank about a directory.

    Args:
        sight: its visible files.
        fault: its error when it opened the directory alone, in wire form; empty after success.
    """

    sight: _VisibilityMessage
    fault: str


@dataclass(frozen=True)
class _Visibility:
    """The reports of all ranks.

    Args:
        own: the visible files of this rank; None without a manifest.
        sights: by rank.
        faults: by rank.
    """

    own: FileVisibility | None
    sights: list[_VisibilityMessage]
    faults: list[str]

    @property
    def alike(self) -> bool:
        """Return whether the same files are visible to every rank."""
        return len(set(self.sights)) == 1


_SentShard = tuple[Shard, int, int]
"""A stored shard as sent to the ranks without access to its file: byte offset and bytes per element."""


class _ContentsMessage(msgspec.Struct):
    """The contents of the files that one rank reads for others."""

    shards: dict[str, list[_SentShard]]
    documents: dict[str, bytes]


def open_on_all_ranks(
    directory: AnyPath,
    channel: Channel,
    verify: str = "size",
    threads: int = 4,
    consistency: ConsistencyFacts | None = None,
    config: Callable[[], Mapping[str, Any]] | None = None,
) -> OpenedCheckpoint:
    """Open a finished checkpoint on every rank, or raise the same error on every rank.

    Under ``size`` the ranks share the checksums of documents. Under ``full`` they share those of headers as well. The
    load compares those of tensors, and only of the blocks that a rank will read. If ranks have different files, each
    rank compares its own.

    Args:
        directory: ``checkpoint-N``.
        channel: all ranks of the job; every rank must call.
        verify: ``off``, ``size`` or ``full``; each rank checks its visible files.
        threads: number of threads of this rank that compare checksums.
        consistency: facts that must be equal on all ranks.
        config: returns the configuration of the live model, for a directory of another format that has none. An error
            of this call on one rank is raised on all.
    """
    opened: list[OpenedCheckpoint] = []
    headers: dict[str, int] = {}

    def check_sizes(own: FileVisibility | None) -> None:
        if own is not None:
            verify_files(directory, own.manifest, "size", documents=())

    def open_alone(own: FileVisibility | None) -> None:
        if own is None:
            # Another format, or no checkpoint at all, which is refused here.
            opened.append(open_checkpoint(directory, verify, config=None if config is None else config()))
        else:
            level = "off" if verify == "full" else verify
            compared = _documents_of(own.manifest, {}, channel)
            found = open_probed(directory, own, level, compared)
            opened.append(replace(found, unread=verify == "full", compared=headers))

    # Under full, no file is parsed before its checksum was compared.
    looked = _probe(directory, channel, check_sizes if verify == "full" else open_alone, consistency)
    if looked.alike:
        refuse_failed(channel, looked.faults)
        if verify == "full":
            files, identities = (looked.own.manifest.files, looked.own.identities) if looked.own else ((), {})
            headers.update(verify_metadata_blocks(directory, files, identities, channel, threads))
            run_on_all(channel, f"opening {directory.name}", lambda: open_alone(looked.own))
        return opened[0]
    manifest = _common_manifest(directory, looked, channel)
    sight = FileVisibility(manifest, looked.own.identities if looked.own else {})
    return _open_divided(directory, sight, looked.sights, channel, verify, threads)


def check_complete(directory: AnyPath, channel: Channel) -> None:
    """Check that a checkpoint is complete: every file is visible to some rank, with its recorded size.

    Args:
        directory: ``checkpoint-N``.
        channel: all ranks of the job; every rank must call.
    Raises:
        CheckpointError: the same on every rank: the checkpoint is incomplete, disks have different saves of it, or its
            name contradicts its step.
        Diverged: the same on every rank: it was saved with diverged copies of tied tensors.
    """

    def check_alone(own: FileVisibility | None) -> None:
        # On every rank: the disks of several nodes may hold copies with the same manifest, and a file of one may be
        # truncated.
        manifest = read_manifest(directory) if own is None else own.manifest
        refuse_as_newest(directory, manifest)
        verify_files(directory, manifest, "size")

    looked = _probe(directory, channel, check_alone)
    if looked.alike:
        refuse_failed(channel, looked.faults)
        return
    manifest = _common_manifest(directory, looked, channel)
    visible_to = _visible_to(manifest, looked.sights)
    _refuse_invisible(directory, visible_to, looked.sights)

    def check() -> None:
        refuse_as_newest(directory, manifest)
        _verify_seen(directory, manifest, visible_to, channel.rank, "size")

    run_on_all(channel, f"looking at the files of {directory.name}", check)


def compare_unread(checkpoint: OpenedCheckpoint, channel: Channel, threads: int = 4) -> None:
    """Compare every byte of the files of an ``unread`` checkpoint on several disks.

    Args:
        checkpoint: opened by every rank.
        channel: all ranks of the job; every rank must call.
        threads: how many threads of this rank compare checksums.
    Raises:
        Corrupt, StorageError: the same on every rank.
    """
    catalog = checkpoint.catalog
    share = _verification_share(checkpoint.manifest, catalog.visible_to, channel)
    verify_whole_files(catalog.root, share, catalog.identities, channel, threads)


def own_file(checkpoint: OpenedCheckpoint, channel: Channel, name_of: Callable[[int], str]) -> bytes | None:
    """Return this rank's small file, read by another rank if it is not visible here.

    Args:
        checkpoint: an opened checkpoint.
        channel: all ranks of the job; every rank must call.
        name_of: the file's path by rank.
    Returns:
        the file's bytes; None if this rank can read the file itself, or if there is none.
    """
    catalog = checkpoint.catalog
    sizes = {path: one.size for path, one in checkpoint.recorded.items()}
    readers = {
        rank: catalog.visible_to[name][0]
        for rank, name in enumerate(map(name_of, range(channel.world_size)))
        if name in sizes and name in catalog.visible_to and rank not in catalog.visible_to[name]
    }
    if not readers:
        return None

    def read() -> dict[int, Bytes]:
        asking = [rank for rank, reader in readers.items() if reader == channel.rank]
        return {rank: np.frombuffer(checkpoint.document(name_of(rank)), np.uint8) for rank in asking}

    outgoing = run_on_all(channel, f"reading small files of {catalog.root.name}", read)
    mine = readers.get(channel.rank)
    got = channel.all_to_all(outgoing, {} if mine is None else {mine: sizes[name_of(channel.rank)]})
    return None if mine is None else got[mine].tobytes()


def own_document(checkpoint: OpenedCheckpoint, name: str, received: bytes | None) -> bytes | None:
    """Return a small file of a checkpoint, None if it has none; ``received`` is the result of :func:`own_file`."""
    return received if received is not None or name not in checkpoint.documents else checkpoint.document(name)


def _probe(
    directory: AnyPath,
    channel: Channel,
    alone: Callable[[FileVisibility | None], None],
    consistency: ConsistencyFacts | None = None,
) -> _Visibility:
    """Return the visible files of this rank, and a summary for every rank.

    Args:
        directory: ``checkpoint-N``.
        channel: all ranks; every rank must call.
        alone: opens the directory on this rank; its errors count if all ranks have the same files.
        consistency: facts that must be equal on all ranks.
    """

    def look() -> tuple[_ProbeMessage, FileVisibility | None]:
        seen, fault = _visibility(directory), ""
        try:
            alone(seen)
        except FlexError as error:
            fault = error.to_wire()
        return _ProbeMessage(_contents_of(directory, seen), fault), seen

    looks, own = gather_and_keep(channel, f"opening {directory.name}", look, _ProbeMessage, consistency)
    return _Visibility(own, [one.sight for one in looks], [one.fault for one in looks])


def _visibility(directory: AnyPath) -> FileVisibility | None:
    try:
        return probe(directory)
    except NotACheckpoint:
        return None


def _contents_of(directory: AnyPath, sight: FileVisibility | None) -> _VisibilityMessage:
    if sight is None:
        return _VisibilityMessage()
    manifest, missing = sight.manifest, set(sight.missing(directory))
    bits = np.packbits([checksum.path in missing for checksum in manifest.files]).tobytes() if missing else b""
    ranks, files = count_text(manifest.world_size, "rank"), count_text(len(manifest.files), "file")
    saved = f"step {manifest.step}, {ranks}, {files}"
    return _VisibilityMessage(manifest_seal(manifest), saved, bits)


def _common_manifest(directory: AnyPath, looked: _Visibility, channel: Channel) -> Manifest:
    """Return the manifest on every rank, also on those without one."""
    own, sights = looked.own, looked.sights
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, sight in enumerate(sights):
        if sight.seal:
            groups.setdefault((sight.seal, sight.saved), []).append(rank)
    if len(groups) > 1:
        raise Corrupt(
            "The disks of this job have different checkpoints under one name.",
            where=str(directory),
            evidence=[f"{format_ranks(ranks)}: {saved}, sealed {seal}" for (seal, saved), ranks in groups.items()],
            next_step="They were saved at different times. Resume from a step that all disks hold of one save.",
        )
    ((holders),) = groups.values()
    lacking = [rank for rank, sight in enumerate(sights) if not sight.seal]
    if own is not None and not lacking:
        return own.manifest

    def read() -> Manifest:
        return own.manifest if own is not None else read_manifest(directory)

    return broadcast(channel, f"opening {directory.name}", read, Manifest, source=holders[0])


def _open_divided(
    directory: AnyPath,
    sight: FileVisibility,
    sights: Sequence[_VisibilityMessage],
    channel: Channel,
    verify: str,
    threads: int,
) -> OpenedCheckpoint:
    manifest = sight.manifest
    visible_to = _visible_to(manifest, sights)
    _refuse_invisible(directory, visible_to, sights)
    readers = {path: ranks[index % len(ranks)] for index, (path, ranks) in enumerate(visible_to.items())}

    def read_own() -> _ContentsMessage:
        compared = () if verify == "full" else _documents_of(manifest, visible_to, channel)
        _verify_seen(directory, manifest, visible_to, channel.rank, "size" if verify == "full" else verify, compared)
        mine = [path for path, reader in readers.items() if reader == channel.rank]
        shards = {
            path: [(one, begin, width) for one, _, begin, width in shards_of(directory, path)]
            for path in mine
            if _holds(path)
        }
        documents = {path: read_document_bytes(directory, manifest, path) for path in mine if path in DOCUMENTS}
        return _ContentsMessage(shards, documents)

    received: dict[str, list[_SentShard]] = {}
    documents: dict[str, bytes] = {}
    for one in all_gather_checked(channel, f"opening {directory.name}", read_own, _ContentsMessage):
        received.update(one.shards)
        documents.update(one.documents)

    def shards(path: str) -> Iterator[StoredShard]:
        sent = received.get(path)
        return shards_of(directory, path) if sent is None else ((one, path, begin, width) for one, begin, width in sent)

    headers: dict[str, int] = {}
    if verify == "full":
        files, identities = manifest.files, sight.identities
        headers = verify_metadata_blocks(directory, files, identities, channel, threads, visible_to=visible_to)

    def put_together() -> OpenedCheckpoint:
        catalog, faults = build_catalog(directory, manifest, shards)
        catalog = replace(catalog, identities=sight.identities, visible_to=visible_to)
        own = {name: read_document_bytes(directory, manifest, name) for name in DOCUMENTS if name not in documents}
        found = build_checkpoint(catalog, faults, manifest, {**documents, **own})
        return replace(found, unread=verify == "full", compared=headers)

    return run_on_all(channel, f"opening {directory.name}", put_together)


def _verify_seen(
    directory: AnyPath,
    manifest: Manifest,
    visible_to: VisibleTo,
    rank: int,
    level: str,
    compared: Collection[str] | None = None,
) -> None:
    """Check the visible files of this rank."""
    here = [one for one in manifest.files if rank in visible_to.get(one.path, (rank,))]
    if here:
        verify_files(directory, msgspec.structs.replace(manifest, files=here), level, documents=compared)


def _documents_of(manifest: Manifest, visible_to: VisibleTo, channel: Channel) -> frozenset[str]:
    """Return the documents whose checksums this rank compares for all ranks."""
    return frozenset(
        checksum.path for checksum in _verification_share(manifest, visible_to, channel) if is_document(checksum.path)
    )


def _verification_share(manifest: Manifest, visible_to: VisibleTo, channel: Channel) -> list[FileChecksum]:
    """Return the files that this rank checks completely: every file is assigned to one rank with access to it."""
    share: list[FileChecksum] = []
    for index, checksum in enumerate(manifest.files):
        ranks = visible_to.get(checksum.path, range(channel.world_size))
        if ranks[index % len(ranks)] == channel.rank:
            share.append(checksum)
    return share


def _visible_to(manifest: Manifest, sights: Sequence[_VisibilityMessage]) -> dict[str, tuple[int, ...]]:
    """Return the ranks with access to a file, for every file that is not visible to all ranks."""
    count = len(manifest.files)
    visible = np.ones((len(sights), count), bool)
    for rank, sight in enumerate(sights):
        if not sight.seal:
            visible[rank] = False
        elif sight.missing:
            visible[rank] = np.unpackbits(np.frombuffer(sight.missing, np.uint8), count=count) == 0
    partly = np.flatnonzero(~visible.all(axis=0))
    return {manifest.files[index].path: tuple(np.flatnonzero(visible[:, index]).tolist()) for index in partly}


def _refuse_invisible(directory: AnyPath, visible_to: VisibleTo, sights: Sequence[_VisibilityMessage]) -> None:
    """Refuse a checkpoint with files that are visible to no rank: a disk is missing."""
    lost = [path for path, ranks in visible_to.items() if not ranks]
    if not lost:
        return
    blind = [rank for rank, sight in enumerate(sights) if not sight.seal]
    evidence = [f"{path} is visible to no rank" for path in lost]
    evidence += [f"{format_ranks(blind)}: no checkpoint of this name is there"] if blind else []
    raise Corrupt(
        f"{len(lost)} of the checkpoint's files are visible to no rank of this job.",
        where=str(directory),
        evidence=fold(evidence),
        next_step="Start the job on the hosts that saved it, bring their files here, or name another checkpoint.",
    )


def _holds(path: str) -> bool:
    return any(is_shard_file(path, role) for role in ROLES)
