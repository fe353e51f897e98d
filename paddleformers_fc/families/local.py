"""Find the whole tensor and the cut axis of one tensor-parallel rank's part, from the declaration of its family.

Formats that store what each rank held record neither. The declaration states shapes and cut axes; a part is placed only
if its own shape proves the statement. Conditions are not evaluated: the tensors are better evidence than a
configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.adapters import with_adapters
from paddleformers_fc.families.bind import family_numbers, family_sizes
from paddleformers_fc.families.declarations import Family, Statement, TargetIndex
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.mapping import Shape

_PREFIXES = {"visual.": "model.visual.", "model.": "model.language_model."}
"""Prefixes in files of Qwen 2.5 VL, and in its models."""


class LocalShapes:
    """The declared tensors of a model by name.

    Args:
        family: the model's family.
        model: the model.
    """

    def __init__(self, family: Family, model: ModelDescription) -> None:
        self._sizes = family_sizes(family, model)
        self._shifts = {
            name: self._sizes.length(one.shift)
            for name, one in family_numbers(family).items()
            if self._sizes.defines(one.shift)
        }
        self._known: dict[str, list[tuple[Statement, Shape]]] = {}
        self._index = TargetIndex((one, one) for one in with_adapters(family, model.adapters).statements)

    def name_of(self, stored: str) -> str:
        """Return the model's name of a stored weight: PaddleFormers saves some models without prefixes."""
        prefixed = [stored.replace(short, one, 1) for short, one in _PREFIXES.items() if stored.startswith(short)]
        return next((name for name in (stored, *prefixed) if self._index.find(name)[0]), stored)

    def trained(self, name: str) -> bool:
        """Return whether an optimizer updates a tensor; true for a tensor that is not declared."""
        return all(one.trained for one in self._index.find(name)[0])

    def whole(self, name: str, part: Shape, tp: int) -> tuple[Shape, int | None] | str:
        """Return the shape of a whole tensor and the axis that is cut, None if every rank has it whole.

        Args:
            name: the tensor's name in the model.
            part: the shape that a rank holds.
            tp: number of tensor-parallel ranks.
        Returns:
            shape and axis, or as text why no statement fits.
        """
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = list(self._declared(name))
        for _, shape in known:
            if shape == part:
                return shape, None
        for one, shape in known:
            if one.cut is not None and _cut(shape, one.cut, tp) == part:
                return shape, one.cut
        if not known:
            return "no statement of the family declares its shape"
        stated = "; ".join(f"{list(shape)} cut on axis {one.cut}" for one, shape in known)
        return f"{list(part)} on each of {tp} ranks, declared {stated}"

    def _declared(self, name: str) -> Iterator[tuple[Statement, Shape]]:
        statements, texts = self._index.find(name)
        for one in statements:
            shape = self._shape(one, texts)
            if shape is not None:
                yield one, shape

    def _shape(self, statement: Statement, texts: Sequence[str]) -> Shape | None:
        numbers = {
            hole: int(text) - self._shifts.get(hole, 0) for hole, text in zip(statement.numbers, texts, strict=True)
        }
        own = self._sizes.within(statement.tower)
        try:
            return tuple(own.length(size, numbers) for size in statement.shape)
        except MappingError:
            return None


def _cut(shape: Shape, axis: int, parts: int) -> Shape | None:
    """Return the shape of an equal part; None if the axis cannot be divided."""
    if shape[axis] % parts:
        return None
    return (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])
