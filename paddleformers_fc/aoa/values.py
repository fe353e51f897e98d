"""The value of a name during evaluation: a shape, and the boxes of left tensors that fill it.

Operations make values from values by composing the templates of rules, once per kind of tensor.

The tensors of a side, as far as the language depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.mapping.boxes import Shape, whole
from paddleformers_fc.mapping.correspondences import Composer, TensorSources, TensorSpec
from paddleformers_fc.mapping.rules import Rule
from paddleformers_fc.mapping.templates import BoxLink, Template, identity

_NOTHING = TensorSources(Template(()), ())


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that consists of boxes of left tensors.

    Args:
        shape: its shape, in elements.
        sources: the boxes that fill it, each element once.
    """

    shape: Shape
    sources: TensorSources

    @property
    def links(self) -> tuple[BoxLink, ...]:
        """Every box."""
        return self.sources.template.links

    def dtypes(self, left: Tensors) -> set[str]:
        """Return the dtypes of the boxes."""
        return {link.cast or left[self.sources.names[link.source]].dtype for link in self.links}


def value_of(name: str, shape: Shape) -> Value:
    """Return the value of a left tensor."""
    return Value(shape, TensorSources(identity(shape), (name,)))


class Operations:
    """The operations of the language on values."""

    def __init__(self) -> None:
        self._composer = Composer()
        self._templates: dict[tuple[object, ...], list[tuple[Template, tuple[int, ...]]]] = {}

    def permuted(self, value: Value, axes: Shape) -> Value:
        """Return the value with its axes in another order.

        Args:
            value: the source.
            axes: for every axis of the result the axis that it reads; empty for all axes reversed.
        Raises:
            Fault: the value has another number of axes.
        """
        axes = axes or tuple(reversed(range(len(value.shape))))
        if len(axes) != len(value.shape):
            raise Fault(
                f"permute={list(axes)} has {len(axes)} axes, the tensor has shape {list(value.shape)}.",
                f"an order of {list(range(len(value.shape)))}",
            )
        return self._moved(value, axes, None)

    def converted(self, value: Value, cast: str) -> Value:
        """Return the value converted to a dtype.

        Raises:
            Fault: the value was converted to another dtype before. A second conversion would hide the loss of the
                first.
        """
        before = {link.cast for link in value.links} - {None, cast}
        if before:
            raise Fault(f"The value is already converted to {', '.join(sorted(map(str, before)))}.", "one conversion")
        return self._moved(value, tuple(range(len(value.shape))), cast)

    def _moved(self, value: Value, axes: Shape, cast: str | None) -> Value:
        shape, key = tuple(map(value.shape.__getitem__, axes)), (value.shape, axes, cast)
        if key not in self._templates:
            self._templates[key] = [(Template((BoxLink(0, whole(value.shape), whole(shape), axes, cast),)), (0,))]
        return self._made(self._templates[key], [value], [shape])[0]

    def interleaved(
        self, values: Sequence[Value], parts: Shape, axis: int, groups: tuple[int, int], into: int, fused: Shape
    ) -> list[Value]:
        """Rearrange values that contain ``parts`` along an axis: the operation of joins, splits and fused layouts.

        Args:
            values: one per part, or one for all parts.
            parts: length of every part.
            axis: the axis of the parts.
            groups: the number of groups in which a single value interleaves its parts, and a single result.
            into: number of results: one per part, or 1.
            fused: the shape of a result, apart from its length along ``axis``.
        """
        lengths = parts if into > 1 else (sum(parts),)
        shapes = [(*fused[:axis], length, *fused[axis + 1 :]) for length in lengths]
        key = (len(values), parts, axis, groups, into, fused)
        if key not in self._templates:
            rule = Rule(("",) * len(values), ("",) * into, parts, axis, tuple(range(len(fused))), *groups)
            self._templates[key] = rule.templates(shapes)
        return self._made(self._templates[key], values, shapes)

    def _made(
        self, templates: list[tuple[Template, tuple[int, ...]]], values: Sequence[Value], shapes: Sequence[Shape]
    ) -> list[Value]:
        joint = [self._composer.joint(one, [values[place].sources for place in kept]) for one, kept in templates]
        return [Value(shape, sources or _NOTHING) for shape, sources in zip(shapes, joint, strict=True)]


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
