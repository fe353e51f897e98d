"""Quantized open weights of 8 and 4 bits with scales, read as weights of the declared dtype.

``quantization_config`` in ``config.json`` declares how values and scales are stored:

* ``quant_method: fp8`` with ``weight_block_size`` (DeepSeek V3, V3.2, V4): a float8_e4m3fn matrix ``X.weight`` has one
  scale per block in ``X.weight_scale_inv`` or ``X.scale``, in float32, or in 8-bit powers of two with
  ``scale_fmt: ue8m0``. With ``expert_dtype: fp4`` (V4), experts have two 4-bit values per byte and one scale per 32
  columns of a row.
* ``quant_method: mxfp4`` (GPT-OSS): ``X_blocks`` contains rows of experts in groups of 32 4-bit values, and
  ``X_scales`` a power of two per group. The weight ``X`` is transposed.

The catalog contains the products in virtual files, without scales. Transformers computes the same products, but does
not support smaller blocks at an edge, which DeepSeek V3 has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from msgspec import structs

from paddleformers_fc.formats.catalog import Catalog, StoredForm, StoredTensor, malformed
from paddleformers_fc.formats.checkpoint import CONFIG_NAME
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.storage.dtypes import (
    FP4,
    ScaledFile,
    ScaledTensor,
    Scheme,
    dtype_size,
    from_safetensors,
    to_safetensors,
)
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.storage.safetensors import Header, TensorEntry

QUANTIZATION = "quantization_config"
_METHOD, _BLOCK, _EXCLUDED, _EXPERTS = "quant_method", "weight_block_size", "modules_to_not_convert", "expert_dtype"
_SUPPORTED = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
    _EXPERTS: ("fp8", "fp4"),
}
"""The supported values of other keys of ``quant_method: fp8``."""
_SCALES = ("_scale_inv", ".scale", "_scales")
"""Suffixes of the names of scales in all declarations."""
_COMPUTED, _FP8, _POWER = "float32", "float8_e4m3fn", "float8_e8m0fnu"
_DECLARED = ("bfloat16", "float16", _COMPUTED)
_MOST_PATTERNS = 64
"""Maximum number of patterns with ``*`` for excluded modules: each is compared with all modules."""

Files = dict[str, list[str]]
"""The tensors of every file."""
ScaledFiles = dict[str, tuple[str, ScaledFile]]
"""For every virtual file with products: the file that contains the values, and the products."""
_Entries = Mapping[str, tuple[str, TensorEntry]]
"""The file and the header entry of every tensor."""


@dataclass(frozen=True)
class _Kind:
    """A kind of quantized weights in a declaration.

    Args:
        stored: dtype of the values in headers.
        endings: suffixes of the names of values, each with the suffix of their scales.
        schemes: schemes by the dtype of the scales in headers.
        stack: suffix of the values of a stack of matrices with grouped rows. Products lack the suffix and are
            transposed.
    """

    stored: str
    endings: tuple[tuple[str, str], ...]
    schemes: Mapping[str, Scheme]
    stack: str = ""


_GROUPS = Scheme(FP4, _POWER, (1, 32))
_EXPERTS_OF_FP4 = _Kind("int8", ((".weight", ".scale"),), {_POWER: _GROUPS})
_MXFP4 = _Kind("uint8", (("_blocks", "_scales"),), {"uint8": _GROUPS}, "_blocks")


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the declaration of a quantization."""
    hidden = (QUANTIZATION, _EXPERTS) if _is_declared(config) else ()
    return {key: value for key, value in config.items() if key not in hidden}


def scaled_files(
    directory: AnyPath, config: Mapping[str, Any], files: Files, headers: Mapping[str, Header]
) -> tuple[Files, ScaledFiles]:
    """Divide tensors into plain tensors and products of values and scales.

    Args:
        directory: the directory of the files.
        config: the content of ``config.json``.
        files: the tensors of every file.
        headers: the headers of the files.
    Returns:
        the plain tensors of every file, and the virtual files with products: for each file one in the declared dtype
        and one in float32, in this order.
    Raises:
        FormatError: the declared method is not supported, or scales are missing or do not match their values.
    """
    if not _is_declared(config):
        return files, {}
    kinds, dtype = _kinds(directory, config), _declared_dtype(directory, config)
    entries = {tensor: (name, headers[name].tensors[tensor]) for name, names in files.items() for tensor in names}
    products, hidden, faults = _products(directory, kinds, entries)
    faults += _excluded((one for own in products.values() for one in own), config[QUANTIZATION].get(_EXCLUDED) or [])
    if faults:
        what = f"The quantized weights in {directory} do not match {QUANTIZATION}."
        raise malformed(directory, what, faults, "Download the files again, or use weights in bfloat16.")
    found: ScaledFiles = {}
    for name, own in products.items():
        for kind in dict.fromkeys((dtype, _COMPUTED)):
            found[f"{name}.{kind}"] = (name, ScaledFile(kind, tuple(own)))
    return {name: [one for one in names if one not in hidden] for name, names in files.items()}, found


