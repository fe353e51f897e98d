"""The tensors of a side, as far as the language depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.correspondences import TensorSpec


@dataclass(frozen=True, slots=True)
class AoaTensor:
    """A tensor of one side.

    Args:
        shape: its global shape, in elements.
        dtype: its element type by its numpy name, such as ``bfloat16``.
        cuts: number of tensor-parallel shards along each axis.
    """

    shape: Shape
    dtype: str
    cuts: Shape

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype alone."""
        return TensorSpec(self.shape, self.dtype)


Tensors = Mapping[str, AoaTensor]
"""The tensors of a side by name."""


def uncut(shape: Shape, dtype: str) -> AoaTensor:
    """Return a tensor that is not divided between ranks, as in a file of open weights."""
    return AoaTensor(shape, dtype, (1,) * len(shape))
