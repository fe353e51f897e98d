"""Merge adapters into their base during an export: ``weight + lora_B @ lora_A * scaling``.

Weights are computed in float32, in blocks of rows, and cast once to the dtype of the base, so that a merged model
depends neither on the layout that trained the adapters nor on the pieces in which it is written. Base tensors that were
trained directly are replaced. Memory: the adapters in float32, and the replaced tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.digest import read_canonical
from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.description import A, Adapters, B, is_adapter, shared_copies
from paddleformers_fc.families.stated import canonical_ties
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.huggingface import check_orientation
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.plan.sources import canonical_layout, canonical_source
from paddleformers_fc.storage.block_checksums import digest_of
from paddleformers_fc.storage.dtypes import copy_cast
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import fold

Array = np.ndarray[Any, Any]


_FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of a base that is not quantized."""
_ROWS = 16
"""Rows of a change that are multiplied at a time. The last bits of a product depend on the number of its rows."""


class Delta(msgspec.Struct, frozen=True):
    """The change of one weight.

    Args:
        inputs: ``lora_A`` [r, in], float32.
        outputs: ``lora_B`` [out, r], float32, multiplied by the scaling.
    """

    inputs: Array
    outputs: Array


class Merge(msgspec.Struct, frozen=True):
    """The changes to the tensors of a base.

    Args:
        deltas: changes of weights, by canonical name.
        trained: replacements of base tensors that were trained directly, by canonical name.
    """

    deltas: Mapping[str, Delta]
    trained: Mapping[str, Array]

    def apply(self, name: str, begin: int, values: Array) -> None:
        """Change successive elements of a tensor of the base in place.

        Args:
            name: the tensor.
            begin: index of the first element.
            values: the elements, in the dtype of the base.
        Raises:
            MismatchError: a finite number would become infinite in float16.
        """
        if name in self.trained:
            copy_cast(values, self.trained[name][begin : begin + values.size], Path(name))
        delta = self.deltas.get(name)
        if delta is not None and values.size:
            width = delta.inputs.shape[1]
            first, last = begin // width // _ROWS * _ROWS, -(-(begin + values.size) // width)
            rows = [delta.outputs[low : low + _ROWS] @ delta.inputs for low in range(first, last, _ROWS)]
            change = np.concatenate(rows).reshape(-1)[begin - first * width :][: values.size]
            copy_cast(values, values.astype(np.float32) + change, Path(name))


def read_merge(checkpoint: OpenedCheckpoint, base: OpenedCheckpoint) -> Merge:
    """Read the adapters of a checkpoint, and compare them with the tensors of a base.

    Args:
        checkpoint: a flex checkpoint of adapters.
        base: open weights.
    Raises:
        OptionError: the checkpoint contains no adapters.
        MismatchError: a tensor of the base is missing or has the wrong shape or dtype, or adapters change one name of a
            tied tensor.
    """
    adapters = checkpoint.known.adapters
    if adapters is None:
        raise OptionError(
            "The checkpoint contains a complete model, not adapters to merge into a base.",
            where=str(checkpoint.catalog.root),
            next_step="Leave out the base.",
        )
    source = canonical_source(checkpoint)
    weights = canonical_layout(source)[MODEL_STATE]
    arrays = read_canonical(source, {MODEL_STATE: weights})
    tensors = {name: array.reshape(weights[name].global_shape) for (_, name), array in arrays.items()}
    # A base may store a tied tensor under both names.
    ties, stored = canonical_ties(checkpoint.known), base.catalog.roles[MODEL_STATE]
    tensors |= {alias: tensors[owner] for alias, owner in ties.items() if owner in tensors and alias in stored}
    merge = Merge(
        deltas_of(tensors, shared_copies(checkpoint.rules), adapters),
        {name: array.reshape(-1) for name, array in tensors.items() if not is_adapter(name)},
    )
    check_orientation(base, merge.deltas)
    _check_alike(merge, {name: tensors[name] for name in merge.trained}, base)
    _check_not_tied(merge, {**canonical_ties(ModelDescription(dict(base.config))), **ties}, base.catalog.root)
    return merge


