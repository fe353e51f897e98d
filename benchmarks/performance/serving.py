"""The ranks' side of a pool: commands come in as lines of JSON, answers go out as lines of JSON.

What a rank holds is built once per command ``build`` and stays; so a round that is timed does nothing but the work. The
same loop serves ranks with Paddle and ranks with PyTorch, which differ in how they hold tensors.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.performance.files import from_canonical
from benchmarks.performance.measuring import with_peak
from benchmarks.performance.models import Array, part_of, roles_of
from benchmarks.performance.slow_storage import limited
from paddleformers_fc.layout.shards import Shard

Roles = dict[str, dict[str, Shard]]


class Rank(Protocol):
    """One rank of a pool."""

    def build(self, model: str, shards: Roles, values: Callable[[Shard], Array]) -> None:
        """Hold these shards, with these values."""

    def memory(self) -> Mapping[tuple[str, str], Array]:
        """The memory of every tensor, flat, by role and name."""

    def work(self, verb: str, contender: str, places: list[Path]) -> int:
        """Save, load, start or export; bytes read, or -1."""


def serve(rank: Rank, number: int, ranks: int) -> None:
    """Answer commands until the input is closed."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What a library prints must not get between the answers.
    loop = _Loop(rank, number, ranks)
    for line in sys.stdin:
        try:
            answer = loop.answer(json.loads(line))
        except Exception:  # Whoever gave the command raises it; this process waits for the next one.
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


class _Loop:
    """What stays between two commands."""

    def __init__(self, rank: Rank, number: int, ranks: int) -> None:
        self._rank, self._number, self._ranks = rank, number, ranks
        self._shards: Roles = {}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry one command out."""
        verb = command["do"]
        if verb == "build":
            self._shards = roles_of(command["model"], command["layout"], self._number, self._ranks)
            self._rank.build(command["model"], self._shards, part_of)
            return {"bytes": sum(array.nbytes for array in self._rank.memory().values())}
        if verb == "zero":
            for array in self._rank.memory().values():
                array.view(np.uint8).fill(0)
            gc.collect()
            return {}
        if verb == "check":
            return {"wrong": self._wrong(from_canonical if command["canonical"] else part_of)}
        places = [Path(place) for place in command["places"]]
        cache = Path(command["cache"]) if command.get("cache") else None
        with limited(command.get("rate", 0), cache):
            read, peak = with_peak(lambda: self._rank.work(verb, command["contender"], places))
        return {"read": read, "peak": peak}

    def _wrong(self, expected: Callable[[Shard], Array]) -> list[str]:
        return [
            name
            for (role, name), array in self._rank.memory().items()
            if array.tobytes() != expected(self._shards[role][name]).tobytes()
        ]
