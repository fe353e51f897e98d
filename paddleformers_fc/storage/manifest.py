"""``flex_checkpoint.json``: the manifest of a finished checkpoint, and its verification.

The manifest is written last; a directory without one is not a checkpoint. It lists every file with its size and digest,
and contains a checksum of itself. The block checksums and the positions of tensors are in the index
(``formats.index``). Reading is strict: other versions, unknown fields and paths outside of the directory are rejected,
except for fields that a newer writer has marked as optional (:func:`.json_io.ignored_extensions`).

Verification has three levels. ``off`` checks nothing. ``size`` makes one ``stat`` per file and compares the checksums
of metadata files, which are all files without tensors. ``full`` hashes all bytes in a few threads, with 1 MiB of memory
per thread (4 MiB for a remote checkpoint). One error lists all faults. At every level a metadata file is compared with
its checksum when it is used (:func:`read_listed`).
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
from paddleformers_fc.storage.json_io import check_seal, decode_typed, ignored_extensions, read_document, read_recorded
from paddleformers_fc.storage.paths import ASIDE, LOCK_NAME, AnyPath, parse_hidden, parse_step
from paddleformers_fc.storage.remote import RemoteStatus

MANIFEST_NAME = "flex_checkpoint.json"
"""The manifest's name inside a checkpoint."""

FORMAT = "flex_checkpoint"
VERSION = 2
LEVELS = ("off", "size", "full")
"""The levels of :func:`verify_files`."""

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
"""Maximum size of a manifest: enough for a checkpoint of 50 TB."""

_PARTIAL_NAME = f".{MANIFEST_NAME}.part"
_RESERVED = frozenset({MANIFEST_NAME, _PARTIAL_NAME, LOCK_NAME})
TRAINER_DIRECTORY = "trainer"
"""The directory of a checkpoint that contains the Trainer's state."""

Status = os.stat_result | RemoteStatus

_SHARD_FILE = re.compile(r"rank-([0-9]+)(-[0-9]+)?\.safetensors")
"""The names of files with tensors, in the directory of each role."""
_GENERATORS = re.compile(rf"{TRAINER_DIRECTORY}/rng-([0-9]{{5,9}})\.json")
_END = b"\n"
"""The last byte of a manifest, after the JSON, by which any truncation is detected."""
_ANOTHER = "The manifest was damaged or edited. Restore it or use another checkpoint."
_OUTSIDE = "is behind a link that leaves the checkpoint"
_NO_CHECKSUMS: Mapping[str, FileChecksum] = MappingProxyType({})
RESTORE = "Restore these files or use another checkpoint."
"""The advice for files that differ from what was written."""

CHOOSE_COPY = (
    "Resume from another checkpoint, or choose the copy of one pipeline stage: name this checkpoint in "
    "resume_from_checkpoint with flex_tied: first or last, or run paddleformers-fc export --tied first|last."
)
"""The next step for diverged copies of tied tensors."""


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step of an earlier run from which a run was resumed.

    Attributes:
        run: id of the earlier run; empty if its checkpoint has none.
        step: the step.
    """

    run: str
    step: int


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that saved a checkpoint.

    Attributes:
        id: equal in all checkpoints of the run, including restarts.
        branches: the runs that it descends from, first to last.
    """

    id: str
    branches: list[Branch]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the run and of the runs that it descends from."""
        return self.id, *(one.run for one in self.branches)


UNKNOWN_RUN = RunRecord("", [])
"""The run of a checkpoint without a record of it."""


class SaveOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time and host of the commit of a checkpoint, for information only.

    Attributes:
        time: UTC, as in ``2026-11-23T06:30:12Z``.
        host: name of the coordinator's host.
    """

    time: str
    host: str


UNKNOWN_ORIGIN = SaveOrigin("", "")
"""The origin of a checkpoint without a record of it."""


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
        version: version of the format; readers reject other versions.
        written_by: program and version that saved it.
        step: optimizer steps done.
        consumed_samples: training samples seen.
        world_size: number of ranks that saved it.
        parallel: degree per parallel axis, for information only.
        family: model family whose mapping was used.
        files: every file except the manifest itself.
        differences: replicas that differed, one line each.
        ties: tied tensors whose copies differ. Such a checkpoint is not complete.
        saved_by: the run that saved it; its id is empty if no Trainer did.
        saved_at: when and where it was committed; empty in conversions of formats that do not record it.

    The last four are omitted from the file if they are empty.
    """

    # msgspec omits only plain defaults from the file, so these use factories.
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
    """The file's content: the manifest and its checksum, xxh3_128 of its encoding with sorted keys."""

    seal: str


