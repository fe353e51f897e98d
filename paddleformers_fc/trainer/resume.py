"""Which checkpoint a run resumes from.

All ranks look, for they may have output directories on different disks, and all take the same step: the newest of which
somebody sees every file. A directory that is not a finished checkpoint, or is one on some disks only, is passed over
with a warning that names it, if the newest one was asked for; if it was asked for by its name, it is an error. One that
a rank may not look at is an error in any case: to go on from an older one because of a mount would lose steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, run_on_all
from paddleformers_fc.distributed.rank_format import format_ranks
from paddleformers_fc.errors import CheckpointError, Diverged, NotACheckpoint
from paddleformers_fc.execute.opening import check_complete
from paddleformers_fc.formats.checkpoint import not_a_flex_checkpoint
from paddleformers_fc.formats.flex import MAPPING_NAME
from paddleformers_fc.formats.registry import format_of
from paddleformers_fc.storage.commit import recover
from paddleformers_fc.storage.files import exists, is_directory, list_directory
from paddleformers_fc.storage.manifest import MANIFEST_NAME, candidates, candidates_in
from paddleformers_fc.storage.names import UNFINISHED, parse_hidden, parse_step
from paddleformers_fc.storage.paths import AnyPath

_MOST_NAMED = 3
_NONE: Mapping[str, str] = MappingProxyType({})


def newest(
    output_dir: Path, channel: Channel, level: str = "size", threads: int = 4, without: Collection[str] = ()
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the newest finished checkpoint of a run.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job; every rank must call.
        level: as for :func:`check_complete`.
        threads: as for :func:`check_complete`.
        without: names of directories that are known to be unusable.
    Returns:
        of one and the same step on every rank, a path in this rank's output directory, or None; and every newer
        directory that is passed over, with the reason, which is the same on every rank and names ranks that differ.
    Raises:
        StorageError: the operating system refused to look.
    """
    passed_over: list[tuple[Path, str]] = []
    for name in _names(output_dir, channel):
        if name in without:
            continue
        try:
            check_complete(output_dir / name, channel, level, threads)
        except (CheckpointError, Diverged) as error:
            passed_over.append((output_dir / name, error.in_one_line()))
        else:
            return output_dir / name, passed_over
    return None, passed_over


def _names(output_dir: Path, channel: Channel) -> list[str]:
    """The names under which any rank sees a checkpoint or what may be one, the newest first."""
    first = _listed(output_dir, channel)
    replaced = {rank for name, rank in first.items() if parse_hidden(Path(name)) is not None}
    if replaced:

        def recover_own() -> None:
            if channel.rank in replaced:
                recover(output_dir)

        run_on_all(channel, "recovering checkpoints", recover_own)
        first = _listed(output_dir, channel)
    return [path.name for path in candidates(output_dir / name for name in first)]


def _listed(output_dir: Path, channel: Channel) -> dict[str, int]:
    """The first rank that sees each candidate, by name."""

    def look() -> list[str]:
        return [path.name for path in candidates_in(output_dir)]

    first: dict[str, int] = {}
    for rank, names in enumerate(all_gather_checked(channel, "looking for checkpoints", look, list[str])):
        for name in names:
            first.setdefault(name, rank)
    return first


def newest_or_begin(output_dir: Path, channel: Channel, warn: Callable[[str], None]) -> Path | None:
    """As :func:`newest`, for a run that begins anew where nothing was saved.

    A run that begins anew beside checkpoints that are damaged, or that another format holds, would save over them.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job; every rank must call.
        warn: gets a line for every directory that is passed over, on every rank.

    Raises:
        NotACheckpoint: the same on every rank: there are checkpoints, and none can be resumed from.
    """
    found, passed_over = newest(output_dir, channel)
    for path, why in passed_over:
        warn(f"{path} cannot be resumed from and is passed over: {why}")
    held = _held(output_dir, channel) if found is None and passed_over else []
    if held:
        raise NotACheckpoint(
            f"{output_dir} holds checkpoints, and none can be resumed from. A run from the beginning would write "
            "over them.",
            where=str(output_dir),
            evidence=[*held, *(f"{path.name}: {why}" for path, why in passed_over)],
            next_step="Put back what is missing, or name a checkpoint in resume_from_checkpoint. To begin anew, "
            "name another output_dir, or set overwrite_output_dir: true.",
        )
    return found


