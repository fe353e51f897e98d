"""Run a barrier with a timeout before every exchange, so that a dead rank is named and no rank waits for it forever.

Python cannot interrupt a collective operation with a dead rank, so no rank enters one before all have arrived. The
barrier is a counter in the store of the job. The rank that arrives last stores the outcome of the barrier, and the
others wait for this key inside the server, which answers all of them at once. The first rank to time out stores another
outcome, which aborts the operation on all ranks. Then every living rank reports that it is present, and all raise one
error that names the missing ranks and the operation.

The outcome of a barrier must be equal on all ranks, although a rank may arrive at the moment of another rank's timeout.
Both therefore claim the barrier first, and only the first claim stores an outcome. A job that has lost a rank stays
lost: a high bit in the counter of arrivals makes every later barrier raise the same error, so that no save follows a
partial load.

The counter of arrivals is cumulative and identifies the barrier, so a rank keeps no state. The store keeps two short
keys per barrier.

Cost of a barrier: three requests to the store per rank, 60 us each, for any number of ranks and any time of waiting. A
tree of counters would spare no request, because every rank has to arrive and to be released.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from paddleformers_fc.distributed.channel import format_ranks
from paddleformers_fc.distributed.store_client import StoreClient
from paddleformers_fc.errors import FlexError, PeerError, from_wire

MAX_FINAL_WAIT_SECONDS = 5.0
"""Most seconds for the living ranks to report that they are present after a timeout."""

KEY_PREFIX = "flex"
"""The prefix of the keys of a job's first channel."""

_ARRIVALS = "arrivals"
_CLAIMS = "claims"
_OUTCOME = "outcome"
_PRESENT = "present"
_COMPLETE = "complete"
_REPORTERS = "reporters"
_READERS = "readers"
_READ = "read"
_REPORT = "report"
_LOST = 1 << 40
_SERVER = 0
_FIRST_POLL_SECONDS = 0.0005
_LONGEST_POLL_SECONDS = 1.0


