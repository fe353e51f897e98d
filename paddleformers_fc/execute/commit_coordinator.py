"""Commit a save on one disk or on several.

Each disk gets a directory with the files of its own ranks and the metadata files, which are equal on all disks. First
every disk is synced, then each directory is renamed. A crash between two of these renames leaves a step that some disks
lack or have from an earlier save; :mod:`.opening` rejects it.

Ranks that share a disk are found by visibility, because equal paths may lead to different disks. Rank 0 creates its
staging directory, and all ranks check whether they can see it. Its creator is the **leader** of the disk. On every
host, the lowest of the other ranks creates the next staging directory, until every rank has a leader. One shared disk
takes one exchange; disks of single hosts take four. Before a leader creates a staging directory it deletes stale ones,
so that a full disk does not stop the next save.
"""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, broadcast, decoder_of, gather_and_keep
from paddleformers_fc.errors import StorageError
from paddleformers_fc.formats.checkpoint import MAPPING_NAME
from paddleformers_fc.storage.checksum import INDEX_NAME, FileChecksum
from paddleformers_fc.storage.commit import Staging, commit, recover, staging_directory, sync_staging
from paddleformers_fc.storage.files import is_directory, read_file, real_path, write_file
from paddleformers_fc.storage.manifest import DivergedTie, Manifest, write_manifest


class DiskLeaders(msgspec.Struct, frozen=True):
    """The disks of a job.

    Args:
        leads: for every rank, the leader of its disk.
        token: the name of this rank's staging directory, which its leader has created.
    """

    leads: tuple[int, ...]
    token: str

    @property
    def sorted_leaders(self) -> tuple[int, ...]:
        """The leaders in ascending order; rank 0 is the first."""
        return tuple(sorted(set(self.leads)))

    def sharing(self) -> dict[int, list[int]]:
        """Return the ranks of every disk, by its leader."""
        return {lead: [rank for rank, own in enumerate(self.leads) if own == lead] for lead in self.sorted_leaders}


class _Visibility(msgspec.Struct, frozen=True):
    """The leader whose staging directory a rank can see, and the rank's host."""

    lead: int | None
    host: str


class StagingDirectory(msgspec.Struct, frozen=True):
    """The staging directory of a save.

    Args:
        path: the directory on this rank's disk.
        disks: the disks of all ranks.
        own: the directory if this rank is the leader of a disk; else None.
    """

    path: Path
    disks: DiskLeaders
    own: Staging | None

    def commit_or_pack(
        self, manifest: Manifest, checksums: Sequence[Sequence[FileChecksum]], files: Mapping[str, bytes]
    ) -> CommitResult:
        """Commit a checkpoint on one disk, or pack the metadata files for the leaders of several.

        The coordinator calls.

        Args:
            manifest: the manifest of the checkpoint, whose mapping and index are already written.
            checksums: the checksums of every rank's files, by rank.
            files: the coordinator's metadata files, which every disk gets.
        Raises:
            FlexError: a file is missing, or cannot be synced or renamed.
        """
        size = sum(one.size for one in manifest.files)
        done = CommitResult(len(manifest.files), size, [], manifest.differences, manifest.ties)
        leads = {one.path: lead for lead, theirs in zip(self.disks.leads, checksums, strict=True) for one in theirs}
        documents = _Documents(manifest, {}, [leads.get(one.path, 0) for one in manifest.files])
        if self.own is None or len(self.disks.sorted_leaders) > 1:
            documents.files = {**files, **{name: read_file(self.path / name) for name in (MAPPING_NAME, INDEX_NAME)}}
            done.documents = zlib.compress(msgspec.msgpack.encode(documents), 1)
        else:
            _sync(self.own, documents, 0)
            done.set_aside = self.rename()
        return done

    def sync_packed(self, packed: bytes, rank: int) -> tuple[None, None]:
        """Write the packed metadata files and sync, if this rank is the leader of a disk. Returns no message.

        Raises:
            FlexError: as :meth:`commit_or_pack`.
        """
        if self.own is not None:
            _sync(self.own, decoder_of(_Documents).decode(zlib.decompress(packed)), rank)
        return None, None

    def rename(self) -> list[bytes]:
        """Rename the directory to its target if this rank is the leader; return backups of files of other programs."""
        kept = None if self.own is None else commit(self.own)
        return [] if kept is None else [os.fsencode(kept)]


