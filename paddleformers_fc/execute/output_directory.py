"""Inspect and clean an output directory: its checkpoints, and the stale directories and backups next to them.

A save deletes staging directories whose locks are free. Others, and files of other programs, are removed only if a user
confirms it. Checkpoints, their backups under hidden names and directories of running saves are never removed.

Facts come only from manifests and headers, with one small read per file; no tensor is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.errors import CheckpointError, Diverged, FlexError, NotACheckpoint, OptionError, StorageError
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.flex import FLEX, read_config
from paddleformers_fc.formats.inspection import JobFacts, RoleFacts, TensorFacts, job_facts, list_tensors, role_facts
from paddleformers_fc.formats.registry import format_of, is_resumable, open_checkpoint, open_stored, saved_run
from paddleformers_fc.formats.stock_run import check_finished
from paddleformers_fc.storage.commit import Leftover, leftovers, remove_leftover
from paddleformers_fc.storage.files import exists, files_within, is_directory, stat_path
from paddleformers_fc.storage.manifest import MANIFEST_NAME, candidates_in, check_newest, read_manifest, verify_files
from paddleformers_fc.storage.paths import AnyPath, parse_step
from paddleformers_fc.text import fold, likely_meant, similar_word


class LeftoverFacts(msgspec.Struct, frozen=True):
    """A stale directory or a backup of a save.

    Attributes:
        name: its name in the output directory.
        why: its description, one sentence.
        bytes: total size of its files.
        removable: whether it may be removed if a user confirms.
    """

    name: str
    why: str
    bytes: int
    removable: bool


class Cleaned(msgspec.Struct, frozen=True):
    """The report of :func:`clean`.

    Attributes:
        path: the output directory.
        removed: directories that were removed.
        left: directories that stay.
    """

    path: str
    removed: list[LeftoverFacts]
    left: list[LeftoverFacts]


def clean(output_dir: Path, confirmed: Callable[[LeftoverFacts], bool]) -> Cleaned:
    """Remove the stale directories and backups that a user confirms.

    Args:
        output_dir: the directory that contains the checkpoints.
        confirmed: returns whether a directory may be removed.
    Raises:
        OptionError: the directory is itself a checkpoint.
        StorageError: the operating system refused to list the directory itself.
    """
    check_no_checkpoint(output_dir)
    removed: list[LeftoverFacts] = []
    left: list[LeftoverFacts] = []
    for facts in _leftover_facts(output_dir):
        is_gone = facts.removable and confirmed(facts) and _removed(output_dir / facts.name)
        (removed if is_gone else left).append(facts)
    return Cleaned(str(output_dir), removed, left)


def check_no_checkpoint(output_dir: Path) -> None:
    """Check that an output directory is not a checkpoint.

    Raises:
        OptionError: the directory is a checkpoint.
    """
    if exists(output_dir / MANIFEST_NAME):
        raise OptionError(
            "The directory is a checkpoint.",
            where=str(output_dir),
            next_step="Name the output directory that contains it.",
        )


def facts_of(leftover: Leftover) -> LeftoverFacts:
    """Return the facts of a stale directory or backup."""
    return LeftoverFacts(leftover.path.name, leftover.why, _size(leftover.path), leftover.removable)


def _leftover_facts(output_dir: Path) -> list[LeftoverFacts]:
    return [facts_of(one) for one in leftovers(output_dir)]


def _removed(path: Path) -> bool:
    try:
        return remove_leftover(path)
    except StorageError:
        return False  # It stays, and is reported.


def _size(directory: Path) -> int:
    """Return the total size of the files in a directory; 0 if it does not exist."""
    try:
        seen = [stat_path(path) for path in files_within(directory)]
    except StorageError:
        return 0
    return sum(one.st_size for one in seen if isinstance(one, os.stat_result))


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A directory with the name of a checkpoint.

    Attributes:
        name: its name.
        step: the step in its manifest; None if the manifest cannot be read.
        run: id of the run that saved it; empty if it is not recorded.
        fault: why ``resume_from_checkpoint: true`` skips it; empty if it does not. Tensors are not read. A complete
            checkpoint of another format is resumed only if there is no flex checkpoint.
        kind: name of its format; empty if no format recognises it.
        world_size: number of ranks that saved it; 0 if it is not recorded.
        parallel: degree per parallel axis.
        bytes: total size of its files.
        time: when it was saved, UTC; empty if it is not recorded.
    """

    name: str
    step: int | None = None
    run: str = ""
    fault: str = ""
    kind: str
    world_size: int = 0
    parallel: dict[str, int] = {}
    bytes: int
    time: str = ""


