"""A finished flex checkpoint: its manifest, its rules and its catalog.

Opening reads the manifest, ``mapping.json``, ``config.json`` and the headers of the safetensors files; the cost is one
small read per file. A directory without a manifest is not a checkpoint and is refused before anything else is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddleformers_fc.catalog.stored import Catalog, gather_shards
from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.layout.codec import HEADER_KEY, decode_shards
from paddleformers_fc.layout.roles import MODEL_STATE, ROLES, split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.mapping.codec import decode_rules
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import from_safetensors, item_size
from paddleformers_fc.storage.files import read_file
from paddleformers_fc.storage.identity import identities_of
from paddleformers_fc.storage.manifest import Manifest, read_manifest, verify_files
from paddleformers_fc.storage.safetensors import read_header

MAPPING_NAME = "mapping.json"
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class FlexCheckpoint:
    """An opened flex checkpoint.

    Args:
        catalog: what is stored, in the names of the model that saved it.
        manifest: the commit record.
        rules: how that model's names are dealt out of canonical names.
        config: the model's configuration, as in ``config.json``.
    """

    catalog: Catalog
    manifest: Manifest
    rules: RuleSet
    config: dict[str, Any]


def open_flex(directory: Path, verify: str = "size") -> FlexCheckpoint:
    """Open a finished checkpoint.

    Args:
        directory: ``checkpoint-N``.
        verify: ``off``, ``size`` or ``full``, see :func:`paddleformers_fc.storage.manifest.verify_files`.
    Raises:
        NotACheckpoint: without a manifest.
        Corrupt: files that are missing, of another size or checksum, or tensors not stored whole; all of them.
        FormatError: a manifest, mapping or header that does not follow its format.
    """
    manifest = read_manifest(directory)
    # Before the check: what is read later must be what is checked now.
    identities = identities_of(directory / receipt.path for receipt in manifest.files)
    verify_files(directory, manifest, verify)
    rules = decode_rules(read_file(directory / MAPPING_NAME), str(directory / MAPPING_NAME))
    config = read_config(directory / CONFIG_NAME)
    roles = {}
    faults: list[str] = []
    for role in ROLES:
        paths = [receipt.path for receipt in manifest.files if _is_shard_file(receipt.path, role)]
        tensors, contradictions = gather_shards(_shards_in(directory, paths))
        faults.extend(contradictions)
        if tensors:
            roles[role] = tensors
    catalog = Catalog(directory, roles, identities)
    faults.extend(catalog.faults())
    faults.extend(_name_faults(catalog, rules))
    if faults:
        raise Corrupt(
            f"The checkpoint does not hold all of its model, whole and once: {len(faults)} faults.",
            where=str(directory),
            evidence=fold(faults),
            next_step="Resume from another checkpoint; this one was damaged after it was finished.",
        )
    return FlexCheckpoint(catalog, manifest, rules, config)


def _name_faults(catalog: Catalog, rules: RuleSet) -> Iterator[str]:
    """Weights that the rules know and no file holds, and the other way round. An alias may share its owner's file."""
    stored = catalog.roles.get(MODEL_STATE, {})
    aliases = {tie.alias for tie in rules.ties}
    for name in rules.targets:
        if name not in stored and name not in aliases:
            yield f"{name}: the rules know this tensor, and it is not stored"
    for role, tensors in catalog.roles.items():
        for name in tensors:
            if split_state_name(role, name).parameter not in rules.targets:
                yield f"{name}: stored as {role}, and the rules know no such tensor"


def _is_shard_file(path: str, role: str) -> bool:
    return path.startswith(f"{role}/") and path.endswith(".safetensors")


def _shards_in(directory: Path, paths: list[str]) -> Iterator[tuple[Shard, str, int, int]]:
    for path in paths:
        header = read_header(directory / path)
        dtypes = {key: from_safetensors(entry.dtype) for key, entry in header.tensors.items()}
        text = header.metadata.get(HEADER_KEY)
        if text is None:
            raise FormatError(
                "A file of a flex checkpoint does not say which shards it holds.",
                where=str(directory / path),
                evidence=[f"__metadata__ has no {HEADER_KEY}"],
            )
        for key, shard in decode_shards(text, dtypes, str(directory / path)).items():
            entry = header.tensors[key]
            width = item_size(entry.dtype)
            if (entry.end - entry.begin) != shard.size * width:
                raise FormatError(
                    f"{key} holds {(entry.end - entry.begin) // width} elements, its shard {shard.size}.",
                    where=str(directory / path),
                )
            yield shard, path, entry.begin, width


def read_config(path: Path) -> dict[str, Any]:
    """A model's configuration from its file.

    Raises:
        Corrupt: there is no such file.
        FormatError: it is not a JSON object.
    """
    try:
        config = json.loads(read_file(path))
    except ValueError as error:
        raise FormatError("The model's configuration is not JSON.", where=str(path), evidence=[str(error)]) from error
    if not isinstance(config, dict):
        raise FormatError("The model's configuration is not a JSON object.", where=str(path))
    return config
