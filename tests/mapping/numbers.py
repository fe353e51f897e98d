"""Moving real numbers through a mapping: the reference that geometry is held against."""

from __future__ import annotations

from typing import Any

import numpy as np

from paddleformers_fc.mapping import TensorMapping
from paddleformers_fc.mapping.boxes import Box

Arrays = dict[str, np.ndarray[Any, Any]]


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of a numpy array."""
    return tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))


def moved(mapping: TensorMapping, arrays: Arrays) -> Arrays:
    """The targets of a mapping, from the values of its sources; what nothing writes stays at -1."""
    out = {name: np.full(spec.shape, -1.0) for name, spec in mapping.targets.items()}
    for item in mapping.correspondences:
        part = arrays[item.source][slices(item.source_box)]
        used = [axis for axis in item.axes if axis != -1]
        part = np.transpose(part, [*used, *(axis for axis in range(part.ndim) if axis not in used)])
        out[item.target][slices(item.target_box)] = part.reshape(item.target_box.shape)
    return out


def numbered(mapping: TensorMapping) -> Arrays:
    """Sources whose every element has a value of its own."""
    arrays: Arrays = {}
    start = 0
    for name, spec in mapping.sources.items():
        size = int(np.prod(spec.shape))
        arrays[name] = np.arange(start, start + size, dtype=float).reshape(spec.shape)
        start += size
    return arrays
