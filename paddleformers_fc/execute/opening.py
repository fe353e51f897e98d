"""Opening a checkpoint on all ranks, which need not see the same files of it.

Where every rank sees the same, every rank opens what it sees, and nothing is exchanged beyond one small agreement on
that. Where output directories lie on disks of single hosts, each disk holds the files that its own ranks wrote: ranks
then tell each other which files they see, one of those that see a file reads its header for all, and the catalog is the
union. Each rank checks the files it sees; a file that nobody sees is named, with the ranks that see nothing at all.

Memory: descriptions of the files that not all ranks see, linear in the shards they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from paddleformers_fc.catalog.flex import (
    DOCUMENTS,
    FlexCheckpoint,
    Sight,
    StoredShard,
    described,
    gathered,
    is_shard_file,
    open_seen,
    read_beside,
    see,
    shards_of,
)
from paddleformers_fc.errors import Corrupt, NotACheckpoint
from paddleformers_fc.execute.channel import Channel, agree, spread
from paddleformers_fc.execute.integrity import check_beside_numbers
from paddleformers_fc.execute.told import spelled
from paddleformers_fc.layout.codec import ShardRecord, record_of
from paddleformers_fc.layout.roles import ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import shifted
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.plan.stock import open_stored
from paddleformers_fc.storage.manifest import Manifest, manifest_seal, verify_files
from paddleformers_fc.storage.places import Place

SeenBy = Mapping[str, Sequence[int]]


class _Sight(msgspec.Struct, frozen=True):
    """What one rank sees, on its way to the others.

    Args:
        seal: the manifest's checksum of itself; empty where there is no manifest.
        size: bytes of the manifest on its way.
        saved: what the manifest says of the save, for a person.
        missing: one bit for every listed file that is not there; empty where all are.
    """

    seal: str = ""
    size: int = 0
    saved: str = ""
    missing: bytes = b""


class _Described(msgspec.Struct):
    """A stored shard on its way to the ranks that do not see its file."""

    record: ShardRecord
    dtype: str
    begin: int
    width: int


class _Told(msgspec.Struct):
    """What one rank tells of the files that it reads for others."""

    shards: dict[str, list[_Described]]
    documents: dict[str, bytes]


def open_checkpoint(directory: Place, channel: Channel, verify: str = "size", threads: int = 4) -> FlexCheckpoint:
    """Open a finished checkpoint on every rank, or raise the same error on every rank.

    Under ``full`` the ranks share the checksums of everything that is not a tensor's number: headers and documents. The
    numbers are left to the load, which knows which of them a rank will read. Where ranks see different files, each
    compares the whole of those it sees.

    Args:
        directory: ``checkpoint-N``.
        channel: all ranks of the job; every rank must call.
        verify: ``off``, ``size`` or ``full``; each rank checks the files that it sees.
        threads: how many threads of this rank compare checksums.
    """
    seen: list[Sight | None] = []
    opened: list[FlexCheckpoint] = []

    def look() -> bytes:
        seen.append(_sight(directory))
        return msgspec.msgpack.encode(_told_of(directory, seen[0]))

    def check_sizes() -> bytes:
        if seen[0] is not None:
            verify_files(directory, seen[0].manifest, "size")
        return b""

    def open_alone() -> bytes:
        if seen[0] is None:
            # A checkpoint of Paddle, which has no checksums, or none at all, which is refused here.
            opened.append(open_stored(directory, verify))
        else:
            level = "off" if verify == "full" else verify
            opened.append(replace(open_seen(directory, seen[0], level), unread=verify == "full"))
        return b""

    payloads = agree(channel, f"looking at {directory.name}", look)
    if len(set(payloads)) == 1:
        if verify == "full":
            agree(channel, f"checking {directory.name}", check_sizes)
            check_beside_numbers(directory, seen[0], channel, threads)
        agree(channel, f"opening {directory.name}", open_alone)
        return opened[0]
    sights = [msgspec.msgpack.decode(payload, type=_Sight) for payload in payloads]
    manifest = _common_manifest(directory, sights, seen[0], channel)
    return _open_divided(directory, Sight(manifest, seen[0].identities if seen[0] else {}), sights, channel, verify)


def _sight(directory: Place) -> Sight | None:
    try:
        return see(directory)
    except NotACheckpoint:
        return None


def _told_of(directory: Place, sight: Sight | None) -> _Sight:
    if sight is None:
        return _Sight()
    manifest, missing = sight.manifest, set(sight.missing(directory))
    bits = np.packbits([receipt.path in missing for receipt in manifest.files]).tobytes() if missing else b""
    saved = f"step {manifest.step}, {manifest.world_size} ranks, {len(manifest.files)} files"
    return _Sight(manifest_seal(manifest), len(msgspec.msgpack.encode(manifest)), saved, bits)


def _common_manifest(directory: Place, sights: Sequence[_Sight], own: Sight | None, channel: Channel) -> Manifest:
    """The manifest of all ranks that see one, on every rank."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, sight in enumerate(sights):
        if sight.seal:
            groups.setdefault((sight.seal, sight.saved), []).append(rank)
    if len(groups) > 1:
        raise Corrupt(
            "The disks of this job hold different checkpoints under one name.",
            where=str(directory),
            evidence=[f"{spelled(ranks)}: {saved}, sealed {seal}" for (seal, saved), ranks in groups.items()],
            next_step="They were saved at different times. Resume from a step that all disks hold of one save.",
        )
    ((holders),) = groups.values()
    lacking = [rank for rank, sight in enumerate(sights) if not sight.seal]
    data = msgspec.msgpack.encode(own.manifest) if own is not None else b""
    raw = spread(channel, data, sights[holders[0]].size, [holders[0], *lacking]) if lacking else b""
    return own.manifest if own is not None else msgspec.msgpack.decode(raw, type=Manifest)


