"""Enumerate the tensors of a configuration from a family's declaration: names, shapes, dtypes and cut axes.

The enumeration serves where no model exists: to prove a family when it is registered, and to simulate a layout. A real
model is bound by its own tensors.

Cost is linear in the tensors; sizes and conditions are evaluated once per kind of tensor, or per layer if they depend
on its number.

The order in which a model builds its parameters, from their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.bind import ModelTensor
from paddleformers_fc.families.declarations import BUILT, PLACEHOLDER, Family, Stage, Statement
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.families.names import Kind, Names, shape_of, with_layer
from paddleformers_fc.mapping import Shape, TensorSpec
from paddleformers_fc.text import count_text, fold


class DeclaredTensor(msgspec.Struct, frozen=True):
    """A tensor of a model that was not built.

    Args:
        name: its name in the model.
        shape: global shape.
        dtype: element type by its numpy name.
        cut: the axis that tensor parallelism cuts, if any.
        expert_axis: the axis that expert parallelism cuts, where the tensor is a stack of experts.
        numbers: the numbers in its name by placeholder, in the canonical counting: its layer, its expert.
        stage: its place in a pipeline, if it is outside of the model's layers.
        trained: whether an optimizer updates it.
    """

    name: str
    shape: Shape
    dtype: str
    cut: int | None
    expert_axis: int | None
    numbers: Mapping[str, int]
    stage: Stage
    trained: bool

    def under(self, tp: int = 1, ep: int = 1) -> ModelTensor:
        """Return the tensor as a model under these degrees of parallelism describes it.

        Args:
            tp: degree of tensor parallelism.
            ep: degree of expert parallelism.
        Raises:
            MappingError: a degree does not divide the axis that it cuts.
        """
        cuts = [1] * len(self.shape)
        for axis, degree in ((self.cut, tp), (self.expert_axis, ep)):
            if axis is None:
                continue
            cuts[axis] *= degree
            if self.shape[axis] % cuts[axis]:
                raise MappingError(
                    f"{self.name}: length {self.shape[axis]} on axis {axis} is not divisible by {cuts[axis]}.",
                    evidence=[f"shape {list(self.shape)}"],
                    next_step="Choose a degree of parallelism that divides the model.",
                )
        return ModelTensor(self.name, self.shape, self.dtype, tuple(cuts))


def enumerate_tensors(family: Family, model: ModelDescription, dtype: str = "float32") -> Iterator[DeclaredTensor]:
    """Yield every tensor of a model, in the order of the declaration.

    Args:
        family: the model's family.
        model: the model; keys that its configuration lacks are taken from the family's defaults.
        dtype: the model's dtype.
    Raises:
        MappingError: the configuration lacks a key that a size requires.
    """
    index = Names(family, structs.replace(model, adapters=None))
    for kind in index.kinds:
        yield from _of_kind(kind, index, dtype)


MAX_TENSORS = 1 << 20
"""Maximum number of tensors of one kind, such as the gates of all experts of all layers."""


def _of_kind(kind: Kind, index: Names, dtype: str) -> Iterator[DeclaredTensor]:
    statement, sizes, needed = kind.statement, kind.sizes, kind.statement.names
    holes: list[str] = PLACEHOLDER.findall(statement.target)
    # Numbers in the conditions and the shape come first, so that both are evaluated once for all experts.
    outer = [hole for hole in holes if hole in needed]
    inner = [hole for hole in holes if hole not in needed]
    if not outer and not sizes.holds(statement.where):
        return
    shifts = dict(zip(kind.holes, kind.shifts, strict=True))
    for fixed in _numberings(outer, index):
        known = with_layer(statement, sizes, fixed) if "layer" in needed else fixed
        if not sizes.holds(statement.where, known):
            continue
        shape = shape_of(statement, sizes, known)
        for rest in _numberings(inner, index):
            numbers = {**fixed, **rest}
            name = statement.target.format(**{hole: number + shifts[hole] for hole, number in numbers.items()})
            yield _declared(statement, name, shape, statement.dtype or dtype, numbers)


def _declared(statement: Statement, name: str, shape: Shape, dtype: str, numbers: Mapping[str, int]) -> DeclaredTensor:
    axis, stage = None if statement.stack is None else 0, statement.stage or Stage.LAST
    return DeclaredTensor(name, shape, dtype, statement.cut, axis, numbers, stage, statement.trained)


def _numberings(holes: list[str], index: Names) -> Iterator[dict[str, int]]:
    spans = [index.numbers(hole) for hole in holes]
    # A range of more than 2^63 numbers has no length.
    count = prod(span.stop - span.start for span in spans)
    if count > MAX_TENSORS:
        raise MappingError(
            f"{count} tensors of one kind exceed the maximum of {MAX_TENSORS}.",
            where="config.json",
            evidence=[f"{hole}: {span.stop - span.start}" for hole, span in zip(holes, spans, strict=True)],
            next_step="Correct the numbers of layers and experts in the configuration.",
        )
    for numbers in itertools.product(*spans):
        yield dict(zip(holes, numbers, strict=True))


def recognised_tensors(
    family: Family, model: ModelDescription, specs: Mapping[str, TensorSpec]
) -> list[DeclaredTensor]:
    """Return the tensors of a model that was built, with the declarations of their names.

    Conditions are not evaluated: the tensors are better evidence than a configuration.

    Args:
        family: the model's family.
        model: the model.
        specs: the model's tensors by name, global shapes.
    Raises:
        MappingError: names that no statement declares, all of them.
    """
    index = Names(family, model)
    found: list[DeclaredTensor] = []
    strange: list[str] = []
    for name, spec in specs.items():
        fitting = [one for one in index.declared(name) if one[0].statement.rank == len(spec.shape)]
        if not fitting:
            strange.append(name)
            continue
        # Several statements of one name differ in shape or in condition.
        fits = [(kind.shape(numbers) == spec.shape, kind.holds(numbers) is True) for kind, numbers in fitting]
        kind, numbers = fitting[fits.index(max(fits))]
        found.append(_declared(kind.statement, name, spec.shape, spec.dtype, numbers))
    if strange:
        raise MappingError(
            f"No statement of family {family.name} declares {count_text(len(strange), 'tensor')}.",
            evidence=fold(strange),
            next_step="Declare the tensors in the family.",
        )
    return found


def built_order(names: Iterable[str], last_parts: Sequence[str] = ()) -> list[str]:
    """Return names in the order in which a model builds its parameters, on which sharding depends.

    The parameters of a module are adjacent, and a layer has its norms last. Everything else keeps the order given.

    Args:
        names: names of parameters.
        last_parts: ``built`` of the model's family.
    """
    tree: _Node = {}
    for name in names:
        node = tree
        for piece in name.split("."):
            node = node.setdefault(piece, {})
    return list(_walked(tree, "", "", (*BUILT, *last_parts)))


_Node = dict[str, Any]


def _walked(node: _Node, name: str, last: str, sections: Sequence[str]) -> Iterator[str]:
    if not node:
        yield name
    for piece in sorted(node, key=lambda piece: _position(piece, last, sections)):
        yield from _walked(node[piece], f"{name}.{piece}" if name else piece, piece, sections)


def _position(piece: str, parent: str, sections: Sequence[str]) -> int:
    if piece.isdecimal():
        return int(piece)
    if parent == "model":
        return next((place for place, start in enumerate(sections) if piece.startswith(start)), len(sections))
    return int(parent.isdecimal() and "norm" in piece)
