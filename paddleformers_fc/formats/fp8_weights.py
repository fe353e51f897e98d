"""FP8 open weights with one scale per block, as DeepSeek V3 is published, shown as weights of the declared dtype.

``quantization_config`` of ``config.json`` declares them: ``quant_method: fp8``, ``fmt: e4m3``, ``weight_block_size``.
A matrix ``X.weight`` of float8_e4m3fn then has ``X.weight_scale_inv``, one float32 number per block, which is a
multiplier. The catalog contains the products under the name of the matrix, in a file of this module's making, and no
scales. Transformers computes the same products; it refuses blocks at an edge that are smaller, which DeepSeek V3 has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from paddleformers_fc.errors import FormatError
from paddleformers_fc.formats.catalog import Catalog, StoredForm, StoredTensor
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.mapping.folding import fold
from paddleformers_fc.storage.dtypes import ScaledFile, ScaledMatrix, dtype_size, from_safetensors
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.safetensors import Header, TensorEntry

QUANTIZATION = "quantization_config"
_METHOD, _BLOCK = "quant_method", "weight_block_size"
_STORED, _SCALE = "float8_e4m3fn", "_scale_inv"
_COMPUTED = "float32"
_DECLARED = ("bfloat16", "float16", _COMPUTED)

Files = dict[str, list[str]]
"""The tensors of every file."""
ScaledFiles = dict[str, tuple[str, ScaledFile]]
"""For every name of a file with products, the file that contains the numbers, and the products."""


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the declaration of stored scales, for weights that have none."""
    declared = config.get(QUANTIZATION)
    has_scales = isinstance(declared, Mapping) and declared.get(_METHOD) is not None
    return {key: value for key, value in config.items() if key != QUANTIZATION or not has_scales}


def plain_document(read: Callable[[], bytes], config: Mapping[str, Any]) -> Callable[[], bytes]:
    """Return ``config.json`` for the weights as they are read: the file, or the file without the declaration."""
    plain = plain_config(config)
    return read if plain == config else lambda: (json.dumps(plain, indent=2) + "\n").encode()


def scaled_files(
    directory: AnyPath, config: Mapping[str, Any], files: Files, headers: Mapping[str, Header]
) -> tuple[Files, ScaledFiles]:
    """Divide tensors into plain ones and products of block scales.

    Args:
        directory: of the files.
        config: ``config.json``.
        files: the tensors of every file.
        headers: of the files.
    Returns:
        the plain tensors of every file; for every name of a file with products, the file that contains the numbers,
        and the products. There is one in the declared dtype and one in float32, in this order, for each file.
    Raises:
        FormatError: the declared method is not supported, or scales are missing or do not fit their matrices.
    """
    declared = config.get(QUANTIZATION)
    if not isinstance(declared, Mapping) or declared.get(_METHOD) is None:
        return files, {}
    block, dtype = _block(directory, declared), _declared_dtype(directory, config)
    entries = {tensor: (name, headers[name].tensors[tensor]) for name, names in files.items() for tensor in names}
    matrices = {tensor: entry for tensor, (_, entry) in entries.items() if from_safetensors(entry.dtype) == _STORED}
    scales = {tensor for tensor in entries if tensor.endswith(_SCALE)}
    faults = [*_faults(matrices, entries, block), *_without_matrix(scales, matrices)]
    if faults:
        raise FormatError(
            f"Scales of 8-bit weights in {directory} do not fit their weights.",
            where=str(directory),
            evidence=fold(faults),
            next_step="Fetch the files again, or use weights in bfloat16.",
        )
    found: ScaledFiles = {}
    for name, names in files.items():
        products = tuple(
            _matrix(directory, name, matrices[one], *entries[one + _SCALE], block) for one in names if one in matrices
        )
        if products:
            for kind in dict.fromkeys((dtype, _COMPUTED)):
                found[f"{name}.{kind}"] = (name, ScaledFile(kind, products))
    hidden = matrices.keys() | scales
    return {name: [one for one in names if one not in hidden] for name, names in files.items()}, found


def scaled_shards(
    files: Files, headers: Mapping[str, Header], scaled: Mapping[str, tuple[str, ScaledFile]]
) -> Iterator[tuple[Shard, str, int, int]]:
    """Yield the products in the declared dtype, as shards of their files."""
    done: set[str] = set()
    for path, (name, file) in scaled.items():
        if name in done:
            continue
        done.add(name)
        width, begin = dtype_size(file.dtype), 0
        for tensor in files[name]:
            entry = headers[name].tensors[tensor]
            if from_safetensors(entry.dtype) == _STORED:
                yield Shard(tensor, file.dtype, entry.shape, whole(entry.shape)), path, begin, width
                begin += (entry.end - entry.begin) * width


