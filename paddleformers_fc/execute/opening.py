"""Open a checkpoint on all ranks, which may have access to different files of it.

The coordinator reads the metadata files and broadcasts them. In a second exchange every rank reports the identity of
its manifest (ranks with equal identities share a *disk*) and the check of its share of the files: sizes and checksums
of metadata files. With several disks, the ranks of each disk share its files in a third exchange. Tensor files are
opened only by the ranks that read them (:class:`~paddleformers_fc.formats.index.IndexedFiles`).

Under ``flex_verify: full`` each rank compares its blocks while tensors are filled (:mod:`.exchange`), and one error
lists the faults of all ranks. An export with ``flex_checksums.json`` is compared in the same way; its headers and
metadata files are compared before any weight changes. Blocks that no rank reads are not checked, because they cannot
affect the load.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import xxhash
from msgspec import structs

from paddleformers_fc.distributed.channel import (
    Bytes,
    Channel,
    ConsistencyFacts,
    all_gather_checked,
    broadcast,
    format_ranks,
    gather_and_keep,
    raise_failures,
    run_on_all,
)
from paddleformers_fc.errors import CheckpointError, Corrupt, FlexError
from paddleformers_fc.formats import Catalog
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint
from paddleformers_fc.formats.flex import DOCUMENTS, build_checkpoint, open_flex, read_document_bytes
from paddleformers_fc.plan.transfer_plan import VisibleTo
from paddleformers_fc.storage.block_checksums import compare_blocks, compare_documents
from paddleformers_fc.storage.checksum import INDEX_NAME, MISSING, FileChecksum, is_document
from paddleformers_fc.storage.files import stat_path
from paddleformers_fc.storage.identities import Identities, identity_of
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    RESTORE,
    Manifest,
    Surroundings,
    check_newest,
    extra_files,
    manifest_seal,
    read_manifest,
    repair_advice,
)
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.remote import RemoteStatus
from paddleformers_fc.text import count_text, fold

MAX_HELD_BYTES = 512 * 1024 * 1024
"""Maximum size of a metadata file that one rank reads for all; a Trainer's state has 0.5 kB per line of its log."""


class FaultMessage(msgspec.Struct, frozen=True, array_like=True):
    """The faults that a rank has found.

    Args:
        damaged: whether any block does not match its checksum.
        evidence: one line per file.
        refusal: an error other than damage, in wire form; empty if there is none.
    """

    damaged: bool = False
    evidence: list[str] = []
    refusal: str = ""


class FillMessage(FaultMessage, frozen=True, array_like=True):
    """The faults that a rank has found while reading, and its rounded seconds."""

    seconds: float = 0.0


class Metadata(msgspec.Struct):
    """The metadata of a checkpoint, which one rank reads for all.

    Args:
        manifest: the manifest.
        documents: the metadata files that opening needs, by path, without damaged ones; compressed, except for the
            index, which hardly shrinks.
    """

    manifest: Manifest
    documents: dict[str, bytes]


class _Checked(FaultMessage, frozen=True, array_like=True):
    """The result of checking a rank's share of the files on its disk.

    Args:
        saved: a summary of the save on this disk, if the coordinator has a different save.
        missing: a bit per file of the share, set if the file is missing; empty if no file is missing.
        extra: number of files that do not belong to the checkpoint.
    """

    saved: str = ""
    missing: bytes = b""
    extra: int = 0


class Sent(msgspec.Struct):
    """The coordinator's message: the metadata of the checkpoint, or None if it has no manifest."""

    metadata: Metadata | None = None


class Opening(msgspec.Struct, frozen=True):
    """A checkpoint that all ranks have opened.

    Args:
        checkpoint: the checkpoint.
        is_shared: whether all ranks have access to the same disk.
        names: the names that each rank has listed in the exchange.
    """

    checkpoint: OpenedCheckpoint
    is_shared: bool
    names: Sequence[list[str]]


class _Report(msgspec.Struct, array_like=True):
    """A rank's message about its disk.

    Args:
        disk: equal on ranks with access to the same files; empty without a manifest.
        fault: the error of opening the directory on a rank without a manifest, in wire form.
        checked: the check of its share of the files, if all ranks share a disk.
        names: the names that it lists for the caller.
    """

    disk: bytes = b""
    fault: str = ""
    checked: _Checked | None = None
    names: list[str] = []


