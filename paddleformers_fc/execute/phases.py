"""Where a save or a load spends its time: seconds by phase, on this rank.

The phases of a load are ``open, plan, agree, read, finish``, and those of a save ``plan, capture, write, agree,
commit``. They follow each other without a gap. ``agree`` is the time in which this rank waits for the others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec


class Slowest(msgspec.Struct, frozen=True):
    """The rank that took longest for a phase.

    Args:
        phase: ``write`` or ``read``.
        rank: the rank.
        seconds: its seconds.
    """

    phase: str
    rank: int
    seconds: float


class Phases(msgspec.Struct, frozen=True):
    """The phases of a save or a load.

    Args:
        seconds: those of this rank by phase, in order.
        slowest: the rank that wrote or read longest; of a save it is known on the coordinator alone.
    """

    seconds: Mapping[str, float] = {}
    slowest: Slowest | None = None

    def __str__(self) -> str:
        """Format the seconds, and add the slowest rank if it took more than twice as long plus half a second."""
        text = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())
        one = self.slowest
        if one is not None and one.seconds > 0.5 + 2 * self.seconds.get(one.phase, 0.0):
            text += f" ({one.phase} on rank {one.rank}: {one.seconds:.2f} s)"
        return text


class PhaseTimer:
    """Measures phases one after the other, from now on.

    Args:
        before: seconds of phases that are over.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = dict(before or {})
        self._begun = time.monotonic()
        self._started = self._begun - sum(self.seconds.values())

    def end(self, phase: str) -> float:
        """End a phase, which began where the last one ended; return its seconds with those of earlier times."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._begun
        self._begun = now
        return self.seconds[phase]

    @property
    def elapsed(self) -> float:
        """The seconds since the first phase began."""
        return time.monotonic() - self._started

    def phases(self, slowest: Slowest | None = None) -> Phases:
        """Return the phases that have ended."""
        return Phases(dict(self.seconds), slowest)


def slowest_of(phase: str, seconds: Sequence[float]) -> Slowest:
    """Return the slowest rank by the seconds of all ranks."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return Slowest(phase, rank, seconds[rank])


def rounded(seconds: float) -> float:
    """Return seconds with two digits."""
    return float(f"{seconds:.1e}")