class StagingMaker:
    """Creates the staging directories of a save; closing it deletes a directory that was not committed.

    Args:
        target: the output directory.
        channel: all ranks.
        place_of: returns the path next to which the target is staged on this rank.

    Attributes:
        staged: the staging directory of this rank's disk, once :meth:`find` has returned.
    """

    staged: StagingDirectory

    def __init__(self, target: Path, channel: Channel, place_of: Callable[[Path], Path] = Path) -> None:
        self._target, self._channel, self._place_of = target, channel, place_of
        self._doing = f"preparing to write {target.name}"
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
        # Without locks, a second leader on the same disk would delete the staging directory of the first.
        recover(place.parent, () if self._channel.rank else runs)
        if place.parent == real_path(self._target):
            # An export that created the target was staged next to it; that directory need not be readable.
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
            message: returns this rank's message for rank 0.
        Raises:
            FlexError: the same on every rank.
        """
        channel, is_hidden = self._channel, np.zeros(1, np.uint8)

        def look() -> tuple[bytes, bool]:
            is_hidden[0] = self._look_for({0: token}).lead is None
            return message(), not is_hidden[0]

        messages, sees = gather_and_keep(channel, self._doing, look, bytes, to=0, marks=is_hidden)
        disks = DiskLeaders((0,) * channel.world_size, token)
        if is_hidden[0]:
            disks = self._lead_disks(token, sees, runs)
        staging = self._path_of(disks.token)
        if self._own is not None and self._own.path != staging:
            self.close()  # A rank on another host leads this disk.
        self.staged = StagingDirectory(staging, disks, self._own)
        return messages

    def _lead_disks(self, token: str, sees: bool, runs: Sequence[str]) -> DiskLeaders:
        """Let one rank of every host that sees no directory create one, until every rank sees one.

        Args:
            token: the name of the directory that rank 0 has created.
            sees: whether this rank sees it.
            runs: as for :meth:`create`.
        """
        channel, tokens = self._channel, {0: token}
        # Not looked for again where it is hidden, because a network file system could answer from its cache.
        look = partial(self._look_for, tokens if sees else {})
        found: dict[int, tuple[int, str]] = {}
        while True:
            left: dict[str, int] = {}
            for rank, one in enumerate(all_gather_checked(channel, self._doing, look, _Visibility)):
                if rank not in found and one.lead is not None:
                    found[rank] = (one.lead, tokens[one.lead])
                elif rank not in found:
                    left.setdefault(one.host, rank)
            if not left:
                return DiskLeaders(tuple(found[rank][0] for rank in range(channel.world_size)), found[channel.rank][1])
            leads = channel.rank in left.values()
            create = partial(self._create_encoded, runs) if leads else bytes
            created = all_gather_checked(channel, self._doing, create, bytes)
            tokens = {rank: os.fsdecode(created[rank]) for rank in sorted(left.values())}
            look = partial(self._look_for, tokens)

    def _look_for(self, tokens: Mapping[int, str]) -> _Visibility:
        """Return the first leader whose staging directory this rank can see; it always counts its own as seen."""
        rank = self._channel.rank
        lead = next((lead for lead, name in tokens.items() if lead == rank or is_directory(self._path_of(name))), None)
        return _Visibility(lead, socket.gethostname())

    def _create_encoded(self, runs: Sequence[str]) -> bytes:
        return os.fsencode(self.create(runs))

    def _path_of(self, name: str) -> Path:
        """Return the path of a staging directory on the disk of this rank."""
        return self._place_of(self._target).with_name(name)


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
    """The metadata files that the coordinator sends to the leaders of other disks.

    Args:
        manifest: the manifest.
        files: the coordinator's metadata files.
        leads: for every file of the manifest, the leader of its disk.
    """

    manifest: Manifest
    files: dict[str, bytes]
    leads: list[int]


class CommitResult(msgspec.Struct):
    """The coordinator's message to all ranks about the commit.

    Args:
        files: number of files in the checkpoint.
        size: total size of these files in bytes.
        set_aside: backups of files of other programs that had the checkpoint's name, on any disk.
        differences: replicas that differ, one line per tensor.
        ties: tied tensors whose copies differ.
        suspects: the groups of ranks whose replicas differ. If there are any, nothing has been committed yet.
        documents: with several disks, on which nothing is committed yet, the compressed metadata files for their
            leaders; other ranks ignore it.
    """

    files: int = 0
    size: int = 0
    set_aside: list[bytes] = []
    differences: list[str] = []
    ties: list[DivergedTie] = []
    suspects: list[int] = []
    documents: bytes = b""


def _sync(staging: Staging, documents: _Documents, rank: int) -> None:
    """Write the metadata files and sync. The leader of a disk calls."""
    if rank != 0:
        for path, data in documents.files.items():
            write_file(staging.path / path, data, root=staging.path)
    write_manifest(staging.path, documents.manifest)
    led = zip(documents.manifest.files, documents.leads, strict=True)
    sync_staging(staging, [*(one.path for one, lead in led if lead == rank), *documents.files])