class _Head(msgspec.Struct, frozen=True):
    """The fields that tell whether this version can read the rest, and which version can."""

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
    """Read and validate the manifest of a checkpoint, without checking its files.

    Args:
        directory: ``checkpoint-N``.

    Raises:
        NotACheckpoint: there is no such directory, or no manifest in it.
        FormatError: the format or version is unknown, a field has the wrong type, or a path leaves the directory.
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
            next_step="Choose a finished checkpoint; this one may be incomplete, because the manifest is written last.",
        ) from error
    _check_head(path, raw)
    sealed = decode_typed(_sealed, raw, str(path), _ANOTHER)
    manifest = Manifest(**{field: getattr(sealed, field) for field in Manifest.__struct_fields__})
    seal = manifest_seal(manifest)
    # Extension fields, and optional fields that are present but empty, are part of the seal as written.
    if ignored_extensions(raw, _Sealed.__struct_encode_fields__, str(path)) or sealed.seal != seal:
        document = decode_typed(_documents, raw, str(path), _ANOTHER)
        seal = _digest({name: value for name, value in document.items() if name != "seal"})
    check_seal(path, sealed.seal, seal, _ANOTHER)
    faults = _faults(manifest)
    if faults:
        raise FormatError(f"{path} lists invalid files.", where=str(path), evidence=faults, next_step=_ANOTHER)
    if not raw.endswith(_END):
        # The JSON is complete, but the file is truncated.
        raise Corrupt(f"{path} is truncated: its last byte is missing.", where=str(path), next_step=_ANOTHER)
    return manifest


def read_saved_by(directory: AnyPath) -> tuple[int, RunRecord]:
    """Return step and run of a checkpoint for a message, without validating the rest of its manifest.

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
    """Write the manifest of a checkpoint atomically and durably.

    Raises:
        FormatError: readers would reject the manifest, for example because a file is listed twice.
        StorageError: the operating system refused.
    """
    raw = encode_manifest(manifest, directory / MANIFEST_NAME)
    partial = directory / _PARTIAL_NAME
    files.remove_file(partial)
    files.write_file(partial, raw)
    files.rename(partial, directory / MANIFEST_NAME)
    files.fsync_directory(directory)


def encode_manifest(manifest: Manifest, path: Path = Path(MANIFEST_NAME)) -> bytes:
    """Return the content of the manifest file.

    Args:
        manifest: the manifest.
        path: the file, for errors.
    Raises:
        FormatError: readers would reject the manifest.
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
    """Read a metadata file, and compare it with the manifest's checksum.

    Args:
        directory: ``checkpoint-N``.
        manifest: the manifest of the directory.
        name: the file's path relative to the directory.
        most: maximum length in bytes; None for the recorded size.

    Raises:
        Corrupt: the file is missing or altered, or the manifest does not list it.
        FormatError: it is too long, or not a regular file.
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
        manifest: the manifest of the directory.
        level: ``"off"`` checks nothing. ``"size"`` checks that every file exists inside the directory with its size,
            that there are no files of other saves, and the checksums of metadata files. ``"full"`` also compares the
            checksums of all bytes.
        threads: number of threads that read and hash.
        recorded: block checksums by path; damaged files among these are reported with their damaged blocks.
        around: inspects the files.

    Raises:
        Corrupt: the checkpoint is damaged; lists every fault.
        OptionError: the level is unknown.
        StorageError: the operating system refused access, and nothing else is wrong.
    """
    check_level(level)
    if level == "off":
        return
    faulty = (around or Surroundings(directory)).faults(manifest.files)
    extra = extra_files(directory, manifest)
    hashed = [one for one in manifest.files if one.path not in faulty and (level == "full" or is_document(one.path))]
    found = compare_documents(directory, [one for one in hashed if is_document(one.path) or one.path not in recorded])
    blocks = [recorded[one.path] for one in hashed if not is_document(one.path) and one.path in recorded]
    found.add(compare_blocks(directory, [(one, range(one.count)) for one in blocks], threads=threads))
    found.faults[:0] = [*faulty.values(), *extra]
    advice = repair_advice(bool(extra), len(found.evidence) > len(extra))
    found.raise_if_found(f"{directory} is damaged", directory, advice)


def check_level(level: str) -> None:
    """Check that a verification level is one of :data:`LEVELS`.

    Raises:
        OptionError: the level is unknown.
    """
    if level not in LEVELS:
        raise OptionError(
            f"Unknown verification level {level!r}.",
            evidence=[f"known: {', '.join(LEVELS)}"],
            next_step="Choose one of these.",
        )


def repair_advice(has_extra: bool, is_damaged: bool) -> str:
    """Return the advice for files that do not belong to a checkpoint, and for its damaged files."""
    if not has_extra:
        return RESTORE
    if not is_damaged:
        return "Move these files away."
    return "Move away the files that do not belong to it, and restore the others or use another checkpoint."


def check_newest(directory: AnyPath, manifest: Manifest) -> None:
    """Check that a checkpoint may be resumed without being named, and kept as the newest one.

    Args:
        directory: ``checkpoint-N``, or its backup.
        manifest: the manifest of the directory.

    Raises:
        Corrupt: its name contradicts its step.
        Diverged: it was saved with diverged copies of tied tensors.
    """
    hidden = parse_hidden(directory)
    step = parse_step(directory if hidden is None else hidden[0])
    if step is not None and step != manifest.step:
        raise Corrupt(
            f"{directory} contains step {manifest.step}: rename it to checkpoint-{manifest.step} if that name is free.",
            where=str(directory),
            next_step="Or name it in resume_from_checkpoint.",
        )
    check_not_diverged(directory, manifest)


def check_not_diverged(directory: AnyPath, manifest: Manifest) -> None:
    """Check that a manifest records no diverged copies of tied tensors.

    Args:
        directory: ``checkpoint-N``.
        manifest: the manifest of the directory.

    Raises:
        Diverged: lists every weight and state that differs.
    """
    if manifest.ties:
        raise Diverged(
            f"{directory} was saved with diverged copies of tied tensors.",
            where=str(directory),
            evidence=[line for tie in manifest.ties for line in tie.differences],
            next_step=CHOOSE_COPY,
        )


def newest_checkpoint(*directories: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint that can be resumed, as far as this process can see, without changing any file.

    A checkpoint is usable if its manifest can be read, its files have the recorded sizes, and its metadata files the
    recorded checksums. If a crash during a replacement has left it only under a hidden name (see ``commit``), the
    hidden directory is returned.

    Args:
        directories: directories with checkpoints of one run; they need not exist.

    Returns:
        see :func:`first_usable`.

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
    permissions and failing devices are not: stopping is better than resuming an older checkpoint because of a transient
    network fault.

    Args:
        ordered: the candidates, newest first.
        check: raises a ``CheckpointError`` or ``Diverged`` for a checkpoint that cannot be resumed.

    Returns:
        the path, or None; and every skipped candidate with the reason.

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
    """Return the :func:`candidates` in a directory, including dangling links, so that they are reported.

    Raises:
        StorageError: the operating system refused access.
    """
    return [
        path for path in candidates(files.list_directory(output_dir)) if files.is_directory(path) or files.is_link(path)
    ]


def candidates(directories: Iterable[Path]) -> list[Path]:
    """Return the directories with names of checkpoints, highest step first, and backups after plain names."""
    ranked: list[tuple[int, int, str, Path]] = []
    for path in directories:
        hidden = parse_hidden(path)
        aside = hidden is not None and hidden[1] == ASIDE
        step = parse_step(hidden[0] if hidden is not None and aside else path)
        if step is not None:
            ranked.append((-step, int(aside), path.name, path))
    return [path for *_, path in sorted(ranked)]


def names_in(places: Mapping[str, Path]) -> list[str]:
    """Return the names of the candidates in several directories, in the order of :func:`candidates`.

    Ranks exchange these names, because paths may differ between ranks; :func:`located` returns the path for a name.

    Args:
        places: directories by a prefix for the names of their entries; the prefix may be empty.

    Raises:
        StorageError: the operating system refused access.
    """
    found = (Path(place, path.name) for place, one in places.items() for path in candidates_in(one))
    return [str(path) for path in candidates(found)]


def located(name: str, places: Mapping[str, Path]) -> Path:
    """Return this rank's path for a name from :func:`names_in`."""
    place = Path(name)
    return places[place.parent.name] / place.name