def check_same_base(adapters: Adapters, base: AnyPath, files: frozenset[str]) -> None:
    """Check that the files of a base are those that the adapters were trained on.

    Args:
        adapters: the adapters.
        base: the directory of the base.
        files: its weight files.
    Raises:
        MismatchError: lists every file that differs; or the base of the training was not read from files.
    """
    recorded = adapters.base.files
    names = sorted(files | recorded.keys()) if isinstance(base, Path) and recorded else []
    found = {name: digest_of(base / name) for name in names if name in files and isinstance(base, Path)}
    faults = [
        f"{name}: {found.get(name, 'missing')}, trained on {recorded.get(name, 'none of this name')}"
        for name in names
        if found.get(name) != recorded.get(name)
    ]
    if faults or not names:
        raise MismatchError(
            "The adapters were trained on another base."
            if faults
            else "The base cannot be compared with the base of the training.",
            where=str(base),
            evidence=fold(faults)
            or [
                f"recorded: {adapters.base.location or 'a base that was not read from files'}",
                "no checksums of its files are recorded" if not recorded else "files at a URL are not hashed",
            ],
            next_step="Name the base of the training; or merge into this one with --accept-base (accept_base=True).",
        )


def deltas_of(tensors: Mapping[str, Array], shared: Mapping[str, str], adapters: Adapters) -> dict[str, Delta]:
    """Return the changes of weights by canonical name.

    Args:
        tensors: the tensors of adapters, by canonical name.
        shared: canonical name -> the name of the stored tensor, if several layers share it.
        adapters: the description of the adapters, for their scaling.
    """
    deltas: dict[str, Delta] = {}
    for name, outputs in tensors.items():
        layer = name.removesuffix(f".{B}.weight")
        if layer != name:
            own = f"{layer}.{A}.weight"
            inputs = tensors[shared.get(own, own)].astype(np.float32)
            deltas[f"{layer}.weight"] = Delta(inputs, outputs.astype(np.float32) * np.float32(adapters.scaling))
    return deltas


def _check_not_tied(merge: Merge, ties: Mapping[str, str], base: AnyPath) -> None:
    """Check that no tied tensor has adapters, which would change only one of its names."""
    faults = [
        f"{name}: has adapters, and {alias} is a copy of {owner}"
        for alias, owner in ties.items()
        for name in (alias, owner)
        if name in merge.deltas
    ]
    if faults:
        raise MismatchError(
            "Adapters of a tied tensor cannot be merged into it.",
            where=str(base),
            evidence=fold(faults),
            next_step="Export the adapters without a base. Or name a base with both tensors and "
            "tie_word_embeddings: false.",
        )


def _check_alike(merge: Merge, trained: Mapping[str, Array], base: OpenedCheckpoint) -> None:
    stored = base.catalog.roles[MODEL_STATE]
    quantized = [
        f"{name}: {stored[name].dtype}"
        for name in (*merge.deltas, *trained)
        if name in stored and stored[name].dtype not in _FLOATS
    ]
    if quantized:
        raise MismatchError(
            "Adapters cannot be merged into a quantized base.",
            where=str(base.catalog.root),
            evidence=fold(quantized),
            next_step="Name the base in bfloat16, float16, float32 or float64.",
        )
    expected: dict[str, tuple[int, ...]] = {name: array.shape for name, array in trained.items()}
    expected |= {name: (delta.outputs.shape[0], delta.inputs.shape[1]) for name, delta in merge.deltas.items()}
    faults = [
        f"{name}: {'missing' if name not in stored else list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name not in stored or stored[name].shape != shape
    ]
    if faults:
        raise MismatchError(
            "The adapters do not match the base.",
            where=str(base.catalog.root),
            evidence=fold(faults),
            next_step="Name the base of the training.",
        )
