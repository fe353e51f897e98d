"""What a power failure can take: everything that was not synced, in every order.

The operations of whole saves and exports are recorded, of all ranks in one order, and played to a model of a disk
(:mod:`tests.crash.disk`). After every operation the model is asked for what may be left: nothing of what is pending,
all of it, each change alone, all but each change, each directory alone, and random selections. Each of these is made of
real files and is looked at as after a crash: the last step that had returned, or the running one, must be found, and
the next save or export must succeed. What was looked at before is not made again.

Time: 10 ms for each. Memory: what was written.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.storage.manifest import newest_checkpoint
from tests.crash import exports, worlds
from tests.crash.disk import Disk, Loss
from tests.crash.killing import Scenario, State, Step
from tests.crash.net import Gate, Net, Operation, cast
from tests.crash.worlds import Found, Lost, chosen, fresh, save
from verification.simulate_ranks import run_threads


@dataclass
class Recorder(Gate):
    """Takes down the operations of all ranks in their order.

    Args:
        root: what paths are relative to.
    """

    root: Path
    operations: list[Operation] = field(default_factory=list)

    def after(self, operation: Operation) -> None:
        """Take it down."""
        path = os.path.relpath(operation.path, self.root)
        # Parents of the directory were on the device before the run began.
        if operation.kind != "look" and not path.startswith(".."):
            other = os.path.relpath(operation.other, self.root) if operation.other else ""
            self.operations.append(replace(operation, path=path, other=other, data=bytes(operation.data)))


@dataclass(frozen=True)
class Remains:
    """What one power failure leaves.

    Args:
        scenario: the run.
        name: of the operation before it.
        allowed: what may be found.
        loss: what was on the device of what was pending.
        files: contents by path; directories as None.
    """

    scenario: Scenario
    name: str
    allowed: tuple[State, ...]
    loss: Loss
    files: dict[str, bytes | None]

    def __str__(self) -> str:
        return f"{self.scenario.name}: power lost after {self.name}, with {self.loss}"


def scenarios() -> Iterator[Scenario]:
    """Runs that save, and every export."""
    yield from map(_saves, worlds.SOME_GRIDS)
    yield from exports.scenarios()


def _saves(grid: str) -> Scenario:
    """A first save into new directories, a second one, that one again, and rotation."""

    def saved(step: int, generation: int) -> Step:
        return Step(lambda there, channel: save(there, grid, step, generation, channel), (step, generation))

    def rotate(there: Path, channel: Channel) -> None:
        worlds.rotate_alone(there, 1, there / "checkpoint-6", channel)

    def look(there: Path) -> Found | None:
        return chosen(there) if newest_checkpoint(there)[0] is not None else None

    steps = (saved(5, 1), saved(6, 2), saved(6, 4), Step(rotate, (6, 4)))
    name = f"saves, {grid}"
    return Scenario(name, worlds.ranks_of(grid), lambda there: None, None, steps, look, worlds.cleaned_by_the_next_save)


def remains(scenario: Scenario, directory: Path) -> list[Remains]:
    """Every different remains of a run at any instant; the same ones each time, in one order."""
    there, before = fresh(directory / "there"), directory / "before"
    scenario.prepare(there)
    shutil.copytree(there, fresh(before), dirs_exist_ok=True)
    operations: list[tuple[Operation, tuple[State, ...]]] = []
    returned = scenario.before
    for step in scenario.steps:
        recorder = Recorder(there)
        with cast(Net(recorder)):
            run_threads(scenario.ranks, lambda channel, step=step: step.job(there, channel))  # type: ignore[misc]
        operations += [(one, (returned, step.after, *step.also)) for one in recorder.operations]
        returned = step.after
    disk, chance = Disk(before), random.Random(1)
    found: dict[bytes, Remains] = {}
    for at, (operation, allowed) in enumerate(operations):
        disk.play(operation)
        following = operations[at + 1][0].kind if at + 1 < len(operations) else ""
        if following == operation.kind == "write":
            continue  # A power failure treats all files that are being written alike.
        for loss in disk.losses(chance):
            files = disk.after(loss)
            left = Remains(scenario, f"operation {at}, {operation.kind} {operation.path}", allowed, loss, files)
            found.setdefault(_key(files, allowed), left)
    return list(found.values())


def look(left: Remains, directory: Path) -> None:
    """After the power is back, what must hold.

    Raises:
        Lost: something does not.
    """
    there, scenario = fresh(directory / "there"), left.scenario
    for path, data in left.files.items():
        if data is None:
            (there / path).mkdir()
        else:
            (there / path).write_bytes(data)
    try:
        found = scenario.look(there)
        if found not in left.allowed:
            raise Lost(f"{found} is found, and {left.allowed[0]} had returned")
        scenario.clean(there)
    except OSError as error:
        raise Lost(f"a file is not there: {error}") from error


def _key(files: dict[str, bytes | None], allowed: Any) -> bytes:
    digest = hashlib.blake2b(repr(allowed).encode())
    # Random parts of hidden names are the same in one recording.
    for path, data in sorted(files.items()):
        digest.update(path.encode() + (b"/" if data is None else b"=" + hashlib.blake2b(data).digest()))
    return digest.digest()
