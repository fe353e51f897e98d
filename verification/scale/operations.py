"""The operations that are counted, and the jobs: two models over grids of 64 to 10,240 ranks, and a tiny one."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from paddleformers_fc.distributed.channel import Channel, Part, Parts, exchange_part
from paddleformers_fc.distributed.consistency import ConsistencyCheck
from paddleformers_fc.distributed.step_agreement import StepAgreement
from paddleformers_fc.execute.load import prepare_load
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import PlannedSave, begin_save, comparable_facts, save_parts, write_and_commit
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.trainer import resume, tiers
from verification import temporary_directory
from verification.scale.counting import PROCESSOR, Meter, counted_calls, current
from verification.scale.ranks import AGREEMENTS, BLOCKED, LATENCY, RANKS_PER_NODE, ScaleJob, capture_zeros, hosts_of

MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
"""Configurations, grids, and the ranks of the grid at sharding 1, by name."""

FIRST_SAVE, LATER_SAVE, ROTATION = "first save", "later save", "rotation"
RESUME, OPENING, PLANNING = "automatic resume", "opening", "planning"
ASYNCHRONOUS = "asynchronous save"
CONNECTING = "connecting"
ALL = (FIRST_SAVE, LATER_SAVE, ROTATION, RESUME, OPENING, PLANNING, ASYNCHRONOUS)
LARGEST_JOBS = (FIRST_SAVE, OPENING, PLANNING)

SECONDS = frozenset({PROCESSOR, BLOCKED, LATENCY})

Counts = dict[str, dict[int, Meter]]
"""What each rank that ran has done, by operation."""


Key = tuple[str, int, str, str]
"""Model, ranks of the job, operation, and ``coordinator`` or ``others``."""
Table = dict[Key, dict[str, float]]

LARGEST_SAVE = 4096
"""Ranks of the largest job of which all operations are counted."""


def running_ranks(world: int, name: str = "tiny") -> list[int]:
    """Return the coordinator, the first rank of the second node, a middle and the last rank.

    Of the largest jobs of a model with many tensors, the first and the last, because each needs gigabytes.
    """
    if name == "671B MoE" and world > 512:
        return [0, world - 1]
    return [0, RANKS_PER_NODE, world // 2 + 1, world - 1]


def grid_of(name: str, world: int) -> str:
    """Return the grid of a job."""
    sharding = world // MODELS[name]["smallest"]
    grid: str = MODELS[name]["grid"]
    return grid.format(min(sharding, 64), sharding=sharding, split=str(sharding > 1).lower())


def model_over(name: str, grid: str) -> SimulatedModel:
    """Return a model over a grid."""
    described = ModelDescription(MODELS[name]["config"])
    return declared_model(family_for(described.config), described, parse_grid(grid), "bfloat16")


def count_operations(name: str, world: int, running: Sequence[int]) -> Counts:
    """Run every operation once, in the order in which a run and its successor need them.

    Args:
        name: a key of :data:`MODELS`.
        world: number of ranks.
        running: the ranks that run.
    """
    with counted_calls(), temporary_directory() as place:
        job = ScaleJob(model_over(name, grid_of(name, world)), running, place)
        try:
            return _operations(job, ALL if world <= LARGEST_SAVE else LARGEST_JOBS)
        finally:
            job.close()


def saved_checkpoint(name: str, world: int, place: Path) -> Path:
    """Save a checkpoint of a job, whose files of tensors are holes, and return its directory."""
    with counted_calls():
        job = ScaleJob(model_over(name, grid_of(name, world)), [0, world - 1], place)
        try:
            job.run(partial(_save, job, 1))
        finally:
            job.close()
    return place / "checkpoint-1"


def count_job(job: tuple[str, int]) -> Table:
    """Return the highest counts of one job, by its model and its number of ranks, in a process of its own."""
    name, world = job
    count_operations("tiny", 8, [0, 7])  # Imports what is imported at the first use.
    table: Table = {}
    for operation, meters in count_operations(name, world, running_ranks(world, name)).items():
        for rank, meter in meters.items():
            row = table.setdefault((name, world, operation, "others" if rank else "coordinator"), {})
            for count, value in meter.items():
                row[count] = max(row.get(count, 0), round(value, 2 if count in SECONDS else None))
    atexit.register(os._exit, 0)  # What Paddle registers to run at exit has hung once.
    return table


def _operations(job: ScaleJob, wanted: Sequence[str]) -> Counts:
    counts: Counts = {CONNECTING: job.connecting}
    opened: dict[int, OpenedCheckpoint] = {}
    newest = job.directory / f"checkpoint-{2 if LATER_SAVE in wanted else 1}"
    automatic = ReadOptions(replicas="auto", hosts=hosts_of(job.world))
    work: dict[str, Callable[[int, Channel], Any]] = {
        FIRST_SAVE: partial(_save, job, 1),
        LATER_SAVE: partial(_save, job, 2),
        ROTATION: lambda rank, _: _rotate(job) if rank == 0 else None,
        RESUME: lambda _, channel: resume.require_newest(resume.Search(job.directory, channel, lambda _: None)),
        OPENING: lambda _, channel: open_on_all_ranks(newest, channel, "full"),
        PLANNING: lambda rank, channel: prepare_load(
            opened[rank], partial(job.weights, rank), job.model.model, channel, automatic
        ),
        ASYNCHRONOUS: partial(_save_asynchronously, job, 3),
    }
    for operation in wanted:
        counts[operation], results = job.run(work[operation])
        if operation == OPENING:
            opened.update(results)
    return counts


def _rotate(job: ScaleJob) -> None:
    """Rotate as the coordinator does alone where all ranks see one file system."""
    tiers.delete_over_limit(job.directory, tiers.Retention(1), job.directory / "checkpoint-2", [], lambda _: None)


def _save(job: ScaleJob, step: int, rank: int, channel: Channel) -> None:
    planned = _planned(job, step, rank, channel)
    write_and_commit(planned, capture_zeros(planned.part), channel)


def _planned(job: ScaleJob, step: int, rank: int, channel: Channel) -> PlannedSave:
    directory = job.directory / f"checkpoint-{step}"
    part = job.part(rank, step)
    check = ConsistencyCheck(f"saving {directory.name}", comparable_facts(part.model, part.job, part.replicas))
    return begin_save(lambda: part, directory, channel, check)


def _save_asynchronously(job: ScaleJob, step: int, rank: int, channel: Any) -> None:
    """Save as :mod:`paddleformers_fc.trainer.save` does, beside steps of training."""
    agreement = StepAgreement(channel, channel.liveness)
    with job.blocking():
        parts = _parts(_planned(job, step, rank, channel), channel)
        part = next(parts)
    with agreement.running(), ThreadPoolExecutor(1) as thread:
        done = thread.submit(_work, job, rank, part)
        while True:
            job.train()
            with job.blocking():
                agreed = agreement.read()
                if agreed is not None and agreed.subject is part:
                    current().add(AGREEMENTS, 1)
                    try:
                        part = exchange_part(parts, structs.replace(part, work=done.result), channel)
                    except StopIteration:
                        break
                    done = thread.submit(_work, job, rank, part)
                agreement.begin_next("training", part, done.done(), False)


def _parts(planned: PlannedSave, channel: Channel) -> Parts[None]:
    yield from save_parts(planned, capture_zeros(planned.part), channel)
    yield Part("deleting old checkpoints", lambda: (None, None), type(None))


def _work(job: ScaleJob, rank: int, part: Part) -> Any:
    """Do a part, on the thread of a rank."""
    result = part.work()
    if part.doing == "writing":
        job.written_at = max(job.written_at, time.monotonic())
    elif rank == 0:  # What follows the commit is not counted.
        current().setdefault(LATENCY, time.monotonic() - job.written_at)
    return result
