"""The runs that saved the checkpoints of an output directory.

A run has an id, which every manifest of it records together with the runs that it was resumed from. A restart that
resumes the last checkpoint continues the run. A resume from an older step, or into another output directory, is a new
run that branches from the old one. Then one directory contains checkpoints of both, and the newest one by its step may
be of the old run. Both runs are therefore named in the log, at the branch and at every later automatic resume.

The parallel degrees of a run, for readers of a manifest and of the log.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.errors import CheckpointError, StorageError
from paddleformers_fc.storage.manifest import Branch, Manifest, RunRecord, located, names_in, read_saved_by
from paddleformers_fc.storage.paths import parse_step


class Saved(msgspec.Struct, frozen=True):
    """A finished checkpoint of an output directory.

    Attributes:
        step: optimizer steps done.
        run: the run that saved it.
    """

    step: int
    run: RunRecord


class Seen(msgspec.Struct):
    """The checkpoints that a rank has found.

    Args:
        names: of all that are visible to it, as those of :func:`.manifest.names_in`.
        saved: those that the coordinator has read.
    """

    names: list[str]
    saved: list[Saved] = []


def new_run(branches: Sequence[Branch] = ()) -> RunRecord:
    """Return the record of a run that begins now.

    Args:
        branches: the runs that it branches from, first to last.
    """
    return RunRecord(f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", list(branches))


def saved_in(places: Mapping[str, Path], channel: Channel) -> list[Saved]:
    """Return the finished checkpoints in the directories of all ranks, by rising step.

    Args:
        places: where the run saves, as for :func:`.manifest.names_in`.
        channel: all ranks of the job; every rank must call.
    """
    everyone = all_gather_checked(channel, "looking for other runs", partial(look_for_runs, places, channel), Seen)
    return saved_on_all(everyone, places, channel)


def look_for_runs(places: Mapping[str, Path], channel: Channel) -> Seen:
    """Return the checkpoints that this rank finds, to warn of other runs; none where it cannot look."""
    with suppress(StorageError):  # Only a warning depends on it; a save or a resume raises it.
        return look(places, channel)
    return Seen([])


def look(places: Mapping[str, Path], channel: Channel) -> Seen:
    """Return the checkpoints that this rank finds; the coordinator reads who has saved them.

    Raises:
        StorageError: the operating system refused to look.
    """
    names = names_in(places)
    return Seen(names, read_saved(places, names) if channel.rank == 0 else [])


def saved_on_all(everyone: Sequence[Seen], places: Mapping[str, Path], channel: Channel) -> list[Saved]:
    """Return the finished checkpoints in the directories of all ranks, as :func:`saved_in`.

    The first rank of another disk reads the manifests that the coordinator does not see, in an exchange of their own.

    Args:
        everyone: what each rank has found.
        places: as for :func:`saved_in`.
        channel: all ranks of the job; every rank must call.
    """
    readers: dict[str, int] = {}
    for rank, seen in enumerate(everyone):
        for name in seen.names:
            if parse_step(Path(name)) is not None:
                readers.setdefault(name, rank)
    found = everyone[0].saved
    if any(readers.values()):
        own = [name for name, rank in readers.items() if rank == channel.rank != 0]
        others = all_gather_checked(channel, "looking at other disks", lambda: read_saved(places, own), list[Saved])
        found = [*found, *(one for saved in others for one in saved)]
    return sorted(found, key=lambda one: (one.step, one.run.id))


def read_saved(places: Mapping[str, Path], names: Iterable[str]) -> list[Saved]:
    """Return the finished ones of some checkpoints of :func:`.manifest.names_in`, by rising step."""
    found: list[Saved] = []
    for path in (located(name, places) for name in names):
        with suppress(CheckpointError, StorageError):
            step, run = read_saved_by(path)
            if step == parse_step(path):
                found.append(Saved(step, run))
    return sorted(found, key=lambda one: (one.step, one.run.id))


def resumed(manifest: Manifest, saved: Sequence[Saved], here: bool, named: bool) -> tuple[RunRecord, str]:
    """Return the record of a run that resumes a checkpoint, and a warning about other runs; normally none.

    Args:
        manifest: of the checkpoint.
        saved: the checkpoints of the run's own output directory.
        here: whether the checkpoint is in that directory.
        named: whether a user named it.
    """
    own = manifest.saved_by
    newer = [one for one in saved if one.step > manifest.step]
    continues = bool(own.id) and here and not newer
    run = own if continues else new_run([*own.branches, Branch(own.id, manifest.step)])
    others = [one for one in saved if not _is_before(one, manifest)]
    if newer and named:
        return run, (
            f"{_run(run)} begins at step {manifest.step} of {_run(own)}, and its output directory holds newer "
            f"checkpoints: {_listed(newer)}. Until {_run(run)} has saved a later step, resume_from_checkpoint: true "
            f"resumes checkpoint-{newer[-1].step} of {_run(newer[-1].run)}. Name another output_dir to keep runs apart."
        )
    if others and not newer:
        return run, (
            f"The output directory holds checkpoints of several runs: {_listed(others)} beside "
            f"checkpoint-{manifest.step} of {_run(own)}, which is resumed. To resume another run, name its checkpoint "
            "in resume_from_checkpoint; name another output_dir to keep runs apart."
        )
    return run, ""


def begun(run: RunRecord, saved: Sequence[Saved], output_dir: Path) -> str:
    """Return a warning for a run from the beginning whose output directory holds checkpoints of others, or nothing."""
    if not saved:
        return ""
    return (
        f"{_run(run)} starts from the beginning, and {output_dir} holds checkpoints of others: {_listed(saved)}. Until "
        f"this run has saved a later step, resume_from_checkpoint: true resumes checkpoint-{saved[-1].step} of "
        f"{_run(saved[-1].run)}. Name another output_dir to keep runs apart."
    )


def _is_before(one: Saved, manifest: Manifest) -> bool:
    """Return whether a checkpoint belongs to the run that saved another one, or to a part of an older run before it."""
    own = manifest.saved_by
    until = {branch.run: branch.step for branch in own.branches} | {own.id: manifest.step}
    return one.step <= until.get(one.run.id, -1)


def _listed(saved: Sequence[Saved]) -> str:
    """Return the steps by run: ``checkpoint-5, checkpoint-6 of run A; checkpoint-4 of run B``."""
    steps: dict[str, list[Saved]] = {}
    for one in saved:
        steps.setdefault(one.run.id, []).append(one)
    return "; ".join(
        f"{', '.join(f'checkpoint-{one.step}' for one in group)} of {_run(group[0].run)}" for group in steps.values()
    )


def _run(run: RunRecord) -> str:
    if not run.id:
        return "a run without an id"
    origin = run.branches[-1] if run.branches else None
    if origin is None:
        return f"run {run.id}"
    return f"run {run.id} (from step {origin.step} of {origin.run or 'a run without an id'})"


def parallel_degrees(args: Any) -> dict[str, int]:
    """Return the degree of every parallel axis, for readers of a manifest."""
    sharding = max(args.sharding_parallel_size, 1)
    return {
        "dp": max(args.dataset_world_size // sharding, 1),
        "tp": max(args.tensor_model_parallel_size, 1),
        "pp": max(args.pipeline_model_parallel_size, 1),
        "sharding": sharding,
        "ep": max(args.expert_model_parallel_size, 1),
        "sep": max(args.sep_parallel_size, 1),
        "cp": max(args.context_parallel_size, 1),
    }


def degrees_text(degrees: Mapping[str, int]) -> str:
    """Return parallel degrees above one as text, such as ``tp=2 pp=2``; of a single rank ``dp=1``.

    Empty where none are recorded, as in conversions of open weights.
    """
    text = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
    return text or ("dp=1" if degrees else "")
