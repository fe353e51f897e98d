"""A finished flex checkpoint: its manifest, its rules and its catalog.

Opening reads the manifest, ``mapping.json``, ``config.json`` and the headers of the safetensors files; the cost is one
small read per file. A directory without a manifest is not a checkpoint and is refused before anything else is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.families.stored import decode_mapping
from paddleformers_fc.formats.catalog import Catalog, gather_shards
from paddleformers_fc.layout.codec import HEADER_KEY, decode_shards
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES, parameter_of
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import item_size
from paddleformers_fc.storage.files import map_paths
from paddleformers_fc.storage.identity import Identities, identities_of
from paddleformers_fc.storage.json_io import MAX_DOCUMENT_BYTES, parse_json
from paddleformers_fc.storage.manifest import Manifest, read_listed, read_manifest, verify_files
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.safetensors import read_header

MAPPING_NAME = "mapping.json"
CONFIG_NAME = "config.json"
DOCUMENTS = (MAPPING_NAME, CONFIG_NAME)
"""The files beside the manifest that opening reads."""

StoredShard = tuple[Shard, str, int, int]
"""A shard, its file, the byte offset of its first element, bytes per element."""

REFUSE = "refuse"
TIED_WAYS = (REFUSE, "first", "last")
"""What is read where copies of a tied tensor differ: none of them, or that of the first or last pipeline stage."""

MAX_MAPPING_BYTES = 512 * 1024 * 1024
"""The longest mapping that is read: one tensor takes about a kilobyte of it."""


@dataclass(frozen=True)
class FlexCheckpoint:
    """An opened flex checkpoint.

    Args:
        catalog: what is stored, in the names of the model that saved it.
        manifest: the commit record.
        rules: how that model's names are dealt out of canonical names.
        config: the model's configuration, as in ``config.json``.
        model: what the rules were derived from; None if the checkpoint was saved before it was stored.
        unread: whether the checksums of what is going to be read are still to be compared, by whoever reads it.
        tied: which copy of a tied tensor is read, by pipeline stage: ``first`` or ``last``. Under ``refuse`` the copies
            must be equal.
    """

    catalog: Catalog
    manifest: Manifest
    rules: RuleSet
    config: dict[str, Any]
    model: ModelDescription | None = None
    unread: bool = False
    tied: str = REFUSE

    @property
    def known(self) -> ModelDescription:
        """What is stored of the model: its description, or what the configuration file holds of it."""
        return self.model or ModelDescription(self.config)

    @cached_property
    def files(self) -> frozenset[str]:
        """The files that hold tensors, by path relative to the directory."""
        tensors = (tensor for named in self.catalog.roles.values() for tensor in named.values())
        return frozenset(file for tensor in tensors for file, _ in tensor.offsets)

    def document(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a small file after comparing them with its checksum.

        See :func:`paddleformers_fc.storage.manifest.read_listed` for arguments and errors.
        """
        return read_listed(self.catalog.root, self.manifest, name, most)

    @property
    def preferred(self) -> dict[str, tuple[str, ...]]:
        """The copies of every tied parameter, the chosen one first; empty where no copy is chosen."""
        if self.tied == REFUSE:
            return {}
        recorded = {name: place for tie in self.manifest.ties for place, name in enumerate(tie.copies)}
        found: dict[str, tuple[str, ...]] = {}
        for tie in self.rules.ties:
            found[tie.owner] = (*found.get(tie.owner, (tie.owner,)), tie.alias)
        for owner, names in found.items():
            # Without a record the copies are as declared: the owner is the embedding, on the first stage.
            ordered = sorted(names, key=lambda name: recorded.get(name, len(recorded)))
            found[owner] = tuple(ordered if self.tied == "first" else reversed(ordered))
        return found


