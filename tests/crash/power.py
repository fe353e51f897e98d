"""What a power failure can take: everything that was not synced, in every order.

The operations of whole saves and exports are recorded, of all ranks in one order, and played to a model of a disk
(:mod:`tests.crash.disk`). After every operation the model is asked for what may be left: nothing of what is pending,
all of it, each change alone, all but each change, each directory alone, and random selections. Each of these is made of
real files and is looked at as after a crash. Of saves: the last checkpoint whose save had returned, or a newer one, is
whole and is what is taken, and the next save cleans up. Of exports: under the target's name there is the last export
that had returned, or a newer one, with every tensor and small file, or, where the target cannot be exchanged as a
whole, something that is not an export; checkpoints and files of others are there; the next export succeeds.
What was looked at before is not made again.

Time: 10 ms for each. Memory: what was written.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paddleformers_fc.distributed.channel import ALONE, Channel
from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.storage.manifest import newest_checkpoint
from tests.crash import exports
from tests.crash.disk import Disk, Loss, Recorded
from tests.crash.net import Gate, Net, Operation, cast
from tests.crash.worlds import Found, Lost, chosen, cleaned_by_the_next_save, ranks_of, rotate_alone, save
from verification.simulate_ranks import run_threads

NEXT = 3
State = Found | int | None
"""What is there: of saves the checkpoint that is taken, of exports the generation."""


@dataclass
class Recorder(Gate):
    """Takes down the operations of all ranks in their order.

    Args:
        root: what paths are relative to.
    """

    root: Path
    operations: list[Recorded] = field(default_factory=list)

    def after(self, operation: Operation) -> None:
        """Take it down."""
        path = os.path.relpath(operation.path, self.root)
        # What is above the directory was on the device before the story began.
        if operation.kind != "look" and not path.startswith(".."):
            other = os.path.relpath(operation.other, self.root) if operation.other else ""
            self.operations.append(Recorded(operation.kind, path, other, bytes(operation.data), operation.offset))


@dataclass(frozen=True)
class Step:
    """One thing a run does, and what is there once it has returned.

    Args:
        job: what each rank does.
        found: what is there afterwards.
    """

    job: Callable[[Path, Channel], None]
    found: State


@dataclass(frozen=True)
class Story:
    """A run whose power fails.

    Args:
        name: for a report.
        ranks: how many.
        prepare: makes what is on the device from the beginning.
        before: what that is.
        steps: what the run does.
        check: what must hold afterwards in a directory, of what had returned and what was running; raises ``Lost``.
    """

    name: str
    ranks: int
    prepare: Callable[[Path], None]
    before: State
    steps: tuple[Step, ...]
    check: Callable[[Path, State, State], None]


def saves(grid: str) -> Story:
    """A first save into new directories, a second one, that one again, and rotation."""
    steps = (
        Step(lambda there, channel: save(there, grid, 5, 1, channel), Found(5, 1)),
        Step(lambda there, channel: save(there, grid, 6, 2, channel), Found(6, 2)),
        Step(lambda there, channel: save(there, grid, 6, 11, channel), Found(6, 11)),
        Step(lambda there, channel: rotate_alone(there, 1, there / "checkpoint-6", channel), Found(6, 11)),
    )
    return Story(f"saves, {grid}", ranks_of(grid), lambda there: None, None, steps, _check_saves)


def _check_saves(there: Path, returned: State, running: State) -> None:
    if returned is not None or newest_checkpoint(there)[0] is not None:
        found = chosen(there)
        if found not in (returned, running):
            raise Lost(f"{found} is taken, and {returned} had returned")
    cleaned_by_the_next_save(there, 9, NEXT)


def exported(scenario: exports.Scenario) -> Story:
    """One export, and another one in its place."""
    target = exports.target_of

    def again(there: Path, channel: Channel) -> None:
        if channel.rank == 0:
            export_checkpoint(there / f"checkpoint-{exports.NEXT}", target(there), scenario.bound)

    def check(there: Path, returned: State, running: State) -> None:
        # The first export may create the directory, and the second one replaces its files.
        may_be_unfinished = exports.UNFINISHED in scenario.expected or running == exports.NEXT
        found = exports.found(scenario, there)
        if found not in (returned, running, *([exports.UNFINISHED] if may_be_unfinished else [])):
            raise Lost(f"{found} is there, and {returned} had returned")
        try:
            again(there, ALONE)
        except FlexError as error:
            raise Lost(f"the next export is refused: {error.render()}") from error
        if exports.found(scenario, there) != exports.NEXT:
            raise Lost("the next export is not there")

    steps = (Step(scenario.job, exports.NEW), Step(again, exports.NEXT))
    name, ranks = scenario.name, scenario.ranks
    return Story(name, ranks, scenario.prepare, scenario.before, steps, check)


@dataclass(frozen=True)
class Instant:
    """The moment after an operation.

    Args:
        operation: the operation.
        returned: what is found if nothing is left of what runs.
        running: what is found if all is left of it.
    """

    operation: Recorded
    returned: State
    running: State


@dataclass(frozen=True)
class Recording:
    """The operations of a run, by instants, and the directory as it was before."""

    story: Story
    before: Path
    instants: list[Instant]


def record(story: Story, directory: Path) -> Recording:
    """Let a run happen on the threads of this process."""
    there, before = directory / "recorded", directory / "before"
    for one in (there, before):
        shutil.rmtree(one, ignore_errors=True)
    there.mkdir()
    instants: list[Instant] = []
    story.prepare(there)
    shutil.copytree(there, before)
    recorder, returned = Recorder(there), story.before
    for step in story.steps:
        recorder.operations.clear()
        with cast(Net(recorder)):
            run_threads(story.ranks, lambda channel, step=step: step.job(there, channel))
        instants += [Instant(one, returned, step.found) for one in recorder.operations]
        returned = step.found
    return Recording(story, before, instants)


@dataclass(frozen=True)
class Remains:
    """What one power failure leaves.

    Args:
        story: the run.
        instant: when.
        number: of the instant.
        loss: what was on the device of what was pending.
        files: contents by path; directories as None.
    """

    story: Story
    instant: Instant
    number: int
    loss: Loss
    files: dict[str, bytes | None]

    def __str__(self) -> str:
        operation = f"{self.instant.operation.kind} {self.instant.operation.path}"
        return f"{self.story.name}: power lost after operation {self.number}, {operation}, with {self.loss}"


def remains(recording: Recording, every: int = 1) -> Iterator[Remains]:
    """Every different remains of a run at any instant, or at one of so many; the same ones each time, in one order."""
    disk, chance, instants = Disk(recording.before), random.Random(1), recording.instants
    seen: set[bytes] = set()
    for at, instant in enumerate(instants):
        disk.play(instant.operation)
        if at % every:
            continue
        following = instants[at + 1] if at + 1 < len(instants) else None
        if following and following.operation.kind == "write" == instant.operation.kind:
            continue  # Files that are being written are all alike to a power failure.
        for loss in disk.losses(chance):
            files = disk.after(loss)
            key = _key(files, instant)
            if key not in seen:
                seen.add(key)
                yield Remains(recording.story, instant, at, loss, files)


def look(left: Remains, directory: Path) -> None:
    """After the power is back, what must hold.

    Raises:
        Lost: something does not.
    """
    there = directory / "lost"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    for path, data in left.files.items():
        if data is None:
            (there / path).mkdir()
        else:
            (there / path).write_bytes(data)
    try:
        left.story.check(there, left.instant.returned, left.instant.running)
    except OSError as error:
        raise Lost(f"a file is not there: {error}") from error


def _key(files: dict[str, bytes | None], instant: Instant) -> bytes:
    digest = hashlib.blake2b(repr((instant.returned, instant.running)).encode())
    # Random parts of hidden names are the same in one recording.
    for path in sorted(files):
        data = files[path]
        digest.update(path.encode() + (b"/" if data is None else b"=" + hashlib.blake2b(data).digest()))
    return digest.digest()
