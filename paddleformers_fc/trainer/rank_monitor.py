"""An end to waiting for a rank that will not come.

Ranks meet before every exchange (:mod:`paddleformers_fc.distributed.liveness`), and one that does not come is named in
an error that all others raise. What remains is a rank that dies in the exchange itself, a matter of milliseconds: it
leaves the others in a collective operation, and nothing in Python can call them back from there. So while a rank
exchanges, a thread watches the clock, and whether another rank has found the job lost. Then it prints the report that
all ranks print, writes where every thread of the process stands, and ends the process, which ends the job: a launcher
sees a failed rank instead of a job that is forever about to save.

The store is asked through a connection of its own (:class:`paddleformers_fc.cpu_runtime.stores.StoreClient`): a client
of Paddle's store mixes up the answers when two threads ask at once, and waits for them without a bound. It is opened
for a save or load and closed after it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

from paddleformers_fc.distributed.channel import Channel, GuardedChannel, job_channel
from paddleformers_fc.distributed.liveness import KVStore, Liveness, with_liveness
from paddleformers_fc.errors import FlexError, PeerError

EXIT_CODE = 75
"""The exit code of a process that gave up; ``EX_TEMPFAIL``, for starting again may help."""

DEFAULT_PATIENCE = 1800.0
"""Seconds that a rank waits for the others where no option says it."""

_LOOK_SECONDS = 1.0
_ERRORS = 2
"""The descriptor that errors go to."""


class HangWatchdog:
    """Sees to it that no exchange of this rank takes longer than it was told.

    Args:
        rank: this rank.
        world_size: number of ranks.
        patience: how many seconds an exchange may take.
        attendance: where another rank may say that the job is lost; None where ranks have no board.
    """

    def __init__(self, rank: int, world_size: int, patience: float, attendance: Liveness | None = None) -> None:
        self._rank, self._size = rank, world_size
        self._patience = patience
        self._attendance = attendance

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts the clock is watched; the process ends if it lasts too long."""
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
        while not done.wait(min(_LOOK_SECONDS, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                self._leave(self._time_is_over())
            if self._attendance is not None and self._attendance.is_lost():
                self._leave(self._attendance.report("An exchange between the ranks broke off."))

    def _time_is_over(self) -> FlexError:
        if self._attendance is not None:
            self._attendance.abort()
            return self._attendance.report(
                f"An exchange between the ranks has not ended within flex_timeout: {self._patience:g} s."
            )
        return PeerError(
            f"Rank {self._rank} has waited {self._patience} s for the other ranks and gives up.",
            where=f"rank {self._rank} of {self._size}",
            next_step="Find the rank that failed in the other ranks' logs, or raise flex_timeout, which is "
            f"{self._patience:g} s, if they are slow.",
        )

    def _leave(self, error: FlexError) -> None:
        # What a program has put in the place of its errors may be closed, or go nowhere; the process ends all the same.
        try:
            for file in {sys.stderr, sys.__stderr__}:
                with contextlib.suppress(Exception):
                    print(error.render(), file=file, flush=True)
            with contextlib.suppress(Exception):
                faulthandler.dump_traceback(sys.__stderr__ or _ERRORS)
        finally:
            os._exit(EXIT_CODE)


def watched(channel: Channel, patience: float, board: KVStore | None = None) -> Channel:
    """``channel`` with an end to waiting; unchanged if there is nobody to wait for.

    Args:
        channel: all ranks.
        patience: seconds that a rank waits for the others.
        board: what the ranks share beside the channel; without one, a rank that does not come cannot be named.
    """
    if channel.world_size == 1:
        return channel
    rank, ranks = channel.rank, channel.world_size
    if board is None:
        return GuardedChannel(channel, HangWatchdog(rank, ranks, patience).watching)
    attendance = Liveness(board, rank, ranks, patience)
    return with_liveness(GuardedChannel(channel, HangWatchdog(rank, ranks, patience, attendance).watching), attendance)


def patient_channel(patience: float = DEFAULT_PATIENCE) -> Channel:
    """All ranks of the running job, none of which waits for another longer than ``patience`` seconds."""
    channel = job_channel()
    return watched(channel, patience, _open_board(patience) if channel.world_size > 1 else None)


def _open_board(patience: float) -> KVStore | None:
    """A connection to the store of the job; None where the environment does not contain its address.

    Raises:
        PeerError: nothing at that address answers as the store; on this rank alone.
    """
    from paddleformers_fc.cpu_runtime import stores

    address = stores.job_store_address()
    return address and stores.StoreClient(address, min(patience, stores.OPENING_SECONDS), patience)
