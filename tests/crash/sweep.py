"""Count through the instants of some kinds of accidents, in processes of their own.

Such a process has one thread and no Paddle, because it forks at every instant. The scenarios are divided among several
of them. Each is given a :class:`Part` as JSON, and prints one line of JSON: a :class:`Tally` of each kind.
"""

from __future__ import annotations

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

from tests.crash import exports, killing, kills, power, refusals, worlds

ROOT = Path(__file__).resolve().parents[2]
Kind = tuple[Callable[[], Iterable[Any]], Callable[[Any, Path], Sequence[Any]], Callable[[Any, Path], None]]
KINDS: dict[str, Kind] = {
    "kills": (kills.scenarios, killing.kills, killing.carry_out),
    "exports": (exports.scenarios, killing.kills, killing.carry_out),
    "refusals": (refusals.scenarios, refusals.refusals, refusals.carry_out),
    "rooms": (lambda: worlds.SOME_GRIDS, refusals.rooms, refusals.save_into),
    "power": (power.scenarios, power.remains, power.look),
}
"""Of each kind the scenarios, the instants of one, and what is done and must hold at one; it raises ``Lost``."""
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
        counts = self.scenarios + other.scenarios, self.instants + other.instants, self.tried + other.tried
        return Tally(*counts, self.lost + other.lost)


@dataclass(frozen=True)
class Part:
    """What one worker tries.

    Args:
        kinds: some of ``KINDS``.
        each: how many instants of each scenario, at random; 0 for all.
        every: one scenario of so many.
        worker: its number.
        workers: how many there are.
    """

    kinds: Sequence[str]
    each: int
    every: int
    worker: int
    workers: int


def run(kinds: Sequence[str], each: int, every: int = 1, workers: int = 2) -> dict[str, Tally]:
    """Sweep in processes of their own; the counts of each kind. For the arguments see :class:`Part`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    started = []
    for number in range(workers):
        part = json.dumps(asdict(Part(kinds, each, every, number, workers)))
        command = [sys.executable, "-m", "tests.crash.sweep", part]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE))
    outputs = [worker.communicate()[0] for worker in started]
    if any(worker.returncode for worker in started):
        raise RuntimeError(f"a sweep of {kinds} ended with {[worker.returncode for worker in started]}")
    found = [json.loads(text) for text in outputs]
    return {kind: sum((Tally(**one[kind]) for one in found), Tally()) for kind in kinds}


def sweep(kind: str, part: Part, directory: Path) -> Tally:
    """One worker's part of a kind."""
    scenarios, instants, carry_out = KINDS[kind]
    tally = Tally()
    for scenario in list(scenarios())[:: part.every][part.worker :: part.workers]:
        found = instants(scenario, directory)
        picked = _picked(found, part.each)
        tally += Tally(1, len(found), len(picked))
        for one in picked:
            try:
                carry_out(one, directory)
            except worlds.Lost as error:
                tally.lost.append(f"{one}: {error}")
    return tally


def _picked(found: Sequence[Any], each: int) -> list[Any]:
    """Some of them, at random but always the same ones; half of them at no write, for most operations are writes."""
    if not each or len(found) <= each:
        return list(found)
    chance = random.Random(zlib.crc32(str(found[0]).encode()))
    rare = [at for at, one in enumerate(found) if "(write)" not in str(one)]
    picked = chance.sample(rare, min(len(rare), each - each // 2))
    rest = sorted(set(range(len(found))) - set(picked))
    return [found[at] for at in (*picked, *chance.sample(rest, each - len(picked)))]


def main() -> None:
    """Sweep as the command line says, and print the tallies."""
    part = Part(**json.loads(sys.argv[1]))
    if "paddle" in sys.modules:
        raise RuntimeError("Paddle is imported: every fork would copy its memory")
    if "rooms" in part.kinds:
        refusals.with_own_mounts()  # Only a process of one thread may.
    worlds.warm()
    found: dict[str, Any] = {}
    # In memory: what is not synced survives a killed process there as anywhere, and nothing waits for a device.
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    for kind in part.kinds:
        with tempfile.TemporaryDirectory(prefix="crash-", dir=memory, ignore_cleanup_errors=True) as place:
            found[kind] = asdict(sweep(kind, part, Path(place)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