def in_float32(catalog: Catalog) -> Catalog:
    """Return a catalog with products of scales as computed, so that a load casts them once, to the model's dtype."""
    forms: dict[StoredForm, StoredForm] = {}

    def computed(tensor: StoredTensor) -> StoredTensor:
        if len(tensor.offsets) != 1:
            return tensor
        ((path, begin),) = tensor.offsets
        if not isinstance(catalog.identities.get(catalog.root / path), ScaledFile) or tensor.dtype == _COMPUTED:
            return tensor
        form = forms.setdefault(tensor.form, replace(tensor.form, dtype=_COMPUTED))
        ratio = dtype_size(_COMPUTED) // dtype_size(tensor.dtype)
        other = path.removesuffix(tensor.dtype) + _COMPUTED
        return StoredTensor(tensor.name, form, ((other, begin * ratio),))

    if not any(isinstance(one, ScaledFile) for one in catalog.identities.values()):
        return catalog
    roles = {
        role: {name: computed(tensor) for name, tensor in tensors.items()} for role, tensors in catalog.roles.items()
    }
    return replace(catalog, roles=roles)


def _block(directory: AnyPath, declared: Mapping[str, Any]) -> tuple[int, int]:
    """Return the block size of a supported declaration."""
    block = declared.get(_BLOCK)
    faults = [
        f"{key}: {declared.get(key)!r} is not supported, only {wanted!r}"
        for key, wanted in ((_METHOD, "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic"))
        if declared.get(key, wanted) != wanted
    ]
    if isinstance(block, list) and len(block) == 2 and all(type(one) is int and 0 < one < 1 << 31 for one in block):
        high, wide = block
    else:
        faults.append(f"{_BLOCK}: {block!r} is not supported, only two positive integers")
        high, wide = 1, 1
    if faults:
        raise FormatError(
            f"The quantization of {directory} is not supported.",
            where=str(directory / "config.json"),
            evidence=[f"{QUANTIZATION}.{fault}" for fault in faults],
            next_step="Use weights in bfloat16: Transformers writes them with dequantize=True and save_pretrained.",
        )
    return high, wide


def _declared_dtype(directory: AnyPath, config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DECLARED:
        raise FormatError(
            f"The dtype {dtype!r} of {directory} is not one that 8-bit weights are read as.",
            where=str(directory / "config.json"),
            evidence=[f"torch_dtype: {dtype!r}; supported are {', '.join(_DECLARED)}"],
            next_step="Set torch_dtype to bfloat16.",
        )
    return str(dtype)


def _faults(
    matrices: Mapping[str, TensorEntry], entries: Mapping[str, tuple[str, TensorEntry]], block: tuple[int, int]
) -> Iterator[str]:
    for name, entry in matrices.items():
        if len(entry.shape) != 2:
            yield f"{name}: shape {list(entry.shape)} is not that of a matrix"
            continue
        if name + _SCALE not in entries:
            yield f"{name}: {name + _SCALE} is missing"
            continue
        scale = entries[name + _SCALE][1]
        wanted = tuple(-(-length // part) for length, part in zip(entry.shape, block, strict=True))
        if (from_safetensors(scale.dtype), scale.shape) != (_COMPUTED, wanted):
            stored = f"{from_safetensors(scale.dtype)} {list(scale.shape)}"
            yield f"{name + _SCALE}: stored {stored}, wanted {_COMPUTED} {list(wanted)}"


def _without_matrix(scales: set[str], matrices: Mapping[str, TensorEntry]) -> Iterator[str]:
    for name in sorted(scales):
        if name.removesuffix(_SCALE) not in matrices:
            yield f"{name}: there is no {name.removesuffix(_SCALE)} of {_STORED}"


def _matrix(
    directory: AnyPath, name: str, entry: TensorEntry, scales_name: str, scales: TensorEntry, block: tuple[int, int]
) -> ScaledMatrix:
    rows, columns = entry.shape
    return ScaledMatrix(
        directory / name, entry.begin, _STORED, (rows, columns), directory / scales_name, scales.begin, block
    )
