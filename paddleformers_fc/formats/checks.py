"""The checks of one verification: what was checked, and what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from paddleformers_fc.errors import CheckpointError, MappingError, MismatchError

_T = TypeVar("_T")

DEPTH_TEXT = {"size": "all there and of their sizes", "full": "every byte as it was written"}
"""What a passed check of files shows, by level."""


class Check(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        name: what was checked.
        passed: whether no fault was found.
        detail: what was found; for a check that failed, the fault in one sentence.
    """

    name: str
    passed: bool
    detail: str


class CheckList:
    """The checks made so far, and what they counted."""

    def __init__(self) -> None:
        self.made: list[Check] = []
        self.files = self.bytes = self.tensors = 0
        self.impossible: list[str] = []

    def check(self, name: str, work: Callable[[], _T], detail: Callable[[_T], str]) -> _T:
        """Make one check, record its result, and raise its fault again; a refused read is not a fault."""
        found = self.prepare(name, work)
        self.made.append(Check(name, True, detail(found)))
        return found

    def prepare(self, name: str, work: Callable[[], _T]) -> _T:
        """Do what a check needs first; only a fault is recorded."""
        try:
            return work()
        except (CheckpointError, MappingError, MismatchError) as error:
            self.made.append(Check(name, False, error.what))
            raise
