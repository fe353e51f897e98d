"""Which run saved which checkpoint of an output directory, and the parallel degrees of a run.

Every manifest records the id of its run and the runs that it branches from. A restart that resumes the last checkpoint
continues the run. A resume from an older step, or into another output directory, starts a new run that branches from
the old one. An output directory may then contain checkpoints of both runs, and the newest step may belong to the old
run. The log therefore names both runs, at the branch and at every later automatic resume.
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
    """The step and the run of a finished checkpoint."""

    step: int
    run: RunRecord


class Seen(msgspec.Struct):
    """The checkpoints that are visible to a rank.

    Args:
        names: their names, see :func:`.manifest.names_in`.
        saved: the finished ones; only on the coordinator, which reads their manifests.
    """

    names: list[str]
    saved: list[Saved] = []


def new_run(branches: Sequence[Branch] = ()) -> RunRecord:
    """Return the record of a new run.

    Args:
        branches: the runs that it branches from, first to last.
    """
    return RunRecord(f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}", list(branches))


def saved_in(places: Mapping[str, Path], channel: Channel) -> list[Saved]:
    """Return the finished checkpoints in the directories of all ranks, by ascending step.

    Args:
        places: the directories that the run saves to, as for :func:`.manifest.names_in`.
        channel: all ranks of the job; every rank must call.
    """
    everyone = all_gather_checked(channel, "looking for other runs", partial(look_for_runs, places, channel), Seen)
    return saved_on_all(everyone, places, channel)


def look_for_runs(places: Mapping[str, Path], channel: Channel) -> Seen:
    """Return the checkpoints that are visible to this rank, for a warning; empty if a directory is unreadable."""
    with suppress(StorageError):  # A later save or resume raises it.
        return look(places, channel)
    return Seen([])


def look(places: Mapping[str, Path], channel: Channel) -> Seen:
    """Return the checkpoints that are visible to this rank; the coordinator also reads which runs saved them.

    Raises:
        StorageError: the operating system denied access.
    """
    names = names_in(places)
    return Seen(names, read_saved(places, names) if channel.rank == 0 else [])


def saved_on_all(everyone: Sequence[Seen], places: Mapping[str, Path], channel: Channel) -> list[Saved]:
    """Return the finished checkpoints in the directories of all ranks, as :func:`saved_in`.

    If the coordinator cannot see some checkpoints, the first ranks that can read the manifests, in one more exchange.

    Args:
        everyone: the checkpoints that are visible to each rank.
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
        others = all_gather_checked(channel, "reading other disks", lambda: read_saved(places, own), list[Saved])
        found = [*found, *(one for saved in others for one in saved)]
    return sorted(found, key=lambda one: (one.step, one.run.id))


def read_saved(places: Mapping[str, Path], names: Iterable[str]) -> list[Saved]:
    """Return the finished ones among named checkpoints, by ascending step."""
    found: list[Saved] = []
    for path in (located(name, places) for name in names):
        with suppress(CheckpointError, StorageError):
            step, run = read_saved_by(path)
            if step == parse_step(path):
                found.append(Saved(step, run))
    return sorted(found, key=lambda one: (one.step, one.run.id))


def continue_or_branch(manifest: Manifest, saved: Sequence[Saved], here: bool, named: bool) -> tuple[RunRecord, str]:
    """Return the record of a run that resumes a checkpoint, and a warning about other runs, which is normally empty.

    Args:
        manifest: the manifest of the checkpoint.
        saved: the checkpoints in the output directory of this run.
        here: whether the checkpoint is in this output directory.
        named: whether a user named the checkpoint.
    """
    own = manifest.saved_by
    newer = [one for one in saved if one.step > manifest.step]
    continues = bool(own.id) and here and not newer
    run = own if continues else new_run([*own.branches, Branch(own.id, manifest.step)])
    others = [one for one in saved if not _is_before(one, manifest)]
    if newer and named:
        return run, (
            f"{_run(run)} begins at step {manifest.step} of {_run(own)}, and its output directory contains newer "
            f"checkpoints: {_listed(newer)}. Until {_run(run)} has saved a later step, resume_from_checkpoint: true "
            f"resumes checkpoint-{newer[-1].step} of {_run(newer[-1].run)}. Use another output_dir to keep runs apart."
        )
    if others and not newer:
        return run, (
            f"The output directory contains checkpoints of several runs: {_listed(others)} next to "
            f"checkpoint-{manifest.step} of {_run(own)}, which is resumed. To resume another run, name its checkpoint "
            "in resume_from_checkpoint. Use another output_dir to keep runs apart."
        )
    return run, ""


def new_run_warning(run: RunRecord, saved: Sequence[Saved], output_dir: Path) -> str:
    """Return a warning for a new run if its output directory contains checkpoints of other runs, else an empty text."""
    if not saved:
        return ""
    return (
        f"{_run(run)} starts from the beginning, and {output_dir} contains checkpoints of other runs: "
        f"{_listed(saved)}. Until this run has saved a later step, resume_from_checkpoint: true resumes "
        f"checkpoint-{saved[-1].step} of {_run(saved[-1].run)}. Use another output_dir to keep runs apart."
    )


def _is_before(one: Saved, manifest: Manifest) -> bool:
    """Return whether a checkpoint is an ancestor of the manifest's checkpoint, or that checkpoint itself."""
    own = manifest.saved_by
    until = {branch.run: branch.step for branch in own.branches} | {own.id: manifest.step}
    return one.step <= until.get(one.run.id, -1)


def _listed(saved: Sequence[Saved]) -> str:
    """Return a text such as ``checkpoint-5, checkpoint-6 of run A; checkpoint-4 of run B``."""
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
    """Return parallel degrees above one as text, such as ``tp=2 pp=2``; ``dp=1`` for a single rank.

    The text is empty if no degrees are recorded, as in conversions of open weights.
    """
    text = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
    return text or ("dp=1" if degrees else "")