def generators_rank(path: str) -> int | None:
    """Return the rank whose random generators are in a file of a checkpoint; None for any other file."""
    found = _GENERATORS.fullmatch(path)
    return None if found is None else int(found[1])


def manifest_seal(manifest: Manifest) -> str:
    """Return the manifest's checksum of itself, which is equal for two checkpoints only if they are of one save."""
    return _digest(manifest)


def _digest(document: Manifest | dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(document, order="sorted"))


def _check_head(path: AnyPath, raw: bytes) -> None:
    head = decode_typed(_heads, raw, str(path), _ANOTHER)
    if head.format != FORMAT or head.version != VERSION:
        raise FormatError(
            f"{path} has the format {head.format!r} version {head.version}, which is not supported.",
            where=str(path),
            evidence=[f"written by {head.written_by}", f"supported: {FORMAT!r} version {VERSION}"],
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
            faults.append(f"{checksum.path!r} is a reserved name")
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
            yield f"{path} belongs to rank {rank}, but {ranks}"
        if found is None and rank is not None:
            stored.add(rank)
    if len(stored) not in (0, manifest.world_size):
        yield f"random generators of {len(stored)} ranks are listed, but {ranks}"


class Surroundings:
    """Inspects files of a checkpoint and the links that lead to them. A store has no links.

    Args:
        directory: ``checkpoint-N``.

    Attributes:
        seen: the last status of every inspected file, by path relative to the directory.
    """

    def __init__(self, directory: AnyPath) -> None:
        self.seen: dict[str, Status] = {}
        self._directory = directory
        self._leaves: dict[PurePosixPath, bool] = {}

    def look_at(self, record: FileRecord) -> tuple[Status | None, str]:
        """Return the status of a file, and its fault as far as it shows without reading; empty if there is none.

        Raises:
            StorageError: the operating system refused access.
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
        """Return the faults of files by path, and raise errors, like :meth:`look_at`."""
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
    """Return a line for every file of another save, which the manifest does not list.

    Such files are next to listed tensor files, or have the name of a rank's file, or contain the Trainer's state.
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