def _held(output_dir: Path, channel: Channel) -> list[str]:
    """What the ranks see in an output directory with nothing to resume from; empty directories do not count."""

    def look() -> list[str]:
        seen = [path for path in candidates_in(output_dir) if is_directory(path) and list_directory(path)]
        return [_kind_of(path) for path in seen]

    ranks: dict[str, list[int]] = {}
    for rank, lines in enumerate(all_gather_checked(channel, "looking for checkpoints", look, list[str])):
        for line in lines:
            ranks.setdefault(line, []).append(rank)
    return [
        line if len(seers) == channel.world_size else f"{line} ({format_ranks(seers)})" for line, seers in ranks.items()
    ]


def _kind_of(directory: Path) -> str:
    """What a directory that cannot be resumed from is, by the names in it alone."""
    if exists(directory / MANIFEST_NAME):
        return f"{directory.name} is damaged"
    found = format_of(directory)
    return f"{directory.name} has no {MANIFEST_NAME}" if found is None else f"{directory.name} {found.predicate}"


def newest_or_refuse(
    output_dir: Path, channel: Channel, warn: Callable[[str], None], unusable: Mapping[str, str] = _NONE
) -> Path:
    """As :func:`newest_or_begin`, for a run that must resume.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job; every rank must call.
        warn: as for :func:`newest_or_begin`.
        unusable: directories that have failed verification since, by name, with the reasons.

    Raises:
        NotACheckpoint: the same on every rank: there is none, with the reason for every directory passed over.
    """
    found, passed_over = newest(output_dir, channel, without=unusable)
    for path, why in passed_over:
        warn(f"{path} cannot be resumed from and is passed over: {why}")
    if found is None:
        raise NotACheckpoint(
            f"{output_dir} has no finished checkpoint to resume from.",
            where=str(output_dir),
            evidence=[
                *(f"{name}: {why}" for name, why in unusable.items()),
                *(f"{path.name}: {why}" for path, why in passed_over),
            ],
            next_step="Name a checkpoint in resume_from_checkpoint, or remove that key to start from the beginning.",
        )
    return found


def named(directory: AnyPath, channel: Channel) -> AnyPath:
    """The checkpoint that a user named, if any rank sees that it is one. Every rank must call.

    Raises:
        NotACheckpoint: it is none; the error says what it is instead, as the first rank sees it.
    """
    seen = all_gather_checked(channel, f"looking for {directory.name}", lambda: exists(directory / MANIFEST_NAME), bool)

    def refuse() -> None:
        if channel.rank == 0:
            refuse_no_checkpoint(directory)

    if not any(seen):
        run_on_all(channel, f"looking for {directory.name}", refuse)
    return directory


def refuse_no_checkpoint(directory: AnyPath) -> None:
    """Tell what is wrong with a directory that was named in ``resume_from_checkpoint``, by the names in it alone.

    Raises:
        NotACheckpoint: it does not exist, holds open weights, is Paddle's or an unfinished checkpoint, or has no
            manifest.
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
    other = format_of(directory)
    if other is not None:
        raise not_a_flex_checkpoint(other, directory, choose)
    unfinished = is_unfinished(directory)
    raise NotACheckpoint(
        f"{directory} is an unfinished checkpoint." if unfinished else f"{directory} is not a flex checkpoint.",
        where=str(directory),
        evidence=[f"{MANIFEST_NAME}, which is written last, is not there"],
        next_step=choose
        or _advice_from_deeper(directory)
        or "Set resume_from_checkpoint: true for the newest finished one in output_dir.",
    )


def is_unfinished(directory: AnyPath) -> bool:
    """Whether a directory without a manifest is what a save left that did not come to its end."""
    beside = parse_hidden(directory)
    return (beside is not None and beside[1] == UNFINISHED) or exists(directory / MAPPING_NAME)


def _advice_from_deeper(directory: AnyPath) -> str:
    """For a directory with output directories in it, as the demo's: some of the checkpoints in those."""
    if not isinstance(directory, Path):
        return ""
    deeper = (path for above in ("*", "*/*") for path in directory.glob(f"{above}/checkpoint-*/{MANIFEST_NAME}"))
    some = sorted(str(path.parent) for path in islice(deeper, _MOST_NAMED))
    return f"Name a checkpoint inside it, such as {', '.join(some)}." if some else ""


def _checkpoints_in(directory: AnyPath) -> list[str]:
    if not is_directory(directory):
        return []
    steps = {parse_step(path): path for path in list_directory(directory) if exists(path / MANIFEST_NAME)}
    return [steps[step].name for step in sorted(step for step in steps if step is not None)]
