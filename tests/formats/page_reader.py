"""A reader of flex checkpoints that is written from ``docs/format.md`` alone, with numpy, json and xxhash.

It imports nothing of the package, so that a difference between the page and the files is a failing test.
"""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
}
SCALARS = (".beta1_pow_acc_0", ".beta2_pow_acc_0")
SUFFIXES = {
    "model_state": ("",),
    "master_weight": (".w_0",),
    "optimizer_state": (".moment1_0", ".moment2_0", ".moment2_max_0", ".velocity_0", *SCALARS),
}


BLOCK = 4 * 2**20
INDEX = "flex_index.safetensors"
MANIFEST = ("format", "version", "written_by", "step", "consumed_samples", "world_size", "parallel", "family")
MANIFEST += ("files", "seal")
OPTIONAL = ("differing_replicas", "diverged_ties", "origin", "run")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest after comparing all of its checksums."""
    raw = (directory / "flex_checkpoint.json").read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    sealed = {key: value for key, value in manifest.items() if key != "seal"}
    text = json.dumps(sealed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    unknown = [value for key, value in manifest.items() if key not in (*MANIFEST, *OPTIONAL)]
    ignored = [isinstance(value, dict) and value.get("must_understand") is False for value in unknown]
    expect(all(ignored) and manifest.keys() >= set(MANIFEST), "fields")
    expect(raw.endswith(b"}\n"), "line feed")
    expect((manifest["format"], manifest["version"]) == ("flex_checkpoint", 2), "format")
    expect(xxhash.xxh3_128_hexdigest(text.encode()) == manifest["seal"], "seal")
    index = read_index(directory)
    recorded = index["blocks"].tobytes()
    for file in manifest["files"]:
        data = (directory / file["path"]).read_bytes()
        blocks = b"".join(xxhash.xxh3_64_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
        expect((len(data), xxhash.xxh3_128_hexdigest(blocks)) == (file["size"], file["digest"]), file["path"])
        if file["path"] != INDEX:
            expect(recorded.startswith(blocks), file["path"])
            recorded = recorded[len(blocks) :]
    expect(not recorded, "blocks")
    return manifest


def read_header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its data."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def read_index(directory: Path) -> Tensors:
    """Return the arrays of the index."""
    data = (directory / INDEX).read_bytes()
    header, start = read_header(data)
    expect(header.pop("__metadata__") == {"format": "flex_index", "block_bytes": str(BLOCK)}, "index")
    return {
        name: np.frombuffer(data[start:][slice(*one["data_offsets"])], {**DTYPES, "U8": np.uint8}[one["dtype"]])
        for name, one in header.items()
    }


def expect(true: bool, what: str) -> None:
    """Raise ``ValueError`` unless a statement of the page holds."""
    if not true:
        raise ValueError(f"the checkpoint contradicts docs/format.md: {what}")


def read_stored(directory: Path) -> dict[str, Tensors]:
    """Return the tensors of the model that was saved: role -> name -> array of the global shape."""
    roles: dict[str, Tensors] = {}
    files = [one["path"] for one in read_manifest(directory)["files"] if one["path"] != INDEX]
    files = [path for path in files if path.endswith(".safetensors")]
    index = read_index(directory)
    stems, endings, dtypes = (bytes(index[name]).decode().split("\0") for name in ("stems", "endings", "dtypes"))
    names = [stems[one] + endings[other] for one, other in zip(index["name_stem"], index["name_ending"], strict=True)]
    places = read_places(index)
    shards = zip(index["shard_name"].tolist(), index["shard_place"].tolist(), strict=True)
    for path, count in zip(files, index["file_shards"].tolist(), strict=True):
        data = (directory / path).read_bytes()
        header, start = read_header(data)
        at, held = start, []
        for name, place in itertools.islice(shards, count):
            dtype, global_shape, offset, shape, flat = places[place]
            values = np.frombuffer(data, DTYPES[dtypes[dtype]], _length(shape, flat), at)
            held.append((names[name], dtypes[dtype], [at - start, at - start + values.nbytes]))
            at += values.nbytes
            tensors = roles.setdefault(path.partition("/")[0], {})
            whole = tensors.setdefault(names[name], np.zeros(global_shape, values.dtype))
            _fill(whole, tuple(map(slice, offset, offset + shape)), flat, values)
        header.pop("__metadata__")
        expect(at == len(data), path)
        expect([(name, one["dtype"], one["data_offsets"]) for name, one in header.items()] == held, path)
    return {role: tensors for role, tensors in roles.items() if role in SUFFIXES}


def read_places(index: Tensors) -> list[tuple[Any, ...]]:
    """Return number of the dtype, global shape, offset, shape and range of every place."""
    numbers, places = index["places"], []
    while numbers.size:
        dtype, axes, begin, end = numbers[:4].tolist()
        places.append((dtype, *numbers[4 : 4 + 3 * axes].reshape(3, axes), [begin, end]))
        numbers = numbers[4 + 3 * axes :]
    return places


def _length(shape: Array, flat: list[int]) -> int:
    return int(np.prod(shape)) if flat == [-1, -1] else flat[1] - flat[0]


def _fill(whole: Array, box: tuple[slice, ...], flat: list[int], values: Array) -> None:
    if flat != [-1, -1]:
        elements = whole[box].ravel()  # A copy in row-major order.
        elements[slice(*flat)] = values
        values = elements
    whole[box] = values.reshape(whole[box].shape)


def read_canonical(directory: Path) -> dict[tuple[str, str], Array]:
    """Return the canonical tensors: (role, canonical name with the suffix of a state) -> array."""
    stored = read_stored(directory)
    rules = json.loads((directory / "mapping.json").read_bytes())["rules"]["rules"]
    return {
        (role, name): array
        for role, tensors in stored.items()
        for suffix in SUFFIXES[role]
        for rule in rules
        for name, array in _sources(rule, tensors, suffix).items()
    }


def _sources(rule: dict[str, Any], stored: Tensors, suffix: str) -> Tensors:
    names = [name + suffix for name in rule["targets"]]
    if not all(name in stored for name in names):
        return {}
    sources = [name + suffix for name in rule["sources"]]
    if suffix in SCALARS:
        return dict.fromkeys(sources, stored[names[0]])
    return dict(zip(sources, _undo(rule, [stored[name] for name in names]), strict=True))


def _undo(rule: dict[str, Any], targets: list[Array]) -> list[Array]:
    """Return the sources of a rule from its targets: the four steps of the page."""
    axis, axes = rule["axis"], rule["axes"]
    entries = [one if isinstance(one, list) else [one] for one in rule["parts"]]
    lengths = [length for entry in entries for length in entry]
    if rule["slab"] is not None:
        slab = rule["slab"]
        targets = [np.take(targets[0], range(slab["start"], slab["stop"]), slab["axis"])]
    if len(targets) == 1 and len(lengths) > 1:
        targets = _separate(targets[0], lengths, axis, rule["target_blocks"])
    new = tuple(at for at, source in enumerate(axes) if source == -1)
    order = np.argsort([source for source in axes if source != -1])
    parts = [np.transpose(np.squeeze(target, new), order) for target in targets]
    entries = entries if len(rule["sources"]) == len(entries) else [lengths]
    left = iter(parts)
    return [_joined([next(left) for _ in entry], rule["source_blocks"], axes[axis]) for entry in entries]


def _joined(parts: list[Array], blocks: int, axis: int) -> Array:
    if len(parts) == 1:
        return parts[0]
    groups = [np.split(part, blocks, axis) for part in parts]
    return np.concatenate([share for group in zip(*groups, strict=True) for share in group], axis)


def _separate(whole: Array, lengths: list[int], axis: int, blocks: int) -> list[Array]:
    ends = np.cumsum([length // blocks for length in lengths])[:-1]
    groups = [np.split(group, ends, axis) for group in np.split(whole, blocks, axis)]
    return [np.concatenate(shares, axis) for shares in zip(*groups, strict=True)]
