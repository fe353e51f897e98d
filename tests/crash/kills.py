"""A rank, or all ranks, of a save are killed at every operation on files that they make.

First the job runs through and every rank counts its operations. Then it is run once for each of them, and a rank that
comes to its operation kills itself, or all of its job, with SIGKILL; a write is torn in its middle first. After each
kill the ranks that are left must end with an error, a whole checkpoint must be what a resumed run takes, nothing
unfinished may look like one, and the next save must clean up.

Time: a kill of four ranks takes 60 ms. Memory and disk: a few checkpoints of 100 kB.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paddleformers_fc.execute.channel import Channel
from paddleformers_fc.storage.commit import unfinished
from tests.crash.groups import BROKEN, DONE, Group, KillAt, RankEnd
from tests.crash.worlds import (
    GRIDS,
    ONE,
    Found,
    Job,
    Lost,
    chosen,
    cleaned_by_the_next_save,
    copy,
    ranks_of,
    resume_and_save,
    rotate_alone,
    save,
    save_together,
    whole,
)

OLD, NEW, NEXT = 1, 2, 3
SOME_GRIDS = (ONE, "tp=2", "sharding=4,split=true")


@dataclass(frozen=True)
class Scenario:
    """One job that is killed.

    Args:
        name: for a report.
        ranks: how many.
        prepare: makes what is there before.
        job: what each rank does.
        before: what a resumed run takes if the job has changed nothing.
        after: what it takes if the job was done.
        untouched: the checkpoint that must be whole in any case; None if the job replaces or deletes it.
        can_exchange: whether the file system can exchange two names.
    """

    name: str
    ranks: int
    prepare: Callable[[Path], None]
    job: Job
    before: Found
    after: Found
    untouched: str | None = None
    can_exchange: bool = True


@dataclass(frozen=True)
class Kill:
    """One accident.

    Args:
        scenario: the job.
        rank: who comes to its operation.
        number: of the operation.
        kind: of the operation.
        all_ranks: whether the others are killed too.
    """

    scenario: Scenario
    rank: int
    number: int
    kind: str
    all_ranks: bool

    def __str__(self) -> str:
        who = "all ranks" if self.all_ranks else f"rank {self.rank}"
        return f"{self.scenario.name}: {who} killed at operation {self.number} ({self.kind}) of rank {self.rank}"


def scenarios() -> Iterator[Scenario]:
    """Every job: a new step, a step again, a step again after a resume with fewer ranks, and rotation."""
    for grid in GRIDS:
        yield Scenario(
            f"a new step, {grid}",
            ranks_of(grid),
            lambda there, grid=grid: save_together(there, grid, 5, OLD),
            lambda there, channel, grid=grid: save(there, grid, 6, NEW, channel),
            Found(5, OLD),
            Found(6, NEW),
            untouched="checkpoint-5",
        )
    for grids, can_exchange in ((GRIDS, True), (SOME_GRIDS, False)):
        for grid in grids:
            yield Scenario(
                f"a step again, {grid}{'' if can_exchange else ', by two renames'}",
                ranks_of(grid),
                lambda there, grid=grid: save_together(there, grid, 5, OLD),
                lambda there, channel, grid=grid: save(there, grid, 5, NEW, channel),
                Found(5, OLD),
                Found(5, NEW),
                can_exchange=can_exchange,
            )
    for many, fewer in (("tp=2,pp=2", "tp=2"), ("sharding=4,split=true", "sharding=2"), ("tp=2,sharding=2", ONE)):
        yield Scenario(
            f"a step again after a resume, {many} to {fewer}",
            ranks_of(fewer),
            lambda there, many=many: save_together(there, many, 6, OLD),
            lambda there, channel, fewer=fewer: resume_and_save(there, fewer, 6, NEW, channel),
            Found(6, OLD),
            Found(6, NEW),
        )
    for grid in SOME_GRIDS:
        yield Scenario(
            f"a new step and rotation, {grid}",
            ranks_of(grid),
            lambda there, grid=grid: _steps(there, grid, 3, 4, 5),
            lambda there, channel, grid=grid: _save_and_rotate(there, grid, channel),
            Found(5, OLD),
            Found(6, NEW),
        )
    yield Scenario(
        "rotation with a damaged newest and an unfinished one",
        1,
        _damaged,
        lambda there, channel: rotate_alone(there, 1, channel),
        Found(4, OLD),
        Found(4, OLD),
        untouched="checkpoint-4",
    )


def operations(scenario: Scenario, directory: Path) -> list[Kill]:
    """Every kill of a scenario, from running it through once.

    Raises:
        Lost: it does not run through, or does something to files that the net does not see.
    """
    there = prepared(scenario, directory, directory / "counted")
    ends = Group(
        scenario.ranks, lambda channel: scenario.job(there, channel), there, can_exchange=scenario.can_exchange
    ).end()
    for rank, end in enumerate(ends):
        if end.code != DONE or end.outside or end.unseen:
            raise Lost(f"{scenario.name}: rank {rank} alone does not work: {end}")
    if chosen(there) != scenario.after:
        raise Lost(f"{scenario.name}: {chosen(there)} is taken")
    return [
        Kill(scenario, rank, number, kind, all_ranks)
        for all_ranks in ((False, True) if scenario.ranks > 1 else (True,))
        for rank, end in enumerate(ends)
        for number, kind in enumerate(end.kinds)
        if kind != "look"
    ]


def carry_out(kill: Kill, directory: Path) -> None:
    """One accident, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    scenario = kill.scenario
    there = prepared(scenario, directory, directory / "killed")
    gates = {kill.rank: KillAt(kill.number, kill.all_ranks)}
    ends = Group(
        scenario.ranks, lambda channel: scenario.job(there, channel), there, gates, scenario.can_exchange
    ).end()
    _ended(kill, ends)
    found = chosen(there)
    untouched = scenario.untouched
    if untouched not in (None, f"checkpoint-{found.step}") and whole(there / untouched) != OLD:
        raise Lost(f"{untouched} was touched")
    if found not in (scenario.before, scenario.after):
        raise Lost(f"{found} is taken")
    if any(end.code == DONE for end in ends) and found != scenario.after and not _rotates(scenario):
        raise Lost(f"a rank was told that the save is done, and {found} is taken")
    cleaned_by_the_next_save(there, 9, NEXT)


