"""The flex checkpoint format: opening, verifying and conversion.

Opening reads the manifest, the index, ``mapping.json`` and ``config.json``. Files with tensors are only opened by the
ranks that read them. A directory without a manifest is not a checkpoint, and nothing else in it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from paddleformers_fc import __version__
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.stated import decode_mapping, encode_mapping, family_name
from paddleformers_fc.formats.catalog import Catalog
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    DEPTH_TEXT,
    MAPPING_NAME,
    CheckList,
    Config,
    ExportWriter,
    Format,
    OpenedCheckpoint,
    OutputFile,
    StoredModel,
    check_stored_once,
    compare_run,
    grouped_by_size,
    parse_config,
    tensor_header,
)
from paddleformers_fc.formats.index import HEADER, IndexedFiles, decode_index, encode_index, shard_columns
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES, parameter_of
from paddleformers_fc.layout.shards import ShardsByRole
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.storage.checksum import INDEX_NAME, FileChecksum, checksum_of, records_of
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.identities import Identities, identities_of
from paddleformers_fc.storage.json_io import MAX_DOCUMENT_BYTES
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    TRAINER_DIRECTORY,
    Manifest,
    Surroundings,
    encode_manifest,
    read_listed,
    read_manifest,
    verify_files,
)
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import count_text, size_text

DOCUMENTS = (INDEX_NAME, MAPPING_NAME, CONFIG_NAME)
"""The files that opening reads besides the manifest."""

_MOST_BYTES = {MAPPING_NAME: 512 * 1024 * 1024, INDEX_NAME: 256 * 1024 * 1024}
"""Maximum sizes of metadata files. A tensor takes about 1 kB of the mapping; 50 TB of tensors take 100 MB of blocks."""


def open_flex(directory: AnyPath, verify: str = "size", roles: Collection[str] | None = None) -> OpenedCheckpoint:
    """Open a finished checkpoint.

    Args:
        directory: ``checkpoint-N``.
        verify: ``off``, ``size`` or ``full``, see :func:`paddleformers_fc.storage.manifest.verify_files`.
        roles: the roles whose tensors are read; None for all. Under ``off``, files of other roles need not exist.
    Raises:
        NotACheckpoint: there is no manifest.
        Corrupt: files are missing or have another size or checksum, or tensors are incomplete; the error lists all of
            them.
        FormatError: the manifest, index or mapping is malformed.
    """
    identity, around = identities_of([directory / MANIFEST_NAME]), Surroundings(directory)
    manifest = read_manifest(directory)
    _verify(directory, manifest, verify, around)
    documents = {name: read_document_bytes(directory, manifest, name) for name in DOCUMENTS}
    return build_checkpoint(directory, manifest, documents, identity, around, roles)


def _verify(directory: AnyPath, manifest: Manifest, level: str, around: Surroundings) -> None:
    """Check the files of a checkpoint; ``full`` uses the checksums in the index, which show where damage is."""
    recorded: Mapping[str, FileChecksum] = {}
    if level == "full":
        raw = read_document_bytes(directory, manifest, INDEX_NAME)
        recorded = decode_index(raw, manifest.files, directory / INDEX_NAME).recorded
    verify_files(directory, manifest, level, recorded=recorded, around=around)


def read_document_bytes(directory: AnyPath, manifest: Manifest, name: str) -> bytes:
    """Read one of :data:`DOCUMENTS` and compare it with the manifest's checksum.

    Raises:
        Corrupt: the file is missing, changed or not listed.
        FormatError: it is too long.
    """
    return read_listed(directory, manifest, name, _MOST_BYTES.get(name, MAX_DOCUMENT_BYTES))


def build_checkpoint(
    directory: AnyPath,
    manifest: Manifest,
    documents: Mapping[str, bytes],
    identity: Identities,
    around: Surroundings,
    requested: Collection[str] | None = None,
) -> OpenedCheckpoint:
    """Return an opened checkpoint, after checking that all tensors of its rules are stored exactly once.

    Args:
        directory: ``checkpoint-N``.
        manifest: the commit record.
        documents: the contents of :data:`DOCUMENTS`.
        identity: the identity of the manifest.
        around: the files that were already checked.
        requested: the roles to read; None for all.
    Raises:
        Corrupt: tensors are incomplete or do not match the rules.
        FormatError: a metadata file is malformed.
    """
    index = decode_index(documents[INDEX_NAME], manifest.files, directory / INDEX_NAME)
    model, rules = decode_mapping(documents[MAPPING_NAME], str(directory / MAPPING_NAME))
    config = parse_config(documents[CONFIG_NAME], directory / CONFIG_NAME)
    tensors, found = {}, []
    for role in ROLES if requested is None else [one for one in ROLES if one in requested]:
        gathered, contradictions = index.tensors(role)
        found.extend(contradictions)
        if gathered:
            tensors[role] = gathered
    catalog = Catalog(directory, tensors, IndexedFiles(directory, index, identity, around))
    found += [*catalog.faults(), *_name_faults(catalog, rules)]
    check_stored_once(directory, found, "Resume from another checkpoint; this one was damaged after it was finished.")
    stored = StoredModel(rules, model)
    return OpenedCheckpoint(FLEX, catalog, config, stored, recorded=index.recorded, commit_record=manifest)


def _name_faults(catalog: Catalog, rules: RuleSet) -> Iterator[str]:
    """Yield weights that only the rules or only the files contain. Aliases need not be stored."""
    stored = catalog.roles.get(MODEL_STATE, {})
    aliases = {tie.alias for tie in rules.ties}
    for name, spec in rules.targets.items():
        tensor = stored.get(name)
        if tensor is None:
            if name not in aliases:
                yield f"{name}: in the rules and not stored"
        # Both rules and files contain shape and dtype, and readers rely on either.
        elif (form := tensor.form).shape != spec.shape or form.dtype != spec.dtype:
            stored_as = f"stored as {form.dtype} {list(form.shape)}"
            yield f"{name}: {stored_as}, declared by the rules as {spec.dtype} {list(spec.shape)}"
    for role, tensors in catalog.roles.items():
        for name in tensors:
            if parameter_of(role, name) not in rules.targets:
                yield f"{name}: stored as {role} and not in the rules"


def _model_rules(checkpoint: OpenedCheckpoint) -> RuleSet:
    """Return the rules of the stored model, or of the model built from open weights."""
    return checkpoint.built.rules


def _all_files(checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
    """Divide the tensors of every role into files, in natural order."""
    return tuple(
        OutputFile(path, role, group)
        for role, tensors in layout.items()
        for groups in [grouped_by_size(tensors, max_file_bytes)]
        for path, group in zip(file_names(role, 0, len(groups)), groups, strict=True)
    )


def _documents(checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the mapping, and the Trainer's state if the checkpoint has it."""
    model = checkpoint.built
    if MAPPING_NAME in checkpoint.recorded:
        mapping = checkpoint.document(MAPPING_NAME, _MOST_BYTES[MAPPING_NAME])
    else:
        mapping = encode_mapping(model.description, model.rules)
    if checkpoint.has_run:
        compare_run(checkpoint)
    of_trainer = [path for path in checkpoint.documents if path.split("/")[0] == TRAINER_DIRECTORY]
    return {MAPPING_NAME: mapping, **{path: checkpoint.document(path) for path in sorted(of_trainer)}}


