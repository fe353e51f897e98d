"""``flex_checkpoint.json``: the content of a finished checkpoint, and its verification.

The manifest is written last. A directory without one is not a checkpoint. It lists every file with its size and
digest: a missing, truncated, exchanged or altered file is found before a model reads it. One of the files is the index,
with the checksums of blocks and the places of tensors (``formats.index``). The manifest has a checksum of itself.

Reading is strict: another version, an unknown field and a path that leaves the directory are refused. A newer writer
may add fields that this version ignores (:func:`.json_io.ignored_extensions`). Verification has three levels. ``off``
checks nothing. ``size`` makes one ``stat`` per file and compares the checksums of documents, which are all files
without tensors. ``full`` hashes all bytes in a few threads, with 1 MiB of memory per thread, 4 MiB for a remote
checkpoint. One error lists all faults of a checkpoint. At every level a document is compared with its checksum when its
content is used (:func:`read_listed`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import msgspec
import xxhash

from paddleformers_fc.errors import CheckpointError, Corrupt, Diverged, FormatError, NotACheckpoint, OptionError
from paddleformers_fc.storage import files
from paddleformers_fc.storage.block_checksums import COMPARED_AT_ONCE, compare_blocks, compare_documents
from paddleformers_fc.storage.checksum import FileChecksum, FileRecord, is_document, record_faults, size_fault
from paddleformers_fc.storage.json_io import (
    decode_typed,
    ignored_extensions,
    read_document,
    read_recorded,
    require_seal,
)
from paddleformers_fc.storage.paths import ASIDE, LOCK_NAME, AnyPath, parse_hidden, parse_step
from paddleformers_fc.storage.remote import RemoteStatus

MANIFEST_NAME = "flex_checkpoint.json"
"""The manifest's name inside a checkpoint."""

FORMAT = "flex_checkpoint"
VERSION = 2
LEVELS = ("off", "size", "full")
"""The levels of :func:`verify_files`."""

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
"""The longest manifest that is read: that of a checkpoint of 50 TB."""

_PARTIAL_NAME = f".{MANIFEST_NAME}.part"
_RESERVED = frozenset({MANIFEST_NAME, _PARTIAL_NAME, LOCK_NAME})
TRAINER_DIRECTORY = "trainer"
"""The directory of a checkpoint that contains the state of a Trainer."""

Status = os.stat_result | RemoteStatus

_SHARD_FILE = re.compile(r"rank-([0-9]+)(-[0-9]+)?\.safetensors")
"""The names of files with tensors, in the directories of all roles."""
_GENERATORS = re.compile(rf"{TRAINER_DIRECTORY}/rng-([0-9]{{5,9}})\.json")
_END = b"\n"
"""The last byte of a manifest, after the JSON, so that every truncation is detected."""
_ANOTHER = "The manifest was damaged or edited. Restore it or use another checkpoint."
_OUTSIDE = "is reached through a link that leaves the checkpoint"
_NO_CHECKSUMS: Mapping[str, FileChecksum] = MappingProxyType({})
RESTORE = "Restore these files or use another checkpoint."
"""The advice for files that are not what was written."""

CHOOSE_COPY = (
    "Resume from another checkpoint, or choose the copy of one pipeline stage: name this checkpoint in "
    "resume_from_checkpoint with flex_tied: first or last, or run paddleformers-fc export --tied first|last."
)
"""The next step for diverged copies of tied tensors."""


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step of an earlier run from which a run was resumed.

    Attributes:
        run: id of the earlier run; empty where its checkpoint has none.
        step: the step.
    """

    run: str
    step: int


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that saved a checkpoint.

    Attributes:
        id: the same in all checkpoints of the run, restarts included.
        branches: the runs that it goes back to, first to last.
    """

    id: str
    branches: list[Branch]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the run and of the runs that it goes back to."""
        return self.id, *(one.run for one in self.branches)


UNKNOWN_RUN = RunRecord("", [])
"""The run of a checkpoint that does not record one."""


class SaveOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time and host of the commit of a checkpoint; informative.

    Attributes:
        time: UTC, as in ``2026-11-23T06:30:12Z``.
        host: name of the coordinator's host.
    """

    time: str
    host: str


