"""Compare replicas: parts of a tensor that several ranks hold.

A save writes one of several replicas, or rows of each. Replicas should be equal bit for bit, because gradients were
reduced or parameters were broadcast. Different replicas are a fault of training that a checkpoint would hide: after a
resume all ranks have one of the versions. Before a save every rank therefore hashes its replicas: small ones as a
whole, and one n-th of a large one that n ranks hold, another part at each step. Diverged ranks differ nearly everywhere
and are found at once. A single bit is found when its part is hashed.

The shards of a group, which the same ranks hold, share one digest, which the coordinator gets with the checksums of the
files. It gets digests of single shards only if these differ.

Time: one xxh3 pass over about as many bytes as the rank writes, and on an accelerator their copy to the host. Memory:
16 bytes per group of this rank; on the coordinator, of all ranks.

List the ranges of live tensors that a save reads: to write them, or to hash replicas and tied copies.

A snapshot copies exactly these, so its memory is this rank's share of the checkpoint and not its state. Overlapping
ranges are joined. Time and memory are linear in the tensors of this rank, apart from a sort per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import xxhash

from paddleformers_fc.distributed.channel import MOST_BYTES, group_by_value
from paddleformers_fc.errors import MismatchError
from paddleformers_fc.execute.memory import HostTensors
from paddleformers_fc.execute.replica_assignment import Replica, rows_of
from paddleformers_fc.execute.save_plan import SavePlan
from paddleformers_fc.execute.ties import CopyPart
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.files import byte_view
from paddleformers_fc.text import count_text, fold

WHOLE_BYTES = 1024 * 1024
"""Replicas up to this size are always hashed as a whole."""

_NAME_BYTES = 256
"""Bytes of the name and the digest of a replica, a high estimate."""

_K = TypeVar("_K", int, str)


TensorKey: TypeAlias = tuple[str, str]
"""Role and name of a live tensor."""

ElementRange: TypeAlias = tuple[int, int]
"""The index of the first element, in row-major order, and that behind the last."""

ElementRanges: TypeAlias = Mapping[TensorKey, tuple[ElementRange, ...]]
"""Disjoint ranges of live tensors, in ascending order."""

ReplicaDigests: TypeAlias = Mapping[int, Mapping[str, bytes]]
"""The digest of every replica of a rank, by group and by the text of the replica."""


def hash_replicas(tensors: HostTensors, replicas: Iterable[Replica], step: int) -> ReplicaDigests:
    """Return the digests of this rank's replicas.

    Args:
        tensors: role -> name -> host memory of this rank.
        replicas: the shards that other ranks hold as well.
        step: determines the part of a large replica that is hashed.
    """
    found: dict[int, dict[str, bytes]] = {}
    for one in replicas:
        hasher = xxhash.xxh3_128()
        for part in tensors[one.role][one.shard.name](*hashed_range(one, step)):
            hasher.update(byte_view(part))
        found.setdefault(one.group, {})[str(one)] = hasher.digest()
    return found


def group_digests(digests: ReplicaDigests) -> dict[int, bytes]:
    """Return one digest for each group."""
    return {group: xxhash.xxh3_128_digest(b"".join(own[key] for key in sorted(own))) for group, own in digests.items()}


def hashed_range(replica: Replica, step: int | None) -> ElementRange:
    """Return the range of elements of a replica that is hashed at a step; equal for all holders.

    Args:
        replica: the replica.
        step: the step; None for a range as long as the longest.
    """
    rows, row_bytes = rows_of(replica.shard)
    row = row_bytes // dtype_size(replica.shard.dtype)
    if rows * row_bytes <= WHOLE_BYTES:
        return 0, rows * row
    if step is None:
        return 0, -(-rows // replica.holders) * row
    # Saves come at regular steps, so the remainder of the step itself might never change.
    turn = int.from_bytes(xxhash.xxh3_64_digest(str(step).encode()), "big") % replica.holders
    low = rows * turn // replica.holders
    high = max(low + 1, rows * (turn + 1) // replica.holders)
    return low * row, high * row


def digests_by_name(own: ReplicaDigests, groups: Iterable[int], ranks: int) -> dict[str, bytes]:
    """Return the digests of a rank's replicas by their common names, as many as fit if all ranks send some.

    Args:
        own: the digests of the rank.
        groups: whose replicas differ.
        ranks: how many ranks send digests.
    """
    held = [own[group] for group in groups if group in own]
    most = max(1, MOST_BYTES // (_NAME_BYTES * ranks * max(1, len(held))))
    return {name: digests[name] for digests in held for name in sorted(digests)[:most]}


def differences(shards: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Return the differences between replicas, one line per tensor; one line if no tensor of them is named.

    Args:
        shards: from :func:`digests_by_name`, by rank.
    """
    return list(fold(_lines(shards))) or ["tensors of a part of the model that several ranks hold"]


