"""Run a barrier with a timeout before every exchange, so that a dead rank is named and no rank waits for it forever.

Python cannot interrupt a collective operation with a dead rank, so no rank enters one before all have arrived. The
barrier is a counter in the store of the job: each rank adds one and polls until all have arrived. The first rank to
time out aborts the operation on all ranks. Then every living rank reports that it is present, and all raise one error
that names the missing ranks.

The outcome of a barrier must be equal on all ranks, although a rank may arrive at the moment of another rank's timeout.
Arrivals and timeouts are therefore one number: arrivals in its low part, the number of timeouts in its high part. A
rank whose timeout came after the last arrival takes it back. A timeout that came before it is final, because the high
part is never zero again. A job that has lost a rank stays lost: every later barrier raises the same error, so that no
save follows a partial load.

The counters are cumulative and identify the barrier, so a rank keeps no state. The store keeps a few numbers and one
number per rank for any number of barriers.

Cost of a barrier: two requests to the store, 60 us each, and up to one polling interval. Ranks usually arrive together,
so the first interval is short. Each is twice as long as the one before, up to a length at which the server gets at most
10,000 requests a second. For many ranks the first interval is half of that length.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from paddleformers_fc.distributed.channel import format_ranks
from paddleformers_fc.errors import FlexError, PeerError, from_wire

MAX_FINAL_WAIT_SECONDS = 5.0
"""Most seconds for the living ranks to report that they are present after a timeout."""

KEY_PREFIX = "flex"
"""The prefix of the keys of a job's first channel."""

_ARRIVALS = "arrivals"
_LOST = "lost"
_PRESENT = "present"
_REPORTERS = "reporters"
_READABLE = "readable"
_READERS = "readers"
_REPORT = "report"
_TIMEOUT = 1 << 40
_FIRST_LOOK = 0.0001
_SHORTEST_LOOK = 0.001
_LOOK_PER_RANK = 0.0001
_SERVER = 0


class KVStore(Protocol):
    """Counters and texts that all ranks of a job share, such as Paddle's TCP store."""

    @property
    def name(self) -> str:
        """The store's name in errors, with its address."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return its new value."""

    def set(self, key: str, value: str) -> None:
        """Store a text."""

    def get(self, key: str) -> bytes:
        """Return a stored text."""


