"""Checkpoints of Paddle's own FlexCheckpoint: ``0.metadata`` and ``0_0.distcp``, read without running them.

A directory of ``dist.save_state_dict`` holds one metadata file and, per rank, one file of tensors; PaddleFormers'
Trainer writes one such directory per role. Both files are pickles. They are read as data (``storage.pickles``), and
only the position of each array is taken from a ``.distcp``, so that any range of any tensor is read as from every other
format. Files of the same layout in safetensors format are read too.

There are no checksums and no mark of a finished save. These faults are found: metadata that is missing, unfinished or
there twice, files that are missing or contain other tensors than the metadata lists, and tensors that are not stored
whole. A changed byte is not found.

Time and memory are linear in the metadata, about a microsecond and ten bytes per byte of it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.errors import Corrupt, NotACheckpoint
from paddleformers_fc.formats.catalog import Catalog
from paddleformers_fc.formats.checkpoint import OpenedCheckpoint, StoredShard
from paddleformers_fc.formats.stock_arrays import (
    PARAMETER_NAMES,
    FileArray,
    StoredAs,
    arrays_of,
    gather_roles,
    read_arrays,
)
from paddleformers_fc.formats.stock_checkpoint import (
    COPY_AGAIN_STEP,
    StockFormat,
    malformed_file,
    open_stock,
    read_stock_config,
    refuse_links,
)
from paddleformers_fc.layout.roles import EMA_STATE, MASTER, MODEL_STATE, ROLES
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, shifted
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import dtype_size
from paddleformers_fc.storage.files import is_directory, is_file, list_directory
from paddleformers_fc.storage.identities import identities_of
from paddleformers_fc.storage.paths import AnyPath, require_local
from paddleformers_fc.storage.pickles import Record, quoted, read_pickle
from paddleformers_fc.storage.safetensors import read_header
from paddleformers_fc.text import count_text

_METADATA = re.compile(r"[0-9]{1,9}\.metadata")
_DATA = re.compile(r"[0-9]{1,9}_[0-9]{1,9}\.(distcp|safetensors)")


def open_distcp(directory: AnyPath, given: Mapping[str, Any] | None = None) -> OpenedCheckpoint:
    """Open a checkpoint that Paddle wrote.

    The format records neither checksums nor a mapping. The mapping is derived on first use from the family of the
    model, by stored names, shapes and cuts. It requires a ``config.json`` in the directory.

    Args:
        directory: of ``dist.save_state_dict``, or with a directory ``model_state`` and others of it.
        given: the model's configuration if the directory has none.
    Raises:
        NotACheckpoint: it is none.
        Corrupt: metadata or files that are missing, or tensors that are not stored whole; all of them.
        FormatError: a pickle that holds more than data, or metadata or a configuration that is malformed.
    """
    directory = require_local(directory, "A checkpoint of Paddle")
    found = _role_directories(directory)
    if not found:
        raise NotACheckpoint(
            f"{directory} holds no checkpoint of Paddle.",
            where=str(directory),
            next_step=f"Name a directory of dist.save_state_dict, or one with such a {MODEL_STATE} in it.",
        )
    refuse_links(directory, (one for place in found.values() for one in (place, *list_directory(place))))
    shards: dict[StoredAs, list[StoredShard]] = {}
    cuts: dict[str, tuple[int, ...]] = {}
    for role, place in found.items():
        own = shards[role, "", False] = list(_shards_in(directory, place))
        if role == EMA_STATE:
            own[:] = itertools.starmap(_average, own)
        if role == MODEL_STATE:
            for shard, *_ in own:
                cuts[shard.name] = tuple(map(max, shard.cuts, cuts.get(shard.name, shard.cuts)))
    roles, faults = gather_roles(shards)
    paths = {path for own in shards.values() for _, path, _, _ in own}
    catalog = Catalog(directory, roles, identities_of(directory / path for path in sorted(paths)))
    return open_stock(PADDLE_DISTCP, directory, catalog, faults, read_stock_config(directory, given), cuts)


def _role_directories(directory: Path) -> dict[str, Path]:
    """Return the directory of each role; an undivided directory contains the weights."""
    if _is_one(directory):
        return {MODEL_STATE: directory}
    return {role: directory / role for role in ROLES if _is_one(directory / role)}


def _is_one(directory: Path) -> bool:
    if not is_directory(directory):
        return False
    names = [path.name for path in list_directory(directory)]
    return any(_METADATA.fullmatch(name) for name in names) or any(name.endswith(".distcp") for name in names)


def _shards_in(directory: Path, place: Path) -> Iterator[StoredShard]:
    """Yield every stored shard of one role, with the paths relative to ``directory``."""
    metadata = _metadata_of(place)
    arrays: dict[str, dict[str, FileArray]] = {}
    missing: set[str] = set()
    base = place.relative_to(directory)
    for key, file, shard in _stored_shards(metadata, place):
        if file not in arrays:
            if not is_file(place / file):
                missing.add(file)
                continue
            arrays[file] = _arrays_in(place / file, (base / file).as_posix())
        array = arrays[file].get(key)
        if array is None or array.dtype != shard.dtype or math.prod(array.shape) != shard.size:
            there = "it is not there" if array is None else f"{array.dtype} {list(array.shape)} is there"
            raise Corrupt(
                f"{place / file} does not contain what the metadata lists.",
                where=str(place / file),
                evidence=[f"{key}: {shard.size} elements of {shard.dtype} are due, {there}"],
                next_step=COPY_AGAIN_STEP,
            )
        yield shard, array.file, array.begin, dtype_size(array.dtype)
    if missing:
        raise Corrupt(
            f"{count_text(len(missing), 'file')} of {place} cannot be found.",
            where=str(place),
            evidence=fold(sorted(missing)),
            next_step=COPY_AGAIN_STEP,
        )


def _average(shard: Shard, file: str, begin: int, width: int) -> StoredShard:
    """Return the shard of a moving average under the name of its parameter; that of a master weight has a suffix."""
    return msgspec.structs.replace(shard, name=shard.name.removesuffix(MASTER.suffix)), file, begin, width


def _metadata_of(place: Path) -> Path:
    """Return the metadata of the newest save: saves into one directory count upwards, and Paddle reads the last."""
    names = [path.name for path in list_directory(place)]
    found = sorted((name for name in names if _METADATA.fullmatch(name)), key=lambda name: int(name.partition(".")[0]))
    faults = [f"{name} is there: a save was killed while it wrote" for name in names if name.endswith(".metadata.lock")]
    if not found:
        faults.append("0 files of metadata are there")
    elif not (place / found[-1]).stat().st_size:
        faults.append(f"{found[-1]} is empty")
    if faults:
        raise Corrupt(
            f"{place} is not a finished checkpoint.", where=str(place), evidence=faults, next_step=COPY_AGAIN_STEP
        )
    return place / found[-1]


def _stored_shards(path: Path, place: Path) -> Iterator[tuple[str, str, Shard]]:
    """Key, file and shard of every stored shard that the metadata lists; replicas are left out."""
    metadata = read_pickle(path)
    if not isinstance(metadata, Record) or metadata.name != "Metadata":
        raise malformed_file(path, "it contains no metadata")
    tensors = metadata.fields.get("state_dict_metadata")
    stored = metadata.fields.get("storage_metadata")
    if not isinstance(tensors, dict) or not isinstance(stored, dict):
        raise malformed_file(path, "it lists no tensors")
    known = _known(path, tensors)
    save = f"_{path.stem}."
    for index, file in stored.items():
        if not isinstance(index, Record) or not isinstance(file, str) or not _DATA.fullmatch(file):
            raise malformed_file(path, f"it lists a tensor in {quoted(file)!r}")
        if not file.startswith(save, file.index("_")):
            raise malformed_file(path, f"it lists a tensor in {file}, a file of another save into this directory")
        if index.fields.get("replica_id"):
            continue
        key = index.fields.get("tensor_key")
        shard = known.get(_shard_key(key, index)) if isinstance(key, str) else None
        if not isinstance(key, str) or shard is None:
            raise malformed_file(path, f"{quoted(key)} is in {file}, and its shape and dtype are missing")
        yield key, file, shard


def _known(path: Path, tensors: dict[Any, Any]) -> dict[str, Shard]:
    """Return every described shard by its location."""
    found: dict[str, Shard] = {}
    for name, pieces in tensors.items():
        if not isinstance(name, str) or not isinstance(pieces, list):
            raise malformed_file(path, f"{quoted(name)} has no list of shards")
        for piece in pieces:
            shard = _shard(name, piece) if isinstance(piece, Record) else None
            if shard is None or any(shard.faults()):
                raise malformed_file(path, f"{name} has an invalid shard")
            found[_shard_key(name, piece)] = shard
    return found


def _shard_key(name: str, record: Record) -> str:
    """Return the text that identifies a shard of a tensor. A file cannot choose its hash, as that of numbers."""
    located = map(_lengths, map(record.fields.get, ("local_shape", "global_offset", "flattened_range")))
    return f"{name} {[*located]}"


def _lengths(value: Any) -> tuple[int, ...] | None:
    """Return a tuple of lengths; None for any other value."""
    if not isinstance(value, (tuple, list)) or len(value) > MAX_AXES:
        return None
    return tuple(value) if all(type(one) is int and 0 <= one <= MAX_LENGTH for one in value) else None


def _shard(name: str, record: Record) -> Shard | None:
    fields = record.fields
    shape, offset = _lengths(fields.get("local_shape")), _lengths(fields.get("global_offset"))
    whole, dtype = _lengths(fields.get("global_shape")), fields.get("dtype")
    flat = _lengths(fields["flattened_range"]) if fields.get("is_flattened") else None
    if shape is None or offset is None or whole is None or not len(shape) == len(offset) == len(whole):
        return None
    if not isinstance(dtype, str) or (fields.get("is_flattened") and (flat is None or len(flat) != 2)):
        return None
    return Shard(name, dtype, whole, shifted(shape, offset), None if flat is None else (flat[0], flat[1]))


def _arrays_in(path: Path, name: str) -> dict[str, FileArray]:
    """Return the arrays of a file of a rank under a name of it; Paddle writes the bits of bfloat16 as integers."""
    if path.suffix == ".safetensors":
        found = arrays_of(name, read_header(path))
    else:
        found, _ = read_arrays(path, PARAMETER_NAMES)
    dtypes = {"uint16": "bfloat16"}
    return {key: replace(one, file=name, dtype=dtypes.get(one.dtype, one.dtype)) for key, one in found.items()}


class PaddleDistcpFormat(StockFormat):
    """Checkpoints of Paddle's own FlexCheckpoint."""

    name = "paddle"
    title = "checkpoint of Paddle's FlexCheckpoint"
    predicate = "was written by Paddle's own FlexCheckpoint"
    advice = "Name it in resume_from_checkpoint; or make a flex checkpoint of it with paddleformers-fc convert."
    checks = ("tensors", "equal values")

    def recognises(self, directory: AnyPath) -> bool:
        """Return whether there are files of ``dist.save_state_dict``, in the directory or in those of its roles."""
        return isinstance(directory, Path) and bool(_role_directories(directory))

    def open_under(self, directory: AnyPath, verify: str, config: Mapping[str, Any]) -> OpenedCheckpoint:
        """As :func:`open_distcp`."""
        return open_distcp(directory, config)


PADDLE_DISTCP = PaddleDistcpFormat()
