"""An opened checkpoint of any format, and the definitions of formats, writers and verification results.

Formats differ only in data: the fields of an :class:`OpenedCheckpoint`, and the functions of a :class:`Format`. Load,
export, digest, diff, verify, inspect and plan have no branches per format. A format is one module that defines a
:class:`Format`, and one line in :mod:`paddleformers_fc.formats.registry`.

Checksums prove that a file is unchanged, not that it belongs to the same checkpoint. :func:`compare_run` therefore
compares step, samples, number of ranks and family between the manifest and other files. File names are compared when
the manifest is read, and config.json with mapping.json when the mapping is used (``plan.sources``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from paddleformers_fc.errors import CheckpointError, FlexError, MappingError, MismatchError, NotACheckpoint, OptionError
from paddleformers_fc.families import ModelDescription, is_known
from paddleformers_fc.families.description import Adapters
from paddleformers_fc.families.stated import family_name
from paddleformers_fc.formats.catalog import Catalog, StoredFragment, damaged, malformed
from paddleformers_fc.layout.roles import EMA_STATE, MODEL_STATE, ROLES
from paddleformers_fc.layout.shards import Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.storage.checksum import INDEX_NAME, FileChecksum
from paddleformers_fc.storage.dtypes import ScaledFile, to_safetensors
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, FileChecksums, encode_checksums, read_exported
from paddleformers_fc.storage.files import is_directory, is_file, list_directory
from paddleformers_fc.storage.json_io import MAX_DOCUMENT_BYTES, parse_json, read_recorded
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    RESTORE,
    TRAINER_DIRECTORY,
    Manifest,
    generators_rank,
    read_listed,
)
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.safetensors import FileLayout, layout_file
from paddleformers_fc.storage.state_json import decode_object
from paddleformers_fc.text import count_text, natural, suggestion

if TYPE_CHECKING:
    from paddleformers_fc.formats.stock_run import Powers

DEPTH_TEXT = {"size": "all present with the recorded sizes", "full": "every byte as it was written"}
"""The result of a passed file check, by level."""


UNCOMPARED = "changed bytes"
"""The beginning of a line about bytes that cannot be checked, because there are no checksums."""


class Check(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        name: the name of the check.
        passed: whether no fault was found.
        detail: the result; for a check that failed, the fault in one sentence.
    """

    name: str
    passed: bool
    detail: str


class CheckList:
    """The completed checks of a verification, with their faults and counts."""

    def __init__(self) -> None:
        self.made: list[Check] = []
        self.faults: list[FlexError] = []
        self.files = self.bytes = self.tensors = 0
        self.impossible: list[str] = []

    def not_compared(self, why: str) -> None:
        """Record that the bytes of tensors cannot be compared."""
        self.impossible.append(f"{UNCOMPARED}: {why}")

    def passed(self, name: str, detail: str) -> None:
        """Record a check that found no fault."""
        self.made.append(Check(name, True, detail))

    @contextmanager
    def required(self, name: str) -> Iterator[None]:
        """Context manager around a check that records its fault and raises it again. Failed reads are not faults."""
        try:
            yield
        except (CheckpointError, MappingError, MismatchError) as error:
            self.made.append(Check(name, False, error.what))
            self.faults.append(error)
            raise

    @contextmanager
    def optional(self, name: str) -> Iterator[None]:
        """Context manager around a check that later checks do not need: records its fault and continues."""
        try:
            with self.required(name):
                yield
        except FlexError as error:
            if error not in self.faults:
                raise


_COUNT = re.compile(r"(?<=: )[0-9,]+ faults? found(?=\.$)")


