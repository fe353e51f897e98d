"""The end of a save: from files that all ranks have written to a checkpoint that is there, on one disk or on several.

Each disk gets a directory that holds the files of its own ranks and everything that is small: the manifest, which is
the same on all of them, the mapping, the configuration, the trainer's state. First every disk is made ready, with all
bytes on the device; only when all are, each gets its name. What a crash between two of these renames leaves is a step
that some disks hold and others do not, or hold of an earlier save; it is not whole, and :mod:`.opening` tells.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, broadcast, run_on_all
from paddleformers_fc.execute.staging import StagingDirectory
from paddleformers_fc.formats.flex import MAPPING_NAME
from paddleformers_fc.storage.commit import prepare_commit, publish_name
from paddleformers_fc.storage.files import read_file, write_file
from paddleformers_fc.storage.manifest import FileChecksum, Manifest, write_manifest


@dataclass(frozen=True)
class CommitResult:
    """A finished checkpoint.

    Args:
        manifest: of the checkpoint.
        set_aside: directories that the save had to leave beside it, on any disk.
    """

    manifest: Manifest
    set_aside: tuple[Path, ...]


class _ManifestMessage(msgspec.Struct):
    """The coordinator's manifest on its way to the other ranks, and the size of the files that every disk gets."""

    manifest: Manifest
    size: int


_manifest_messages = msgspec.msgpack.Decoder(_ManifestMessage)


def commit_on_all(
    staged: StagingDirectory,
    directory: Path,
    receipts: Sequence[Sequence[FileChecksum]],
    files: Mapping[str, bytes],
    describe: Callable[[list[FileChecksum]], Manifest],
    channel: Channel,
) -> CommitResult:
    """Describe what was written and give it its name.

    Args:
        staged: where.
        directory: its name.
        receipts: by rank, of the files it has written.
        files: this rank's small files; those of the coordinator go onto every disk.
        describe: on the coordinator, writes the mapping and returns the manifest of these files and of itself.
        channel: all ranks; every rank must call.
    Raises:
        FlexError: the same on every rank.
    """
    leads = staged.disks.sorted_leaders
    common: list[bytes] = []

    def record() -> bytes:
        if channel.rank != 0:
            return b""
        manifest = describe([receipt for theirs in receipts for receipt in theirs])
        if len(leads) > 1:
            everywhere = {**files, MAPPING_NAME: read_file(staged.path / MAPPING_NAME)}
            common.append(msgspec.msgpack.encode(everywhere))
        return msgspec.msgpack.encode(_ManifestMessage(manifest, sum(map(len, common))))

    told = _manifest_messages.decode(all_gather_checked(channel, "describing the checkpoint", record)[0])
    got = broadcast(channel, common[0] if common else b"", told.size, leads)
    is_lead = channel.rank in leads

    def make_whole() -> None:
        if is_lead:
            shared = msgspec.msgpack.decode(got, type=dict[str, bytes]) if got else {}
            if channel.rank != 0:
                for path, data in shared.items():
                    write_file(staged.path / path, data, root=staged.path)
            write_manifest(staged.path, told.manifest)
            elsewhere = [
                receipt.path
                for lead, theirs in zip(staged.disks.leads, receipts, strict=True)
                for receipt in theirs
                if lead != channel.rank
            ]
            prepare_commit(staged.path, directory, frozenset(elsewhere) - shared.keys())

    def commit() -> bytes:
        if not is_lead:
            return msgspec.msgpack.encode([])
        committed = publish_name(staged.path, directory)
        return msgspec.msgpack.encode([os.fsencode(path) for path in (*committed.kept, *committed.left)])

    run_on_all(channel, "finishing", make_whole)
    payloads = all_gather_checked(channel, "committing", commit)
    set_aside = [Path(os.fsdecode(path)) for payload in payloads for path in msgspec.msgpack.decode(payload)]
    return CommitResult(told.manifest, tuple(set_aside))
