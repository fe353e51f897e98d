"""One object per job that owns the channel, its liveness and the connection to the job's store.

Ranks pass a barrier before every exchange (:mod:`.liveness`), so all ranks raise an error that names a missing rank. A
rank may still die during the exchange, which takes milliseconds, and leave the others in a collective that Python
cannot interrupt. A watchdog thread therefore runs during every exchange. If the exchange times out, or another rank has
marked the job as lost, it prints the error, dumps the stack of every thread and ends the process. The launcher then
sees a failed rank instead of a job that hangs.

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
from collections.abc import Iterator, Mapping

from paddleformers_fc.distributed import store_client
from paddleformers_fc.distributed.channel import NO_HEAD, NO_MARKS, Bytes, Channel, Payload, job_channel
from paddleformers_fc.distributed.liveness import Liveness
from paddleformers_fc.errors import FlexError, PeerError

EXIT_CODE = 75
"""Exit code of a process whose exchange has timed out: ``EX_TEMPFAIL``, because a restart may help."""

DEFAULT_PATIENCE = 1800.0
"""Default seconds that a rank waits for the others."""

_CHECK_SECONDS = 5.0
_STDERR = 2


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