def combined(faults: Sequence[FlexError], directory: AnyPath) -> FlexError | None:
    """Combine the faults of several checks into one error; None if there are none.

    The first fault determines type, place and next step. The others are added as evidence: one line per fault, with its
    facts indented below it. A file that two checks found damaged is one fault.

    Args:
        faults: in the order in which they were found.
        directory: the checkpoint.
    """
    if len(faults) < 2:
        return next(iter(faults), None)
    first, *others = faults
    evidence = list(first.evidence)
    for fault in others:
        own = [f" {line.lstrip()}" for line in fault.evidence if line not in evidence and f" {line}" not in evidence]
        number = _line_of(fault.where.removeprefix(f"{directory}/"), evidence)
        if number is not None:
            evidence[number + 1 : number + 1] = own
        elif fault.what != first.what and (own or not fault.evidence):
            evidence += [fault.what, *own]
    count = count_text(sum(not line.startswith(" ") for line in evidence), "fault")
    return type(first)(
        _COUNT.sub(f"{count} found", first.what), where=first.where, evidence=evidence, next_step=first.next_step
    )


def _line_of(file: str, evidence: Sequence[str]) -> int | None:
    """Return the index of the line about a file; None if there is none."""
    return next((number for number, line in enumerate(evidence) if line.startswith(f"{file} ")), None)


CONFIG_NAME = "config.json"
NAME_CONFIG = (
    f"Name a directory with the model's {CONFIG_NAME}: --config DIR of diff, plan, export and convert, or config= of "
    "open and load in Python."
)
"""The next step for a checkpoint without a configuration."""
RUN_ARGUMENTS = "training_args.json"
"""The training arguments in an export. They depend on the layout of the run, so they have no checksum."""
MAPPING_NAME = "mapping.json"
_RESTORE_CONFIG = "Restore the file: save or download it again."
_DESCRIBING = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".spm", ".vocab"})
"""The suffixes of files that describe a model or its tokenizer."""
_OF_A_FORMAT = re.compile(
    r".*\.index\.json|training_args\.json|trainer_state\.json|model_meta\.json|flex_checksums\.json|all_results\.json"
    r"|train_results\.json|eval_results\.json|optimizer\..*|scheduler\..*|adapter_config\.json|lora_config\.json"
)
"""Files with these suffixes that belong to a run, a format or adapters instead."""

REFUSE, LAST = "refuse", "last"
TIED_WAYS = (REFUSE, "first", LAST)
"""Which copy to read if copies of a tensor differ: none, or the copy from the first or last stage or rank."""

Config = Mapping[str, Any] | None
"""The content of a ``config.json``, if there is one."""

StoredShard = tuple[Shard, str, int, int]
"""A shard, its file, the byte offset of its first element, bytes per element."""


class StoredModel(msgspec.Struct, frozen=True):
    """The stored description of the model that saved a checkpoint.

    Args:
        rules: the rules from canonical tensors to that model's tensors.
        description: the description from which the rules were derived.
    """

    rules: RuleSet
    description: ModelDescription


class OutputFile(msgspec.Struct, frozen=True):
    """A file of tensors to write.

    Args:
        path: posix path relative to the directory.
        role: the role of its tensors.
        tensors: complete tensors, in the order of the file.
    """

    path: str
    role: str
    tensors: tuple[Shard, ...]


def export_checksums(
    checkpoint: OpenedCheckpoint, files: Sequence[OutputFile], written: Sequence[FileChecksum]
) -> dict[str, bytes]:
    """Return the file that records the checksums of all other files; the default :attr:`ExportWriter.seal`."""
    return {CHECKSUMS_NAME: encode_checksums([one for one in written if one.path != RUN_ARGUMENTS])}


def tensor_header(metadata: dict[str, str], path: Path, shards: Sequence[Shard]) -> FileLayout:
    """Return the header of a safetensors file.

    Args:
        metadata: the metadata of the header.
        path: the file, for errors.
        shards: its tensors, in the order of the file.
    """
    entries = [
        (one.name, to_safetensors(one.dtype), one.box.shape if one.flat is None else (one.size,)) for one in shards
    ]
    return layout_file(path, entries, metadata)