@dataclass(frozen=True)
class FileVisibility:
    """What a process sees of a checkpoint before anything is checked.

    Args:
        manifest: the commit record.
        identities: of the listed files that are there; what is read later must be what is checked now.
    """

    manifest: Manifest
    identities: Identities

    def missing(self, directory: AnyPath) -> list[str]:
        """The listed files that are not there, by path relative to the directory."""
        return [one.path for one in self.manifest.files if directory / one.path not in self.identities]


def probe(directory: AnyPath) -> FileVisibility:
    """Look at a checkpoint: its manifest, and which of the files are there.

    Raises:
        NotACheckpoint: without a manifest.
        Corrupt, FormatError: a manifest that does not follow its format, or lists none of :data:`DOCUMENTS`.
    """
    manifest = read_manifest(directory)
    _refuse_unlisted(directory, manifest)
    return FileVisibility(manifest, identities_of(directory / receipt.path for receipt in manifest.files))


def open_flex(directory: AnyPath, verify: str = "size") -> FlexCheckpoint:
    """Open a finished checkpoint.

    Args:
        directory: ``checkpoint-N``.
        verify: ``off``, ``size`` or ``full``, see :func:`paddleformers_fc.storage.manifest.verify_files`.
    Raises:
        NotACheckpoint: without a manifest.
        Corrupt: files that are missing, of another size or checksum, or tensors not stored whole; all of them.
        FormatError: a manifest, mapping or header that does not follow its format.
    """
    return open_probed(directory, probe(directory), verify)


def open_probed(
    directory: AnyPath, sight: FileVisibility, verify: str, compared: Collection[str] | None = None
) -> FlexCheckpoint:
    """As :func:`open_flex`, for a checkpoint that :func:`probe` has looked at.

    Args:
        directory: as for :func:`open_flex`.
        sight: what :func:`probe` returned.
        verify: as for :func:`open_flex`.
        compared: under ``size`` the documents whose checksums are compared; None for all of them.
    """
    verify_files(directory, sight.manifest, verify, documents=compared)
    documents = {name: read_document_bytes(directory, sight.manifest, name) for name in DOCUMENTS}
    catalog, faults = build_catalog(directory, sight.manifest, lambda path: shards_of(directory, path))
    return build_checkpoint(replace(catalog, identities=sight.identities), faults, sight.manifest, documents)


def read_document_bytes(directory: AnyPath, manifest: Manifest, name: str) -> bytes:
    """Return the bytes of one of :data:`DOCUMENTS` after comparing them with the manifest's checksum.

    Raises:
        Corrupt: the file is missing or altered.
        FormatError: it is longer than any that was written.
    """
    return read_listed(directory, manifest, name, MAX_MAPPING_BYTES if name == MAPPING_NAME else MAX_DOCUMENT_BYTES)


def build_catalog(
    directory: AnyPath, manifest: Manifest, shards: Callable[[str], Iterable[StoredShard]]
) -> tuple[Catalog, list[str]]:
    """The catalog of a checkpoint, and the contradictions between its files.

    Args:
        directory: ``checkpoint-N``.
        manifest: which files it has.
        shards: what a file holds, by its path relative to the directory.
    """
    roles = {}
    faults: list[str] = []
    for role in ROLES:
        paths = [receipt.path for receipt in manifest.files if is_shard_file(receipt.path, role)]
        tensors, contradictions = gather_shards(
            shard for held in map_paths(lambda path: list(shards(path)), paths, directory) for shard in held
        )
        faults.extend(contradictions)
        if tensors:
            roles[role] = tensors
    return Catalog(directory, roles), faults


