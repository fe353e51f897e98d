"""An opened checkpoint of any format, and the protocols of a format and of its writer.

All differences of formats are data of an :class:`OpenedCheckpoint` or members of its :class:`Format`. Load, export,
digest, diff, verify, inspect and plan therefore have no branch per format. A format is one module with a class that
follows the protocol, and one line in :mod:`paddleformers_fc.formats.registry`.

The checks of one verification, with their results.

Compare what the files of one checkpoint state about the run that saved it.

A checksum proves that a file is what was written, and not that it belongs to the others. The facts of the manifest are
therefore compared with the other files: steps, samples and the number of ranks with the documents of the Trainer, the
family with the mapping. Names of files and the number of ranks are compared when the manifest is read, config.json and
mapping.json when the mapping is used (``plan.sources``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import structs

from paddleformers_fc.errors import (
    CheckpointError,
    Corrupt,
    FlexError,
    FormatError,
    MappingError,
    MismatchError,
    NotACheckpoint,
    OptionError,
)
from paddleformers_fc.families import ModelDescription, is_known
from paddleformers_fc.families.stated import family_name
from paddleformers_fc.formats.catalog import Catalog
from paddleformers_fc.layout.roles import EMA_STATE, MODEL_STATE, ROLES
from paddleformers_fc.layout.shards import Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.storage.checksum import INDEX_NAME, FileChecksum
from paddleformers_fc.storage.dtypes import ScaledFile, dtype_size
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, encode_checksums
from paddleformers_fc.storage.json_io import parse_json, read_recorded
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    RESTORE,
    TRAINER_DIRECTORY,
    Manifest,
    generators_rank,
    read_listed,
)
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.safetensors import FileLayout
from paddleformers_fc.storage.state_json import decode_object
from paddleformers_fc.text import fold, natural

DEPTH_TEXT = {"size": "all there and of their sizes", "full": "every byte as it was written"}
"""The result of a passed check of files, by level."""


UNCOMPARED = "changed bytes"
"""The beginning of the line that lists properties without recorded checksums, which cannot be checked."""


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
    """The checks made so far, their faults and their counts."""

    def __init__(self) -> None:
        self.made: list[Check] = []
        self.faults: list[FlexError] = []
        self.files = self.bytes = self.tensors = 0
        self.impossible: list[str] = []

    def not_compared(self, why: str) -> None:
        """Note that no bytes of tensors can be compared."""
        self.impossible.append(f"{UNCOMPARED}: {why}")

    def passed(self, name: str, detail: str) -> None:
        """Record a check that found no fault."""
        self.made.append(Check(name, True, detail))

    @contextmanager
    def required(self, name: str) -> Iterator[None]:
        """Context manager around a check: record its fault and raise it again; a refused read is not a fault."""
        try:
            yield
        except (CheckpointError, MappingError, MismatchError) as error:
            self.made.append(Check(name, False, error.what))
            self.faults.append(error)
            raise

    @contextmanager
    def optional(self, name: str) -> Iterator[None]:
        """Context manager around a check that the following ones do not require: record its fault and continue."""
        try:
            with self.required(name):
                yield
        except FlexError as error:
            if error not in self.faults:
                raise


def combined(faults: Sequence[FlexError]) -> FlexError | None:
    """Return one error for the faults of several checks; None if there are none.

    The first one determines the type, the place and the next step. The others follow in the evidence, except lines that
    an earlier one contains.
    """
    if len(faults) < 2:
        return next(iter(faults), None)
    first, *others = faults
    evidence = list(first.evidence)
    for fault in others:
        own = [line for line in fault.evidence if line not in evidence and f" {line}" not in evidence]
        if own or not fault.evidence:
            evidence += [fault.what, *(f" {line}" for line in own)]
    return type(first)(first.what, where=first.where, evidence=evidence, next_step=first.next_step)


CONFIG_NAME = "config.json"
RUN_ARGUMENTS = "training_args.json"
"""The training arguments beside an export. They depend on the layout of the run, so they have no checksum."""
MAPPING_NAME = "mapping.json"
_RESTORE_CONFIG = "Restore the file: save or download it again."

REFUSE, LAST = "refuse", "last"
TIED_WAYS = (REFUSE, "first", LAST)
"""Which copy to read if copies of a tensor differ: none, or the copy of the first or last stage or rank."""

Config = Mapping[str, Any] | None
"""The content of a ``config.json``, if there is one."""

StoredShard = tuple[Shard, str, int, int]
"""A shard, its file, the byte offset of its first element, bytes per element."""


class StoredModel(msgspec.Struct, frozen=True):
    """The stored description of the model that saved a checkpoint.

    Args:
        rules: how that model's tensors are made of canonical ones.
        description: the source of the rules.
    """

    rules: RuleSet
    description: ModelDescription


class OutputFile(msgspec.Struct, frozen=True):
    """A file of tensors that is going to be written.

    Args:
        path: posix path relative to the directory.
        role: the role of its tensors.
        tensors: whole tensors, in the order of the file.
    """

    path: str
    role: str
    tensors: tuple[Shard, ...]


class ExportWriter(Protocol):
    """The names and headers of the files of a format: the target of an export.

    Reading, hashing, writing and commit are in ``execute``.

    Attributes:
        marks: the files of which one makes a directory a checkpoint of this format; they are written last.
        alone: whether such a directory contains nothing else, so that no file in it is replaced.
        numbered: a pattern for the names of files that an export replaces besides the marks.
    """

    marks: tuple[str, ...]
    alone: bool = False
    numbered: str = ""

    def names(self, role: str, rank: int, count: int) -> list[str]:
        """Return the paths of the files that one rank writes of a role, relative to the directory."""

    def header(self, path: Path, shards: Sequence[Shard]) -> FileLayout:
        """Return the header of a file.

        Args:
            path: the file, for errors.
            shards: its tensors, in the order of the file.
        """

    def rules(self, checkpoint: OpenedCheckpoint) -> RuleSet | None:
        """Return the rules of the tensors that this format contains; None for canonical tensors."""

    def files(self, checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
        """Divide the tensors that this format contains into files.

        Args:
            checkpoint: the checkpoint to export.
            layout: every tensor of the checkpoint, whole; tensors of other formats' roles are omitted.
            max_file_bytes: bound on the tensors of one file, in bytes; a larger tensor has a file of its own.
        """

    def documents(self, checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
        """Return the files beside those with tensors, such as an index, by path relative to the directory."""

    def seal(
        self, checkpoint: OpenedCheckpoint, files: Sequence[OutputFile], written: Sequence[FileChecksum]
    ) -> dict[str, bytes]:
        """Return the documents that record the checksums of all other files, by name, in the order of writing.

        Args:
            checkpoint: the checkpoint to export.
            files: the files with tensors.
            written: the checksums of the files.
        """
        return {CHECKSUMS_NAME: encode_checksums([one for one in written if one.path != RUN_ARGUMENTS])}

    def owns(self, path: str) -> bool:
        """Return whether an export replaces a file of an older one."""
        known = path in (*self.marks, CHECKSUMS_NAME) or re.fullmatch(self.numbered, path) is not None
        return known and not self.alone


class Format(Protocol):
    """A format of checkpoints.

    Attributes:
        name: in JSON output.
        title: in text, as the kind of a directory.
        predicate: in errors, behind the path of a directory.
        roles: the roles that a checkpoint of this format can contain.
        canonical: whether stored names are canonical names, so that there is no mapping.
        loadable: whether a live model can be filled from it.
        advice: how to use such a checkpoint where a flex checkpoint is required.
        checks: the names of the checks that ``verify`` makes, in order.
        writer: how its files are written; None if this package only reads the format.
    """

    name: str
    title: str
    predicate: str
    roles: tuple[str, ...]
    canonical: bool
    loadable: bool
    advice: str
    checks: tuple[str, ...]
    writer: ExportWriter | None

    def recognises(self, directory: AnyPath) -> bool:
        """Return whether a directory or URL is of this format, by the names of its files alone."""

    def open(self, directory: AnyPath, verify: str = "size", config: Config = None) -> OpenedCheckpoint:
        """Open a checkpoint of this format.

        Args:
            directory: recognised before.
            verify: ``off``, ``size`` or ``full``, where checksums are recorded.
            config: the configuration of the model that reads it, for a directory that has none.
        Raises:
            CheckpointError: it is damaged or malformed.
        """

    def read_config(self, directory: AnyPath) -> dict[str, Any]:
        """Return the model's configuration without opening the checkpoint; empty if there is none."""

    def verify(self, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
        """Check files and tensors by everything that the format records, and return the opened checkpoint.

        Args:
            directory: recognised before.
            level: ``off``, ``size`` or ``full``.
            checks: gets the checks that were made.
        Raises:
            FlexError: a check that fails and that the following ones require; ``checks`` has all faults.
        """

    def shards(self, checkpoint: OpenedCheckpoint, role: str, names: Collection[str]) -> Iterator[StoredShard]:
        """Yield the shards of some tensors as they were written, by default their boxes in the catalog."""
        for name in sorted(names):
            tensor = checkpoint.catalog.roles[role][name]
            width = dtype_size(tensor.form.held_dtype)
            for part in tensor.fragments:
                yield Shard(name, tensor.dtype, tensor.shape, part.box), part.file, part.begin, width

    def describe(self, checkpoint: OpenedCheckpoint) -> StoredModel:
        """Return the model whose tensors are stored.

        Raises:
            FlexError: the checkpoint contains none, or its family does not declare a stored tensor.
        """
        raise not_a_flex_checkpoint(self, checkpoint.catalog.root)

    def built_model(self, checkpoint: OpenedCheckpoint) -> StoredModel:
        """Return the model whose tensors a conversion writes: the stored one, or that of canonical tensors."""
        return StoredModel(checkpoint.rules, checkpoint.known)

    def documents(self, checkpoint: OpenedCheckpoint) -> Collection[str]:
        """Return the documents without a recorded checksum, by their path in a flex checkpoint."""
        return ()

    def read_document(self, checkpoint: OpenedCheckpoint, name: str) -> bytes:
        """Return the bytes of one of :meth:`documents`.

        Raises:
            CheckpointError: it is damaged or malformed.
        """
        raise not_recorded(checkpoint.catalog.root, name)

    def has_run(self, checkpoint: OpenedCheckpoint) -> bool:
        """Return whether a checkpoint without a manifest has the state of a run."""
        return False

    def read_run(self, checkpoint: OpenedCheckpoint) -> Manifest:
        """Return the record of the run that saved a checkpoint without a manifest.

        Raises:
            NotACheckpoint: there is none, so that no run can resume from the checkpoint.
            CheckpointError: the files of the Trainer are damaged or contradict each other.
        """
        raise not_a_flex_checkpoint(self, checkpoint.catalog.root)

    def check_states(self, checkpoint: OpenedCheckpoint) -> None:
        """Refuse numbers of optimizer states that no step makes, in formats without checksums.

        It is called before optimizer states are loaded or converted; weights are usable without them.
        """
        return None

    def compare_copies(self, checkpoint: OpenedCheckpoint) -> int:
        """Compare the copies of tensors that several ranks stored, and return their number.

        Raises:
            Diverged: copies differ.
        """
        return 0

    def last_copies(self, checkpoint: OpenedCheckpoint) -> Catalog:
        """Return the catalog with the copies of the last rank that stored them."""
        return checkpoint.catalog


class OpenedCheckpoint(msgspec.Struct, frozen=True, dict=True):
    """An opened checkpoint.

    Args:
        format: its format.
        catalog: the stored tensors, in stored names.
        config: the model's configuration, as in ``config.json``; empty if there is none.
        model: the model whose tensors are stored, with its rules; None if the format has to find it.
        facts: what opening found, for the methods of the format.
        recorded: the recorded checksums of its files by path; those of the opened weight files for an export.
        commit_record: the manifest, with the training progress; None for formats without one.
        unread: whether the reader still has to compare the checksums of the bytes that it reads.
        tied: the copy of a tied tensor to read, by pipeline stage: ``first`` or ``last``. Under ``refuse`` the copies
            must be equal.
        averaged: whether weights and master weights are read from their moving averages, where there are any.
        held: documents that one rank has read for all, by path.
    """

    format: Format
    catalog: Catalog
    config: dict[str, Any]
    model: StoredModel | None = None
    facts: Any = None
    recorded: Mapping[str, FileChecksum] = msgspec.field(default_factory=dict)
    commit_record: Manifest | None = None
    unread: bool = False
    tied: str = REFUSE
    averaged: bool = False
    held: Mapping[str, bytes] = msgspec.field(default_factory=dict)

    @cached_property
    def manifest(self) -> Manifest:
        """The commit record, or its equivalent from the files of a Trainer. Raises as :meth:`Format.read_run`."""
        return self.format.read_run(self) if self.commit_record is None else self.commit_record

    @property
    def has_run(self) -> bool:
        """Return whether it contains the state of a run beside tensors, so that :attr:`manifest` exists."""
        return self.commit_record is not None or self.format.has_run(self)

    @cached_property
    def _stored_model(self) -> StoredModel:
        return self.format.describe(self) if self.model is None else self.model

    @property
    def rules(self) -> RuleSet:
        """The rules between canonical tensors and the stored ones. Raises as :meth:`Format.describe`."""
        return self._stored_model.rules

    @property
    def known(self) -> ModelDescription:
        """The description of the model, which is the source of the rules. Raises as :attr:`rules`."""
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
        """Size in bytes of every file of the checkpoint, by path; without a commit record of those with tensors."""
        if self.commit_record is not None:
            return {one.path: one.size for one in self.commit_record.files}
        root, identities = self.catalog.root, self.catalog.identities
        return {name: identities[root / name].size for name in sorted(self.files)}

    def document(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a small file after comparing them with its recorded checksum.

        Args:
            name: path relative to the directory.
            most: bound on its length in bytes; None for the recorded size.
        Raises:
            Corrupt: the file is missing or altered, or no checksum of it is recorded.
            FormatError: it is longer than the bound.
        """
        if name in self.held:
            return self.held[name]
        if self.commit_record is not None:
            return read_listed(self.catalog.root, self.commit_record, name, most)
        recorded = self.recorded.get(name)
        if recorded is None and name in self.unrecorded:
            return self.format.read_document(self, name)
        if recorded is None and name == CONFIG_NAME and self.config:
            return config_bytes(self.config)
        if recorded is None:
            raise not_recorded(self.catalog.root, name)
        return read_recorded(self.catalog.root, recorded, recorded.size if most is None else most, RESTORE)

    @property
    def model_files(self) -> list[str]:
        """The files that belong into an export: configuration, tokenizer, templates."""
        others = (*ROLES, TRAINER_DIRECTORY)
        return sorted(
            path
            for path in self.documents
            if path not in (MAPPING_NAME, INDEX_NAME) and path.split("/")[0] not in others and path not in self.files
        )

    @cached_property
    def unrecorded(self) -> frozenset[str]:
        """The documents without a recorded checksum."""
        return frozenset(self.format.documents(self))

    @property
    def documents(self) -> frozenset[str]:
        """The paths of which :meth:`document` returns the bytes."""
        given = [CONFIG_NAME] if self.config else []
        return self.unrecorded.union(self.recorded, given)

    def check_copies(self) -> int:
        """Compare the copies of tensors that several ranks stored, unless one is chosen; return their number.

        One rank calls it before tensors are loaded or converted.
        """
        return self.format.compare_copies(self) if self.tied == REFUSE else 0

    @property
    def preferred(self) -> dict[str, tuple[str, ...]]:
        """The copies of every tied parameter, the chosen one first; empty where no copy is chosen."""
        if self.tied == REFUSE:
            return {}
        diverged = self.commit_record.ties if self.commit_record is not None else ()
        recorded = {name: place for tie in diverged for place, name in enumerate(tie.copies)}
        found: dict[str, tuple[str, ...]] = {}
        for tie in self.rules.ties:
            found[tie.owner] = (*found.get(tie.owner, (tie.owner,)), tie.alias)
        for owner, names in found.items():
            # Without a record the copies are as declared: the owner is the embedding, on the first stage.
            ordered = sorted(names, key=lambda name: recorded.get(name, len(recorded)))
            found[owner] = tuple(ordered if self.tied == "first" else reversed(ordered))
        return found


def with_tied(checkpoint: OpenedCheckpoint, tied: str) -> OpenedCheckpoint:
    """Return a checkpoint of which one copy of tied tensors, and of tensors that several ranks stored, is read.

    Args:
        checkpoint: an opened checkpoint.
        tied: one of :data:`TIED_WAYS`.
    """
    catalog = checkpoint.format.last_copies(checkpoint) if tied == LAST else checkpoint.catalog
    return structs.replace(checkpoint, tied=tied, catalog=catalog)


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return a configuration as the bytes of ``config.json``.

    Raises:
        OptionError: JSON cannot hold it.
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
    """Return a checkpoint whose weights are those of a role.

    Args:
        checkpoint: an opened checkpoint.
        role: ``model_state``, or ``ema_state`` for the moving averages.
    Raises:
        OptionError: the role contains no weights, or the checkpoint has no moving average.
    """
    if role not in (MODEL_STATE, EMA_STATE):
        raise OptionError(
            f"The role {role!r} contains no weights of the model.",
            evidence=[f"roles of weights: {MODEL_STATE}, {EMA_STATE}"],
            next_step=f"Name {MODEL_STATE} or {EMA_STATE}.",
        )
    if role == EMA_STATE:
        require_average(checkpoint)
    return structs.replace(checkpoint, averaged=role == EMA_STATE)


def require_average(checkpoint: OpenedCheckpoint) -> None:
    """Refuse a checkpoint without a moving average of its weights.

    Raises:
        OptionError: it has none.
    """
    if not checkpoint.catalog.roles.get(EMA_STATE):
        raise OptionError(
            f"{checkpoint.catalog.root} has no moving average of its weights.",
            where=str(checkpoint.catalog.root),
            evidence=[f"its roles are {', '.join(checkpoint.catalog.roles)}"],
            next_step="Choose a checkpoint that a run with flex_ema_decay has saved, or read its weights.",
        )


def not_recorded(root: AnyPath, name: str) -> Corrupt:
    """Return the error for a document that a checkpoint does not have."""
    return Corrupt(f"{root} has no recorded file {name}.", where=str(root), next_step="Use another checkpoint.")


def not_a_flex_checkpoint(format: Format, directory: AnyPath, next_step: str = "") -> NotACheckpoint:
    """Return the error for a checkpoint of another format where a flex checkpoint is required."""
    return NotACheckpoint(
        f"{directory} {format.predicate} and is not a flex checkpoint.",
        where=str(directory),
        evidence=[f"{MANIFEST_NAME} is not there"],
        next_step=next_step or format.advice,
    )


def parse_config(raw: bytes, path: AnyPath, next_step: str = _RESTORE_CONFIG) -> dict[str, Any]:
    """Return a configuration, of a model or of adapters, from the bytes of its file.

    Raises:
        FormatError: it is not a JSON object.
    """
    try:
        config = parse_json(raw)
        if not isinstance(config, dict):
            raise ValueError(f"it is a {type(config).__name__}, and not an object")
    except ValueError as error:
        raise FormatError(
            f"{path.name} is not a configuration.", where=str(path), evidence=[str(error)], next_step=next_step
        ) from error
    return config


def grouped_by_size(tensors: Mapping[str, Shard], max_bytes: int) -> list[tuple[Shard, ...]]:
    """Divide tensors into files, in natural order of their names, so that the same content gives the same files.

    Args:
        tensors: whole tensors by name.
        max_bytes: bound on the tensors of one file, in bytes; a larger tensor has a file of its own.
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
    """Read the documents of the Trainer that state facts of the run, compare them, and return their number.

    Raises:
        Corrupt: see :func:`refuse_contradictions`; or a document is damaged.
    """
    names = [one for one in checkpoint.documents if one in (STATE, DATA, AVERAGE) or generators_rank(one) is not None]
    root = checkpoint.catalog.root
    documents = {name: decode_object(checkpoint.document(name), str(root / name)) for name in sorted(names)}
    refuse_contradictions(checkpoint, documents)
    return len(names)


def refuse_contradictions(checkpoint: OpenedCheckpoint, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse documents of the Trainer that contradict the manifest.

    Args:
        checkpoint: an opened checkpoint with the state of a run.
        documents: its decoded documents, by path; those without facts of the run are ignored.
    Raises:
        Corrupt: with every contradiction.
    """
    root, record = checkpoint.catalog.root, checkpoint.manifest
    stated = {MAPPING_NAME: _family(checkpoint)}
    stated |= {name: _facts(name, values, record) for name, values in documents.items()}
    faults = [
        f"{name} has {what} {found!r}, {MANIFEST_NAME} has {recorded!r}"
        for name, facts in stated.items()
        for what, found, recorded in facts
        if found != recorded
    ]
    if faults:
        raise Corrupt(
            f"Files of {root} contradict each other.",
            where=str(root),
            evidence=fold(faults),
            next_step="Use another checkpoint; one of these files was changed after it was written, or is of another.",
        )


def _family(checkpoint: OpenedCheckpoint) -> Iterator[tuple[str, Any, Any]]:
    """Yield the family by the description and by the manifest, if this process knows the family."""
    if checkpoint.commit_record is not None and is_known(checkpoint.known.config):
        yield "family", family_name(checkpoint.known), checkpoint.commit_record.family


def _facts(name: str, values: Mapping[str, Any], record: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yield facts of a document: the subject, its value there, and its value in the manifest."""
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
