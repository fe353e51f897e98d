"""Enumerate the tensors of a configuration from a family's declaration: names, shapes, dtypes and cut axes.

The enumeration is for cases without a model: proving a family, or simulating a layout. A real model is bound by its own
tensors. :func:`built_order` derives the order in which a model builds its parameters from their names.

Linear in the tensors. Sizes and conditions are evaluated once per kind of tensor, or per layer if they depend on its
number.
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
from paddleformers_fc.families.sizes import Size
from paddleformers_fc.mapping import Shape, TensorSpec
from paddleformers_fc.text import count_text, fold


class DeclaredTensor(msgspec.Struct, frozen=True):
    """A tensor of a model that was not built.

    Args:
        name: its name in the model.
        shape: global shape.
        dtype: numpy name of the element type.
        cut: the axis that tensor parallelism cuts, if any.
        expert_axis: the axis that expert parallelism cuts, if the tensor is a stack of experts.
        numbers: the canonical numbers in its name by placeholder, such as its layer and its expert.
        stage: its pipeline stage if it is outside of the model's layers.
        trained: whether an optimizer updates it.
        cut_size: the declared size of the axis that tensor parallelism cuts; None without one, and in towers, which
            have sizes of their own.
    """

    name: str
    shape: Shape
    dtype: str
    cut: int | None
    expert_axis: int | None
    numbers: Mapping[str, int]
    stage: Stage
    trained: bool
    cut_size: Size | None = None

    def under(self, tp: int = 1, ep: int = 1) -> ModelTensor:
        """Return the tensor as it is sharded under these degrees of parallelism.

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
        model: the model; the family's defaults replace missing keys of its configuration.
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
    # Numbers that conditions and shape depend on come first, so that both are evaluated once for all experts.
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
    size = None
    if statement.cut is not None and statement.shape and not statement.tower:
        size = statement.shape[statement.cut]
    return DeclaredTensor(name, shape, dtype, statement.cut, axis, numbers, stage, statement.trained, size)


def _numberings(holes: list[str], index: Names) -> Iterator[dict[str, int]]:
    spans = [index.numbers(hole) for hole in holes]
    # len() fails for a range of more than 2^63 numbers.
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
    """Return the tensors of a built model, with the declarations of their names.

    Conditions are not evaluated: the tensors are better evidence than a configuration.

    Args:
        family: the model's family.
        model: the model.
        specs: the model's tensors by name, with global shapes.
    Raises:
        MappingError: no statement declares some of the names; the error lists all of them.
    """
    index = Names(family, model)
    found: list[DeclaredTensor] = []
    undeclared: list[str] = []
    for name, spec in specs.items():
        fitting = [one for one in index.declared(name) if one[0].statement.rank == len(spec.shape)]
        if not fitting:
            undeclared.append(name)
            continue
        # Statements of one name differ in shape or in conditions.
        fits = [(kind.shape(numbers) == spec.shape, kind.holds(numbers) is True) for kind, numbers in fitting]
        kind, numbers = fitting[fits.index(max(fits))]
        found.append(_declared(kind.statement, name, spec.shape, spec.dtype, numbers))
    if undeclared:
        raise MappingError(
            f"No statement of family {family.name} declares {count_text(len(undeclared), 'tensor')}.",
            evidence=fold(undeclared),
            next_step="Declare the tensors in the family.",
        )
    return found


def built_order(names: Iterable[str], last_parts: Sequence[str] = ()) -> list[str]:
    """Return names in the order in which a model builds its parameters, which sharding depends on.

    The parameters of a module are adjacent, and the norms of a layer come last. Otherwise the given order is kept.

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