class OutputFacts(msgspec.Struct, frozen=True):
    """The content of an output directory.

    Attributes:
        path: the directory, as the user named it.
        checkpoints: its checkpoints, by descending step.
        leftovers: stale directories and backups.
    """

    path: str
    checkpoints: list[CheckpointFacts]
    leftovers: list[LeftoverFacts]


class ListedFacts(OutputFacts, frozen=True):
    """The content of an output directory, and of the local tier of its run.

    Attributes:
        path: the directory, as the user named it.
        checkpoints: its checkpoints, by descending step.
        leftovers: stale directories and backups.
        local: the local tier on this machine; None if there is none.
    """

    local: OutputFacts | None = None


def list_output(directory: Path, local: Path | None = None) -> ListedFacts:
    """Return the checkpoints, stale directories and backups of an output directory.

    Args:
        directory: the output directory.
        local: the local tier of its run on this machine; None without one.
    Raises:
        OptionError: the directory is itself a checkpoint.
        StorageError: the operating system refused to list the directory itself.
    """
    check_no_checkpoint(directory)
    found = _content(directory)
    return ListedFacts(found.path, found.checkpoints, found.leftovers, None if local is None else _content(local))


def is_newest_faulty(found: OutputFacts) -> bool:
    """Return whether the newest checkpoint of an output directory is damaged or incomplete; its local tier is ignored.

    A node of several has only some files in its local tier.
    """
    return bool(found.checkpoints and found.checkpoints[0].fault)


def directories_below(directory: Path) -> list[str]:
    """Return the directories up to two levels below that contain checkpoints, as relative paths."""
    return sorted({str(path.parent.relative_to(directory)) for path in checkpoints_below(directory)})


def checkpoints_below(directory: Path) -> list[Path]:
    """Return the directories with names of checkpoints, inside of directories one or two levels below."""
    named = (path for above in ("*", "*/*") for path in directory.glob(f"{above}/checkpoint-*"))
    return [path for path in named if parse_step(path) is not None and is_directory(path)]


def output_facts(directory: Path) -> OutputFacts | None:
    """Return the checkpoints, stale directories and backups of a directory; None if it contains none.

    Raises:
        StorageError: the operating system refused to list it.
    """
    found = _content(directory)
    return found if found.checkpoints or found.leftovers else None


def _content(directory: Path) -> OutputFacts:
    named = [path for path in candidates_in(directory) if parse_step(path) is not None]
    return OutputFacts(str(directory), [_checkpoint(path) for path in named], _leftover_facts(directory))


def _checkpoint(path: Path) -> CheckpointFacts:
    try:
        return _readable_checkpoint(path)
    except StorageError as error:
        return CheckpointFacts(name=path.name, fault=error.in_one_line(), kind="", bytes=0)


def _readable_checkpoint(path: Path) -> CheckpointFacts:
    format = format_of(path)
    kind = format.name if format is not None else ""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        size = _size(path)
        if is_resumable(path):
            return _of_other_format(path, kind, size)
        return CheckpointFacts(name=path.name, fault=error.in_one_line(), kind=kind, bytes=size)
    fault = ""
    try:
        check_newest(path, manifest)
        verify_files(path, manifest, "size")
    except (CheckpointError, Diverged) as error:
        fault = error.in_one_line()
    return CheckpointFacts(
        name=path.name,
        step=manifest.step,
        run=manifest.saved_by.id,
        fault=fault,
        kind=kind,
        world_size=manifest.world_size,
        parallel=manifest.parallel,
        bytes=sum(one.size for one in manifest.files),
        time=manifest.saved_at.time,
    )


