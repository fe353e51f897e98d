"""Ranks of one job that are threads of this process; their channel is a barrier.

Every exchange of the package runs as between processes, and a rank that ends early ends the waits of all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddleformers_fc.cpu_runtime.ranks import PATIENCE_SECONDS
from paddleformers_fc.distributed.channel import Bytes, CollectiveChannel, Payload
from paddleformers_fc.errors import FlexError

_UNDEFINED = 0xA5
"""A byte of arrays whose elements are undefined after an exchange."""


@dataclass
class Hub:
    """The state that the channels of one job share."""

    size: int
    given: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given = [None] * self.size
        self.barrier = threading.Barrier(self.size, timeout=PATIENCE_SECONDS)
        self.is_left = False

    def meet(self, rank: int, thing: Any) -> list[Any]:
        """Return what every rank gives, by rank."""
        self.given[rank] = thing
        if self.is_left:
            self.barrier.abort()
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone

    def leave(self) -> None:
        """End one rank: ranks that wait for it now or later raise instead of waiting until the timeout."""
        self.is_left = True
        if self.barrier.n_waiting:
            self.barrier.abort()


class ThreadChannel(CollectiveChannel):
    """A rank's channel to the other threads.

    Args:
        hub: shared by all ranks.
        rank: this rank.

    Attributes:
        exchanges: number of exchanges among all ranks.
        purposes: the purpose of each.
        sizes: the lengths of its collectives, in bytes.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(rank, hub.size)
        self.hub, self.exchanges = hub, 0
        self.purposes: list[str] = []
        self.sizes: list[int] = []

    def gather(self, doing: str, *arguments: Any) -> list[Payload] | None:
        """Return the payload of every rank."""
        self.exchanges += 1
        self.purposes.append(doing)
        return super().gather(doing, *arguments)

    def unite(self, array: Bytes, source: int | None, to: int | None) -> Bytes:
        """Return the maximum over all ranks."""
        self.sizes.append(array.size)
        assert array.flags.writeable
        assert array.flags.c_contiguous
        united: Bytes = np.maximum.reduce([given for _, given in self._meet("exchange", array.copy())])
        array[:] = _UNDEFINED  # A real channel exchanges in place.
        return united if to in (None, self.rank) else array

    def all_to_all(self, outgoing: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """Return what some ranks send to this one; ranks that disagree on the sizes fail."""
        everyone = [given for _, given in self._meet("pass_on", dict(outgoing))]
        found = {rank: given[self.rank] for rank, given in enumerate(everyone) if self.rank in given}
        assert {rank: array.size for rank, array in found.items()} == dict(sizes)
        return found

    def _meet(self, kind: str, thing: Any) -> list[Any]:
        everyone = self.hub.meet(self.rank, (kind, thing))
        assert {other for other, _ in everyone} == {kind}
        return everyone


class Outcomes(list[Any]):
    """The results or exceptions of all ranks of a job, by rank."""

    def results(self) -> list[Any]:
        """Return the results; raise the first exception of a rank."""
        for outcome in self:
            if isinstance(outcome, Exception):
                raise outcome
        return self

    def error(self, kind: type[FlexError] = FlexError, ranks: Sequence[int] | None = None) -> Any:
        """Return the error that all given ranks raised alike."""
        first, *others = self if ranks is None else [self[rank] for rank in ranks]
        assert isinstance(first, kind), first
        assert {str(outcome) for outcome in others} <= {str(first)}
        return first


def job(ranks: int, work: Callable[[ThreadChannel], Any]) -> Outcomes:
    """Run ``work`` on every rank, and return the result or exception of each."""
    hub = Hub(ranks)
    outcomes = Outcomes([None] * ranks)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(ThreadChannel(hub, rank))
        except Exception as error:  # The caller inspects it; here it would end a thread alone.
            outcomes[rank] = error
        finally:
            hub.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