class _Disks:
    """The disks of a job, derived from the reports of all ranks."""

    def __init__(self, reports: Sequence[_Report], channel: Channel) -> None:
        self.ranks: dict[bytes, list[int]] = {}
        for rank, one in enumerate(reports):
            if one.disk:
                self.ranks.setdefault(one.disk, []).append(rank)
        self.blind = [rank for rank, one in enumerate(reports) if not one.disk]
        self.members = self.ranks.get(reports[channel.rank].disk, [])
        self.place = self.members.index(channel.rank) if self.members else 0
        self.is_one = len(self.members) == channel.world_size

    @property
    def share(self) -> slice:
        """The files that this rank checks; none on a rank without a manifest."""
        return slice(self.place, None, len(self.members)) if self.members else slice(0)

    def visible_to(self, checked: Sequence[_Checked], manifest: Manifest) -> dict[str, tuple[int, ...]]:
        """Return for every file that is not visible to all ranks the ranks with access to it."""
        count = len(manifest.files)
        there = np.ones((len(self.ranks), count), bool)
        for disk, members in zip(there, self.ranks.values(), strict=True):
            for place, rank in enumerate(members):
                own = disk[place :: len(members)]
                if checked[rank].missing:
                    own[:] = np.unpackbits(np.frombuffer(checked[rank].missing, np.uint8), count=own.size) == 0
        partly = range(count) if self.blind else np.flatnonzero(~there.all(axis=0)).tolist()
        disks = list(self.ranks.values())

        def seeing(file: int) -> tuple[int, ...]:
            return tuple(sorted(rank for disk in np.flatnonzero(there[:, file]) for rank in disks[disk]))

        return {manifest.files[file].path: seeing(file) for file in partly}


def open_on_all_ranks(
    directory: AnyPath,
    channel: Channel,
    verify: str = "size",
    consistency: ConsistencyFacts | None = None,
    config: Callable[[], Mapping[str, Any]] | None = None,
    documents: Collection[str] = (),
) -> OpenedCheckpoint:
    """Open a finished checkpoint on every rank, or raise the same error on every rank.

    Unless ``verify`` is ``off``, the ranks share the sizes of files and the checksums of documents. Under ``full`` the
    load compares the blocks that a rank reads.

    Args:
        directory: ``checkpoint-N``.
        channel: all ranks of the job; every rank must call.
        verify: ``off``, ``size`` or ``full``.
        consistency: facts that must be equal on all ranks.
        config: returns the configuration of the live model, for a directory of another format without one. If the call
            fails on one rank, all ranks raise the error.
        documents: metadata files to read as well, if the coordinator can; see :func:`hold_documents`.
    """
    sent = _broadcast_metadata(directory, channel, documents, consistency)
    return open_sent(directory, channel, sent, verify, config).checkpoint


def read_metadata(directory: AnyPath, documents: Collection[str] = ()) -> Sent:
    """Read the metadata of a checkpoint on one rank, without damaged files; none if it has no manifest.

    Args:
        directory: ``checkpoint-N``.
        documents: metadata files to read as well, if the manifest lists them.
    Raises:
        CheckpointError: the manifest is damaged.
    """
    is_there = stat_path(directory / MANIFEST_NAME) is not None
    return Sent(_read_metadata(directory, documents) if is_there else None)


def _read_metadata(directory: AnyPath, documents: Collection[str] = ()) -> Metadata:
    manifest = read_manifest(directory)
    found: dict[str, bytes] = {}
    for name in (*DOCUMENTS, *(one for one in documents if manifest.record_of(one) is not None)):
        with suppress(CheckpointError):
            raw = read_document_bytes(directory, manifest, name)
            found[name] = raw if name == INDEX_NAME else zlib.compress(raw, 1)
    return Metadata(manifest, found)


def open_newest(directory: AnyPath, channel: Channel, documents: Collection[str] = ()) -> OpenedCheckpoint:
    """Open the newest checkpoint of a run, like :func:`open_sent`."""
    sent = _broadcast_metadata(directory, channel, documents)
    return open_sent(directory, channel, sent, as_newest=True).checkpoint


def _broadcast_metadata(
    directory: AnyPath, channel: Channel, documents: Collection[str], consistency: ConsistencyFacts | None = None
) -> Sent:
    doing = f"reading the metadata of {directory.name}"
    return broadcast(channel, doing, lambda: read_metadata(directory, documents), Sent, consistency)


