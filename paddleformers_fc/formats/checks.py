"""The checks of one verification, with their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from paddleformers_fc.errors import CheckpointError, FlexError, MappingError, MismatchError

_T = TypeVar("_T")

DEPTH_TEXT = {"size": "all there and of their sizes", "full": "every byte as it was written"}
"""The result of a passed check of files, by level."""


UNCOMPARED = "changed bytes"
"""The beginning of the line that lists properties without recorded checksums, which cannot be checked."""


class Check(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        name: the name of the check.
        passed: whether no fault was found.
        detail: the result; for a check that failed, the fault in one sentence.
    """

    name: str
    passed: bool
    detail: str


class CheckList:
    """The checks made so far, their faults and their counts."""

    def __init__(self) -> None:
        self.made: list[Check] = []
        self.faults: list[FlexError] = []
        self.files = self.bytes = self.tensors = 0
        self.impossible: list[str] = []

    def not_compared(self, why: str) -> None:
        """Note that no bytes of tensors can be compared."""
        self.impossible.append(f"{UNCOMPARED}: {why}")

    def check(self, name: str, work: Callable[[], _T], detail: Callable[[_T], str]) -> _T:
        """Make one check, record its result, and raise its fault again; a refused read is not a fault."""
        found = self.prepare(name, work)
        self.made.append(Check(name, True, detail(found)))
        return found

    def attempt(self, name: str, work: Callable[[], _T], detail: Callable[[_T], str]) -> _T | None:
        """Make one check that the following ones do not require; return None for a fault, which is recorded."""
        try:
            return self.check(name, work, detail)
        except FlexError as error:
            if error not in self.faults:
                raise
            return None

    def prepare(self, name: str, work: Callable[[], _T]) -> _T:
        """Do what a check needs first; only a fault is recorded."""
        try:
            return work()
        except (CheckpointError, MappingError, MismatchError) as error:
            self.made.append(Check(name, False, error.what))
            self.faults.append(error)
            raise


def combined(faults: Sequence[FlexError]) -> FlexError | None:
    """Return one error for the faults of several checks; None if there are none.

    The first one determines the type, the place and the next step. The others follow in the evidence, except lines that
    an earlier one contains.
    """
    if len(faults) < 2:
        return next(iter(faults), None)
    first, *others = faults
    evidence = list(first.evidence)
    for fault in others:
        own = [line for line in fault.evidence if line not in evidence and f" {line}" not in evidence]
        if own or not fault.evidence:
            evidence += [fault.what, *(f" {line}" for line in own)]
    return type(first)(first.what, where=first.where, evidence=evidence, next_step=first.next_step)
