"""Saves and rotation that are interrupted.

After each accident a whole checkpoint must be what a resumed run takes, nothing unfinished may look like one, and the
next save must clean up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.storage.commit import hidden_name, leftovers
from paddleformers_fc.storage.paths import ASIDE, UNFINISHED
from tests.crash import worlds
from tests.crash.groups import KillAt, run_ranks
from tests.crash.killing import Scenario, Step
from tests.crash.worlds import GRIDS, NEW, OLD, ONE, SOME_GRIDS, Found, Lost, save, save_together


def scenarios() -> Iterator[Scenario]:
    """Every job: a new step, a step again, also after a resume with fewer ranks, and rotation."""
    for grid in GRIDS:
        yield _scenario("a new step", grid, _saved(5), _save(6), (5, OLD), (6, NEW), untouched="checkpoint-5")
    for grid in GRIDS:
        yield _scenario("a step again", grid, _saved(5), _save(5), (5, OLD), (5, NEW))
    for grid in SOME_GRIDS:
        name = "a resume after a crash between two renames"
        yield _scenario(name, grid, _between_renames, _resume, (5, OLD), (6, NEW))
    for many, fewer in (("tp=2,pp=2", "tp=2"), ("sharding=4,split=true", "sharding=2"), ("tp=2,sharding=2", ONE)):
        name = f"a step again after a resume from {many}"
        yield _scenario(name, fewer, _saved(6, grid=many), _resume, (6, OLD), (6, NEW))
    for grid in SOME_GRIDS:
        yield _scenario("a new step and rotation", grid, _saved(3, 4, 5), _save_and_rotate, (5, OLD), (6, NEW))
    name = "rotation with a damaged newest and an unfinished one"
    yield _scenario(name, ONE, _damaged, _rotate, (4, OLD), (4, OLD), untouched="checkpoint-4")


def _scenario(
    name: str,
    grid: str,
    prepare: Callable[[Path, str], None],
    job: Callable[[Path, str, Channel], None],
    before: Found,
    after: Found,
    untouched: str | None = None,
) -> Scenario:
    """A scenario of a layout; ``untouched`` is the checkpoint that the job neither replaces nor deletes."""

    def look(there: Path) -> Found:
        found = worlds.chosen(there)
        if untouched is not None and worlds.whole(there / untouched) != OLD:
            raise Lost(f"{untouched} was touched")
        return found

    return Scenario(
        f"{name}, {grid}",
        worlds.ranks_of(grid),
        lambda there: prepare(there, grid),
        before,
        (Step(lambda there, channel: job(there, grid, channel), after),),
        look,
        worlds.cleaned_by_the_next_save,
    )


def _saved(*steps: int, grid: str | None = None) -> Callable[[Path, str], None]:
    def prepare(there: Path, own: str) -> None:
        for step in steps:
            save_together(there, grid or own, step, OLD)

    return prepare


def _save(step: int) -> Callable[[Path, str, Channel], None]:
    return lambda there, grid, channel: save(there, grid, step, NEW, channel)


def _resume(there: Path, grid: str, channel: Channel) -> None:
    worlds.resume_and_save(there, grid, 6, NEW, channel)


def _save_and_rotate(there: Path, grid: str, channel: Channel) -> None:
    save(there, grid, 6, NEW, channel)
    worlds.rotate_alone(there, 2, there / "checkpoint-6", channel)


def _rotate(there: Path, grid: str, channel: Channel) -> None:
    worlds.rotate_alone(there, 1, None, channel)


def _between_renames(there: Path, grid: str) -> None:
    save_together(there, grid, 5, OLD)
    save_together(there / "new", grid, 5, NEW)
    target, token = there / "checkpoint-5", "0123"
    target.rename(hidden_name(target, ASIDE, token))
    (there / "new" / target.name).rename(hidden_name(target, UNFINISHED, token))
    (there / "new").rmdir()


def _damaged(there: Path, grid: str) -> None:
    _saved(3, 4, 5, grid="dp=2")(there, grid)
    (there / "checkpoint-5" / "config.json").write_bytes(b"")
    run_ranks(1, lambda channel: save(there, grid, 6, NEW, channel), there, {0: KillAt(57, True)})
    assert len(leftovers(there)) == 1