def hold_documents(checkpoint: OpenedCheckpoint, channel: Channel, names: Collection[str]) -> OpenedCheckpoint:
    """Return a checkpoint that holds some of its metadata files in memory, each read by one rank for all.

    No exchange is needed if the coordinator has already read them when it opened a flex checkpoint.

    Args:
        checkpoint: an opened checkpoint.
        channel: all ranks of the job; every rank must call.
        names: paths of the files; missing files are skipped.
    Raises:
        CheckpointError: the same on every rank: a file is damaged.
    """
    missing = [name for name in names if name in checkpoint.documents and name not in checkpoint.held]
    if checkpoint.commit_record is not None and not missing:
        return checkpoint

    def read() -> dict[str, bytes]:
        mine = [name for name in missing if checkpoint.catalog.reader(name) == channel.rank]
        return {name: checkpoint.document(name, MAX_HELD_BYTES) for name in mine}

    doing = f"reading documents of {checkpoint.catalog.root.name}"
    everyone = all_gather_checked(channel, doing, read, dict[str, bytes])
    found = {name: raw for documents in everyone for name, raw in documents.items()}
    return structs.replace(checkpoint, held={**checkpoint.held, **found})


def own_file(checkpoint: OpenedCheckpoint, channel: Channel, name_of: Callable[[int], str]) -> bytes | None:
    """Return this rank's metadata file, read by another rank if it is not visible to this rank.

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
    """Return a metadata file of a checkpoint, or None; ``received`` is the result of :func:`own_file`."""
    return received if received is not None or name not in checkpoint.documents else checkpoint.document(name)


def open_sent(
    directory: AnyPath,
    channel: Channel,
    sent: Sent,
    verify: str = "size",
    config: Callable[[], Mapping[str, Any]] | None = None,
    consistency: ConsistencyFacts | None = None,
    names: Callable[[], list[str]] = list,
    as_newest: bool = False,
) -> Opening:
    """Open a checkpoint whose metadata one rank has read for all.

    Args:
        directory: ``checkpoint-N``.
        channel: all ranks; every rank must call.
        sent: the coordinator's :func:`read_metadata`, on every rank.
        verify: the level.
        config: as for :func:`open_on_all_ranks`.
        consistency: facts that must be equal on all ranks, if no exchange has compared them.
        names: lists names that the ranks exchange for the caller. If it fails on one rank, all ranks raise the error.
        as_newest: whether to reject other formats, and checkpoints that are resumed only if a user names them.
    Raises:
        CheckpointError: the same on every rank: the checkpoint is incomplete, disks have different saves of it, or
            (``as_newest``) its name contradicts its step.
        Diverged: the same on every rank (``as_newest``): it was saved with diverged copies of tied tensors.
    """
    opened, path, metadata = list[OpenedCheckpoint](), directory / MANIFEST_NAME, sent.metadata
    identity: dict[AnyPath, Any] = {}
    one_disk = _Disks([_Report(b"one")] * channel.world_size, channel)

    def look() -> tuple[_Report, list[OpenedCheckpoint]]:
        listed, status = names(), stat_path(path)
        if status is not None:
            identity[path] = identity_of(status)
            if metadata is None:
                return _Report(_disk_of(status), names=listed), []
            checked, built = _check(directory, channel, metadata, identity, one_disk, verify, as_newest)
            return _Report(_disk_of(status), checked=checked, names=listed), built
        try:
            # Another format, or no checkpoint at all. The error is raised only if no rank has a manifest.
            from paddleformers_fc.formats.registry import open_checkpoint

            given = None if config is None or as_newest else config()
            opened.append(open_flex(directory) if as_newest else open_checkpoint(directory, verify, config=given))
        except FlexError as error:
            return _Report(fault=error.to_wire(), names=listed), []
        return _Report(names=listed), []

    reports, built = gather_and_keep(channel, f"opening {directory.name}", look, _Report, consistency)
    disks, everyone = _Disks(reports, channel), [one.names for one in reports]
    if not disks.ranks:
        raise_failures(channel, [one.fault for one in reports])
        return Opening(opened[0], False, everyone)
    found = metadata
    if found is None:
        source = min(rank for ranks in disks.ranks.values() for rank in ranks)
        doing = f"reading the metadata of {directory.name}"
        found = broadcast(channel, doing, lambda: _read_metadata(directory), Metadata, source=source)
    known = found
    checked = [one.checked for one in reports if one.checked is not None]
    if not disks.is_one or not checked:
        checked, built = gather_and_keep(
            channel,
            f"checking the files of {directory.name}",
            lambda: _check(directory, channel, known, identity, disks, verify, as_newest),
            _Checked,
        )
    visible_to = _require_complete(directory, channel, known.manifest, checked, disks)
    catalog = structs.replace(built[0].catalog, visible_to=visible_to)
    checkpoint = structs.replace(built[0], catalog=catalog, unread=verify == "full")
    return Opening(checkpoint, disks.is_one, everyone)


def _built(
    directory: AnyPath, metadata: Metadata, identity: Identities, around: Surroundings, as_newest: bool
) -> OpenedCheckpoint:
    """Build the checkpoint from its metadata. Damaged metadata files, which are not sent, raise an error here."""
    manifest, sent = metadata.manifest, metadata.documents
    if as_newest:
        check_newest(directory, manifest)
    documents = {name: raw if name == INDEX_NAME else zlib.decompress(raw) for name, raw in sent.items()}
    for name in DOCUMENTS:
        if name not in sent:
            documents[name] = read_document_bytes(directory, manifest, name)
    built = build_checkpoint(directory, manifest, documents, identity, around)
    return structs.replace(built, held={name: raw for name, raw in documents.items() if name not in DOCUMENTS})


def _check(
    directory: AnyPath,
    channel: Channel,
    metadata: Metadata,
    identity: Identities,
    disks: _Disks,
    verify: str,
    as_newest: bool,
) -> tuple[_Checked, list[OpenedCheckpoint]]:
    """Check this rank's share of the files of its disk, and build the checkpoint.

    Args:
        directory: ``checkpoint-N``.
        channel: all ranks.
        metadata: the same on every rank.
        identity: identity of the manifest on this rank.
        disks: the disks of all ranks.
        verify: the level; ``off`` only checks which files exist on several disks.
        as_newest: as for :func:`open_sent`.
    """
    manifest = metadata.manifest
    saved, leads = _summary(manifest), disks.members[:1] == [channel.rank]
    share = manifest.files[disks.share] if verify != "off" or not disks.is_one else []
    around, built, refusal = Surroundings(directory), list[OpenedCheckpoint](), ""
    try:
        built.append(_built(directory, metadata, identity, around, as_newest))
    except FlexError as error:  # Damaged files may explain it, and take precedence.
        refusal = error.to_wire()
    if leads and channel.rank != 0 and (own := _summary(read_manifest(directory))) != saved:
        return _Checked(saved=own), built
    faults = around.faults(share)
    # If all ranks share one disk, a missing file is a fault.
    lost = {path for path, fault in faults.items() if fault == f"{path} {MISSING}" and not disks.is_one}
    bits = np.packbits([one.path in lost for one in share]).tobytes() if lost else b""
    if verify == "off":
        return _Checked(refusal=refusal, missing=bits), built
    whole = [one for one in share if is_document(one.path) and one.path not in faults]
    found = compare_documents(directory, whole)
    found.faults += [faults[one.path] for one in share if one.path in faults.keys() - lost]
    extra = extra_files(directory, manifest) if leads else []
    refusal = found.refusal.to_wire() if found.refusal else refusal
    evidence = [*found.evidence, *extra]
    return _Checked(bool(found.faults or extra), evidence, refusal, "", bits, len(extra)), built


def _require_complete(
    directory: AnyPath, channel: Channel, manifest: Manifest, checked: Sequence[_Checked], disks: _Disks
) -> dict[str, tuple[int, ...]]:
    """Check the results of all ranks; return the ranks with access to every file that is not visible to all."""
    _check_same_checkpoint(directory, _summary(manifest), checked, disks)
    extra = sum(one.extra for one in checked)
    advice = repair_advice(extra > 0, sum(len(one.evidence) for one in checked) > extra)
    _check_undamaged(directory, channel, checked, advice)
    visible_to = disks.visible_to(checked, manifest)
    _check_visible(directory, visible_to, disks.blind)
    raise_failures(channel, [one.refusal for one in checked])
    return visible_to


def _disk_of(status: os.stat_result | RemoteStatus) -> bytes:
    """Return bytes that are equal for ranks with access to the same manifest; copies have different change times."""
    known = repr(status).encode()
    if isinstance(status, os.stat_result):
        known = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode()
    return xxhash.xxh3_64_digest(known)


def _summary(manifest: Manifest) -> str:
    ranks, files = count_text(manifest.world_size, "rank"), count_text(len(manifest.files), "file")
    return f"step {manifest.step}, {ranks}, {files}, sealed {manifest_seal(manifest)}"


def _check_same_checkpoint(directory: AnyPath, saved: str, checked: Sequence[_Checked], disks: _Disks) -> None:
    """Check that all disks have the same checkpoint."""
    groups: dict[str, list[int]] = {}
    for ranks in disks.ranks.values():
        groups.setdefault(checked[ranks[0]].saved or saved, []).extend(ranks)
    if len(groups) > 1:
        raise Corrupt(
            "The disks of this job have different checkpoints under one name.",
            where=str(directory),
            evidence=[f"{format_ranks(sorted(ranks))}: {one}" for one, ranks in groups.items()],
            next_step="Resume from a step that all disks have from the same save.",
        )


def _check_visible(directory: AnyPath, visible_to: VisibleTo, blind: Sequence[int]) -> None:
    """Check that every file is visible to some rank; otherwise a disk is missing."""
    lost = [path for path, ranks in visible_to.items() if not ranks]
    if not lost:
        return
    evidence = [f"{path} is visible to no rank" for path in lost]
    evidence += [f"{format_ranks(blind)}: no checkpoint of this name is there"] if blind else []
    raise Corrupt(
        f"{len(lost)} of the checkpoint's files are visible to no rank of this job.",
        where=str(directory),
        evidence=fold(evidence),
        next_step="Start the job on the hosts that saved it, copy their files here, or name another checkpoint.",
    )


def verify_metadata_blocks(catalog: Catalog, files: Sequence[FileChecksum], channel: Channel, next_step: str) -> None:
    """Compare the metadata files and headers of an export; the ranks share the work. Every rank must call.

    Args:
        catalog: the stored tensors.
        files: the recorded checksums; empty if this rank has no export, which raises an error later.
        channel: all ranks.
        next_step: advice for damaged files.
    Raises:
        Corrupt: the same on every rank; names all damaged files and blocks.
        StorageError: the same on every rank: files cannot be read, and nothing else is wrong.
    """
    ends = {one.path: one.size for one in files}
    for tensor in (tensor for names in catalog.roles.values() for tensor in names.values()):
        for path, begin in tensor.offsets:
            if path in ends and not is_document(path):  # The header ends where the tensors begin.
                ends[path] = min(begin, ends[path])
    mine = files[channel.rank :: channel.world_size]
    requests = [(one, range(-(-ends[one.path] // one.block_bytes))) for one in mine]
    compare_on_all(catalog.root, requests, catalog.identities, channel, next_step)


def compare_on_all(
    directory: AnyPath,
    requests: Iterable[tuple[FileChecksum, Iterable[int]]],
    identities: Identities,
    channel: Channel,
    next_step: str = RESTORE,
) -> None:
    """Compare blocks on all ranks, each its own share. Every rank must call.

    Args:
        directory: ``checkpoint-N``, or an export.
        requests: the share of this rank, as for :func:`.compare_blocks`. If iterating it fails on one rank, all ranks
            raise the error.
        identities: identities of the opened files; reading a replaced file raises an error.
        channel: all ranks.
        next_step: advice for damaged files.
    Raises:
        Corrupt: the same on every rank; names all damaged files and blocks.
        StorageError: the same on every rank: files cannot be read, and nothing else is wrong.
    """

    def work() -> FaultMessage:
        found = compare_blocks(directory, requests, identities)
        return FaultMessage(bool(found.faults), found.evidence, found.refusal.to_wire() if found.refusal else "")

    messages = all_gather_checked(channel, f"comparing checksums of {directory.name}", work, FaultMessage)
    raise_faults(directory, channel, messages, next_step)


def raise_faults(
    directory: AnyPath,
    channel: Channel,
    messages: Sequence[FaultMessage],
    next_step: str,
    cause: BaseException | None = None,
) -> None:
    """Raise one error with the faults of all ranks if any rank has found damage, or else the errors of all ranks."""
    _check_undamaged(directory, channel, messages, next_step)
    raise_failures(channel, [one.refusal for one in messages], cause)


def _check_undamaged(directory: AnyPath, channel: Channel, messages: Sequence[FaultMessage], next_step: str) -> None:
    """Check that no rank has found damage; otherwise raise one error with the faults of all ranks."""
    if not any(one.damaged for one in messages):
        return
    finders: dict[str, list[int]] = {}
    for rank, one in enumerate(messages):
        for fault in one.evidence:
            finders.setdefault(fault, []).append(rank)
    raise Corrupt(
        f"{directory} is damaged: {len(finders)} {'fault' if len(finders) == 1 else 'faults'} found.",
        where=str(directory),
        evidence=[
            fault if channel.world_size == 1 else f"{fault} (found by {format_ranks(ranks)})"
            for fault, ranks in sorted(finders.items())
        ],
        next_step=next_step,
    )
