"""Agree at step ends, on the thread that trains, without collectives and without a device.

At the end of one step every rank adds its state to a counter in the store of the job: that it has come, whether its
part of a save is done, whether it has got a signal. At the next step end every rank reads the counter. It is complete
then, because ranks exchange gradients in every step: a rank ends a step after all others have ended the one before.
Only where launches run ahead of a device may the host of one rank be a step ahead of another. It waits for that one,
while its device is busy. A complete counter does not change, so all ranks read the same sum, and act at the end of the
same step. The end of an evaluation batch counts as a step end.

The ranks also have to begin agreements at the same step end. Their clocks differ, so rank 0 adds the number of step
ends in five seconds, which all ranks read with the sum.

Three counters take turns. When an agreement is complete, every rank has read the counter before it. Rank 0 then clears
that one with the same message that begins the next agreement, before any rank can add to it again.

Cost: a rank waits for one answer of the store, to the request that reads. It does not wait for the answer to what it
adds, which the next request discards. Without an address of the store, a rank reads with an all-gather.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.liveness import Liveness
from paddleformers_fc.errors import PeerError

IDLE_SECONDS = 5.0
"""Seconds between two agreements of which only a signal is the subject."""

PENDING_SECONDS = 1.0
"""Seconds between two agreements while a save is under way."""

ENDING_SECONDS = 20.0
"""Seconds for the other ranks to end their loops when training has failed on this one."""

_BITS = 17
"""Bits of the number of ranks that have come, whose part is done, and that have got a signal; the pace follows."""

_RANKS = (1 << _BITS) - 1
_MAX_PACE = (1 << 12) - 1
_COUNTERS = 3
_NUMBER_BYTES = 8

_loops = itertools.count()
"""Every training loop of a job has counters of its own; all ranks run the same loops."""


class Agreed(msgspec.Struct, frozen=True):
    """What all ranks know at the end of the same step.

    Args:
        subject: what every rank has done; None if there is nothing, or if a rank has not done it.
        is_signalled: whether any rank has got a signal.
    """

    subject: object
    is_signalled: bool


class StepAgreement:
    """The agreements of one rank's training loops.

    Args:
        channel: all ranks.
        liveness: the connection to the store of the job; None without one.

    Attributes:
        is_running: whether a loop runs.
    """

    def __init__(self, channel: Channel, liveness: Liveness | None) -> None:
        self._channel, self._liveness = channel, liveness
        self.is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager around a training loop. Every rank must enter."""
        self._prefix = f"steps-{next(_loops)}"
        self._number, self._ended, self._begun_at, self._begun = 0, 0, 0, time.monotonic()
        self._pace, self._kind = 1, ""
        self._subject: object = None
        self._own: int | None = None
        self._totals = 0, 0
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def read(self) -> Agreed | None:
        """Return what was agreed, at a step end; None if no agreement had begun. Every rank must call.

        Raises:
            PeerError: the same on every living rank: a rank has not come within the timeout.
        """
        self._ended += 1
        if self._own is None:
            return None
        total, size = self._total(self._own), self._channel.world_size
        self._own, self._pace = None, total >> 3 * _BITS
        is_done = total >> _BITS & _RANKS == size
        return Agreed(self._subject if is_done else None, total >> 2 * _BITS & _RANKS > 0)

    def begin_next(self, kind: str, subject: object, is_done: bool, is_signalled: bool) -> None:
        """Begin an agreement if one is due, after :meth:`read`. Every rank must call.

        Args:
            kind: of the step. The pace of another kind says nothing about this one.
            subject: what the ranks do, which is compared by :meth:`read`'s caller; None if there is only a signal.
            is_done: whether this rank has done it.
            is_signalled: whether this rank has got a signal.
        """
        is_new_kind, self._kind = kind != self._kind, kind
        interval = self._pace if subject is None else -(-self._pace * PENDING_SECONDS // IDLE_SECONDS)
        if not is_new_kind and self._ended < self._begun_at + interval and self._channel.world_size > 1:
            return
        now, steps = time.monotonic(), self._ended - self._begun_at
        pace = 1 if is_new_kind else int(min(max(IDLE_SECONDS * steps / (now - self._begun), 1), _MAX_PACE))
        self._begun_at, self._begun, self._subject = self._ended, now, subject
        self._number += 1
        self._own = 1 | is_done << _BITS | is_signalled << 2 * _BITS
        if self._channel.rank == 0:
            self._own |= pace << 3 * _BITS
        if self._liveness is not None:
            old = self._totals[0] if self._channel.rank == 0 else 0
            cleared = {self._key(self._number - 2): -old} if old else {}
            self._liveness.post({**cleared, self._key(self._number): self._own})

    def all_end(self) -> bool:
        """Return whether all ranks end their loops now, as after an error that all of them raise."""
        if self._liveness is None:
            return self._channel.world_size == 1
        try:
            self._liveness.other(ENDING_SECONDS, f"{self._prefix}/end").wait_for_all("ending a loop")
        except PeerError:
            return False
        return True

    def _total(self, own: int) -> int:
        if self._liveness is None:
            gathered = self._channel.gather("agreeing at a step end", own.to_bytes(_NUMBER_BYTES, "little"))
            return sum(int.from_bytes(one, "little") for one in gathered or ())
        size = self._channel.world_size
        total = self._liveness.wait_for(self._key(self._number), lambda word: word & _RANKS == size)
        self._totals = self._totals[1], total
        return total

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number % _COUNTERS}"