def _seal(
    checkpoint: OpenedCheckpoint, files: Sequence[OutputFile], written: Sequence[FileChecksum]
) -> dict[str, bytes]:
    """Return the index and the manifest: the source's manifest with the new files, or one of step 0 without a run."""
    record = checkpoint.manifest if checkpoint.has_run else _NO_RUN
    index = encode_index(shard_columns((one.path, one.tensors) for one in files), written)
    manifest = msgspec.structs.replace(
        record,
        written_by=f"paddleformers_fc {__version__}",
        family=record.family or family_name(checkpoint.built.description),
        files=records_of([*written, checksum_of(INDEX_NAME, index)]),
        ties=[],
    )
    return {INDEX_NAME: index, MANIFEST_NAME: encode_manifest(manifest)}


def file_names(role: str, rank: int, count: int) -> list[str]:
    """Return the paths of the files of one rank and role."""
    numbers = [f"-{number:05d}" for number in range(1, count + 1)] if count > 1 else [""] * count
    return [f"{role}/rank-{rank:05d}{number}.safetensors" for number in numbers]


FLEX_WRITER = ExportWriter(
    marks=(MANIFEST_NAME,),
    rules=_model_rules,
    files=_all_files,
    header=partial(tensor_header, HEADER),
    documents=_documents,
    seal=_seal,
    alone=True,
)
"""Writes a flex checkpoint in a conversion. It contains complete tensors of the saved model with its mapping, so no
value and no name changes."""

