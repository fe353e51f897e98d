"""Choose the checkpoint that a run resumes, and open it; and which run saved which checkpoint.

Output directories of ranks may be on different disks. All ranks choose the same step: the newest checkpoint of which
every file is visible to some rank, in ``output_dir`` or in the local tier (:mod:`.tiers`). An automatic resume skips
incomplete and damaged checkpoints with a warning; a named checkpoint must be valid. A directory without read permission
is always an error, because resuming an older checkpoint after a failed mount would lose steps.

Cost: two exchanges. In the first, the coordinator broadcasts the metadata of its newest checkpoint (or the named one)
and the runs of all checkpoints that it sees. In the second, all ranks open it and exchange the names on other disks.

Every manifest records the id of its run and the runs that it branches from. A restart that resumes the last checkpoint
continues the run. A resume from an older step, or into another output directory, starts a new run that branches from
the old one. An output directory may then contain checkpoints of both runs, and the newest step may belong to the old
run. The log therefore names both runs, at the branch and at every later automatic resume.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.distributed.channel import ALONE, Channel, all_gather_checked, broadcast, run_on_all
from paddleformers_fc.errors import CheckpointError, Diverged, MismatchError, NotACheckpoint, StorageError
from paddleformers_fc.execute.opening import Sent, open_newest, open_on_all_ranks, open_sent, read_metadata
from paddleformers_fc.formats.checkpoint import MAPPING_NAME, OpenedCheckpoint, not_a_flex_checkpoint
from paddleformers_fc.formats.registry import format_of, is_resumable, saved_run
from paddleformers_fc.formats.stock_run import check_finished
from paddleformers_fc.storage.commit import recover
from paddleformers_fc.storage.files import exists, is_directory, list_directory
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    Branch,
    Manifest,
    RunRecord,
    candidates,
    candidates_in,
    first_usable,
    located,
    names_in,
    newest_checkpoint,
    read_saved_by,
)
from paddleformers_fc.storage.paths import UNFINISHED, AnyPath, parse_hidden, parse_step

_SEARCHING = "looking for checkpoints"
_DAMAGED = "is damaged"
_NOT_RESUMABLE = "not a checkpoint of another format"
_MOST_NAMED = 3
_LOCAL = "local"
"""The name of the local tier among the directories of a run."""


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a run resumes.

    Args:
        path: the path in this rank's output directory, or as it was named.
        opened: the opened checkpoint, so that the load does not read its metadata again; None for the newest one of
            another format.
        named: whether a user named it; otherwise it is the newest one.
        seconds: duration of the choice.
        saved: the finished checkpoints of the output directory, if the choice has read them.
    """

    path: AnyPath
    opened: OpenedCheckpoint | None = None
    named: bool = False
    seconds: float = 0.0
    saved: Sequence[Saved] | None = None


@dataclass(frozen=True)
class Search:
    """Where to look for the newest checkpoint of a run.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job.
        warn: receives one line per reason, with the directories that are skipped for it.
        config: the configuration of the live model, for checkpoints of other formats that have none.
        documents: documents to read together with the metadata.
        local_dir: the local tier; None without one.
    """

    output_dir: Path
    channel: Channel
    warn: Callable[[str], None]
    config: Mapping[str, Any] | None = None
    documents: Collection[str] = ()
    local_dir: Path | None = None

    @property
    def places(self) -> dict[str, Path]:
        """The directories of the run."""
        return places_of(self.output_dir, self.local_dir)


def places_of(output_dir: Path, local_dir: Path | None) -> dict[str, Path]:
    """Return the directories of a run by prefix, as for :func:`.manifest.names_in`; ranks exchange prefixed names."""
    return {"": output_dir} if local_dir is None else {"": output_dir, _LOCAL: local_dir}


