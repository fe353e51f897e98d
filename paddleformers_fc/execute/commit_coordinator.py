"""Commit a save: turn the files that all ranks have written into a checkpoint, on one disk or on several.

Each disk gets a directory with the files of its own ranks and all small files: the manifest, the mapping, the
configuration and the trainer's state, which are equal on all disks. First every disk is prepared, with all bytes on the
device; then each directory gets its final name. A crash between two of these renames leaves a step that some disks lack
or hold of an earlier save; :mod:`.opening` refuses it.

Create a staging directory for all ranks of a job, and remove it if any rank fails.

The coordinator creates it beside the target. Ranks without access to it have output directories on other disks; the
leader of each of these disks creates a staging directory there. Before that, a leader deletes what crashed saves have
left, so that a disk full of it does not stop the next save.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paddleformers_fc.distributed.channel import Channel, Part, Parts, all_gather_checked
from paddleformers_fc.distributed.disk_leaders import DiskLeaders, find_disk_leaders
from paddleformers_fc.errors import StorageError
from paddleformers_fc.formats.checkpoint import MAPPING_NAME
from paddleformers_fc.storage.checksum import INDEX_NAME
from paddleformers_fc.storage.commit import Staging, commit, recover, staging_directory, sync_staging
from paddleformers_fc.storage.files import is_directory, read_file, real_path, write_file
from paddleformers_fc.storage.manifest import FileChecksum, Manifest, write_manifest


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


@contextlib.contextmanager
def staging_beside(
    target: Path,
    channel: Channel,
    place_of: Callable[[Path], Path] = Path,
    runs: Sequence[str] = ("",),
) -> Iterator[StagingDirectory]:
    """Context manager around a save: a staging directory on every disk, deleted at the end unless it was committed.

    Args:
        target: the directory that is going to be written.
        channel: all ranks; every rank must enter.
        place_of: returns the path beside which the target of this rank is staged.
        runs: ids of this run and its ancestors.
    Raises:
        FlexError: the same on every rank.
    """
    made: list[Staging] = []
    with contextlib.ExitStack() as stack:

        def make() -> str:
            place = place_of(target)
            # Without locks a leader would delete what another one has made on the same disk for this save.
            recover(place.parent, () if channel.rank else runs)
            if place.parent == real_path(target):
                # What an export has left that created the directory; its parent need not be readable.
                with contextlib.suppress(StorageError):
                    recover(place.parent.parent)
            made.append(stack.enter_context(staging_directory(place, runs[0])))
            return made[0].path.name

        def staging_of(name: str) -> Path:
            return place_of(target).with_name(name)

        disks = find_disk_leaders(
            channel, f"preparing to write {target.name}", make, lambda name: is_directory(staging_of(name))
        )
        staging = staging_of(disks.token)
        if made and made[0].path != staging:
            made.clear()  # A rank of another host was first on this disk.
            stack.close()
        yield StagingDirectory(staging, disks, made[0] if made else None)


@dataclass(frozen=True)
class CommitResult:
    """A finished checkpoint.

    Args:
        files: number of its files.
        size: of these files, in bytes.
        set_aside: where files of other programs that had its name are now, on any disk.
    """

    files: int
    size: int
    set_aside: tuple[Path, ...]


class _Documents(msgspec.Struct):
    """What every disk gets from the coordinator if there are several.

    Args:
        manifest: the manifest.
        files: the coordinator's small files, compressed.
        leads: by file of the manifest, the leader of the disk with it.
    """

    manifest: Manifest
    files: dict[str, bytes]
    leads: list[int]


class _Described(msgspec.Struct):
    """What every rank is told of the checkpoint: number and bytes of its files, and what was set aside.

    On several disks nothing is committed yet, and the leaders get the documents.
    """

    files: int
    size: int
    set_aside: list[bytes]
    documents: _Documents | None = None


def commit_parts(
    staged: StagingDirectory,
    checksums: Sequence[Sequence[FileChecksum]],
    files: Mapping[str, bytes],
    build_manifest: Callable[[list[FileChecksum]], Manifest],
    channel: Channel,
) -> Parts[CommitResult]:
    """Write the manifest, and rename the staging directories: in one part if there is one disk, in two otherwise.

    Args:
        staged: the staging directory.
        checksums: the checksums of the files of every rank, by rank; read on the coordinator only.
        files: this rank's small files; those of the coordinator go onto every disk.
        build_manifest: writes the mapping and returns the manifest of these files; called on the coordinator.
        channel: all ranks; every rank must call.
    Raises:
        FlexError: the same on every rank.
    """
    staging, several = staged.own, len(staged.disks.sorted_leaders) > 1

    def record() -> _Described | None:
        if channel.rank != 0:
            return None
        leads = {one.path: lead for lead, theirs in zip(staged.disks.leads, checksums, strict=True) for one in theirs}
        manifest = build_manifest([checksum for theirs in checksums for checksum in theirs])
        written = (MAPPING_NAME, INDEX_NAME)
        shared = {**files, **{name: read_file(staged.path / name) for name in written}} if several else {}
        shared = {name: zlib.compress(data, 1) for name, data in shared.items()}
        documents = _Documents(manifest, shared, [leads.get(one.path, 0) for one in manifest.files])
        size = sum(checksum.size for checksum in manifest.files)
        if several:
            return _Described(len(manifest.files), size, [], documents)
        prepare(documents)
        return _Described(len(manifest.files), size, rename())

    def prepare(documents: _Documents | None) -> None:
        if staging is None or documents is None:
            return
        if channel.rank != 0:
            for path, data in documents.files.items():
                write_file(staged.path / path, zlib.decompress(data), root=staged.path)
        write_manifest(staged.path, documents.manifest)
        led = zip(documents.manifest.files, documents.leads, strict=True)
        written = [one.path for one, lead in led if lead == channel.rank]
        sync_staging(staging, [*written, *documents.files])

    def rename() -> list[bytes]:
        kept = None if staging is None else commit(staging)
        return [] if kept is None else [os.fsencode(kept)]

    described: _Described = yield Part("committing the checkpoint", record, _Described, source=0)
    left = [described.set_aside]
    if several:

        def sync() -> tuple[None, None]:
            prepare(described.documents)
            return None, None

        yield Part("syncing every disk", sync, type(None))
        # A rename is a matter of milliseconds.
        left = all_gather_checked(channel, "committing on every disk", rename, list[bytes])
    set_aside = [Path(os.fsdecode(path)) for theirs in left for path in theirs]
    return CommitResult(described.files, described.size, tuple(set_aside))
