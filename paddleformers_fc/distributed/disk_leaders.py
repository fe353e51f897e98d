"""Find the ranks that write onto the same disk, by writing: equal paths may lead to different disks.

Rank 0 creates a token, and the others probe for it. Ranks with access to it share its disk, and the creator is the
**leader** of that disk. On every host, the lowest of the other ranks creates the next token, until every rank has a
leader. One shared disk takes two exchanges, disks of single hosts four.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from paddleformers_fc.distributed.channel import Channel, all_gather_checked


@dataclass(frozen=True)
class DiskLeaders:
    """The disks of a job.

    Args:
        leads: by rank, the leader of its disk.
        token: the token of this rank's leader.
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


class _ProbeMessage(msgspec.Struct, frozen=True):
    """The leader whose token is visible to a rank, and the rank's host."""

    lead: int | None
    host: str


def find_disk_leaders(
    channel: Channel, doing: str, put: Callable[[], str], is_visible: Callable[[str], bool]
) -> DiskLeaders:
    """Find the ranks that share a disk.

    Args:
        channel: all ranks; every rank must call.
        doing: description of the operation, for errors.
        put: creates a token with a new name on this rank's disk and returns the name; called on some ranks.
        is_visible: returns whether a token is visible to this rank.
    Raises:
        FlexError: the same on every rank.
    """
    found: dict[int, tuple[int, str]] = {}
    makers = [0]
    while makers:
        created = all_gather_checked(channel, doing, partial(_create_token, put, channel.rank in makers), bytes)
        tokens = [os.fsdecode(name) for name in created]
        probe = partial(_probe, is_visible, {rank: tokens[rank] for rank in sorted(makers)}, channel.rank)
        left: dict[str, int] = {}
        for rank, seen in enumerate(all_gather_checked(channel, doing, probe, _ProbeMessage)):
            if rank not in found and seen.lead is not None:
                found[rank] = (seen.lead, tokens[seen.lead])
            elif rank not in found:
                left.setdefault(seen.host, rank)
        makers = list(left.values())
    return DiskLeaders(tuple(found[rank][0] for rank in range(channel.world_size)), found[channel.rank][1])


def _create_token(put: Callable[[], str], creates: bool) -> bytes:
    return os.fsencode(put()) if creates else b""


def _probe(is_visible: Callable[[str], bool], tokens: Mapping[int, str], rank: int) -> _ProbeMessage:
    # No name was looked up before: a network file system cannot answer from its cache.
    lead = next((maker for maker, token in tokens.items() if maker == rank or is_visible(token)), None)
    return _ProbeMessage(lead, socket.gethostname())
