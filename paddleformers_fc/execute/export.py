"""Export: write a flex checkpoint as files of another format, in one process.

The format's writer (Hugging Face by default) determines tensors, files, headers and the index. Files are written in
batches (:mod:`.export_files`) that read only the ranges of their tensors. Memory: two batches plus scratch memory,
independent of the size of the model or of a tensor. Equal checkpoints give equal bytes under every layout. Checksums
are computed while the files are written (:mod:`paddleformers_fc.storage.export_checksums`). :mod:`.live_export` exports
a live model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.digest import TensorHasher, weights_md5
from paddleformers_fc.execute.export_files import ExportPlan, LocalExport, RemoteExport, staged_export, write_files
from paddleformers_fc.execute.merging import read_merge
from paddleformers_fc.execute.opening import compare_on_all, open_on_all_ranks
from paddleformers_fc.execute.reading import verify_equal
from paddleformers_fc.families import described_by_file, family_for, is_known
from paddleformers_fc.families.description import shared_copies
from paddleformers_fc.families.enumerate import enumerate_tensors
from paddleformers_fc.families.exported import exported_config
from paddleformers_fc.families.stated import canonical_ties
from paddleformers_fc.formats.checkpoint import (
    CONFIG_NAME,
    REFUSE,
    ExportWriter,
    OpenedCheckpoint,
    OutputFile,
    config_bytes,
    not_a_flex_checkpoint,
    parse_config,
    with_role,
    with_tied,
)
from paddleformers_fc.formats.huggingface import DEFAULT_MAX_SHARD_BYTES, HUGGINGFACE_WRITER
from paddleformers_fc.formats.registry import checkpoints_advice, default_writer
from paddleformers_fc.formats.stock_checkpoint import check_copies
from paddleformers_fc.layout.roles import MODEL_STATE, OPTIMIZER_STATE, parameter_of
from paddleformers_fc.layout.shards import ShardsByRole, shard_bytes
from paddleformers_fc.plan.build import CAST, ReadSource, plan_reads
from paddleformers_fc.plan.report import OPEN_WEIGHTS
from paddleformers_fc.plan.sources import (
    canonical_layout,
    canonical_source,
    check_all_canonical,
    huggingface_source,
    resume_source,
)
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.storage.checksum import FileChecksum, checksum_of
from paddleformers_fc.storage.dtypes import model_dtype, parse_dtype
from paddleformers_fc.storage.files import check_not_file, exists, list_directory, real_path
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from paddleformers_fc.storage.paths import AnyPath, RemotePath

_KEYS = ("torch_dtype", "dtype")
"""Keys of a configuration that name the dtype of the weights."""


def parse_export_dtype(dtype: str) -> str:
    """Return the name of the dtype of an export; empty for the stored dtype.

    Raises:
        OptionError: it is neither empty nor one of the dtypes between which plans cast.
    """
    return parse_dtype(dtype, CAST) if dtype else ""


def recast(
    checkpoint: OpenedCheckpoint, source: ReadSource, layout: ShardsByRole, dtype: str
) -> tuple[ReadSource, ShardsByRole]:
    """Return the source and the target tensors of an export in another dtype.

    Only tensors of the model's dtype change. Others, such as a float32 router next to bfloat16 weights, keep their
    dtype, and so do tensors that the family declares as float32. In an export to float32 a weight is read from its
    master weight if one is stored, so that no precision is lost.

    Args:
        checkpoint: the checkpoint to export.
        source: the source from the checkpoint to canonical tensors.
        layout: the canonical tensors.
        dtype: dtype of the export.
    Raises:
        OptionError: the model's dtype cannot be converted.
    """
    weights = layout[MODEL_STATE]
    stored = model_dtype({shard.dtype for shard in weights.values()})
    if stored not in CAST:
        raise OptionError(
            f"The model's dtype {stored} cannot be converted to {dtype}.",
            where="--dtype",
            evidence=[f"known: {', '.join(CAST)}"],
            next_step="Leave out --dtype (dtype=) for the stored dtype.",
        )
    kept = _kept(checkpoint) if stored == "float32" else frozenset()
    changed = {
        name: msgspec.structs.replace(shard, dtype=dtype) if shard.dtype == stored and name not in kept else shard
        for name, shard in weights.items()
    }
    return structs.replace(source, may_cast=True), {**layout, MODEL_STATE: changed}


def recast_documents(documents: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """Return the metadata files of an export with the dtype set in ``config.json``."""
    if CONFIG_NAME not in documents:
        return dict(documents)
    config = _named(parse_config(documents[CONFIG_NAME], Path(CONFIG_NAME)), dtype)
    if not config.keys() & {*_KEYS}:
        config[_KEYS[0]] = dtype
    return {**documents, CONFIG_NAME: (json.dumps(config, indent=2) + "\n").encode()}


def _named(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration with another dtype, also in nested configurations."""
    return {
        key: dtype if key in _KEYS else _named(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }


def _kept(checkpoint: OpenedCheckpoint) -> frozenset[str]:
    """Return the canonical names of tensors that are float32 under any dtype of the model."""
    if not is_known(checkpoint.known.config):
        return frozenset()
    model = checkpoint.known
    declared = {
        one.name for one in enumerate_tensors(family_for(model.config), model, "bfloat16") if one.dtype == "float32"
    }
    return frozenset(
        name for rule in checkpoint.rules.rules if declared.intersection(rule.targets) for name in rule.sources
    )


@dataclass(frozen=True)
class ExportReport:
    """The report of an export.

    Args:
        directory: the target, a path or a URL.
        files: name -> length of every weight file in bytes.
        tensors: number of tensors.
        bytes: total bytes of the tensors.
        roles: number of tensors by role; a tensor in several parts counts once.
        md5: the md5 of names and bytes, if it was requested; see :func:`.digest.weights_md5`.
        dropped: the tensors of open weights that a conversion did not write, because the model does not have them.
    """

    directory: AnyPath
    files: dict[str, int]
    tensors: int
    bytes: int
    roles: dict[str, int]
    md5: str = ""
    dropped: tuple[str, ...] = ()

    def digests(self) -> dict[str, str]:
        """Read every weight file and return its digest (:func:`.digest_of`), which is equal for equal content.

        Raises:
            Corrupt, StorageError: a file is missing or cannot be read.
        """
        return {name: digest_of(self.directory / name) for name in self.files}


def export_checkpoint(
    source: AnyPath,
    target: Path,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    verify: str = "size",
    tied: str = REFUSE,
    role: str = MODEL_STATE,
) -> ExportReport:
    """Write a checkpoint's weights as a Hugging Face directory.

    Args:
        source: a finished flex checkpoint, or a checkpoint of Paddle that contains a ``config.json``.
        target: the output directory. Older weights in it are replaced; other files are kept.
        max_shard_bytes: maximum size of one file's tensors, in bytes; a larger tensor gets its own file.
        verify: how thoroughly to check the source: ``off``, ``size`` or ``full``.
        tied: the pipeline stage whose copy of a tied tensor to export: ``first`` or ``last``. Under ``refuse`` the
            copies must be equal.
        role: ``model_state``, or ``ema_state`` for the moving average.
    Raises:
        FlexError: the export failed; older weights in the target are unchanged.
    """
    checkpoint = with_tied(open_on_all_ranks(source, ALONE, verify), tied)
    return export_opened(with_role(checkpoint, role), target, max_shard_bytes)


def export_opened(
    checkpoint: OpenedCheckpoint,
    target: AnyPath,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    writer: ExportWriter | None = None,
    base: OpenedCheckpoint | None = None,
    dtype: str = "",
    md5: bool = False,
) -> ExportReport:
    """Write the tensors of an opened checkpoint as a directory of another format.

    Args:
        checkpoint: the checkpoint; if it is ``unread``, every byte of its files is compared first.
        target: as in :func:`export_checkpoint`, or a URL.
        max_shard_bytes: as in :func:`export_checkpoint`.
        writer: the format's writer; by default open weights, and PEFT for adapters.
        base: open weights into which to merge the checkpoint's adapters, if any.
        dtype: dtype of the exported weights; empty for the stored dtype. Only for open weights without ``base``.
        md5: also compute the md5 of the names and bytes of all tensors, for the report.
    Raises:
        FlexError: the export failed. Older weights in a local target are unchanged; at a URL they may be deleted.
    """
    plan = _plan_export(checkpoint, target, max_shard_bytes, writer, base, dtype)
    if checkpoint.unread:
        blocks = ((one, range(one.count)) for one in checkpoint.recorded.values())
        compare_on_all(checkpoint.catalog.root, blocks, checkpoint.catalog.identities, ALONE)
    _check_copies_equal(plan)
    documents = {**_model_files(checkpoint), **plan.writer.documents(checkpoint, plan.files)}
    if dtype:
        documents = recast_documents(documents, dtype)
    with staged_export(target, plan.writer) as staged:
        hasher = TensorHasher() if md5 else None
        written = write_files(plan, staged, hasher)
        finish_export(staged, checkpoint, plan.files, documents, written)
    report = replace(report_of(target, plan.files, written), dropped=_dropped(checkpoint, plan.source))
    return report if hasher is None else replace(report, md5=weights_md5(hasher.digests))


def report_of(target: AnyPath, files: Sequence[OutputFile], written: Sequence[FileChecksum]) -> ExportReport:
    """Return the report of an export from its files and their checksums."""
    sizes = {one.path: one.size for one in sorted(written, key=lambda one: one.path)}
    tensors = [shard for file in files for shard in file.tensors]
    names = dict.fromkeys((file.role, one.name) for file in files for one in file.tensors)
    roles = dict(Counter(role for role, _ in names))
    return ExportReport(target, sizes, len(tensors), sum(map(shard_bytes, tensors)), roles)


def _plan_export(
    checkpoint: OpenedCheckpoint,
    target: AnyPath,
    max_shard_bytes: int,
    writer: ExportWriter | None,
    base: OpenedCheckpoint | None,
    dtype: str,
) -> ExportPlan:
    """Return the plan of an export; see :func:`export_opened` for the arguments."""
    directory = checkpoint.catalog.root
    check_no_checkpoint(target)
    for one in (directory, *([] if base is None else [base.catalog.root])):
        if isinstance(target, RemotePath):  # Older files at a URL are deleted before the source is read.
            check_no_overlap(one, target)
    if checkpoint.format.canonical and (writer is None or writer is HUGGINGFACE_WRITER):
        raise not_a_flex_checkpoint(checkpoint.format, directory, checkpoints_advice(directory))
    merge = None if base is None else read_merge(checkpoint, base)
    chosen = HUGGINGFACE_WRITER if merge is not None else writer or default_writer(checkpoint)
    source = export_source(checkpoint, chosen) if base is None else canonical_source(base)
    layout: ShardsByRole = canonical_layout(source)
    if base is None and chosen is HUGGINGFACE_WRITER:
        check_all_canonical(checkpoint, layout)
    if dtype:
        source, layout = recast(checkpoint, source, layout, dtype)
    files = chosen.files(checkpoint, layout, max_shard_bytes)
    if any(one.role == OPTIMIZER_STATE for one in files):
        checkpoint.check_states()
    check_copies(checkpoint)
    return ExportPlan(source, layout, files, chosen, merge, max_shard_bytes)


def finish_export(
    export: LocalExport | RemoteExport,
    checkpoint: OpenedCheckpoint,
    files: Sequence[OutputFile],
    documents: Mapping[str, bytes],
    written: Sequence[FileChecksum],
) -> None:
    """Write the metadata files and the recorded checksums of an export, and commit it.

    Args:
        export: the export, whose tensor files are closed.
        checkpoint: its source.
        files: the tensor files.
        documents: the metadata files.
        written: the checksums of the tensor files.
    """
    recorded = [*written, *(checksum_of(name, data) for name, data in documents.items())]
    export.finish({**documents, **export.writer.seal(checkpoint, files, recorded)}, written)


def export_source(checkpoint: OpenedCheckpoint, writer: ExportWriter) -> ReadSource:
    """Return the source of a format's tensors, which are canonical unless the format has rules.

    Raises:
        FlexError: the rules of the checkpoint or of the format cannot be derived or proved.
    """
    rules = writer.rules(checkpoint)
    if rules is None:
        return canonical_source(checkpoint)
    if checkpoint.format.canonical:
        aliases = canonical_ties(described_by_file(checkpoint.config)) | shared_copies(rules)
        source, report = huggingface_source(checkpoint.catalog, rules, aliases=aliases)
        report.raise_error(str(checkpoint.catalog.root), stored=OPEN_WEIGHTS)
    else:
        source, report = resume_source(checkpoint, rules)
        report.raise_error(str(checkpoint.catalog.root))
    return source


def check_no_checkpoint(target: AnyPath) -> None:
    """Check that the target of an export is not a finished checkpoint.

    Raises:
        OptionError: it is a finished checkpoint.
    """
    if exists(target / MANIFEST_NAME):
        raise OptionError(
            "The target of the export is a finished checkpoint.",
            where=str(target),
            next_step="Name another directory.",
        )


def check_target(
    target: AnyPath, documents: Sequence[str], replace: bool, writer: ExportWriter = HUGGINGFACE_WRITER
) -> None:
    """Check that a target is not a file, not inside a checkpoint, and contains no model that must be kept.

    Args:
        target: the directory of an export.
        documents: names of the metadata files that the export copies.
        replace: whether a model in the target may be replaced.
        writer: the format's writer.
    Raises:
        OptionError: the target cannot be used.
    """
    check_not_file(target)
    inside = next((path for path in _with_parents(target) if exists(path / MANIFEST_NAME)), None)
    if inside is not None:
        raise OptionError(
            "Nothing is written into a checkpoint.",
            where=str(target),
            evidence=[f"{inside / MANIFEST_NAME} is there"],
            next_step="Name a directory that does not exist yet.",
        )
    existing = list_directory(target) if writer.alone else []
    if existing:
        raise OptionError(
            "The directory of a new checkpoint is not empty.",
            where=str(target),
            evidence=[f"{existing[0].name} is there"],
            next_step="Name another directory; nothing was written.",
        )
    present = [name for name in (*writer.marks, *documents) if exists(target / name)]
    if present and not replace:
        raise OptionError(
            "The directory already contains a model, or files of a model.",
            where=str(target),
            evidence=[f"{name} is there" for name in present],
            next_step="Name another directory, or replace these files and its weights (--replace, replace=True).",
        )


def _with_parents(target: AnyPath) -> Sequence[AnyPath]:
    """Return a directory and its parents."""
    if isinstance(target, Path):
        return (target, *real_path(target).parents)
    found = [target]
    while found[-1].parent != found[-1]:
        found.append(found[-1].parent)
    return found


def check_no_overlap(source: AnyPath, target: AnyPath) -> None:
    """Check that a target is neither the directory of the source nor inside of it.

    Raises:
        OptionError: the target cannot be used.
    """
    own = real_path(source) if isinstance(source, Path) else source
    if str(own) in {str(real_path(one) if isinstance(one, Path) else one) for one in _with_parents(target)}:
        raise OptionError(
            "A conversion is not written into its source.",
            where=str(target),
            evidence=[f"the source is {source}"],
            next_step="Name a directory outside of the source.",
        )


def _dropped(checkpoint: OpenedCheckpoint, source: ReadSource) -> tuple[str, ...]:
    """Return the tensors of open weights that the converted model does not have, such as prediction layers."""
    stored = source.catalog.roles[MODEL_STATE] if checkpoint.format.canonical else ()
    return tuple(name for name in stored if name not in source.mapping.readers and name not in source.stored_aliases)


def _check_copies_equal(plan: ExportPlan) -> None:
    """Check that the stored copies of tied weights and states are equal, because an export contains only one copy."""
    source = plan.source
    tied = {name for owner in source.stored_aliases.values() for name in source.mapping.readers.get(owner, ())}
    copies = {
        role: {name: shard for name, shard in plan.layout[role].items() if parameter_of(role, name) in tied}
        for role in dict.fromkeys(file.role for file in plan.files)
    }
    catalog = source.catalog
    verify_equal(plan_reads(source, copies).checks, catalog.root, catalog.identities)


def _model_files(checkpoint: OpenedCheckpoint) -> dict[str, bytes]:
    """Return the model's metadata files."""
    found = {name: checkpoint.document(name) for name in checkpoint.model_files}
    is_stock = checkpoint.commit_record is None and not checkpoint.format.canonical
    if CONFIG_NAME in found and is_stock and checkpoint.known.partial:  # PaddleFormers' own form of the configuration.
        config = exported_config(family_for(checkpoint.config), checkpoint.config, checkpoint.known, {})
        found[CONFIG_NAME] = config_bytes(config)
    return found
