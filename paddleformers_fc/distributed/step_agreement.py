"""Agree on a step of all ranks through the store of the job, without a process group.

Any rank may request it, at any time and alone. A background thread of every rank polls one counter for such a request,
so seldom that the server gets at most 2,000 requests a second. Then the threads pass a barrier (:mod:`.liveness`) while
their loops continue: a loop is blocked only when all threads have arrived. Finally each rank stores its step. Rank 0
reads all steps and stores the highest before a second barrier, after which every rank finds the result.

A rank that does not arrive in time ends the attempt on all ranks, without an agreed step on any rank. There is one
attempt per agreement.

Agree on a step of the training loop between background threads of all ranks.

A background thread of every rank receives an event that all training loops must handle at the same step: the end of a
save, or a request to stop. The loops are at different steps, and continue while the threads agree. A thread therefore
first holds its loop, which finishes its step and waits at the end of it. Then the threads exchange the last steps that
their loops have ended. The agreed step is the highest of these plus one. No loop is beyond it, because each is held at
the end of the step after the reported one. Every loop reaches it, because none waits in a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from paddleformers_fc.distributed.liveness import KVStore, Liveness

ARRIVAL_SECONDS = 20.0
"""Seconds for the threads of all ranks to arrive while loops continue."""

HOLD_SECONDS = 20.0
"""Maximum seconds for which the loops are blocked."""

_COLLECT_PART = 0.2
_MEETING_PART = 0.4
"""The parts of the time for the collection of the steps, and for a barrier; its report takes up to as long again."""

_POLL_SECONDS = 0.5
_POLLS_PER_SECOND = 2000
_COLLECT_POLL_SECONDS = 0.005

_REQUESTS, _GIVEN, _STEP, _HIGHEST = "requests", "given", "step", "highest"
_READER = 0


class StepAgreement:
    """One agreement of the ranks; one thread of each rank uses it.

    Args:
        store: shared by all ranks, and used by this object alone.
        rank: this rank.
        world_size: number of ranks.
        prefix: prefix of all keys in the store; equal on all ranks, and different for each agreement of a job.
        hold_seconds: seconds within which :meth:`highest` returns or raises.
        arrival: maximum seconds for all ranks to arrive in :meth:`meet`.
    """

    def __init__(
        self,
        store: KVStore,
        rank: int,
        world_size: int,
        prefix: str,
        hold_seconds: float = HOLD_SECONDS,
        arrival: float = ARRIVAL_SECONDS,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = world_size
        self._prefix = prefix
        self._collect = _COLLECT_PART * hold_seconds
        self._before = Liveness(store, rank, world_size, arrival, f"{prefix}/before")
        self._meeting = Liveness(store, rank, world_size, _MEETING_PART * hold_seconds, f"{prefix}/held")

    @property
    def poll_seconds(self) -> float:
        """Seconds between two polls for a request."""
        return max(_POLL_SECONDS, self._size / _POLLS_PER_SECOND)

    def request(self) -> None:
        """Ask all ranks to agree.

        Raises:
            OSError: the store does not answer.
        """
        self._store.add(f"{self._prefix}/{_REQUESTS}", 1)

    def is_requested(self) -> bool:
        """Return whether any rank has requested the agreement.

        Raises:
            OSError: the store does not answer.
        """
        return self._store.add(f"{self._prefix}/{_REQUESTS}", 0) > 0

    def meet(self) -> None:
        """Wait for the threads of all ranks. Every rank must call.

        Raises:
            PeerError: the same on every living rank, with the ranks that did not arrive.
        """
        self._before.wait_for_all("agreeing on a step")

    def highest(self, step: int) -> int:
        """Return the highest step of all ranks. Every rank must call, after :meth:`meet`.

        Raises:
            PeerError: the same on every living rank, with the ranks that did not arrive.
            OSError: the store does not answer.
        """
        self._store.set(f"{self._prefix}/{_STEP}/{self._rank}", str(step))
        self._store.add(f"{self._prefix}/{_GIVEN}", 1)
        if self._rank == _READER:
            self._publish()
        self._meeting.wait_for_all("agreeing on a step")
        return int(bytes(self._store.get(f"{self._prefix}/{_HIGHEST}")))

    def _publish(self) -> None:
        """Store the highest step; the other ranks wait in a barrier, which fails without this rank."""
        end = time.monotonic() + self._collect
        while self._store.add(f"{self._prefix}/{_GIVEN}", 0) < self._size:
            if time.monotonic() > end:
                self._meeting.abort()
                raise self._meeting.lost_rank_error("Not every rank has given its step.")
            time.sleep(_COLLECT_POLL_SECONDS)
        steps = [int(bytes(self._store.get(f"{self._prefix}/{_STEP}/{rank}"))) for rank in range(self._size)]
        self._store.set(f"{self._prefix}/{_HIGHEST}", str(max(steps)))


Action = Callable[[], None]


class StepGate:
    """The end of every step of one rank's training loop.

    The loop calls :meth:`step_ended`, background threads call :meth:`agree`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last = 0
        self._holding = 0
        self._actions: list[tuple[int, Action]] = []

    def begin(self, step: int) -> None:
        """Start a loop that has ended a number of steps before."""
        with self._changed:
            self._last = step

    def agree(self, gather: Callable[[int], Sequence[int]], action: Action) -> None:
        """Agree on a step with all ranks; every training loop runs the action at the end of that step.

        Args:
            gather: returns the numbers of all ranks; called once on each.
            action: called on the thread of the loop.

        Raises:
            Exception: that of ``gather``; nothing is agreed.
        """
        with self._changed:
            self._holding += 1
            last = self._last
        try:
            agreed = max(gather(last)) + 1
            with self._changed:
                self._actions.append((agreed, action))
        finally:
            with self._changed:
                self._holding -= 1
                self._changed.notify_all()

    def step_ended(self, step: int) -> None:
        """Wait while ranks agree on a step, then run the actions of this one.

        Raises:
            Exception: that of an action.
        """
        with self._changed:
            self._last = step
            self._changed.wait_for(lambda: not self._holding)
            due = [action for agreed, action in self._actions if agreed <= step]
        for action in due:
            self.run_now(action)

    def run_now(self, action: Action) -> None:
        """Run an action that is agreed or alone, unless it has run, at a place that every loop reaches at one step.

        Raises:
            Exception: whatever the action raises.
        """
        with self._changed:
            waits = any(one is action for _, one in self._actions)
            self._actions = [(agreed, one) for agreed, one in self._actions if one is not action]
        if waits:
            action()

    def alone(self, action: Action) -> None:
        """Have this rank alone run an action at the end of its step: the others cannot be reached."""
        with self._changed:
            self._actions.append((0, action))