def scaled_shards(scaled: ScaledFiles) -> Iterator[tuple[Shard, str, int, int]]:
    """Yield the products in the declared dtype, as shards of their virtual files."""
    done: set[str] = set()
    for path, (name, file) in scaled.items():
        if name not in done:
            done.add(name)
            for one, begin in zip(file.tensors, file.begins, strict=False):
                yield Shard(one.name, file.dtype, one.shape, whole(one.shape)), path, begin, dtype_size(file.dtype)


def in_float32(catalog: Catalog) -> Catalog:
    """Return a catalog with products in float32, so that a load rounds them only once, to the model's dtype."""
    forms: dict[StoredForm, StoredForm] = {}

    def computed(tensor: StoredTensor) -> StoredTensor:
        if len(tensor.offsets) != 1:
            return tensor
        ((path, begin),) = tensor.offsets
        if not isinstance(catalog.identities.get(catalog.root / path), ScaledFile) or tensor.dtype == _COMPUTED:
            return tensor
        form = forms.setdefault(tensor.form, structs.replace(tensor.form, dtype=_COMPUTED))
        ratio = dtype_size(_COMPUTED) // dtype_size(tensor.dtype)
        other = path.removesuffix(tensor.dtype) + _COMPUTED
        return StoredTensor(tensor.name, form, ((other, begin * ratio),))

    if not any(isinstance(one, ScaledFile) for one in catalog.identities.values()):
        return catalog
    roles = {
        role: {name: computed(tensor) for name, tensor in tensors.items()} for role, tensors in catalog.roles.items()
    }
    return structs.replace(catalog, roles=roles)


def _is_declared(config: Mapping[str, Any]) -> bool:
    declared = config.get(QUANTIZATION)
    return isinstance(declared, Mapping) and declared.get(_METHOD) is not None


def _kinds(directory: AnyPath, config: Mapping[str, Any]) -> tuple[_Kind, ...]:
    """Return the kinds of quantized weights in the declaration.

    Raises:
        FormatError: the declaration is not supported.
    """
    declared = {_EXPERTS: config.get(_EXPERTS)} | config[QUANTIZATION]
    kinds: tuple[_Kind, ...] = (_MXFP4,)
    faults: list[str] = []
    if declared[_METHOD] == "fp8":
        scales = (_COMPUTED, _POWER) if declared.get("scale_fmt") == "ue8m0" else (_COMPUTED,)
        block = declared.get(_BLOCK)
        if isinstance(block, list) and len(block) == 2 and all(type(one) is int and 0 < one < 1 << 31 for one in block):
            schemes = {one: Scheme(_FP8, one, (block[0], block[1])) for one in scales}
            kinds = (_Kind(_FP8, (("", "_scale_inv"), (".weight", ".scale")), schemes),)
        else:
            faults.append(f"{_BLOCK}: {block!r} is not supported, only two positive integers")
        faults += [
            f"{key}: {declared[key]!r} is not supported, only {' and '.join(map(repr, values))}"
            for key, values in _SUPPORTED.items()
            if declared.get(key) is not None and declared[key] not in values
        ]
        # The first config.json of DeepSeek V4 lacks the key; the shape of the scales shows two values per byte.
        if declared[_EXPERTS] == "fp4" or (declared[_EXPERTS] is None and _POWER in scales):
            kinds = (*kinds, _EXPERTS_OF_FP4)
    elif declared[_METHOD] != "mxfp4":
        faults.append(f"{_METHOD}: {declared[_METHOD]!r} is not supported, only 'fp8' and 'mxfp4'")
    excluded = declared.get(_EXCLUDED) or []
    if not isinstance(excluded, list) or not all(isinstance(one, str) for one in excluded):
        faults.append(f"{_EXCLUDED}: {excluded!r} is not a list of names")
    elif sum("*" in one for one in excluded) > _MOST_PATTERNS:
        faults.append(f"{_EXCLUDED}: more than {_MOST_PATTERNS} names with *")
    if faults:
        next_step = "Use weights in bfloat16: Transformers writes them with dequantize=True and save_pretrained."
        what = f"The quantization of {directory} is not supported."
        raise malformed(directory / CONFIG_NAME, what, faults, next_step)
    return kinds


