"""Find the ranks that write onto the same disk, by writing: equal paths may lead to different disks.

Rank 0 has created a token, whose name all ranks know, and the others probe for it. Ranks with access to it share its
disk, and the creator is the **leader** of that disk. On every host, the lowest of the other ranks creates the next
token, until every rank has a leader. One shared disk takes one exchange, which can carry a message for rank 0; disks of
single hosts take four.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, gather_and_keep


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
    channel: Channel,
    doing: str,
    token: str,
    put: Callable[[], str],
    is_visible: Callable[[str], bool],
    message: Callable[[], bytes] = bytes,
) -> tuple[DiskLeaders, list[bytes]]:
    """Find the ranks that share a disk.

    Args:
        channel: all ranks; every rank must call.
        doing: description of the operation, for errors.
        token: the name of the token of rank 0.
        put: creates a token with a new name on this rank's disk and returns the name; called on some ranks.
        is_visible: returns whether a token is visible to this rank.
        message: returns what this rank has for rank 0.
    Returns:
        the disks, and on rank 0 the messages of all ranks.
    Raises:
        FlexError: the same on every rank.
    """
    is_hidden = np.zeros(1, np.uint8)

    def look() -> tuple[bytes, bool]:
        sees = channel.rank == 0 or is_visible(token)
        is_hidden[0] = not sees
        return message(), sees

    messages, sees = gather_and_keep(channel, doing, look, bytes, to=0, marks=is_hidden)
    if not is_hidden[0]:
        return DiskLeaders((0,) * channel.world_size, token), messages
    # The first token is not looked up again: a network file system could answer from its cache.
    probe = partial(_probe, is_visible, {0: token} if sees else {}, channel.rank)
    found: dict[int, tuple[int, str]] = {}
    tokens = {0: token}
    while True:
        left: dict[str, int] = {}
        for rank, seen in enumerate(all_gather_checked(channel, doing, probe, _ProbeMessage)):
            if rank not in found and seen.lead is not None:
                found[rank] = (seen.lead, tokens[seen.lead])
            elif rank not in found:
                left.setdefault(seen.host, rank)
        if not left:
            leads = tuple(found[rank][0] for rank in range(channel.world_size))
            return DiskLeaders(leads, found[channel.rank][1]), messages
        creates = channel.rank in left.values()
        created = all_gather_checked(channel, doing, partial(_create_token, put, creates), bytes)
        tokens = {rank: os.fsdecode(created[rank]) for rank in sorted(left.values())}
        probe = partial(_probe, is_visible, tokens, channel.rank)


def _create_token(put: Callable[[], str], creates: bool) -> bytes:
    return os.fsencode(put()) if creates else b""


def _probe(is_visible: Callable[[str], bool], tokens: Mapping[int, str], rank: int) -> _ProbeMessage:
    # No name was looked up before: a network file system cannot answer from its cache.
    lead = next((maker for maker, token in tokens.items() if maker == rank or is_visible(token)), None)
    return _ProbeMessage(lead, socket.gethostname())