def find_newest(
    output_dir: Path, channel: Channel, known: Collection[str] = ()
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the newest finished checkpoint of a run. Every rank must call.

    Args:
        output_dir: where the run saves.
        channel: all ranks of the job.
        known: names of checkpoints that need no check; the same on every rank.
    Returns:
        its path in this rank's output directory, or None; and the skipped newer directories with the reasons. Step and
        reasons are the same on every rank.
    Raises:
        StorageError: the operating system denied access.
    """

    def check(path: Path) -> None:
        if path.name not in known:
            open_newest(path, channel)

    places = {"": output_dir}
    return first_usable(_paths(_names_on_all(places, channel), places, channel), check)


def _open_usable(
    search: Search, without: Collection[Path]
) -> tuple[OpenedCheckpoint | None, list[tuple[Path, str]], list[Saved]]:
    """Open the newest usable checkpoint. Return it, the skipped ones, and the finished checkpoints of all ranks.

    If all ranks see the manifest of the coordinator's newest checkpoint, they share a disk, and only the coordinator
    lists the directory. With a local tier all ranks list both directories in the exchange that opens the checkpoint,
    because another node may have newer ones.
    """
    channel, places = search.channel, search.places

    def list_own() -> _Visible:
        listed = _visible(places, channel)
        first = next((name for name in listed.names if located(name, places) not in without), "")
        if first and parse_hidden(Path(first)) is None:
            with suppress(CheckpointError):  # The reasons below include it.
                listed.sent = read_metadata(located(first, places), search.documents)
                listed.first = first
        return listed

    listed, opened = broadcast(channel, _SEARCHING, list_own, _Visible), dict[Path, OpenedCheckpoint]()
    failed: dict[Path, CheckpointError | Diverged] = {}
    everyone: Sequence[list[str]] = ()
    if listed.sent is not None and listed.sent.metadata is not None:
        first = located(listed.first, places)
        names = list if search.local_dir is None else partial(names_in, places)
        try:
            opening = open_sent(first, channel, listed.sent, names=names, as_newest=True)
        except (CheckpointError, Diverged) as error:
            failed[first] = error
        else:
            opened[first] = opening.checkpoint
            if search.local_dir is not None:
                everyone = opening.names
            elif opening.is_shared:
                return opened[first], [], listed.saved

    def open_next(path: Path) -> None:
        if path in failed:
            raise failed[path]
        if path not in opened:
            opened[path] = open_newest(path, channel, search.documents)

    everyone = everyone or _names_on_all(places, channel)
    paths = (path for path in _paths(everyone, places, channel) if path not in without)
    found, skipped = first_usable(paths, open_next)
    if found is None:
        return None, skipped, []
    return opened[found], skipped, _saved_on_all(listed, everyone, search)


def _saved_on_all(listed: _Visible, everyone: Sequence[list[str]], search: Search) -> list[Saved]:
    """Return the finished checkpoints of all ranks; the coordinator has read its own already."""
    return _gather_saved([listed, *map(_Visible, everyone[1:])], search.places, search.channel)


def _paths(everyone: Sequence[list[str]], places: Mapping[str, Path], channel: Channel) -> list[Path]:
    """Return the paths on this rank of all candidates that are visible to any rank, newest first."""
    first_ranks = {name: rank for rank, names in reversed([*enumerate(everyone)]) for name in names}
    replaced = {rank for name, rank in first_ranks.items() if parse_hidden(Path(name)) is not None}
    found = {name for names in everyone for name in names}
    if replaced:

        def put_back() -> None:
            for directory in places.values():
                recover(directory)

        run_on_all(channel, "recovering checkpoints", put_back if channel.rank in replaced else tuple)
        found = {name for names in _names_on_all(places, channel) for name in names}
    return [located(str(name), places) for name in candidates(map(Path, found))]


def _names_on_all(places: Mapping[str, Path], channel: Channel) -> list[list[str]]:
    """Return the names of the candidates that each rank sees."""
    return all_gather_checked(channel, _SEARCHING, partial(names_in, places), list[str])


def newest_or_begin(search: Search) -> Choice | None:
    """Open the newest checkpoint; return None if nothing was saved, so that the run starts anew. Every rank must call.

    Raises:
        NotACheckpoint: the same on every rank: there are checkpoints, and none can be resumed. A new run would
            overwrite them.
    """
    found, skipped = _find(search)
    kinds = _kinds(search) if found is None and skipped else {}
    if kinds:
        raise NotACheckpoint(
            f"{search.output_dir} has checkpoints, and none can be resumed. A new run would overwrite them.",
            where=str(search.output_dir),
            evidence=[_reason(path, kinds, search, why) for path, why in skipped],
            next_step="Restore the missing files, or name a checkpoint in resume_from_checkpoint. To start a new run, "
            "name another output_dir, or set overwrite_output_dir: true.",
        )
    return found


def _reason(path: Path, kinds: Mapping[str, str], search: Search, why: str) -> str:
    """Return one line about a skipped directory; for a checkpoint of another format, the format says enough."""
    if path.parent == search.local_dir:
        return f"{path}: {why}"
    name, kind = path.name, kinds.get(path.name, "")
    if kind and _DAMAGED not in kind:
        return f"{name} {kind}"
    return f"{name} {kind}: {why.removeprefix(f'{name} {_DAMAGED}: ')}"


def _find(search: Search, without: Collection[Path] = ()) -> tuple[Choice | None, list[tuple[Path, str]]]:
    opened, skipped, saved = _open_usable(search, without)
    found = None if opened is None else Choice(opened.catalog.root, opened, saved=saved)
    if found is None:
        stock = [path for path, _ in skipped if path.parent == search.output_dir]
        other, reasons = newest_of_other_formats(stock, search.channel, search.config)
        skipped = [(path, reasons.get(path.name, why)) for path, why in skipped if path != other]
        if other is not None:
            found = Choice(other)
            search.warn(f"{search.output_dir} has no flex checkpoint. Resuming {other}, which {_kind_of(other)}.")
            skipped = [(path, why) for path, why in skipped if path.name in reasons or path not in stock]
    same: dict[tuple[Path, str], list[str]] = {}
    for path, why in skipped:
        same.setdefault((path.parent, why), []).append(path.name)
    for (parent, why), names in same.items():
        be = "is" if len(names) == 1 else "are"
        search.warn(f"{parent / ', '.join(names)} cannot be resumed and {be} skipped: {why}")
    return found, skipped


def newest_of_other_formats(
    directories: Iterable[Path], channel: Channel, config: Mapping[str, Any] | None = None
) -> tuple[Path | None, dict[str, str]]:
    """Find the newest complete checkpoint of another format. Every rank must call.

    Args:
        directories: candidates, newest first; the same on every rank.
        channel: all ranks of the job.
        config: as for :class:`Search`.
    Returns:
        the checkpoint or None, and the faults of newer checkpoints of other formats by name.
    """
    reasons: dict[str, str] = {}
    for path in directories:
        faults = all_gather_checked(channel, f"checking {path.name}", partial(_fault_of_other, path, config), str)
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
        check_finished(path, saved_run(path, config).world_size)
    except CheckpointError as error:
        return error.in_one_line()
    return ""


def _kinds(search: Search) -> dict[str, str]:
    """Return the kinds of the candidates of all ranks by name; empty directories are omitted."""

    def own_kinds() -> dict[str, str]:
        seen = [path for path in candidates_in(search.output_dir) if is_directory(path) and list_directory(path)]
        return {path.name: _kind_of(path) for path in seen}

    everyone = all_gather_checked(search.channel, _SEARCHING, own_kinds, dict[str, str])
    return {name: kind for kinds in everyone for name, kind in kinds.items()}


def _kind_of(directory: Path) -> str:
    """Return the kind of a directory that cannot be resumed, from its file names alone."""
    if exists(directory / MANIFEST_NAME):
        return _DAMAGED
    found = format_of(directory)
    return f"has no {MANIFEST_NAME}" if found is None else found.predicate


def require_newest(search: Search, unusable: Mapping[Path, str] | None = None) -> Choice:
    """Open the checkpoint of a run that must resume. Every rank must call.

    Args:
        search: where to look.
        unusable: directories that have failed verification before, with the reasons.
    Raises:
        NotACheckpoint: the same on every rank: there is none. The error lists every skipped directory with its reason.
    """
    unusable = unusable or {}
    found, skipped = _find(search, unusable)
    if found is None:
        raise no_checkpoint(search.output_dir, [*unusable.items(), *skipped])
    return found


def no_checkpoint(output_dir: Path, reasons: Iterable[tuple[Path, str]]) -> NotACheckpoint:
    """Return the error for a run that must resume and has no checkpoint.

    Args:
        output_dir: where the run saves.
        reasons: the skipped directories, each with its reason.
    """
    evidence = [f"{path.name if path.parent == output_dir else path}: {why}" for path, why in reasons]
    next_step = "Name a checkpoint in resume_from_checkpoint, or remove that key to start from the beginning."
    if evidence:  # A new run would overwrite these directories, or be mixed with them.
        next_step = (
            f"Restore the files and check them with paddleformers-fc doctor {output_dir}, or name another checkpoint "
            "in resume_from_checkpoint. To start a new run, remove that key and set another output_dir."
        )
    return NotACheckpoint(
        f"{output_dir} has no finished checkpoint to resume from.",
        where=str(output_dir),
        evidence=evidence,
        next_step=next_step,
    )


def newest_without_changes(
    output_dir: Path, local_dir: Path | None = None
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the checkpoint that an automatic resume would take, and those that it would skip, as this process sees it.

    Nothing on disk changes: an interrupted commit is not recovered.
    """
    newest, skipped = newest_checkpoint(*places_of(output_dir, local_dir).values())
    if newest is not None or not skipped:
        return newest, skipped
    newest, reasons = newest_of_other_formats([path for path, _ in skipped if path.parent == output_dir], ALONE)
    found = [(path, reasons.get(path.name, why)) for path, why in skipped if path != newest]
    return newest, found if newest is None else [(path, why) for path, why in found if path.name in reasons]


def with_new_run_advice(error: MismatchError) -> MismatchError:
    """Return the error with advice on how to start a new run, for a checkpoint that the user did not name."""
    advice = "It is the newest checkpoint in output_dir: to start a new run, set another output_dir."
    next_step = f"{error.next_step} {advice}".strip()
    return type(error)(error.what, where=error.where, evidence=error.evidence, next_step=next_step)


def open_named(directory: AnyPath, verify: str, search: Search) -> Choice:
    """Open the checkpoint that a user named. Every rank must call.

    Args:
        directory: as it was named on this rank.
        verify: the verification level.
        search: the channel and the configuration of the live model.
    Raises:
        NotACheckpoint: no rank sees it; the error describes the directory.
    """
    channel, places = search.channel, search.places

    def list_own() -> _Visible:
        seen = _visible_or_empty(places, channel)
        seen.sent = read_metadata(directory, search.documents)
        return seen

    def names() -> list[str]:
        return _visible_or_empty(places, channel).names if channel.rank else []

    def config() -> Mapping[str, Any]:
        check_is_checkpoint(directory)
        return search.config or {}

    def restore_backup() -> bool:
        """Rename the backup that an interrupted commit has left; return whether the checkpoint is there now."""
        manifest = directory / MANIFEST_NAME
        if exists(manifest) or not (isinstance(directory, Path) and is_directory(directory.parent)):
            return False
        recover(directory.parent)
        return exists(manifest)

    try:
        listed = broadcast(channel, f"reading the metadata of {directory.name}", list_own, _Visible)
        opening = open_sent(directory, channel, listed.sent or Sent(), verify, config, names=names)
    except CheckpointError:
        if not any(all_gather_checked(channel, f"looking for {directory.name}", restore_backup, bool)):
            raise
        opened = open_on_all_ranks(directory, channel, verify, config=config, documents=search.documents)
        return Choice(directory, opened, named=True)
    return Choice(directory, opening.checkpoint, named=True, saved=_saved_on_all(listed, opening.names, search))


def check_is_checkpoint(directory: AnyPath) -> None:
    """Check that a directory named in ``resume_from_checkpoint`` is a checkpoint, by its file names alone.

    Raises:
        NotACheckpoint: it is not; with the kind of the directory.
    """
    if exists(directory / MANIFEST_NAME) or is_resumable(directory):
        return
    inside = _checkpoints_in(directory)
    choose = f"Name one of its checkpoints: {', '.join(inside)}." if inside else ""
    if not (exists(directory) or is_directory(directory)):
        siblings = _checkpoints_in(directory.parent)
        evidence = [f"{directory.parent} has {', '.join(siblings)}"] if siblings else []
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
    """Return whether a directory without a manifest was left by an interrupted save."""
    hidden = parse_hidden(directory)
    return (hidden is not None and hidden[1] == UNFINISHED) or exists(directory / MAPPING_NAME)


def _advice_from_deeper(directory: AnyPath) -> str:
    """Return advice that names checkpoints in output directories below this one, if there are any."""
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


class Saved(msgspec.Struct, frozen=True):
    """The step and the run of a finished checkpoint."""

    step: int
    run: RunRecord


class _Visible(msgspec.Struct, omit_defaults=True):
    """The checkpoints that are visible to a rank.

    Args:
        names: their names, see :func:`.manifest.names_in`.
        saved: the finished ones; only on the coordinator, which reads their manifests.
        first: in a search, the name of the newest candidate of the coordinator; empty without one.
        sent: the metadata of that one, or of the named one; None if it cannot be read.
    """

    names: list[str]
    saved: list[Saved] = []
    first: str = ""
    sent: Sent | None = None


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
    everyone = all_gather_checked(
        channel, "looking for other runs", partial(_visible_or_empty, places, channel), _Visible
    )
    return _gather_saved(everyone, places, channel)


def _visible_or_empty(places: Mapping[str, Path], channel: Channel) -> _Visible:
    """Return the checkpoints that are visible to this rank, for a warning; empty if a directory is unreadable."""
    with suppress(StorageError):  # A later save or resume raises it.
        return _visible(places, channel)
    return _Visible([])


def _visible(places: Mapping[str, Path], channel: Channel) -> _Visible:
    """Return the checkpoints that are visible to this rank; the coordinator also reads which runs saved them.

    Raises:
        StorageError: the operating system denied access.
    """
    names = names_in(places)
    return _Visible(names, _read_saved(places, names) if channel.rank == 0 else [])


def _gather_saved(everyone: Sequence[_Visible], places: Mapping[str, Path], channel: Channel) -> list[Saved]:
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
        others = all_gather_checked(channel, "reading other disks", lambda: _read_saved(places, own), list[Saved])
        found = [*found, *(one for saved in others for one in saved)]
    return sorted(found, key=lambda one: (one.step, one.run.id))


def _read_saved(places: Mapping[str, Path], names: Iterable[str]) -> list[Saved]:
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
            f"checkpoints: {_by_run(newer)}. Until {_run(run)} has saved a later step, resume_from_checkpoint: true "
            f"resumes checkpoint-{newer[-1].step} of {_run(newer[-1].run)}. Use another output_dir to keep runs apart."
        )
    if others and not newer:
        return run, (
            f"The output directory contains checkpoints of several runs: {_by_run(others)} next to "
            f"checkpoint-{manifest.step} of {_run(own)}, from which this run resumes. To resume another run, name "
            "its checkpoint in resume_from_checkpoint. Use another output_dir to keep runs apart."
        )
    return run, ""


