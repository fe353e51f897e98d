"""Count through the instants of some kinds of accidents: ``python -m tests.crash.sweep KIND ... --each N``.

It runs in a process of its own, which has one thread and no Paddle, because it forks at every instant. The scenarios
are divided among several such processes. Prints one line of JSON: of each kind how many instants there were, how many
were tried, and what was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.crash import exports, kills, power, refusals, worlds

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("kills", "exports", "refusals", "power")
_MEMORY = Path("/dev/shm")


@dataclass
class Tally:
    """What a sweep has counted.

    Attributes:
        scenarios: jobs.
        instants: there were.
        tried: of them.
        lost: what was wrong, one text for each.
    """

    scenarios: int = 0
    instants: int = 0
    tried: int = 0
    lost: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.scenarios + other.scenarios,
            self.instants + other.instants,
            self.tried + other.tried,
            self.lost + other.lost,
        )


def run(kinds: Sequence[str], each: int, every: int = 1, workers: int = 2) -> dict[str, Tally]:
    """Sweep in processes of their own; the counts of each kind.

    Args:
        kinds: some of ``KINDS``.
        each: how many instants of each scenario, at random; 0 for all.
        every: one scenario of so many, and of losses of power one instant of so many.
        workers: how many processes.
    """
    command = [sys.executable, "-m", "tests.crash.sweep", *kinds, f"--each={each}", f"--every={every}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, f"--worker={number}", f"--workers={workers}"], cwd=ROOT, env=environment, stdout=subprocess.PIPE
        )
        for number in range(workers)
    ]
    outputs = [worker.communicate()[0] for worker in started]
    failed = [worker.returncode for worker in started if worker.returncode]
    if failed:
        raise RuntimeError(f"a sweep of {kinds} ended with {failed}")
    found = [json.loads(text) for text in outputs]
    return {kind: sum((Tally(**one[kind]) for one in found), Tally()) for kind in kinds}


@dataclass(frozen=True)
class Part:
    """What one worker tries.

    Args:
        each: how many instants of each scenario; 0 for all.
        every: one scenario of so many, and of losses of power one instant of so many.
        worker: its number.
        workers: how many there are.
    """

    each: int
    every: int
    worker: int
    workers: int

    def of(self, scenarios: Iterable[Any]) -> list[Any]:
        """The scenarios of this worker."""
        return list(scenarios)[:: self.every][self.worker :: self.workers]


def sweep(kind: str, part: Part, directory: Path) -> Tally:
    """One worker's part."""
    if "paddle" in sys.modules:
        raise RuntimeError("Paddle is imported: every fork would copy its memory")
    if kind == "power":
        return _power(part, directory)
    if kind == "refusals":
        return _refusals(part, directory)
    if kind == "kills":
        return _instants(kills.scenarios(), kills.operations, kills.carry_out, part, directory)
    return _instants(exports.scenarios(), exports.operations, exports.carry_out, part, directory)


def _instants(
    scenarios: Iterable[Any],
    instants: Callable[[Any, Path], Sequence[Any]],
    carry_out: Callable[[Any, Path], None],
    part: Part,
    directory: Path,
) -> Tally:
    tally = Tally()
    for scenario in part.of(scenarios):
        tally.scenarios += 1
        found = instants(scenario, directory)
        picked = _picked(found, part.each)
        tally.instants += len(found)
        for one in picked:
            tally.tried += 1
            try:
                carry_out(one, directory)
            except worlds.Lost as error:
                tally.lost.append(f"{one}: {error}")
    return tally


def _picked(found: Sequence[Any], each: int) -> Sequence[Any]:
    """Some of them, at random but always the same ones; half of them at no write, for most operations are writes."""
    if not each or len(found) <= each:
        return found
    chance = random.Random(zlib.crc32(str(found[0]).encode()))
    rare = [one for one in found if "(write)" not in str(one)]
    picked = chance.sample(rare, min(len(rare), each - each // 2))
    rest = [one for one in found if one not in picked]
    return [*picked, *chance.sample(rest, each - len(picked))]


def _refusals(part: Part, directory: Path) -> Tally:
    chosen = [one for one in kills.scenarios() if one.name.startswith(("a new step,", "a step again,"))]
    tally = _instants(chosen, refusals.refusals, refusals.carry_out, part, directory)
    for number, grid in enumerate(part.of(kills.SOME_GRIDS)):
        place = directory / f"room-{number}"
        place.mkdir()
        for wrong in [*refusals.no_room(grid, place), refusals.read_only(grid, place)]:
            tally += Tally(0, 1, 1, [wrong] if wrong else [])
    return tally


def _power(part: Part, directory: Path) -> Tally:
    tally = Tally()
    stories = [power.saves(one) for one in kills.SOME_GRIDS]
    stories += [power.exported(one) for one in exports.scenarios()]
    for story in part.of(stories):
        recording = power.record(story, directory)
        found = list(power.remains(recording, part.every))  # They share the bytes of their files.
        picked = random.Random(1).sample(found, min(len(found), part.each or len(found)))
        tally += Tally(1, len(found), len(picked))
        for left in picked:
            try:
                power.look(left, directory)
            except worlds.Lost as error:
                tally.lost.append(f"{left}: {error}")
    return tally


def main() -> None:
    """Read the command line, sweep, and print the tally."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--each", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    if "refusals" in given.kinds:
        refusals.with_own_mounts()  # Only a process of one thread may.
    worlds.warm()
    part = Part(given.each, given.every, given.worker, given.workers)
    found: dict[str, Any] = {}
    for kind in given.kinds:
        # In memory: what is not synced survives a killed process there as anywhere, and nothing waits for a device.
        memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="crash-", dir=memory, ignore_cleanup_errors=True) as place:
            found[kind] = asdict(sweep(kind, part, Path(place)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
