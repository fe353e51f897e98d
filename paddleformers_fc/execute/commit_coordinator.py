"""Commit a save: turn the files that all ranks have written into a checkpoint, on one disk or on several.

Each disk gets a directory with the files of its own ranks and all small files: the manifest, the mapping, the
configuration and the trainer's state, which are equal on all disks. First every disk is prepared, with all bytes on the
device; then each directory gets its final name. A crash between two of these renames leaves a step that some disks lack
or hold of an earlier save; :mod:`.opening` refuses it. If replicas differ, nothing is committed before the coordinator
has got the digests that name them.

Create a staging directory for all ranks of a job, and remove it if any rank fails.

The coordinator creates it beside the target, and its name reaches all ranks with another message or alone. Ranks
without access to it have output directories on other disks; the leader of each of these disks creates a staging
directory there. Before that, a leader deletes what crashed saves have left, so that a disk full of it does not stop the
next save.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paddleformers_fc.distributed.channel import Channel, broadcast, decoder_of
from paddleformers_fc.distributed.disk_leaders import DiskLeaders, find_disk_leaders
from paddleformers_fc.errors import StorageError
from paddleformers_fc.formats.checkpoint import MAPPING_NAME
from paddleformers_fc.storage.checksum import INDEX_NAME, FileChecksum
from paddleformers_fc.storage.commit import Staging, commit, recover, staging_directory, sync_staging
from paddleformers_fc.storage.files import is_directory, read_file, real_path, write_file
from paddleformers_fc.storage.manifest import DivergedTie, Manifest, write_manifest


@dataclass(frozen=True)
class StagingDirectory:
    """The staging directory of a save.

    Args:
        path: the directory on this rank's disk.
        disks: the disks of all ranks.
        own: the directory, on the leader of a disk.
    """

    path: Path
    disks: DiskLeaders
    own: Staging | None


class StagingMaker:
    """Creates the staging directories of a save, and deletes those that were not committed when it is closed.

    Args:
        target: the directory that is going to be written.
        channel: all ranks.
        place_of: returns the path beside which the target of this rank is staged.

    Attributes:
        staged: the staging directory of this rank's disk, once :meth:`find` has returned.
    """

    staged: StagingDirectory

    def __init__(self, target: Path, channel: Channel, place_of: Callable[[Path], Path] = Path) -> None:
        self._target, self._channel, self._place_of = target, channel, place_of
        self._stack = contextlib.ExitStack()
        self._own: Staging | None = None

    def close(self) -> None:
        """Delete the staging directory of this rank, if it has one."""
        self._own = None
        self._stack.close()

    def create(self, runs: Sequence[str] = ("",)) -> str:
        """Create a staging directory on the disk of this rank, and return its name.

        Args:
            runs: ids of this run and its ancestors.
        """
        place = self._place_of(self._target)
        # Without locks a leader would delete what another one has made on the same disk for this save.
        recover(place.parent, () if self._channel.rank else runs)
        if place.parent == real_path(self._target):
            # What an export has left that created the directory; its parent need not be readable.
            with contextlib.suppress(StorageError):
                recover(place.parent.parent)
        self._own = self._stack.enter_context(staging_directory(place, runs[0]))
        return self._own.path.name

    def find(self, token: str, runs: Sequence[str] = ("",), message: Callable[[], bytes] = bytes) -> list[bytes]:
        """Find or create the staging directory of every disk, and return on rank 0 the messages of all ranks.

        Every rank must call.

        Args:
            token: the name of the directory that rank 0 has created.
            runs: as for :meth:`create`, which the leaders of other disks call.
            message: returns what this rank has for rank 0.
        Raises:
            FlexError: the same on every rank.
        """

        def staging_of(name: str) -> Path:
            return self._place_of(self._target).with_name(name)

        disks, messages = find_disk_leaders(
            self._channel,
            f"preparing to write {self._target.name}",
            token,
            lambda: self.create(runs),
            lambda name: is_directory(staging_of(name)),
            message,
        )
        staging = staging_of(disks.token)
        if self._own is not None and self._own.path != staging:
            self.close()  # A rank of another host was first on this disk.
        self.staged = StagingDirectory(staging, disks, self._own)
        return messages


@contextlib.contextmanager
def staging_beside(
    target: Path, channel: Channel, place_of: Callable[[Path], Path] = Path
) -> Iterator[StagingDirectory]:
    """Context manager around an export: a staging directory on every disk, deleted at the end unless it was committed.

    Args:
        target: as for :class:`StagingMaker`.
        channel: all ranks; every rank must enter.
        place_of: as for :class:`StagingMaker`.
    Raises:
        FlexError: the same on every rank.
    """
    with contextlib.closing(StagingMaker(target, channel, place_of)) as maker:
        doing = f"creating a directory for {target.name}"
        token = broadcast(channel, doing, lambda: os.fsencode(maker.create()), bytes)
        maker.find(os.fsdecode(token))
        yield maker.staged


class _Documents(msgspec.Struct):
    """What every disk gets from the coordinator if there are several.

    Args:
        manifest: the manifest.
        files: the coordinator's small files.
        leads: by file of the manifest, the leader of the disk with it.
    """

    manifest: Manifest
    files: dict[str, bytes]
    leads: list[int]


class CommitResult(msgspec.Struct):
    """A finished checkpoint, as every rank is told of it.

    Args:
        files: number of its files.
        size: of these files, in bytes.
        set_aside: where files of other programs that had its name are now, on any disk.
        differences: replicas that differ, one line per tensor.
        ties: tied tensors whose copies differ.
        suspects: if there are any, nothing has been committed: the groups of ranks whose replicas differ.
        documents: for the leaders of several disks, on which nothing is committed yet: one compressed message, which
            other ranks receive as well and do not read. It is bounded as every exchange.
    """

    files: int = 0
    size: int = 0
    set_aside: list[bytes] = []
    differences: list[str] = []
    ties: list[DivergedTie] = []
    suspects: list[int] = []
    documents: bytes = b""


def commit_or_pack(
    staged: StagingDirectory,
    manifest: Manifest,
    checksums: Sequence[Sequence[FileChecksum]],
    files: Mapping[str, bytes],
) -> CommitResult:
    """Commit a checkpoint on one disk; for several, pack what their leaders need. On the coordinator.

    Args:
        staged: the staging directory.
        manifest: of the checkpoint, whose mapping and index are written.
        checksums: of the files of every rank, by rank.
        files: the small files of the coordinator, which go onto every disk.
    Raises:
        FlexError: a file is missing, or cannot be synced or renamed.
    """
    size = sum(one.size for one in manifest.files)
    done = CommitResult(len(manifest.files), size, [], manifest.differences, manifest.ties)
    leads = {one.path: lead for lead, theirs in zip(staged.disks.leads, checksums, strict=True) for one in theirs}
    documents = _Documents(manifest, {}, [leads.get(one.path, 0) for one in manifest.files])
    if staged.own is None or len(staged.disks.sorted_leaders) > 1:
        documents.files = {**files, **{name: read_file(staged.path / name) for name in (MAPPING_NAME, INDEX_NAME)}}
        done.documents = zlib.compress(msgspec.msgpack.encode(documents), 1)
    else:
        _sync(staged.own, documents, 0)
        done.set_aside = rename_staged(staged)
    return done


def sync_packed(staged: StagingDirectory, packed: bytes, rank: int) -> tuple[None, None]:
    """Write what the coordinator has packed, and sync, if this rank is the leader of a disk. It has no message.

    Raises:
        FlexError: as :func:`commit_or_pack`.
    """
    if staged.own is not None:
        _sync(staged.own, decoder_of(_Documents).decode(zlib.decompress(packed)), rank)
    return None, None


def rename_staged(staged: StagingDirectory) -> list[bytes]:
    """Give the synced directory of this rank its name, if it has one; return where the files of others are now."""
    kept = None if staged.own is None else commit(staged.own)
    return [] if kept is None else [os.fsencode(kept)]


def _sync(staging: Staging, documents: _Documents, rank: int) -> None:
    """Write documents and the manifest, and sync; the leader of a disk calls."""
    if rank != 0:
        for path, data in documents.files.items():
            write_file(staging.path / path, data, root=staging.path)
    write_manifest(staging.path, documents.manifest)
    led = zip(documents.manifest.files, documents.leads, strict=True)
    sync_staging(staging, [*(one.path for one, lead in led if lead == rank), *documents.files])
