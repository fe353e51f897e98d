"""Let ranks agree at step ends, on the training thread, without collectives and without a device.

At one step end every rank adds its state to a counter in the job's store: it has arrived, its part of a save is done,
it has received a signal. At the next step end every rank reads the counter. It is complete by then, because ranks
exchange gradients in every step; only a host whose kernel launches run ahead has to wait for another rank. A complete
counter does not change, so all ranks read the same sum and act at the end of the same step.

Clocks differ, so rank 0 also adds how many step ends make five seconds, and all ranks begin the next agreement by that
number. Three counters rotate: rank 0 clears the oldest in the message that begins an agreement.

Cost: one answer of the store per agreement. Without the store's address, ranks use an all-gather.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.distributed.communicator import Liveness
from paddleformers_fc.errors import PeerError

IDLE_SECONDS = 5.0
"""Seconds between two agreements that only check for signals."""

PENDING_SECONDS = 1.0
"""Seconds between two agreements while a save is running."""

ENDING_SECONDS = 20.0
"""Seconds that the other ranks have to end their loops after training failed on this rank."""

_BITS = 17
"""Bits of each field: ranks that have arrived, that are done, that are signalled. The interval follows."""

_RANKS = (1 << _BITS) - 1
_MAX_INTERVAL = (1 << 12) - 1
_COUNTERS = 3
_NUMBER_BYTES = 8

_loops = itertools.count()
"""Number of the next training loop. Every loop has its own counters, and all ranks run the same loops."""


class Agreed(msgspec.Struct, frozen=True):
    """What all ranks know at the end of the same step.

    Args:
        subject: what every rank has done; None if there is nothing, or some rank has not done it.
        is_signalled: whether any rank has received a signal.
    """

    subject: object
    is_signalled: bool


class StepAgreement:
    """The agreements of one rank's training loops.

    Args:
        channel: all ranks.
        liveness: the connection to the job's store; None without one.

    Attributes:
        is_running: whether a training loop is running.
    """

    def __init__(self, channel: Channel, liveness: Liveness | None) -> None:
        self._channel, self._liveness = channel, liveness
        self.is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager around a training loop. Every rank must enter."""
        self._prefix = f"steps-{next(_loops)}"
        self._number, self._ended, self._begun_at, self._begun = 0, 0, 0, time.monotonic()
        self._interval, self._kind = 1, ""
        self._subject: object = None
        self._own: int | None = None
        self._totals = 0, 0
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def read(self) -> Agreed | None:
        """Return at a step end what was agreed; None if no agreement had begun. Every rank must call.

        Raises:
            PeerError: the same on every living rank: a rank did not arrive within the timeout.
        """
        self._ended += 1
        if self._own is None:
            return None
        total, size = self._total(self._own), self._channel.world_size
        self._own, self._interval = None, total >> 3 * _BITS
        is_done = total >> _BITS & _RANKS == size
        return Agreed(self._subject if is_done else None, total >> 2 * _BITS & _RANKS > 0)

    def begin_next(self, kind: str, subject: object, is_done: bool, is_signalled: bool) -> None:
        """Begin an agreement if one is due, after :meth:`read`. Every rank must call.

        Args:
            kind: the kind of step. The interval is measured again when the kind changes.
            subject: what the ranks are doing; the caller of :meth:`read` compares it. None to check only for signals.
            is_done: whether this rank has done it.
            is_signalled: whether this rank has received a signal.
        """
        is_new_kind, self._kind = kind != self._kind, kind
        interval = self._interval if subject is None else -(-self._interval * PENDING_SECONDS // IDLE_SECONDS)
        if not is_new_kind and self._ended < self._begun_at + interval and self._channel.world_size > 1:
            return
        now, steps = time.monotonic(), self._ended - self._begun_at
        measured = min(max(IDLE_SECONDS * steps / (now - self._begun), 1), _MAX_INTERVAL) if not is_new_kind else 1
        self._begun_at, self._begun, self._subject = self._ended, now, subject
        self._number += 1
        self._own = 1 | is_done << _BITS | is_signalled << 2 * _BITS
        if self._channel.rank == 0:
            self._own |= int(measured) << 3 * _BITS
        if self._liveness is not None:
            old = self._totals[0] if self._channel.rank == 0 else 0
            cleared = {self._key(self._number - 2): -old} if old else {}
            self._liveness.post({**cleared, self._key(self._number): self._own})

    def all_end(self) -> bool:
        """Return whether all ranks end their loops now, for example after an error that all of them raise."""
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