def _declared_dtype(directory: AnyPath, config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DECLARED:
        what = f"Quantized weights of dtype {dtype!r} are not supported."
        evidence = [f"torch_dtype: {dtype!r}; supported are {', '.join(_DECLARED)}"]
        raise malformed(directory / CONFIG_NAME, what, evidence, "Set torch_dtype to bfloat16.")
    return str(dtype)


def _products(
    directory: AnyPath, kinds: tuple[_Kind, ...], entries: _Entries
) -> tuple[dict[str, list[ScaledTensor]], set[str], list[str]]:
    """Return the products by file, the names of their values and scales, and the faults."""
    by_dtype = {to_safetensors(kind.stored): kind for kind in kinds}
    paths = {file: directory / file for file in {file for file, _ in entries.values()}}
    products: dict[str, list[ScaledTensor]] = {}
    hidden: set[str] = set()
    faults: list[str] = []
    for name, (file, entry) in entries.items():
        kind = by_dtype.get(entry.dtype)
        scales = [name.removesuffix(one) + other for one, other in kind.endings if name.endswith(one)] if kind else []
        if kind is None or not scales:
            continue
        found = next((one for one in scales if one in entries), None)
        if found is None:
            faults.append(f"{name}: {scales[0]} is missing")
            continue
        hidden |= {name, found}
        product = _product(kind, name, paths[file], entry, found, paths[entries[found][0]], entries[found][1])
        if isinstance(product, ScaledTensor):
            products.setdefault(file, []).append(product)
        else:
            faults.append(f"{name}: {product}")
    stored = " or ".join(kind.stored for kind in kinds)
    without = sorted(name for name in entries if name.endswith(_SCALES) and name not in hidden)
    return products, hidden, [*faults, *(f"{name}: scales without {stored} weights" for name in without)]


def _product(
    kind: _Kind, name: str, file: AnyPath, numbers: TensorEntry, scales: str, scales_file: AnyPath, found: TensorEntry
) -> ScaledTensor | str:
    """Return the product of values and scales, or as text why they do not match."""
    dtype = from_safetensors(found.dtype)
    scheme = kind.schemes.get(dtype)
    if scheme is None:
        return f"{scales} is stored in {dtype}, expected {' or '.join(kind.schemes)}"
    shape = _shape(numbers.shape, scheme, bool(kind.stack))
    if shape is None:
        return f"shape {list(numbers.shape)} is not {'one of groups of experts' if kind.stack else 'a matrix'}"
    *stack, rows, columns = shape
    expected = (*stack, -(-rows // scheme.block[0]), -(-columns // scheme.block[1]))
    if found.shape != expected:
        return f"{scales} has shape {list(found.shape)}, expected {list(expected)}"
    product, transposed = name.removesuffix(kind.stack), bool(kind.stack)
    return ScaledTensor(product, shape, scheme, file, numbers.begin, scales_file, found.begin, transposed)


def _shape(stored: tuple[int, ...], scheme: Scheme, is_stack: bool) -> tuple[int, ...] | None:
    """Return the shape of values from the stored shape of their bytes; None if it is invalid."""
    if is_stack:
        is_grouped = len(stored) == 4 and stored[3] * scheme.per_byte == scheme.block[1]
        return (*stored[:2], stored[2] * scheme.block[1]) if is_grouped else None
    return (stored[0], stored[1] * scheme.per_byte) if len(stored) == 2 else None


def _excluded(products: Iterable[ScaledTensor], patterns: list[str]) -> Iterator[str]:
    """Yield the products of modules that the declaration excludes from quantization."""
    exact = frozenset(patterns)
    others = re.compile("|".join(translate(one) for one in patterns if "*" in one) or "(?!)")
    for product in products if patterns else ():
        parts = product.name.split(".")
        for module in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            if module in exact or others.match(module):
                yield f"{product.name}: quantized, although {_EXCLUDED} contains {module}"
                break
