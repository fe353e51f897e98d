"""The kinds of layers of tensors, read from a live model without importing its framework.

A layer's kind follows from the names of its classes: a tensor-parallel layer derives from no plain one, but is called
after it. One pass over the model's layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paddleformers_fc.families.bind import ModelTensor


class LayerKind(Enum):
    """The layer that a tensor is a parameter of."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    CONVOLUTION = "convolution"
    NORM = "norm"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LayeredTensor:
    """A tensor of a model and the kind of its layer.

    Args:
        tensor: the tensor.
        kind: the kind of the layer that it is a parameter of.
    """

    tensor: ModelTensor
    kind: LayerKind


def layer_kinds(model: Any) -> dict[str, LayerKind]:
    """Return the kind of the layer of every parameter and buffer.

    Args:
        model: a live ``Layer``; only ``named_sublayers``, ``named_parameters`` and ``named_buffers`` are called.
    Returns:
        kinds by structured name.
    """
    found: dict[str, LayerKind] = {}
    for prefix, layer in model.named_sublayers(include_self=True):
        kind = kind_of_classes(base.__name__ for base in type(layer).__mro__)
        own = (layer.named_parameters, layer.named_buffers)
        for name, _ in (entry for named in own for entry in named(include_sublayers=False)):
            found[f"{prefix}.{name}" if prefix else name] = kind
    return found


def kind_of_classes(names: Iterable[str]) -> LayerKind:
    """Return the kind of a layer whose class and base classes have these names."""
    for name in names:
        if name == "Linear" or name.endswith("ParallelLinear"):
            return LayerKind.LINEAR
        if name in ("Embedding", "VocabParallelEmbedding"):
            return LayerKind.EMBEDDING
        if name in ("Conv1D", "Conv2D", "Conv3D"):
            return LayerKind.CONVOLUTION
        if name.endswith("Norm"):
            return LayerKind.NORM
    return LayerKind.OTHER
