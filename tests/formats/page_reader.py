"""A reader of flex checkpoints that is written from ``docs/format.md`` alone, with numpy, json and xxhash.

It imports nothing of the package, so that a difference between the page and the files is a failing test.
"""

from __future__ import annotations

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
    for file in manifest["files"]:
        data = (directory / file["path"]).read_bytes()
        step = file["block_bytes"]
        blocks = [xxhash.xxh3_64(data[at : at + step]) for at in range(0, len(data), step)]
        digest = xxhash.xxh3_128_hexdigest(b"".join(block.digest() for block in blocks))
        found = (len(data), digest, [block.hexdigest() for block in blocks])
        expect(found == (file["size"], file["digest"], file["blocks"]), file["path"])
    return manifest


def expect(true: bool, what: str) -> None:
    """Raise ``ValueError`` unless a statement of the page holds."""
    if not true:
        raise ValueError(f"the checkpoint contradicts docs/format.md: {what}")


def read_stored(directory: Path) -> dict[str, Tensors]:
    """Return the tensors of the model that was saved: role -> name -> array of the global shape."""
    roles: dict[str, Tensors] = {}
    for file in read_manifest(directory)["files"]:
        role, _, rest = file["path"].partition("/")
        if role in SUFFIXES and rest.endswith(".safetensors"):
            _add_shards((directory / file["path"]).read_bytes(), roles.setdefault(role, {}))
    return roles


def _add_shards(data: bytes, tensors: Tensors) -> None:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name, shard in json.loads(header["__metadata__"]["flex_shards"]).items():
        begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
        values = np.frombuffer(data[begin:end], DTYPES[header[name]["dtype"]])
        whole = tensors.setdefault(name, np.zeros(shard["global_shape"], values.dtype))
        box = tuple(slice(at, at + count) for at, count in zip(shard["offset"], shard["shape"], strict=True))
        if shard["flat"] is not None:
            elements = whole[box].ravel()  # A copy in row-major order.
            elements[slice(*shard["flat"])] = values
            values = elements
        whole[box] = values.reshape(shard["shape"])


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
