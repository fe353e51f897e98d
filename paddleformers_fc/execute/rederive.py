"""Derive the mapping of a checkpoint again that was saved without a description of its model.

Only ``mapping.json`` and the manifest change. The other files are linked into a staging directory beside the
checkpoint, which then replaces it in one step, as a save of the same step does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from paddleformers_fc.errors import MappingError, OptionError, StorageError
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.families.description import IS_FLEET
from paddleformers_fc.families.mapping_document import STRIPPED, completed, encode_mapping
from paddleformers_fc.families.stated import no_family
from paddleformers_fc.formats.checkpoint import MAPPING_NAME, OpenedCheckpoint, not_a_flex_checkpoint
from paddleformers_fc.formats.registry import checkpoints_advice, open_checkpoint
from paddleformers_fc.mapping import prove
from paddleformers_fc.mapping.agreement import disagreements
from paddleformers_fc.plan.sources import stored_tensors
from paddleformers_fc.storage.commit import commit, create_staging, discard
from paddleformers_fc.storage.files import files_within, link, make_directories, real_path, write_file
from paddleformers_fc.storage.manifest import MANIFEST_NAME, write_manifest


@dataclass(frozen=True)
class Rederivation:
    """The outcome.

    Args:
        path: the checkpoint as it was named.
        settled: the keys that ``config.json`` lacks, with the values that the mapping was derived with.
        changed: how many statements about a tensor differ from the old mapping.
        written: whether ``mapping.json`` was replaced; false if neither the mapping nor the description changes.
    """

    path: str
    settled: dict[str, Any]
    changed: int
    written: bool


def rederive(directory: Path, settings: Sequence[str]) -> Rederivation:
    """Derive the mapping of a checkpoint again and store it with the description of its model.

    A stored description keeps all its keys: a resume compares them with the live configuration.

    Args:
        directory: a finished flex checkpoint.
        settings: ``KEY=VALUE`` for keys of :data:`STRIPPED` that its tensors leave open.
    Raises:
        OptionError: a key is not one of these.
        MappingError: the tensors fit no description with these values, or several.
        FlexError: the directory is no checkpoint, is damaged, or cannot be written.
    """
    checkpoint = open_checkpoint(directory)
    if checkpoint.commit_record is None:
        raise not_a_flex_checkpoint(checkpoint.format, directory, checkpoints_advice(directory))
    stored = checkpoint.model
    if "model_type" not in (stored.config if stored else checkpoint.config):
        raise no_family(str(directory))
    known = _with_settings(stored or ModelDescription(checkpoint.config, partial=True), settings)
    family = family_for(known.config)
    try:
        model, rules = completed(family, known, stored_tensors(checkpoint.rules))
    except MappingError as error:
        raise MappingError(
            error.what,
            where=str(directory),
            evidence=error.evidence,
            next_step=f"Add the values that the model was trained with as KEY=VALUE: {', '.join(sorted(STRIPPED))}.",
        ) from error
    rules = replace(rules, cuts=checkpoint.rules.cuts)
    mapping = rules.mapping()
    prove(mapping, "The mapping that was derived again")
    prove(mapping.reversed(), "The reverse of the mapping that was derived again")
    changed = sum(1 for _ in disagreements(checkpoint.rules.mapping(), mapping))
    written = changed > 0 or known != stored
    if written:
        _store(real_path(directory), checkpoint, encode_mapping(model, rules))
    config = {key: model.config.get(key) for key in sorted(STRIPPED - {IS_FLEET}) if key in model.config}
    return Rederivation(str(directory), {IS_FLEET: model.is_fleet, **config}, changed, written)


def _with_settings(known: ModelDescription, settings: Sequence[str]) -> ModelDescription:
    values: dict[str, Any] = {}
    for text in settings:
        key, sign, value = text.partition("=")
        if not sign or key not in STRIPPED:
            raise OptionError(
                f"{text!r} is not KEY=VALUE with a key that config.json lacks.",
                where="KEY=VALUE",
                evidence=[f"keys: {', '.join(sorted(STRIPPED))}"],
                next_step="Leave it out; other keys are in config.json.",
            )
        values[key] = yaml.safe_load(value)
        if not isinstance(values[key], int):
            raise OptionError(
                f"{text!r}: the value is neither true, false nor a number.",
                where="KEY=VALUE",
                next_step="Give the value that the model was trained with.",
            )
    is_fleet = bool(values.pop(IS_FLEET)) if IS_FLEET in values else known.is_fleet
    return replace(known, config={**known.config, **values}, is_fleet=is_fleet)


def _store(directory: Path, checkpoint: OpenedCheckpoint, mapping: bytes) -> None:
    """Replace the opened checkpoint by the same one with another mapping."""
    staging = create_staging(directory)
    try:
        for path in files_within(directory):
            name = path.relative_to(directory)
            if str(name) in (MAPPING_NAME, MANIFEST_NAME):
                continue
            make_directories((staging / name).parent)
            if not link(path, staging / name):
                raise StorageError(
                    f"{directory} is on a file system without hard links.",
                    where=str(path),
                    next_step="Copy the checkpoint to another file system and derive its mapping there.",
                )
        checksum = write_file(staging / MAPPING_NAME, mapping, root=staging)
        files = [checksum if one.path == MAPPING_NAME else one for one in checkpoint.manifest.files]
        write_manifest(staging, msgspec.structs.replace(checkpoint.manifest, files=files, aoa={}))
        commit(staging, directory)
    except BaseException:
        with contextlib.suppress(StorageError):
            discard(staging)
        raise
