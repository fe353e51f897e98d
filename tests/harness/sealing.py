"""Record the files of a checkpoint as they are now, as a forger would: its index and its manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.formats.index import encode_index
from paddleformers_fc.storage.checksum import (
    DEFAULT_BLOCK_BYTES,
    INDEX_NAME,
    BlockHasher,
    FileChecksum,
    checksum_of,
    is_document,
    records_of,
)
from paddleformers_fc.storage.dtypes import to_numpy
from paddleformers_fc.storage.manifest import MANIFEST_NAME, Manifest, manifest_seal
from paddleformers_fc.storage.safetensors import parse_header


def columns_of(raw: bytes) -> dict[str, Any]:
    """The arrays of an index by name, without those of blocks."""
    entries = parse_header(Path(INDEX_NAME), raw).tensors
    found = {name: np.frombuffer(raw[one.begin : one.end], to_numpy(one.dtype)) for name, one in entries.items()}
    return {name: array for name, array in found.items() if name != "blocks"}


def sealed(manifest: Manifest) -> bytes:
    """The bytes of a manifest and the checksum that fits them; no path in it is looked at."""
    return json.dumps({**msgspec.to_builtins(manifest), "seal": manifest_seal(manifest)}).encode() + b"\n"


def reseal(
    checkpoint: Path,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    columns: Mapping[str, Any] | None = None,
) -> None:
    """Write index and manifest again for the present files.

    Args:
        checkpoint: its files may be damaged, the manifest must not be.
        block_bytes: length of the checksum blocks of files with tensors.
        change: changes the manifest.
        columns: the tensors; None for those of the present index whose files are there.
    """
    document = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    del document["seal"]
    manifest = msgspec.convert(document, Manifest)
    if columns is None:
        columns = columns_of((checkpoint / INDEX_NAME).read_bytes())
        counts = columns["file_shards"]
        there = [(checkpoint / one.path).exists() for one in manifest.files if not is_document(one.path)]
        columns = {**columns, "file_shards": counts[there]}
        columns |= {name: columns[name][np.repeat(there, counts)] for name in ("shard_name", "shard_place")}
    found = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    checksums = [_checksum(checkpoint, name, block_bytes) for name in found if name not in (MANIFEST_NAME, INDEX_NAME)]
    index = encode_index(columns, checksums)
    (checkpoint / INDEX_NAME).write_bytes(index)
    files = records_of([*checksums, checksum_of(INDEX_NAME, index)])
    manifest = change(msgspec.structs.replace(manifest, files=files))
    (checkpoint / MANIFEST_NAME).write_bytes(sealed(manifest))


def _checksum(checkpoint: Path, name: str, block_bytes: int) -> FileChecksum:
    hasher = BlockHasher(DEFAULT_BLOCK_BYTES if is_document(name) else block_bytes)
    hasher.update((checkpoint / name).read_bytes())
    return hasher.file_checksum(name)