def _rotates(scenario: Scenario) -> bool:
    return scenario.before == scenario.after


def _ended(kill: Kill, ends: list[RankEnd]) -> None:
    """The victim was killed, and the others have ended by themselves."""
    for rank, end in enumerate(ends):
        if (kill.all_ranks and end.code == -signal.SIGKILL) or (rank == kill.rank and end.code == -signal.SIGKILL):
            continue
        if rank == kill.rank or end.code == BROKEN or end.code < 0 or end.outside:
            raise Lost(f"rank {rank} ended with {end.code}: {end.text} {end.outside}")


class Prepared(Protocol):
    """What :func:`prepared` must know of a scenario."""

    @property
    def name(self) -> str:
        """For a report; differs from all others."""

    @property
    def prepare(self) -> Callable[[Path], None]:
        """Makes what is there before."""


def prepared(scenario: Prepared, directory: Path, there: Path) -> Path:
    """A fresh copy, at ``there``, of what is there before a scenario's job."""
    template = directory / "prepared"
    name = template / "name"
    if not name.exists() or name.read_text() != scenario.name:
        shutil.rmtree(template, ignore_errors=True)
        (template / "there").mkdir(parents=True)
        scenario.prepare(template / "there")
        name.write_text(scenario.name)
    return copy(template / "there", there)


def _steps(there: Path, grid: str, *steps: int) -> None:
    for step in steps:
        save_together(there, grid, step, OLD)


def _save_and_rotate(there: Path, grid: str, channel: Channel) -> None:
    save(there, grid, 6, NEW, channel)
    rotate_alone(there, 2, channel)


def _damaged(there: Path) -> None:
    _steps(there, "dp=2", 3, 4, 5)
    (there / "checkpoint-5" / "config.json").write_bytes(b"")
    Group(1, lambda channel: save(there, ONE, 6, NEW, channel), there, {0: KillAt(60, True)}).end()
    assert len(unfinished(there)) == 1