def _open_divided(
    directory: Place, sight: Sight, sights: Sequence[_Sight], channel: Channel, verify: str
) -> FlexCheckpoint:
    manifest = sight.manifest
    seen_by = _seen_by(manifest, sights)
    _refuse_lost(directory, seen_by, sights)
    readers = {path: ranks[index % len(ranks)] for index, (path, ranks) in enumerate(seen_by.items())}

    def tell() -> bytes:
        here = [one for one in manifest.files if channel.rank in seen_by.get(one.path, (channel.rank,))]
        if here:
            verify_files(directory, msgspec.structs.replace(manifest, files=here), verify)
        mine = [path for path, reader in readers.items() if reader == channel.rank]
        shards = {path: [_encoded(shard) for shard in shards_of(directory, path)] for path in mine if _holds(path)}
        documents = {path: read_beside(directory / path) for path in mine if path in DOCUMENTS}
        return msgspec.msgpack.encode(_Told(shards, documents))

    told: dict[str, list[_Described]] = {}
    documents: dict[str, bytes] = {}
    for payload in agree(channel, f"opening {directory.name}", tell):
        one = msgspec.msgpack.decode(payload, type=_Told)
        told.update(one.shards)
        documents.update(one.documents)

    def shards(path: str) -> Iterator[StoredShard]:
        return _decoded(path, told[path]) if path in told else shards_of(directory, path)

    opened: list[FlexCheckpoint] = []

    def put_together() -> bytes:
        catalog, faults = gathered(directory, manifest, shards)
        catalog = replace(catalog, identities=sight.identities, seen_by=seen_by)
        own = {name: read_beside(directory / name) for name in DOCUMENTS if name not in documents}
        opened.append(described(catalog, faults, manifest, {**documents, **own}))
        return b""

    agree(channel, f"opening {directory.name}", put_together)
    return opened[0]


def _seen_by(manifest: Manifest, sights: Sequence[_Sight]) -> dict[str, tuple[int, ...]]:
    """For every file that not all ranks see, the ranks that do."""
    count = len(manifest.files)
    visible = np.ones((len(sights), count), bool)
    for rank, sight in enumerate(sights):
        if not sight.seal:
            visible[rank] = False
        elif sight.missing:
            visible[rank] = np.unpackbits(np.frombuffer(sight.missing, np.uint8), count=count) == 0
    partly = np.flatnonzero(~visible.all(axis=0))
    return {manifest.files[index].path: tuple(np.flatnonzero(visible[:, index]).tolist()) for index in partly}


def _refuse_lost(directory: Place, seen_by: SeenBy, sights: Sequence[_Sight]) -> None:
    """Files that no rank sees: a disk is not there."""
    lost = [path for path, ranks in seen_by.items() if not ranks]
    if not lost:
        return
    blind = [rank for rank, sight in enumerate(sights) if not sight.seal]
    evidence = [f"{path} is seen by no rank" for path in lost]
    evidence += [f"{spelled(blind)}: no checkpoint of this name is there"] if blind else []
    raise Corrupt(
        f"{len(lost)} of the checkpoint's files are on no disk that a rank of this job sees.",
        where=str(directory),
        evidence=fold(evidence),
        next_step="Start the job on the hosts that saved it, bring their files here, or name another checkpoint.",
    )


def _holds(path: str) -> bool:
    return any(is_shard_file(path, role) for role in ROLES)


def _encoded(stored: StoredShard) -> _Described:
    shard, _, begin, width = stored
    return _Described(record_of(shard), shard.dtype, begin, width)


def _decoded(path: str, told: Sequence[_Described]) -> Iterator[StoredShard]:
    for one in told:
        record = one.record
        box = shifted(record.shape, record.offset)
        yield Shard(record.name, one.dtype, record.global_shape, box, record.flat), path, one.begin, one.width