class ExportWriter(msgspec.Struct, frozen=True):
    """Defines the files that an export or a conversion to a format writes.

    Reading, hashing, writing and commit are in ``execute``.

    Args:
        marks: files whose presence makes a directory a checkpoint of this format; they are written last.
        rules: returns the rules of the tensors that this format contains; None for canonical tensors.
        files: divides tensors into files, given the checkpoint, all complete tensors, and the maximum size of a file in
            bytes. A larger tensor gets a separate file. Roles that the format does not support are omitted.
        header: returns the header of a file, given its path and its tensors in the order of the file.
        documents: returns the files without tensors, such as an index, by path relative to the directory.
        seal: returns the files that record the checksums of all other files, by name and in the order of writing, given
            the files with tensors and all checksums.
        alone: whether the directory must be empty or new, so that no file is replaced.
        numbered: a pattern for names of files that an export replaces, besides the marks.
    """

    marks: tuple[str, ...]
    rules: Callable[[OpenedCheckpoint], RuleSet | None]
    files: Callable[[OpenedCheckpoint, ShardsByRole, int], tuple[OutputFile, ...]]
    header: Callable[[Path, Sequence[Shard]], FileLayout]
    documents: Callable[[OpenedCheckpoint, Sequence[OutputFile]], dict[str, bytes]]
    seal: Callable[[OpenedCheckpoint, Sequence[OutputFile], Sequence[FileChecksum]], dict[str, bytes]] = (
        export_checksums
    )
    alone: bool = False
    numbered: str = ""

    def owns(self, path: str) -> bool:
        """Return whether an export replaces this file of an earlier export."""
        known = path in (*self.marks, CHECKSUMS_NAME) or re.fullmatch(self.numbered, path) is not None
        return known and not self.alone


