"""Which checkpoint a run resumes from.

One rank looks and all ranks take its answer, so that they never resume from different steps. A directory that is not a
finished checkpoint is passed over with a warning that names it, if the newest one was asked for; if it was asked for by
its name, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paddleformers_fc.catalog.flex import MAPPING_NAME
from paddleformers_fc.catalog.huggingface import INDEX_NAME, SINGLE_NAME
from paddleformers_fc.errors import NotACheckpoint
from paddleformers_fc.execute.channel import Channel, agree
from paddleformers_fc.storage.commit import recover
from paddleformers_fc.storage.files import exists, is_directory, list_directory
from paddleformers_fc.storage.manifest import MANIFEST_NAME, newest_checkpoint
from paddleformers_fc.storage.names import UNFINISHED, parse_beside, parse_step
from paddleformers_fc.storage.places import Place


def newest(output_dir: Path, channel: Channel, warn: Callable[[str], None]) -> Path | None:
    """The newest finished checkpoint of a run; None if it has none.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job; every rank must call.
        warn: gets one line per directory that is passed over, on the first rank.

    Raises:
        StorageError: the operating system refused to look.
    """

    def look() -> bytes:
        recover(output_dir)
        found, skipped = newest_checkpoint(output_dir)
        for path, why in skipped:
            warn(f"{path} cannot be resumed from and is passed over: {why}")
        return str(found).encode() if found is not None else b""

    answer = _first_rank(channel, "looking for the newest checkpoint", look)
    return Path(answer.decode()) if answer else None


def newest_or_refuse(output_dir: Path, channel: Channel, warn: Callable[[str], None]) -> Path:
    """As :func:`newest`, for a run that must resume.

    Raises:
        NotACheckpoint: there is none.
    """
    found = newest(output_dir, channel, warn)
    if found is None:
        raise NotACheckpoint(
            f"{output_dir} has no finished checkpoint to resume from.",
            where=str(output_dir),
            next_step="Name a checkpoint in resume_from_checkpoint, or remove that key to start from the beginning.",
        )
    return found


def named(directory: Place, channel: Channel) -> Place:
    """The checkpoint that a user named, if the first rank sees that it is one. Every rank must call.

    Raises:
        NotACheckpoint: it is none; the error says what it is instead.
    """

    def look() -> bytes:
        refuse_no_checkpoint(directory)
        return b""

    _first_rank(channel, f"looking for {directory.name}", look)
    return directory


def refuse_no_checkpoint(directory: Place) -> None:
    """Tell what is wrong with a directory that was named in ``resume_from_checkpoint``, by the names in it alone.

    Raises:
        NotACheckpoint: it does not exist, holds open weights, is an unfinished checkpoint, or has no manifest.
    """
    if exists(directory / MANIFEST_NAME):
        return
    inside = _checkpoints_in(directory)
    choose = f"Name one of its checkpoints: {', '.join(inside)}." if inside else ""
    if not (exists(directory) or is_directory(directory)):
        beside = _checkpoints_in(directory.parent)
        evidence = [f"{directory.parent} has {', '.join(beside)}"] if beside else []
        advice = "Name a checkpoint-N directory, or set resume_from_checkpoint: true for the newest in output_dir."
        raise NotACheckpoint(f"{directory} does not exist.", where=str(directory), evidence=evidence, next_step=advice)
    weights = [name for name in (INDEX_NAME, SINGLE_NAME) if exists(directory / name)]
    if weights:
        raise NotACheckpoint(
            f"{directory} holds open weights and is no flex checkpoint.",
            where=str(directory),
            evidence=[f"{name} is there, {MANIFEST_NAME} is not" for name in weights],
            next_step=choose or "To start from open weights, name them in model_name_or_path and resume from nothing.",
        )
    unfinished = is_unfinished(directory)
    raise NotACheckpoint(
        f"{directory} is an unfinished checkpoint." if unfinished else f"{directory} is not a flex checkpoint.",
        where=str(directory),
        evidence=[f"{MANIFEST_NAME}, which is written last, is not there"],
        next_step=choose or "Set resume_from_checkpoint: true for the newest finished one in output_dir.",
    )


def is_unfinished(directory: Place) -> bool:
    """Whether a directory without a manifest is what a save left that did not come to its end."""
    beside = parse_beside(directory)
    return (beside is not None and beside[1] == UNFINISHED) or exists(directory / MAPPING_NAME)


def _checkpoints_in(directory: Place) -> list[str]:
    if not is_directory(directory):
        return []
    steps = {parse_step(path): path for path in list_directory(directory) if exists(path / MANIFEST_NAME)}
    return [steps[step].name for step in sorted(step for step in steps if step is not None)]


def _first_rank(channel: Channel, doing: str, work: Callable[[], bytes]) -> bytes:
    return agree(channel, doing, lambda: work() if channel.rank == 0 else b"")[0]