UNKNOWN_ORIGIN = SaveOrigin("", "")
"""The origin of a checkpoint that does not record one."""


class DivergedTie(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tied tensor whose copies were saved with different values.

    Attributes:
        copies: names of the copies by pipeline stage, first to last.
        differences: one line per weight or state that differs, with the ranks of both copies.
    """

    copies: list[str]
    differences: list[str]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A finished checkpoint's description of itself.

    Attributes:
        format: always ``"flex_checkpoint"``.
        version: of this format; readers refuse other versions.
        written_by: program and version that saved it.
        step: optimizer steps done.
        consumed_samples: training samples seen.
        world_size: number of ranks that saved it.
        parallel: degree per parallel axis, for the reader; loading does not need it.
        family: model family whose mapping was used.
        files: every file but the manifest itself.
        differences: where ranks held different numbers of the same part of a tensor, one line each.
        ties: tied tensors whose copies differ. Such a checkpoint is not whole.
        saved_by: the run that saved it, with an empty id if no Trainer did.
        saved_at: when and where it was committed; both empty in conversions of formats that do not record it.

    The last four are absent on disk where they are empty.
    """

    # Only plain defaults are left out of the file.
    format: str = msgspec.field(default_factory=lambda: FORMAT)
    version: int = msgspec.field(default_factory=lambda: VERSION)
    written_by: str
    step: int
    consumed_samples: int
    world_size: int
    parallel: dict[str, int]
    family: str
    files: list[FileRecord]
    differences: list[str] = msgspec.field(name="differing_replicas", default_factory=list)
    ties: list[DivergedTie] = msgspec.field(name="diverged_ties", default_factory=list)
    saved_by: RunRecord = msgspec.field(name="run", default=UNKNOWN_RUN)
    saved_at: SaveOrigin = msgspec.field(name="origin", default=UNKNOWN_ORIGIN)

    def record_of(self, name: str) -> FileRecord | None:
        """Return the record of a file by its path; None if the manifest does not list it."""
        return next((one for one in self.files if one.path == name), None)


class _Sealed(Manifest, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """The document on disk: the manifest and a checksum of it, xxh3_128 of its encoding with sorted keys."""

    seal: str


class _Head(msgspec.Struct, frozen=True):
    """The fields that determine whether this version reads the others, and the version that does."""

    format: str
    version: int
    written_by: str = "another program"


class _Run(msgspec.Struct, frozen=True):
    """The fields that identify a save."""

    step: int
    run: RunRecord = UNKNOWN_RUN


_sealed = msgspec.json.Decoder(_Sealed)
_heads = msgspec.json.Decoder(_Head)
_runs = msgspec.json.Decoder(_Run)
_documents = msgspec.json.Decoder(dict[str, Any])


def read_manifest(directory: AnyPath) -> Manifest:
    """Read and validate the manifest of a checkpoint, without a look at its files.

    Args:
        directory: ``checkpoint-N``.

    Raises:
        NotACheckpoint: there is no such directory or no manifest in it.
        FormatError: another format or version, a field of the wrong type, a path that leaves the directory.
        Corrupt: the manifest does not match its own checksum.
        StorageError: the operating system refused to read it.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = read_document(path, MAX_MANIFEST_BYTES)
    except Corrupt as error:
        raise NotACheckpoint(
            f"{directory} is not a finished checkpoint: it has no {MANIFEST_NAME}.",
            where=str(directory),
            next_step="Choose a finished checkpoint; the manifest is written last, so this one may be half-written.",
        ) from error
    _check_head(path, raw)
    sealed = decode_typed(_sealed, raw, str(path), _ANOTHER)
    manifest = Manifest(**{field: getattr(sealed, field) for field in Manifest.__struct_fields__})
    seal = manifest_seal(manifest)
    # Other fields, and optional ones that are there and empty, are sealed as they are written.
    if ignored_extensions(raw, _Sealed.__struct_encode_fields__, str(path)) or sealed.seal != seal:
        document = decode_typed(_documents, raw, str(path), _ANOTHER)
        seal = _digest({name: value for name, value in document.items() if name != "seal"})
    require_seal(path, sealed.seal, seal, _ANOTHER)
    faults = _faults(manifest)
    if faults:
        raise FormatError(f"{path} lists invalid files.", where=str(path), evidence=faults, next_step=_ANOTHER)
    if not raw.endswith(_END):
        # The JSON is complete, but the file is not what was written.
        raise Corrupt(f"{path} is truncated: its last byte is missing.", where=str(path), next_step=_ANOTHER)
    return manifest


def read_saved_by(directory: AnyPath) -> tuple[int, RunRecord]:
    """Return step and run of a checkpoint for a message, without a look at the other fields of its manifest.

    Raises:
        CheckpointError: there is no manifest of this format.
        StorageError: the operating system refused to read it.
    """
    path = directory / MANIFEST_NAME
    raw = read_document(path, MAX_MANIFEST_BYTES)
    _check_head(path, raw)
    found = decode_typed(_runs, raw, str(path), _ANOTHER)
    return found.step, found.run


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, in one step and synced: it is there as a whole or not at all.

    Raises:
        FormatError: the manifest could not be read back: a path that leaves the directory, a file listed twice, ...
        StorageError: the operating system refused.
    """
    raw = encode_manifest(manifest, directory / MANIFEST_NAME)
    partial = directory / _PARTIAL_NAME
    files.remove_file(partial)
    files.write_file(partial, raw)
    files.rename(partial, directory / MANIFEST_NAME)
    files.fsync_directory(directory)


def encode_manifest(manifest: Manifest, path: Path = Path(MANIFEST_NAME)) -> bytes:
    """Return the manifest's file.

    Args:
        manifest: of a checkpoint.
        path: the file, for errors.
    Raises:
        FormatError: the manifest could not be read back.
    """
    values = {field: getattr(manifest, field) for field in Manifest.__struct_fields__}
    try:
        raw = msgspec.json.encode(_Sealed(**values, seal=manifest_seal(manifest)))
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path} cannot be written: {error}.", where=str(path)) from error
    _check_head(path, raw)
    faults = _faults(decode_typed(_sealed, raw, str(path), _ANOTHER))
    if faults:
        raise FormatError(f"{path} would list invalid files.", where=str(path), evidence=faults)
    return msgspec.json.format(raw, indent=1) + _END


def read_listed(directory: AnyPath, manifest: Manifest, name: str, most: int | None = None) -> bytes:
    """Return the bytes of a document after comparing them with the manifest's checksum, at every verification level.

    Args:
        directory: ``checkpoint-N``.
        manifest: as read from it.
        name: the document's path relative to the directory.
        most: bound on its length in bytes; None for the recorded size.

    Raises:
        Corrupt: the document is missing or altered, or the manifest does not list it.
        FormatError: it is longer than the bound, or not a regular file.
        StorageError: it cannot be read.
    """
    record = manifest.record_of(name)
    if record is None:
        raise Corrupt(
            f"{directory} is a checkpoint without {name}.",
            where=str(directory),
            evidence=[f"the manifest does not list {name}"],
            next_step="Use another checkpoint.",
        )
    path = directory / name
    if Surroundings(directory).look_at(record)[1] == _OUTSIDE:
        raise FormatError(f"{path} {_OUTSIDE}.", where=str(path), next_step=RESTORE)
    return read_recorded(directory, record, record.size if most is None else most, RESTORE)


def verify_files(
    directory: AnyPath,
    manifest: Manifest,
    level: str,
    *,
    threads: int = COMPARED_AT_ONCE,
    recorded: Mapping[str, FileChecksum] = _NO_CHECKSUMS,
    around: Surroundings | None = None,
) -> None:
    """Check the files of a checkpoint against its manifest.

    Args:
        directory: ``checkpoint-N``.
        manifest: as read from it.
        level: ``"off"`` checks nothing. ``"size"`` checks that every file is there, inside the directory and of its
            size, that no other file of a save is beside them, and the checksums of documents. ``"full"`` also compares
            the checksums of all bytes.
        threads: how many threads read and hash.
        recorded: the checksums of blocks, by path: a damaged file of these is reported with its damaged blocks.
        around: looks at the files.

    Raises:
        Corrupt: with every fault of the checkpoint as evidence.
        OptionError: the level is unknown.
        StorageError: the operating system refused to look or to read, and nothing else is wrong.
    """
    check_level(level)
    if level == "off":
        return
    faulty = (around or Surroundings(directory)).faults(manifest.files)
    strangers = extra_files(directory, manifest)
    hashed = [one for one in manifest.files if one.path not in faulty and (level == "full" or is_document(one.path))]
    found = compare_documents(directory, [one for one in hashed if is_document(one.path) or one.path not in recorded])
    blocks = [recorded[one.path] for one in hashed if not is_document(one.path) and one.path in recorded]
    found.add(compare_blocks(directory, [(one, range(one.count)) for one in blocks], threads=threads))
    found.faults[:0] = [*faulty.values(), *strangers]
    advice = repair_advice(bool(strangers), len(found.evidence) > len(strangers))
    found.raise_if_found(f"{directory} is damaged", directory, advice)


def check_level(level: str) -> None:
    """Refuse a verification level that is none of :data:`LEVELS`.

    Raises:
        OptionError: the level is unknown.
    """
    if level not in LEVELS:
        raise OptionError(
            f"The verification level {level!r} is unknown.",
            evidence=[f"known: {', '.join(LEVELS)}"],
            next_step="Give one of them.",
        )


def repair_advice(strangers: bool, damaged: bool) -> str:
    """Return the advice for files that do not belong to a checkpoint, and for its damaged files."""
    if not strangers:
        return RESTORE
    if not damaged:
        return "Move these files away."
    return "Move away what does not belong to it, and restore the other files or use another checkpoint."


def check_newest(directory: AnyPath, manifest: Manifest) -> None:
    """Refuse a checkpoint that is resumed, and kept as the newest one, only where a user names it.

    Args:
        directory: ``checkpoint-N``, or a directory that such a checkpoint was moved aside to.
        manifest: as read from it.

    Raises:
        Corrupt: its name contradicts its step.
        Diverged: it was saved with diverged copies of tied tensors.
    """
    beside = parse_hidden(directory)
    step = parse_step(directory if beside is None else beside[0])
    if step is not None and step != manifest.step:
        raise Corrupt(
            f"{directory} contains step {manifest.step}: rename it to checkpoint-{manifest.step} if that is free.",
            where=str(directory),
            next_step="Or name it in resume_from_checkpoint.",
        )
    check_not_diverged(directory, manifest)


def check_not_diverged(directory: AnyPath, manifest: Manifest) -> None:
    """Refuse a checkpoint whose manifest records diverged copies of tied tensors.

    Args:
        directory: ``checkpoint-N``.
        manifest: as read from it.

    Raises:
        Diverged: with every weight and state that differs.
    """
    if manifest.ties:
        raise Diverged(
            f"{directory} was saved with diverged copies of tied tensors.",
            where=str(directory),
            evidence=[line for tie in manifest.ties for line in tie.differences],
            next_step=CHOOSE_COPY,
        )


def newest_checkpoint(*directories: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint that can be resumed, by the files visible to this process, without changing any.

    A checkpoint is usable if its manifest can be read, its files have the recorded sizes and its documents the recorded
    checksums. A crash during the replacement by a newer save of the same step can leave a checkpoint under a hidden
    name (see ``commit``). Then that directory is returned.

    Args:
        directories: with checkpoints of one run; they need not exist.

    Returns:
        as :func:`first_usable`.

    Raises:
        StorageError: the operating system refused access.
    """

    def check(candidate: Path) -> None:
        manifest = read_manifest(candidate)
        check_newest(candidate, manifest)
        verify_files(candidate, manifest, "size")

    return first_usable(candidates(path for one in directories for path in candidates_in(one)), check)


def first_usable(ordered: Iterable[Path], check: Callable[[Path], None]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first checkpoint that passes a check.

    A fault of the checkpoint itself, such as a missing file or a dangling link, is a reason to skip it. Missing
    permissions and failing devices are no evidence about the checkpoint. A stop is better than the resume of an older
    one because of a transient network fault.

    Args:
        ordered: the candidates, newest first.
        check: raises a ``CheckpointError`` or ``Diverged`` for a checkpoint that cannot be resumed.

    Returns:
        the path, or None; and every candidate before it with the reason why it is skipped.

    Raises:
        StorageError: the operating system refused access.
    """
    skipped: list[tuple[Path, str]] = []
    for candidate in ordered:
        try:
            check(candidate)
        except (CheckpointError, Diverged) as error:
            skipped.append((candidate, error.in_one_line()))
        else:
            return candidate, skipped
    return None, skipped


def candidates_in(output_dir: Path) -> list[Path]:
    """As :func:`candidates`, for the entries of a directory, including dangling links, which are reported.

    Raises:
        StorageError: the operating system refused to look.
    """
    return [
        path for path in candidates(files.list_directory(output_dir)) if files.is_directory(path) or files.is_link(path)
    ]


def candidates(directories: Iterable[Path]) -> list[Path]:
    """Return the directories with names of checkpoints, highest step first; of one step the plain name first."""
    ranked: list[tuple[int, int, str, Path]] = []
    for path in directories:
        beside = parse_hidden(path)
        aside = beside is not None and beside[1] == ASIDE
        step = parse_step(beside[0] if beside is not None and aside else path)
        if step is not None:
            ranked.append((-step, int(aside), path.name, path))
    return [path for *_, path in sorted(ranked)]


def names_in(places: Mapping[str, Path]) -> list[str]:
    """Return the names of the candidates in several directories, in the order of :func:`candidates`.

    Ranks exchange these names, because the directories may have other paths on other ranks; :func:`located` finds the
    path of a name.

    Args:
        places: the directories by a name, which precedes those of their entries; it may be empty.

    Raises:
        StorageError: the operating system refused to look.
    """
    found = (Path(place, path.name) for place, one in places.items() for path in candidates_in(one))
    return [str(path) for path in candidates(found)]


def located(name: str, places: Mapping[str, Path]) -> Path:
    """Return the path of a name of :func:`names_in` on this rank."""
    place = Path(name)
    return places[place.parent.name] / place.name


def generators_rank(path: str) -> int | None:
    """Return the rank whose random generators a file of a checkpoint contains; None for any other file."""
    found = _GENERATORS.fullmatch(path)
    return None if found is None else int(found[1])


def manifest_seal(manifest: Manifest) -> str:
    """Return the manifest's checksum of itself: equal for two checkpoints only if they are of one save."""
    return _digest(manifest)


def _digest(document: Manifest | dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(document, order="sorted"))


def _check_head(path: AnyPath, raw: bytes) -> None:
    head = decode_typed(_heads, raw, str(path), _ANOTHER)
    if head.format != FORMAT or head.version != VERSION:
        raise FormatError(
            f"{path} has the format {head.format!r} version {head.version}, which cannot be read here.",
            where=str(path),
            evidence=[f"written by {head.written_by}", f"can be read: {FORMAT!r} version {VERSION}"],
            next_step="Read it with the version that wrote it, and export it from there.",
        )


def _faults(manifest: Manifest) -> list[str]:
    """Return the faults of the manifest itself."""
    faults: list[str] = []
    for name in ("step", "consumed_samples", "world_size"):
        if getattr(manifest, name) < 0:
            faults.append(f"{name} is {getattr(manifest, name)}")
    seen: set[str] = set()
    for checksum in manifest.files:
        faults.extend(f"{checksum.path!r} {fault}" for fault in record_faults(checksum))
        if checksum.path in _RESERVED:
            faults.append(f"{checksum.path!r} is a name that the format keeps for itself")
        if checksum.path in seen:
            faults.append(f"{checksum.path!r} is listed twice")
        seen.add(checksum.path)
    return [*faults, *_rank_faults(manifest)]


def _rank_faults(manifest: Manifest) -> Iterator[str]:
    """Yield contradictions between the number of ranks and the names of files."""
    ranks, stored = f"world_size is {manifest.world_size}", set[int]()
    for path in (checksum.path for checksum in manifest.files):
        found = _SHARD_FILE.fullmatch(path.rpartition("/")[2])
        rank = generators_rank(path) if found is None else int(found[1])
        if rank is not None and rank >= manifest.world_size:
            yield f"{path} is of rank {rank}, and {ranks}"
        if found is None and rank is not None:
            stored.add(rank)
    if len(stored) not in (0, manifest.world_size):
        yield f"random generators of {len(stored)} ranks are listed, and {ranks}"


class Surroundings:
    """Looks at files of a checkpoint, and at the links that lead to them. A store has no links.

    Args:
        directory: ``checkpoint-N``.

    Attributes:
        seen: the last status of every file that was looked at, by path relative to the directory.
    """

    def __init__(self, directory: AnyPath) -> None:
        self.seen: dict[str, Status] = {}
        self._directory = directory
        self._leaves: dict[PurePosixPath, bool] = {}

    def look_at(self, record: FileRecord) -> tuple[Status | None, str]:
        """Return the status of a file, and the fault that can be detected without reading it; empty if there is none.

        Raises:
            StorageError: the operating system refused to look.
        """
        path, name = self._directory / record.path, PurePosixPath(record.path)
        status = files.stat_path(path, follow_links=False)
        is_linked = isinstance(status, os.stat_result) and stat.S_ISLNK(status.st_mode)
        if (is_linked and self._link_leaves(name)) or any(map(self._parent_leaves, name.parents[:-1])):
            return None, _OUTSIDE
        status = files.stat_path(path) if is_linked else status
        if status is not None:
            self.seen[record.path] = status
        return status, size_fault(status, record.size)

    def faults(self, records: Collection[FileRecord]) -> dict[str, str]:
        """Return the faults of files that can be detected without reading them, by path; errors as :meth:`look_at`."""
        found = files.map_paths(lambda one: self.look_at(one)[1], records, self._directory)
        return {one.path: f"{one.path} {fault}" for one, fault in zip(records, found, strict=True) if fault}

    def _parent_leaves(self, name: PurePosixPath) -> bool:
        if name not in self._leaves:
            path = self._directory / str(name)
            self._leaves[name] = isinstance(path, Path) and files.is_link(path) and self._link_leaves(name)
        return self._leaves[name]

    def _link_leaves(self, name: PurePosixPath) -> bool:
        root, path = os.path.realpath(str(self._directory)), os.path.realpath(str(self._directory / str(name)))
        return path != root and not path.startswith(root.rstrip("/") + "/")


def extra_files(directory: AnyPath, manifest: Manifest) -> list[str]:
    """Return files of a save that the manifest does not list: remains of another save.

    These are files with tensors where others are listed, or whose name is that of a rank, and states of a Trainer.
    """
    listed = {checksum.path for checksum in manifest.files}
    own = {(PurePosixPath(path).parent.name, ".safetensors") for path in listed if path.endswith(".safetensors")}
    own.add((TRAINER_DIRECTORY, ".json"))
    names = [
        f"{folder.name}/{path.name}"
        for folder in files.subdirectories(directory)
        for path in files.list_directory(folder)
        if (folder.name, path.suffix) in own or _SHARD_FILE.fullmatch(path.name)
    ]
    return [
        f"{name} does not belong to this checkpoint: the manifest does not list it"
        for name in names
        if name not in listed
    ]