def _of_other_format(path: Path, kind: str, size: int) -> CheckpointFacts:
    """Return the facts of a checkpoint in one of PaddleFormers' own formats, from the Trainer's files."""
    try:
        run = saved_run(path)
        check_finished(path, run.world_size)
    except CheckpointError as error:
        return CheckpointFacts(name=path.name, fault=error.in_one_line(), kind=kind, bytes=size)
    return CheckpointFacts(
        name=path.name, step=run.step, kind=kind, world_size=run.world_size, parallel=run.parallel, bytes=size
    )


_CONFIG_KEYS = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "moe_num_experts",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)

OUTPUT_DIRECTORY = "output_directory"

_MAX_SIMILAR = 5
"""Maximum number of similar names in an error."""


class Inspection(msgspec.Struct, frozen=True):
    """The facts that ``inspect`` reports.

    Attributes:
        kind: name of the format, or ``output_directory``.
        path: the directory, as the user named it.
        job: the job that saved it; None for open weights.
        model: the keys of ``config.json`` that determine the model's size.
        files: number of files.
        bytes: total size of the files.
        roles: the stored tensors by role.
        tensors: the stored tensors that match; None without a pattern.
        output: the checkpoints, stale directories and backups in it; None if there are none.
    """

    kind: str
    path: str
    job: JobFacts | None
    model: dict[str, Any]
    files: int
    bytes: int
    roles: dict[str, RoleFacts]
    tensors: list[TensorFacts] | None = None
    output: OutputFacts | None = None


def inspect_directory(directory: AnyPath, pattern: str | None = None) -> Inspection:
    """Return the facts about a directory.

    Args:
        directory: a flex checkpoint, a directory of open weights, or an output directory.
        pattern: a shell pattern of the stored tensors to list; None lists none.
    Raises:
        OptionError: no stored tensor matches.
        FlexError: the directory cannot be opened.
    """
    output = output_facts(directory) if isinstance(directory, Path) else None
    try:
        opened = open_stored(directory)
    except NotACheckpoint:
        if output is None or pattern is not None:
            raise
        return Inspection(OUTPUT_DIRECTORY, str(directory), None, {}, 0, 0, {}, output=output)
    tensors = None if pattern is None else list_tensors(opened, pattern)
    if pattern is not None and not tensors:
        raise OptionError(
            f"No stored tensor matches {pattern!r}.",
            where=str(directory),
            evidence=_similar_names(pattern, (name for stored in opened.catalog.roles.values() for name in stored)),
            next_step=f"A pattern must match the complete name; write '*{pattern.strip('*')}*'. Optimizer states end "
            "in a suffix such as .moment1_0.",
        )
    return _facts(opened, directory, tensors, output)


def _similar_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return a line of names that contain the pattern, or are similar to it in some component; indices are folded."""
    text, known = pattern.strip("*").lower(), list(names)
    similar = fold(name for name in known if text in name.lower())
    if not similar:
        meant = likely_meant(text, known)
        if meant:
            return [meant]
        part = similar_word(text, {part for name in known for part in name.split(".")})
        similar = fold(name for name in known if part in name.split("."))
    return [f"similar: {', '.join(similar[:_MAX_SIMILAR])}"] if similar and text else []


def damaged_facts(directory: AnyPath) -> Inspection | None:
    """Return the facts of a damaged checkpoint, or only those in its manifest; None if that cannot be read either.

    Files and sizes are the recorded ones.
    """
    with suppress(FlexError):
        return _facts(open_checkpoint(directory, "off"), directory)
    with suppress(FlexError):
        manifest = read_manifest(directory)
        sizes = [one.size for one in manifest.files]
        config: dict[str, Any] = {}
        with suppress(FlexError):
            config = read_config(directory)
        return Inspection(
            FLEX.name,
            str(directory),
            job_facts(manifest),
            _model_facts(config),
            len(sizes),
            sum(sizes),
            {},
        )
    return None


def _model_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in _CONFIG_KEYS if key in config}


def _facts(
    opened: OpenedCheckpoint,
    directory: AnyPath,
    tensors: list[TensorFacts] | None = None,
    output: OutputFacts | None = None,
) -> Inspection:
    sizes = opened.file_sizes
    return Inspection(
        kind=opened.format.name,
        path=str(directory),
        job=job_facts(opened.commit_record),
        model=_model_facts(opened.config),
        files=len(sizes),
        bytes=sum(sizes.values()),
        roles=role_facts(opened),
        tensors=tensors,
        output=output,
    )
