"""Checkpoints of Paddle's own FlexCheckpoint, ``0.metadata`` and ``0_0.distcp``: reading and writing.

``dist.save_state_dict`` writes one metadata file and one file of tensors per rank; PaddleFormers' Trainer does so in
one directory per role. The pickles are read as data, without executing them (``storage.pickles``), and only the
position of each array is kept. Safetensors files with the same layout are supported too. The format has no checksums
and no commit marker: missing files, missing or unfinished metadata, and missing tensors are detected; changed bytes are
not. Time and memory are linear in the metadata, about a microsecond and ten bytes per byte.

A conversion writes files for PaddleFormers' Trainer and ``dist.load_state_dict``. It keeps the shards of the model that
saved, because the order inside fused layers depends on the tensor-parallel degree. Tied tensors and their states are
written under all names: a pipeline reads all of them, and others read states under the name that sorts first.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families.stated import model_ties
from paddleformers_fc.formats import stock_checkpoint as stock
from paddleformers_fc.formats.catalog import damaged
from paddleformers_fc.formats.checkpoint import (
    Config,
    ExportWriter,
    Format,
    OpenedCheckpoint,
    OutputFile,
    StoredShard,
    compare_run,
    grouped_by_size,
    local_files,
)
from paddleformers_fc.formats.stock_run import SCALER, SCHEDULER, malformed_file
from paddleformers_fc.layout.roles import (
    EMA_STATE,
    MASTER,
    MASTER_WEIGHT,
    MODEL_STATE,
    OPTIMIZER_STATE,
    ROLES,
    parameter_of,
)
from paddleformers_fc.layout.shards import Shard, ShardsByRole, shard_bytes
from paddleformers_fc.mapping import RuleSet, Tie
from paddleformers_fc.mapping.boxes import MAX_AXES, MAX_LENGTH, Box, shifted
from paddleformers_fc.storage import state_json
from paddleformers_fc.storage.checksum import FileChecksum
from paddleformers_fc.storage.dtypes import dtype_size, to_numpy, to_safetensors
from paddleformers_fc.storage.files import is_file, list_directory
from paddleformers_fc.storage.identities import identities_of
from paddleformers_fc.storage.manifest import TRAINER_DIRECTORY
from paddleformers_fc.storage.paths import AnyPath, require_local
from paddleformers_fc.storage.pickles import (
    PickledObject,
    Record,
    encode_array_dict,
    encode_pickle,
    quoted,
    read_pickle,
)
from paddleformers_fc.storage.safetensors import FileLayout, read_header
from paddleformers_fc.text import count_text, fold

_METADATA = re.compile(r"[0-9]{1,9}\.metadata")
_DATA = re.compile(r"[0-9]{1,9}_[0-9]{1,9}\.(distcp|safetensors)")

METADATA_NAME = "0.metadata"
_WRITTEN = (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE)
_CLASSES = "paddle.distributed.flex_checkpoint.dcp.metadata"
_GENERATOR = ("paddle.base.libpaddle", "GeneratorState")


def _role_directories(directory: Path) -> dict[str, Path]:
    """Return the directory of each role; a directory without subdirectories contains the weights."""
    if _has_files(directory):
        return {MODEL_STATE: directory}
    return {role: directory / role for role in ROLES if _has_files(directory / role)}


def _has_files(directory: Path) -> bool:
    return any(_METADATA.fullmatch(name) or name.endswith(".distcp") for name in local_files(directory))


def _shards_in(directory: Path, place: Path) -> Iterator[StoredShard]:
    """Yield every stored shard of one role, with paths relative to ``directory``."""
    metadata = _metadata_of(place)
    arrays: dict[str, dict[str, stock.FileArray]] = {}
    missing: set[str] = set()
    base = place.relative_to(directory)
    for key, file, shard in _stored_shards(metadata, place):
        if file not in arrays:
            if not is_file(place / file):
                missing.add(file)
                continue
            arrays[file] = _arrays_in(place / file, (base / file).as_posix())
        # Each array can be used once: a file has only one array per name.
        array = arrays[file].pop(key, None)
        if array is None or not _matches(array, shard):
            found = "it is missing or listed twice" if array is None else f"found {array.dtype} {list(array.shape)}"
            listed = f"{key}: expected {shard.dtype} {list(shard.box.shape)}, {found}"
            raise damaged(place / file, f"{place / file} does not contain what the metadata lists.", [listed])
        yield shard, array.file, array.begin, dtype_size(array.dtype)
    if missing:
        raise damaged(place, f"{count_text(len(missing), 'file')} of {place} cannot be found.", sorted(missing))


def _matches(array: stock.FileArray, shard: Shard) -> bool:
    """Return whether an array has the dtype and shape of a shard. With transposed axes, the order would differ."""
    shapes = {(shard.size,)} if shard.flat is not None else {(shard.size,), shard.box.shape}
    is_number = math.prod(array.shape) == shard.size == 1
    return array.dtype == shard.dtype and (is_number or array.shape in shapes)


def _average(shard: Shard, file: str, begin: int, width: int) -> StoredShard:
    """Return the shard of a moving average under the name of its parameter, without the suffix of master weights."""
    return msgspec.structs.replace(shard, name=shard.name.removesuffix(MASTER.suffix)), file, begin, width


def _metadata_of(place: Path) -> Path:
    """Return the metadata of the newest save. Paddle numbers saves into one directory, and reads the last."""
    names = [path.name for path in list_directory(place)]
    found = sorted((name for name in names if _METADATA.fullmatch(name)), key=lambda name: int(name.partition(".")[0]))
    faults = [f"{name} exists: a save was killed while it wrote" for name in names if name.endswith(".metadata.lock")]
    if not found:
        faults.append("there is no metadata file")
    elif not (place / found[-1]).stat().st_size:
        faults.append(f"{found[-1]} is empty")
    if faults:
        raise damaged(place, f"{place} is not a finished checkpoint.", faults)
    return place / found[-1]


def _stored_shards(path: Path, place: Path) -> Iterator[tuple[str, str, Shard]]:
    """Yield key, file and shard of every stored shard that the metadata lists, without replicas."""
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
    """Return a text that identifies a shard. Unlike with numbers, a file cannot choose texts with equal hashes."""
    located = map(_lengths, map(record.fields.get, ("local_shape", "global_offset", "flattened_range")))
    return f"{name} {[*located]}"


def _lengths(value: Any) -> tuple[int, ...] | None:
    """Return a value as a tuple of lengths; None if it is not one."""
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


def _arrays_in(path: Path, name: str) -> dict[str, stock.FileArray]:
    """Return the arrays of a rank's file. Paddle writes the bits of bfloat16 as unsigned integers."""
    if path.suffix == ".safetensors":
        found = stock.arrays_of(name, read_header(path))
    else:
        found, _ = stock.read_arrays(path, stock.PARAMETER_NAMES)
    dtypes = {"uint16": "bfloat16"}
    return {key: replace(one, file=name, dtype=dtypes.get(one.dtype, one.dtype)) for key, one in found.items()}


