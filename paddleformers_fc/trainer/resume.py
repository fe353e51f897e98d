"""Choose the checkpoint that a run resumes.

Ranks may have output directories on different disks. All ranks choose the same step: the newest one of which every file
is visible to some rank. An incomplete or damaged checkpoint is skipped with a warning if the newest one was requested,
and is an error if it was named. A directory without read permission is always an error: the resume of an older
checkpoint because of a failed mount would lose steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel, all_gather_checked, format_ranks, run_on_all
from paddleformers_fc.errors import CheckpointError, MismatchError, NotACheckpoint
from paddleformers_fc.execute.opening import check_complete
from paddleformers_fc.formats.checkpoint import MAPPING_NAME, not_a_flex_checkpoint
from paddleformers_fc.formats.registry import format_of, is_resumable, saved_run
from paddleformers_fc.formats.stock_run import refuse_unfinished
from paddleformers_fc.storage.commit import recover
from paddleformers_fc.storage.files import exists, is_directory, list_directory
from paddleformers_fc.storage.manifest import MANIFEST_NAME, candidates, candidates_in, first_usable
from paddleformers_fc.storage.paths import UNFINISHED, AnyPath, parse_hidden, parse_step

_DAMAGED = "is damaged"
_NOT_RESUMABLE = "not a checkpoint of another format"
_MOST_NAMED = 3


def find_newest(
    output_dir: Path, channel: Channel, without: Collection[str] = (), known: Collection[str] = ()
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the newest finished checkpoint of a run. Every rank must call.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job.
        without: names of unusable directories.
        known: names of checkpoints that are known to be complete; the same on every rank.
    Returns:
        a path in this rank's output directory, of the same step on every rank, or None; and the skipped newer
        directories with the reasons, which are the same on every rank.
    Raises:
        StorageError: the operating system refused access.
    """

    def check(path: Path) -> None:
        if path.name not in known:
            check_complete(path, channel)

    return first_usable((output_dir / name for name in _names(output_dir, channel) if name not in without), check)


def _names(output_dir: Path, channel: Channel) -> list[str]:
    """Return the names of all candidates that are visible to any rank, newest first."""
    visible_to = _visible_to(channel, lambda: [path.name for path in candidates_in(output_dir)])
    replaced = {ranks[0] for name, ranks in visible_to.items() if parse_hidden(Path(name)) is not None}
    if replaced:

        def recover_own() -> None:
            if channel.rank in replaced:
                recover(output_dir)

        run_on_all(channel, "recovering checkpoints", recover_own)
        visible_to = _visible_to(channel, lambda: [path.name for path in candidates_in(output_dir)])
    return [path.name for path in candidates(output_dir / name for name in visible_to)]


def _visible_to(channel: Channel, look: Callable[[], list[str]]) -> dict[str, list[int]]:
    """Return the ranks that report each line, in rising order."""
    ranks: dict[str, list[int]] = {}
    for rank, lines in enumerate(all_gather_checked(channel, "looking for checkpoints", look, list[str])):
        for line in lines:
            ranks.setdefault(line, []).append(rank)
    return ranks


def newest_or_begin(
    output_dir: Path, channel: Channel, warn: Callable[[str], None], config: Mapping[str, Any] | None = None
) -> Path | None:
    """Find the checkpoint of a run that starts from the beginning if nothing was saved. Every rank must call.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job.
        warn: receives a line for every directory that is skipped.
        config: the configuration of the live model, for checkpoints of other formats that have none.
    Raises:
        NotACheckpoint: the same on every rank: there are checkpoints, and none can be resumed. A run from the beginning
            would overwrite them.
    """
    found, skipped = _find(output_dir, channel, warn, config)
    kinds = _kinds(output_dir, channel) if found is None and skipped else {}
    if kinds:
        raise NotACheckpoint(
            f"{output_dir} has checkpoints, and none can be resumed. A run from the beginning would overwrite them.",
            where=str(output_dir),
            evidence=[_reason(path.name, kinds.get(path.name, ""), why) for path, why in skipped],
            next_step="Restore what is missing, or name a checkpoint in resume_from_checkpoint. To start from the "
            "beginning, name another output_dir, or set overwrite_output_dir: true.",
        )
    return found


def _reason(name: str, kind: str, why: str) -> str:
    """Return one line about a directory that is skipped; a checkpoint of another format needs no fault beside it."""
    if kind and _DAMAGED not in kind:
        return f"{name}{kind}"
    return f"{name}{kind}: {why.removeprefix(f'{name} {_DAMAGED}: ')}"


def _find(
    output_dir: Path,
    channel: Channel,
    warn: Callable[[str], None],
    config: Mapping[str, Any] | None,
    without: Collection[str] = (),
) -> tuple[Path | None, list[tuple[Path, str]]]:
    found, skipped = find_newest(output_dir, channel, without=without)
    if found is None:
        found, reasons = newest_of_other_formats([path for path, _ in skipped], channel, config)
        skipped = [(path, reasons.get(path.name, why)) for path, why in skipped if path != found]
        if found is not None:
            warn(f"{output_dir} has no flex checkpoint. {found}, which {_kind_of(found)}, is resumed.")
            skipped = [(path, why) for path, why in skipped if path.name in reasons]
    for path, why in skipped:
        warn(f"{path} cannot be resumed and is skipped: {why}")
    return found, skipped


