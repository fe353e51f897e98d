"""An export is killed at every operation on files that it makes.

As :mod:`tests.crash.killing` says, a job is run through once and then for each of its operations. Here the job writes
open weights: from a checkpoint or from live memory, into a new directory, in place of an older export, or into a run's
output directory. What must hold after each kill: under the target's name there is the older export or the new one,
every tensor and every small file of it, or, where files are replaced one by one, something that no reader takes for an
export; files of others are there; what is left beside or inside it is recognised; and the next export cleans up.

Time: a kill takes 80 ms. Memory and disk: a few checkpoints and exports of 20 kB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paddleformers_fc.distributed.channel import ALONE, Channel
from paddleformers_fc.errors import FlexError, NotACheckpoint
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.live_export import save_weights
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.formats.huggingface import INDEX_NAME, SINGLE_NAME, open_huggingface
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.storage.commit import leftovers
from paddleformers_fc.storage.dtypes import to_numpy
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from paddleformers_fc.storage.safetensors import read_header
from tests.crash.groups import DONE
from tests.crash.killing import Kill, every_kill, prepared, run_alone, run_killed
from tests.crash.worlds import CONFIG, MODEL, ONE, Lost, names_in, weights_of, whole

OLD, NEW, NEXT = 1, 2, 3
MANY, SINGLE = 300, 10**9
"""Bounds on a file, in bytes: some tensors in each, or all in one."""
NOTES = b"of somebody else"
NOTHING, UNFINISHED = 0, -1
"""What is under the target's name, where it is no generation."""


@dataclass(frozen=True)
class Scenario:
    """One export that is killed.

    Args:
        name: for a report.
        ranks: how many.
        older: bound on a file of the export that is there before; None where there is none.
        bound: on a file of the new one.
        live: whether it is written from live memory, and not from a checkpoint.
        inside: whether the target is a run's output directory, with checkpoints in it.
    """

    name: str
    ranks: int
    older: int | None
    bound: int
    live: bool = False
    inside: bool = False

    @property
    def expected(self) -> tuple[int, ...]:
        """What may be under the target's name after a crash."""
        is_new = self.older is None and not self.inside
        return (NOTHING, NEW) if is_new else (self.before, NEW, UNFINISHED)

    @property
    def before(self) -> int:
        """What is under the target's name if the job has changed nothing."""
        return NOTHING if self.older is None else OLD

    def prepare(self, there: Path) -> None:
        """Three checkpoints, and where one is asked for an older export, beside a file of somebody else."""
        for generation in (OLD, NEW, NEXT):
            _save(there / f"checkpoint-{generation}", generation)
        target = target_of(there)
        if self.inside:
            target.mkdir()
            (there / f"checkpoint-{OLD}").rename(target / f"checkpoint-{OLD}")
        if self.older is not None:
            source = (target if self.inside else there) / f"checkpoint-{OLD}"
            export_checkpoint(source, target, self.older)
            (target / "notes.txt").write_bytes(NOTES)

    def job(self, there: Path, channel: Channel) -> None:
        """What each rank does."""
        if self.live:
            weights = weights_of("dp=2" if self.ranks == 2 else ONE, channel.rank, NEW)[MODEL_STATE]
            files = _described(NEW) if channel.rank == 0 else {}
            save_weights(weights, MODEL, files, target_of(there), self.bound, channel)
        else:
            export_checkpoint(there / f"checkpoint-{NEW}", target_of(there), self.bound)


def scenarios() -> Iterator[Scenario]:
    """Every way in which an export meets what is there."""
    yield Scenario("an export to a new directory", 1, None, MANY)
    yield Scenario("an export of a live model to one file, 2 ranks", 2, None, SINGLE, live=True)
    yield Scenario("an export of a live model, 2 ranks", 2, None, MANY, live=True)
    yield Scenario("an export of a live model in place of an older one, 2 ranks", 2, MANY, MANY, live=True)
    yield Scenario("an export of a live model in place of an older one", 1, SINGLE, MANY, live=True)
    for older, bound in ((SINGLE, SINGLE), (SINGLE, MANY), (MANY, SINGLE), (MANY, MANY)):
        form = f"{'one file' if older == SINGLE else 'many'} by {'one' if bound == SINGLE else 'many'}"
        yield Scenario(f"an export in place of an older one, {form}", 1, older, bound)
    yield Scenario("an export into a run's directory", 1, None, SINGLE, inside=True)
    yield Scenario("an export into a run's directory with an older one", 1, SINGLE, SINGLE, inside=True)
    yield Scenario("an export of a live model into a run's directory", 2, SINGLE, SINGLE, live=True, inside=True)


