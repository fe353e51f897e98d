"""Agree on a step of the training loop between background threads of all ranks.

A background thread of every rank receives an event that all training loops must handle at the same step: the end of a
save, or a request to stop. The loops are at different steps, and continue while the threads agree. A thread therefore
first holds its loop, which finishes its step and waits at the end of it. Then the threads exchange the last steps that
their loops have ended. The agreed step is the highest of these plus one. No loop is beyond it, because each is held at
the end of the step after the reported one. Every loop reaches it, because none waits in a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

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
        """Agree with the other ranks on a step, at the end of which every loop runs an action.

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
            Exception: that of the action.
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
