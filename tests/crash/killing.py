"""What every job that is killed has in common: it is prepared, run through once, and run again for each operation.

:mod:`tests.crash.kills` says it of saves and rotation, :mod:`tests.crash.exports` of exports. Each knows what must hold
afterwards; here is who is killed when, and that no other rank ends in another way.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.groups import BROKEN, DONE, Group, KillAt, RankEnd
from tests.crash.worlds import Lost, copy

Scenario = Any
"""One job that is killed, with ``name``, ``ranks``, ``prepare(there)`` and ``job(there, channel)`` of each rank."""


@dataclass(frozen=True)
class Kill:
    """One accident.

    Args:
        scenario: the job.
        rank: who comes to its operation.
        number: of the operation.
        change: the same, among those that change something.
        kind: of the operation.
        all_ranks: whether the others are killed too.
    """

    scenario: Scenario
    rank: int
    number: int
    change: int
    kind: str
    all_ranks: bool

    def __str__(self) -> str:
        who = "all ranks" if self.all_ranks else f"rank {self.rank}"
        return f"{self.scenario.name}: {who} killed at operation {self.number} ({self.kind}) of rank {self.rank}"


def run(scenario: Scenario, there: Path, gates: Mapping[int, KillAt]) -> list[RankEnd]:
    """How every rank of the job has ended."""
    return Group(scenario.ranks, lambda channel: scenario.job(there, channel), there, dict(gates)).end()


def run_alone(scenario: Scenario, there: Path) -> list[RankEnd]:
    """How every rank of the job has ended where no rank was killed.

    Raises:
        Lost: it does not run through, or does something to files that the net does not see.
    """
    ends = run(scenario, there, {})
    for rank, end in enumerate(ends):
        if end.code != DONE or end.outside or end.unseen:
            raise Lost(f"{scenario.name}: rank {rank} alone does not work: {end}")
    return ends


def every_kill(scenario: Scenario, ends: Sequence[RankEnd]) -> list[Kill]:
    """Each rank alone, and all of them, at each operation of each rank that changes something."""
    return [
        Kill(scenario, rank, number, change, kind, all_ranks)
        for all_ranks in ((False, True) if scenario.ranks > 1 else (True,))
        for rank, end in enumerate(ends)
        for change, (number, kind) in enumerate(one for one in enumerate(end.kinds) if one[1] != "look")
    ]


def run_killed(kill: Kill, there: Path) -> list[RankEnd]:
    """How every rank has ended: the victims were killed, and the others have ended by themselves.

    Raises:
        Lost: one has not, or has touched files past the net.
    """
    ends = run(kill.scenario, there, {kill.rank: KillAt(kill.change, kill.all_ranks)})
    for rank, end in enumerate(ends):
        if end.code == -signal.SIGKILL and (kill.all_ranks or rank == kill.rank):
            continue
        if rank == kill.rank or end.code == BROKEN or end.code < 0 or end.outside:
            raise Lost(f"rank {rank} ended with {end.code}: {end.text} {end.outside}")
    return ends


def prepared(scenario: Scenario, directory: Path, there: Path) -> Path:
    """A fresh copy, at ``there``, of what is there before a scenario's job."""
    template = directory / "prepared"
    name = template / "name"
    if not name.exists() or name.read_text() != scenario.name:
        shutil.rmtree(template, ignore_errors=True)
        (template / "there").mkdir(parents=True)
        scenario.prepare(template / "there")
        name.write_text(scenario.name)
    return copy(template / "there", there)
