"""Which ranks write onto the same disk: found out by writing, for a path says nothing about what is behind it.

One rank puts something down, the others look whether they see it. Those that do share its disk, and it is the **lead**
of that disk. Where some do not, the lowest of them on every host puts something down in its turn, until every rank has
a lead. On one shared disk these are two agreements, on disks of single hosts four.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paddleformers_fc.distributed.channel import Channel, all_gather_checked


@dataclass(frozen=True)
class DiskLeaders:
    """The disks of a job.

    Args:
        leads: by rank, the lowest rank that writes onto the same disk.
        token: what this rank's lead has put down.
    """

    leads: tuple[int, ...]
    token: str

    @property
    def sorted_leaders(self) -> tuple[int, ...]:
        """The leads, rising; rank 0 is the first."""
        return tuple(sorted(set(self.leads)))

    def sharing(self) -> dict[int, list[int]]:
        """The ranks of every disk, by its lead."""
        return {lead: [rank for rank, own in enumerate(self.leads) if own == lead] for lead in self.sorted_leaders}


class _ProbeMessage(msgspec.Struct, frozen=True):
    """What a rank saw: the lead whose token it sees, or none, and the host it is on."""

    lead: int | None
    host: str


_probe = msgspec.msgpack.Decoder(_ProbeMessage)


def find_disk_leaders(channel: Channel, doing: str, put: Callable[[], str], sees: Callable[[str], bool]) -> DiskLeaders:
    """Find out which ranks share a disk.

    Args:
        channel: all ranks; every rank must call.
        doing: what it is for, for an error that is not one of ours.
        put: puts something with a fresh name onto this rank's disk, and returns the name; asked of some ranks.
        sees: whether this rank sees something of that name.
    Raises:
        FlexError: the same on every rank.
    """
    found: dict[int, tuple[int, str]] = {}
    makers = [0]
    while makers:
        tokens = _tokens(channel, doing, makers, put)
        left: dict[str, int] = {}
        for rank, answer in enumerate(_exchange_probes(channel, doing, makers, tokens, sees)):
            if rank not in found and answer.lead is not None:
                found[rank] = (answer.lead, tokens[answer.lead])
            elif rank not in found:
                left.setdefault(answer.host, rank)
        makers = list(left.values())
    return DiskLeaders(tuple(found[rank][0] for rank in range(channel.world_size)), found[channel.rank][1])


def _tokens(channel: Channel, doing: str, makers: list[int], put: Callable[[], str]) -> list[str]:
    """What some ranks have put down, by rank."""
    payloads = all_gather_checked(channel, doing, lambda: os.fsencode(put()) if channel.rank in makers else b"")
    return [os.fsdecode(payload) for payload in payloads]


def _exchange_probes(
    channel: Channel, doing: str, makers: list[int], tokens: list[str], sees: Callable[[str], bool]
) -> list[_ProbeMessage]:
    """Whose token every rank sees: the lowest rank's of several."""

    def look() -> bytes:
        # A name that nobody has looked for before: a network file system cannot answer from what it remembers.
        lead = next((maker for maker in sorted(makers) if sees(tokens[maker]) or maker == channel.rank), None)
        return msgspec.msgpack.encode(_ProbeMessage(lead, socket.gethostname()))

    return [_probe.decode(payload) for payload in all_gather_checked(channel, doing, look)]
