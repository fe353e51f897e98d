"""At whatever system call the machine stops, a whole checkpoint is found afterwards, and the next save cleans up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paddleformers_fc.storage.commit import commit, remove_checkpoint
from paddleformers_fc.storage.leftovers import clean_unfinished, recover
from paddleformers_fc.storage.manifest import newest_checkpoint
from tests.storage.support import (
    Crash,
    Machine,
    a_dead_process,
    names_in,
    running_on,
    save,
    stage,
    value_of,
)

OLD, NEW = 1, 2

# A commit syncs three directories, deletes a mark (it tries), renames the old one, then the new one.
STOP_BETWEEN_THE_RENAMES = 5


def crash_everywhere(
    directory: Path, machine: Callable[[int], Machine], job: Callable[[Path], object], *, untouched: bool
) -> int:
    """Run ``job`` once for each call it makes, each time stopped there, and look at what is left."""
    dead = a_dead_process()
    for number in range(10_000):
        output_dir = directory / str(number)
        save_quickly(output_dir / "checkpoint-5", OLD)
        one = machine(number)
        try:
            with running_on(one, dead):
                job(output_dir)
        except Crash:
            one.lose_power(output_dir)
            survives(output_dir, untouched=untouched)
        else:
            one.lose_power(output_dir)
            survives(output_dir, untouched=untouched, value=NEW)
            return number
    raise AssertionError("the job never ends")


def survives(output_dir: Path, *, untouched: bool = False, value: int | None = None) -> None:
    """After a restart an old or the new checkpoint is found; cleaning keeps it; a further save works.

    Args:
        output_dir: where ``checkpoint-5`` was.
        untouched: whether that one must not have been touched.
        value: what the newest checkpoint must hold, if that is certain.
    """
    found, _ = newest_checkpoint(output_dir)
    assert found is not None
    value = value_of(found) if value is None else value
    assert value_of(found) == value
    assert value in (OLD, NEW)
    if untouched:
        assert value_of(output_dir / "checkpoint-5") == OLD
    recover(output_dir)
    _, left = clean_unfinished(output_dir)
    assert left == []
    found, skipped = newest_checkpoint(output_dir)
    assert found is not None
    assert not found.name.startswith(".")
    assert skipped == []
    assert value_of(found) == value
    assert all(name.startswith("checkpoint-") for name in names_in(output_dir))
    save_quickly(output_dir / "checkpoint-5", 3)
    assert value_of(output_dir / "checkpoint-5") == 3


def save_quickly(target: Path, value: int) -> None:
    """A save that does not wait for the device."""
    with running_on(Machine()):
        save(target, value)


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_while_a_step_is_saved_again_leaves_the_old_or_the_new_one(
    tmp_path: Path, after: bool, can_exchange: bool
) -> None:
    calls = crash_everywhere(
        tmp_path,
        lambda number: Machine(number, after=after, can_exchange=can_exchange),
        lambda output_dir: save(output_dir / "checkpoint-5", NEW),
        untouched=False,
    )
    assert calls > 30, "every call of a save was a place to stop at"


@pytest.mark.parametrize("made", ["by no process", "by another library"])
def test_a_first_save_into_new_directories_survives_a_power_failure(tmp_path: Path, made: str) -> None:
    output_dir, machine = tmp_path / "project" / "runs" / "one", Machine()
    with running_on(machine):
        if made == "by another library":
            for directory in (output_dir.parent.parent, output_dir.parent, output_dir):
                machine.mkdir(directory)
        save(output_dir / "checkpoint-5", NEW)
    machine.lose_power(tmp_path)
    assert newest_checkpoint(output_dir) == (output_dir / "checkpoint-5", [])
    assert value_of(output_dir / "checkpoint-5") == NEW


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_while_a_new_step_is_saved_leaves_the_old_step_alone(tmp_path: Path, after: bool) -> None:
    calls = crash_everywhere(
        tmp_path,
        lambda number: Machine(number, after=after),
        lambda output_dir: save(output_dir / "checkpoint-6", NEW),
        untouched=True,
    )
    assert calls > 20


def test_a_crash_while_a_checkpoint_is_removed_never_leaves_half_of_it(tmp_path: Path) -> None:
    def job(output_dir: Path) -> None:
        save(output_dir / "checkpoint-7", NEW)
        save(output_dir / "checkpoint-6", NEW)
        remove_checkpoint(output_dir / "checkpoint-7")

    crash_everywhere(tmp_path, Machine, job, untouched=True)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_while_recovering_can_be_recovered_from(tmp_path: Path, after: bool) -> None:
    dead = a_dead_process()
    for number in range(10_000):
        output_dir = tmp_path / str(number)
        target = output_dir / "checkpoint-5"
        save_quickly(target, OLD)
        with running_on(Machine(), dead):
            staging = stage(target, NEW)
        between = Machine(STOP_BETWEEN_THE_RENAMES, can_exchange=False)
        with running_on(between, dead), pytest.raises(Crash):
            commit(staging, target)
        assert not target.exists()
        one = Machine(number, after=after)
        try:
            with running_on(one, dead):
                recover(output_dir)
                clean_unfinished(output_dir)
        except Crash:
            survives(output_dir)
        else:
            survives(output_dir)
            return
    raise AssertionError("recovering never ends")