def _rules(checkpoint: OpenedCheckpoint) -> RuleSet:
    """Return the rules of the stored model, or of the model built from open weights, with its family's ties."""
    model = checkpoint.built
    stock.check_not_alternating(checkpoint.catalog.root, model)
    ties = {**model_ties(model.description), **model.rules.aliases}
    owned = (Tie(owner, alias) for alias, owner in ties.items() if owner in model.rules.targets)
    return structs.replace(model.rules, ties=tuple(owned))


def _files(checkpoint: OpenedCheckpoint, layout: ShardsByRole, max_file_bytes: int) -> tuple[OutputFile, ...]:
    """Divide the tensors of the three roles into files. Their names begin with a rank, but any rank can read them."""
    rules = _rules(checkpoint)
    _check_dtypes(checkpoint, layout)
    copies: dict[str, list[str]] = {}
    for tie in rules.ties:
        copies.setdefault(tie.owner, [tie.owner]).append(tie.alias)
    found: list[OutputFile] = []
    for role in _WRITTEN:
        parts: dict[int, dict[str, Shard]] = {}
        for name, tensor in layout.get(role, {}).items():
            parameter = parameter_of(role, name)
            names = [copy + name.removeprefix(parameter) for copy in copies.get(parameter, (parameter,))]
            for number, shard in enumerate(_cut(tensor, rules.cuts.get(parameter, ()))):
                named = {copy: msgspec.structs.replace(shard, name=copy) for copy in names}
                parts.setdefault(number, {}).update(named)
        groups = [group for _, part in sorted(parts.items()) for group in grouped_by_size(part, max_file_bytes)]
        for number, group in enumerate(groups):
            ordered = tuple(sorted(group, key=lambda one: -dtype_size(one.dtype)))
            found.append(OutputFile(f"{role}/{number}_0.distcp", role, ordered))
    return tuple(found)