_NO_RUN = Manifest(written_by="", step=0, consumed_samples=0, world_size=1, parallel={}, family="", files=[])
"""The manifest of a checkpoint that contains only weights."""


def _is_flex(directory: AnyPath) -> bool:
    """Return whether there is a manifest, which a save writes last."""
    return exists(directory / MANIFEST_NAME)


def _open(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    return open_flex(directory, verify)


def read_config(directory: AnyPath) -> dict[str, Any]:
    """Read the configuration and compare it with the checksum in the manifest."""
    return parse_config(read_document_bytes(directory, read_manifest(directory), CONFIG_NAME), directory / CONFIG_NAME)


def read_description(directory: AnyPath) -> ModelDescription:
    """Read the description of the stored model and compare its file with the checksum in the manifest."""
    data = read_document_bytes(directory, read_manifest(directory), MAPPING_NAME)
    return decode_mapping(data, str(directory / MAPPING_NAME))[0]


def _verify_format(format: Format, directory: AnyPath, level: str, checks: CheckList) -> OpenedCheckpoint:
    """Check the manifest, the files that it lists, and that every tensor is stored exactly once."""
    with checks.required("manifest"):
        manifest = read_manifest(directory)
    checks.passed("manifest", manifest_text(manifest))
    checks.files, checks.bytes = len(manifest.files), sum(one.size for one in manifest.files)
    if level != "off":
        with checks.optional("files"):
            _verify(directory, manifest, level, Surroundings(directory))
            files = f"{count_text(checks.files, 'file')}, {size_text(checks.bytes)}"
            checks.passed("files", f"{files}: {DEPTH_TEXT[level]}")
    with checks.required("tensors"):
        opened = open_flex(directory, "off")
        indexed_files(opened).check(opened.files)
    checks.passed("tensors", f"{count_text(opened.catalog.count, 'tensor')}, each stored exactly once")
    return opened


FLEX = Format(
    name="flex_checkpoint",
    title="flex checkpoint",
    predicate="is a flex checkpoint",
    advice="Set resume_from_checkpoint to it.",
    checks=("manifest", "files", "tensors", "run", "mapping", "equal values"),
    recognises=_is_flex,
    opener=_open,
    verifier=_verify_format,
    roles=ROLES,
)
"""Flex checkpoints, the format that this package saves."""


def indexed_files(checkpoint: OpenedCheckpoint) -> IndexedFiles:
    """Return the identities of the files of an opened flex checkpoint."""
    return cast(IndexedFiles, checkpoint.catalog.identities)


def manifest_text(manifest: Manifest) -> str:
    """Return a manifest's step, ranks and writer in one line."""
    summary = f"step {manifest.step:,}, {count_text(manifest.world_size, 'rank')}, {manifest.written_by}"
    if not manifest.differences:
        return summary
    # This is a fault of the training run, not of the checkpoint.
    return f"{summary}; {count_text(len(manifest.differences), 'replica')} differed when it was saved, see inspect"
