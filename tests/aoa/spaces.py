"""Sides of tensors for tests, by hand and of a mapping."""

from __future__ import annotations

from collections.abc import Mapping

from paddleformers_fc.aoa import AoaTensor, uncut
from paddleformers_fc.mapping import Correspondence, Shape, TensorMapping, TensorSpec
from paddleformers_fc.mapping.correspondences import coalesced


def side(shapes: Mapping[str, Shape], cuts: Mapping[str, Shape] | None = None) -> dict[str, AoaTensor]:
    """Tensors of float32 with these shapes, cut as given."""
    return {
        name: AoaTensor(shape, "float32", (cuts or {}).get(name, (1,) * len(shape))) for name, shape in shapes.items()
    }


def side_of(specs: Mapping[str, TensorSpec], cuts: Mapping[str, Shape] | None = None) -> dict[str, AoaTensor]:
    """The tensors of one side of a mapping."""
    return {
        name: AoaTensor(spec.shape, spec.dtype, cuts[name]) if cuts and name in cuts else uncut(spec.shape, spec.dtype)
        for name, spec in specs.items()
    }


def normal(mapping: TensorMapping) -> set[Correspondence]:
    """The correspondences of a mapping in the largest boxes, for comparison."""
    return {item for items in mapping.by_target.values() for item in coalesced(items)}
