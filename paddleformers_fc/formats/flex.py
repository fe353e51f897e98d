"""A finished flex checkpoint: its manifest, its rules and its catalog.

Opening reads the manifest, ``mapping.json``, ``config.json`` and the headers of the safetensors files; the cost is one
small read per file. A directory without a manifest is not a checkpoint and is refused before anything else is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc import __version__
from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.families.stated import decode_mapping, encode_mapping, family_name
from paddleformers_fc.formats.catalog import Catalog, gather_shards
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    DEPTH_TEXT,
    MAPPING_NAME,
    CheckList,
    ExportWriter,
    Format,
    OpenedCheckpoint,
    OutputFile,
    StoredModel,
    StoredShard,
    compare_run,
    grouped_by_size,
    parse_config,
)
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES, parameter_of
from paddleformers_fc.layout.shard_json import HEADER_KEY, decode_shards, encode_shards
from paddleformers_fc.layout.shards import Shard, ShardsByRole
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.dtypes import item_size, to_safetensors
from paddleformers_fc.storage.files import exists, map_paths
from paddleformers_fc.storage.json_io import MAX_DOCUMENT_BYTES
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    RESTORE,
    TRAINER_DIRECTORY,
    Manifest,
    encode_manifest,
    read_listed,
    read_manifest,
    verify_files,
)
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.ranges import Identities, identities_of
from paddleformers_fc.storage.safetensors import FileLayout, layout_file, read_header
from paddleformers_fc.text import count_text, size_text

DOCUMENTS = (MAPPING_NAME, CONFIG_NAME)
"""The files beside the manifest that opening reads."""

MAX_MAPPING_BYTES = 512 * 1024 * 1024
"""The longest mapping that is read: one tensor takes about a kilobyte of it."""


@dataclass(frozen=True)
class FileVisibility:
    """The files of a checkpoint that are visible to a process, before any check.

    Args:
        manifest: the commit record.
        identities: of the listed files that are there, so that later reads get the files that are checked now.
    """

    manifest: Manifest
    identities: Identities

    def missing(self, directory: AnyPath) -> list[str]:
        """Return the listed files that are not there, by path relative to the directory."""
        return [one.path for one in self.manifest.files if directory / one.path not in self.identities]


def probe(directory: AnyPath) -> FileVisibility:
    """Read the manifest of a checkpoint, and find the listed files that are there.

    Raises:
        NotACheckpoint: without a manifest.
        Corrupt, FormatError: a manifest that does not follow its format, or lists none of :data:`DOCUMENTS`.
    """
    manifest = read_manifest(directory)
    _refuse_unlisted(directory, manifest)
    return FileVisibility(manifest, identities_of(directory / checksum.path for checksum in manifest.files))


def open_flex(directory: AnyPath, verify: str = "size", roles: Collection[str] | None = None) -> OpenedCheckpoint:
    """Open a finished checkpoint.

    Args:
        directory: ``checkpoint-N``.
        verify: ``off``, ``size`` or ``full``, see :func:`paddleformers_fc.storage.manifest.verify_files`.
        roles: the roles whose tensors are read; None for all. Under ``off``, files of others need not exist.
    Raises:
        NotACheckpoint: without a manifest.
        Corrupt: files that are missing, of another size or checksum, or tensors not stored whole; all of them.
        FormatError: a manifest, mapping or header that does not follow its format.
    """
    return open_probed(directory, probe(directory), verify, roles=roles)


def open_probed(
    directory: AnyPath,
    sight: FileVisibility,
    verify: str,
    compared: Collection[str] | None = None,
    roles: Collection[str] | None = None,
) -> OpenedCheckpoint:
    """Open a checkpoint as :func:`open_flex`, with the result of :func:`probe`.

    Args:
        directory: as for :func:`open_flex`.
        sight: the result of :func:`probe`.
        verify: as for :func:`open_flex`.
        compared: under ``size`` the documents whose checksums are compared; None for all of them.
        roles: as for :func:`open_flex`.
    """
    verify_files(directory, sight.manifest, verify, documents=compared)
    documents = {name: read_document_bytes(directory, sight.manifest, name) for name in DOCUMENTS}
    catalog, faults = build_catalog(directory, sight.manifest, lambda path: shards_of(directory, path), roles)
    return build_checkpoint(replace(catalog, identities=sight.identities), faults, sight.manifest, documents)


def read_document_bytes(directory: AnyPath, manifest: Manifest, name: str) -> bytes:
    """Return the bytes of one of :data:`DOCUMENTS` after comparing them with the manifest's checksum.

    Raises:
        Corrupt: the file is missing or altered.
        FormatError: it is longer than any that was written.
    """
    return read_listed(directory, manifest, name, MAX_MAPPING_BYTES if name == MAPPING_NAME else MAX_DOCUMENT_BYTES)


def build_catalog(
    directory: AnyPath,
    manifest: Manifest,
    shards: Callable[[str], Iterable[StoredShard]],
    wanted: Collection[str] | None = None,
) -> tuple[Catalog, list[str]]:
    """Return the catalog of a checkpoint, and the contradictions between its files.

    Args:
        directory: ``checkpoint-N``.
        manifest: lists its files.
        shards: the content of a file, by its path relative to the directory.
        wanted: the roles to read; None for all.
    """
    roles = {}
    faults: list[str] = []
    for role in ROLES if wanted is None else [one for one in ROLES if one in wanted]:
        paths = [checksum.path for checksum in manifest.files if is_shard_file(checksum.path, role)]
        tensors, contradictions = gather_shards(
            shard for found in map_paths(lambda path: list(shards(path)), paths, directory) for shard in found
        )
        faults.extend(contradictions)
        if tensors:
            roles[role] = tensors
    return Catalog(directory, roles), faults


def build_checkpoint(
    catalog: Catalog, faults: Iterable[str], manifest: Manifest, documents: Mapping[str, bytes]
) -> OpenedCheckpoint:
    """Return a checkpoint that is whole: every tensor stored once, under the names of its rules.

    Args:
        catalog: the stored tensors.
        faults: the faults found before.
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
            f"The checkpoint does not hold all of its model, whole and once: {count_text(len(found), 'fault')}.",
            where=str(directory),
            evidence=fold(found),
            next_step="Resume from another checkpoint; this one was damaged after it was finished.",
        )
    recorded = {one.path: one for one in manifest.files}
    return OpenedCheckpoint(FLEX, catalog, config, lambda: StoredModel(rules, model), recorded, manifest)