class Liveness:
    """The barriers of one rank with the others.

    Args:
        store: shared by all ranks. It is used by one thread at a time.
        rank: this rank.
        world_size: number of ranks.
        patience: seconds after which :meth:`wait_for_all` has returned or raised.
        prefix: prefix of all keys in the store; equal on all ranks, and different for each channel of a job.
    """

    def __init__(self, store: KVStore, rank: int, world_size: int, patience: float, prefix: str = KEY_PREFIX) -> None:
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._rank = rank
        self._size = world_size
        self._configured = patience
        self._final_wait = min(MAX_FINAL_WAIT_SECONDS, patience / 4)
        self._patience = patience - self._final_wait
        self._interval = max(_SHORTEST_LOOK, world_size * _LOOK_PER_RANK)
        self._first_interval = max(_FIRST_LOOK, world_size * _LOOK_PER_RANK / 2)

    def wait_for_all(self) -> None:
        """Wait until every rank has arrived.

        Raises:
            PeerError: the same on every living rank, with the ranks that did not arrive in time.
        """
        try:
            why = self._meet()
        except Exception as error:  # The class depends on the store.
            raise self._store_error() from error
        if why:
            raise self.lost_rank_error(f"{why} The job cannot continue.")

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Pass a barrier, then run the block, which is the exchange.

        Raises:
            PeerError: the same on every living rank: ranks are missing, or the exchange failed.
        """
        self.wait_for_all()
        try:
            yield
        except FlexError:  # Of all ranks.
            raise
        except Exception as error:  # The other ranks are still waiting in the collective.
            self.abort()
            raise self.lost_rank_error(f"An exchange between the ranks broke off: {error}") from error

    def is_lost(self) -> bool:
        """Return whether any rank has found the job lost."""
        try:
            return self._add(_LOST, 0) > 0
        except Exception:  # The store does not answer; the report contains it.
            return True

    def abort(self) -> None:
        """Mark the job as lost, although all ranks had arrived."""
        try:
            self._add(_ARRIVALS, _TIMEOUT)
            self._add(_LOST, 1)
        except Exception:  # As above.
            return

    def lost_rank_error(self, what: str) -> FlexError:
        """Report this rank as living, and return the error that all living ranks raise.

        Args:
            what: the problem; the text of the first rank is used.
        """
        try:
            return self._report(what)
        except Exception as failure:  # The class depends on the store.
            error = self._store_error()
            error.__cause__ = failure
            return error

    def _meet(self) -> str:
        """Return the reason of a failed barrier; empty once every rank has arrived."""
        word = self._add(_ARRIVALS, 1)
        expected = -(-(word % _TIMEOUT) // self._size) * self._size
        timed_out = False
        interval = self._first_interval
        end = time.monotonic() + self._patience
        while not (word < _TIMEOUT and word >= expected):
            if word >= _TIMEOUT and self._add(_LOST, 0) > 0:
                return "A rank is lost."
            late = time.monotonic() - end
            if timed_out and late > self._final_wait:
                return "A rank died while it timed out."  # No rank can find out whether its timeout counts.
            if not timed_out and late > 0:
                timed_out = True
                if self._add(_ARRIVALS, _TIMEOUT) % _TIMEOUT < expected:
                    self._add(_LOST, 1)
                    return f"Not every rank has arrived within flex_timeout: {self._configured:g} s."
                self._add(_ARRIVALS, -_TIMEOUT)  # The last rank arrived before the timeout.
            time.sleep(interval)
            interval = min(2 * interval, self._interval)
            word = self._add(_ARRIVALS, 0)
        return ""

    def _report(self, what: str) -> FlexError:
        self._add(f"{_PRESENT}/{self._rank}", 1)
        self._add(_PRESENT, 1)
        self._look(lambda: self._add(_PRESENT, 0) >= self._size)
        if self._add(_REPORTERS, 1) == 1:
            text = self._error(what).to_wire()
            with self._lock:
                self._store.set(f"{self._prefix}/{_REPORT}", text)
            self._add(_READABLE, 1)
        if not self._look(lambda: self._add(_READABLE, 0) > 0):
            return self._store_error()
        with self._lock:
            error = from_wire(bytes(self._store.get(f"{self._prefix}/{_REPORT}")).decode())
        self._add(_READERS, 1)
        if self._rank == _SERVER:
            # The store may end with this process before the others have read the report.
            self._look(lambda: self._add(_READERS, 0) >= self._add(_PRESENT, 0))
        return error

    def _error(self, what: str) -> PeerError:
        missing = [rank for rank in range(self._size) if self._add(f"{_PRESENT}/{rank}", 0) == 0]
        evidence = (
            f"{format_ranks(missing)} did not arrive and reported no error" if missing else "every rank is alive now"
        )
        return PeerError(
            what,
            where=f"a job of {self._size} ranks",
            evidence=[evidence],
            next_step="Read the logs of these ranks, and restart the job from its newest checkpoint; raise "
            f"flex_timeout, which is {self._configured:g} s, if they were only slow.",
        )

    def _store_error(self) -> PeerError:
        return PeerError(
            "The store of the job does not answer. The job cannot continue.",
            where=f"a job of {self._size} ranks",
            evidence=[
                f"{self._store.name} is served by rank {_SERVER}, which has ended, or which this node cannot reach",
                f"flex_timeout: {self._configured:g} s",
            ],
            next_step=f"Read the log of rank {_SERVER}, and restart the job from its newest checkpoint.",
        )

    def _add(self, key: str, amount: int) -> int:
        with self._lock:
            return int(self._store.add(f"{self._prefix}/{key}", amount))

    def _look(self, condition: Callable[[], bool]) -> bool:
        """Poll a condition, and return whether it became true within the final wait."""
        end = time.monotonic() + self._final_wait
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(self._interval)
        return True
