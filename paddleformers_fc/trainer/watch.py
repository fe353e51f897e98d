"""An end to waiting for a rank that will not come.

A rank that was killed leaves the others in a collective operation, and nothing in Python can call them back from there.
So while a rank waits, a thread watches the clock. When ``flex_timeout`` is over it writes where every thread of the
process stands and ends the process, which ends the job: a launcher sees a failed rank instead of a job that is forever
about to save.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator, Mapping

from paddleformers_fc.errors import PeerError
from paddleformers_fc.execute.channel import Bytes, Channel

EXIT_CODE = 75
"""The exit code of a process that gave up; ``EX_TEMPFAIL``, for starting again may help."""


class WatchedChannel:
    """A channel on which no rank waits longer than it was told to.

    Args:
        channel: the channel.
        patience: how many seconds an exchange may take.
    """

    def __init__(self, channel: Channel, patience: float) -> None:
        self._channel = channel
        self.patience = patience

    @property
    def rank(self) -> int:
        """This rank."""
        return self._channel.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._channel.world_size

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank; the process ends if they do not come in time."""
        with self._watched():
            return self._channel.exchange(payload)

    def pass_on(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Bytes to and from some ranks; the process ends if they do not come in time."""
        with self._watched():
            return self._channel.pass_on(outgoing, sizes)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        watchman = threading.Timer(self.patience, self._give_up)
        watchman.daemon = True
        watchman.start()
        try:
            yield
        finally:
            watchman.cancel()

    def _give_up(self) -> None:
        error = PeerError(
            f"Rank {self.rank} has waited {self.patience} s for the other ranks and gives up.",
            where=f"rank {self.rank} of {self.world_size}",
            next_step="Find the rank that failed in the other ranks' logs, or raise flex_timeout if they are slow.",
        )
        print(error.render(), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        os._exit(EXIT_CODE)


def watched(channel: Channel, patience: float) -> Channel:
    """``channel`` with an end to waiting; unchanged if there is nobody to wait for."""
    return WatchedChannel(channel, patience) if channel.world_size > 1 else channel
