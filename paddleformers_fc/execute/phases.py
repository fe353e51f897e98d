"""Measure where a save or a load spends its time: seconds by phase, on this rank.

A load has the phases ``open, plan, agree, read, finish``, a save ``plan, capture, write, agree, commit``, without gaps
between them. In ``agree`` this rank waits for the others.
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
        seconds: this rank's seconds by phase, in order.
        slowest: the rank that wrote or read longest; for a save, known only on the coordinator.
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
    """Measures successive phases, starting now.

    Args:
        before: seconds of phases that have already ended.
    """

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = dict(before or {})
        self._begun = time.monotonic()
        self._started = self._begun - sum(self.seconds.values())

    def end(self, phase: str) -> float:
        """End a phase that began when the previous one ended; return its total seconds so far."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._begun
        self._begun = now
        return self.seconds[phase]

    @property
    def elapsed(self) -> float:
        """Seconds since the first phase began."""
        return time.monotonic() - self._started

    def phases(self, slowest: Slowest | None = None) -> Phases:
        """Return the phases that have ended."""
        return Phases(dict(self.seconds), slowest)


def slowest_of(phase: str, seconds: Sequence[float]) -> Slowest:
    """Return the slowest rank, given the seconds of all ranks."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return Slowest(phase, rank, seconds[rank])


def rounded(seconds: float) -> float:
    """Round seconds to two significant digits."""
    return float(f"{seconds:.1e}")
