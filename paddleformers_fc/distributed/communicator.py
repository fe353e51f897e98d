"""One object per job that owns the channel, its liveness and the connection to the job's store.

**A barrier with a timeout precedes every exchange**, so that a dead rank is named and no rank waits for it forever.
Python cannot interrupt a collective with a dead rank, so no rank enters one before all have arrived. The barrier is a
counter in the job's store. The last rank to arrive stores the outcome; the others wait for that key on the server. The
first rank to time out stores an outcome that aborts the operation: every living rank reports itself as present, and all
raise one error that names the missing ranks. If a rank arrives just as another times out, both claim the barrier, and
only the first claim stores an outcome. A lost job stays lost: a high bit in the counter makes every later barrier fail,
so that no save follows a partial load.

The counter is cumulative and identifies the barrier, so ranks keep no state; the store keeps two short keys per
barrier. Cost: three requests of 60 us per rank, for any number of ranks. A tree of counters would save none of them.

**A watchdog thread runs during every exchange**, because a rank may still die in these milliseconds and leave the
others in a collective. If the exchange times out, or another rank has marked the job as lost, it prints the error,
dumps the stack of every thread and ends the process. The launcher then sees a failed rank instead of a job that hangs.

Only the training thread uses a :class:`Communicator`; background threads never communicate.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from paddleformers_fc.distributed import store_client
from paddleformers_fc.distributed.channel import NO_HEAD, NO_MARKS, Bytes, Channel, Payload, format_ranks, job_channel
from paddleformers_fc.errors import FlexError, PeerError, from_wire

EXIT_CODE = 75
"""Exit code of a process whose exchange has timed out: ``EX_TEMPFAIL``, because a restart may help."""

DEFAULT_PATIENCE = 1800.0
"""Default seconds that a rank waits for the others."""

_CHECK_SECONDS = 5.0
_STDERR = 2

MAX_FINAL_WAIT_SECONDS = _CHECK_SECONDS + 3.0
"""Maximum seconds that living ranks have to report themselves as present after a timeout or a loss.

