"""Jobs that are interrupted: each is prepared, run through once, and run again for each operation on files.

A :class:`Scenario` knows its job, what is there before and after, and what must hold in between;
:mod:`tests.crash.kills` has scenarios of saves and rotation, :mod:`tests.crash.exports` of exports. A kill: a rank that
comes to its operation kills itself, or all of its job, with SIGKILL; a write is torn in its middle first. The ranks
that are left must end with an error.

Time: a kill of four ranks takes 80 ms. Memory and disk: a few checkpoints of 100 kB.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel
from tests.crash.groups import BROKEN, DONE, KillAt, RankEnd, run_ranks
from tests.crash.net import Gate
from tests.crash.worlds import Lost, fresh

State = Any
"""What is found: of saves the checkpoint that is taken, of exports the generation."""


@dataclass(frozen=True)
class Step:
    """One thing that the ranks do.

    Args:
        job: what each does in a directory.
        after: what is found once it has returned.
        also: what else may be found after an interruption, beside that and what was there before.
    """

    job: Callable[[Path, Channel], None]
    after: State
    also: tuple[State, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """What is interrupted.

    Args:
        name: for a report.
        ranks: how many.
        prepare: makes what is there before.
        before: what is found then.
        steps: what the ranks do; they are killed in the first, and lose their power in any.
        look: what is found, with everything checked; raises ``Lost``.
        clean: does the next save or export, and checks that it is there and nothing else is left; raises ``Lost``.
    """

    name: str
    ranks: int
    prepare: Callable[[Path], None]
    before: State
    steps: tuple[Step, ...]
    look: Callable[[Path], State]
    clean: Callable[[Path], None]


@dataclass(frozen=True)
class Instant:
    """An operation that changes something.

    Args:
        scenario: whose.
        rank: who comes to it.
        number: of the operation.
        change: the same, among those that change something.
        kind: of the operation.
    """

    scenario: Scenario
    rank: int
    number: int
    change: int
    kind: str

    def __str__(self) -> str:
        return f"{self.scenario.name}: operation {self.number} ({self.kind}) of rank {self.rank}"


@dataclass(frozen=True)
class Kill:
    """The end of a rank, or of all ranks, at an instant."""

    at: Instant
    all_ranks: bool

    def __str__(self) -> str:
        return f"{self.at}: {'all ranks are' if self.all_ranks else 'it is'} killed"


def instants(scenario: Scenario, directory: Path) -> list[Instant]:
    """Every operation of a scenario that changes something, from running it through once.

    Raises:
        Lost: it does not run through, touches files past the net, or leaves something else than it should.
    """
    there, ends = run(scenario, directory, {})
    if any(end.code != DONE or end.outside or end.unseen for end in ends):
        raise Lost(f"{scenario.name} does not run through: {ends}")
    check(scenario, there, ends)
    return [
        Instant(scenario, rank, number, change, kind)
        for rank, end in enumerate(ends)
        for change, (number, kind) in enumerate(one for one in enumerate(end.kinds) if one[1] != "look")
    ]


def kills(scenario: Scenario, directory: Path) -> list[Kill]:
    """Each rank alone, and all of them, at each operation of each rank that changes something."""
    found = instants(scenario, directory)
    return [Kill(at, all_ranks) for all_ranks in ((False, True) if scenario.ranks > 1 else (True,)) for at in found]


def carry_out(kill: Kill, directory: Path) -> None:
    """One kill, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    scenario, victim = kill.at.scenario, kill.at.rank
    there, ends = run(scenario, directory, {victim: KillAt(kill.at.change, kill.all_ranks)})
    for rank, end in enumerate(ends):
        if end.code == -signal.SIGKILL and (kill.all_ranks or rank == victim):
            continue
        if rank == victim or end.code == BROKEN or end.code < 0 or end.outside:
            raise Lost(f"rank {rank} ended with {end.code}: {end.text} {end.outside}")
    check(scenario, there, ends)
    scenario.clean(there)


def run(scenario: Scenario, directory: Path, gates: Mapping[int, Gate]) -> tuple[Path, list[RankEnd]]:
    """Run the first step on a copy of what is there before it; where, and how every rank has ended."""
    template, there = directory / "prepared", directory / "there"
    name = template / "name"
    if not name.exists() or name.read_text() != scenario.name:
        scenario.prepare(fresh(fresh(template) / "there"))
        name.write_text(scenario.name)
    shutil.copytree(template / "there", fresh(there), dirs_exist_ok=True)
    job = scenario.steps[0].job
    return there, run_ranks(scenario.ranks, lambda channel: job(there, channel), there, gates)


def check(scenario: Scenario, there: Path, ends: Sequence[RankEnd]) -> State:
    """What is found after the first step was interrupted.

    Raises:
        Lost: something that may not be there, or not what a rank has reported as done.
    """
    step, found = scenario.steps[0], scenario.look(there)
    if found not in (scenario.before, step.after, *step.also):
        raise Lost(f"{found} is found")
    if any(end.code == DONE for end in ends) and found != step.after:
        raise Lost(f"a rank reported its work as done, and {found} is found")
    return found
