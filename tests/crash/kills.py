"""A rank, or all ranks, of a save are killed at every operation on files that they make.

First the job runs through and every rank counts its operations. Then it is run once for each of them, and a rank that
comes to its operation kills itself, or all of its job, with SIGKILL; a write is torn in its middle first. After each
kill the ranks that are left must end with an error, a whole checkpoint must be what a resumed run takes, nothing
unfinished may look like one, and the next save must clean up.

Time: a kill of four ranks takes 60 ms. Memory and disk: a few checkpoints of 100 kB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.storage.commit import hidden_name, leftovers
from paddleformers_fc.storage.paths import ASIDE, UNFINISHED
from tests.crash.groups import DONE, Group, KillAt
from tests.crash.killing import Kill, every_kill, prepared, run_alone, run_killed
from tests.crash.worlds import (
    GRIDS,
    ONE,
    Found,
    Job,
    Lost,
    chosen,
    cleaned_by_the_next_save,
    ranks_of,
    resume_and_save,
    rotate_alone,
    save,
    save_beside,
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
    """

    name: str
    ranks: int
    prepare: Callable[[Path], None]
    job: Job
    before: Found
    after: Found
    untouched: str | None = None


def scenarios() -> Iterator[Scenario]:
    """Every job: a new step, also beside training, a step again, also after a resume with fewer ranks, and rotation."""
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
    for grid in GRIDS:
        yield Scenario(
            f"a step again, {grid}",
            ranks_of(grid),
            lambda there, grid=grid: save_together(there, grid, 5, OLD),
            lambda there, channel, grid=grid: save(there, grid, 5, NEW, channel),
            Found(5, OLD),
            Found(5, NEW),
        )
    for grid in SOME_GRIDS:
        yield Scenario(
            f"a resume after a crash between two renames, {grid}",
            ranks_of(grid),
            lambda there, grid=grid: _between_renames(there, grid),
            lambda there, channel, grid=grid: resume_and_save(there, grid, 6, NEW, channel),
            Found(5, OLD),
            Found(6, NEW),
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
            f"a new step beside training, {grid}",
            ranks_of(grid),
            lambda there, grid=grid: save_together(there, grid, 5, OLD),
            lambda there, channel, grid=grid: save_beside(there, grid, 6, NEW, channel),
            Found(5, OLD),
            Found(6, NEW),
            untouched="checkpoint-5",
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
        lambda there, channel: rotate_alone(there, 1, None, channel),
        Found(4, OLD),
        Found(4, OLD),
        untouched="checkpoint-4",
    )


def operations(scenario: Scenario, directory: Path) -> list[Kill]:
    """Every kill of a scenario, from running it through once.

    Raises:
        Lost: it does not run through, or another checkpoint is taken afterwards than should be.
    """
    there = prepared(scenario, directory, directory / "counted")
    ends = run_alone(scenario, there)
    if chosen(there) != scenario.after:
        raise Lost(f"{scenario.name}: {chosen(there)} is taken")
    return every_kill(scenario, ends)


def carry_out(kill: Kill, directory: Path) -> None:
    """One accident, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    scenario = kill.scenario
    there = prepared(scenario, directory, directory / "killed")
    ends = run_killed(kill, there)
    found = chosen(there)
    untouched = scenario.untouched
    if untouched not in (None, f"checkpoint-{found.step}") and whole(there / untouched) != OLD:
        raise Lost(f"{untouched} was touched")
    if found not in (scenario.before, scenario.after):
        raise Lost(f"{found} is taken")
    if any(end.code == DONE for end in ends) and found != scenario.after and not _rotates(scenario):
        raise Lost(f"a rank reported the save as done, and {found} is taken")
    cleaned_by_the_next_save(there, 9, NEXT)


def _rotates(scenario: Scenario) -> bool:
    return scenario.before == scenario.after


def _steps(there: Path, grid: str, *steps: int) -> None:
    for step in steps:
        save_together(there, grid, step, OLD)


def _save_and_rotate(there: Path, grid: str, channel: Channel) -> None:
    save(there, grid, 6, NEW, channel)
    rotate_alone(there, 2, there / "checkpoint-6", channel)


def _between_renames(there: Path, grid: str) -> None:
    save_together(there, grid, 5, OLD)
    save_together(there / "new", grid, 5, NEW)
    target, token = there / "checkpoint-5", "0123"
    target.rename(hidden_name(target, ASIDE, token))
    (there / "new" / target.name).rename(hidden_name(target, UNFINISHED, token))
    (there / "new").rmdir()


def _damaged(there: Path) -> None:
    _steps(there, "dp=2", 3, 4, 5)
    (there / "checkpoint-5" / "config.json").write_bytes(b"")
    Group(1, lambda channel: save(there, ONE, 6, NEW, channel), there, {0: KillAt(57, True)}).end()
    assert len(leftovers(there)) == 1