A rank in a collective notices a loss in its next check. The server must not have ended by then.
"""

KEY_PREFIX = "flex"
"""Prefix of the store keys of a job's first channel."""

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
        store: the job's store, used by one thread at a time.
        rank: this rank.
        world_size: number of ranks.
        patience: seconds within which :meth:`wait_for_all` returns or raises.
        prefix: prefix of all keys in the store; equal on all ranks, and different for each channel of a job.
    """

    def __init__(
        self, store: store_client.StoreClient, rank: int, world_size: int, patience: float, prefix: str = KEY_PREFIX
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
            PeerError: the same on every living rank; names the ranks that did not arrive in time.
        """
        try:
            why = self._meet(doing)
        except Exception as error:  # The exception class depends on the store.
            raise self._store_error() from error
        if why:
            raise self.lost_rank_error(f"{why} The job cannot continue.")

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Context manager around an exchange, entered through a barrier.

        Args:
            doing: description of the operation, for the error.

        Raises:
            PeerError: the same on every living rank: ranks are missing, or the exchange failed.
        """
        self.wait_for_all(doing)
        try:
            yield
        except FlexError:  # All ranks raise it.
            raise
        except Exception as error:  # The other ranks still wait in the collective.
            self.abort()
            raise self.lost_rank_error(f"An exchange between the ranks broke off: {error}") from error

    def post(self, amounts: Mapping[str, int]) -> None:
        """Add to counters, in order, without waiting for the store. A failure may surface in the next request.

        Raises:
            PeerError: on this rank only: the store cannot be reached.
        """
        try:
            with self._lock:
                self._store.post({f"{self._prefix}/{key}": amount for key, amount in amounts.items()})
        except Exception as error:  # The exception class depends on the store.
            raise self._store_error() from error

    def wait_for(self, key: str, is_complete: Callable[[int], bool]) -> int:
        """Return a counter once it is complete.

        Raises:
            PeerError: the same on every living rank; names the missing ranks.
        """
        end, pause = time.monotonic() + self._patience, _FIRST_POLL_SECONDS
        while not is_complete(total := self._value(key)):
            if time.monotonic() > end or self.is_lost():
                self.abort()
                raise self.lost_rank_error(
                    f"Not every rank has ended its step within flex_timeout: {self._configured:g} s."
                )
            time.sleep(pause)  # Growing pauses make few requests and lengthen the wait by a quarter at most.
            pause = min(pause * 1.25, _LONGEST_POLL_SECONDS)
        return total

    def _value(self, key: str) -> int:
        try:
            return self._add(key, 0)
        except Exception as error:  # The exception class depends on the store.
            raise self._store_error() from error

    def other(self, patience: float, name: str) -> Liveness:
        """Return barriers over the same connection with a different timeout and a separate key prefix."""
        return Liveness(self._store, self._rank, self._size, patience, f"{self._prefix}/{name}")

    def is_lost(self) -> bool:
        """Return whether any rank has found the job lost."""
        try:
            return self._add(_ARRIVALS, 0) >= _LOST
        except Exception:  # The store does not answer; the error that follows says so.
            return True

    def abort(self) -> None:
        """Mark the job as lost."""
        try:
            arrived = self._add(_ARRIVALS, _LOST) % _LOST
            self._decide(arrived // self._size, "A rank is lost.")  # Ranks may already wait in the next barrier.
        except Exception:  # The store does not answer; the error that follows says so.
            return

    def lost_rank_error(self, what: str) -> FlexError:
        """Report this rank as present, and return the error that all living ranks raise.

        Args:
            what: the problem; all ranks use the text of the first one to report.
        """
        try:
            return self._report(what)
        except Exception as failure:  # The exception class depends on the store.
            error = self._store_error()
            error.__cause__ = failure
            return error

    def _meet(self, doing: str) -> str:
        """Return why the barrier failed; empty once every rank has arrived."""
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
        """Store the outcome of a barrier unless another rank does; an empty outcome lets all ranks pass."""
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
            # The store ends with this process, and the others may not have read the report yet.
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


class Communicator:
    """A channel whose exchanges never hang: they return, raise the same error on all ranks, or end the process.

    Args:
        channel: all ranks, at least two.
        patience: seconds that a rank waits for the others.
        store: a connection to the job's store, used by this object alone. Without one, errors do not name the missing
            rank, and only the timeout ends an exchange.

    Attributes:
        liveness: the barriers over that connection; None without one.
    """

    def __init__(self, channel: Channel, patience: float, store: store_client.StoreClient | None) -> None:
        self.rank, self.world_size = channel.rank, channel.world_size
        self._channel = channel
        self._patience = patience
        self.liveness = None if store is None else Liveness(store, self.rank, self.world_size, patience)

    def gather(
        self, doing: str, payload: bytes, head: bytes = NO_HEAD, to: int | None = None, marks: Bytes = NO_MARKS
    ) -> list[Payload] | None:
        """Return the payload of every rank, by rank.

        Raises:
            PeerError: see :meth:`.Liveness.guard`.
        """
        with self._guard(doing):
            return self._channel.gather(doing, payload, head, to, marks)

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Send and receive bytes.

        Raises:
            PeerError: see :meth:`.Liveness.guard`.
        """
        with self._guard("exchanging tensors"):
            return self._channel.all_to_all(outgoing, sizes)

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """Return the maximum of an array over all ranks.

        Raises:
            PeerError: see :meth:`.Liveness.guard`.
        """
        with self._guard("exchanging tensors"):
            return self._channel.unite(array, source, to)

    def share(self, arrays: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """Return an array of each of some ranks, on every rank.

        Raises:
            PeerError: see :meth:`.Liveness.guard`.
        """
        with self._guard("exchanging tensors"):
            return self._channel.share(arrays)

    @contextlib.contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        with self.liveness.guard(doing) if self.liveness else contextlib.nullcontext():
            done = threading.Event()
            thread = threading.Thread(target=self._watch, args=(done,), name="flex-watch", daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()

    def _watch(self, done: threading.Event) -> None:
        end = time.monotonic() + self._patience
        while not done.wait(min(_CHECK_SECONDS, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                _end_process(self._timeout_error())
            if self.liveness is not None and self.liveness.is_lost():
                _end_process(self.liveness.lost_rank_error("An exchange between the ranks broke off."))

    def _timeout_error(self) -> FlexError:
        if self.liveness is not None:
            self.liveness.abort()
            return self.liveness.lost_rank_error(
                f"An exchange between the ranks has not ended within flex_timeout: {self._patience:g} s."
            )
        return PeerError(
            f"Rank {self.rank} has waited {self._patience} s for the other ranks and ends its process.",
            where=f"rank {self.rank} of {self.world_size}",
            next_step="Find the rank that failed in the other ranks' logs, or raise flex_timeout, which is "
            f"{self._patience:g} s, if they are slow.",
        )


def _end_process(error: FlexError) -> None:
    # The program may have closed or redirected stderr; the process must end in any case.
    try:
        for file in {sys.stderr, sys.__stderr__}:
            with contextlib.suppress(Exception):
                print(error.render(), file=file, flush=True)
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(sys.__stderr__ or _STDERR)
    finally:
        os._exit(EXIT_CODE)


def job_communicator(patience: float = DEFAULT_PATIENCE) -> Channel:
    """Return the job's communicator, which is opened once; a single process gets a plain channel.

    Args:
        patience: seconds that a rank waits for the others.

    Raises:
        PeerError: on this rank only: the job's store does not answer.
    """
    channel = job_channel()
    return channel if channel.world_size == 1 else _open_communicator(patience, store_client.job_store_address())


@functools.cache
def _open_communicator(patience: float, address: tuple[str, int] | None) -> Communicator:
    """Open a separate connection: Paddle's client is not safe for two threads, and its waits have no timeout."""
    store = address and store_client.StoreClient(address, min(patience, store_client.OPENING_SECONDS), patience)
    return Communicator(job_channel(), patience, store)