def new_run_warning(run: RunRecord, saved: Sequence[Saved], output_dir: Path) -> str:
    """Return a warning for a new run if its output directory contains checkpoints of other runs, else an empty text."""
    if not saved:
        return ""
    return (
        f"{_run(run)} starts from the beginning, and {output_dir} contains checkpoints of other runs: "
        f"{_by_run(saved)}. Until this run has saved a later step, resume_from_checkpoint: true resumes "
        f"checkpoint-{saved[-1].step} of {_run(saved[-1].run)}. Use another output_dir to keep runs apart."
    )


def _is_before(one: Saved, manifest: Manifest) -> bool:
    """Return whether a checkpoint is an ancestor of the manifest's checkpoint, or that checkpoint itself."""
    own = manifest.saved_by
    until = {branch.run: branch.step for branch in own.branches} | {own.id: manifest.step}
    return one.step <= until.get(one.run.id, -1)


def _by_run(saved: Sequence[Saved]) -> str:
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


def locate_best(named: str, resumed: AnyPath, channel: Channel) -> str | None:
    """Return the path of the best checkpoint of a resumed run: its old path, or next to the resumed checkpoint.

    The output directory may have been moved, and a relative path depends on the working directory.

    Args:
        named: its path in the saved run.
        resumed: the checkpoint to resume.
        channel: all ranks of the job; every rank must call.

    Returns:
        the path on this rank; None if no rank finds the checkpoint.

    Raises:
        StorageError: the operating system denied access.
    """
    paths = [Path(named), *([resumed.with_name(Path(named).name)] if isinstance(resumed, Path) else [])]

    def find() -> int:
        return next((number for number, path in enumerate(paths, 1) if exists(path / MANIFEST_NAME)), 0)

    found = all_gather_checked(channel, "looking for the best checkpoint", find, int)
    chosen = found[channel.rank] or max(found)
    return str(paths[chosen - 1]) if chosen else None
