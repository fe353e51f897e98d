"""Sides of tensors for tests: by hand, of a mapping, and of every family under a tensor-parallel degree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from paddleformers_fc.aoa import AoaTensor, uncut, with_ties
from paddleformers_fc.families import Family, ModelDescription, ModelTensor, bind, enumerate_tensors, own_families
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.mapping import Correspondence, RuleSet, Shape, TensorMapping, TensorSpec
from paddleformers_fc.mapping.correspondences import coalesced

DEGREES = (1, 2, 4)
NAMES = tuple(family.name for family in own_families())


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


@dataclass(frozen=True)
class Model:
    """A family's tiny model under a tensor-parallel degree."""

    family: Family
    described: ModelDescription
    tensors: tuple[ModelTensor, ...]
    rules: RuleSet
    mapping: TensorMapping

    @property
    def cuts(self) -> dict[str, Shape]:
        return {tensor.name: tensor.cuts for tensor in self.tensors}


@cache
def model(name: str, degree: int) -> Model:
    """The tiny model of the family with this name."""
    family = next(family for family in own_families() if family.name == name)
    described = tiny_models(family)[0]
    tensors = tuple(tensor.under(tp=degree) for tensor in enumerate_tensors(family, described))
    rules = bind(family, described, tensors)
    return Model(family, described, tensors, rules, with_ties(rules))


def normal(mapping: TensorMapping) -> set[Correspondence]:
    """The correspondences of a mapping in the largest boxes, for comparison."""
    return {item for items in mapping.by_target.values() for item in coalesced(items)}