class Format(msgspec.Struct, frozen=True):
    """A format of checkpoints.

    Args:
        name: the name in JSON output.
        title: the name in text, as the kind of a directory.
        predicate: the verb phrase in errors that follows the path of a directory.
        advice: how to use such a checkpoint where a flex checkpoint is required.
        checks: the names of the checks of ``verify``, in order.
        recognises: returns whether a directory or URL has this format, by the names of its files.
        opener: implements :meth:`open`.
        verifier: implements :meth:`verify`.
        describe: returns the model whose tensors are stored, if opening does not determine it.
        build: returns the model whose tensors a conversion writes, if it is not the stored model.
        last_copies: returns the catalog with the copies of the last rank, if several ranks can store the same tensor.
        roles: the roles that a checkpoint of this format can contain.
        canonical: whether stored names are canonical names, so that there is no mapping.
        loadable: whether a live model can load it.
    """

    name: str
    title: str
    predicate: str
    advice: str
    checks: tuple[str, ...]
    recognises: Callable[[AnyPath], bool]
    opener: Callable[[Format, AnyPath, str, Config], OpenedCheckpoint]
    verifier: Callable[[Format, AnyPath, str, CheckList], OpenedCheckpoint]
    describe: Callable[[OpenedCheckpoint], StoredModel] | None = None
    build: Callable[[OpenedCheckpoint], StoredModel] | None = None
    last_copies: Callable[[OpenedCheckpoint], Catalog] | None = None
    roles: tuple[str, ...] = (MODEL_STATE,)
    canonical: bool = False
    loadable: bool = True

    def open(self, directory: AnyPath, verify: str = "size", config: Config = None) -> OpenedCheckpoint:
        """Open a checkpoint of this format.

        Args:
            directory: a directory of this format.
            verify: ``off``, ``size`` or ``full``, if checksums are recorded.
            config: the configuration to use if the directory has none.
        Raises:
            CheckpointError: the checkpoint is damaged or malformed.
        """
        return self.opener(self, directory, verify, config)

    def verify(self, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
        """Check files and tensors with everything that the format records, and return the opened checkpoint.

        Args:
            directory: a directory of this format.
            level: ``off``, ``size`` or ``full``.
            checks: receives the completed checks.
        Raises:
            FlexError: a check failed that later checks require; ``checks`` has all faults.
        """
        return self.verifier(self, directory, level, checks)


class FileFacts(msgspec.Struct, frozen=True):
    """Facts besides tensors that opening files without a manifest found.

    Args:
        checksums: recorded checksums of the files; None if there are none.
        native: files that PaddleFormers may have written in its own orientation, judging by their metadata.
        rewritten: whether ``config.json`` declares a quantization that is removed from the configuration.
        adapters: the configuration of adapters in the files.
        degree: the tensor-parallel degree that saved adapters.
        run: the directory, if it contains a Trainer's state.
        powers: powers of Adam's betas in optimizer states.
        cuts: number of shards per axis, by weight.
        copies: tensors that several ranks stored: the name, both boxes, and the bytes per element.
    """

    checksums: FileChecksums | None = None
    native: tuple[str, ...] = ()
    rewritten: bool = False
    adapters: Adapters | None = None
    degree: int = 1
    run: Path | None = None
    powers: Powers = msgspec.field(default_factory=dict)
    cuts: Mapping[str, Shape] = msgspec.field(default_factory=dict)
    copies: Sequence[tuple[str, StoredFragment, StoredFragment, int]] = ()


NO_FILES = FileFacts()
"""The facts of a checkpoint with a manifest, or of live tensors."""


class OpenedCheckpoint(msgspec.Struct, frozen=True, dict=True):
    """An opened checkpoint.

    Args:
        format: its format.
        catalog: the stored tensors, in stored names.
        config: the model's configuration, as in ``config.json``; empty if there is none.
        model: the model whose tensors are stored, with its rules; None if the format has to derive it.
        facts: facts from files without a manifest.
        recorded: the recorded checksums of its files by path; for an export, only of the opened weight files.
        commit_record: the manifest, with the training progress; None for formats without one.
        unread: whether the reader still has to compare the checksums of the bytes that it reads.
        tied: the copy of a tied tensor to read, by pipeline stage: ``first`` or ``last``. Under ``refuse`` the copies
            must be equal.
        averaged: whether weights and master weights are read from their moving averages, if there are any.
        held: metadata files that one rank has read for all ranks, by path.
    """

    format: Format
    catalog: Catalog
    config: dict[str, Any]
    model: StoredModel | None = None
    facts: FileFacts = NO_FILES
    recorded: Mapping[str, FileChecksum] = msgspec.field(default_factory=dict)
    commit_record: Manifest | None = None
    unread: bool = False
    tied: str = REFUSE
    averaged: bool = False
    held: Mapping[str, bytes] = msgspec.field(default_factory=dict)

    @cached_property
    def manifest(self) -> Manifest:
        """The commit record, or its equivalent derived from the files of a Trainer.

        Raises:
            NotACheckpoint: there is neither, so no run can resume from the checkpoint.
            CheckpointError: the files of the Trainer are damaged or contradict each other.
        """
        if self.commit_record is not None:
            return self.commit_record
        if self.facts.run is None:
            raise not_a_flex_checkpoint(self.format, self.catalog.root)
        from paddleformers_fc.formats.stock_run import read_run

        return read_run(self.facts.run, self.facts.powers)

    @property
    def has_run(self) -> bool:
        """Whether the checkpoint contains the state of a run, so that :attr:`manifest` exists."""
        return self.commit_record is not None or self.facts.run is not None

    @cached_property
    def _stored_model(self) -> StoredModel:
        if self.model is not None:
            return self.model
        if self.format.describe is None:
            raise not_a_flex_checkpoint(self.format, self.catalog.root)
        return self.format.describe(self)

    @cached_property
    def built(self) -> StoredModel:
        """The model whose tensors a conversion writes: the stored model, or the model built from canonical tensors."""
        return self._stored_model if self.format.build is None else self.format.build(self)

    @property
    def rules(self) -> RuleSet:
        """The rules between canonical and stored tensors.

        Raises:
            FlexError: the checkpoint has no rules, or its family does not declare a stored tensor.
        """
        return self._stored_model.rules

    @property
    def known(self) -> ModelDescription:
        """The description of the model from which the rules are derived. Raises the errors of :attr:`rules`."""
        return self._stored_model.description

    @cached_property
    def files(self) -> frozenset[str]:
        """The files that contain tensors, by path relative to the directory."""
        tensors = (tensor for named in self.catalog.roles.values() for tensor in named.values())
        found = {file for tensor in tensors for file, _ in tensor.offsets}
        if self.commit_record is not None:
            return frozenset(found)
        root, identities = self.catalog.root, self.catalog.identities
        produced = {file: one for file in found if isinstance(one := identities.get(root / file), ScaledFile)}
        sources = {path.name for one in produced.values() for path in one.sources}
        return frozenset((found - produced.keys()) | sources)

    @property
    def file_sizes(self) -> dict[str, int]:
        """Size in bytes of every file, by path; without a commit record, only of files with tensors."""
        if self.commit_record is not None:
            return {one.path: one.size for one in self.commit_record.files}
        root, identities = self.catalog.root, self.catalog.identities
        return {name: identities[root / name].size for name in sorted(self.files)}

    def document(self, name: str, most: int | None = None) -> bytes:
        """Read a metadata file and compare it with its recorded checksum.

        Args:
            name: path relative to the directory.
            most: maximum length in bytes; None for the recorded size.
        Raises:
            Corrupt: the file is missing or changed, or its checksum is not recorded.
            FormatError: it is too long.
        """
        if name in self.held:
            return self.held[name]
        if self.commit_record is not None:
            return read_listed(self.catalog.root, self.commit_record, name, most)
        recorded = self.recorded.get(name)
        if recorded is None and name in self.unrecorded:
            return self._read_unrecorded(name)
        if recorded is None and name == CONFIG_NAME and self.config:
            return config_bytes(self.config)
        if recorded is None:
            raise not_recorded(self.catalog.root, name)
        return read_recorded(self.catalog.root, recorded, recorded.size if most is None else most, RESTORE)

    @property
    def model_files(self) -> list[str]:
        """The files that an export copies: configuration, tokenizer, templates."""
        others = (*ROLES, TRAINER_DIRECTORY)
        return sorted(
            path
            for path in self.documents
            if path not in (MAPPING_NAME, INDEX_NAME) and path.split("/")[0] not in others and path not in self.files
        )

    @cached_property
    def unrecorded(self) -> frozenset[str]:
        """The metadata files without a recorded checksum, by their path in a flex checkpoint."""
        if self.facts is NO_FILES:
            return frozenset()
        found = model_documents(self.catalog.root)
        if self.facts.run is not None:
            from paddleformers_fc.formats.stock_run import run_documents

            found += run_documents(self.facts.run, self.catalog.roles)
        return frozenset(found)

    def _read_unrecorded(self, name: str) -> bytes:
        """Return one of :attr:`unrecorded`; ``config.json`` as it applies to the weights that are read."""
        if self.facts.run is not None and name.startswith(f"{TRAINER_DIRECTORY}/"):
            from paddleformers_fc.formats.stock_run import read_run_document

            return read_run_document(self.facts.run, name)
        if name == CONFIG_NAME and self.facts.rewritten:
            return (json.dumps(self.config, indent=2) + "\n").encode()
        return read_exported(self.catalog.root, self.facts.checksums, name, MAX_DOCUMENT_BYTES)

    @property
    def documents(self) -> frozenset[str]:
        """The paths that :meth:`document` can read."""
        given = [CONFIG_NAME] if self.config else []
        return self.unrecorded.union(self.recorded, given)

    def check_states(self) -> None:
        """Check the powers of Adam's betas, in formats without checksums.

        Call this before optimizer states are loaded or converted. Weights are usable without them.
        """
        if self.facts.powers:
            from paddleformers_fc.formats.stock_run import check_powers

            check_powers(self.catalog.root, self.facts.powers)

    @property
    def preferred(self) -> dict[str, tuple[str, ...]]:
        """The copies of every tied parameter, the chosen copy first; empty if the user chose none."""
        if self.tied == REFUSE:
            return {}
        diverged = self.commit_record.ties if self.commit_record is not None else ()
        recorded = {name: place for tie in diverged for place, name in enumerate(tie.copies)}
        found: dict[str, tuple[str, ...]] = {}
        for tie in self.rules.ties:
            found[tie.owner] = (*found.get(tie.owner, (tie.owner,)), tie.alias)
        for owner, names in found.items():
            # Without a record the declared order applies: the owner is the embedding, on the first stage.
            ordered = sorted(names, key=lambda name: recorded.get(name, len(recorded)))
            found[owner] = tuple(ordered if self.tied == "first" else reversed(ordered))
        return found


def with_tied(checkpoint: OpenedCheckpoint, tied: str) -> OpenedCheckpoint:
    """Choose which copy to read of tied tensors, and of tensors that several ranks stored.

    Args:
        checkpoint: an opened checkpoint.
        tied: one of :data:`TIED_WAYS`.
    """
    last_copies = checkpoint.format.last_copies if tied == LAST else None
    catalog = checkpoint.catalog if last_copies is None else last_copies(checkpoint)
    return structs.replace(checkpoint, tied=tied, catalog=catalog)


def local_files(directory: AnyPath) -> frozenset[str]:
    """Return the names in a local directory; empty for a URL, or if there is no directory."""
    if not isinstance(directory, Path) or not is_directory(directory):
        return frozenset()
    return frozenset(path.name for path in list_directory(directory))


def model_documents(directory: AnyPath) -> list[str]:
    """Return the names of the files in a directory that describe its model and its tokenizer."""
    names = sorted(path.name for path in list_directory(directory) if is_file(path))
    return [name for name in names if PurePosixPath(name).suffix in _DESCRIBING and not _OF_A_FORMAT.fullmatch(name)]


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return a configuration as the bytes of ``config.json``.

    Raises:
        OptionError: JSON cannot represent it.
    """
    try:
        return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"The model's configuration is not JSON: {error}.",
            where="config",
            next_step=f"Give the content of {CONFIG_NAME}.",
        ) from error


def with_role(checkpoint: OpenedCheckpoint, role: str) -> OpenedCheckpoint:
    """Choose which role to read as the weights.

    Args:
        checkpoint: an opened checkpoint.
        role: ``model_state``, or ``ema_state`` for the moving averages.
    Raises:
        OptionError: the role contains no weights, or the checkpoint has no moving average.
    """
    if role not in (MODEL_STATE, EMA_STATE):
        raise OptionError(
            f"The role {role!r} contains no weights of the model.",
            evidence=[
                f"roles of weights: {MODEL_STATE}, {EMA_STATE}",
                *([] if role in ROLES else suggestion(role, ROLES)),
            ],
            next_step=f"Name {MODEL_STATE} or {EMA_STATE}.",
        )
    if role == EMA_STATE:
        require_average(checkpoint)
    return structs.replace(checkpoint, averaged=role == EMA_STATE)


def require_average(checkpoint: OpenedCheckpoint) -> None:
    """Check that a checkpoint has a moving average of its weights.

    Raises:
        OptionError: it has none.
    """
    if not checkpoint.catalog.roles.get(EMA_STATE):
        raise OptionError(
            f"{checkpoint.catalog.root} has no moving average of its weights.",
            where=str(checkpoint.catalog.root),
            evidence=[f"its roles are {', '.join(checkpoint.catalog.roles)}"],
            next_step="Choose a checkpoint of a run with flex_ema_decay, or read the weights instead.",
        )


def not_recorded(root: AnyPath, name: str) -> CheckpointError:
    """Return the error for a metadata file that a checkpoint does not list."""
    return damaged(root, f"{root} does not list the file {name}.", (), "Use another checkpoint.")


def not_a_flex_checkpoint(format: Format, directory: AnyPath, next_step: str = "") -> NotACheckpoint:
    """Return the error for a checkpoint of another format where a flex checkpoint is required."""
    return NotACheckpoint(
        f"{directory} {format.predicate} and is not a flex checkpoint.",
        where=str(directory),
        evidence=[f"{MANIFEST_NAME} is not there"],
        next_step=next_step or format.advice,
    )


def check_stored_once(directory: AnyPath, faults: Sequence[str], next_step: str) -> None:
    """Check that there are no faults of tensors that are incomplete or stored twice.

    Raises:
        Corrupt: there are faults; the error lists all of them.
    """
    if faults:
        what = f"The checkpoint does not contain all tensors exactly once: {count_text(len(faults), 'fault')}."
        raise damaged(directory, what, faults, next_step)


def parse_config(raw: bytes, path: AnyPath, next_step: str = _RESTORE_CONFIG) -> dict[str, Any]:
    """Parse the configuration of a model or of adapters.

    Raises:
        FormatError: it is not a JSON object.
    """
    try:
        config = parse_json(raw)
        if not isinstance(config, dict):
            raise ValueError(f"it is a {type(config).__name__}, not an object")
    except ValueError as error:
        raise malformed(path, f"{path.name} is not a configuration.", [str(error)], next_step) from error
    return config


def grouped_by_size(tensors: Mapping[str, Shard], max_bytes: int) -> list[tuple[Shard, ...]]:
    """Divide tensors into files, in natural order of their names, so that equal content gives equal files.

    Args:
        tensors: complete tensors by name.
        max_bytes: maximum size of a file's tensors, in bytes; a larger tensor gets a separate file.
    """
    groups: list[list[Shard]] = []
    room = 0
    for name in sorted(tensors, key=natural):
        size = shard_bytes(tensors[name])
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensors[name])
        room -= size
    return [tuple(group) for group in groups]


STATE = f"{TRAINER_DIRECTORY}/state.json"
DATA = f"{TRAINER_DIRECTORY}/data.json"
AVERAGE = f"{TRAINER_DIRECTORY}/ema.json"


def compare_run(checkpoint: OpenedCheckpoint) -> int:
    """Compare the Trainer's metadata files with the manifest, and return their number.

    Raises:
        Corrupt: see :func:`check_no_contradictions`; or a file is damaged.
    """
    names = [one for one in checkpoint.documents if one in (STATE, DATA, AVERAGE) or generators_rank(one) is not None]
    root = checkpoint.catalog.root
    documents = {name: decode_object(checkpoint.document(name), str(root / name)) for name in sorted(names)}
    check_no_contradictions(checkpoint, documents)
    return len(names)


def check_no_contradictions(checkpoint: OpenedCheckpoint, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the Trainer's metadata files agree with the manifest.

    Args:
        checkpoint: an opened checkpoint with the state of a run.
        documents: its decoded metadata files, by path; files without such facts are ignored.
    Raises:
        Corrupt: with every contradiction.
    """
    root, record = checkpoint.catalog.root, checkpoint.manifest
    by_file = {MAPPING_NAME: _family(checkpoint)}
    by_file |= {name: _facts(name, values, record) for name, values in documents.items()}
    faults = [
        f"{name} has {what} {found!r}, {MANIFEST_NAME} has {recorded!r}"
        for name, facts in by_file.items()
        for what, found, recorded in facts
        if found != recorded
    ]
    if faults:
        next_step = "Use another checkpoint; one of these files was changed, or is from another checkpoint."
        raise damaged(root, f"Files of {root} contradict each other.", faults, next_step)


def _family(checkpoint: OpenedCheckpoint) -> Iterator[tuple[str, Any, Any]]:
    """Yield the family in the description and in the manifest, if this process knows the family."""
    if checkpoint.commit_record is not None and is_known(checkpoint.known.config):
        yield "family", family_name(checkpoint.known), checkpoint.commit_record.family


def _facts(name: str, values: Mapping[str, Any], record: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yield facts in a metadata file: the subject, its value there, and its value in the manifest."""
    if name == STATE:
        yield "step", values.get("global_step"), record.step
        yield "samples", values.get("consumed_samples", record.consumed_samples), record.consumed_samples
    elif name == DATA:
        position = values.get("position", values)
        yield "step", values.get("steps", record.step), record.step
        yield "samples", position.get("consumed") if isinstance(position, dict) else None, record.consumed_samples
    elif name == AVERAGE:
        step = values.get("step")
        if type(step) is int and step > record.step:
            yield "step", step, record.step
    elif generators_rank(name) is not None:
        yield "number of ranks", values.get("world_size"), record.world_size
