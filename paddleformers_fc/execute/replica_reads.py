"""Decide which ranks read the same ranges, so that each reads a share of them and sends it to the others.

Ranks of data parallelism hold the same weights. Each computes a digest of the ranges that it reads for them, and ranks
with equal digests are replicas. Where states of the optimizer are not cut over the replicas, their ranges are part of
the digest; otherwise every rank reads its own. From its plan and the numbers of its replicas a rank derives the share
of each of them, so no list of ranges is sent.

The page cache of a host serves all its ranks. Under ``auto`` ranks therefore share only if their replicas are on
several hosts, :data:`LEAST_HOSTS` at least. More than :data:`MOST_REPLICAS` form several groups.

A rank sends two digests of 16 bytes, equal to those of its replicas, in the exchange that planning makes in any case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from paddleformers_fc.layout.live import LocalTensor, Roles
from paddleformers_fc.layout.roles import MODEL_STATE, parameter_of
from paddleformers_fc.plan.items import LoadPlan, ReadItem, StoredPart
from paddleformers_fc.plan.transfer_plan import EMPTY_SCHEDULE, TransferSchedule, share_rounds
from paddleformers_fc.storage.executor import ReadOptions

LEAST_HOSTS = 4
"""Least hosts of replicas that share their reads under ``auto``."""


MOST_REPLICAS = 64
"""Most ranks that share their reads. With more of them, pieces become short and rounds many; they form groups."""


class SharedReads(msgspec.Struct, frozen=True, array_like=True):
    """What a rank reads that others may read as well, on its way to them.

    Args:
        ranges: the digest of the ranges; empty if the rank reads for itself.
        hosts: the digest of the hosts of all ranks, under ``auto``.
    """

    ranges: bytes = b""
    hosts: bytes = b""


@dataclass(frozen=True)
class Replicas:
    """The ranks that read the same ranges as this one, in a job in which ranks share reads.

    Args:
        ranks: in rising order, this rank included; it may be the only one.
        parts: the ranges, equal on all of them.
    """

    ranks: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def schedule(self, limit: int) -> TransferSchedule:
        """Return the rounds in which replicas send each other what they have read; none for a rank alone.

        Args:
            limit: bound on the bytes that a rank sends, and receives, in a round.
        """
        return share_rounds(self.parts, self.ranks, limit) if len(self.ranks) > 1 else EMPTY_SCHEDULE


def shared_parts(plan: LoadPlan, roles: Roles) -> tuple[StoredPart, ...]:
    """Return the ranges that replicas of a rank read as well: those of weights, and of states that are not cut.

    Args:
        plan: the reads of the rank.
        roles: the tensors that it fills.
    """
    elements = {role: _elements(role, names) for role, names in roles.items()}
    whole = {role for role, found in elements.items() if found == elements.get(MODEL_STATE)}
    return tuple(dict.fromkeys(item.stored for item in by_shard(plan) if item.role in whole))


def by_shard(plan: LoadPlan) -> list[ReadItem]:
    """Return the items ordered by shard, so that shards are completed one after the other."""
    shards: dict[tuple[str, str], list[ReadItem]] = {}
    for item in plan.items:
        shards.setdefault((item.role, item.name), []).append(item)
    return [item for items in shards.values() for item in items]


def _elements(role: str, names: Mapping[str, LocalTensor]) -> dict[str, int]:
    """Return for each parameter the elements of its largest tensor of a role."""
    found: dict[str, int] = {}
    for name, weight in names.items():
        parameter = parameter_of(role, name)
        found[parameter] = max(found.get(parameter, 0), math.prod(weight.local_tensor.shape))
    return found


def shared_reads(
    plan: LoadPlan, roles: Mapping[str, Mapping[str, LocalTensor]], options: ReadOptions
) -> tuple[SharedReads, tuple[StoredPart, ...]]:
    """Return the message of a rank, and the ranges that it can share.

    Args:
        plan: the reads of the rank.
        roles: the tensors that it fills.
        options: whether ranks share reads.
    """
    is_automatic = options.replicas == "auto"
    if options.replicas == "each" or (is_automatic and len(set(options.hosts)) < LEAST_HOSTS):
        return SharedReads(), ()
    parts = shared_parts(plan, roles)
    ranges, hosts = (xxhash.xxh3_128_digest(msgspec.msgpack.encode(one)) for one in (parts, options.hosts))
    return SharedReads(ranges if parts else b"", hosts if is_automatic else b""), parts


def replicas_of(
    everyone: Sequence[SharedReads], rank: int, options: ReadOptions, parts: Sequence[StoredPart]
) -> Replicas | None:
    """Return the replicas of a rank; None if no ranks of the job share reads.

    Args:
        everyone: the message of every rank, by rank.
        rank: the rank.
        options: its options, equal on all ranks.
        parts: the ranges that it can share.
    """
    groups: dict[bytes, list[int]] = {}
    for other, one in enumerate(everyone):
        if one.ranges:
            groups.setdefault(one.ranges, []).append(other)
    if options.replicas == "auto":
        # Ranks that do not see the same hosts would not agree who shares.
        hosts = options.hosts if len({one.hosts for one in everyone}) == 1 else ()
        known = len(hosts) == len(everyone)
        groups = {key: ranks for key, ranks in groups.items() if known and _hosts(ranks, hosts) >= LEAST_HOSTS}
    groups = {key: ranks for key, ranks in groups.items() if len(ranks) > 1}
    if not groups:
        return None
    own = groups.get(everyone[rank].ranges, [rank])
    count = -(-len(own) // MOST_REPLICAS)
    # Neighbours, which are on one host, are in different groups.
    return Replicas(tuple(own[own.index(rank) % count :: count]), tuple(parts))


def _hosts(ranks: Sequence[int], hosts: Sequence[str]) -> int:
    return len({hosts[rank] for rank in ranks})