def operations(scenario: Scenario, directory: Path) -> list[Kill]:
    """Every kill of a scenario, from running it through once.

    Raises:
        Lost: it does not run through, or something else is there afterwards than should be.
    """
    there = prepared(scenario, directory, directory / "counted")
    ends = run_alone(scenario, there)
    if found(scenario, there) != NEW:
        raise Lost(f"{scenario.name}: {found(scenario, there)} is there")
    return every_kill(scenario, ends)


def carry_out(kill: Kill, directory: Path) -> None:
    """One accident, and everything that must hold after it.

    Raises:
        Lost: something does not.
    """
    scenario = kill.scenario
    there = prepared(scenario, directory, directory / "killed")
    ends = run_killed(kill, there)
    seen = found(scenario, there)
    if seen not in scenario.expected:
        raise Lost(f"{seen} is there: {names_in(target_of(there))}")
    if any(end.code == DONE for end in ends) and seen != NEW:
        raise Lost(f"a rank reported the export as done, and {seen} is there")
    try:
        export_checkpoint(there / f"checkpoint-{NEXT}", target_of(there), scenario.bound)
    except FlexError as error:
        raise Lost(f"the next export is refused: {error.render()}") from error
    if found(scenario, there) != NEXT:
        raise Lost(f"the next export is not there: {names_in(target_of(there))}")
    left = [one.path.name for place in (there, target_of(there)) for one in leftovers(place)]
    if left:
        raise Lost(f"the next export has left {left}")


def found(scenario: Scenario, there: Path) -> int:
    """What is under the target's name: a generation of which all is there, or that there is none.

    Raises:
        Lost: something looks whole and is not, is lost, or is not recognised.
    """
    target = target_of(there)
    for generation in (OLD, NEW, NEXT):
        own = scenario.inside and generation == OLD
        if whole((target if own else there) / f"checkpoint-{generation}") != generation:
            raise Lost(f"checkpoint-{generation} was touched")
    if scenario.older is not None and (target / "notes.txt").read_bytes() != NOTES:
        raise Lost("a file of somebody else was touched")
    known = {target.name, *(f"checkpoint-{generation}" for generation in (OLD, NEW, NEXT))}
    hidden = {one.path.name for one in leftovers(there)}
    strange = set(names_in(there)) - known - hidden
    if strange:
        raise Lost(f"{strange} is neither an export nor recognised as unfinished")
    inside = {one.path.name for one in leftovers(target)}
    if not target.exists() or not (set(names_in(target)) - inside - {f"checkpoint-{OLD}"}):
        return NOTHING
    try:
        files = sorted(
            {
                part.file
                for one in open_huggingface(target, "full").catalog.roles[MODEL_STATE].values()
                for part in one.fragments
            }
        )
    except NotACheckpoint:
        return UNFINISHED
    except FlexError as error:
        raise Lost(error.render()) from error
    if not (target / CHECKSUMS_NAME).exists():
        raise Lost(f"{target} has no checksums")
    return _generation(target, files)


def _generation(target: Path, files: list[str]) -> int:
    seen = {int(json.loads((target / name).read_bytes())["generation"]) for name in _described(OLD)}
    weights = [name for name in names_in(target) if name.endswith(".safetensors")]
    if weights != files or (INDEX_NAME in names_in(target)) != (files != [SINGLE_NAME]):
        raise Lost(f"{names_in(target)} are there, of which {files} count")
    for name in files:
        data = (target / name).read_bytes()
        for entry in read_header(target / name).tensors.values():
            seen |= {
                int(one) for one in set(np.frombuffer(data[entry.begin : entry.end], to_numpy(entry.dtype)).tolist())
            }
    if len(seen) != 1:
        raise Lost(f"{target} is a mixture of {sorted(seen)}")
    return seen.pop()


def target_of(there: Path) -> Path:
    """Where the job exports to."""
    return there / "hf"


def _described(generation: int) -> dict[str, bytes]:
    """The small files of an export; each contains its generation."""
    return {
        "config.json": config_bytes({**CONFIG, "generation": generation}),
        "tokenizer.json": json.dumps({"generation": generation}).encode(),
    }


def _save(directory: Path, generation: int) -> None:
    files = {**_described(generation), "trainer/rng-00000.json": json.dumps({"generation": generation}).encode()}
    roles = {MODEL_STATE: weights_of(ONE, 0, generation)[MODEL_STATE]}
    save_checkpoint(directory, roles, MODEL, files, JobRecord(generation, generation, {}), ALONE)