def _refuse_unlisted(directory: AnyPath, manifest: Manifest) -> None:
    """Refuse a manifest that does not list the required documents: an unlisted file is not checked."""
    listed = {checksum.path for checksum in manifest.files}
    missing = [name for name in DOCUMENTS if name not in listed]
    if missing:
        raise Corrupt(
            f"{directory} is a checkpoint without {' and '.join(missing)}.",
            where=str(directory),
            evidence=[f"the manifest does not list {name}" for name in missing],
            next_step="Resume from another checkpoint; the tensors of this one have no mapping.",
        )


def _name_faults(catalog: Catalog, rules: RuleSet) -> Iterator[str]:
    """Yield weights that only the rules or only the files have. An alias may share its owner's file."""
    stored = catalog.roles.get(MODEL_STATE, {})
    aliases = {tie.alias for tie in rules.ties}
    for name, spec in rules.targets.items():
        tensor = stored.get(name)
        if tensor is None:
            if name not in aliases:
                yield f"{name}: in the rules and not stored"
        # Rules and file both contain shape and dtype; readers would use wrong ones.
        elif (form := tensor.form).shape != spec.shape or form.dtype != spec.dtype:
            stored_as = f"stored as {form.dtype} {list(form.shape)}"
            yield f"{name}: {stored_as}, declared by the rules as {spec.dtype} {list(spec.shape)}"
    for role, tensors in catalog.roles.items():
        for name in tensors:
            if parameter_of(role, name) not in rules.targets:
                yield f"{name}: stored as {role} and not in the rules"


def is_shard_file(path: str, role: str) -> bool:
    """Return whether a file of a checkpoint holds shards of a role."""
    return path.startswith(f"{role}/") and path.endswith(".safetensors")