def _check_dtypes(checkpoint: OpenedCheckpoint, layout: ShardsByRole) -> None:
    """Check that the format has the dtypes of all tensors.

    Raises:
        OptionError: it lacks some of them.
    """
    tensors = [one for role in _WRITTEN for one in layout.get(role, {}).values()]
    others = [f"{one.name}: {one.dtype}" for one in tensors if one.dtype not in stock.DTYPES.values()]
    if others:
        raise OptionError(
            f"Paddle's FlexCheckpoint does not support the dtype of {count_text(len(others), 'tensor')}.",
            where=str(checkpoint.catalog.root),
            evidence=[*fold(others), f"supported: {', '.join(sorted(stock.DTYPES.values()))}"],
            next_step="Convert to another format: --format flex or --format hf (format=).",
        )


def _header(path: Path, shards: Sequence[Shard]) -> FileLayout:
    """Return the bytes of a pickled dict of arrays that surround the arrays' data."""
    sizes = tuple(map(shard_bytes, shards))
    arrays = [(one.name, _code(one.dtype), one.box.shape, size) for one, size in zip(shards, sizes, strict=True)]
    header, trailer = encode_array_dict(arrays)
    return FileLayout(header, sizes, trailer)


def _documents(checkpoint: OpenedCheckpoint, files: Sequence[OutputFile]) -> dict[str, bytes]:
    """Return the metadata of every role, and the Trainer's state if the checkpoint has it."""
    found = {f"{role}/{METADATA_NAME}": _metadata([one for one in files if one.role == role]) for role in _WRITTEN}
    empty = set(_WRITTEN) - {one.role for one in files}
    found |= {f"{role}/0_0.distcp": encode_pickle({}) for role in sorted(empty)}
    for path in sorted(checkpoint.documents):
        directory, _, name = path.rpartition("/")
        if directory == TRAINER_DIRECTORY:
            found |= _of_trainer(checkpoint, path, name.removesuffix(".json"))
    if checkpoint.has_run:
        compare_run(checkpoint)
        found |= {f"saved_signal_{rank}": b"1" for rank in range(checkpoint.manifest.world_size)}
    return found


def _seal(
    checkpoint: OpenedCheckpoint, files: Sequence[OutputFile], written: Sequence[FileChecksum]
) -> dict[str, bytes]:
    """Return no documents: the format records no checksums."""
    return {}


