"""Who has come: ranks meet at a board before every exchange, so that one that died is named and nobody waits in vain.

Nothing can call a rank back from a collective operation whose other side is dead. So no rank enters one before all have
come. They meet at counters in the store through which the job's ranks found each other: each rank adds one and looks
until all have. Who has waited too long gives up for all; then every rank that is alive says that it is present, and all
raise one error that names those who did not.

Whether a meeting took place must be the same for everybody, and a rank may come in the very moment in which another
gives up. So arrivals and giving up are one number: arrivals in its low part, the number of those who gave up in its
high part. A rank whose giving up came after the last arrival takes it back; one whose giving up came before it has
decided the matter, because from then on the high part is never zero again. A job that has lost a rank stays lost: every
later meeting raises the same error, so that nothing is saved after a load that failed half way.

The counters are cumulative and say by themselves which meeting this is, so a rank remembers nothing, and the store
keeps a few numbers and one number per rank, however often they meet.

Cost of a meeting: two questions to the store, 60 us each, and up to one interval of looking. Ranks mostly come
together, so the first interval is short, and each is twice as long as the one before, up to a length at which the
server sees at most 10,000 questions a second; for many ranks the first is half of that length.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from paddleformers_fc.distributed.channel import Channel, GuardedChannel
from paddleformers_fc.distributed.rank_format import format_ranks
from paddleformers_fc.errors import FlexError, PeerError, from_wire

MAX_FINAL_WAIT_SECONDS = 5.0
"""Seconds that the living may take to say that they are present, once somebody has given up; less of short patience."""

_ARRIVALS = "flex/arrivals"
_LOST = "flex/lost"
_PRESENT = "flex/present"
_REPORTERS = "flex/reporters"
_READABLE = "flex/readable"
_READERS = "flex/readers"
_REPORT = "flex/report"
_GAVE_UP = 1 << 40
_FIRST_LOOK = 0.0001
_SHORTEST_LOOK = 0.001
_LOOK_PER_RANK = 0.0001
_SERVER = 0


class KVStore(Protocol):
    """Counters and texts that every rank of a job sees; what Paddle calls a store."""

    @property
    def name(self) -> str:
        """How an error names it, with its address."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; its new value. Adding 0 is looking."""

    def set(self, key: str, value: str) -> None:
        """Put a text up."""

    def get(self, key: str) -> bytes:
        """A text that has been put up."""