def shards_of(directory: AnyPath, path: str) -> Iterator[StoredShard]:
    """Return the shards in a file of a checkpoint, from its header.

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
            "A file of a flex checkpoint has no description of its shards.",
            where=str(directory / path),
            evidence=[f"__metadata__ has no {HEADER_KEY}"],
            next_step=RESTORE,
        )
    widths = {code: item_size(code) for code in {entry.dtype for entry in header.tensors.values()}}
    for shard, entry in decode_shards(text, header.tensors, str(directory / path)):
        yield shard, path, entry.begin, widths[entry.dtype]


class FlexWriter(ExportWriter):
    """The files of a flex checkpoint. The commit of a save writes mapping and manifest; a conversion seals with them.

    A conversion stores the tensors of the model that was saved, whole, with its mapping: no number and no name changes.
    """

    marks = (MANIFEST_NAME,)
    alone = True

    def rules(self, checkpoint: OpenedCheckpoint) -> RuleSet:
        """Return the rules of the stored model, or of the model that is built from open weights."""
        return checkpoint.format.built_model(checkpoint).rules

    def files(self, checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
        """Divide the tensors of every role into files, in natural order."""
        return tuple(
            OutputFile(path, role, group)
            for role, tensors in layout.items()
            for groups in [grouped_by_size(tensors, max_file_bytes)]
            for path, group in zip(self.names(role, 0, len(groups)), groups, strict=True)
        )

    def documents(self, checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
        """Return the mapping, and the state of the Trainer as far as the checkpoint has it."""
        model = checkpoint.format.built_model(checkpoint)
        if MAPPING_NAME in checkpoint.recorded:
            mapping = checkpoint.document(MAPPING_NAME, MAX_MAPPING_BYTES)
        else:
            mapping = encode_mapping(model.description, model.rules)
        if checkpoint.has_run:
            compare_run(checkpoint)
        of_trainer = [path for path in checkpoint.documents if path.split("/")[0] == TRAINER_DIRECTORY]
        return {MAPPING_NAME: mapping, **{path: checkpoint.document(path) for path in sorted(of_trainer)}}

    def seal(self, checkpoint: OpenedCheckpoint, written: Sequence[FileChecksum]) -> dict[str, bytes]:
        """Return the manifest: that of the source without its files, or that of step 0 if it has no run."""
        record = checkpoint.manifest if checkpoint.has_run else _NO_RUN
        built = checkpoint.format.built_model(checkpoint)
        manifest = msgspec.structs.replace(
            record,
            written_by=f"paddleformers_fc {__version__}",
            family=record.family or family_name(built.description),
            files=sorted(written, key=lambda one: one.path),
            diverged_ties=msgspec.UNSET,
        )
        return {MANIFEST_NAME: encode_manifest(manifest)}

    def owns(self, path: str) -> bool:
        """Return False: a checkpoint is not replaced file by file."""
        return False

    def names(self, role: str, rank: int, count: int) -> list[str]:
        """Return the paths of the files of one rank and role."""
        numbers = [f"-{number:05d}" for number in range(1, count + 1)] if count > 1 else [""] * count
        return [f"{role}/rank-{rank:05d}{number}.safetensors" for number in numbers]

    def header(self, path: Path, shards: Sequence[Shard]) -> FileLayout:
        """Return the header of a file, with the position of every shard in its tensor."""
        entries = [
            (one.name, to_safetensors(one.dtype), one.box.shape if one.flat is None else (one.size,)) for one in shards
        ]
        return layout_file(path, entries, {"format": "flex", HEADER_KEY: encode_shards(shards)})


_NO_RUN = Manifest(written_by="", step=0, consumed_samples=0, world_size=1, parallel={}, family="", files=[])
"""The record of a checkpoint of weights alone."""


class FlexFormat(Format):
    """Flex checkpoints, the format that this package saves."""

    name = "flex_checkpoint"
    title = "flex checkpoint"
    predicate = "is a flex checkpoint"
    roles = ROLES
    canonical = False
    loadable = True
    advice = "Name it in resume_from_checkpoint."
    checks = ("manifest", "files", "tensors", "run", "mapping", "equal values")
    writer = FlexWriter()

    def recognises(self, directory: AnyPath) -> bool:
        """Return whether there is a manifest, which a save writes last."""
        return exists(directory / MANIFEST_NAME)

    def open(self, directory: AnyPath, verify: str) -> OpenedCheckpoint:
        """As :func:`open_flex`."""
        return open_flex(directory, verify)

    def read_config(self, directory: AnyPath) -> dict[str, Any]:
        """Return the configuration after comparing it with the checksum in the manifest."""
        return parse_config(
            read_document_bytes(directory, read_manifest(directory), CONFIG_NAME), directory / CONFIG_NAME
        )

    def verify(self, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
        """Check the manifest, the files that it lists, and that every tensor is stored whole and once."""
        manifest = checks.check("manifest", lambda: read_manifest(directory), manifest_text)
        checks.files, checks.bytes = len(manifest.files), sum(one.size for one in manifest.files)
        if level != "off":
            checks.attempt(
                "files",
                lambda: verify_files(directory, manifest, level),
                lambda _: f"{count_text(checks.files, 'file')}, {size_text(checks.bytes)}: {DEPTH_TEXT[level]}",
            )
        return checks.check(
            "tensors",
            lambda: open_flex(directory, "off"),
            lambda found: f"{count_text(found.catalog.count, 'tensor')}, each stored whole and once",
        )

    def shards(self, checkpoint: OpenedCheckpoint, role: str, names: Collection[str]) -> Iterator[StoredShard]:
        """Yield the shards of some tensors, from the headers of their files."""
        catalog = checkpoint.catalog
        files = {file for name in names for file, _ in catalog.roles[role][name].offsets}
        for file in sorted(files):
            yield from (stored for stored in shards_of(catalog.root, file) if stored[0].name in names)


FLEX = FlexFormat()


def manifest_text(manifest: Manifest) -> str:
    """Return a manifest's step, ranks and writer in one line."""
    summary = f"step {manifest.step:,}, {count_text(manifest.world_size, 'rank')}, {manifest.written_by}"
    if not manifest.differences:
        return summary
    # That is a fault of the training, not of the checkpoint.
    return f"{summary}; {count_text(len(manifest.differences), 'replica')} differed when it was saved, see inspect"