def build_checkpoint(
    catalog: Catalog, faults: Iterable[str], manifest: Manifest, documents: Mapping[str, bytes]
) -> FlexCheckpoint:
    """A checkpoint that is whole: every tensor stored once, under the names that its rules know.

    Args:
        catalog: what is stored.
        faults: what is known to be wrong with it.
        manifest: the commit record.
        documents: the contents of :data:`DOCUMENTS`.
    Raises:
        Corrupt: it is not whole.
        FormatError: a document that does not follow its format.
    """
    directory = catalog.root
    model, rules = decode_mapping(documents[MAPPING_NAME], str(directory / MAPPING_NAME))
    config = parse_config(documents[CONFIG_NAME], directory / CONFIG_NAME)
    found = [*faults, *catalog.faults(), *_name_faults(catalog, rules)]
    if found:
        raise Corrupt(
            f"The checkpoint does not hold all of its model, whole and once: {len(found)} faults.",
            where=str(directory),
            evidence=fold(found),
            next_step="Resume from another checkpoint; this one was damaged after it was finished.",
        )
    return FlexCheckpoint(catalog, manifest, rules, config, model)


def _refuse_unlisted(directory: AnyPath, manifest: Manifest) -> None:
    """What the manifest does not list was not checked: it may be of another save, or a link to anywhere."""
    listed = {receipt.path for receipt in manifest.files}
    missing = [name for name in DOCUMENTS if name not in listed]
    if missing:
        raise Corrupt(
            f"{directory} is a checkpoint without {' and '.join(missing)}.",
            where=str(directory),
            evidence=[f"the manifest does not list {name}" for name in missing],
            next_step="Resume from another checkpoint; nothing says what the tensors of this one mean.",
        )


def _name_faults(catalog: Catalog, rules: RuleSet) -> Iterator[str]:
    """Weights that the rules know and no file holds, and the other way round. An alias may share its owner's file."""
    stored = catalog.roles.get(MODEL_STATE, {})
    aliases = {tie.alias for tie in rules.ties}
    for name, spec in rules.targets.items():
        tensor = stored.get(name)
        if tensor is None:
            if name not in aliases:
                yield f"{name}: the rules know this tensor, and it is not stored"
        # The rules say what a tensor is, and so does its file; numbers of one that are not true would be acted upon.
        elif (form := tensor.form).shape != spec.shape or form.dtype != spec.dtype:
            said = f"stored as {form.dtype} {list(form.shape)}"
            yield f"{name}: {said}, the rules know it as {spec.dtype} {list(spec.shape)}"
    for role, tensors in catalog.roles.items():
        for name in tensors:
            if parameter_of(role, name) not in rules.targets:
                yield f"{name}: stored as {role}, and the rules know no such tensor"


def is_shard_file(path: str, role: str) -> bool:
    """Whether a file of a checkpoint holds shards of a role."""
    return path.startswith(f"{role}/") and path.endswith(".safetensors")


def shards_of(directory: AnyPath, path: str) -> Iterator[StoredShard]:
    """What a file of a checkpoint holds, from its header.

    Args:
        directory: ``checkpoint-N``.
        path: of the file, relative to it.
    Raises:
        Corrupt, FormatError: it is missing, truncated, or does not follow its format.
    """
    header = read_header(directory / path)
    text = header.metadata.get(HEADER_KEY)
    if text is None:
        raise FormatError(
            "A file of a flex checkpoint does not say which shards it holds.",
            where=str(directory / path),
            evidence=[f"__metadata__ has no {HEADER_KEY}"],
        )
    widths = {code: item_size(code) for code in {entry.dtype for entry in header.tensors.values()}}
    for shard, entry in decode_shards(text, header.tensors, str(directory / path)):
        yield shard, path, entry.begin, widths[entry.dtype]


def parse_config(raw: bytes, path: AnyPath) -> dict[str, Any]:
    """A model's configuration from the bytes of its file.

    Raises:
        FormatError: it is not a JSON object.
    """
    try:
        config = parse_json(raw)
    except ValueError as error:
        raise FormatError("The model's configuration is not JSON.", where=str(path), evidence=[str(error)]) from error
    if not isinstance(config, dict):
        raise FormatError("The model's configuration is not a JSON object.", where=str(path))
    return config