class Liveness:
    """One rank's view of who has come.

    Args:
        board: what all ranks see. It is used by one thread at a time.
        rank: this rank.
        world_size: number of ranks.
        patience: seconds after which :meth:`wait_for_all` has ended one way or the other.
    """

    def __init__(self, board: KVStore, rank: int, world_size: int, patience: float) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._rank = rank
        self._size = world_size
        self._configured = patience
        self._muster = min(MAX_FINAL_WAIT_SECONDS, patience / 4)
        self._patience = patience - self._muster
        self._interval = max(_SHORTEST_LOOK, world_size * _LOOK_PER_RANK)
        self._first_interval = max(_FIRST_LOOK, world_size * _LOOK_PER_RANK / 2)

    def wait_for_all(self) -> None:
        """Wait until every rank has come.

        Raises:
            PeerError: the same on every rank that is alive, naming those that did not come in time.
        """
        try:
            why = self._why_not_all_came()
        except Exception as error:  # What a store raises whose server has gone is Paddle's affair.
            raise self._nobody_answers() from error
        if why:
            raise self.report(f"{why} The job cannot go on.")

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Meet, and then do what all ranks have come for.

        Raises:
            PeerError: the same on every rank that is alive: who did not come, or that what they did broke off.
        """
        self.wait_for_all()
        try:
            yield
        except Exception as error:  # Whatever ends a collective here leaves the others waiting in theirs.
            self.abort()
            raise self.report(f"An exchange between the ranks broke off: {error}") from error

    def is_lost(self) -> bool:
        """Whether some rank has found that the job cannot go on."""
        try:
            return self._add(_LOST, 0) > 0
        except Exception:  # A store that does not answer; whoever was told so asks for the report, which says it.
            return True

    def abort(self) -> None:
        """Say that the job cannot go on, although all had come."""
        try:
            self._add(_ARRIVALS, _GAVE_UP)
            self._add(_LOST, 1)
        except Exception:  # As above: the report, which comes next, says that the store does not answer.
            return

    def report(self, what: str) -> FlexError:
        """Be counted among the living, and the error that all of them raise.

        Args:
            what: what has happened, in the words of whoever comes to write the report.
        """
        try:
            return self._report(what)
        except Exception as failure:  # Paddle's, of whatever kind: with the store the others' words are gone too.
            error = self._nobody_answers()
            error.__cause__ = failure
            return error

    def _why_not_all_came(self) -> str:
        """Nothing, once every rank has come."""
        word = self._add(_ARRIVALS, 1)
        expected = -(-(word % _GAVE_UP) // self._size) * self._size
        gave_up = False
        interval = self._first_interval
        end = time.monotonic() + self._patience
        while not (word < _GAVE_UP and word >= expected):
            if word >= _GAVE_UP and self._add(_LOST, 0) > 0:
                return "A rank is lost."
            late = time.monotonic() - end
            if gave_up and late > self._muster:
                return "A rank died while it gave up."  # Nobody can know whether its giving up counts.
            if not gave_up and late > 0:
                gave_up = True
                if self._add(_ARRIVALS, _GAVE_UP) % _GAVE_UP < expected:
                    self._add(_LOST, 1)
                    return f"Not every rank has come within flex_timeout: {self._configured:g} s."
                self._add(_ARRIVALS, -_GAVE_UP)  # The last one came first after all.
            time.sleep(interval)
            interval = min(2 * interval, self._interval)
            word = self._add(_ARRIVALS, 0)
        return ""

    def _report(self, what: str) -> FlexError:
        self._add(f"{_PRESENT}/{self._rank}", 1)
        self._add(_PRESENT, 1)
        self._look(lambda: self._add(_PRESENT, 0) >= self._size)
        if self._add(_REPORTERS, 1) == 1:
            text = self._written(what).to_wire()
            with self._lock:
                self._board.set(_REPORT, text)
            self._add(_READABLE, 1)
        if not self._look(lambda: self._add(_READABLE, 0) > 0):
            return self._nobody_answers()
        with self._lock:
            error = from_wire(bytes(self._board.get(_REPORT)).decode())
        self._add(_READERS, 1)
        if self._rank == _SERVER:
            # The store may end with this process, and the others have not read yet.
            self._look(lambda: self._add(_READERS, 0) >= self._add(_PRESENT, 0))
        return error

    def _written(self, what: str) -> PeerError:
        missing = [rank for rank in range(self._size) if self._add(f"{_PRESENT}/{rank}", 0) == 0]
        said = f"{format_ranks(missing)} did not come and did not say why" if missing else "every rank is alive now"
        return PeerError(
            what,
            where=f"a job of {self._size} ranks",
            evidence=[said],
            next_step="Look into the logs of these ranks, and start the job again from its newest checkpoint; raise "
            f"flex_timeout, which is {self._configured:g} s, if they were only slow.",
        )

    def _nobody_answers(self) -> PeerError:
        return PeerError(
            "The store of the job does not answer. The job cannot go on.",
            where=f"a job of {self._size} ranks",
            evidence=[
                f"{self._board.name} is served by rank {_SERVER}, which has ended, or which this node cannot reach",
                f"flex_timeout: {self._configured:g} s",
            ],
            next_step=f"Look into the log of rank {_SERVER}, and start the job again from its newest checkpoint.",
        )

    def _add(self, key: str, amount: int) -> int:
        with self._lock:
            return int(self._board.add(key, amount))

    def _look(self, condition: Callable[[], bool]) -> bool:
        """Look until a condition holds; whether it did before the muster was over."""
        end = time.monotonic() + self._muster
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(self._interval)
        return True


def with_liveness(channel: Channel, attendance: Liveness) -> Channel:
    """A channel on which no rank begins an exchange that another will not come to.

    Args:
        channel: all ranks.
        attendance: who has come.
    Returns:
        a channel that raises as :meth:`Attendance.together` does.
    """
    return GuardedChannel(channel, attendance.guard)
