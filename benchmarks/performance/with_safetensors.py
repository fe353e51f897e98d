"""The safetensors library: one file per rank, which knows nothing of layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import safe_open

from benchmarks.performance.held import Done, Held
from benchmarks.performance.pieces import FILE, is_transposed


def save(directory: Path, held: Held) -> Done:
    """``save_file`` of this rank's tensors."""
    safetensors.numpy.save_file(held.arrays, directory / f"{held.rank}.safetensors")
    return Done()


def load(directory: Path, held: Held) -> Done:
    """``load_file``, and a copy into the tensors that exist."""
    found = safetensors.numpy.load_file(directory / f"{held.rank}.safetensors")
    for name, array in held.arrays.items():
        np.copyto(array, found[name])
    return Done()


def start(directory: Path, held: Held) -> Done:
    """A slice of every tensor with ``get_slice``, transposed by numpy into the tensor that exists."""
    with safe_open(directory / FILE, framework="numpy") as file:
        for piece, array in zip(held.pieces, held.memory, strict=True):
            turned = is_transposed(piece.name)
            found = file.get_slice(piece.name)[piece.box[::-1] if turned else piece.box].view(piece.element)
            np.copyto(array.reshape(piece.local_shape), found.T if turned else found)
    return Done()


def export(source: Path, target: Path, held: Held) -> Done:
    """``save_file`` of the whole model, which is in memory."""
    safetensors.numpy.save_file(held.arrays, target / FILE)
    return Done()