def _cut(tensor: Shard, cuts: Sequence[int]) -> Iterator[Shard]:
    """Yield the shards of a tensor with the cuts of its parameter; a tensor that these do not divide is one shard."""
    shape = tensor.global_shape
    if len(cuts) != len(shape) or any(length % cut for length, cut in zip(shape, cuts, strict=True)):
        cuts = (1,) * len(shape)
    lengths = [length // cut for length, cut in zip(shape, cuts, strict=True)]
    for place in itertools.product(*map(range, cuts)):
        low = tuple(number * length for number, length in zip(place, lengths, strict=True))
        high = tuple(begin + length for begin, length in zip(low, lengths, strict=True))
        yield msgspec.structs.replace(tensor, box=Box(low, high))


def _metadata(files: Sequence[OutputFile]) -> bytes:
    described: dict[str, list[PickledObject]] = {}
    stored: dict[PickledObject, str] = {}
    for file in files:
        for one in file.tensors:
            flat = {"is_flattened": False, "flattened_range": None}
            place = {"global_offset": one.box.lo, "local_shape": one.box.shape}
            tensor = {**place, "dtype": one.dtype, "global_shape": one.global_shape, **flat}
            index = {"tensor_key": one.name, **place, **flat, "replica_id": None}
            described.setdefault(one.name, []).append(PickledObject(_CLASSES, "LocalTensorMetadata", tensor))
            stored[PickledObject(_CLASSES, "LocalTensorIndex", index)] = file.path.rpartition("/")[2]
    names = {name: (name,) for name in described}
    state = {"state_dict_metadata": described, "storage_metadata": stored, "flat_mapping": names}
    return encode_pickle(PickledObject(_CLASSES, "Metadata", state))


def _of_trainer(checkpoint: OpenedCheckpoint, path: str, name: str) -> dict[str, bytes]:
    """Convert a Trainer document to PaddleFormers' file; return no file if PaddleFormers has none for it."""
    if name not in ("state", "scheduler", "scaler") and not name.startswith("rng-"):
        return {}
    state = state_json.decode_object(checkpoint.document(path), name)
    if name == "state":
        from paddleformers_fc.upstream import FORMERS  # This import searches for installed libraries.

        described = PickledObject(f"{FORMERS}.trainer.trainer_callback", "TrainerState", state)
        return {"trainer_state.bin": encode_pickle(described)}
    if name.startswith("rng-"):
        tracked = {key: list(map(_generator, states)) for key, states in state["hybrid_parallel"].items()}
        states: dict[str, Any] = {
            "python": state["python"],
            "numpy": state["numpy"],
            "cuda": list(map(_generator, state["device"])),
            "cpu": _generator(state["cpu"]),
            "world_size": state["world_size"],
        }
        if tracked:
            states["hybrid_parallel_rng_state_tracker"] = tracked
        return {f"rng_state_{int(name.removeprefix('rng-'))}.pth": encode_pickle(states)}
    return {SCHEDULER if name == "scheduler" else SCALER: encode_pickle(state)}


def _generator(state: dict[str, Any]) -> PickledObject:
    engine = list(state["engine"].encode("latin-1"))
    return PickledObject(*_GENERATOR, (state["device"], state["seed"], state["offset"], engine))


def _code(dtype: str) -> str:
    """Return numpy's code of an element type; Paddle writes the bits of bfloat16 as unsigned integers."""
    if dtype == "bfloat16":
        return "u2"
    found: str = np.dtype(to_numpy(to_safetensors(dtype))).str[1:]
    return found


def _is_distcp(directory: AnyPath) -> bool:
    """Return whether the directory, or a directory of a role in it, has files of ``dist.save_state_dict``."""
    return isinstance(directory, Path) and bool(_role_directories(directory))


def _open(format: Format, directory: AnyPath, verify: str, config: Config) -> OpenedCheckpoint:
    """Open a checkpoint that Paddle wrote.

    The format records neither checksums nor a mapping. The mapping is derived on first use from the model's family and
    the stored names, shapes and cuts. This requires a ``config.json``.

    Raises:
        Corrupt: metadata or files are missing, or tensors are incomplete; the error lists all of them.
        FormatError: a pickle contains more than data, or metadata or the configuration is malformed.
    """
    directory = require_local(directory, "A checkpoint of Paddle")
    found = _role_directories(directory)
    stock.check_no_links(directory, (one for place in found.values() for one in (place, *list_directory(place))))
    shards: dict[stock.StoredAs, list[StoredShard]] = {}
    cuts: dict[str, tuple[int, ...]] = {}
    for role, place in found.items():
        own = shards[role, "", False] = list(_shards_in(directory, place))
        if role == EMA_STATE:
            own[:] = itertools.starmap(_average, own)
        if role == MODEL_STATE:
            for shard, *_ in own:
                cuts[shard.name] = tuple(map(max, shard.cuts, cuts.get(shard.name, shard.cuts)))
    states = ((role, shard.name) for (role, *_), own in shards.items() if role != MODEL_STATE for shard, *_ in own)
    unknown = dict.fromkeys(one for one in states if parameter_of(*one) not in cuts)
    faults = [f"{role}: {name} belongs to no stored weight" for role, name in unknown] if cuts else []
    paths = {path for own in shards.values() for _, path, _, _ in own}
    identities = identities_of(directory / path for path in sorted(paths))
    stored_config = stock.read_stock_config(directory, config)
    return stock.open_stock(format, directory, shards, identities, faults, stored_config, cuts)


PADDLE_DISTCP = Format(
    name="paddle",
    title="checkpoint of Paddle's FlexCheckpoint",
    predicate="was written by Paddle's own FlexCheckpoint",
    advice="Set resume_from_checkpoint to it, or convert it to a flex checkpoint with paddleformers-fc convert.",
    checks=("tensors", "equal values"),
    recognises=_is_distcp,
    opener=_open,
    verifier=stock.verify_stock,
    describe=stock.describe_stock,
    roles=ROLES,
)
"""Checkpoints of Paddle's own FlexCheckpoint."""

DISTCP_WRITER = ExportWriter(
    marks=tuple(f"{role}/{METADATA_NAME}" for role in _WRITTEN),
    rules=_rules,
    files=_files,
    header=_header,
    documents=_documents,
    seal=_seal,
    alone=True,
)
"""Writes one directory per role, with metadata and files of arrays, and the Trainer's files."""