def refuse_different(lines: Sequence[str]) -> None:
    """Refuse a save of replicas that differ.

    Raises:
        MismatchError: naming the tensors and the ranks.
    """
    if lines:
        raise MismatchError(
            "Ranks that hold the same part of a tensor hold different numbers: "
            f"{count_text(len(lines), 'kind')} of tensors. Nothing was saved.",
            where="the live weights and optimizer states",
            evidence=lines,
            next_step="Training has gone apart on these ranks; resume from an older checkpoint and look for the cause, "
            "or set flex_check_replicas: warn to save one of the versions (all copies of tied tensors, in a checkpoint "
            "that is resumed only where it is named, with flex_tied).",
        )


def unequal_keys(everyone: Iterable[Mapping[_K, bytes]]) -> list[_K]:
    """Return the keys whose digests differ."""
    found: dict[_K, set[bytes]] = {}
    for digests in everyone:
        for key, digest in digests.items():
            found.setdefault(key, set()).add(digest)
    return sorted(key for key, values in found.items() if len(values) > 1)


def _lines(shards: Sequence[Mapping[str, bytes]]) -> Iterator[str]:
    for key in unequal_keys(shards):
        holders = [rank for rank, digests in enumerate(shards) if key in digests]
        versions: dict[bytes, str] = {}
        for rank in holders:
            versions.setdefault(shards[rank][key], f"version {len(versions) + 1}")
        yield f"{key}: {group_by_value({rank: versions[shards[rank][key]] for rank in holders})}"


def ranges_of(plan: SavePlan, step: int | None, replicas: str) -> ElementRanges:
    """Return what one rank reads in a save, to write it or to hash it.

    Args:
        plan: the save plan of the rank.
        step: determines the part of a large replica that is hashed. None for ranges with at least as many elements of
            every tensor as at any step; they may overlap, as at some steps nothing does.
        replicas: as for :func:`.save_checkpoint`; ``off`` hashes none.
    """
    found: dict[TensorKey, list[ElementRange]] = {}
    for file in plan.files:
        for piece in file.pieces:
            found.setdefault((file.role, piece.name), []).append((piece.start, piece.stop))
    for side in plan.ties:
        found.setdefault((side.role, side.name), []).append(_rows(side))
    for one in plan.replicas if replicas != "off" else ():
        found.setdefault((one.role, one.shard.name), []).append(hashed_range(one, step))
    return {key: tuple(some if step is None else _joined(some)) for key, some in found.items()}


def _rows(side: CopyPart) -> ElementRange:
    """Return the rows that contain a box."""
    if not side.shape:
        return side.start, side.start + 1
    row = math.prod(side.shape[1:])
    return side.start + side.part.lo[0] * row, side.start + side.part.hi[0] * row


def _joined(some: list[ElementRange]) -> Iterator[ElementRange]:
    begin, end = min(some)
    for start, stop in sorted(some):
        if start > end:
            yield begin, end
            begin, end = start, stop
        end = max(end, stop)
    yield begin, end
