"""The rules of statements, and the values of names: boxes of left tensors.

A statement that joins, splits, fuses or permutes tensors becomes one rule, derived from the shapes of its sources.
Numbers of heads come from the text and lengths from the tensors; they are compared before any allocation. Rules have
empty names, so a :class:`Composition` applies one rule to all tensors of a kind.

``fused_ffn`` and ``fused_qkv_old`` interleave parts in one group per tensor-parallel shard. For a source, these are the
shards of its left tensor. For a result, they are the shards of the right tensor that later statements build from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from msgspec import structs

from paddleformers_fc.aoa.expand import Name, Step
from paddleformers_fc.aoa.faults import Fault
from paddleformers_fc.aoa.syntax import FFN, QKV, QKV_PER_RANK, Fused, Join, Move
from paddleformers_fc.mapping.boxes import Shape
from paddleformers_fc.mapping.correspondences import NEW_AXIS, Composer, TensorSources, TensorSpec
from paddleformers_fc.mapping.rules import Rule, moving
from paddleformers_fc.mapping.templates import BoxLink, Template, identity, inverted

_NOTHING = TensorSources(Template(()), ())


@dataclass(frozen=True, slots=True)
class AoaTensor:
    """A tensor of one side.

    Args:
        shape: global shape, in elements.
        dtype: numpy name of the element type, such as ``bfloat16``.
        cuts: number of tensor-parallel shards along each axis.
    """

    shape: Shape
    dtype: str
    cuts: Shape

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return TensorSpec(self.shape, self.dtype)


Tensors = Mapping[str, AoaTensor]
"""The tensors of a side by name."""


def uncut(shape: Shape, dtype: str) -> AoaTensor:
    """Return a tensor that is not sharded, as in open weights."""
    return AoaTensor(shape, dtype, (1,) * len(shape))


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


class Composition:
    """Applies rules to values."""

    def __init__(self) -> None:
        self._composer = Composer()
        self._of_rules: dict[tuple[object, ...], list[tuple[Template, tuple[int, ...]]]] = {}
        self._templates: dict[tuple[object, ...], Template] = {}

    def applied(self, rule: Rule, values: Sequence[Value]) -> list[Value]:
        """Apply a rule to values and return its targets. The names of the rule are ignored.

        Args:
            rule: a rule that is valid for the shapes of the values.
            values: one per source.
        """
        shapes = rule.target_shapes(values[0].shape)
        key = (rule, *shapes)
        if key not in self._of_rules:
            self._of_rules[key] = rule.templates(shapes)
        joint = [
            self._composer.joint(template, [values[place].sources for place in kept])
            for template, kept in self._of_rules[key]
        ]
        return [Value(shape, sources or _NOTHING) for shape, sources in zip(shapes, joint, strict=True)]

    def converted(self, value: Value, cast: str) -> Value:
        """Return the value converted to a dtype.

        Raises:
            Fault: the value was already converted to another dtype; a second conversion would hide the first loss.
        """
        before = {link.cast for link in value.links} - {None, cast}
        if before:
            raise Fault(f"The value is already converted to {', '.join(sorted(map(str, before)))}.", "one conversion")
        return replace(value, sources=self._recast(value.sources, [cast] * len(value.links)))

    def without_own_casts(self, value: Value, left: Tensors) -> TensorSources:
        """Return the sources of a value, without casts to the dtype that a source already has."""
        dtypes = [left[value.sources.names[link.source]].dtype for link in value.links]
        casts = [None if link.cast == dtype else link.cast for link, dtype in zip(value.links, dtypes, strict=True)]
        return self._recast(value.sources, casts)

    def _recast(self, sources: TensorSources, casts: Sequence[str | None]) -> TensorSources:
        links = sources.template.links
        if all(link.cast == cast for link, cast in zip(links, casts, strict=True)):
            return sources
        key = (sources.template, *casts)
        if key not in self._templates:
            self._templates[key] = Template(
                tuple(structs.replace(link, cast=cast) for link, cast in zip(links, casts, strict=True))
            )
        return TensorSources(self._templates[key], sources.names)

    def reshaped(self, value: Value, blocks: Shape, shape: Shape) -> Value:
        """Return the value with an axis of blocks, or with the rows of all blocks concatenated.

        Args:
            value: the value, in either form.
            blocks: the shape with the axis of blocks.
            shape: the shape of the result.
        Raises:
            Fault: the value or the result has neither of the two shapes.
        """
        rows = (blocks[0] * blocks[1], prod(blocks[2:]))
        if not {value.shape, shape} <= {blocks, rows}:
            raise Fault(
                f"reshape goes between {list(rows)} and {list(blocks)}, not from {list(value.shape)} to {list(shape)}."
            )
        if value.shape == shape:
            return value
        key = (blocks, shape == blocks)
        if key not in self._templates:
            unfolded = value_of("", rows)
            for axis in (0, *range(2, len(blocks) - 1)):
                unfolded = self._unfolded(unfolded, axis, blocks[axis])
            template = unfolded.sources.template
            self._templates[key] = template if shape == blocks else inverted([(template, 0)], None)
        return Value(shape, self._composer.joint(self._templates[key], [value.sources]) or _NOTHING)

    def _unfolded(self, value: Value, axis: int, count: int) -> Value:
        """Split one axis of the value into two, the first with length ``count``."""
        rank, parts = len(value.shape), ("",) * count
        split = Rule(("",), parts, (value.shape[axis] // count,) * count, axis, tuple(range(rank)))
        stack = Rule(parts, ("",), (1,) * count, axis, (*range(axis), NEW_AXIS, *range(axis, rank)))
        return self.applied(stack, self.applied(split, [value]))[0]


def permuting(shape: Shape, axes: Shape) -> Rule | None:
    """Return the rule that permutes the axes of a tensor; None for a tensor without axes.

    Args:
        shape: shape of the tensor.
        axes: for every axis of the result the axis that it reads; empty for all axes reversed.
    Raises:
        Fault: the number of axes differs.
    """
    axes = axes or tuple(reversed(range(len(shape))))
    if len(axes) != len(shape):
        cause = f"permute={list(axes)} has {len(axes)} axes, the tensor has shape {list(shape)}."
        raise Fault(cause, f"an order of {list(range(len(shape)))}")
    return moving("", "", tuple(shape[axis] for axis in axes), axes) if axes else None


def joining(shapes: Sequence[Shape], into: int, join: Join) -> Rule:
    """Return the rule that concatenates tensors, or splits one tensor into equal lengths.

    Raises:
        Fault: the shapes differ on another axis, or the length is not divisible.
    """
    if into == 1:
        return _along(shapes, tuple(_length(shape, join.axis) for shape in shapes), into, join.axis)
    length = _length(shapes[0], join.axis)
    if length % into:
        cause = f"Length {length} on axis {join.axis} is not divisible into {into} equal lengths."
        again = "`a -> a[0:7], axis=0` and then `a[0:2] -> b, axis=0`"
        raise Fault(cause, f"equal lengths; for unequal ones, split into more names and join them: {again}")
    return _along(shapes, (length // into,) * into, into, join.axis)


def fusing(shapes: Sequence[Shape], into: int, layout: Fused, groups: tuple[int, int]) -> Rule:
    """Return the rule between separate parts and fused tensors, in either direction.

    Args:
        shapes: one shape per part, or the shape of a single tensor with all parts.
        into: the number of results: one per part, or 1.
        layout: the operation.
        groups: the number of groups of a single source, and of a single result.
    Raises:
        Fault: the lengths are not valid for the layout.
    """
    axis, counts = layout.axis, layout.counts
    parts = _parts(shapes, axis, counts)
    if layout.kind == FFN and parts[0] != parts[1]:
        raise Fault(f"Gate and up have different lengths {list(parts)} on axis {axis}.")
    if layout.kind == QKV:
        for part, count in zip(parts, counts, strict=True):
            if part % count:
                raise Fault(f"Length {part} on axis {axis} is not divisible into {count} heads.")
    if layout.kind == QKV_PER_RANK:
        head = parts[0] // counts[0]
        if parts != tuple(count * head for count in counts):
            listed = f"{counts[0]}, {counts[1]} and {counts[2]}"
            raise Fault(f"Lengths {list(parts)} on axis {axis} are not {listed} heads of one size.")
        for rounds in groups:
            if any(count % rounds for count in counts):
                raise Fault(f"{counts[0]} query and {counts[1]} kv heads are not divisible among {rounds} ranks.")
    for part, rounds in product(parts, groups):
        if part % rounds:
            raise Fault(f"Length {part} on axis {axis} is not divisible among {rounds} ranks.")
    return _along(shapes, parts, into, axis, groups)


def _along(shapes: Sequence[Shape], parts: Shape, into: int, axis: int, groups: tuple[int, int] = (1, 1)) -> Rule:
    """Return the rule of parts along an axis, after checking that the shapes agree on all other axes."""
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
        shown = " and ".join(str(list(shape)) for shape in shapes[:4])
        raise Fault(f"Shapes {shown} differ on axes other than {axis}.")
    return Rule(("",) * len(shapes), ("",) * into, parts, axis, tuple(range(len(shapes[0]))), *groups)


def _parts(shapes: Sequence[Shape], axis: int, counts: Shape) -> Shape:
    """Return the length of each part along an axis. A single tensor contains all parts, in the ratio of ``counts``."""
    if len(shapes) > 1:
        return tuple(_length(shape, axis) for shape in shapes)
    length, total = _length(shapes[0], axis), sum(counts)
    if length % total:
        raise Fault(f"Length {length} on axis {axis} is not divisible into {total} equal lengths.")
    return tuple(length // total * count for count in counts)


def _length(shape: Shape, axis: int) -> int:
    if axis >= len(shape):
        accepted = f"axis={len(shape) - 1}" if shape else "a tensor with axes"
        raise Fault(f"Shape {list(shape)} has no axis {axis}.", accepted)
    return shape[axis]


Shards = tuple[str, Shape] | str
"""A tensor and its shards on each axis; or why they are ambiguous; or an empty text if no tensor is known."""


def shards_written(steps: Sequence[Step], right: Tensors) -> list[Shards]:
    """Return, for every step, the shards of the right tensor that later steps build from its first result."""
    later: dict[str, Shards] = {}
    found: list[Shards] = []
    for step in reversed(steps):
        name = step.right[0]
        shards: Shards = (name, right[name].cuts) if name in right else later.get(name, "")
        found.append(shards)
        for left in step.left:
            later[left.text] = _shards_before(step, left, shards)
    return found[::-1]


def _shards_before(step: Step, left: Name, shards: Shards) -> Shards:
    """Return the shards of a source of a step, from the shards of its result."""
    move = step.operation if isinstance(step.operation, Move) else Move()
    if len(step.right) > 1 or move.reshape:
        return f"{left.text} is {'reshaped' if move.reshape else 'split'} later"
    if isinstance(shards, str):
        return shards
    name, cuts = shards
    if move.permute and len(move.permute) == len(cuts):
        cuts = tuple(cuts[move.permute.index(axis)] for axis in range(len(cuts)))
    return name, cuts[::-1] if left.transposed != (move.permute == ()) else cuts


def groups_of(shards: Shards, axis: int) -> int:
    """Return the number of shards along an axis.

    Raises:
        Fault: another axis is cut, or the shards are ambiguous.
    """
    if isinstance(shards, str):
        if shards:
            raise Fault(f"{shards}: the shards are ambiguous.", "a name that is not split")
        return 1
    name, cuts = shards
    others = [other for other, count in enumerate(cuts) if count > 1 and other != axis]
    if others:
        cause = f"The parts of {name} are on axis {axis}, and tensor parallelism cuts {name} on axis {others[0]}."
        raise Fault(cause, "statements that join and split by `axis=`, which do not depend on shards")
    return cuts[axis] if 0 <= axis < len(cuts) else 1


def groups_read(value: Value, axis: int, left: Tensors) -> int:
    """Return the number of shards of a value's left tensor, along an axis of the value.

    Raises:
        Fault: the value comes from several tensors, or the tensor is cut on another axis.
    """
    origins = {(value.sources.names[link.source], link.axes) for link in value.links}
    if len(origins) != 1:
        names = ", ".join(sorted(set(value.sources.names))[:3])
        raise Fault(f"The source consists of {names}: the shards are ambiguous.", "a name that comes from one tensor")
    ((source, axes),) = origins
    return groups_of((source, left[source].cuts), axes[axis]) if axis < len(axes) else 1
