"""The checkpoints and logits of Transformers in this directory, which ``tools/parity.py`` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
DIRECTORY = Path(__file__).parent


@dataclass(frozen=True)
class Fixture:
    """One checkpoint.

    Args:
        name: the stem of its file.
        config: ``config.json``.
        tensors: canonical tensors by name.
        inputs: the arguments of the forward pass.
        logits: the result that Transformers computes.
    """

    name: str
    config: dict[str, Any]
    tensors: Arrays
    inputs: Arrays
    logits: np.ndarray[Any, Any]

    def write(self, directory: Path) -> Path:
        """Write the checkpoint into a directory of its own, as Transformers does."""
        from safetensors.numpy import save_file

        target = directory / self.name
        target.mkdir(parents=True)
        (target / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target


def names() -> list[str]:
    """Return the names of all fixtures."""
    return sorted(path.stem for path in DIRECTORY.glob("*.npz"))


def read(name: str) -> Fixture:
    """Read a fixture."""
    with np.load(DIRECTORY / f"{name}.npz") as file:
        found = {key: file[key] for key in file.files}
    parts: dict[str, Arrays] = {"tensor": {}, "input": {}}
    for key, array in found.items():
        part, _, rest = key.partition("/")
        if rest:
            parts[part][rest] = array
    return Fixture(name, json.loads(str(found["config"])), parts["tensor"], parts["input"], found["logits"])