def newest_of_other_formats(
    directories: Iterable[Path], channel: Channel, config: Mapping[str, Any] | None = None
) -> tuple[Path | None, dict[str, str]]:
    """Find the newest complete checkpoint of another format. Every rank must call.

    Args:
        directories: candidates, newest first; the same on every rank.
        channel: all ranks of the job.
        config: as for :func:`newest_or_begin`.
    Returns:
        it, and by name the faults of newer checkpoints of other formats.
    """
    reasons: dict[str, str] = {}
    for path in directories:
        faults = all_gather_checked(channel, f"looking at {path.name}", partial(_fault_of_other, path, config), str)
        fault = next(filter(None, faults), "")
        if not fault:
            return path, reasons
        if fault != _NOT_RESUMABLE:
            reasons[path.name] = fault
    return None, reasons


def _fault_of_other(path: Path, config: Mapping[str, Any] | None) -> str:
    """Return the fault of a checkpoint of another format; empty if it is complete."""
    if not is_resumable(path):
        return _NOT_RESUMABLE
    try:
        refuse_unfinished(path, saved_run(path, config).world_size)
    except CheckpointError as error:
        return error.in_one_line()
    return ""


def _kinds(output_dir: Path, channel: Channel) -> dict[str, str]:
    """Return the kinds of the candidates by name, with the ranks that have them; empty directories are omitted."""

    def look() -> list[str]:
        seen = [path for path in candidates_in(output_dir) if is_directory(path) and list_directory(path)]
        return [f"{path.name}/{_kind_of(path)}" for path in seen]

    kinds: dict[str, str] = {}
    for line, ranks in _visible_to(channel, look).items():
        name, _, kind = line.partition("/")
        where = "" if len(ranks) == channel.world_size else f" ({format_ranks(ranks)})"
        kinds[name] = f"{kinds[name]}," if name in kinds else ""
        kinds[name] += f" {kind}{where}"
    return kinds


def _kind_of(directory: Path) -> str:
    """Return the kind of a directory that cannot be resumed, from the names in it alone."""
    if exists(directory / MANIFEST_NAME):
        return _DAMAGED
    found = format_of(directory)
    return f"has no {MANIFEST_NAME}" if found is None else found.predicate


def newest_or_refuse(
    output_dir: Path,
    channel: Channel,
    warn: Callable[[str], None],
    unusable: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Find the checkpoint of a run that must resume. Every rank must call.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job.
        warn: as for :func:`newest_or_begin`.
        unusable: names of directories that have failed verification before, with the reasons.
        config: as for :func:`newest_or_begin`.
    Raises:
        NotACheckpoint: the same on every rank: there is none, with the reason for every directory that is skipped.
    """
    unusable = unusable or {}
    found, skipped = _find(output_dir, channel, warn, config, unusable)
    if found is None:
        reasons = [*unusable.items(), *((path.name, why) for path, why in skipped)]
        raise NotACheckpoint(
            f"{output_dir} has no finished checkpoint to resume from.",
            where=str(output_dir),
            evidence=[f"{name}: {why}" for name, why in reasons],
            next_step="Name a checkpoint in resume_from_checkpoint, or remove that key to start from the beginning.",
        )
    return found


def with_new_run_advice(error: MismatchError) -> MismatchError:
    """Return the error about the newest checkpoint, which no user named, with the way to a new run."""
    advice = "It is the newest checkpoint in output_dir: to start a new run, set another output_dir."
    next_step = f"{error.next_step} {advice}".strip()
    return type(error)(error.what, where=error.where, evidence=error.evidence, next_step=next_step)


def require_named(directory: AnyPath, channel: Channel) -> AnyPath:
    """Return the checkpoint that a user named if its manifest is visible to any rank. Every rank must call.

    Raises:
        NotACheckpoint: it is visible to no rank; the error describes the directory of the first rank.
    """
    what = f"looking for {directory.name}"

    def look() -> bool:
        return exists(directory / MANIFEST_NAME) or is_resumable(directory)

    def look_aside() -> bool:
        """Look again, after a commit that a crash has interrupted gets its names back."""
        if isinstance(directory, Path) and is_directory(directory.parent):
            recover(directory.parent)
        return look()

    seen = all(all_gather_checked(channel, what, look, bool))
    if not (seen or any(all_gather_checked(channel, what, look_aside, bool))):
        run_on_all(channel, what, lambda: None if channel.rank else refuse_no_checkpoint(directory))
    return directory


def refuse_no_checkpoint(directory: AnyPath) -> None:
    """Refuse a directory that was named in ``resume_from_checkpoint`` if it has no manifest.

    Raises:
        NotACheckpoint: with the kind of the directory, from the names in it alone.
    """
    if exists(directory / MANIFEST_NAME) or is_resumable(directory):
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
        evidence=[f"missing: {MANIFEST_NAME}, which is written last"],
        next_step=choose
        or _advice_from_deeper(directory)
        or "Set resume_from_checkpoint: true for the newest finished one in output_dir.",
    )


def is_unfinished(directory: AnyPath) -> bool:
    """Return whether a directory without a manifest is the rest of an interrupted save."""
    beside = parse_hidden(directory)
    return (beside is not None and beside[1] == UNFINISHED) or exists(directory / MAPPING_NAME)


def _advice_from_deeper(directory: AnyPath) -> str:
    """Name some checkpoints in the output directories below a directory, such as that of the demo."""
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