class Liveness:
    """The barriers of one rank with the others.

    Args:
        store: shared by all ranks. It is used by one thread at a time.
        rank: this rank.
        world_size: number of ranks.
        patience: seconds after which :meth:`wait_for_all` has returned or raised.
        prefix: prefix of all keys in the store; equal on all ranks, and different for each channel of a job.
    """

    def __init__(
        self, store: StoreClient, rank: int, world_size: int, patience: float, prefix: str = KEY_PREFIX
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._rank = rank
        self._size = world_size
        self._configured = patience
        self._final_wait = min(MAX_FINAL_WAIT_SECONDS, patience / 4)
        self._patience = patience - self._final_wait

    def wait_for_all(self, doing: str) -> None:
        """Wait until every rank has arrived.

        Args:
            doing: description of the operation, for the error.
        Raises:
            PeerError: the same on every living rank, with the ranks that did not arrive in time.
        """
        try:
            why = self._meet(doing)
        except Exception as error:  # The class depends on the store.
            raise self._store_error() from error
        if why:
            raise self.lost_rank_error(f"{why} The job cannot continue.")

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Pass a barrier, then run the block, which is the exchange.

        Args:
            doing: description of the operation, for the error.

        Raises:
            PeerError: the same on every living rank: ranks are missing, or the exchange failed.
        """
        self.wait_for_all(doing)
        try:
            yield
        except FlexError:  # Of all ranks.
            raise
        except Exception as error:  # The other ranks are still waiting in the collective.
            self.abort()
            raise self.lost_rank_error(f"An exchange between the ranks broke off: {error}") from error

    def post(self, amounts: Mapping[str, int]) -> None:
        """Add to counters in their order, without waiting. A failure may be raised by the next request.

        Raises:
            PeerError: the store cannot be reached; on this rank only.
        """
        try:
            with self._lock:
                self._store.post({f"{self._prefix}/{key}": amount for key, amount in amounts.items()})
        except Exception as error:  # The class depends on the store.
            raise self._store_error() from error

    def wait_for(self, key: str, is_complete: Callable[[int], bool]) -> int:
        """Return a counter once it is complete.

        Raises:
            PeerError: the same on every living rank, with the ranks that are missing.
        """
        end, pause = time.monotonic() + self._patience, _FIRST_POLL_SECONDS
        while not is_complete(total := self._value(key)):
            if time.monotonic() > end or self.is_lost():
                self.abort()
                raise self.lost_rank_error(
                    f"Not every rank has ended its step within flex_timeout: {self._configured:g} s."
                )
            time.sleep(pause)  # Longer each time: the wait is a quarter too long at most, and makes few requests.
            pause = min(pause * 1.25, _LONGEST_POLL_SECONDS)
        return total

    def _value(self, key: str) -> int:
        try:
            return self._add(key, 0)
        except Exception as error:  # As above.
            raise self._store_error() from error

    def other(self, patience: float, name: str) -> Liveness:
        """Return barriers with another timeout over the same connection, whose keys have a name of their own."""
        return Liveness(self._store, self._rank, self._size, patience, f"{self._prefix}/{name}")

    def is_lost(self) -> bool:
        """Return whether any rank has found the job lost."""
        try:
            return self._add(_ARRIVALS, 0) >= _LOST
        except Exception:  # The store does not answer; the report contains it.
            return True

    def abort(self) -> None:
        """Mark the job as lost, although all ranks had arrived."""
        try:
            arrived = self._add(_ARRIVALS, _LOST) % _LOST
            self._decide(arrived // self._size, "A rank is lost.")  # Some may wait in the next barrier.
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

    def _meet(self, doing: str) -> str:
        """Return the reason of a failed barrier; empty once every rank has arrived."""
        word = self._add(_ARRIVALS, 1)
        if word >= _LOST:
            return "A rank is lost."
        number, place = divmod(word - 1, self._size)
        outcome = f"{_OUTCOME}/{number}"
        if place == self._size - 1:
            if is_decided := self._decide(number, ""):
                return ""
        elif not (is_decided := self._wait(outcome, self._patience)):
            is_decided = self._decide(
                number, f"Not every rank has arrived for {doing} within flex_timeout: {self._configured:g} s."
            )
            if is_decided:
                self._add(_ARRIVALS, _LOST)
        if not is_decided and not self._wait(outcome, self._final_wait):
            self._add(_ARRIVALS, _LOST)
            self._set(outcome, "A rank died while it decided whether all have arrived.")
        return self._get(outcome)

    def _decide(self, number: int, outcome: str) -> bool:
        """Store the outcome of a barrier unless another rank does; the empty one lets all ranks pass."""
        is_first = self._add(f"{_CLAIMS}/{number}", 1) == 1
        if is_first:
            self._set(f"{_OUTCOME}/{number}", outcome)
        return is_first

    def _report(self, what: str) -> FlexError:
        self._add(f"{_PRESENT}/{self._rank}", 1)
        if self._add(_PRESENT, 1) >= self._size:
            self._set(_COMPLETE, "")
        self._wait(_COMPLETE, self._final_wait)
        if self._add(_REPORTERS, 1) == 1:
            self._set(_REPORT, self._error(what).to_wire())
        if not self._wait(_REPORT, self._final_wait):
            return self._store_error()
        error = from_wire(self._get(_REPORT))
        if self._add(_READERS, 1) >= self._add(_PRESENT, 0):
            self._set(_READ, "")
        if self._rank == _SERVER:
            # The store may end with this process before the others have read the report.
            self._wait(_READ, self._final_wait)
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

    def _set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(f"{self._prefix}/{key}", value)

    def _get(self, key: str) -> str:
        with self._lock:
            return bytes(self._store.get(f"{self._prefix}/{key}")).decode()

    def _wait(self, key: str, seconds: float) -> bool:
        with self._lock:
            return self._store.wait(f"{self._prefix}/{key}", seconds)
